"""Read plans against brute force in NumPy, and their size and speed beside a million chunks."""

from __future__ import annotations

import copy
import math
import time

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptlib import read_plan
from ckptlib.index import ChunkItem, ItemIndex, Location
from ckptlib.read_plan import (
    ReadPlan,
    Requests,
    as_rows,
    contiguous_runs,
    first_runs,
    plan_boxes,
    plan_reads,
    row_major_strides,
    slabs,
)
from ckptlib.sharding import Box
from ckptlib.tiling import padded
from tests.support.tilings import boxes_in, coverage, guillotine, shapes, slices

RANKS, TENSORS = 16_384, 64


def index_of(tensors: dict[str, tuple[tuple[int, ...], list[Box]]]) -> ItemIndex:
    """An index of these chunks; `Location.offset` numbers the chunks of a tensor as they are given."""
    return ItemIndex.build(
        ChunkItem(key, "float32", shape, box, Location(f"{number % 3}.distcp", number, 0))
        for key, (shape, boxes) in tensors.items()
        for number, box in enumerate(boxes)
    )


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous array, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def box_of(plan: ReadPlan, columns: np.ndarray, row: int, ndim: int) -> Box:
    return Box(tuple(columns[row, :ndim].tolist()), tuple(plan.sizes[row, :ndim].tolist()))


def test_a_column_of_a_transposed_destination_is_read_element_by_element() -> None:
    source, target, length = contiguous_runs((2, 2), (2, 1), (1, 2))
    assert (source.tolist(), target.tolist(), length) == ([0, 1, 2, 3], [0, 2, 1, 3], 1)


@given(st.data(), st.lists(shapes(), min_size=1, max_size=3), st.integers(0, 3))
def test_any_boxes_are_filled_from_any_tilings(
    data: st.DataObject, of_tensors: list[tuple[int, ...]], scanned: int
) -> None:
    """R3: what the read plan copies, element run by element run, is what slicing the global tensors gives.

    Tensors of different numbers of axes are in one plan; small tables of chunks are searched like large ones.
    """
    tensors = {f"t{i}": (shape, data.draw(guillotine(shape))) for i, shape in enumerate(of_tensors)}
    index = index_of(tensors)
    keys = data.draw(st.lists(st.sampled_from(sorted(tensors)), max_size=4))
    boxes = [data.draw(boxes_in(tensors[key][0])) for key in keys]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_plan, "SCANNED", scanned)
        plan = plan_reads(index, Requests.build(keys, boxes))
    strides = padded([strides_of(box.shape) for box in boxes], plan.sizes.shape[1], 0)
    from_, to, length = first_runs(plan, strides[plan.request])
    for request, (key, box) in enumerate(zip(keys, boxes, strict=True)):
        shape, chunks = tensors[key]
        whole = np.arange(math.prod(shape)).reshape(shape)
        filled = np.full(math.prod(box.shape), -1)
        for row in np.flatnonzero(plan.request == request).tolist():
            chunk = index.chunks(key).box(int(plan.chunk[row]))
            assert chunk == chunks[plan.locations[row, 0]]
            assert index.files[plan.file[row]] == f"{plan.locations[row, 0] % 3}.distcp"
            assert bool(plan.whole[row]) == (box_of(plan, plan.source, row, len(shape)) == Box.whole(chunk.shape))
            stored = whole[slices(chunk)].reshape(-1)
            source, target, run = contiguous_runs(
                plan.sizes[row].tolist(), row_major_strides(plan.chunk_sizes)[row].tolist(), strides[request].tolist()
            )
            assert run == length[row]
            for one, two in zip(source + from_[row], target + to[row], strict=True):
                filled[two : two + run] = stored[one : one + run]
            assert len(source) * run == plan.volumes[row]
        assert np.array_equal(filled.reshape(box.shape), whole[slices(box)])
    assert plan.covered(len(keys)).tolist() == [box.volume for box in boxes]


@given(st.data(), shapes(min_dims=1, min_side=1))
def test_elements_that_no_chunk_has_are_counted(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """R4."""
    kept = [chunk for chunk in data.draw(guillotine(shape)) if data.draw(st.booleans())]
    assume(kept)
    request = data.draw(boxes_in(shape))
    plan = plan_reads(index_of({"t": (shape, kept)}), Requests.build(["t"], [request]))
    assert request.volume - plan.covered(1)[0] == (coverage(shape, kept)[slices(request)] == 0).sum()


@given(st.data(), shapes(min_dims=1, min_side=1))
def test_runs_are_as_long_as_both_layouts_allow(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """R3: no request is split that could be one; neighbouring runs never touch in source and target at once."""
    chunk, request = data.draw(boxes_in(shape, allow_empty=False)), data.draw(boxes_in(shape, allow_empty=False))
    common = chunk.intersect(request)
    assume(common is not None)
    source, target, length = contiguous_runs(common.shape, strides_of(chunk.shape), strides_of(request.shape))
    touching = (np.diff(source) == length) & (np.diff(target) == length)
    assert not touching.any()


def test_many_short_runs_a_short_way_apart_are_rows_of_a_table() -> None:
    columns, close = np.arange(64) * 2048, np.arange(64) * 512
    assert as_rows(columns, close, 512) == (2048, 512)
    assert as_rows(columns[:63], close[:63], 512) is None, "too few"
    assert as_rows(columns * 16, close, 512) is None, "the pages between them would be read for nothing"
    assert as_rows(columns * 16, close * 64, 20_000) is None, "each is worth a request"
    assert as_rows(close, columns, 512) is None, "one part of the file"
    uneven = columns + (np.arange(64) > 20) * 100
    assert as_rows(uneven, close, 512) is None
    assert as_rows(columns, uneven, 512) is None


def test_known_boxes_of_chunks_are_a_plan_too() -> None:
    index = index_of({"a": ((4, 6), [Box((0, 0), (4, 3)), Box((0, 3), (4, 3))]), "b": ((5,), [Box((0,), (5,))])})
    plan = plan_boxes(index, ["b", "a", "a"], [0, 1, 0], [Box((2,), (2,)), Box((1, 0), (3, 2)), Box((0, 0), (0, 3))])
    assert plan.request.tolist() == [0, 1]
    assert plan.source.tolist() == [[2, 0], [1, 0]]
    assert plan.sizes.tolist() == [[2, 1], [3, 2]]
    assert plan.chunk_sizes.tolist() == [[5, 1], [4, 3]]
    assert plan.locations[:, 0].tolist() == [0, 1]


def test_a_plan_in_file_order_reads_each_file_from_front_to_back() -> None:
    boxes = [Box((i, 0), (1, 4)) for i in range(7)]
    plan = plan_reads(index_of({"t": ((7, 4), boxes)}), Requests.build(["t", "t"], [Box((0, 2), (7, 2)), boxes[3]]))
    ordered = plan.in_file_order()
    places = list(zip(ordered.file.tolist(), ordered.locations[:, 0].tolist(), ordered.source[:, 1], strict=True))
    assert places == sorted(places)
    assert len(places) == 8


@pytest.fixture(scope="module")
def million() -> ItemIndex:
    """What 16,384 ranks saved of 64 tensors of (65536, 1024), a slab of four rows of each."""
    nbytes = 4 * 1024 * 2
    one = ItemIndex.build(
        ChunkItem(
            "weight", "bfloat16", (RANKS * 4, 1024), Box((rank * 4, 0), (4, 1024)),
            Location(f"__{rank:05}_0.distcp", 0, nbytes + 1600, 704, nbytes, 0),
        )
        for rank in range(RANKS)
    )  # fmt: skip
    parts = [copy.copy(one) for _ in range(TENSORS)]
    for i, part in enumerate(parts):
        part.keys = [f"layers.{i:02}.weight"]
    return ItemIndex.merge(parts)


@pytest.mark.parametrize("ranks", [16_383, 16_384, 12_000, 128])
def test_a_rank_finds_its_chunks_among_a_million_in_a_tenth_of_a_second(million: ItemIndex, ranks: int) -> None:
    """A rank of the same world, of a slightly smaller one whose slabs straddle the stored ones, and of a small one."""
    step = -(-RANKS * 4 // ranks)
    start = step * (ranks // 2)
    box = Box((start, 0), (min(step, RANKS * 4 - start), 1024))
    seconds = []
    for _ in range(3):
        started = time.process_time()
        plan = plan_reads(million, Requests.build(million.keys, [box] * TENSORS)).in_file_order()
        covered = plan.covered(TENSORS)
        seconds.append(time.process_time() - started)
        assert (covered == box.volume).all()
    assert plan.nbytes <= 256 * len(plan)
    assert min(seconds) <= 0.1, seconds


def test_a_plan_needs_at_most_256_bytes_an_item_with_up_to_six_axes() -> None:
    shape = (2, 2, 2, 2, 2, 6)
    boxes = [Box((0, 0, 0, 0, 0, i), (2, 2, 2, 2, 2, 1)) for i in range(6)]
    plan = plan_reads(index_of({"t": (shape, boxes)}), Requests.build(["t"], [Box.whole(shape)]))
    assert len(plan) == 6
    assert plan.nbytes <= 256 * 6


@given(shapes(min_side=1, max_side=6), st.integers(1, 40))
def test_slabs_cover_a_shape_in_order_and_none_is_larger_than_it_may_be(shape: tuple[int, ...], limit: int) -> None:
    """Also where the first axis is short and what follows is long: (2, 100000) is cut along the second."""
    elements = np.arange(math.prod(shape)).reshape(shape)
    seen = []
    for offset, size in slabs(shape, limit):
        part = elements[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
        assert part.shape == size
        assert 1 <= part.size <= limit
        seen += part.reshape(-1).tolist()
    assert seen == elements.reshape(-1).tolist()
