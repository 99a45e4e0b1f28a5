"""Which bytes a load needs: request box ∩ stored chunk, as contiguous byte runs (R3). Pure (numpy only).

A plan is columns, not objects: a rank of a large job finds its chunks among a million in milliseconds, and what it
keeps of each is `ReadPlan.nbytes` / n bytes. Axes beyond a tensor's own number have size 1 and offset 0, so that all
boxes of one load have D axes; an axis of size 1 neither makes a run longer nor ends it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from ckptlib.index import Chunks, ItemIndex
from ckptlib.sharding import Box
from ckptlib.tiling import padded

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

SCANNED = 256
"""Tensors with more chunks are searched along their first axis before their chunks are compared on all axes."""


@dataclass(frozen=True)
class Requests:
    """What a load wants, as columns of equal length r.

    Attributes:
        keys: (r,) stored names.
        offsets, sizes: (r, D) boxes in global coordinates.
    """

    keys: tuple[str, ...]
    offsets: Int64s
    sizes: Int64s

    @classmethod
    def build(cls, keys: Sequence[str], boxes: Sequence[Box]) -> Requests:
        """The table of these boxes, in their order."""
        axes = max((len(box.shape) for box in boxes), default=0) or 1
        return cls(
            tuple(keys), padded([box.offset for box in boxes], axes, 0), padded([box.shape for box in boxes], axes, 1)
        )

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def axes(self) -> int:
        """D."""
        return int(self.offsets.shape[1])


@dataclass(frozen=True)
class ReadPlan:
    """The parts of stored chunks that fill the requests, as columns of equal length n.

    Attributes:
        request: (n,) row in `Requests`.
        chunk: (n,) row in the tensor's `Chunks`.
        file: (n,) index into `ItemIndex.files`.
        locations: (n, 5) as in `Chunks`.
        source: (n, D) first common element, relative to the chunk.
        target: (n, D) the same, relative to the requested box.
        sizes: (n, D) the common box; never empty.
        chunk_sizes: (n, D) the stored chunk.
    """

    request: Int32s
    chunk: Int32s
    file: Int32s
    locations: Int64s
    source: Int64s
    target: Int64s
    sizes: Int64s
    chunk_sizes: Int64s

    def __len__(self) -> int:
        return len(self.request)

    @property
    def nbytes(self) -> int:
        """Memory of all columns."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    @property
    def volumes(self) -> Int64s:
        """(n,) elements of each part."""
        volumes: Int64s = self.sizes.prod(axis=1)
        return volumes

    @property
    def whole(self) -> Flags:
        """(n,) the whole chunk is needed, so its CRC-32 can be checked."""
        whole: Flags = (self.sizes == self.chunk_sizes).all(axis=1)
        return whole

    def take(self, rows: Int64s | slice) -> ReadPlan:
        """Some rows."""
        return ReadPlan(*(getattr(self, field.name)[rows] for field in fields(self)))

    def in_file_order(self) -> ReadPlan:
        """The same, by file and by place in it."""
        return self.take(np.lexsort((self._first_elements(), self.locations[:, 0], self.file)))

    def covered(self, requests: int) -> Int64s:
        """(r,) elements of each request that are filled."""
        out = np.zeros(requests, np.int64)
        np.add.at(out, self.request, self.volumes)
        return out

    def _first_elements(self) -> Int64s:
        first: Int64s = (self.source * row_major_strides(self.chunk_sizes)).sum(axis=1)
        return first


def plan_reads(index: ItemIndex, requests: Requests) -> ReadPlan:
    """The parts of chunks that fill requested boxes: by request, and by chunk within one.

    Every requested key is in the index with as many axes as its box.
    """
    axes = requests.axes
    starts, stops = index.spans(requests.keys)
    chunks = index.all_chunks
    request, rows = _candidates(chunks, requests, starts, stops)
    offsets, sizes = chunks.offsets[rows, :axes], chunks.shapes[rows, :axes]
    origins = requests.offsets[request]
    low = np.maximum(offsets, origins)
    common = np.minimum(offsets + sizes, origins + requests.sizes[request]) - low
    kept = np.flatnonzero((common > 0).all(axis=1))
    request, rows = request[kept], rows[kept]
    return ReadPlan(
        request=request.astype(np.int32),
        chunk=(rows - starts[request]).astype(np.int32),
        file=chunks.files[rows].astype(np.int32),
        locations=chunks.locations[rows].astype(np.int64),
        source=low[kept] - offsets[kept],
        target=low[kept] - origins[kept],
        sizes=common[kept],
        chunk_sizes=sizes[kept].astype(np.int64),
    )


def _candidates(chunks: Chunks, requests: Requests, starts: Int64s, stops: Int64s) -> tuple[Int64s, Int64s]:
    """(request, chunk) for all chunks of small tensors, and for those of large ones that are near; by request."""
    counts = stops - starts
    counts[counts > SCANNED] = 0
    request = np.repeat(np.arange(len(requests)), counts)
    rows = np.arange(int(counts.sum())) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    large = np.flatnonzero(stops - starts > SCANNED).tolist()
    if not large:
        return request, rows
    near = [
        starts[i] + _near(chunks.offsets[starts[i] : stops[i]], chunks.shapes[starts[i] : stops[i]], requests, i)
        for i in large
    ]
    request = np.concatenate([request, np.repeat(large, [len(found) for found in near])])
    order = np.argsort(request, kind="stable")
    return request[order], np.concatenate([rows, *near])[order]


def plan_boxes(index: ItemIndex, keys: Sequence[str], chunks: Sequence[int], boxes: Sequence[Box]) -> ReadPlan:
    """A plan of boxes that are known, one per request.

    Args:
        chunks: rows in the tensors' `Chunks`.
        boxes: relative to the chunks; empty ones are left out.
    """
    kept = [i for i, box in enumerate(boxes) if box.volume]
    axes = max((len(boxes[i].shape) for i in kept), default=0) or 1
    columns = [index.chunks(keys[i]) for i in kept]
    rows = [chunks[i] for i in kept]
    at = list(zip(columns, rows, strict=True))
    return ReadPlan(
        request=np.array(kept, np.int32),
        chunk=np.array(rows, np.int32),
        file=np.array([column.files[row] for column, row in at], np.int32),
        locations=np.array([column.locations[row] for column, row in at], np.int64).reshape(-1, 5),
        source=padded([boxes[i].offset for i in kept], axes, 0),
        target=np.zeros((len(kept), axes), np.int64),
        sizes=padded([boxes[i].shape for i in kept], axes, 1),
        chunk_sizes=padded([column.shapes[row].tolist() for column, row in at], axes, 1),
    )


def _near(offsets: Int64s, sizes: Int64s, requests: Requests, i: int) -> Int64s:
    """The rows of a large table of boxes that meet a request on their first axis."""
    first, length = int(requests.offsets[i, 0]), int(requests.sizes[i, 0])
    begin = offsets[:, 0]
    return np.flatnonzero((begin < first + length) & (begin + sizes[:, 0] > first))


def row_major_strides(sizes: Int64s) -> Int64s:
    """(n, D) strides in elements of boxes that are stored in row-major order."""
    strides = np.ones_like(sizes)
    if sizes.shape[1] > 1:
        strides[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
    return strides


def first_runs(plan: ReadPlan, target_strides: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Where the first run of each part begins, and how long each of its runs is, in elements.

    Args:
        target_strides: (n, D) strides of the requests' tensors; the last axis longer than 1 is dense.

    Returns:
        (n,) first element in the chunk, in the tensor from its own first element, and the length of a run. A part
        with as many elements as that is one run; see `contiguous_runs` for the others.
    """
    source_strides = row_major_strides(plan.chunk_sizes)
    source = (plan.source * source_strides).sum(axis=1)
    target = (plan.target * target_strides).sum(axis=1)
    length = np.ones(len(plan), np.int64)
    growing = np.ones(len(plan), bool)
    for axis in reversed(range(plan.sizes.shape[1])):
        size = plan.sizes[:, axis]
        touching = (source_strides[:, axis] == length) & (target_strides[:, axis] == length)
        growing &= (size == 1) | touching
        length = np.where(growing, length * size, length)
    return source, target, length


def contiguous_runs(
    shape: Sequence[int], source_strides: Sequence[int], target_strides: Sequence[int]
) -> tuple[Int64s, Int64s, int]:
    """Element runs that are contiguous in both the stored chunk and the destination, in the order of the chunk.

    Args:
        shape: of the box that is copied; not empty.
        source_strides, target_strides: in elements; the destination's last axis is dense.

    Returns:
        source offsets, target offsets from the first element of the box (elements, both of shape (n,)), and the
        length of every run in elements.
    """
    length = 1
    axes = [axis for axis in range(len(shape)) if shape[axis] != 1]
    while axes and source_strides[axes[-1]] == length == target_strides[axes[-1]]:
        length *= shape[axes.pop()]
    source, target = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for axis in axes:
        steps = np.arange(shape[axis], dtype=np.int64)
        source = (source[:, None] + steps * source_strides[axis]).reshape(-1)
        target = (target[:, None] + steps * target_strides[axis]).reshape(-1)
    return source, target, length


ROW_BYTES = 16 * 1024
GAP_BYTES = 8 * 1024
"""Rows up to this length and this far apart are read as a table: the pages between them are read by any file system."""

FEW_ROWS = 64
"""Fewer are not worth a table."""


def slabs(shape: Sequence[int], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes that cover a shape one after the other in row-major order, each of at most `limit` elements (at least 1).

    Yields:
        offset and shape of each.
    """
    inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    cut = next((axis for axis, count in enumerate(inner) if count <= limit), None)
    if cut is None:  # no axes
        yield (), ()
        return
    step, rest = max(1, limit // max(1, inner[cut])), tuple(shape[cut + 1 :])
    for lead in itertools.product(*map(range, shape[:cut])):
        for first in range(0, shape[cut], step):
            yield (*lead, first, *(0,) * len(rest)), (*(1,) * cut, min(step, shape[cut] - first), *rest)


def as_rows(source: Int64s, target: Int64s, length: int) -> tuple[int, int] | None:
    """Strides of runs on both sides, when they are many short ones at equal and small distances: columns of a matrix.

    Args:
        source, target: (n,) where runs begin, in bytes.
        length: of each, in bytes.
    """
    if len(source) < FEW_ROWS or length > ROW_BYTES:
        return None
    from_, to = np.diff(source), np.diff(target)
    gap = int(from_[0]) - length
    if not 0 < gap <= GAP_BYTES or to[0] < length or (from_ != from_[0]).any() or (to != to[0]).any():
        return None
    return int(from_[0]), int(to[0])
