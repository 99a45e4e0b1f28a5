"""Recording from inside a trainer: in the background, with a deadline, and at no cost when the database is dead (S4).

Whatever is not recorded here is found later: `ckpt scan ROOT --adopt` rebuilds the catalog from storage.
"""

from __future__ import annotations

import logging
import shlex
import threading
from collections import deque
from contextlib import suppress

from catalog.catalog import Catalog, default_actor
from catalog.notify import api_url, committed_event, post_event
from catalog.rows import CheckpointRow
from ckptlib.errors import CkptError, DatabaseLockedError, NoCatalogError
from ckptlib.events import AttemptEvent, CommitEvent

log = logging.getLogger("catalog")

Pending = AttemptEvent | CommitEvent

RETRY = 5.0
RETRY_LIMIT = 60.0


class Recorder:
    """A `ckptlib.events.CommitListener` that records attempts and commits in a catalog.

    A daemon thread does the work, one event after the other. While the database cannot be used, events wait here
    and are tried again, after some seconds and with each new event; when more than `capacity` wait, the oldest are
    given up. An outage is logged once.

    Args:
        db_url: as for `Catalog`.
        deadline: seconds that one try may wait for a locked or unreachable database, and a notification for its
            answer.
        notify_url: API of a Prefect server to wake after each record; None for ``PREFECT_API_URL``, and nobody when
            that is unset.
        capacity: how many events may wait.
        actor: for the history.
    """

    def __init__(
        self,
        db_url: str | None = None,
        *,
        deadline: float = 5.0,
        notify_url: str | None = None,
        capacity: int = 256,
        actor: str | None = None,
    ) -> None:
        self._db_url = db_url
        self._deadline = deadline
        self._notify_url = notify_url if notify_url is not None else api_url()
        self._capacity = capacity
        self._actor = actor or default_actor()
        self._changed = threading.Condition()
        self._pending: deque[Pending] = deque()
        self._closing = False
        self._thread: threading.Thread | None = None
        # Of the worker thread alone:
        self._catalog: Catalog | None = None
        self._failures = 0
        self._unheard = False

    def attempt_started(self, event: AttemptEvent) -> None:
        """Returns at once and never raises."""
        self._put(event)

    def committed(self, event: CommitEvent) -> None:
        """Returns at once and never raises."""
        self._put(event)

    @property
    def pending(self) -> int:
        """How many events wait to be recorded."""
        with self._changed:
            return len(self._pending)

    def close(self, timeout: float) -> None:
        """Waits up to `timeout` seconds until everything is recorded. A later event starts the work again."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(max(0.0, timeout))
        with self._changed:
            left = list(self._pending)
        if left:
            log.warning("%d events were not recorded within %.1f s; %s", len(left), timeout, _advice(left[0]))

    def _put(self, event: Pending) -> None:
        with self._changed:
            if len(self._pending) >= self._capacity:
                lost = self._pending.popleft()
                log.warning("more than %d events wait for the catalog; gave one up; %s", self._capacity, _advice(lost))
            self._pending.append(event)
            self._closing = False
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="ckpt-recorder", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no thread to be had, or the interpreter is going down
                    log.warning("cannot record in the background (%s); %s", error, _advice(event))
                    return
                self._thread = thread
            self._changed.notify_all()

    # ------------------------------------------------------------ the worker thread

    def _work(self) -> None:
        while True:
            self._drain()
            self._forget_catalog()
            with self._changed:
                # An event that came while this thread was ending found it alive, and relies on it.
                if self._closing or not self._pending:
                    self._thread = None
                    return

    def _drain(self) -> None:
        """Records events until the recorder is being closed, and none is left or the last try failed."""
        while (event := self._next()) is not None:
            if self._try(event):
                with self._changed, suppress(ValueError):  # it may have been given up meanwhile
                    self._pending.remove(event)
            elif not self._wait_for_retry():
                return

    def _next(self) -> Pending | None:
        """The oldest event; None when there is none and the recorder is being closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or bool(self._pending))
            return self._pending[0] if self._pending else None

    def _wait_for_retry(self) -> bool:
        """Waits after a failure, or until there is a new event; False when the recorder is being closed."""
        with self._changed:
            waiting = len(self._pending)
            pause = min(RETRY * 2 ** (self._failures - 1), RETRY_LIMIT)
            closing = self._closing
            self._changed.wait_for(lambda: self._closing or len(self._pending) != waiting, 0 if closing else pause)
            return not closing

    def _try(self, event: Pending) -> bool:
        """Records one event; False to try again later."""
        try:
            self._record(event)
        except (NoCatalogError, DatabaseLockedError) as error:
            self._failures = min(self._failures + 1, 16)
            if self._failures == 1:
                log.warning("catalog: %s Training goes on; %s", error, _advice(event))
            self._forget_catalog()
            return False
        except Exception as error:
            # A trainer must not die of its bookkeeping. This event fails every time, so it is not tried again.
            log.warning(
                "catalog: not recorded: %s; %s", error, _advice(event), exc_info=not isinstance(error, CkptError)
            )
            self._forget_catalog()
            return True
        if self._failures:
            log.warning("catalog: works again")
        self._failures = 0
        return True

    def _record(self, event: Pending) -> None:
        if self._catalog is None:
            self._catalog = Catalog(self._db_url, timeout=self._deadline)
        if isinstance(event, AttemptEvent):
            self._catalog.record_attempt(event, actor=self._actor)
        else:
            self._notify(self._catalog.record(event, actor=self._actor))

    def _notify(self, row: CheckpointRow) -> None:
        if self._notify_url is None:
            return
        try:
            post_event(committed_event(row), self._notify_url, timeout=self._deadline)
        except (OSError, ValueError) as error:
            if not self._unheard:
                log.warning("%s: nobody was woken to verify it (%s); the schedule will find it", row.name, error)
            self._unheard = True
        else:
            self._unheard = False

    def _forget_catalog(self) -> None:
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None


def _advice(event: Pending) -> str:
    """What to do about an event that is not recorded."""
    root = event.root_url if event.root_url is not None else event.url.rstrip("/").rpartition("/")[0]
    return f"record it later with `ckpt scan {shlex.quote(root)} --adopt`"
