"""How saves are written in the background: what a trainer may choose."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ckptlib.beats import HEARTBEAT
from ckptlib.errors import StateError
from ckptlib.worker import IO_PRIORITIES, IoPriority

AtLimit = Literal["wait", "skip", "error"]
"""What a save does when as many are in flight as may be: wait for one, not happen, or raise."""

WorkerKind = Literal["process", "thread"]

StagingMode = Literal["eager", "overlapped"]
"""When the copy is made: before `save` returns, or beside the next forward and backward."""


@dataclass(frozen=True)
class AsyncOptions:
    """How saves are written in the background.

    Attributes:
        max_in_flight: saves whose writing has not ended; each has an arena of its own.
        at_limit: see `AtLimit`. While a save waits for another, the trainer sees no signal: where the grace period of a
            job is shorter than a save may take, ``skip``.
        worker: ``process`` outlives the trainer; ``thread`` is for notebooks and debuggers, and dies with it.
        staging: see `StagingMode`. ``overlapped`` waits for the copy before an optimizer's step and before anything is
            loaded, by itself; what changes at other times is copied at once (`ckptlib.steady`).
        staging_budget: bytes of host memory for all arenas of this rank; None: what is free. A state that does not fit
            is staged in slices, as fast as the storage takes them.
        copy_threads: threads that copy while training waits; None: the rank's share of the cores, at most 4.
        before_stage: called on every rank before memory is staged, to free what training does not need just then.
        commit_timeout: seconds that rank 0's worker waits for the other ranks' records.
        nice: added to the priority of the worker process, and of its session where the kernel has autogroups.
        io_priority: see `IoPriority`.
        heartbeat: seconds between two signs of life of a rank; more where there are many (`ckptlib.beats`).
    """

    max_in_flight: int = 1
    at_limit: AtLimit = "wait"
    worker: WorkerKind = "process"
    staging: StagingMode = "eager"
    staging_budget: int | None = None
    copy_threads: int | None = None
    before_stage: Callable[[], None] | None = field(default=None, compare=False)
    commit_timeout: float = 1800.0
    nice: int = 0
    io_priority: IoPriority = "normal"
    heartbeat: float = HEARTBEAT

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise StateError(f"max_in_flight={self.max_in_flight}: expected at least 1")
        if self.copy_threads is not None and self.copy_threads < 1:
            raise StateError(f"copy_threads={self.copy_threads}: expected at least 1")
        if not 0 < self.heartbeat < math.inf:
            raise StateError(f"heartbeat={self.heartbeat}: expected seconds, more than 0")
        _one_of("at_limit", self.at_limit, ("wait", "skip", "error"))
        _one_of("worker", self.worker, ("process", "thread"))
        _one_of("staging", self.staging, ("eager", "overlapped"))
        _one_of("io_priority", self.io_priority, IO_PRIORITIES)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        *first, last = map(repr, known)
        raise StateError(f"{name}={value!r}: expected {', '.join(first)} or {last}")
