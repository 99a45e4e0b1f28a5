"""Read plans against brute force in NumPy."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptlib.read_plan import contiguous_runs, intersect_chunks, missing_elements
from ckptlib.sharding import Box
from tests.support.tilings import boxes_in, coverage, guillotine, shapes, slices


def columns(chunks: list[Box], ndim: int) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.array([chunk.offset for chunk in chunks], np.int64).reshape(len(chunks), ndim)
    return offsets, np.array([chunk.shape for chunk in chunks], np.int64).reshape(len(chunks), ndim)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous array, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def test_a_column_of_a_transposed_destination_is_read_element_by_element() -> None:
    source, target, length = contiguous_runs(Box((0, 0), (2, 2)), (2, 2), (1, 2))
    assert (source.tolist(), target.tolist(), length) == ([0, 1, 2, 3], [0, 2, 1, 3], 1)


@given(st.data(), shapes())
def test_any_box_is_filled_from_any_tiling(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """R3: what the read plan copies, element run by element run, is what slicing the global tensor gives."""
    chunks = data.draw(guillotine(shape))
    request = data.draw(boxes_in(shape))
    whole = np.arange(math.prod(shape)).reshape(shape)
    target = np.full(request.shape, -1).reshape(-1)
    pieces = list(intersect_chunks(request, *columns(chunks, len(shape))))
    copied = 0
    for piece in pieces:
        chunk = chunks[piece.chunk]
        assert piece.whole == (piece.source == Box.whole(chunk.shape))
        stored = whole[slices(chunk)].reshape(-1)
        source, to, length = contiguous_runs(piece.source, chunk.shape, strides_of(request.shape))
        start = sum(o * s for o, s in zip(piece.target.offset, strides_of(request.shape), strict=True))
        for one, two in zip(source, to + start, strict=True):
            target[two : two + length] = stored[one : one + length]
        assert len(source) * length == piece.source.volume
        copied += piece.source.volume
    assert np.array_equal(target.reshape(request.shape), whole[slices(request)])
    assert missing_elements(request, pieces) == request.volume - copied == 0


@given(st.data(), shapes(min_dims=1, min_side=1))
def test_elements_that_no_chunk_has_are_counted(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """R4."""
    chunks = data.draw(guillotine(shape))
    kept = [chunk for chunk in chunks if data.draw(st.booleans())]
    request = data.draw(boxes_in(shape))
    pieces = list(intersect_chunks(request, *columns(kept, len(shape))))
    assert missing_elements(request, pieces) == (coverage(shape, kept)[slices(request)] == 0).sum()


@given(st.data(), shapes(min_dims=1, min_side=1))
def test_runs_are_as_long_as_both_layouts_allow(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """R3: no request is split that could be one; neighbouring runs never touch in source and target at once."""
    chunk, request = data.draw(boxes_in(shape, allow_empty=False)), data.draw(boxes_in(shape, allow_empty=False))
    common = chunk.intersect(request)
    assume(common is not None)
    source, target, length = contiguous_runs(common.relative_to(chunk.offset), chunk.shape, strides_of(request.shape))
    touching = (np.diff(source) == length) & (np.diff(target) == length)
    assert not touching.any()


def test_a_request_for_whole_rows_is_one_run() -> None:
    source, target, length = contiguous_runs(Box((2, 0), (3, 8)), (10, 8), (8, 1))
    assert (source.tolist(), target.tolist(), length) == ([16], [0], 24)
