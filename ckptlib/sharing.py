"""Who reads what when several ranks need the same bytes: each byte is read once. Pure (numpy only).

As Megatron-Core's fully parallel load and ByteCheckpoint (arXiv 2407.20143) do for whole shards; here for parts of
stored chunks, so that ranks of different layouts share what they have in common. Every rank computes the same from
the same wishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

CUT_MIN_BYTES = 4 * 1024 * 1024
"""Less is never cut to be shared out: a chunk that one rank reads whole is checked against its CRC-32."""

CUT_SHARE = 4
"""A part of more than a rank's fair share divided by this is cut, so that few large tensors are shared evenly too."""

PAIRS = 1 << 20
"""Boxes are compared in blocks of about this many pairs."""


@dataclass(frozen=True)
class Wishes:
    """What all ranks want, as columns of equal length n.

    Attributes:
        rank: whose.
        row: row in that rank's `ReadPlan`.
        chunk: (n, 3) what is shared: number of the tensor, row in its `Chunks`, and a number for the dtype wanted.
        source, sizes: (n, D) boxes relative to the chunk.
        itemsize: (n,) bytes of an element as it is wanted.
    """

    rank: Int64s
    row: Int64s
    chunk: Int64s
    source: Int64s
    sizes: Int64s
    itemsize: Int64s


@dataclass(frozen=True)
class Units:
    """Boxes that are each read by one rank, as columns of equal length m; and of equal length k, who gets them.

    Attributes:
        source, sizes: (m, D) relative to the chunk; disjoint within a chunk.
        nbytes: (m,)
        reader: (m,) one of the ranks that need it.
        unit: (k,) ascending. The first entry of its reader is what is read, the others are copies of it.
        rank, row: (k,) whose wish, and the row in that rank's plan.
    """

    source: Int64s
    sizes: Int64s
    nbytes: Int64s
    reader: Int64s
    unit: Int64s
    rank: Int64s
    row: Int64s


def share(wishes: Wishes, world_size: int) -> Units:
    """Cuts wishes into units and gives each to the rank that reads least so far, the largest first."""
    boxes, box_of, wish = _distinct(wishes)
    boxes, box_of, wish = _disjoint(boxes, box_of, wish)
    itemsize = np.zeros(len(boxes), np.int64)
    itemsize[box_of] = wishes.itemsize[wish]
    boxes, box_of, wish, itemsize = _evenly(boxes, box_of, wish, itemsize, world_size)
    axes = wishes.source.shape[1]
    source, sizes = boxes[:, 3 : 3 + axes], boxes[:, 3 + axes :]
    nbytes = sizes.prod(axis=1) * itemsize
    order = np.lexsort((wishes.row[wish], wishes.rank[wish], box_of))
    box_of, wish = box_of[order], wish[order]
    rank = wishes.rank[wish]
    return Units(source, sizes, nbytes, _assign(nbytes, box_of, rank, world_size), box_of, rank, wishes.row[wish])


def _distinct(wishes: Wishes) -> tuple[Int64s, Int64s, Int64s]:
    """The different boxes, (m, 3 + 2 D), sorted; which of them each wish is, and which wish that is."""
    table = np.concatenate([wishes.chunk, wishes.source, wishes.sizes], axis=1)
    boxes, box_of = np.unique(table, axis=0, return_inverse=True)
    return boxes, box_of.reshape(-1), np.arange(len(table))


def _disjoint(boxes: Int64s, box_of: Int64s, wish: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Cuts boxes of one chunk that overlap along all their edges: what is left is either the same or disjoint."""
    if not len(boxes):
        return boxes, box_of, wish
    starts = np.flatnonzero((np.diff(boxes[:, :3], axis=0, prepend=-1) != 0).any(axis=1))
    stops = np.append(starts[1:], len(boxes))
    pieces: list[Int64s] = []
    of_box: list[Int64s] = []
    kept = np.ones(len(boxes), bool)
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        if stop - start == 1:
            continue
        clashing = start + np.flatnonzero(_overlapping(boxes[start:stop, 3:]))
        kept[clashing] = False
        for box, cells in zip(clashing.tolist(), _cells(boxes[clashing, 3:]), strict=True):
            chunk = np.broadcast_to(boxes[box, :3], (len(cells), 3))
            pieces.append(np.concatenate([chunk, cells], axis=1))
            of_box.append(np.full(len(cells), box))
    if not pieces:
        return boxes, box_of, wish
    # Each old box is now some new ones: pair every wish with all new boxes of its old one.
    whole = np.flatnonzero(kept)
    new, new_of = np.unique(np.concatenate([boxes[whole], *pieces]), axis=0, return_inverse=True)
    old = np.concatenate([whole, *of_box])
    return new, *_paired(old, new_of.reshape(-1), len(boxes), box_of, wish)


def _paired(old: Int64s, new: Int64s, count: int, box_of: Int64s, wish: Int64s) -> tuple[Int64s, Int64s]:
    """Rows (box, wish) for every new box of each wish's old one."""
    order = np.argsort(old, kind="stable")
    counts = np.bincount(old, minlength=count)
    begins = np.cumsum(counts) - counts
    times = counts[box_of]
    within = np.arange(int(times.sum())) - np.repeat(np.cumsum(times) - times, times)
    return new[order][np.repeat(begins[box_of], times) + within], np.repeat(wish, times)


def _overlapping(boxes: Int64s) -> npt.NDArray[np.bool_]:
    """Which of these boxes, (k, 2 D), have an element in common with another."""
    axes = boxes.shape[1] // 2
    low, high = boxes[:, :axes], boxes[:, :axes] + boxes[:, axes:]
    out = np.zeros(len(boxes), bool)
    step = max(1, PAIRS // len(boxes))
    for start in range(0, len(boxes), step):
        block = slice(start, start + step)
        common = ((low[block, None] < high[None]) & (low[None] < high[block, None])).all(axis=2)
        out[block] = common.sum(axis=1) > 1  # a box meets itself
    return out


def _cells(boxes: Int64s) -> list[Int64s]:
    """For each box, (k, 2 D), the cells (c, 2 D) of the grid that all their edges make and that lie in it."""
    axes = boxes.shape[1] // 2
    low, high = boxes[:, :axes], boxes[:, :axes] + boxes[:, axes:]
    edges = [np.unique(np.concatenate([low[:, axis], high[:, axis]])) for axis in range(axes)]
    out = []
    for box in range(len(boxes)):
        inside = [edge[(edge >= low[box, axis]) & (edge <= high[box, axis])] for axis, edge in enumerate(edges)]
        begins = np.stack(np.meshgrid(*(edge[:-1] for edge in inside), indexing="ij"), axis=-1).reshape(-1, axes)
        sizes = np.stack(np.meshgrid(*map(np.diff, inside), indexing="ij"), axis=-1).reshape(-1, axes)
        out.append(np.concatenate([begins, sizes], axis=1))
    return out


def _evenly(
    boxes: Int64s, box_of: Int64s, wish: Int64s, itemsize: Int64s, world_size: int
) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Cuts what is too large to be shared out evenly, along its first axis that is longer than 1."""
    axes = (boxes.shape[1] - 3) // 2
    sizes = boxes[:, 3 + axes :]
    nbytes = sizes.prod(axis=1) * itemsize
    shared = np.bincount(box_of, minlength=len(boxes)) > 1
    limit = max(CUT_MIN_BYTES, int(nbytes.sum()) // (world_size * CUT_SHARE))
    axis = np.argmax(sizes > 1, axis=1) if axes else np.zeros(len(boxes), np.int64)
    length = np.take_along_axis(sizes, axis[:, None], axis=1)[:, 0]
    count = np.where(shared, np.minimum(np.maximum(-(-nbytes // limit), 1), np.maximum(length, 1)), 1)
    if (count == 1).all():
        return boxes, box_of, wish, itemsize
    old = np.repeat(np.arange(len(boxes)), count)
    number = np.arange(len(old)) - np.repeat(np.cumsum(count) - count, count)
    begin, end = (length[old] * (number + i) // count[old] for i in (0, 1))
    new = boxes[old]
    rows = np.arange(len(old))
    new[rows, 3 + axis[old]] += begin
    new[rows, 3 + axes + axis[old]] = end - begin
    return new, *_paired(old, rows, len(boxes), box_of, wish), itemsize[old]


def _assign(nbytes: Int64s, unit: Int64s, rank: Int64s, world_size: int) -> Int64s:
    """The reader of each unit. `unit` ascends, and for one unit `rank` does."""
    reader = np.zeros(len(nbytes), np.int64)
    loads = [0] * world_size
    begins = np.searchsorted(unit, np.arange(len(nbytes) + 1)).tolist()
    ranks: list[int] = rank.tolist()
    sizes: list[int] = nbytes.tolist()
    alone = [ranks[begins[i]] == ranks[begins[i + 1] - 1] for i in range(len(sizes))]
    # What only one rank needs is its own to read, and counts before the rest is shared out.
    for i in sorted(range(len(sizes)), key=lambda i: (not alone[i], -sizes[i], i)):
        holders: Sequence[int] = ranks[begins[i] : begins[i + 1]]
        best = min(holders, key=lambda holder: (loads[holder], holder))
        loads[best] += sizes[i]
        reader[i] = best
    return reader
