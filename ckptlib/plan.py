"""Who writes what, and which bytes a load needs. Pure (numpy only).

Write plan: every rank describes its leaves; the plan gives each piece exactly one writer, checks that the pieces of
every tensor tile it (W3), and has a digest that binds the records of this save together (W2).
Read plan: request box ∩ stored chunk, as contiguous byte runs (R3).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckptlib.errors import DisagreementError, StateError, TilingError
from ckptlib.sharding import Box

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A rank's piece of a tensor. `main`: True: it writes; False: another copy does; None: the plan chooses."""

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    nbytes: int
    main: bool | None


@dataclass(frozen=True)
class LocalPlan:
    """What one rank has: metadata only.

    Attributes:
        tensors: its pieces, in the order of its leaves.
        objects: name of each grid cell -> whether this copy is the main one.
        values: name of each plain value -> its digest.
    """

    tensors: tuple[TensorPiece, ...]
    objects: Mapping[str, bool]
    values: Mapping[str, str]


@dataclass(frozen=True)
class RankPlan:
    """What one rank writes: indices into its `LocalPlan.tensors`, and names."""

    tensors: tuple[int, ...] = ()
    objects: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class WritePlan:
    """One `RankPlan` per rank.

    Attributes:
        shared_values: values that every rank has: their common digest goes into every record (W3).
        digest: SHA-256 over everything that must not change between planning and commit.
    """

    ranks: tuple[RankPlan, ...]
    shared_values: tuple[str, ...]
    digest: str


@dataclass
class _Assignment:
    tensors: list[int] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    nbytes: int = 0


def make_write_plan(local_plans: Sequence[LocalPlan]) -> WritePlan:
    """Chooses one writer for each piece. Deterministic: every rank could compute it alone.

    Pieces that several ranks hold alike go to the one with the fewest bytes so far, big pieces first.

    Raises:
        DisagreementError: ranks disagree about a tensor's dtype or shape, about a plain value, or about what a name is.
        TilingError: the pieces that would be written do not cover a tensor exactly once.
    """
    _check_names(local_plans)
    ranks = [_Assignment() for _ in local_plans]
    shared: dict[tuple[str, Box], list[tuple[int, int]]] = defaultdict(list)
    written: dict[str, list[Box]] = defaultdict(list)
    described: dict[str, tuple[TensorPiece, int]] = {}
    for rank, local in enumerate(local_plans):
        for i, piece in enumerate(local.tensors):
            first, first_rank = described.setdefault(piece.key, (piece, rank))
            if (first.dtype, first.global_shape) != (piece.dtype, piece.global_shape):
                raise DisagreementError(
                    f"tensor {piece.key!r}: rank {first_rank} has {first.dtype} {first.global_shape}, "
                    f"rank {rank} has {piece.dtype} {piece.global_shape}"
                )
            if piece.box.volume == 0 and 0 not in piece.global_shape:
                continue  # an empty shard of a tensor that has elements: nothing to write
            if piece.main is None:
                shared[piece.key, piece.box].append((rank, i))
            elif piece.main:
                written[piece.key].append(piece.box)
                ranks[rank].tensors.append(i)
                ranks[rank].nbytes += piece.nbytes
    _assign_shared(local_plans, ranks, shared, written)
    for key, (piece, _) in described.items():
        check_tiling(key, piece.global_shape, written.get(key, []))
    _assign_objects(local_plans, ranks)
    shared_values = _assign_values(local_plans, ranks)
    plans = tuple(RankPlan(tuple(sorted(r.tensors)), tuple(sorted(r.objects)), tuple(sorted(r.values))) for r in ranks)
    return WritePlan(plans, shared_values, _plan_digest(local_plans, plans, shared_values))


def _check_names(local_plans: Sequence[LocalPlan]) -> None:
    """A name is a tensor, an object or a value: all of them share one namespace on storage."""
    kinds: dict[str, tuple[str, int]] = {}
    for rank, local in enumerate(local_plans):
        tensors = {piece.key: True for piece in local.tensors}
        for kind, names in (("tensor", tensors), ("sharded object", local.objects), ("plain value", local.values)):
            for name in names:
                first, first_rank = kinds.setdefault(name, (kind, rank))
                if first != kind:
                    raise DisagreementError(
                        f"{name!r}: rank {first_rank} has a {first} of this name, rank {rank} a {kind}; "
                        "one name can hold one of them. Rename one."
                    )


def _assign_shared(
    local_plans: Sequence[LocalPlan],
    ranks: list[_Assignment],
    shared: Mapping[tuple[str, Box], list[tuple[int, int]]],
    written: dict[str, list[Box]],
) -> None:
    def weight(item: tuple[tuple[str, Box], list[tuple[int, int]]]) -> tuple[int, str, tuple[int, ...]]:
        (key, box), holders = item
        rank, i = holders[0]
        return (-local_plans[rank].tensors[i].nbytes, key, box.offset)

    for (key, box), holders in sorted(shared.items(), key=weight):
        if box.volume == 0 and _elements(local_plans[holders[0][0]].tensors[holders[0][1]].global_shape):
            continue  # an empty shard of a tensor that has elements: nothing to write
        rank, i = min(holders, key=lambda holder: (ranks[holder[0]].nbytes, holder[0]))
        ranks[rank].tensors.append(i)
        ranks[rank].nbytes += local_plans[rank].tensors[i].nbytes
        written[key].append(box)


def _assign_objects(local_plans: Sequence[LocalPlan], ranks: list[_Assignment]) -> None:
    writer: dict[str, int] = {}
    for rank, local in enumerate(local_plans):
        for key, main in local.objects.items():
            if not main:
                continue
            if key in writer:
                raise TilingError(f"object {key!r}: ranks {writer[key]} and {rank} both call theirs the main replica")
            writer[key] = rank
            ranks[rank].objects.append(key)
    for rank, local in enumerate(local_plans):
        for key in local.objects:
            if key not in writer:
                raise TilingError(f"object {key!r}: rank {rank} has a copy, no rank calls its copy the main replica")


def _assign_values(local_plans: Sequence[LocalPlan], ranks: list[_Assignment]) -> tuple[str, ...]:
    first: dict[str, int] = {}
    for rank, local in enumerate(local_plans):
        for key, digest in local.values.items():
            owner = first.setdefault(key, rank)
            if local_plans[owner].values[key] != digest:
                raise DisagreementError(
                    f"value {key!r} differs between rank {owner} and rank {rank}. A value that belongs to one rank "
                    "goes into a ShardedObject (one cell per rank) or a LocalNonpersistentObject (not saved)."
                )
    for key, rank in first.items():
        ranks[rank].values.append(key)
    return tuple(sorted(key for key in first if all(key in local.values for local in local_plans)))


def _plan_digest(local_plans: Sequence[LocalPlan], plans: Sequence[RankPlan], shared_values: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for local, plan in zip(local_plans, plans, strict=True):
        pieces = [
            [p.key, p.dtype, p.global_shape, p.box.offset, p.box.shape]
            for p in map(local.tensors.__getitem__, plan.tensors)
        ]
        digest.update(json.dumps([pieces, plan.objects, plan.values]).encode())
    digest.update(json.dumps(list(shared_values)).encode())
    return digest.hexdigest()


def values_digest(values: Mapping[str, str], shared_values: Sequence[str]) -> str:
    """One digest over the shared values of a rank (W3)."""
    return hashlib.sha256(json.dumps([[key, values[key]] for key in shared_values]).encode()).hexdigest()


def check_tiling(key: str, global_shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Checks that boxes cover a tensor exactly once.

    Boxes inside the tensor whose volumes add up to its volume and that are pairwise disjoint tile it.

    Raises:
        TilingError: names the tensor, and a hole, an overlap, or a box that leaves the tensor.
    """
    for box in boxes:
        if not box.within(global_shape):
            raise TilingError(f"tensor {key!r}: box {box} exceeds the global shape {tuple(global_shape)}")
    full = [box for box in boxes if box.volume]
    if full:
        edges = np.array([[box.offset, box.end] for box in full], np.int64).reshape(len(full), 2, -1)
        clash = _find_overlap(edges[:, 0], edges[:, 1], np.arange(len(full)))
        if clash is not None:
            one, two = (full[i] for i in clash)
            raise TilingError(
                f"tensor {key!r}: {one} and {two} would both be written; one of them is a copy and needs a "
                "replica_id other than 0"
            )
    covered, wanted = sum(box.volume for box in full), _elements(global_shape)
    if covered != wanted:
        raise TilingError(
            f"tensor {key!r}: {covered} of {wanted} elements would be written; no rank is the main replica "
            f"(replica_id 0) of the rest. Pieces: {', '.join(map(str, full[:8])) or 'none'}"
        )
    if wanted == 0 and not boxes:
        raise TilingError(f"tensor {key!r}: no rank is its main replica (replica_id 0)")


def _find_overlap(starts: Int64s, ends: Int64s, which: Int64s) -> tuple[int, int] | None:
    """Two boxes that overlap, or None. Splits along axes where the boxes fall apart; grids split completely."""
    if len(which) < 2:
        return None
    if starts.shape[1] == 0:  # 0-dimensional: two scalars are one place
        return int(which[0]), int(which[1])
    for axis in range(starts.shape[1]):
        order = np.argsort(starts[which, axis], kind="stable")
        ordered = which[order]
        reach = np.maximum.accumulate(ends[ordered, axis])
        cuts = np.flatnonzero(starts[ordered[1:], axis] >= reach[:-1]) + 1
        if len(cuts):
            for group in np.split(ordered, cuts):
                clash = _find_overlap(starts, ends, group)
                if clash is not None:
                    return clash
            return None
    for i, one in enumerate(which[:-1]):
        rest = which[i + 1 :]
        common = np.all((starts[rest] < ends[one]) & (starts[one] < ends[rest]), axis=1)
        if common.any():
            return int(one), int(rest[np.argmax(common)])
    return None


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """The part of a stored chunk that a request needs.

    Attributes:
        chunk: row in the tensor's `Chunks`.
        source: the common box, relative to the chunk.
        target: the same box, relative to the requested box.
        whole: the whole chunk is needed, so its CRC-32 can be checked.
    """

    chunk: int
    source: Box
    target: Box
    whole: bool


def intersect_chunks(request: Box, offsets: Int64s, shapes: Int64s) -> Iterator[ReadPiece]:
    """The pieces of stored chunks that fill a requested box, in chunk order.

    Args:
        request: box in global coordinates.
        offsets, shapes: (n, ndim) boxes of the chunks.
    """
    start, end = np.array(request.offset, np.int64), np.array(request.end, np.int64)
    low, high = np.maximum(offsets, start), np.minimum(offsets + shapes, end)
    for i in np.flatnonzero((low < high).all(axis=1)):
        common = Box(tuple(low[i].tolist()), tuple((high[i] - low[i]).tolist()))
        origin = tuple(offsets[i].tolist())
        whole = common.shape == tuple(shapes[i].tolist())
        yield ReadPiece(int(i), common.relative_to(origin), common.relative_to(request.offset), whole)


def contiguous_runs(box: Box, source_shape: Sequence[int], target_strides: Sequence[int]) -> tuple[Int64s, Int64s, int]:
    """Element runs that are contiguous in both the stored chunk and the destination, in the order of the chunk.

    Args:
        box: relative to the chunk; not empty.
        source_shape: shape of the chunk, which is stored in row-major order.
        target_strides: strides of the destination, a view with the shape of `box`; its last axis is dense.

    Returns:
        source offsets, target offsets from the view's first element (elements, both of shape (n,)), and the length
        of every run in elements.
    """
    source_strides = _strides(source_shape)
    length = 1
    # Axes of size 1 neither make a run longer nor end it, whatever their strides say.
    axes = [axis for axis in range(len(box.shape)) if box.shape[axis] != 1]
    while axes and source_strides[axes[-1]] == length == target_strides[axes[-1]]:
        length *= box.shape[axes.pop()]
    source = np.array([sum(o * s for o, s in zip(box.offset, source_strides, strict=True))], np.int64)
    target = np.zeros(1, np.int64)
    for axis in axes:
        steps = np.arange(box.shape[axis], dtype=np.int64)
        source = (source[:, None] + steps * source_strides[axis]).reshape(-1)
        target = (target[:, None] + steps * target_strides[axis]).reshape(-1)
    return source, target, length


def missing_elements(request: Box, pieces: Sequence[ReadPiece]) -> int:
    """How many elements of a request no chunk covers (chunks of a checkpoint do not overlap)."""
    return request.volume - sum(piece.source.volume for piece in pieces)


def covers(chunks: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether chunks tile a tensor exactly once."""
    try:
        check_tiling("", shape, chunks)
    except StateError:
        return False
    return True


def _elements(shape: Sequence[int]) -> int:
    return math.prod(shape)


def _strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return strides
