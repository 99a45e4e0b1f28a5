"""From what a trainer wants saved to the request that the ranks of a save agree on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptlib import rng, roots
from ckptlib import storage as st
from ckptlib.composing import Beside, Streams, compose
from ckptlib.coordination import Group, agree, hand_out
from ckptlib.errors import BackgroundSaveError, UnsupportedError
from ckptlib.layouts.contents import content_of, writes
from ckptlib.local import LocalTier
from ckptlib.manifest import Begin, Format, IoMode, Kind, SemanticType
from ckptlib.restoring import parts_of
from ckptlib.roots import AttemptRecord
from ckptlib.saving import SaveRequest
from ckptlib.topology import Topology

KINDS: tuple[Kind, ...] = ("persistent", "non_persistent_global", "non_persistent_local", "release")


@dataclass(frozen=True)
class Asked:
    """What is to be saved, and how; see `Checkpointer.save`."""

    state: Mapping[str, Any]
    contents: Collection[str] | None
    progress: Mapping[str, float] | None
    metrics: Mapping[str, float] | None
    args: Any
    rerun_state: Any
    iteration: int
    kind: Kind
    semantic_type: SemanticType
    format: Format
    io_mode: IoMode
    on_exists: str = "error"


@dataclass(frozen=True)
class Requests:
    """What all saves of one attempt have in common.

    Attributes:
        rng_tracker: streams beside the global ones.
        every_rng_state: Megatron's lists have the streams of every data-parallel rank.
        local: where each rank keeps checkpoints of its own.
        newest_attempt: number of the newest attempt of the run.
    """

    storage: st.Storage
    root: str
    run: str
    group: Group
    topology: Topology | None
    attempt: AttemptRecord
    rng_tracker: rng.RngTracker | None
    every_rng_state: bool
    local: LocalTier | None
    newest_attempt: Callable[[], int]

    def maker(self, asked: Asked) -> Callable[[str | None, Sequence[BackgroundSaveError]], SaveRequest]:
        """What makes this rank's request, within the exchange in which all ranks learn when one cannot. Collective.

        Returns:
            From the save that this one continues, and the failures of which no save has told, to the request. It raises
            StateError and UnsupportedError.
        """
        with_rng = asked.contents is None or "rng" in asked.contents
        local = self.local if asked.kind == "non_persistent_local" else None
        every_rng = self.every_rng_state and local is None
        all_rng = self._all_rng_states(asked.semantic_type) if with_rng and every_rng else None
        rank, world_size, topology = self.group.rank, self.group.world_size, self.topology
        writer = writes(asked.semantic_type, topology, rank, world_size)
        if local is not None:  # a world of one on each host
            rank, world_size, topology = 0, 1, None

        def request(parent: str | None, failed: Sequence[BackgroundSaveError]) -> SaveRequest:
            if asked.kind not in KINDS:
                raise UnsupportedError(f"kind {asked.kind!r} is not supported; supported are {', '.join(KINDS)}")
            if asked.kind == "non_persistent_local" and local is None:
                raise UnsupportedError(f"kind {asked.kind!r} needs Checkpointer(local=LocalOptions(root=...))")
            begin = Begin(
                save_id="",
                run=self.run,
                attempt=self.attempt.number,
                attempt_id=self.attempt.attempt_id,
                iteration=asked.iteration,
                world_size=world_size,
                plan_digest="",
                kind=asked.kind,
                semantic_type=asked.semantic_type,
                format=asked.format,
                io_mode=asked.io_mode,
                topology=topology,
                parent=parent,
                piece=None if local is None else local.pieces.piece,
            )
            tree: dict[str, Any] | None = None
            if writer:  # else nobody looks at this rank's state
                own = rng.capture(self.rng_tracker) if with_rng else None
                streams = Streams(own, all_rng, every_rank=every_rng)
                beside = Beside(asked.progress or {}, asked.metrics or {}, asked.args, asked.rerun_state, streams)
                tree, begin = compose(parts_of(asked.state, asked.contents), beside, begin, rank)
            storage, path = self.place(asked.iteration, asked.kind)
            return SaveRequest(
                storage,
                path,
                begin,
                content_of(asked.semantic_type, tree),
                asked.on_exists,
                None if local is not None else self.newest_attempt,
                tuple(failed),
            )

        return request

    def place(self, iteration: int, kind: Kind) -> tuple[st.Storage, str]:
        """Where this rank saves."""
        if kind == "non_persistent_local" and self.local is not None:
            return self.local.pieces.storage, self.local.pieces.path(iteration)
        return self.storage, self.path(iteration, kind)

    def path(self, iteration: int, kind: Kind) -> str:
        """The directory of a checkpoint of the run."""
        return roots.iteration_path(self.root, iteration, kind)

    def _all_rng_states(self, semantic_type: SemanticType) -> Sequence[rng.State] | None:
        """On rank 0 the RNG states of all ranks; of LEGACY, on every rank, those of its cell of Megatron's grid.

        Collective; fails on all ranks when it does on one.
        """
        self.group.next_round()
        states = agree(self.group, "rng", lambda: rng.capture(self.rng_tracker))
        if semantic_type != "LEGACY":
            return states
        topology = self.topology or Topology(dp=self.group.world_size)
        return hand_out(self.group, "rng of cells", lambda: rng.cells_by_rank(states or [], topology))
