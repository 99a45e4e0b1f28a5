"""The line of uploads of one worker: which is tried next."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from ckptlib.uploading import UploadJob, UploadReport, UploadRun


class Uploader:
    """Uploads one checkpoint after the other, in a thread of its own: no save waits for it. One that fails is tried
    again after those that wait.

    Args:
        report: called with what is said of uploads, in that thread.
    """

    def __init__(self, report: Callable[[UploadReport], None]) -> None:
        self._report = report
        self._line: list[tuple[UploadRun, float]] = []  # and when it may be tried, by `time.monotonic`
        self._change = threading.Condition()
        self._closed_at: float | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: UploadJob) -> None:
        """Takes an upload, after those before it."""
        self._wait_in_line(UploadRun(job), time.monotonic())
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ckptlib-uploads", daemon=True)
            self._thread.start()

    def close(self, timeout: float | None) -> bool:
        """Waits until everything that was submitted has ended; False: not within `timeout` seconds, and it goes on.

        What fails from now on is tried again for `UploadOptions.give_up_after` seconds, all together.
        """
        with self._change:
            if self._closed_at is None:
                self._closed_at = time.monotonic()
            self._change.notify_all()
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _wait_in_line(self, run: UploadRun, at: float) -> None:
        with self._change:
            self._line.append((run, at))
            self._change.notify_all()

    def _next(self) -> UploadRun | None:
        """The first in line that may be tried, when there is one; None: there will be none."""
        with self._change:
            while self._line or self._closed_at is None:
                now = time.monotonic()
                for place, (run, at) in enumerate(self._line):
                    if at <= now:
                        del self._line[place]
                        return run
                self._change.wait(min(at for _, at in self._line) - now if self._line else None)
            return None

    def _work(self) -> None:
        while (run := self._next()) is not None:
            closed_at = self._closed_at
            report = run.attempt(math.inf if closed_at is None else closed_at + run.job.give_up_after)
            if report.again_in is not None:
                self._wait_in_line(run, time.monotonic() + report.again_in)
            self._report(report)
