"""A rank's saves in flight: the memory they are staged in, the worker that writes them, and what became of them."""

from __future__ import annotations

import functools
import math
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from ckptlib.background import Job, Outcome, give_up, run_job, take_in_hand
from ckptlib.beats import HEARTBEAT, Pulse
from ckptlib.errors import BackgroundSaveError, StateError
from ckptlib.manifest import Begin
from ckptlib.saving import Begun
from ckptlib.staging import Arena, Pool, copy_in, layout
from ckptlib.worker import WorkerProcess, Written

AtLimit = Literal["wait", "skip", "error"]
"""What a save does when as many are in flight as may be: wait for one, not happen, or raise."""

WorkerKind = Literal["process", "thread"]


@dataclass(frozen=True)
class AsyncOptions:
    """How saves are written in the background.

    Attributes:
        max_in_flight: saves whose writing has not ended; each has an arena of its own.
        at_limit: see `AtLimit`.
        worker: ``process`` outlives the trainer; ``thread`` is for notebooks and debuggers, and dies with it.
        staging_budget: bytes of host memory for all arenas of this rank; None: no limit.
        commit_timeout: seconds that rank 0's worker waits for the other ranks' records.
        nice: added to the priority of the worker process.
        heartbeat: seconds between two signs of life of a rank; more where there are many (`ckptlib.beats`).
    """

    max_in_flight: int = 1
    at_limit: AtLimit = "wait"
    worker: WorkerKind = "process"
    staging_budget: int | None = None
    commit_timeout: float = 1800.0
    nice: int = 0
    heartbeat: float = HEARTBEAT

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise StateError(f"max_in_flight={self.max_in_flight}: expected at least 1")
        if self.at_limit not in ("wait", "skip", "error"):
            raise StateError(f"at_limit={self.at_limit!r}: expected 'wait', 'skip' or 'error'")
        if self.worker not in ("process", "thread"):
            raise StateError(f"worker={self.worker!r}: expected 'process' or 'thread'")
        if not 0 < self.heartbeat < math.inf:
            raise StateError(f"heartbeat={self.heartbeat}: expected seconds, more than 0")


@dataclass(frozen=True)
class Target:
    """What a worker has to know of a run to commit for it; see `background.Job`."""

    root: str
    storage_options: Mapping[str, Any] | None
    single_writer: bool
    moves_tracker: bool


@dataclass
class Flight:
    """A save between its staging and its end."""

    job: Job
    arena: Arena
    nbytes: int
    staged: bool = True
    outcome: Outcome | None = None
    ended: threading.Event = field(default_factory=threading.Event)


def failure(begin: Begin, outcome: Outcome) -> BackgroundSaveError:
    """What is raised for a save that failed in the background."""
    return BackgroundSaveError(
        f"the save of iteration {begin.iteration} ({begin.save_id}) failed in the background: {outcome.error}",
        iteration=begin.iteration,
        save_ids=frozenset({begin.save_id}),
    )


class _Worker(Protocol):
    """Where jobs are done; see `worker.WorkerProcess`."""

    def add_arena(self, number: int, arena: Arena) -> None: ...

    def drop_arena(self, number: int) -> None: ...

    def submit(self, job: Job) -> None: ...

    def close(self, timeout: float | None) -> bool: ...


class _WorkerThread:
    """A worker in this process."""

    def __init__(self, receive: Callable[[Written | Outcome | None], None]) -> None:
        self._receive = receive
        self._arenas: dict[int, Arena] = {}
        self._jobs: queue.Queue[tuple[Job, Pulse] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="ckptlib-writer", daemon=True)
        self._thread.start()

    def add_arena(self, number: int, arena: Arena) -> None:
        self._arenas[number] = arena

    def drop_arena(self, number: int) -> None:
        self._arenas.pop(number, None)

    def submit(self, job: Job) -> None:
        self._jobs.put((job, take_in_hand(job)))

    def close(self, timeout: float | None) -> bool:
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (handed := self._jobs.get()) is not None:
            job, pulse = handed
            written = functools.partial(self._receive, Written(job.number))
            self._receive(run_job(job, self._arenas[job.arena], written, pulse))


class BackgroundSaves:
    """One rank's saves in flight. Its methods are for one thread, the trainer's."""

    def __init__(self, options: AsyncOptions, target: Target) -> None:
        self.options = options
        self._target = target
        self._pool = Pool(options.max_in_flight, options.staging_budget)
        self._newest: dict[str, int] = {}  # kind -> the latest iteration that was handed over
        self._known: dict[Arena, int] = {}  # arenas that the worker has, and their numbers
        self._arenas = 0
        self._next = 0
        self._flights: list[Flight] = []
        self._lock = threading.Condition()
        self._worker: _Worker | None = None

    def prepare(self, nbytes: int) -> None:
        """Starts the worker and makes the arenas, so that the first save meets warm memory.

        Args:
            nbytes: of the tensors; what their alignment takes is added.

        Raises:
            StagingError: there is not so much memory.
        """
        self._start()
        self._pool.prepare(nbytes + nbytes // 16 + 2**20)

    def has_room(self) -> bool:
        """Whether a save may begin now."""
        with self._lock:
            return self._in_flight() < self.options.max_in_flight

    def wait_for_room(self, timeout: float | None = None) -> bool:
        """Waits until a save may begin; False: not within `timeout` seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: self._in_flight() < self.options.max_in_flight, timeout)

    def writes(self, iteration: int, kind: str) -> bool:
        """Whether a save of this iteration is in flight."""
        with self._lock:
            begins = [flight.job.begin for flight in self._flights if flight.outcome is None]
        return any((begin.iteration, begin.kind) == (iteration, kind) for begin in begins)

    def take_ended(self) -> list[tuple[Begin, Outcome]]:
        """Saves that have ended since the last call, oldest first."""
        with self._lock:
            ended = [flight for flight in self._flights if flight.outcome is not None]
            self._flights = [flight for flight in self._flights if flight.outcome is None]
        return [(flight.job.begin, flight.outcome) for flight in ended if flight.outcome is not None]

    def launch(self, begun: Begun, rank: int) -> Flight:
        """Stages a save that has begun and hands it to the worker. The state may change when this returns.

        Raises:
            StateError: an object cannot be saved.
            StagingError: no memory.
        """
        package = begun.pack(rank)
        worker = self._start()
        staged, nbytes = layout(package.tensors)
        arena = self._pool.take(nbytes)
        flight: Flight | None = None
        try:
            copy_in(arena, package.tensors, staged)
            number = self._number_of(arena, worker)
            self._next += 1
            job = Job(
                number=self._next,
                url=begun.request.storage.url(begun.request.path),
                storage_options=self._target.storage_options,
                single_writer=self._target.single_writer,
                root=self._target.root,
                moves_tracker=self._target.moves_tracker and self._is_newest(begun.begin),
                begin=begun.begin,
                rank=rank,
                package=replace(package, tensors=()),
                staged=tuple(staged),
                arena=number,
                commit_timeout=self.options.commit_timeout,
                heartbeat=self.options.heartbeat,
                removes=tuple(begun.request.removes),
            )
            flight = Flight(job, arena, package.nbytes)
            with self._lock:
                self._flights.append(flight)
            worker.submit(job)
        except BaseException:
            with self._lock:
                self._flights = [other for other in self._flights if other is not flight]
                if flight is None or flight.staged:  # else the worker has ended, and `_lost` was faster
                    self._pool.give_back(arena)
            raise
        return flight

    def _is_newest(self, begin: Begin) -> bool:
        newest = self._newest.get(begin.kind, -1)
        self._newest[begin.kind] = max(newest, begin.iteration)
        return begin.iteration >= newest

    def _number_of(self, arena: Arena, worker: _Worker) -> int:
        """The number by which the worker knows an arena; it forgets those that the pool has closed."""
        for old in [old for old in self._known if old.closed]:
            worker.drop_arena(self._known.pop(old))
        if arena not in self._known:
            self._arenas += 1
            worker.add_arena(self._arenas, arena)
            self._known[arena] = self._arenas
        return self._known[arena]

    def drain(self, timeout: float | None) -> bool:
        """Waits until nothing is in flight; False: not within `timeout` seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: self._in_flight() == 0, timeout)

    def close(self, timeout: float | None) -> None:
        """Lets the worker end when it has done what it has; a worker process goes on without us if it has to."""
        if self._worker is not None:
            self._worker.close(timeout)
            self._worker = None
        self._pool.close()

    def _in_flight(self) -> int:
        return sum(flight.outcome is None for flight in self._flights)

    def _start(self) -> _Worker:
        if self._worker is None:
            self._known = {}
            if self.options.worker == "thread":
                self._worker = _WorkerThread(self._receive)
            else:
                self._worker = WorkerProcess(self._receive, nice=self.options.nice)
        return self._worker

    def _receive(self, message: Written | Outcome | None) -> None:
        """From the worker, in its listener's thread."""
        if message is None:
            self._lost()
            return
        with self._lock:
            flight = next((flight for flight in self._flights if flight.job.number == message.number), None)
            if flight is not None:
                self._land(flight, message)
            self._lock.notify_all()

    def _land(self, flight: Flight, message: Written | Outcome) -> None:
        if flight.staged:
            flight.staged = False
            self._pool.give_back(flight.arena)
        if isinstance(message, Outcome):
            flight.outcome = message
            flight.ended.set()

    def _lost(self) -> None:
        """The worker has ended: what it had is lost, and the next save starts another one."""
        with self._lock:
            self._worker = None
            lost = [flight for flight in self._flights if flight.outcome is None]
        # Rank 0's worker would wait for our records until its deadline.
        outcomes = [give_up(flight.job, "its worker process ended") for flight in lost]
        with self._lock:
            for flight, outcome in zip(lost, outcomes, strict=True):
                self._land(flight, outcome)
            self._lock.notify_all()
