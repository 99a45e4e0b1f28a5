"""What a run saves beside the parts of the caller's state, and how the record of a save describes it all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptlib import rng
from ckptlib.errors import StateError
from ckptlib.layouts import legacy
from ckptlib.manifest import Begin
from ckptlib.progress import numbers_of, observe, with_args
from ckptlib.resume import OWN_KEYS, RERUN_KEY
from ckptlib.sharding import ShardedObject, WholeValue
from ckptlib.state import content_names

CHECKPOINT_VERSION = 3.0
"""Megatron's version of the common state: 3.0 since TP and PP sizes are checked on load."""


@dataclass(frozen=True)
class Streams:
    """The RNG states of a save.

    Attributes:
        own: this rank's; None: they are not part of the save.
        all: with `every_rank`, on the ranks that store them: those of all ranks; of LEGACY those of the rank's cell.
        every_rank: Megatron's lists have every data-parallel rank's, not the first alone.
    """

    own: rng.State | None
    all: Sequence[rng.State] | None = None
    every_rank: bool = False


@dataclass(frozen=True)
class Beside:
    """What a trainer gives to a save beside its state.

    Attributes:
        progress, metrics: numbers, see `Checkpointer.save`.
        args: plain arguments; None: none.
        rerun_state: this rank's; None: none.
        streams: the RNG states.
    """

    progress: Mapping[str, float]
    metrics: Mapping[str, float]
    args: Any
    rerun_state: Any
    streams: Streams


def compose(parts: Mapping[str, Any], beside: Beside, begin: Begin, rank: int) -> tuple[dict[str, Any], Begin]:
    """The whole tree of a save, and its record with contents and numbers.

    Args:
        begin: without them.

    Raises:
        StateError: a part has a name that belongs to what stands beside it, or a number is none.
    """
    clash = sorted(set(parts) & (OWN_KEYS | {rng.KEY, rng.KEY_BY_RANK, RERUN_KEY, legacy.RERUN}))
    if clash:
        raise StateError(f"state: the name {clash[0]!r} is the checkpointer's own; pass it to save() or rename it")
    names = content_names(parts)
    numbers = with_args(numbers_of("progress", beside.progress), beside.args)
    observed = observe(parts)
    tree: dict[str, Any] = {
        **parts,
        "iteration": begin.iteration,
        "checkpoint_version": CHECKPOINT_VERSION,
        "progress": dict(numbers),
    }
    if "flops" in numbers:
        tree["num_floating_point_operations_so_far"] = numbers["flops"]
    if beside.args is not None:
        tree["args"] = beside.args
        names.add("args")
    if beside.rerun_state is not None:
        tree |= _of_ranks(RERUN_KEY, beside.rerun_state, begin, rank)
        names.add("rerun_state")
    if beside.streams.own is not None:
        tree |= _streams(beside.streams, beside.streams.own, begin, rank)
        names.add("rng")
    described = replace(
        begin,
        contents=tuple(sorted(names)),
        progress=observed | numbers,
        observed=observed,
        metrics=numbers_of("metrics", beside.metrics),
    )
    return tree, described


def _of_ranks(key: str, value: Any, begin: Begin, rank: int) -> dict[str, Any]:
    """What belongs to a rank: a cell of a grid, an entry of its own state dict, or one under the rank's number."""
    match begin.semantic_type:
        case "GLOBAL":
            return {key: ShardedObject(key, value, (begin.world_size,), (rank,))}
        case "TORCH_DCP":
            return {key: {rank: WholeValue(value)}}
        case "LEGACY":
            return {legacy.RERUN: value}
    return {key: value}


def _streams(streams: Streams, own: rng.State, begin: Begin, rank: int) -> dict[str, Any]:
    match begin.semantic_type:
        case "GLOBAL":
            return rng.sharded(own, rank, begin.world_size, begin.topology, streams.all, every_rank=streams.every_rank)
        case "TORCH_DCP":  # rank 0's once more where Megatron-Core looks
            return _of_ranks(rng.KEY_BY_RANK, dict(own), begin, rank) | ({} if rank else {rng.KEY: [dict(own)]})
        case "LEGACY":
            return {rng.KEY: [dict(own)] if streams.all is None else [dict(state) for state in streams.all]}
    name, keys, *rest = own["np_rng_state"]  # plain numbers, so that `torch.load(weights_only=True)` takes the file
    return {rng.KEY: [{**own, "np_rng_state": (name, keys.tolist(), *rest)}]}
