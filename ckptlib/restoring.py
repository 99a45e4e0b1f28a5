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

from ckptlib import rng, streams
from ckptlib.coordination import Group
from ckptlib.errors import StateError
from ckptlib.events import Notice, NoticeHandler, ResumeChoice, emit
from ckptlib.load_options import LoadOptions
from ckptlib.loading import LoadReport, PreparedLoad, load_together, prepare_load
from ckptlib.resume import RERUN_KEY, StoredExtras, is_bookkeeping
from ckptlib.source import Source, open_source
from ckptlib.stored_rng import StoredStreams, stored_streams
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
        options: how it is loaded.
        group: the ranks that restore together.
        topology: of this job; an RNG state or rerun state of another one means another place.
    """

    choice: ResumeChoice
    contents: Collection[str] | None
    options: LoadOptions
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
    """What a checkpoint holds for one rank beside the state. `rng`: found, and proven to work."""

    progress: Mapping[str, float]
    args: Any
    rng: tuple[StoredStreams, rng.PreparedRng] | None
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

        prepared = prepare_load(wanted, source, request.options, ignore)
        extras = _read_extras(request, source)
        return prepared

    report = load_together(request.group, prepare)
    assert extras is not None  # else `load_together` has raised
    if extras.rng is not None:
        _restore_rng(request, *extras.rng, report.url)
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
    now = request.topology or Topology(dp=world_size)
    same = begin is not None and (begin.topology or Topology(dp=begin.world_size)) == now
    found = stored_streams(source, now, rank) if request.with_rng else None
    return _Extras(
        progress=stored.progress(),
        args=stored.value("args"),
        rng=None if found is None else (found, rng.prepare(found.continuation, request.rng_tracker)),
        rerun_state=stored.cell(RERUN_KEY, (world_size,), (rank,)) if same else None,
        rerun_dropped=not same and stored.has_grid(RERUN_KEY),
    )


def _restore_rng(request: RestoreRequest, stored: StoredStreams, prepared: rng.PreparedRng, url: str) -> None:
    """Puts the streams back. What does not continue as it was is said (R6)."""
    prepared.apply()
    rank = request.group.rank
    if stored.changed is not None or prepared.seeded:
        why = "the checkpoint lacks streams" if stored.changed is None else f"the topology changed ({stored.changed})"
        emit(
            request.on_event,
            Notice(
                "rng_reseeded",
                f"{url}: {why}; rank {rank} seeded {_names(prepared.seeded)} from the saved state and its place, "
                f"and continues {_names(prepared.kept)}",
                {
                    "rank": rank,
                    "seed": prepared.seeded.get(streams.DEFAULT),
                    "seeded": dict(prepared.seeded),
                    "kept": list(prepared.kept),
                },
            ),
        )
    if stored.shared:
        emit(
            request.on_event,
            Notice(
                "rng_shared",
                f"{url}: one RNG state is stored for all data-parallel ranks of a cell, as Megatron-Core keeps it "
                "without data_parallel_random_init; all of them continue from it",
                {"rank": rank},
            ),
        )
    if prepared.dropped:
        emit(
            request.on_event,
            Notice(
                "rng_streams_dropped",
                f"{url}: the streams {_names(prepared.dropped)} are stored, and this process has no tracker for them",
                {"rank": rank, "dropped": list(prepared.dropped)},
            ),
        )


def _names(of: Collection[str]) -> str:
    return ", ".join(of) or "nothing"


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
