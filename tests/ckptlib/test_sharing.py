"""Who reads what: every byte that anybody needs is read once, by one that needs it, and evenly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib import sharing
from ckptlib.sharding import Box
from ckptlib.sharing import Units, Wishes, share
from ckptlib.tiling import padded
from tests.support.tilings import boxes_in, shapes, slices


def wishes(of_ranks: list[list[tuple[int, Box]]], axes: int, itemsize: int = 4) -> Wishes:
    """Boxes of numbered chunks, by rank."""
    flat = [(rank, row, chunk, box) for rank, wants in enumerate(of_ranks) for row, (chunk, box) in enumerate(wants)]
    return Wishes(
        rank=np.array([rank for rank, _, _, _ in flat], np.int64),
        row=np.array([row for _, row, _, _ in flat], np.int64),
        chunk=np.array([(0, chunk, 0) for _, _, chunk, _ in flat], np.int64).reshape(-1, 3),
        source=padded([box.offset for _, _, _, box in flat], axes, 0),
        sizes=padded([box.shape for _, _, _, box in flat], axes, 1),
        itemsize=np.full(len(flat), itemsize),
    )


def boxes_of(units: Units, ndim: int) -> list[Box]:
    return [
        Box(tuple(offset[:ndim]), tuple(size[:ndim]))
        for offset, size in zip(units.source.tolist(), units.sizes.tolist(), strict=True)
    ]


@given(st.data(), shapes(min_dims=1, max_dims=3, min_side=1, max_side=5), st.integers(1, 4), st.sampled_from([1, 64]))
def test_every_wish_is_made_of_units_that_are_read_once(
    data: st.DataObject, shape: tuple[int, ...], world_size: int, cut_min_bytes: int
) -> None:
    """Any boxes of two chunks, overlapping as they like, also twice on one rank; cut up for balance or not."""
    one_wish = st.tuples(st.integers(0, 1), boxes_in(shape, allow_empty=False))
    of_ranks = [data.draw(st.lists(one_wish, max_size=3)) for _ in range(world_size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "CUT_MIN_BYTES", cut_min_bytes)
        units = share(wishes(of_ranks, len(shape)), world_size)
    boxes = boxes_of(units, len(shape))
    chunk_of: dict[int, int] = {}
    made = [[np.zeros(shape, int) for _ in wants] for wants in of_ranks]
    for unit, rank, row in zip(units.unit.tolist(), units.rank.tolist(), units.row.tolist(), strict=True):
        made[rank][row][slices(boxes[unit])] += 1
        chunk_of[unit] = of_ranks[rank][row][0]
    for wants, counts in zip(of_ranks, made, strict=True):
        for (_, box), count in zip(wants, counts, strict=True):
            wanted = np.zeros(shape, int)
            wanted[slices(box)] = 1
            assert np.array_equal(count, wanted)
    read = [np.zeros(shape, int) for _ in range(2)]
    for unit, box in enumerate(boxes):
        read[chunk_of[unit]][slices(box)] += 1
        assert units.reader[unit] in units.rank[units.unit == unit]
        assert units.nbytes[unit] == 4 * box.volume
    assert all(count.max(initial=0) <= 1 for count in read)


def test_copies_are_read_by_all_holders_evenly() -> None:
    """Sixty tensors of very different sizes on four ranks, and one that is larger than all of them."""
    sizes = [1 << (i % 12) for i in range(60)]
    wants = [(i, Box((0,), (size * 1024,))) for i, size in enumerate(sizes)]
    loads = np.bincount((units := share(wishes([wants] * 4, 1), 4)).reader, weights=units.nbytes, minlength=4)
    assert loads.max() / loads.mean() <= 1.05
    large = [*wants, (60, Box((0, 0), (1000, 65_536)))]
    units = share(wishes([large] * 4, 2), 4)
    loads = np.bincount(units.reader, weights=units.nbytes, minlength=4)
    assert loads.sum() == 4 * sum(box.volume for _, box in large)
    assert loads.max() / loads.mean() <= 1.05


def test_what_one_rank_alone_needs_counts_in_the_balance() -> None:
    of_ranks = [[(0, Box((0,), (1000,))), (1, Box((0,), (500,))), (2, Box((0,), (500,)))]]
    of_ranks.append(of_ranks[0][1:])
    units = share(wishes(of_ranks, 1), 2)
    assert units.reader.tolist() == [0, 1, 1]


def test_chunks_are_left_whole_where_nobody_wants_a_part() -> None:
    """So that their CRC-32 can be checked by the one that reads them."""
    shape = (64, 64)
    units = share(wishes([[(i, Box.whole(shape)) for i in range(50)]] * 8, 2), 8)
    assert boxes_of(units, 2) == [Box.whole(shape)] * 50
    assert math.prod(shape) * 4 == units.nbytes[0]
