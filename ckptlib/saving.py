"""One synchronous save, from state tree to commit, on one process or many.

The choreography (each line is one message round at most, see `coordination`)::

    all      flatten; describe                           gather structures, or digests of plans that are kept
    rank 0   plan, check tiling; W9; begin.json; fence   hand out save id, and shares of a new plan
    all      write data; record                          gather "done"
    rank 0   check records; decide; exports              broadcast decision
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptlib import commit, exports, formats, removal
from ckptlib import storage as st
from ckptlib.beats import Pulse
from ckptlib.coordination import Group, agree, hand_out, lead
from ckptlib.errors import (
    BackgroundSaveError,
    CheckpointExistsError,
    DisagreementError,
    FencedError,
    SaveAbortedError,
    StateError,
)
from ckptlib.manifest import Begin, Decision
from ckptlib.packing import Content, Package, write_package
from ckptlib.pieces import LocalPlan
from ckptlib.plan import Extent
from ckptlib.planning import Offer, PlanCache, Share

log = logging.getLogger("ckptlib")


@dataclass(frozen=True)
class SaveResult:
    """A committed save; with ``io_mode="async"`` one that will be, see `wait`.

    Attributes:
        bytes: of all files of the save, over all ranks; of an asynchronous one, payload bytes that this rank staged.
        files: number of data files, over all ranks; of an asynchronous one, of this rank, 0 before they are written.
        seconds: wall time on this rank, from flattening to the end of the exports, or until `save` returned.
        save_id: empty where it is not known yet (overlapped staging), and of a save that was skipped.
        skipped: there is no save, as many as allowed were in flight (`AsyncOptions.at_limit`).
    """

    url: str
    iteration: int
    save_id: str
    bytes: int
    files: int
    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = False

    def wait(self, timeout: float | None = None) -> SaveResult:
        """Returns when this rank's part is durable and, on rank 0, the checkpoint exists: of a synchronous save, now.

        Raises:
            TimeoutError: not within `timeout` seconds; it goes on.
            BackgroundSaveError: it failed.
        """
        return self


@dataclass(frozen=True)
class SaveRequest:
    """What is to be saved and where; the same on every rank, except for `content`.

    Attributes:
        begin: everything but save id, world size, plan digest and `replaces`, which the save fills in. Pieces of a set
            that is saved together come with the save id of the set.
        on_exists: ``error`` or ``replace``: when this attempt has already committed here (W9).
        newest_attempt: asked on rank 0 for fencing (W8); None outside a root.
        failed: this rank's earlier saves that failed in the background, of which no save has told: then this one is
            not made.
        removes: older saves, directory and save id, that go before anything is written.
        replaces: whether an older save of this iteration goes when this one is committed.
        carries_failures: it is made, and what failed before is `Begun.failed` on all ranks. Equal on all ranks.
    """

    storage: st.Storage
    path: str
    begin: Begin
    content: Content
    on_exists: str = "error"
    newest_attempt: Callable[[], int] | None = None
    failed: Sequence[BackgroundSaveError] = ()
    removes: Sequence[tuple[str, str]] = ()
    replaces: bool = True
    carries_failures: bool = False

    def __post_init__(self) -> None:
        if self.on_exists not in ("error", "replace"):
            raise StateError(f"on_exists={self.on_exists!r}: expected 'error' or 'replace'")


@dataclass(frozen=True)
class Begun:
    """A save that has begun: what is to be written, where, and this rank's share of it.

    Attributes:
        value_digests: of this rank's plain values, by name.
        failed: earlier saves that failed; the same on all ranks.
    """

    request: SaveRequest
    begin: Begin
    share: Share
    value_digests: Mapping[str, str]
    failed: BackgroundSaveError | None = None

    def pack(self, rank: int) -> Package:
        """What this rank writes.

        Raises:
            StateError: an object cannot be saved.
        """
        return self.request.content.pack(self.share, self.value_digests, leads=rank == 0)


def begin_together(group: Group, prepare: Callable[[], SaveRequest], plans: PlanCache) -> Begun:
    """Plans and begins a save. Collective: every rank calls it, in the same order.

    Args:
        prepare: makes this rank's request. It runs inside, so that what it raises is at once known on all ranks.
        plans: plans of earlier saves of this group.

    Raises:
        BackgroundSaveError: earlier saves failed (`SaveRequest.failed`), on whatever rank: the same on all.
        CheckpointExistsError, FencedError, StateError, RankFailedError, RankTimeoutError: as `run_save`.
    """
    return _agree_on_plan(group, prepare, plans, _begin)


def plan_together(group: Group, prepare: Callable[[], SaveRequest], plans: PlanCache) -> Begun:
    """What `begin_together` does before it begins: the plan is kept, and nothing is written. Collective.

    Raises:
        StateError, RankFailedError, RankTimeoutError: as `begin_together`.
    """

    def planned(request: SaveRequest, plan_digest: str, world_size: int, extent: Extent) -> Begin:
        return replace(request.begin, plan_digest=plan_digest, world_size=world_size)

    return _agree_on_plan(group, prepare, plans, planned)


def _agree_on_plan(group: Group, prepare: Callable[[], SaveRequest], plans: PlanCache, begin_: _BeginCall) -> Begun:
    group.next_round()
    prepared: tuple[SaveRequest, LocalPlan, _Answer] | None = None

    def offer() -> _Answer:
        nonlocal prepared
        request = prepare()
        local = request.content.describe()
        answer = _Answer(plans.offer(local), _place(request), tuple(request.failed), request.content.unplanned_nbytes)
        prepared = request, local, answer
        return answer

    answers = agree(group, "plan", offer) or []
    assert prepared is not None  # else `agree` has raised
    request, local, answer = prepared
    opened = hand_out(group, "begin", lambda: _open(request, answers, plans, group.world_size, begin_))
    if opened is None:
        answers = agree(group, "structure", lambda: replace(answer, offer=Offer(local))) or []
        opened = hand_out(group, "begin again", lambda: _open(request, answers, plans, group.world_size, begin_))
    assert opened is not None  # whole structures settle a plan
    begin, new_share, failed = opened
    share = new_share or plans.share(local, begin.plan_digest)
    assert share is not None  # rank 0 uses a kept plan only when every rank has offered it
    plans.keep(local, share)
    return Begun(request, begin, share, local.values, failed)


def run_save(
    group: Group, prepare: Callable[[], SaveRequest], plans: PlanCache | None = None
) -> tuple[SaveResult, Decision, Begin]:
    """Saves and commits. Collective: every rank calls it, in the same order.

    Args:
        prepare, plans: see `begin_together`; no plans: nothing is kept.

    Raises:
        CheckpointExistsError: W9, before any byte is written.
        FencedError: W8, a newer attempt owns the run.
        StateError: the state cannot be saved; nothing was written.
        SaveAbortedError: the decision is `abort`.
        RankFailedError, RankTimeoutError: on every rank, when a rank failed or did not answer.
    """
    started = time.perf_counter()
    clock = _Phases(started)
    begun = begin_together(group, prepare, PlanCache() if plans is None else plans)
    request, begin = begun.request, begun.begin
    clock.mark("plan")
    try:
        written = agree(group, "write", lambda: _write(begun, group.rank, started))
        clock.mark("write")
        decision = lead(group, "commit", lambda: _commit(request, begin))
    except BaseException as error:
        if group.rank == 0:
            _abort(request, begin, error)
        raise
    clock.mark("commit")
    total, count = lead(group, "totals", lambda: (sum(n for n, _ in written or []), sum(k for _, k in written or [])))
    result = SaveResult(
        url=request.storage.url(request.path),
        iteration=begin.iteration,
        save_id=begin.save_id,
        bytes=total,
        files=count,
        seconds=time.perf_counter() - started,
        phases=clock.phases,
    )
    return result, decision, begin


class _Phases:
    def __init__(self, started: float) -> None:
        self._last = started
        self.phases: dict[str, float] = {}

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.phases[name] = now - self._last
        self._last = now


@dataclass(frozen=True)
class _Answer:
    """What a rank says first: its structure, where it saves which iteration, what failed in the background, and bytes
    that it will write and that no plan counts."""

    offer: Offer
    place: tuple[str, int]
    failed: Sequence[BackgroundSaveError]
    unplanned: int


_BeginCall = Callable[[SaveRequest, str, int, Extent], Begin]
"""Begins a save: the request, the digest of its plan, ranks, and how much it will be."""


def _place(request: SaveRequest) -> tuple[str, int]:
    return request.storage.url(request.path), request.begin.iteration


def _open(
    request: SaveRequest, answers: Sequence[_Answer], plans: PlanCache, world_size: int, begin_: _BeginCall
) -> list[tuple[Begin, Share | None, BackgroundSaveError | None] | None]:
    """Plans and begins the save. For each rank its share, None for one that it has; None: all structures are needed."""
    failed = all_failures([answer.failed for answer in answers])
    if failed is not None and not request.carries_failures:
        raise failed
    first = answers[0].place
    for rank, answer in enumerate(answers):
        if answer.place != first:
            raise DisagreementError(
                f"rank 0 saves iteration {first[1]} at {first[0]}, "
                f"rank {rank} iteration {answer.place[1]} at {answer.place[0]}"
            )
    settled = plans.settle([answer.offer for answer in answers])
    if settled is None:
        return [None] * world_size
    plan, is_known = settled
    extent = plan.extent([answer.unplanned for answer in answers])
    begin = begin_(request, plan.digest, world_size, extent)
    return [(begin, None if is_known else Share.of(plan, rank), failed) for rank in range(world_size)]


def all_failures(by_rank: Sequence[Sequence[BackgroundSaveError]]) -> BackgroundSaveError | None:
    """What any of the ranks knows, for all of them; not all of them need know of one failure already."""
    first: dict[frozenset[str], tuple[int, BackgroundSaveError]] = {}
    for rank, failed in enumerate(by_rank):
        for error in failed:
            first.setdefault(error.save_ids, (rank, error))
    if not first:
        return None
    told = sorted(first.values(), key=lambda entry: entry[1].iteration or 0)
    text = "; ".join(f"rank {rank}: {error}" if rank else str(error) for rank, error in told)
    return BackgroundSaveError(text, iteration=told[0][1].iteration, save_ids=frozenset().union(*first))


def _begin(request: SaveRequest, plan_digest: str, world_size: int, extent: Extent) -> Begin:
    saves = commit.list_saves(request.storage, request.path)
    for save in saves:
        if save.tombstoned:
            exports.bury(request.storage, request.path, save.save_id)
    mine = [save for save in saves if save.committed and _same_attempt(save, request.begin)]
    if mine and request.on_exists != "replace":
        raise CheckpointExistsError(
            f"{request.storage.url(request.path)}: iteration {request.begin.iteration} is already committed "
            f"(save {mine[-1].save_id}) by this attempt. Pass on_exists='replace' to supersede it."
        )
    _refuse_to_be_older(request, saves)
    if request.on_exists != "replace" and formats.sniff_beside(request.storage, request.path, saves) is not None:
        raise CheckpointExistsError(
            f"{request.storage.url(request.path)}: holds a checkpoint that another tool wrote. Save elsewhere, or pass "
            "on_exists='replace' to let this one take its place."
        )
    begin = replace(
        request.begin,
        save_id=request.begin.save_id
        or commit.new_save_id(request.begin.attempt, after=[save.save_id for save in saves]),
        world_size=world_size,
        plan_digest=plan_digest,
        replaces=tuple(save.save_id for save in mine if request.replaces),
        created_at=time.time(),
    )
    if begin.piece is None:  # a piece's room is agreed on by all ranks of its host, and may be made by `removes`
        request.storage.prepare(request.path, size=extent.nbytes, files=extent.files)
    commit.begin_save(request.storage, request.path, begin)
    newest = request.newest_attempt() if request.newest_attempt is not None else 0
    if newest > begin.attempt:
        error = FencedError(
            f"{request.storage.url(request.path)}: attempt {newest} of this run has started, this process is attempt "
            f"{begin.attempt}. It must stop: two trainers write to one run."
        )
        _abort(request, begin, error)
        raise error
    return begin


def _refuse_to_be_older(request: SaveRequest, saves: Sequence[commit.SaveState]) -> None:
    """A save that sorts before a committed one (a bare save in a run's directory) would succeed and never be read."""
    attempt = request.begin.attempt
    later = [save.save_id for save in saves if save.committed and int(save.save_id.partition("-")[0]) > attempt]
    if later and (request.newest_attempt is None or request.newest_attempt() <= attempt):  # else it is fenced
        raise CheckpointExistsError(
            f"{request.storage.url(request.path)}: holds save {later[-1]} of a run's attempt, which this save (attempt "
            f"{attempt}) could not take the place of. Save through a Checkpointer of that run, or elsewhere."
        )


def _same_attempt(save: commit.SaveState, begin: Begin) -> bool:
    """W9: a bare save (attempt 0) meets its equals; what older attempts left is superseded without ceremony."""
    return save.begin is not None and save.begin.attempt == begin.attempt


def _write(begun: Begun, rank: int, held_since: float) -> tuple[int, int]:
    """One rank's part: serialise, write, record. Returns bytes and number of data files."""
    # Everything that can be refused is refused before the first byte.
    request, begin = begun.request, begun.begin
    package = begun.pack(rank)
    total = package.nbytes + package.other_nbytes
    pulse = Pulse(request.storage, request.path, begin, rank, total, at_once=False)
    try:
        removal.remove_all(request.storage, request.removes)
        written = write_package(request.storage, request.path, begin, rank, package, pulse, held_since=held_since)
    finally:
        pulse.stop()
    return written.nbytes, written.count


def _commit(request: SaveRequest, begin: Begin) -> Decision:
    decision = commit.try_commit(request.storage, request.path, begin, decided_by="coordinator")
    if decision is None and commit.await_records(request.storage, request.path, begin):
        decision = commit.try_commit(request.storage, request.path, begin, decided_by="coordinator")
    if decision is None:
        missing = commit.read_records(request.storage, request.path, begin).missing
        raise SaveAbortedError(
            f"{request.storage.url(request.path)}: no valid record of rank {', '.join(map(str, missing))}, "
            "although every rank said it had written one"
        )
    if decision.outcome == "abort":
        raise SaveAbortedError(
            f"{request.storage.url(request.path)}: save {begin.save_id} was aborted by {decision.decided_by}: "
            f"{decision.reason}"
        )
    exports.conclude(request.storage, request.path, begin)
    return decision


def abort_begun(begun: Begun, rank: int, error: BaseException) -> None:
    """Says that this rank will not do its part of a save that has begun; rank 0 decides `abort`."""
    request, begin = begun.request, begun.begin
    if rank == 0:
        _abort(request, begin, error)
        return
    try:
        reason = f"{type(error).__name__}: {error}"
        commit.publish_failure(request.storage, request.path, begin.save_id, rank, reason)
    except OSError as other:
        log.warning("save %s: could not tell that rank %d failed: %s", begin.save_id, rank, other)


def _abort(request: SaveRequest, begin: Begin, error: BaseException) -> None:
    """Best effort: an undecided save is as good as aborted, the next attempt settles it."""
    try:
        commit.decide_abort(
            request.storage,
            request.path,
            begin.save_id,
            reason=f"{type(error).__name__}: {error}",
            decided_by="coordinator",
        )
    except OSError as other:
        log.warning("save %s: could not record the abort: %s", begin.save_id, other)
