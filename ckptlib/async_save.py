"""An asynchronous save: training stops for one copy of the state, or for less.

The ranks agree on the plan as for a synchronous save, each copies its part into an arena (`staging`), hands it to its
worker (`worker`, or a thread) and goes on. After that there is no message between ranks: rank 0's worker finds the
records of the others on storage, and commits (W7).

*Overlapped*, all of that happens in a thread beside the next forward and backward; `save` takes note of what there is
to copy, and copies at once what may change before an optimizer steps (`steady`, `overlap`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from ckptlib import overlap
from ckptlib.background_saves import BackgroundSaves, failure
from ckptlib.coordination import Group, agree, lead
from ckptlib.errors import BackgroundSaveError, SaveAbortedError, SaveLimitError
from ckptlib.events import Notice
from ckptlib.manifest import Begin
from ckptlib.packing import Content
from ckptlib.planning import PlanCache
from ckptlib.saving import Begun, SaveRequest, SaveResult, abort_begun, all_failures, begin_together
from ckptlib.steady import Unchanged, divide, steady_parts
from ckptlib.workshop import Flight

T = TypeVar("T")

COPIED_AT_ONCE = 64 * 2**20
"""Bytes of tensors that are copied twice to make an overlapped copy of the others possible. A state with more of them
is staged eagerly, with a notice."""


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


class _Overlapped:
    """What a thread that begins and stages a save leaves when it has ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.result: _Pending | None = None
        self.error: BaseException | None = None


@dataclass(frozen=True)
class _Staging(SaveResult):
    """A save that is being staged."""

    overlapped: _Overlapped | None = field(default=None, repr=False, compare=False)

    def wait(self, timeout: float | None = None) -> SaveResult:
        """See `SaveResult.wait`."""
        assert self.overlapped is not None
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self.overlapped.ended.wait(timeout):
            raise TimeoutError(f"{self.url}: the save of iteration {self.iteration} is still being staged")
        if self.overlapped.error is not None:
            raise self.overlapped.error
        assert self.overlapped.result is not None
        return self.overlapped.result.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))


def run_async_save(
    group: Group,
    prepare: Callable[[], SaveRequest],
    plans: PlanCache,
    background: BackgroundSaves,
    timeout: float,
    begun: Callable[[Begin], None] = lambda begin: None,
) -> SaveResult | None:
    """Begins a save and stages it; returns when the state may change, by whatever waits for copies. Collective.

    Args:
        begun: called when the save has begun, from whichever thread.

    Returns:
        The save in flight; None: it was skipped on all ranks (`AtLimit`).

    Raises:
        BackgroundSaveError: earlier saves failed (`SaveRequest.failed`). The next save is not affected.
        SaveLimitError: as many saves are in flight as may be (`AtLimit`); where that is so on other ranks only, with
            ``wait``, `RankFailedError` or `RankTimeoutError`.
        CheckpointExistsError, FencedError, StateError, StagingError, RankFailedError, RankTimeoutError: nothing of
            this save will exist. Overlapped, the next call raises what this rank does not know by itself.
    """
    run = _Run(group, plans, background, begun)
    if background.options.at_limit != "wait" and not _has_room(group, background):
        return None

    def prepare_with_room() -> SaveRequest:
        """Inside the first exchange, so that all ranks learn at once when one has no room."""
        if background.options.at_limit == "wait" and not background.wait_for_room(timeout):
            raise SaveLimitError(
                f"no earlier save ended within {timeout:g} s (timeout): the storage is slower than saves come. Save "
                "less often, or choose at_limit='skip'."
            )
        run.mark("wait")
        request = prepare()
        if background.options.before_stage is not None:
            background.options.before_stage()
        return request

    if background.options.staging == "eager":
        return run.stage(prepare_with_room)
    return _overlapped(run, prepare_with_room)


class _Run:
    """One save on its way to the worker.

    Attributes:
        copying: the copy that others wait for, if it is made beside training.
    """

    def __init__(
        self, group: Group, plans: PlanCache, background: BackgroundSaves, begun: Callable[[Begin], None]
    ) -> None:
        self.background = background
        self.copying: overlap.Copy | None = None
        self._group = group
        self._plans = plans
        self._begun = begun
        self._started = self._last = time.perf_counter()
        self._phases: dict[str, float] = {}

    @property
    def shares_failures(self) -> bool:
        """Whether other ranks may know of failures that this one has not heard of."""
        return self._group.world_size > 1

    def mark(self, phase: str) -> None:
        """A phase has ended."""
        now = time.perf_counter()
        self._phases[phase] = now - self._last
        self._last = now

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self._started

    def stage(
        self,
        prepare: Callable[[], SaveRequest],
        overlapped: _Deferred | None = None,
        *,
        refuses_later: bool = False,
    ) -> _Pending:
        """Begins the save, stages it, and hands it over.

        Args:
            refuses_later: other ranks raise at their next call what keeps this save from being begun: so does this one.
        """
        try:
            begun = begin_together(self._group, lambda: self._unless_cancelled(prepare), self._plans)
        except Exception as error:
            if refuses_later:
                self.background.refused.append(error)
            raise
        self._begun(begun.begin)
        self.mark("plan")
        self.background.unstaged = begun.begin
        try:
            flight = self._launch(begun, overlapped)
        finally:
            self.background.unstaged = None
        self.mark("stage")
        return _Pending(
            url=begun.request.storage.url(begun.request.path),
            iteration=begun.begin.iteration,
            save_id=begun.begin.save_id,
            bytes=flight.nbytes,
            files=0,
            seconds=self.seconds,
            phases=self._phases,
            flight=flight,
        )

    def _unless_cancelled(self, prepare: Callable[[], T]) -> T:
        if self.copying is not None and self.copying.cancelled:
            raise SaveAbortedError("the job ended before the save could be staged")
        return prepare()

    def _launch(self, begun: Begun, overlapped: _Deferred | None) -> Flight:
        if begun.failed is not None:
            self.background.refused.append(begun.failed)
        try:
            if overlapped is None:
                return self.background.launch(begun, self._group.rank, held=lambda: self.seconds)
            return self._unless_cancelled(
                lambda: self.background.launch(
                    begun,
                    self._group.rank,
                    alone=True,
                    ready=overlapped.ready,
                    check=overlapped.unchanged.check,
                    held=lambda: overlapped.held,
                )
            )
        except BaseException as error:
            abort_begun(begun, self._group.rank, error)
            if overlapped is None:
                raise
            if self.copying is None or not self.copying.cancelled:  # else `drain` has told of it
                self.background.failed_to_stage(begun.begin, error)
            raise _NotStagedError from error


class _NotStagedError(Exception):
    """Told like any other failure in the background, not by the next call of this rank alone."""


@dataclass(frozen=True)
class _Deferred:
    """Copies that are made later.

    Attributes:
        unchanged: that their sources are what they were.
        ready: what devices had queued when `save` was called.
        held: seconds that `save` took; what waits for the copies later is not in it.
    """

    unchanged: Unchanged
    ready: tuple[torch.cuda.Event, ...]
    held: float = 0.0


def _overlapped(run: _Run, prepare: Callable[[], SaveRequest]) -> SaveResult:
    background = run.background
    try:
        request = replace(prepare(), carries_failures=run.shares_failures)
        deferred = _defer(request.content, background)
        failed = all_failures([request.failed])
        if failed is not None and not request.carries_failures:
            raise failed
    except Exception as error:
        if run.shares_failures:
            background.refused.append(error)  # the others learn of it now and raise at their next call: so do we
            _in_background(run, _raiser(error), None)
        raise
    if deferred is None:
        return run.stage(lambda: request, refuses_later=run.shares_failures)
    piece = None if request.begin.piece is None else request.begin
    deferred = replace(deferred, held=run.seconds)
    overlapped = _in_background(run, lambda: request, deferred, piece)
    return _Staging(
        url=request.storage.url(request.path),
        iteration=request.begin.iteration,
        save_id="",
        bytes=request.content.nbytes,
        files=0,
        seconds=run.seconds,
        overlapped=overlapped,
    )


def _in_background(
    run: _Run, prepare: Callable[[], SaveRequest], deferred: _Deferred | None, piece: Begin | None = None
) -> _Overlapped:
    """Stages in a thread; loads and optimizers wait for it.

    Args:
        piece: of a set whose pieces the ranks save each by itself.
    """
    copying = run.copying = run.background.begin_copy()
    overlapped = _Overlapped()

    def work() -> None:
        try:
            overlapped.result = run.stage(prepare, deferred)
        except _NotStagedError as error:
            overlapped.error = error.__cause__
        except Exception as error:  # noqa: BLE001 - raised by the next call, on this rank as on the others
            overlapped.error = error
            if copying.cancelled:  # `drain` has told of it
                return
            if piece is not None:  # begun on each rank by itself: the others know nothing of it
                run.background.failed_to_stage(piece, error)
            elif error not in run.background.refused:
                run.background.refused.append(error)
        finally:
            copying.end()
            overlapped.ended.set()

    run.background.beside(work)
    return overlapped


def _raiser(error: Exception) -> Callable[[], SaveRequest]:
    def prepare() -> SaveRequest:
        raise error

    return prepare


def _defer(content: Content, background: BackgroundSaves) -> _Deferred | None:
    """Copies what may change before an optimizer steps; None: that is too much, so that all is to be staged at once."""
    parts = steady_parts(content.parts)
    later, now = divide(content.tensors, parts)
    nbytes = sum(leaf.nbytes for leaf in now)
    if nbytes > COPIED_AT_ONCE:
        largest = max(now, key=lambda leaf: leaf.nbytes)
        text = (
            f"{nbytes / 2**20:.0f} MiB of the state, {largest.key!r} first, may change before an optimizer steps: all "
            "is staged eagerly. Give modules and optimizers to the state as they are, or choose staging='eager'."
        )
        background.tell_once(Notice("staged_eagerly", text, {"bytes": nbytes}))
        return None
    overlap.watch(parts)
    for leaf in now:
        leaf.tensor = leaf.tensor.clone()
    content.keep_values()
    ready = []
    for device in {leaf.tensor.device for leaf in (*later, *now) if leaf.tensor.is_cuda}:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        ready.append(event)
    return _Deferred(Unchanged(later), tuple(ready))


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
