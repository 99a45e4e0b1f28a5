"""One checkpointer's asynchronous saves: staged, handed over, and what became of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ckptlib.async_options import AsyncOptions
from ckptlib.background import Job, Outcome
from ckptlib.errors import BackgroundSaveError
from ckptlib.events import Notice, NoticeHandler, emit
from ckptlib.figures import Times
from ckptlib.manifest import Begin
from ckptlib.overlap import Copy
from ckptlib.packing import Package
from ckptlib.saving import Begun
from ckptlib.slices import slices
from ckptlib.staging import ALIGNMENT, Arena, StagedTensor, layout
from ckptlib.state import TensorLeaf
from ckptlib.workshop import Flight, Worker, Workshop, workshop_for

LEAST_ARENA = 2**20
"""Bytes. In less memory than this nothing is staged, not even in slices."""


@dataclass(frozen=True)
class Target:
    """What a worker has to know of a run to commit for it; see `background.Job`."""

    root: str
    storage_options: Mapping[str, Any] | None = field(repr=False)
    single_writer: bool
    moves_tracker: bool


def failure(begin: Begin, outcome: Outcome) -> BackgroundSaveError:
    """What is raised for a save that failed in the background."""
    return BackgroundSaveError(
        f"the save of iteration {begin.iteration} ({begin.save_id}) failed in the background: {outcome.error}",
        iteration=begin.iteration,
        save_ids=frozenset({begin.save_id}),
    )


class BackgroundSaves:
    """One rank's saves in flight. Its methods are for one thread at a time: the trainer's, or one that it waits for.

    Args:
        abandon: ends what a save waits for from other ranks.
        clock: entered while training waits for a copy.

    Attributes:
        copy: the copy of the last save, where it is made beside training; the next save waits for it.
        refused: what kept such a save, after `save` had returned, from being begun; known on all ranks.
        unstaged: the save that has begun and is not in flight yet.
        launched: called with every save that is handed over, from whichever thread does it.
    """

    def __init__(
        self,
        options: AsyncOptions,
        target: Target,
        on_event: NoticeHandler | None = None,
        abandon: Callable[[], None] | None = None,
        clock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.options = options
        self.copy: Copy | None = None
        self.refused: list[Exception] = []
        self.unstaged: Begin | None = None
        self.launched: Callable[[Begin], None] = lambda begin: None
        self._target = target
        self._on_event = on_event
        self._abandon = abandon
        self._clock = clock
        self._shop = workshop_for(target.root, options, self)
        for other in list(self._shop.users):
            if other is not self and isinstance(other, BackgroundSaves):
                other.abandon()
                self._shop.users.discard(other)  # what it had is this one's to close
        self._newest: dict[str, int] = {}  # kind -> the latest iteration that was handed over
        self._flights: list[Flight] = []
        self._unstaged: list[tuple[Begin, Outcome]] = []
        self._told: set[str] = set()

    @property
    def worker(self) -> Worker | None:
        """See `Workshop.worker`."""
        return self._shop.worker

    @property
    def shop(self) -> Workshop:
        """Where the work is done."""
        return self._shop

    def prepare(self, nbytes: int) -> None:
        """Starts the worker and makes the arenas, so that the first save meets warm memory; as much as there is.

        Args:
            nbytes: of the tensors, each of them aligned; see `layout`.

        Raises:
            StagingError: there is not so much memory.
        """
        self._shop.prepare(nbytes, LEAST_ARENA)

    def abandon(self) -> None:
        """The process has begun anew on this root: whoever waits for a copy of ours goes on."""
        if self._abandon is not None:
            self._abandon()
        if self.copy is not None:
            self.copy.end()

    def has_room(self) -> bool:
        """Whether a save may begin now."""
        return self._shop.has_room()

    def wait_for_room(self, timeout: float | None = None) -> bool:
        """Waits until a save may begin; False: not within `timeout` seconds."""
        return self._shop.wait_for(self._shop.has_room, timeout)

    def in_flight(self) -> list[Begin]:
        """The saves that have not ended, oldest first."""
        return [flight.job.begin for flight in list(self._flights) if flight.outcome is None]

    def writes(self, iteration: int, kind: str) -> bool:
        """Whether a save of this iteration is in flight."""
        return any((begin.iteration, begin.kind) == (iteration, kind) for begin in self.in_flight())

    def take_ended(self) -> list[tuple[Begin, Outcome]]:
        """Saves that have ended since the last call, oldest first."""
        flights, self._flights = self._flights, []
        ended, self._unstaged = self._unstaged, []
        for flight in flights:
            if flight.outcome is None:
                self._flights.append(flight)
            else:
                ended.append((flight.job.begin, flight.outcome))
        return ended

    def failed_to_stage(self, begin: Begin, error: BaseException) -> None:
        """A save had begun, and could not be staged after its call had returned: it has ended."""
        self._unstaged.append((begin, Outcome(0, error=f"{type(error).__name__}: {error}")))

    def begin_copy(self) -> Copy:
        """A copy is made from now on."""
        self.copy = Copy(self._clock)
        return self.copy

    def cancel_copy(self) -> bool:
        """Nobody wants the copy that is being made: its save is not begun, or aborted. Whether there is one."""
        if self.copy is None or self.copy.wait(0):
            return False
        self.copy.cancelled = True
        return True

    def not_ended(self) -> list[Begin]:
        """The saves that have begun and not ended, staged or not."""
        unstaged = self.unstaged  # read first: a save that is handed over meanwhile is seen twice, and not missed
        begins = {begin.save_id: begin for begin in self.in_flight()}
        if unstaged is not None:
            begins.setdefault(unstaged.save_id, unstaged)
        return list(begins.values())

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Waits until the state may change; False: not within `timeout` seconds."""
        return self.copy is None or self.copy.wait(timeout)

    def beside(self, work: Callable[[], None]) -> None:
        """See `Workshop.beside`."""
        self._shop.beside(work)

    def launch(
        self,
        begun: Begun,
        rank: int,
        *,
        alone: bool = False,
        ready: Sequence[torch.cuda.Event] = (),
        check: Callable[[], None] = lambda: None,
        held: Callable[[], float] | None = None,
    ) -> Flight:
        """Stages a save that has begun and hands it to the worker. The state may change when this returns.

        Args:
            alone, ready: see `Copier.copy`.
            check: called when all is staged; raises when it is not what was to be saved.
            held: for how many seconds training has been held by this save so far.

        Raises:
            StateError: an object cannot be saved.
            StagingError: no memory.
        """
        package = begun.pack(rank)
        arena, groups = self._place(package, begun.begin)
        half = 0 if len(groups) == 1 else _half(arena)
        places = [tuple(layout(group, half * (i % 2))[0]) for i, group in enumerate(groups)]
        flight = Flight(self._job(begun, rank, package, places), arena, package.nbytes)
        try:
            for i, (group, place) in enumerate(zip(groups, places, strict=True)):
                if i > 1:
                    self._shop.wait_consumed(flight, i - 1)
                started = time.perf_counter()
                self._copy(arena, group, place, alone=alone, ready=ready)
                staged = time.perf_counter() - started
                if i == len(groups) - 1:
                    check()
                if i == 0:
                    if len(groups) == 1:  # else nobody knows yet how long it will take
                        times = Times(None if held is None else held(), staged)
                        flight.job = replace(flight.job, times=times)
                    self._shop.take_off(flight)
                else:
                    self._shop.supply(flight, i)
        except BaseException:
            self._shop.call_back(flight)
            raise
        self._flights.append(flight)
        self.launched(begun.begin)
        return flight

    def _place(self, package: Package, begin: Begin) -> tuple[Arena, list[list[TensorLeaf]]]:
        """An arena, and the tensors as they go into it: at once or, where it is too small, in slices for its halves."""
        _, nbytes = layout(package.tensors)
        arena = self._shop.pool.take(nbytes, least=LEAST_ARENA if package.is_sliceable else None)
        if arena.size >= nbytes:
            return arena, [list(package.tensors)]
        try:
            groups = slices(package.tensors, _half(arena))
        except BaseException:
            self._shop.pool.give_back(arena)
            raise
        text = (
            f"iteration {begin.iteration}: {nbytes / 2**20:.0f} MiB do not fit into {arena.size / 2**20:.0f} MiB for "
            f"staging: staged in {len(groups)} slices, as fast as the storage takes them"
        )
        self.tell_once(Notice("staged_in_slices", text, {"iteration": begin.iteration, "bytes": nbytes}))
        return arena, groups

    def tell_once(self, notice: Notice) -> None:
        """A notice about what every save of this checkpointer does."""
        if notice.name not in self._told:
            self._told.add(notice.name)
            emit(self._on_event, notice)

    def _copy(
        self,
        arena: Arena,
        tensors: Sequence[TensorLeaf],
        places: Sequence[StagedTensor],
        *,
        alone: bool,
        ready: Sequence[torch.cuda.Event],
    ) -> None:
        device = next((leaf.tensor.device for leaf in tensors if leaf.tensor.is_cuda), None)
        if device is not None:
            arena.pin(device)
        pairs = [(arena.view(to), leaf.tensor.reshape(to.shape)) for leaf, to in zip(tensors, places, strict=True)]
        self._shop.copy(pairs, alone=alone, ready=ready)

    def _job(self, begun: Begun, rank: int, package: Package, places: Sequence[tuple[StagedTensor, ...]]) -> Job:
        return Job(
            number=self._shop.number_job(),
            url=begun.request.storage.url(begun.request.path),
            storage_options=self._target.storage_options,
            single_writer=self._target.single_writer,
            root=self._target.root,
            moves_tracker=self._target.moves_tracker and self._is_newest(begun.begin),
            begin=begun.begin,
            rank=rank,
            package=replace(package, tensors=()),
            slices=tuple(places),
            arena=0,
            commit_timeout=self.options.commit_timeout,
            heartbeat=self.options.heartbeat,
            removes=tuple(begun.request.removes),
        )

    def _is_newest(self, begin: Begin) -> bool:
        newest = self._newest.get(begin.kind, -1)
        self._newest[begin.kind] = max(newest, begin.iteration)
        return begin.iteration >= newest

    def drain(self, timeout: float | None) -> bool:
        """Waits until nothing is in flight; False: not within `timeout` seconds."""
        return self._shop.wait_for(lambda: not self.in_flight(), timeout)

    def close(self, timeout: float | None) -> None:
        """Lets the worker end when it has done what it has; a worker process goes on without us if it has to."""
        self._shop.close(self, timeout)


def _half(arena: Arena) -> int:
    return arena.size // 2 // ALIGNMENT * ALIGNMENT
