"""The random streams of a rank, along which axes each differs, and what each continues from after a resume. Pure.

A rank draws from one *default* stream (python, numpy, torch, CUDA) and, with tensor or expert parallelism, from the
named streams of a tracker. What must be equal and what must differ is Megatron-Core's
(`tensor_parallel.random.model_parallel_cuda_manual_seed`):

===================== ======================== =================================================================
stream                differs along            because
===================== ======================== =================================================================
default               pp, dp, cp               the ranks of a TP group drop the same units of the same activations
data-parallel-rng     pp, dp, cp               as the default: what a TP group shares
model-parallel-rng    pp, tp                   each TP rank has other heads and columns; equal across DP and CP
expert-parallel-rng   pp, ep, etp              each expert shard is another; equal across expert DP
any other             pp, dp, cp, tp           nothing is known of it: no two ranks draw the same
===================== ======================== =================================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckptlib.topology import Coordinates, Topology

DEFAULT = "default"
DATA_PARALLEL = "data-parallel-rng"
MODEL_PARALLEL = "model-parallel-rng"
EXPERT_PARALLEL = "expert-parallel-rng"

_AXES: Mapping[str, tuple[str, ...]] = {
    DEFAULT: ("pp", "dp", "cp"),
    DATA_PARALLEL: ("pp", "dp", "cp"),
    MODEL_PARALLEL: ("pp", "tp"),
    EXPERT_PARALLEL: ("pp", "ep", "etp"),
}
_ALL_AXES = ("pp", "dp", "cp", "tp")


def axes_of(stream: str) -> tuple[str, ...]:
    """The axes along which a stream differs; ranks with equal coordinates on them draw the same numbers."""
    return _AXES.get(stream, _ALL_AXES)


def place_of(stream: str, topology: Topology, rank: int) -> tuple[tuple[str, int], ...]:
    """The coordinates of a rank on the axes of a stream: two ranks share the stream exactly when these are equal."""
    at, expert = topology.coordinates(rank), topology.expert_coordinates(rank)
    return tuple((axis, getattr(expert if axis in ("ep", "etp") else at, axis)) for axis in axes_of(stream))


def seed_of(base: bytes, stream: str, topology: Topology, rank: int) -> int:
    """The seed of a stream that continues from no stored state: 63 bits.

    The first 8 bytes, little-endian and halved, of SHA-256 over ``ckptlib.rng/1``, `base`, the stream's name and its
    place as ``pp=0,dp=1,cp=0``, each after its length in 8 bytes. Sizes are no part of it, so a place keeps its
    seed whatever stands around it.

    Args:
        base: a digest of the saved RNG state: another checkpoint gives other numbers.
    """
    place = ",".join(f"{axis}={index}" for axis, index in place_of(stream, topology, rank))
    digest = hashlib.sha256()
    for part in (b"ckptlib.rng/1", base, stream.encode(), place.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(digest.digest()[:8], "little") >> 1


def same_places(saved: Topology, now: Topology) -> bool:
    """Whether every rank stands where it stood. Virtual pipeline stages share their rank's streams."""
    return _without_dp(saved) == _without_dp(now) and saved.dp == now.dp


def continues_from(stream: str, saved: Topology, now: Topology, rank: int) -> int | None:
    """The saved rank whose state of a stream this rank continues from; None: the stream is seeded by `seed_of`.

    Same places: the rank itself. Only dp differs: a rank whose coordinates existed keeps its own; a new one shares
    the streams that are equal across DP with those that have them, and its others are seeded. Anything else changed:
    every stream is seeded, so that what must be equal or differ does.
    """
    if same_places(saved, now):
        return rank
    if _without_dp(saved) != _without_dp(now):
        return None
    at = now.coordinates(rank)
    if at.dp < saved.dp:
        return saved.rank_at(at)
    if stream == EXPERT_PARALLEL:
        return saved.expert_rank_at(replace(now.expert_coordinates(rank), dp=0))
    return None if "dp" in axes_of(stream) else saved.rank_at(replace(at, dp=0))


def _without_dp(topology: Topology) -> tuple[int, ...]:
    return topology.tp, topology.cp, topology.pp, topology.ep, topology.etp


@dataclass(frozen=True)
class Cell:
    """One entry of Megatron's grid of RNG states: the list at (pp, tp), and the number in it."""

    pp: int
    tp: int
    entry: int


def entry_of(at: Coordinates, topology: Topology) -> int:
    """The number of a rank in the full list of its cell: CP is the outer axis.

    So the first DP entries are those of CP rank 0, which is what Megatron-Core indexes by DP rank and itself keeps.
    """
    return at.cp * topology.dp + at.dp


def cell_of(stream: str, grid: tuple[int, int], entries: int, now: Topology, rank: int) -> Cell | None:
    """The entry of Megatron's grid that a stream continues from; None: it is seeded by `seed_of`.

    Args:
        grid: the saved (PP, TP) sizes. Other sizes than now: None, as Megatron-Core drops the states then.
        entries: length of the cell's list. 1: the trainer kept one state for all its data-parallel ranks (Megatron's
            default), and all of them continue from it. More: one per DP rank, as with ``data_parallel_random_init``.

    An entry has the expert stream of one expert shard: ranks that hold another one (when `now` names expert axes) are
    seeded. Megatron-Core gives all of them the first one's.
    """
    if grid != (now.pp, now.tp):
        return None
    at = now.coordinates(rank)
    number = 0 if entries == 1 else entry_of(at, now) if entries == now.dp * now.cp else at.dp
    if number >= entries:
        if "dp" in axes_of(stream):
            return None
        number = 0
    if stream == EXPERT_PARALLEL:
        cp, dp = divmod(number, now.dp)
        owner = now.rank_at(Coordinates(tp=at.tp, cp=cp, dp=dp, pp=at.pp))
        if place_of(stream, now, owner) != place_of(stream, now, rank):
            return None
    return Cell(at.pp, at.tp, number)
