"""RNG state: python, numpy, torch, CUDA and named trackers, per rank.

Two objects are stored. ``rng_state`` is Megatron-Core's: a (pp, tp) grid whose cells are lists with the state of the
first data-parallel rank, so that Megatron finds what it asks for. ``rng_state_by_rank`` holds every rank's own state,
because ranks that shared one state would be correlated after a resume.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptlib.errors import StateError
from ckptlib.sharding import ShardedObject
from ckptlib.topology import Topology

KEY = "rng_state"
KEY_BY_RANK = "rng_state_by_rank"

_PARTS = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")


@dataclass(frozen=True)
class RngTracker:
    """A named set of RNG states outside the global ones, such as Megatron's CUDA RNG tracker.

    Attributes:
        get: returns ``{name: state tensor}``.
        set: takes it back.
    """

    get: Callable[[], Mapping[str, torch.Tensor]]
    set: Callable[[Mapping[str, torch.Tensor]], None]


def capture(tracker: RngTracker | None = None) -> dict[str, Any]:
    """The state of this process, with Megatron's names for the five parts. Plain data only."""
    name, keys, position, has_gauss, gauss = np.random.get_state()  # the legacy global generator, as Megatron does
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": (name, np.asarray(keys), int(position), int(has_gauss), float(gauss)),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "rng_tracker_states": {} if tracker is None else dict(tracker.get()),
    }


def check(state: Mapping[str, Any], tracker: RngTracker | None = None) -> None:
    """Checks that `restore` can put a state back, before anything is changed.

    Raises:
        StateError: a part is missing, or the checkpoint has no tracker states where this process has a tracker.
    """
    missing = [name for name in _PARTS if name not in state]
    if missing:
        raise StateError(f"RNG state: {', '.join(missing)} missing in the checkpoint")
    if tracker is not None and not state["rng_tracker_states"]:
        raise StateError(
            "RNG state: the checkpoint has no tracker states, this process has a tracker. "
            "Restore without contents 'rng' to keep the tracker as it is."
        )


def restore(state: Mapping[str, Any], tracker: RngTracker | None = None) -> None:
    """Puts a captured state back. Raises as `check`, before anything is changed."""
    check(state, tracker)
    version, internal, gauss_next = state["random_rng_state"]
    random.setstate((version, tuple(internal), gauss_next))
    np.random.set_state(tuple(state["np_rng_state"]))
    torch.set_rng_state(state["torch_rng_state"])
    if torch.cuda.is_available() and state["cuda_rng_state"] is not None:
        torch.cuda.set_rng_state(state["cuda_rng_state"])
    if tracker is not None:
        tracker.set(state["rng_tracker_states"])


def reseed(state: Mapping[str, Any], stream: int) -> int:
    """Seeds this process from a stored state, when its own state does not exist.

    Args:
        stream: equal for the ranks of one tensor-parallel group, which must draw the same dropout for the same
            activations; different for all others.

    Deterministic: the same checkpoint and stream give the same numbers. Returns the seed (63 bits).
    """
    material = hashlib.sha256(bytes(state["torch_rng_state"].numpy().tobytes()))
    material.update(stream.to_bytes(8, "little"))
    seed = int.from_bytes(material.digest()[:8], "little") >> 1
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # seeds CUDA too
    return seed


def sharded(
    state: Mapping[str, Any], rank: int, world_size: int, topology: Topology | None
) -> dict[str, ShardedObject]:
    """The two objects to save for this rank's state."""
    own = ShardedObject(KEY_BY_RANK, dict(state), (world_size,), (rank,))
    if topology is None or topology.world_size != world_size:
        grid, cell, replica = (1, 1), (0, 0), rank
    else:
        at = topology.coordinates(rank)
        grid, cell, replica = (topology.pp, topology.tp), (at.pp, at.tp), at.dp * topology.cp + at.cp
    return {KEY: ShardedObject(KEY, [dict(state)], grid, cell, replica), KEY_BY_RANK: own}
