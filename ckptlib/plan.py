"""Who writes what. Pure (numpy only).

Every rank describes its leaves; the plan gives each piece exactly one writer, checks that the pieces of every tensor
tile it (W3), and has a digest that binds the records of this save together (W2). What a load reads: `read_plan`.

Copies are spread over their holders as in ByteCheckpoint (arXiv 2407.20143) and Megatron-Core's fully parallel save:
the largest first, each to the holder that writes least so far. A piece that is large beside a rank's share is cut
into rows first, so that the ranks of a replica group end within a few percent of each other however few tensors
they share.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckptlib.errors import DisagreementError, TilingError
from ckptlib.pieces import CHOOSE, COPY, MAIN, Int64s, LocalPlan, PieceTable
from ckptlib.tiling import Boxes, check_tilings, sorted_rows, stacked

SPLIT_MIN_BYTES = 1024 * 1024
"""Copies of less are never cut: a container costs 1.5 kB and a request."""

CONTAINER_BYTES = 1536
"""What stands around a stored tensor, about."""

SPLIT_SHARE = 32
"""Copies are cut into parts of at most this fraction of a rank's mean share: the balance ends within it."""


class Part(NamedTuple):
    """Rows [start, stop) of a piece along one axis: all of them, unless a copy is shared by several holders.

    Attributes:
        piece: row in the rank's `PieceTable`.
    """

    piece: int
    axis: int
    start: int
    stop: int


@dataclass(frozen=True)
class RankPlan:
    """What one rank writes."""

    parts: tuple[Part, ...] = ()
    objects: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Extent:
    """How much a save will write, over all ranks: bytes, about, and data files."""

    nbytes: int
    files: int


@dataclass(frozen=True)
class WritePlan:
    """Who writes what, over all ranks.

    Attributes:
        parts: (m, 5) int64, sorted: rank, piece, axis, first row, last row + 1.
        objects, values: names, per rank.
        shared_values: values that every rank has: their common digest goes into every record (W3).
        digest: SHA-256 over everything that must not change between planning and commit.
        nbytes: (ranks,) int64, payload bytes of the tensors that each rank writes.
    """

    parts: Int64s
    objects: tuple[tuple[str, ...], ...]
    values: tuple[tuple[str, ...], ...]
    shared_values: tuple[str, ...]
    digest: str
    nbytes: Int64s

    def of(self, rank: int) -> RankPlan:
        """The part of one rank."""
        low, high = np.searchsorted(self.parts[:, 0], [rank, rank + 1])
        parts = tuple(Part(*row) for row in self.parts[low:high, 1:].tolist())
        return RankPlan(parts, self.objects[rank], self.values[rank])

    def extent(self, unplanned: Sequence[int]) -> Extent:
        """How much will be written.

        Args:
            unplanned: bytes that each rank writes beside what is planned.
        """
        beside = np.asarray(unplanned, np.int64)
        parts = np.bincount(self.parts[:, 0], minlength=len(beside))
        named = np.array([bool(o or v) for o, v in zip(self.objects, self.values, strict=True)], bool)
        nbytes = int(self.nbytes.sum()) + int(beside.sum()) + CONTAINER_BYTES * len(self.parts)
        return Extent(nbytes, int(((parts > 0) | named | (beside > 0)).sum()))

    @functools.cached_property
    def ranks(self) -> tuple[RankPlan, ...]:
        """All parts; for tests and small worlds."""
        return tuple(map(self.of, range(len(self.objects))))


def make_write_plan(local_plans: Sequence[LocalPlan]) -> WritePlan:
    """Chooses one writer for each piece. Deterministic: every rank could compute it alone.

    Raises:
        DisagreementError: ranks disagree about a tensor's dtype or shape, about a plain value, or about what a name is.
        TilingError: the pieces that would be written do not cover a tensor exactly once.
    """
    _check_names(local_plans)
    pieces = _Pieces.gather(local_plans)
    pieces.check_agreement()
    parts, written, nbytes = _assign(pieces, len(local_plans))
    check_tilings(pieces.keys, pieces.shapes, pieces.ndims, written)
    objects = _assign_objects(local_plans)
    values, shared_values = _assign_values(local_plans)
    return WritePlan(parts, objects, values, shared_values, _plan_digest(local_plans), nbytes)


def values_digest(values: Mapping[str, str], shared_values: Sequence[str]) -> str:
    """One digest over the shared values of a rank (W3)."""
    return hashlib.sha256(json.dumps([[key, values[key]] for key in shared_values]).encode()).hexdigest()


# --- tensors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pieces:
    """The pieces of all ranks, as columns of equal length n, by rank.

    Attributes:
        keys: the different names, sorted.
        key, rank, piece: (n,) which name, whose, and which of its pieces.
        dtypes, dtype, ndim, row_shapes, offsets, sizes, nbytes, main: see `PieceTable`.
        first: (len(keys),) the first row of each name.
    """

    keys: list[str]
    key: Int64s
    rank: Int64s
    piece: Int64s
    dtypes: list[str]
    dtype: Int64s
    ndim: Int64s
    row_shapes: Int64s
    offsets: Int64s
    sizes: Int64s
    nbytes: Int64s
    main: Int64s
    first: Int64s

    @classmethod
    def gather(cls, local_plans: Sequence[LocalPlan]) -> _Pieces:
        tables = [local.tensors for local in local_plans]
        keys = sorted(set().union(*(table.keys for table in tables)))
        numbers = {key: number for number, key in enumerate(keys)}
        dtypes = sorted(set().union(*(table.dtypes for table in tables)))
        codes = {name: code for code, name in enumerate(dtypes)}
        axes = max((table.shapes.shape[1] for table in tables), default=1)
        counts = [len(table) for table in tables]
        key = np.concatenate(_numbers_of_keys(tables, numbers))
        dtype = [np.array([codes[name] for name in table.dtypes], np.int64)[table.dtype] for table in tables]
        _, first = np.unique(key, return_index=True)
        return cls(
            keys=keys,
            key=key,
            rank=np.repeat(np.arange(len(tables)), counts),
            piece=np.concatenate([np.arange(count) for count in counts]),
            dtypes=dtypes,
            dtype=np.concatenate(dtype),
            ndim=np.concatenate([table.ndim for table in tables]).astype(np.int64),
            row_shapes=stacked([table.shapes for table in tables], axes, 1),
            offsets=stacked([table.offsets for table in tables], axes, 0),
            sizes=stacked([table.sizes for table in tables], axes, 1),
            nbytes=np.concatenate([table.nbytes for table in tables]),
            main=np.concatenate([table.main for table in tables]).astype(np.int64),
            first=first,
        )

    @functools.cached_property
    def shapes(self) -> Int64s:
        """(len(keys), D) global shape of each tensor."""
        return self.row_shapes[self.first]

    @functools.cached_property
    def ndims(self) -> Int64s:
        """(len(keys),) number of axes of each tensor."""
        return self.ndim[self.first]

    def check_agreement(self) -> None:
        """All pieces of a tensor say the same dtype and global shape."""
        first = self.first[self.key]
        wrong = (self.dtype != self.dtype[first]) | (self.ndim != self.ndim[first])
        wrong |= (self.row_shapes != self.row_shapes[first]).any(axis=1)
        if wrong.any():
            row = int(np.argmax(wrong))
            one, two = (
                f"rank {self.rank[at]} has {self.dtypes[self.dtype[at]]} "
                f"{tuple(self.row_shapes[at, : self.ndim[at]].tolist())}"
                for at in (int(first[row]), row)
            )
            raise DisagreementError(f"tensor {self.keys[self.key[row]]!r}: {one}, {two}")


def _numbers_of_keys(tables: Sequence[PieceTable], numbers: Mapping[str, int]) -> list[Int64s]:
    """The numbers of each table's names. Most ranks have the names of the rank before."""
    out: list[Int64s] = []
    last: tuple[str, ...] = ()
    own: Int64s = np.zeros(0, np.int64)
    for table in tables:
        if table.keys != last:
            last = table.keys
            own = np.fromiter(map(numbers.__getitem__, last), np.int64, len(last))
        out.append(own)
    return out


def _assign(pieces: _Pieces, world_size: int) -> tuple[Int64s, Boxes, Int64s]:
    """Writers: the parts of the plan, the boxes that are written, and the bytes of each rank."""
    # An empty shard of a tensor that has elements is nothing to write.
    empty = (pieces.sizes == 0).any(axis=1) & (pieces.row_shapes != 0).all(axis=1)
    rows = np.flatnonzero(~empty)
    offsets, sizes = pieces.offsets[rows], pieces.sizes[rows]
    order = rows[sorted_rows(pieces.key[rows], *offsets.T, *sizes.T)]
    groups = _Groups.of(pieces, order)
    rank, piece = pieces.rank, pieces.piece
    load = np.zeros(world_size, np.int64)
    alone = order[groups.alone]
    np.add.at(load, rank[alone], pieces.nbytes[alone])
    zeros = np.zeros_like(alone)
    whole = np.stack([rank[alone], piece[alone], zeros, zeros, pieces.sizes[alone, 0], alone], axis=1)
    parts = np.concatenate([whole, _choose(pieces, order, groups, load)])
    parts = parts[sorted_rows(parts[:, 0], parts[:, 1], parts[:, 3])]
    source = parts[:, 5]
    offsets, sizes = pieces.offsets[source], pieces.sizes[source]
    at = (np.arange(len(source)), parts[:, 2])
    offsets[at] += parts[:, 3]
    sizes[at] = parts[:, 4] - parts[:, 3]
    by_tensor = np.argsort(pieces.key[source], kind="stable")
    boxes = Boxes(pieces.key[source][by_tensor], offsets[by_tensor], sizes[by_tensor])
    return parts[:, :5], boxes, load


@dataclass(frozen=True)
class _Groups:
    """Rows that are copies of one box. Positions are in an order in which the rows of a group are neighbours.

    Attributes:
        alone: positions of rows that have to be written by their holder.
        starts, stops: (g,) groups whose holders share the work.
    """

    alone: Int64s
    starts: Int64s
    stops: Int64s

    @classmethod
    def of(cls, pieces: _Pieces, order: Int64s) -> _Groups:
        if not len(order):
            return cls(order, order, order)
        key, offsets, sizes, main = pieces.key[order], pieces.offsets[order], pieces.sizes[order], pieces.main[order]
        new = np.ones(len(order), bool)
        new[1:] = (
            (key[1:] != key[:-1]) | (offsets[1:] != offsets[:-1]).any(axis=1) | (sizes[1:] != sizes[:-1]).any(axis=1)
        )
        starts = np.flatnonzero(new)
        stops = np.append(starts[1:], len(order))
        mains, copies, free = (
            np.add.reduceat((main == kind).astype(np.int64), starts) for kind in (MAIN, COPY, CHOOSE)
        )
        # One main replica and copies of it, or holders that the plan chooses from. Anything else keeps its mains (and
        # one of the free ones), and the check of the tiling says what is wrong.
        shared = (stops - starts > 1) & (((mains == 1) & (free == 0)) | ((mains + copies == 0) & (free > 0)))
        group = np.repeat(np.arange(len(starts)), stops - starts)
        position = np.arange(len(order))
        first_free = (main == CHOOSE) & (position == _first_free(main, starts, stops)[group])
        alone = np.flatnonzero(~shared[group] & ((main == MAIN) | first_free))
        return cls(alone, starts[shared], stops[shared])


def _first_free(main: Int64s, starts: Int64s, stops: Int64s) -> Int64s:
    """Position of the first `CHOOSE` of each group, or -1."""
    position = np.where(main == CHOOSE, np.arange(len(main)), len(main))
    first = np.minimum.reduceat(position, starts)
    return np.where(first < stops, first, -1)


def _choose(pieces: _Pieces, order: Int64s, groups: _Groups, load: Int64s) -> Int64s:
    """Shares the copies among their holders, greedily; adds what they write to `load`.

    Returns:
        (m, 6): as `WritePlan.parts`, then the row in `pieces`.
    """
    heads = order[groups.starts]
    nbytes = pieces.nbytes[heads]
    limit = max(SPLIT_MIN_BYTES, (int(load.sum()) + int(nbytes.sum())) // (len(load) * SPLIT_SHARE))
    count = np.maximum(-(-nbytes // limit), 1)
    # The first axis that can be cut so often keeps the parts contiguous; else the longest.
    sizes = pieces.sizes[heads]
    enough = sizes >= count[:, None]
    axis = np.where(enough.any(axis=1), np.argmax(enough, axis=1), np.argmax(sizes, axis=1))
    axis[count == 1] = 0
    length = np.take_along_axis(sizes, axis[:, None], axis=1)[:, 0]
    count = np.minimum(count, np.maximum(length, 1))
    group = np.repeat(np.arange(len(heads)), count)
    number = np.arange(len(group)) - np.repeat(np.cumsum(count) - count, count)
    begin, end = length[group] * number // count[group], length[group] * (number + 1) // count[group]
    share = nbytes[group] // np.maximum(length[group], 1) * (end - begin)
    # Groups are in the order of names and boxes; a stable sort keeps it among equals.
    largest_first = np.argsort(-share, kind="stable")
    loads: list[int] = load.tolist()
    ranks = pieces.rank[order].tolist()
    # One heap for each set of holders, of (load, rank, place among the holders). Loads only grow, so an entry that is
    # out of date is found when it comes to the top, and everything above it is still no smaller.
    heaps: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    heap_of: list[list[tuple[int, int, int]]] = []
    for start, stop in zip(groups.starts.tolist(), groups.stops.tolist(), strict=True):
        among = tuple(ranks[start:stop])
        if among not in heaps:
            heaps[among] = [(loads[rank], rank, i) for i, rank in enumerate(among)]
            heapq.heapify(heaps[among])
        heap_of.append(heaps[among])
    picked = np.empty(len(group), np.int64)
    for item, which, size in zip(
        largest_first.tolist(), group[largest_first].tolist(), share[largest_first].tolist(), strict=True
    ):
        heap = heap_of[which]
        while heap[0][0] != loads[heap[0][1]]:
            heapq.heapreplace(heap, (loads[heap[0][1]], *heap[0][1:]))
        load_before, rank, i = heap[0]
        loads[rank] = load_before + size
        heapq.heapreplace(heap, (loads[rank], rank, i))
        picked[item] = groups.starts[which] + i
    load[:] = loads
    rows = order[picked]
    return np.stack([pieces.rank[rows], pieces.piece[rows], axis[group], begin, end, rows], axis=1)


# --- objects, values, names -------------------------------------------------------------------------------------------


def _check_names(local_plans: Sequence[LocalPlan]) -> None:
    """A name is a tensor, an object or a value: all of them share one namespace on storage."""
    kinds = {
        "tensor": set().union(*(local.tensors.keys for local in local_plans)),
        "sharded object": set().union(*(local.objects for local in local_plans)),
        "plain value": set().union(*(local.values for local in local_plans)),
    }
    names = list(kinds.values())
    clash = (names[0] & names[1]) | (names[0] & names[2]) | (names[1] & names[2])
    if not clash:
        return
    name = min(clash)
    first: tuple[str, int] | None = None
    for rank, local in enumerate(local_plans):
        parts = (("tensor", local.tensors.keys), ("sharded object", local.objects), ("plain value", local.values))
        for kind, own in parts:
            if name not in own:
                continue
            first = first or (kind, rank)
            if first[0] != kind:
                raise DisagreementError(
                    f"{name!r}: rank {first[1]} has a {first[0]} of this name, rank {rank} a {kind}; "
                    "one name can hold one of them. Rename one."
                )


def _assign_objects(local_plans: Sequence[LocalPlan]) -> tuple[tuple[str, ...], ...]:
    writer: dict[str, int] = {}
    mine: list[list[str]] = [[] for _ in local_plans]
    for rank, local in enumerate(local_plans):
        for key, main in local.objects.items():
            if not main:
                continue
            if key in writer:
                raise TilingError(f"object {key!r}: ranks {writer[key]} and {rank} both call theirs the main replica")
            writer[key] = rank
            mine[rank].append(key)
    for rank, local in enumerate(local_plans):
        for key in local.objects:
            if key not in writer:
                raise TilingError(f"object {key!r}: rank {rank} has a copy, no rank calls its copy the main replica")
    return tuple(tuple(sorted(names)) for names in mine)


def _assign_values(local_plans: Sequence[LocalPlan]) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """The first rank that has a value writes it. Returns the names per rank, and those that every rank has."""
    owner: dict[str, int] = {}
    for rank, local in enumerate(local_plans):
        if rank and local.values == local_plans[0].values:
            continue
        for key, digest in local.values.items():
            first = owner.setdefault(key, rank)
            if local_plans[first].values[key] != digest:
                raise DisagreementError(
                    f"value {key!r} differs between rank {first} and rank {rank}. A value that belongs to one rank "
                    "goes into a ShardedObject (one cell per rank) or a LocalNonpersistentObject (not saved)."
                )
    mine: list[list[str]] = [[] for _ in local_plans]
    for key, rank in owner.items():
        mine[rank].append(key)
    shared = set(local_plans[0].values).intersection(*(local.values for local in local_plans)) if local_plans else set()
    return tuple(tuple(sorted(names)) for names in mine), tuple(sorted(shared))


def _plan_digest(local_plans: Sequence[LocalPlan]) -> str:
    """The plan is a function of what the ranks have, so that is what binds it."""
    digest = hashlib.sha256()
    for local in local_plans:
        digest.update(local.structure.encode())
    return digest.hexdigest()
