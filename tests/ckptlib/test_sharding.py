"""Boxes against brute force, and the wrappers that place a rank's piece in a global tensor."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.errors import StateError
from ckptlib.sharding import Box, ShardedObject, ShardedTensor, flat_range_boxes, is_main_replica
from ckptlib.tiling import check_tiling
from tests.support.tilings import boxes_in, coverage, shapes, slices


@given(st.data(), shapes(max_side=5))
def test_the_intersection_of_two_boxes_holds_exactly_their_common_elements(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    one, two = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = one.intersect(two)
    both = (coverage(shape, [one]) + coverage(shape, [two])) == 2
    assert common == two.intersect(one)
    if common is None:
        assert not both.any()
    else:
        assert np.array_equal(coverage(shape, [common]) == 1, both)
        assert common.volume == both.sum() > 0
        assert common.intersect(one) == common


@given(st.data(), shapes())
def test_a_box_inside_a_shape_is_within_it_and_counts_its_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(boxes_in(shape))
    assert box.within(shape)
    assert box.volume == np.zeros(shape)[slices(box)].size
    assert box.relative_to(box.offset) == Box.whole(box.shape)
    assert not box.within((*shape, 1))
    for axis in range(len(shape)):
        beyond = list(box.offset)
        beyond[axis] = shape[axis] - box.shape[axis] + 1
        assert not Box(tuple(beyond), box.shape).within(shape)


def test_a_box_reads_as_slices() -> None:
    assert str(Box((0, 2), (4, 3))) == "[0:4, 2:5]"
    assert str(Box((), ())) == "[]"


@pytest.mark.parametrize(("offset", "shape"), [((0,), (1, 1)), ((-1,), (1,)), ((0,), (-1,))])
def test_a_box_with_mixed_lengths_or_negative_coordinates_is_refused(
    offset: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    with pytest.raises(StateError, match="box"):
        Box(offset, shape)


@given(
    parts=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    local=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    layers=st.integers(1, 3),
    data=st.data(),
)
def test_regular_shards_are_slices_of_the_global_tensor(
    parts: tuple[int, int], local: tuple[int, int], layers: int, data: st.DataObject
) -> None:
    """`from_rank_offsets` means what Megatron-Core's does, prepended axes included."""
    shape = (layers, parts[0] * local[0], parts[1] * local[1])
    whole = torch.arange(layers * shape[1] * shape[2]).reshape(shape)
    layer, row, column = (data.draw(st.integers(0, n - 1)) for n in (layers, *parts))
    piece = whole[
        layer, row * local[0] : (row + 1) * local[0], column * local[1] : (column + 1) * local[1]
    ].contiguous()
    shard = ShardedTensor.from_rank_offsets(
        "w", piece, (0, layer, layers), (1, row, parts[0]), (2, column, parts[1]), prepend_axis_num=1
    )
    assert shard.global_shape == shape
    assert torch.equal(whole[slices(shard.box)], piece[None])
    assert ShardedTensor.from_box("w", piece, shape, shard.box.offset) == shard


@pytest.mark.parametrize(
    "offsets",
    [[(0, 2, 2)], [(0, -1, 2)], [(2, 0, 1)], [(0, 0, 2), (0, 1, 2)]],
    ids=["part past the end", "negative part", "axis that is absent", "axis given twice"],
)
def test_impossible_rank_offsets_are_refused_with_the_tensors_name(offsets: list[tuple[int, int, int]]) -> None:
    with pytest.raises(StateError, match=r"'layers\.w'"):
        ShardedTensor.from_rank_offsets("layers.w", torch.zeros(2, 2), *offsets)


def test_a_piece_that_does_not_fit_its_box_is_refused_with_the_tensors_name() -> None:
    with pytest.raises(StateError, match=r"'w'.*exceeds the global shape"):
        ShardedTensor("w", torch.zeros(4), (6,), Box((3,), (4,)))
    with pytest.raises(StateError, match=r"'w'.*does not fill its box"):
        ShardedTensor("w", torch.zeros(3), (6,), Box((2,), (4,)))


def test_only_the_all_zero_replica_is_the_main_one() -> None:
    assert is_main_replica(0)
    assert is_main_replica((0, 0, 0))
    assert not is_main_replica(3)
    assert not is_main_replica((0, 1, 0))


def test_a_sharded_object_is_named_as_megatron_names_it() -> None:
    assert ShardedObject("rng_state", [], (2, 4), (1, 3)).unique_key == "rng_state/shard_1.3_2.4"
    with pytest.raises(StateError, match=r"'rng_state'.*\(2,\).*outside the grid"):
        ShardedObject("rng_state", [], (2,), (2,))


@given(st.data(), shapes(min_dims=0, max_dims=4, min_side=1))
def test_a_flat_range_is_a_few_boxes_that_hold_exactly_its_elements(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    """At most 2 * ndim - 1 boxes, in order, for any shape and range."""
    whole = np.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, whole.size))
    stop = data.draw(st.integers(start, whole.size))
    parts = flat_range_boxes(shape, start, stop)
    assert len(parts) <= max(1, 2 * len(shape) - 1)
    elements = [whole[tuple(map(slice, part.box.offset, part.box.end))].reshape(-1) for part in parts]
    assert [int(values[0]) for values in elements] == [part.start for part in parts]
    assert np.concatenate([*elements, np.arange(0)]).tolist() == list(range(start, stop))


@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_ranks_that_own_flat_ranges_of_gated_shards_own_the_tensor_exactly_once(
    data: st.DataObject, tensor_parallel: int, rows: int, columns: int
) -> None:
    """Each tensor-parallel shard is a gate and an up half; the ranges of its data-parallel ranks tile it."""
    shape = (2 * tensor_parallel * rows, columns)
    found = torch.zeros(shape, dtype=torch.int64)
    boxes = []
    for part in range(tensor_parallel):
        halves = [Box((part * rows, 0), (rows, columns)), Box(((tensor_parallel + part) * rows, 0), (rows, columns))]
        total = 2 * rows * columns
        cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=3)))
        for start, stop in itertools.pairwise([0, *cuts, total]):
            flat = torch.arange(start, stop) + part * total + 1
            for shard in ShardedTensor.from_flat_range("fc1", shape, halves, start, stop, flat):
                boxes.append(shard.box)
                found[tuple(map(slice, shard.box.offset, shard.box.end))] = shard.data
    check_tiling("fc1", shape, boxes)
    gate, up = (half.split(rows) for half in found.chunk(2))
    local = [piece for pair in zip(gate, up, strict=True) for piece in pair]
    assert torch.cat(local).reshape(-1).tolist() == list(range(1, math.prod(shape) + 1))


def test_a_flat_range_outside_its_shard_is_refused() -> None:
    with pytest.raises(StateError, match="range 3:9 leaves its local shard of 8 elements"):
        ShardedTensor.from_flat_range("w", (4, 4), Box((0, 0), (2, 4)), 3, 9, torch.zeros(6))
    with pytest.raises(StateError, match="elements for the range"):
        ShardedTensor.from_flat_range("w", (4, 4), Box((0, 0), (2, 4)), 3, 7, torch.zeros(6))
