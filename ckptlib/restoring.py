"""One restore, from a chosen checkpoint to a filled state: the parts, then what is stored beside them.

The choreography (see `coordination`)::

    rank 0   choose the checkpoint and the save          broadcast (R2; in `Checkpointer.restore`)
    all      open it; read what is beside the state      gather which keys are requested
    all      check                                       agree: nothing has been changed (R4)
    all      fill the state                              agree
    all      put the RNG back

With ``finetune`` only the weights are loaded, and a training of its own begins with them at iteration 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptlib import progress, rng, streams
from ckptlib.coordination import Group, lead
from ckptlib.errors import StateError
from ckptlib.events import Notice, NoticeHandler, ResumeChoice, emit
from ckptlib.layouts.loading import OwnExtras, Place, open_own, prepare
from ckptlib.load_options import LoadOptions
from ckptlib.loading import LoadReport, Prepared, load_together
from ckptlib.planning import PlanCache
from ckptlib.recorded_args import check_args
from ckptlib.resume import StoredExtras, is_bookkeeping
from ckptlib.source import Source, open_source
from ckptlib.stored_rng import StoredStreams
from ckptlib.topology import Topology
from ckptlib.weights import check_main_params, is_training_state, refresh_main_params, weights_of

BESIDE_STATE = frozenset({"rng", "args", "rerun_state"})
"""Names in `contents` that are no parts of the state."""


@dataclass(frozen=True)
class Restored:
    """What `Checkpointer.restore` did.

    Attributes:
        found: False: there was nothing, the run starts from its own initial state.
        iteration: where the training goes on: that of the checkpoint; 0 when nothing was found, or only its weights
            were wanted.
        source_iteration: of the checkpoint; None when nothing was found.
        progress: the numbers given to `save`: consumed samples, lr, flops, ...; none with ``finetune``.
        args: the arguments that were saved, or None.
        rerun_state: the rerun state machine's state; None when none was saved or the topology changed.
        reason: why this checkpoint.
    """

    found: bool
    iteration: int = 0
    source_iteration: int | None = None
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
        plans: what is kept between loads of this group.
        topology: of this job; an RNG state or rerun state of another one means another place.
        allow_changed: names of observed numbers that may differ after the load.
        finetune: weights only.
        args: of this job, to be compared with those of the checkpoint; None: they are not.
    """

    choice: ResumeChoice
    contents: Collection[str] | None
    options: LoadOptions
    group: Group
    plans: PlanCache
    topology: Topology | None
    rng_tracker: rng.RngTracker | None
    on_event: NoticeHandler | None
    storage_options: Mapping[str, Any] | None = field(repr=False)
    allow_changed: Collection[str] = ()
    finetune: bool = False
    args: Any = None

    @property
    def with_rng(self) -> bool:
        """Whether the RNG is restored too."""
        return not self.finetune and (self.contents is None or "rng" in self.contents)

    def wanted(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The parts of a state that are restored.

        Raises:
            StateError: there are none such, or they contradict the other wishes.
        """
        parts = parts_of(state, self.contents)
        if self.finetune:
            parts = weights_of(parts, named=self.contents is not None)
        if self.options.load_main_params:
            check_main_params(parts)
        return parts


@dataclass(frozen=True)
class _Extras:
    """What a checkpoint holds for one rank beside the state.

    Attributes:
        observed: what rank 0's state said at the save.
        rng: found, and proven to work.
    """

    progress: Mapping[str, float]
    observed: Mapping[str, float]
    args: Any
    rng: tuple[StoredStreams, rng.PreparedRng] | None
    rerun_state: Any
    rerun_dropped: bool


def restore_from(request: RestoreRequest, state: dict[str, Any]) -> Restored:
    """Fills the state, then the RNG. Collective. What can be refused is refused on all ranks before anything changes.

    Raises:
        CkptError: as `ckptlib.load`.
    """
    choice = request.choice
    extras: _Extras | None = None
    wanted: dict[str, Any] = {}

    def prepare_here() -> Prepared:
        nonlocal extras, wanted
        wanted = request.wanted(state)
        source = open_source(choice.url, save_id=choice.save_id, storage_options=request.storage_options)
        own = open_own(source, Place.of(request.group, request.topology or Topology(dp=request.group.world_size)))
        stored = StoredExtras(source) if own is None else OwnExtras(own)
        if request.args is not None:
            check_args(stored.value("args"), request.args, source.url)
        stored_parts = () if source.manifest is None else source.manifest.begin.contents
        is_partial = request.finetune or request.contents is not None
        left_out = {*state, *stored_parts} - {*wanted} if is_partial else set()
        below_left_out = tuple(f"{name}." for name in left_out)

        def ignore(key: str) -> bool:
            if request.finetune and is_training_state(key):
                return True
            return is_bookkeeping(key) or key in left_out or key.startswith(below_left_out)

        prepared = prepare(wanted, source, request.options, own, ignore)
        extras = _read_extras(request, source, stored)
        return prepared

    report = load_together(request.group, prepare_here, request.plans)
    assert extras is not None  # else `load_together` has raised
    state.update(wanted)  # a part that is a plain value is another one now
    refresh_main_params(state, wanted)
    if request.finetune:
        return Restored(
            found=True,
            source_iteration=choice.iteration,
            url=report.url,
            save_id=report.save_id,
            args=extras.args,
            reason=f"{choice.reason}; weights only",
            report=report,
        )
    if request.options.keys is None:
        _check_progress(request, state, wanted, extras.observed, report.url)
    if extras.rng is not None:
        _restore_rng(request, *extras.rng, report.url)
    elif request.with_rng:
        emit(request.on_event, Notice("rng_absent", f"{report.url}: no RNG state is stored; it stays as it is"))
    if extras.rerun_dropped:
        emit(request.on_event, Notice("rerun_state_dropped", f"{report.url}: the topology changed"))
    return Restored(
        found=True,
        iteration=choice.iteration,
        source_iteration=choice.iteration,
        url=report.url,
        save_id=report.save_id,
        progress=extras.progress,
        args=extras.args,
        rerun_state=extras.rerun_state,
        reason=choice.reason,
        report=report,
    )


def _read_extras(request: RestoreRequest, source: Source, stored: StoredExtras | OwnExtras) -> _Extras:
    """What is stored beside the state for this rank."""
    rank, world_size = request.group.rank, request.group.world_size
    begin = None if source.manifest is None else source.manifest.begin
    now = request.topology or Topology(dp=world_size)
    same = begin is not None and (begin.topology or Topology(dp=begin.world_size)) == now
    found = stored.streams(now, rank) if request.with_rng else None
    return _Extras(
        progress=stored.progress(),
        observed=stored.observed(),
        args=stored.value("args"),
        rng=None if found is None else (found, rng.prepare(found.continuation, request.rng_tracker)),
        rerun_state=stored.rerun_state(world_size, rank) if same else None,
        rerun_dropped=not same and stored.has_rerun_state(),
    )


def _check_progress(
    request: RestoreRequest,
    state: Mapping[str, Any],
    restored: Mapping[str, Any],
    recorded: Mapping[str, float],
    url: str,
) -> None:
    """C38: rank 0 compares what its restored parts say with what it recorded. Other ranks may hold other parameters.

    A part that was left out by `contents` may differ, and that is said: an optimizer that goes on beside a scheduler
    that does not.
    """

    def compare() -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        now = progress.observe(restored)
        allowed = progress.check(recorded, now, url, request.allow_changed)
        beside = progress.observe({name: part for name, part in state.items() if name not in restored}) if now else {}
        return allowed, {
            name: number
            for name, number in beside.items()
            if name not in now and progress.check(recorded, {name: number}, url, progress.OBSERVED)
        }

    allowed, left_out = lead(request.group, "progress", compare)
    for name, (old, new) in allowed.items():
        message = f"{url}: {name} was {old:g} at the save and is {new:g} now, as allowed"
        emit(request.on_event, Notice("progress_changed", message, {"name": name, "recorded": old, "now": new}))
    for name, new in left_out.items():
        message = f"{url}: {name} was {recorded[name]:g} at the save and is {new:g}: that part was not restored"
        emit(
            request.on_event,
            Notice("progress_not_restored", message, {"name": name, "recorded": recorded[name], "now": new}),
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
