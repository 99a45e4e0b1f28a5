"""Which bytes a load needs: request box ∩ stored chunk, as contiguous byte runs (R3). Pure (numpy only)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptlib.sharding import Box

Int64s = npt.NDArray[np.int64]


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


def _strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return strides
