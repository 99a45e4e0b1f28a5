"""One rank's uploads from the first tier to the durable location: handed to its worker, and what became of them."""

from __future__ import annotations

from collections.abc import Callable

from ckptlib import roots
from ckptlib.announcing import Announcer
from ckptlib.events import Notice, NoticeHandler, emit
from ckptlib.locations import Opened, Tier
from ckptlib.manifest import Begin
from ckptlib.upload_options import UploadOptions
from ckptlib.uploading import UploadJob, UploadReport
from ckptlib.workshop import Upload


class Uploads:
    """One rank's uploads. Its methods are for one thread at a time.

    Args:
        hand_over: gives an upload to the worker; raises `OSError` when there can be none.
        number: a number for the next job.
        wait_for: waits for a condition that a worker's report may change, up to some seconds.
        announcer: tells listeners of what is durable; on rank 0.
    """

    def __init__(
        self,
        options: UploadOptions,
        first: Tier,
        durable: Tier,
        rank: int,
        world_size: int,
        opened: Opened,
        announcer: Announcer,
        *,
        moves_tracker: bool,
        commit_timeout: float,
        heartbeat: float,
        hand_over: Callable[[Upload], None],
        number: Callable[[], int],
        wait_for: Callable[[Callable[[], bool], float | None], bool],
        on_event: NoticeHandler | None,
    ) -> None:
        self._options = options
        self._first = first
        self._durable = durable
        self._rank = rank
        self._world_size = world_size
        self._opened = opened
        self._announcer = announcer
        self._moves_tracker = moves_tracker
        self._commit_timeout = commit_timeout
        self._heartbeat = heartbeat
        self._hand_over = hand_over
        self._number = number
        self._wait_for = wait_for
        self._on_event = on_event
        self._uploads: list[Upload] = []
        self._given_up: set[str] = set()
        self._newest = -1

    def submit(self, begin: Begin) -> None:
        """A save has begun: its checkpoint is uploaded once it is committed. Never raises (S4)."""
        if begin.kind not in self._options.kinds or begin.piece is not None:
            return
        is_newest = begin.iteration >= self._newest or begin.attempt < self._opened.attempt.number
        if begin.attempt == self._opened.attempt.number:
            self._newest = max(self._newest, begin.iteration)
        upload = Upload(
            UploadJob(
                number=self._number(),
                begin=begin,
                attempt_id=self._opened.attempt.attempt_id,
                rank=self._rank,
                world_size=self._world_size,
                url=self._first.storage.url(roots.iteration_path(self._first.root, begin.iteration, begin.kind)),
                root=self._first.url,
                storage_options=self._first.options,
                target=self._durable.url,
                target_options=self._durable.options,
                single_writer=self._options.single_writer,
                moves_tracker=self._moves_tracker and is_newest,
                commit_timeout=self._commit_timeout,
                keep=self._options.keep,
                limit=self._options.limit,
                give_up_after=self._options.give_up_after,
                heartbeat=self._heartbeat,
            )
        )
        try:
            self._hand_over(upload)
        except Exception as error:  # noqa: BLE001 - whatever keeps a worker from starting
            upload.outcome = UploadReport(upload.job.number, error=f"{type(error).__name__}: {error}")
            upload.reports.append(upload.outcome)
        self._uploads.append(upload)

    def in_flight(self) -> list[Begin]:
        """The saves whose upload has not ended on this rank, in the order in which they are uploaded."""
        return [upload.job.begin for upload in self._uploads if upload.outcome is None]

    def wait(self, timeout: float | None) -> bool:
        """Waits until nothing is in flight; False: not within `timeout` seconds."""
        return self._wait_for(lambda: not self.in_flight(), timeout)

    @property
    def is_clean(self) -> bool:
        """Whether nothing that was told of has been given up."""
        return not self._given_up

    def settle_ended(self) -> None:
        """Tells of what has become of uploads since the last call."""
        for upload in list(self._uploads):
            while upload.reports:
                self._tell(upload.job.begin, upload.reports.pop(0))
            if upload.outcome is not None and not upload.reports:
                self._uploads.remove(upload)

    def tell_unfinished(self) -> None:
        """Tells of what is not durable when the job ends."""
        for begin in self.in_flight():
            text = (
                f"iteration {begin.iteration} is not durable at {self._durable.url} yet; a worker process goes on, and "
                "the next attempt uploads what is lacking"
            )
            emit(self._on_event, Notice("upload_unfinished", text, {"iteration": begin.iteration}))

    def _tell(self, begin: Begin, report: UploadReport) -> None:
        what = {"iteration": begin.iteration, "save_id": begin.save_id}
        if report.error is not None:
            then = "given up" if report.again_in is None else f"tried again in {report.again_in:g} s"
            text = f"iteration {begin.iteration} to {self._durable.url}, {then}: {report.error}"
            name = "upload_lost" if report.lost else "upload_failed"
            emit(self._on_event, Notice(name, text, {**what, "again_in": report.again_in}))
            if report.is_last:
                self._given_up.add(begin.save_id)
            return
        if report.decision is None:
            return
        self._given_up.discard(begin.save_id)
        if self._rank != 0:
            return
        text = f"iteration {begin.iteration} is durable at {self._durable.url} after {report.seconds:.1f} s"
        emit(self._on_event, Notice("uploaded", text, {**what, "bytes": report.sent, "seconds": report.seconds}))
        path = roots.iteration_path(self._durable.root, begin.iteration, begin.kind)
        event = self._announcer.commit_event(
            self._opened.durable, path, begin.save_id, report.decision, report.manifest
        )
        if event is not None:
            if begin.attempt == self._opened.attempt.number:
                self._announcer.announce(
                    self._opened.durable, self._opened.attempt, begin.run, begin.topology, begin.parent
                )
            self._announcer.tell_of_commit(event)
