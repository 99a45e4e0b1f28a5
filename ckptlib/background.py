"""What a worker does with one staged save: write, record, and, for rank 0, commit (W7).

It needs storage and the staged bytes, and nothing of the training process; so it goes on when that one dies.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptlib import commit, exports, removal
from ckptlib import storage as st
from ckptlib.announcing import Announcer
from ckptlib.beats import HEARTBEAT, Pulse
from ckptlib.manifest import Begin, Decision
from ckptlib.packing import Package, write_package
from ckptlib.staging import Arena, StagedTensor, unstage
from ckptlib.state import dtype_of

log = logging.getLogger("ckptlib")

MAX_PAUSE = 1.0
"""Seconds between two looks for the records of the other ranks, at most; the first looks come fast."""


@dataclass(frozen=True)
class Job:
    """One rank's staged save, as it is sent to a worker.

    Attributes:
        number: counts the jobs of a trainer.
        url, storage_options, single_writer: the iteration directory.
        root: the run's directory; the tracker in it is moved by rank 0 when `moves_tracker` says so.
        package: without tensors; they are `staged` in the arena of that number.
        commit_timeout: seconds that rank 0 waits for the records of all ranks before it decides `abort`.
        heartbeat: seconds between two signs of life, see `beats.interval_of`.
        removes: see `saving.SaveRequest`.
    """

    number: int
    url: str
    storage_options: Mapping[str, Any] | None
    single_writer: bool
    root: str
    moves_tracker: bool
    begin: Begin
    rank: int
    package: Package
    staged: tuple[StagedTensor, ...]
    arena: int
    commit_timeout: float
    heartbeat: float = HEARTBEAT
    removes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        decision: rank 0's; None for other ranks, which have done their part when they have recorded it.
        error: why it failed; None: it did not.
        files: data files that this rank wrote.
        left: what the checkpoint takes the place of and could not be removed (`removal.supersede`).
    """

    number: int
    decision: Decision | None = None
    error: str | None = None
    files: int = 0
    left: tuple[str, ...] = ()


def take_in_hand(job: Job) -> Pulse:
    """Shows from here on that somebody has this job, also while it waits for the one before (W8)."""
    storage, path = st.resolve(job.url, job.storage_options, single_writer=job.single_writer)
    tensors = sum(math.prod(staged.shape) * dtype_of(staged.dtype).itemsize for staged in job.staged)
    total = job.package.other_nbytes + tensors
    return Pulse(storage, path, job.begin, job.rank, total, job.heartbeat)


def run_job(job: Job, arena: Arena, written: Callable[[], None] = lambda: None, pulse: Pulse | None = None) -> Outcome:
    """Writes, records and, on rank 0, commits. Never raises for what can go wrong with one save.

    Args:
        arena: holds the staged tensors.
        written: called when the arena is not needed any more.
        pulse: of `take_in_hand`, if that was called.
    """
    storage, path = st.resolve(job.url, job.storage_options, single_writer=job.single_writer)
    begin = job.begin
    pulse = pulse or take_in_hand(job)
    try:
        try:
            removal.remove_all(storage, job.removes)
            files = write_package(storage, path, begin, job.rank, unstage(job.package, arena, job.staged), pulse)
        finally:
            written()
            pulse.stop()
        decision = _commit(storage, path, job) if job.rank == 0 else None
    except Exception as error:
        log.exception("save %s of iteration %d failed on rank %d", begin.save_id, begin.iteration, job.rank)
        reason = f"{type(error).__name__}: {error}"
        return give_up(job, reason)
    if decision is not None and decision.outcome == "abort":
        return Outcome(job.number, decision, f"aborted by {decision.decided_by}: {decision.reason}")
    left: list[str] = []
    if decision is not None:
        root_storage, root = st.resolve(job.root, job.storage_options, single_writer=job.single_writer)
        left = removal.supersede(root_storage, root, begin)
    return Outcome(job.number, decision, files=files.count, left=tuple(left))


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
        if standing is not None:  # a newer attempt, or an adopter, was faster
            return standing
        time.sleep(pause)
        pause = min(pause * 1.5, MAX_PAUSE)
    decision = commit.try_commit(storage, path, begin, decided_by="worker")
    if decision is None:
        reason = "records of ranks are damaged, or belong to another plan"
        return commit.decide_abort(storage, path, begin.save_id, reason=reason, decided_by="worker")
    if decision.outcome == "commit":
        exports.conclude(storage, path, begin)
        root_storage, root = st.resolve(job.root, job.storage_options, single_writer=job.single_writer)
        Announcer(root_storage, root, (), moves_tracker=job.moves_tracker).move_tracker(begin)
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
            if decision.outcome == "commit":  # it ended between the decision and its message
                exports.conclude(storage, path, begin)
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
