"""Saves that are written in the background: training stops for one copy of the state.

The ranks agree on the plan as for a synchronous save, each copies its part into an arena (`staging`), hands it to its
worker (`worker`, or a thread) and goes on. After that there is no message between ranks: rank 0's worker finds the
records of the others on storage, and commits (W7).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ckptlib.background_saves import BackgroundSaves, Flight, failure
from ckptlib.coordination import Group, agree, lead
from ckptlib.errors import BackgroundSaveError, SaveLimitError
from ckptlib.planning import PlanCache
from ckptlib.saving import SaveRequest, SaveResult, abort_begun, begin_together


@dataclass(frozen=True)
class _Pending(SaveResult):
    """A save that is being written."""

    flight: Flight | None = field(default=None, repr=False, compare=False)

    def wait(self, timeout: float | None = None) -> SaveResult:
        """See `SaveResult.wait`."""
        assert self.flight is not None
        if not self.flight.ended.wait(timeout):
            raise TimeoutError(f"{self.url}: the save of iteration {self.iteration} is still being written")
        outcome = self.flight.outcome
        assert outcome is not None
        if outcome.error is not None:
            raise failure(self.flight.job.begin, outcome)
        return replace(self, files=outcome.files)


@dataclass(frozen=True)
class FailedSave(SaveResult):
    """A save that failed on this rank before it was handed over, while other ranks went on."""

    error: BackgroundSaveError = field(default_factory=lambda: BackgroundSaveError(""), repr=False, compare=False)

    def wait(self, timeout: float | None = None) -> SaveResult:
        """See `SaveResult.wait`."""
        raise self.error


def failed_save(request: SaveRequest, error: Exception) -> FailedSave:
    """What is left of a save that has its save id and could not be begun or staged here."""
    begin = request.begin
    failed = BackgroundSaveError(
        f"the save of iteration {begin.iteration} ({begin.save_id}) failed: {type(error).__name__}: {error}",
        iteration=begin.iteration,
        save_ids=frozenset({begin.save_id}),
    )
    return FailedSave(request.storage.url(request.path), begin.iteration, begin.save_id, 0, 0, 0.0, error=failed)


def run_async_save(
    group: Group,
    prepare: Callable[[], SaveRequest],
    plans: PlanCache,
    background: BackgroundSaves,
    timeout: float,
) -> SaveResult | None:
    """Begins a save and stages it; returns when the state may change. Collective.

    Returns:
        The save in flight; None: it was skipped on all ranks (`AtLimit`).

    Raises:
        BackgroundSaveError: earlier saves failed (`SaveRequest.failed`). The next save is not affected.
        SaveLimitError: as many saves are in flight as may be (`AtLimit`); where that is so on other ranks only, with
            ``wait``, `RankFailedError` or `RankTimeoutError`.
        CheckpointExistsError, FencedError, StateError, StagingError, RankFailedError, RankTimeoutError: nothing of
            this save will exist.
    """
    started = waited = time.perf_counter()
    if background.options.at_limit != "wait" and not _has_room(group, background):
        return None

    def prepare_with_room() -> SaveRequest:
        """Inside the first exchange, so that all ranks learn at once when one has no room."""
        nonlocal waited
        if background.options.at_limit == "wait" and not background.wait_for_room(timeout):
            raise SaveLimitError(f"no earlier save ended within {timeout:g} s")
        waited = time.perf_counter()
        return prepare()

    begun = begin_together(group, prepare_with_room, plans)
    planned = time.perf_counter()
    try:
        flight = background.launch(begun, group.rank)
    except BaseException as error:
        abort_begun(begun, group.rank, error)
        raise
    ended = time.perf_counter()
    return _Pending(
        url=begun.request.storage.url(begun.request.path),
        iteration=begun.begin.iteration,
        save_id=begun.begin.save_id,
        bytes=flight.nbytes,
        files=0,
        seconds=ended - started,
        phases={"wait": waited - started, "plan": planned - waited, "stage": ended - planned},
        flight=flight,
    )


def _has_room(group: Group, background: BackgroundSaves) -> bool:
    """Whether the save happens: the same answer on all ranks."""
    group.next_round()
    rooms = agree(group, "room", background.has_room)
    full = lead(group, "limit", lambda: [rank for rank, room in enumerate(rooms or []) if not room])
    if full and background.options.at_limit == "error":
        raise SaveLimitError(
            f"{background.options.max_in_flight} saves are in flight on rank {', '.join(map(str, full[:8]))}"
        )
    return not full
