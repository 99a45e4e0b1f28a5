"""What a run saves beside the parts of the caller's state, and how the record of a save describes it all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptlib import rng
from ckptlib.errors import StateError
from ckptlib.manifest import Begin
from ckptlib.progress import numbers_of, observe, with_args
from ckptlib.resume import OWN_KEYS, RERUN_KEY
from ckptlib.sharding import ShardedObject
from ckptlib.state import content_names

CHECKPOINT_VERSION = 3.0
"""Megatron's version of the common state: 3.0 since TP and PP sizes are checked on load."""


@dataclass(frozen=True)
class Beside:
    """What a trainer gives to a save beside its state.

    Attributes:
        progress, metrics: numbers, see `Checkpointer.save`.
        args: plain arguments; None: none.
        rerun_state: this rank's; None: none.
        streams: the RNG states to store; none: they are not part of the save.
    """

    progress: Mapping[str, float]
    metrics: Mapping[str, float]
    args: Any
    rerun_state: Any
    streams: Mapping[str, ShardedObject]


def compose(parts: Mapping[str, Any], beside: Beside, begin: Begin, rank: int) -> tuple[dict[str, Any], Begin]:
    """The whole tree of a save, and its record with contents and numbers.

    Args:
        begin: without them.

    Raises:
        StateError: a part has a name that belongs to what stands beside it, or a number is none.
    """
    clash = sorted(set(parts) & (OWN_KEYS | {rng.KEY, rng.KEY_BY_RANK, RERUN_KEY}))
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
        tree[RERUN_KEY] = ShardedObject(RERUN_KEY, beside.rerun_state, (begin.world_size,), (rank,))
        names.add("rerun_state")
    if beside.streams:
        tree |= beside.streams
        names.add("rng")
    described = replace(
        begin,
        contents=tuple(sorted(names)),
        progress=observed | numbers,
        observed=observed,
        metrics=numbers_of("metrics", beside.metrics),
    )
    return tree, described
