"""What a worker does with one staged save: write, record, and, for rank 0, commit (W7).

It needs storage and the staged bytes, and nothing of the training process; so it goes on when that one dies.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ckptlib import commit, exports, removal
from ckptlib import storage as st
from ckptlib.announcing import Announcer
from ckptlib.beats import HEARTBEAT, Pulse, announce
from ckptlib.errors import StagingError
from ckptlib.figures import Times
from ckptlib.manifest import Begin, Decision
from ckptlib.packing import Package, unwrite, write_package
from ckptlib.staging import Arena, StagedTensor
from ckptlib.state import TensorLeaf, dtype_of
from ckptlib.writer import Passing

log = logging.getLogger("ckptlib")

MAX_PAUSE = 1.0
"""Seconds between two looks for the records of the other ranks, at most; the first looks come fast."""


@dataclass(frozen=True)
class Job:
    """One rank's staged save, as it is sent to a worker.

    Attributes:
        number: counts the jobs of a trainer.
        again: a worker that ended had this job before: it may have left an unfinished file, or have recorded its part.
        url, storage_options, single_writer: the iteration directory.
        root: the run's directory; the tracker in it is moved by rank 0 when `moves_tracker` says so.
        package: without tensors; they are staged in the arena of that number, in one slice or one after the other.
        commit_timeout: seconds that rank 0 waits for the records of all ranks before it decides `abort`.
        heartbeat: seconds between two signs of life, see `beats.interval_of`.
        times: of this save, as far as they were known when it was handed over.
        removes: see `saving.SaveRequest`.
    """

    number: int
    url: str
    storage_options: Mapping[str, Any] | None = field(repr=False)
    single_writer: bool
    root: str
    moves_tracker: bool
    begin: Begin
    rank: int
    package: Package
    slices: tuple[tuple[StagedTensor, ...], ...]
    arena: int
    commit_timeout: float
    heartbeat: float = HEARTBEAT
    times: Times | None = None
    removes: tuple[tuple[str, str], ...] = ()
    again: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        decision: rank 0's; None for other ranks, which have done their part when they have recorded it.
        error: why it failed; None: it did not.
        files: data files that this rank wrote.
        left: what the checkpoint takes the place of and could not be removed (`removal.supersede`).
        commit_seconds: rank 0's, from its own record to the exports.
    """

    number: int
    decision: Decision | None = None
    error: str | None = None
    files: int = 0
    left: tuple[str, ...] = ()
    commit_seconds: float | None = None


def take_in_hand(job: Job) -> Pulse:
    """Shows from here on that somebody has this job, also while it waits for the one before (W8)."""
    storage, path = st.resolve(job.url, job.storage_options, single_writer=job.single_writer)
    return Pulse(storage, path, job.begin, job.rank, _payload(job), job.heartbeat)


def hand_to(job: Job, pid: int) -> None:
    """Shows that a job goes to a process that is only starting and cannot show anything yet (W8)."""
    storage, path = st.resolve(job.url, job.storage_options, single_writer=job.single_writer)
    announce(storage, path, job.begin, job.rank, _payload(job), pid)


def _payload(job: Job) -> int:
    return job.package.other_nbytes + _staged_nbytes(job.slices)


def _staged_nbytes(slices: Sequence[Sequence[StagedTensor]]) -> int:
    staged = (place for slice_ in slices for place in slice_)
    return sum(math.prod(place.shape) * dtype_of(place.dtype).itemsize for place in staged)


class Supply(Protocol):
    """Where the slices of a job come from; without one, all of them are there."""

    def next(self, number: int) -> None:
        """Says that what lies before slice `number` is not read any more, and waits until that slice is there.

        Raises:
            StagingError: it will never be.
        """


def run_job(
    job: Job,
    arena: Arena | None,
    written: Callable[[], None] = lambda: None,
    pulse: Pulse | None = None,
    supply: Supply | None = None,
) -> Outcome:
    """Writes, records and, on rank 0, commits. Never raises for what can go wrong with one save.

    Args:
        arena: holds the staged tensors; None: it is used for others by now, as this rank's part has been recorded.
        written: called when the arena is not needed any more.
        pulse: of `take_in_hand`, if that was called.
    """
    begin = job.begin
    try:
        return _run(job, arena, written, pulse or take_in_hand(job), supply)
    except Exception as error:
        log.exception("save %s of iteration %d failed on rank %d", begin.save_id, begin.iteration, job.rank)
        return give_up(job, f"{type(error).__name__}: {error}")


def _run(job: Job, arena: Arena | None, written: Callable[[], None], pulse: Pulse, supply: Supply | None) -> Outcome:
    try:
        storage, path = st.resolve(job.url, job.storage_options, single_writer=job.single_writer)
        files = 0
        if not (job.again and _is_recorded(storage, path, job)):
            removal.remove_all(storage, job.removes)
            files = _write(storage, path, job, arena, pulse, supply)
    finally:
        written()
        pulse.stop()
    recorded = time.perf_counter()
    decision = _commit(storage, path, job) if job.rank == 0 else None
    if decision is not None and decision.outcome == "abort":
        return Outcome(job.number, decision, f"aborted by {decision.decided_by}: {decision.reason}")
    left: list[str] = []
    seconds = None
    if decision is not None:
        seconds = time.perf_counter() - recorded
        root_storage, root = st.resolve(job.root, job.storage_options, single_writer=job.single_writer)
        left = removal.supersede(root_storage, root, job.begin)
    return Outcome(job.number, decision, files=files, left=tuple(left), commit_seconds=seconds)


def _write(storage: st.Storage, path: str, job: Job, arena: Arena | None, pulse: Pulse, supply: Supply | None) -> int:
    """Writes and records this rank's part; returns the number of its data files."""
    if arena is None:
        raise StagingError("its worker process ended, and what was staged for it is not there any more")
    if job.again:
        storage = storage.resuming()
        unwrite(storage, path, job.begin.save_id, job.rank, job.package)
    tensors: Sequence[TensorLeaf] = tuple(arena.leaf(place) for place in job.slices[0])
    if len(job.slices) > 1:
        assert supply is not None
        tensors = _Sliced(job.slices, arena, supply)
    package = replace(job.package, tensors=tensors)
    return write_package(storage, path, job.begin, job.rank, package, pulse, job.times).count


class _Sliced(Passing):
    """The tensors of a job in slices."""

    def __init__(self, slices: Sequence[Sequence[StagedTensor]], arena: Arena, supply: Supply) -> None:
        self._slices = slices
        self._arena = arena
        self._supply = supply

    def __len__(self) -> int:
        return sum(map(len, self._slices))

    @property
    def nbytes(self) -> int:
        return _staged_nbytes(self._slices)

    def through(self, release: Callable[[], None]) -> Iterator[TensorLeaf]:
        for number, places in enumerate(self._slices):
            if number:
                release()  # or the digest would be of what comes next
                self._supply.next(number)
            for place in places:
                yield self._arena.leaf(place)


def _is_recorded(storage: st.Storage, path: str, job: Job) -> bool:
    """Whether this rank's part is there: its record, or the decision, after which the records go."""
    if job.rank not in commit.progress(storage, path, job.begin).missing:
        return True
    return commit.read_decision(storage, path, job.begin.save_id) is not None


def _commit(storage: st.Storage, path: str, job: Job) -> Decision:
    """Waits for the records of all ranks, then decides; a rank that failed, or is late, means `abort`."""
    begin = job.begin
    deadline = time.monotonic() + job.commit_timeout
    pause = 0.005
    while True:
        progress = commit.progress(storage, path, begin)
        if not progress.missing:
            break
        if progress.failed:
            causes = "; ".join(f"rank {rank}: {reason}" for rank, reason in progress.failed.items())
            return commit.decide_abort(storage, path, begin.save_id, reason=causes, decided_by="worker")
        if time.monotonic() > deadline:
            late = ", ".join(map(str, progress.missing[:16]))
            reason = f"no record of rank {late} within {job.commit_timeout:g} s"
            return commit.decide_abort(storage, path, begin.save_id, reason=reason, decided_by="worker")
        standing = commit.read_decision(storage, path, begin.save_id)
        if standing is not None:  # a newer attempt, an adopter, or the worker before this one was faster
            return _followed_up(storage, path, job, standing)
        time.sleep(pause)
        pause = min(pause * 1.5, MAX_PAUSE)
    decision = commit.try_commit(storage, path, begin, decided_by="worker")
    if decision is None:
        reason = "records of ranks are damaged, or belong to another plan"
        return commit.decide_abort(storage, path, begin.save_id, reason=reason, decided_by="worker")
    return _followed_up(storage, path, job, decision)


def _followed_up(storage: st.Storage, path: str, job: Job, decision: Decision) -> Decision:
    """The decision, when what follows a commit has been done (W5, W6); again: changes nothing."""
    if decision.outcome == "commit":
        exports.conclude(storage, path, job.begin)
        root_storage, root = st.resolve(job.root, job.storage_options, single_writer=job.single_writer)
        Announcer(root_storage, root, (), moves_tracker=job.moves_tracker).move_tracker(job.begin)
    return decision


def give_up(job: Job, reason: str) -> Outcome:
    """Says that a job will not be done where rank 0 looks; best effort, rank 0 has a deadline.

    Returns:
        The failure; none, when this rank's part was recorded, or the save committed, before.
    """
    begin = job.begin
    decision = None
    try:
        storage, path = st.resolve(job.url, job.storage_options, single_writer=job.single_writer)
        if job.rank == 0:
            decision = commit.decide_abort(storage, path, begin.save_id, reason=reason, decided_by="worker")
            _followed_up(storage, path, job, decision)  # a commit: it ended between the decision and its message
        elif job.rank not in commit.progress(storage, path, begin).missing:
            return Outcome(job.number)
        else:
            decision = commit.read_decision(storage, path, begin.save_id)  # what follows a commit removes the records
            if decision is None:
                commit.publish_failure(storage, path, begin.save_id, job.rank, reason)
    except Exception as error:  # noqa: BLE001 - whoever waits for the outcome must get it
        log.warning("save %s: could not tell that rank %d failed: %s", begin.save_id, job.rank, error)
    if decision is not None and decision.outcome == "commit":
        return Outcome(job.number, decision if job.rank == 0 else None)
    return Outcome(job.number, error=reason)
