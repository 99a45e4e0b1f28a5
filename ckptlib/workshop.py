"""What a process keeps from one asynchronous save to the next: staging memory, a worker, and saves that are written.

There is one for each root that the process saves to. A `Checkpointer` that is made anew in the same process, after its
process group was rebuilt, finds the warm memory and the worker of the one before.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from ckptlib.async_options import AsyncOptions
from ckptlib.background import Job, Outcome, give_up, run_job, take_in_hand
from ckptlib.beats import Pulse
from ckptlib.copying import Copier, Pair, default_threads
from ckptlib.errors import StagingError, StateError
from ckptlib.staging import Arena, Pool
from ckptlib.uploader import Uploader
from ckptlib.uploading import UploadJob, UploadReport
from ckptlib.worker import Consumed, Report, SliceSupply, Staged, WorkerProcess, Written

log = logging.getLogger("ckptlib")

TRIES = 2
"""Workers that a save may have: one that is killed is replaced; what kills two may be the save itself."""


@dataclass
class Flight:
    """A save between its staging and its end.

    Attributes:
        arena: where it is staged; it is the pool's again when `held` is False.
        consumed: slices that the worker has done with.
        tries: workers that have had it.
    """

    job: Job
    arena: Arena
    nbytes: int
    held: bool = True
    consumed: int = 0
    tries: int = 1
    outcome: Outcome | None = None
    ended: threading.Event = field(default_factory=threading.Event)


@dataclass
class Upload:
    """A checkpoint on its way to the durable location.

    Attributes:
        tries: workers that have had it.
        reports: what was said of it, oldest first.
        outcome: the last word; None: it goes on.
    """

    job: UploadJob
    tries: int = 1
    reports: list[UploadReport] = field(default_factory=list)
    outcome: UploadReport | None = None


class Worker(Protocol):
    """Where jobs are done; see `worker.WorkerProcess`."""

    def add_arena(self, number: int, arena: Arena) -> None: ...

    def drop_arena(self, number: int) -> None: ...

    def submit(self, job: Job) -> None: ...

    def upload(self, job: UploadJob) -> None: ...

    def staged(self, message: Staged) -> None: ...

    def close(self, timeout: float | None) -> bool: ...


class WorkerThread:
    """A worker in this process."""

    def __init__(self, receive: Callable[[Report | None], None]) -> None:
        self._receive = receive
        self._arenas: dict[int, Arena] = {}
        self._jobs: queue.Queue[tuple[Job, Pulse] | None] = queue.Queue()
        self._supply = SliceSupply(receive)
        self._uploader = Uploader(receive)
        self._thread = threading.Thread(target=self._work, name="ckptlib-writer", daemon=True)
        self._thread.start()

    def add_arena(self, number: int, arena: Arena) -> None:
        self._arenas[number] = arena

    def drop_arena(self, number: int) -> None:
        self._arenas.pop(number, None)

    def submit(self, job: Job) -> None:
        self._jobs.put((job, take_in_hand(job)))

    def upload(self, job: UploadJob) -> None:
        self._uploader.submit(job)

    def staged(self, message: Staged) -> None:
        self._supply.staged(message)

    def close(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._jobs.put(None)
        self._thread.join(timeout)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return self._uploader.close(left) and not self._thread.is_alive()

    def _work(self) -> None:
        while (handed := self._jobs.get()) is not None:
            job, pulse = handed
            written = functools.partial(self._receive, Written(job.number))
            self._receive(run_job(job, self._arenas.get(job.arena), written, pulse, self._supply.of(job)))


class Workshop:
    """One rank's memory and worker. Its methods are for one thread, the trainer's or one that it waits for."""

    def __init__(self, options: AsyncOptions) -> None:
        self.options = options
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        self.pool = Pool(options.max_in_flight, options.staging_budget)
        self._copier: Copier | None = None
        self._works: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._known: dict[Arena, int] = {}  # arenas that the worker has, and their numbers
        self._arenas = 0
        self._next = 0
        self._flights: list[Flight] = []
        self._uploads: list[Upload] = []
        self._change = threading.Condition()
        self._worker: Worker | None = None
        self._closed = False

    @property
    def worker(self) -> Worker | None:
        """The worker; None: none has been needed, or the last one has ended."""
        return self._worker

    def prepare(self, nbytes: int, least: int) -> None:
        """Starts the worker and makes the arenas; see `Pool.prepare`.

        Raises:
            StagingError: there is not so much memory.
        """
        self._start()
        self.pool.prepare(nbytes, least)

    def copy(self, pairs: Sequence[Pair], *, alone: bool, ready: Sequence[torch.cuda.Event] = ()) -> None:
        """Copies to staging memory; see `Copier`. `alone`: with the calling thread only."""
        if self._copier is None:
            threads = self.options.copy_threads
            self._copier = Copier(default_threads() if threads is None else threads)
        self._copier.copy(pairs, alone=alone, ready=ready)

    def beside(self, work: Callable[[], None]) -> None:
        """Has a thread do something, after what it was given before. It is kept: to start one takes its caller longer
        than the rest of an overlapped save. As a daemon it keeps no process whose ranks are gone from ending.
        """
        if self._works is None:
            self._works = queue.SimpleQueue()
            threading.Thread(target=_do, args=(self._works,), name="ckptlib-overlap", daemon=True).start()
        self._works.put(work)

    def number_job(self) -> int:
        """A number for the next job."""
        self._next += 1
        return self._next

    def take_off(self, flight: Flight) -> None:
        """Hands a save to the worker.

        Raises:
            OSError: no worker can be started.
        """
        with self._change:
            if self._closed:
                raise StateError("this Checkpointer was closed while a save was being staged")
            self._flights.append(flight)
            try:
                self._hand_over(flight)
            except BaseException:
                self._forget(flight)
                raise

    def upload(self, upload: Upload) -> None:
        """Hands an upload to the worker.

        Raises:
            OSError: no worker can be started.
        """
        with self._change:
            if self._closed:
                raise StateError("this Checkpointer is closed")
            worker = self._start()
            self._uploads.append(upload)
            with contextlib.suppress(OSError):  # it has ended just now: another one gets the upload
                worker.upload(upload.job)

    def supply(self, flight: Flight, slice_: int) -> None:
        """Says that a further slice of a save is staged."""
        worker = self._worker
        if worker is not None:
            with contextlib.suppress(OSError):  # it has ended: whoever hears of that ends the save
                worker.staged(Staged(flight.job.number, slice_))

    def wait_consumed(self, flight: Flight, slices: int) -> None:
        """Waits until the first `slices` slices of a save are not read any more.

        Raises:
            StagingError: the save has ended before, or the storage does not take them.
        """
        timeout = self.options.commit_timeout
        with self._change:
            moved = self._change.wait_for(lambda: flight.consumed >= slices or flight.outcome is not None, timeout)
        if flight.outcome is not None:
            raise StagingError(f"the save ended while it was staged: {flight.outcome.error}")
        if not moved:
            raise StagingError(f"the storage has not taken a slice of the state within {timeout:g} s (commit_timeout)")

    def call_back(self, flight: Flight) -> None:
        """Takes back a save that could not be staged to its end; of a save that never took off, its memory."""
        worker = self._worker
        if worker is not None and flight in self._flights:
            with contextlib.suppress(OSError):
                worker.staged(Staged(flight.job.number, None))
        else:
            self._forget(flight)

    def has_room(self) -> bool:
        """Whether a further save may be staged."""
        return len(self._flights) < self.options.max_in_flight and self.pool.has_room

    def wait_for(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until `done()`, asked after every report of the worker; False: not within `timeout` seconds."""
        with self._change:
            return self._change.wait_for(done, timeout)

    def close(self, user: object, timeout: float | None) -> None:
        """A user has no more saves; after the last one the worker may end when it has done what it has."""
        self.users.discard(user)
        if self.users or self._closed:
            return
        for root in [root for root, shop in _workshops.items() if shop is self]:
            del _workshops[root]
        with self._change:
            self._closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close(timeout)
        self.pool.close()
        if self._copier is not None:
            self._copier.close()
        if self._works is not None:
            self._works.put(None)

    def _start(self) -> Worker:
        with self._change:
            if self._worker is None:
                self._known = {}
                if self.options.worker == "thread":
                    self._worker = WorkerThread(self._receive)
                else:
                    self._worker = WorkerProcess(
                        self._receive, nice=self.options.nice, io_priority=self.options.io_priority
                    )
            return self._worker

    def _hand_over(self, flight: Flight) -> None:
        """Within `_change`: the worker that knows the arena gets the save, and saves keep their order."""
        worker = self._start()
        flight.job = replace(flight.job, arena=self._number_of(flight.arena, worker) if flight.held else 0)
        with contextlib.suppress(OSError):  # it has ended just now: the save is among those that another one gets
            worker.submit(flight.job)

    def _number_of(self, arena: Arena, worker: Worker) -> int:
        """The number by which the worker knows an arena; it forgets those that the pool has closed."""
        with contextlib.suppress(OSError):
            for old in [old for old in self._known if old.closed]:
                worker.drop_arena(self._known.pop(old))
            if arena not in self._known:
                self._arenas += 1
                self._known[arena] = self._arenas
                worker.add_arena(self._arenas, arena)
        return self._known[arena]

    def _forget(self, flight: Flight) -> None:
        with self._change:
            self._flights = [other for other in self._flights if other is not flight]
            self._release(flight)
            self._change.notify_all()

    def _release(self, flight: Flight) -> None:
        if flight.held:
            flight.held = False
            self.pool.give_back(flight.arena)

    def _receive(self, report: Report | None) -> None:
        """From the worker, in its listener's thread."""
        if report is None:
            self._replace_worker()
            return
        if isinstance(report, UploadReport):
            self._note(report)
            return
        with self._change:
            flight = next((flight for flight in self._flights if flight.job.number == report.number), None)
            if flight is None:
                return
            if isinstance(report, Consumed):
                flight.consumed = max(flight.consumed, report.slices)
            else:
                self._land(flight, report)
            self._change.notify_all()

    def _note(self, report: UploadReport) -> None:
        with self._change:
            for upload in [upload for upload in self._uploads if upload.job.number == report.number]:
                upload.reports.append(report)
                if report.is_last:
                    upload.outcome = report
                    self._uploads.remove(upload)
            self._change.notify_all()

    def _land(self, flight: Flight, report: Written | Outcome) -> None:
        self._release(flight)
        if isinstance(report, Outcome):
            flight.outcome = report
            self._flights = [other for other in self._flights if other is not flight]
            flight.ended.set()

    def _replace_worker(self) -> None:
        """The worker has ended without being asked to: what is still staged is given to another one."""
        with self._change:
            self._worker = None
            lost = [flight for flight in self._flights if self._closed or not self._resubmit(flight)]
            given_up = [upload for upload in self._uploads if self._closed or not self._upload_again(upload)]
        for upload in given_up:
            self._note(UploadReport(upload.job.number, error="its worker process ended; the next attempt uploads it"))
        for flight in lost:
            # Rank 0's worker would wait for our records until its deadline.
            outcome = give_up(flight.job, "its worker process ended, and so did the one that was given its saves")
            with self._change:
                self._land(flight, outcome)
                self._change.notify_all()

    def _resubmit(self, flight: Flight) -> bool:
        if flight.tries >= TRIES or len(flight.job.slices) > 1:
            return False
        flight.tries += 1
        flight.job = replace(flight.job, again=True)
        log.warning("iteration %d: its worker process ended; another one goes on", flight.job.begin.iteration)
        try:
            self._hand_over(flight)
        except Exception:  # whoever waits for the save must hear of its end
            log.exception("no worker process can be started")
            return False
        return True

    def _upload_again(self, upload: Upload) -> bool:
        if upload.tries >= TRIES:
            return False
        upload.tries += 1
        try:
            self._start().upload(upload.job)
        except OSError:
            log.exception("no worker process can be started, or it has ended")
            return False
        return True


def _do(works: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := works.get()) is not None:
        work()


_workshops: dict[str, Workshop] = {}


def workshop_for(root: str, options: AsyncOptions, user: object) -> Workshop:
    """The workshop of a root in this process; a new one where there is none with these options.

    Args:
        user: keeps it open until it is closed for this user, or the user is gone.
    """
    shop = _workshops.get(root)
    if shop is None or shop.options != options:
        shop = _workshops[root] = Workshop(options)  # one of other options ends with its users
    shop.users.add(user)
    return shop
