"""One restore, from a chosen checkpoint to a filled state: the parts, then what is stored beside them.

The choreography (see `coordination`)::

    rank 0   choose the checkpoint and the save          broadcast (R2; in `Checkpointer.restore`)
    all      open it; read what is beside the state      gather which keys are requested
    all      check                                       agree: nothing has been changed (R4)
    all      fill the state                              agree
    all      put the RNG back
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptlib import rng
from ckptlib.coordination import Group
from ckptlib.errors import StateError
from ckptlib.events import Notice, NoticeHandler, ResumeChoice, emit
from ckptlib.reader import LoadReport, PreparedLoad, Strict, load_together, prepare_load
from ckptlib.resume import RERUN_KEY, StoredExtras, is_bookkeeping
from ckptlib.source import Source, open_source
from ckptlib.topology import Topology

BESIDE_STATE = frozenset({"rng", "args", "rerun_state"})
"""Names in `contents` that are no parts of the state."""


@dataclass(frozen=True)
class Restored:
    """What `Checkpointer.restore` did.

    Attributes:
        found: False: there was nothing, the run starts from its own initial state.
        iteration: of the checkpoint; 0 when nothing was found.
        progress: the numbers given to `save`: consumed samples, lr, flops, ...
        args: the arguments that were saved, or None.
        rerun_state: the rerun state machine's state; None when none was saved or the topology changed.
        reason: why this checkpoint.
    """

    found: bool
    iteration: int = 0
    url: str | None = None
    save_id: str | None = None
    progress: Mapping[str, float] = field(default_factory=dict)
    args: Any = None
    rerun_state: Any = None
    reason: str = ""
    report: LoadReport | None = None


@dataclass(frozen=True)
class RestoreRequest:
    """What to restore, and who asks; the same on every rank.

    Attributes:
        choice: the checkpoint and the save in it.
        contents: parts of the state, plus ``rng``; None: everything.
        strict, verify: as for `ckptlib.load`.
        group: the ranks that restore together.
        topology: of this job; an RNG state or rerun state of another one means another place.
    """

    choice: ResumeChoice
    contents: Collection[str] | None
    strict: Strict
    verify: str | None
    group: Group
    topology: Topology | None
    rng_tracker: rng.RngTracker | None
    on_event: NoticeHandler | None
    storage_options: Mapping[str, Any] | None

    @property
    def with_rng(self) -> bool:
        """Whether the RNG is restored too."""
        return self.contents is None or "rng" in self.contents


@dataclass(frozen=True)
class _Extras:
    """What a checkpoint holds for one rank beside the state. `rng_is_own`: the rank's own, not one to seed from."""

    progress: Mapping[str, float]
    args: Any
    rng: Mapping[str, Any] | None
    rng_is_own: bool
    rerun_state: Any
    rerun_dropped: bool


def restore_from(request: RestoreRequest, state: dict[str, Any]) -> Restored:
    """Fills the state, then the RNG. Collective. What can be refused is refused on all ranks before anything changes.

    Raises:
        CkptError: as `ckptlib.load`.
    """
    contents, choice = request.contents, request.choice
    extras: _Extras | None = None

    def prepare() -> PreparedLoad:
        nonlocal extras
        wanted = parts_of(state, contents)
        source = open_source(choice.url, save_id=choice.save_id, storage_options=request.storage_options)
        stored_parts = () if source.manifest is None else source.manifest.begin.contents
        left_out = {*state, *stored_parts} - {*wanted} if contents is not None else set()
        below_left_out = tuple(f"{name}." for name in left_out)

        def ignore(key: str) -> bool:
            return is_bookkeeping(key) or key in left_out or key.startswith(below_left_out)

        prepared = prepare_load(wanted, source, ignore)
        extras = _read_extras(request, source)
        return prepared

    report = load_together(request.group, prepare, request.strict, request.verify)
    assert extras is not None  # else `load_together` has raised
    if extras.rng is not None:
        _restore_rng(request, extras.rng, extras.rng_is_own, report.url)
    elif request.with_rng:
        emit(request.on_event, Notice("rng_absent", f"{report.url}: no RNG state is stored; it stays as it is"))
    if extras.rerun_dropped:
        emit(request.on_event, Notice("rerun_state_dropped", f"{report.url}: the topology changed"))
    return Restored(
        found=True,
        iteration=choice.iteration,
        url=report.url,
        save_id=report.save_id,
        progress=extras.progress,
        args=extras.args,
        rerun_state=extras.rerun_state,
        reason=choice.reason,
        report=report,
    )


def _read_extras(request: RestoreRequest, source: Source) -> _Extras:
    """What is stored beside the state for this rank."""
    stored = StoredExtras(source)
    rank, world_size = request.group.rank, request.group.world_size
    begin = None if source.manifest is None else source.manifest.begin
    same = (
        begin is not None
        and begin.world_size == world_size
        and _same_place(begin.topology, request.topology, world_size)
    )
    own = stored.cell(rng.KEY_BY_RANK, (world_size,), (rank,)) if same and request.with_rng else None
    if own is not None:
        rng.check(own, request.rng_tracker)
    return _Extras(
        progress=stored.progress(),
        args=stored.value("args"),
        rng=own if own is not None or not request.with_rng else stored.first_rng(),
        rng_is_own=own is not None,
        rerun_state=stored.cell(RERUN_KEY, (world_size,), (rank,)) if same else None,
        rerun_dropped=not same and stored.has_grid(RERUN_KEY),
    )


def _same_place(saved: Topology | None, now: Topology | None, world_size: int) -> bool:
    """Whether a rank number means the same place in both; a topology that was not given is plain data parallel."""
    plain = Topology(dp=world_size)
    return (saved or plain) == (now or plain)


def _restore_rng(request: RestoreRequest, state: Mapping[str, Any], is_own: bool, url: str) -> None:
    """This rank's own state when it exists and means the same place; else a recorded, deterministic re-seed."""
    if is_own:
        rng.restore(state, request.rng_tracker)
        return
    rank = request.group.rank
    seed = rng.reseed(state, rank if request.topology is None else request.topology.replica(rank))
    emit(
        request.on_event,
        Notice(
            "rng_reseeded",
            f"{url}: saved on another topology; rank {rank} was seeded from the saved state",
            {"rank": rank, "seed": seed},
        ),
    )


def parts_of(state: Mapping[str, Any], contents: Collection[str] | None) -> dict[str, Any]:
    """The parts of a state that `contents` names; None: all.

    Raises:
        StateError: it names a part that the state does not have.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"state: expected a mapping from names to parts, got {type(state).__name__}")
    if contents is None:
        return dict(state)
    if isinstance(contents, str):
        raise StateError(f"contents={contents!r}: expected a collection of names, got one string")
    unknown = sorted({*contents} - {*state} - BESIDE_STATE)
    if unknown:
        raise StateError(f"contents: the state has no part {unknown[0]!r}; it has {', '.join(map(repr, state))}")
    return {name: part for name, part in state.items() if name in contents}
