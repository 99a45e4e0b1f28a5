"""Tilings against an oracle that counts every element."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.errors import TilingError
from ckptlib.sharding import Box
from ckptlib.tiling import check_tiling
from tests.support.tilings import boxes_in, coverage, grids, guillotine, is_tiling, shapes


@given(st.data(), shapes())
def test_random_guillotine_cuts_tile_a_tensor(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """W3."""
    check_tiling("w", shape, data.draw(guillotine(shape)))


@given(st.data(), shapes(max_dims=3, max_side=9))
def test_uneven_grids_tile_a_tensor(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """W3; parts as `torch.chunk` cuts them, empty ones included."""
    check_tiling("w", shape, data.draw(grids(shape)))


@given(st.data(), shapes(max_dims=3, max_side=4))
def test_any_set_of_boxes_is_judged_as_counting_elements_judges_it(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """W3: holes, overlaps, both at once so that the volumes still add up, zero sizes, 0 dimensions."""
    boxes = data.draw(guillotine(shape))
    for _ in range(data.draw(st.integers(0, 2))):
        change = data.draw(st.sampled_from(["drop", "repeat", "add", "replace"]))
        at = data.draw(st.integers(0, len(boxes) - 1)) if boxes else 0
        if change in ("drop", "replace") and boxes:
            del boxes[at]
        if change == "repeat" and boxes:
            boxes.append(boxes[min(at, len(boxes) - 1)])
        if change in ("add", "replace"):
            boxes.append(data.draw(boxes_in(shape)))
    if is_tiling(shape, boxes):
        check_tiling("w", shape, boxes)
    else:
        with pytest.raises(TilingError, match="'w'"):
            check_tiling("w", shape, boxes)


@given(st.data(), shapes(min_dims=1, min_side=1, max_side=5))
def test_a_hole_is_reported_with_the_tensor_and_the_elements_that_are_there(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    boxes = data.draw(guillotine(shape))
    hole = data.draw(st.sampled_from([box for box in boxes if box.volume]))
    boxes.remove(hole)
    volume = math.prod(shape)
    with pytest.raises(TilingError, match=rf"'layers\.w': {volume - hole.volume} of {volume} elements"):
        check_tiling("layers.w", shape, boxes)


@given(st.data(), shapes(min_side=1, max_side=5))
def test_an_overlap_is_reported_with_both_boxes(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(guillotine(shape))
    extra = data.draw(boxes_in(shape, allow_empty=False))
    with pytest.raises(TilingError, match=r"'w': .*overlap") as caught:
        check_tiling("w", shape, [*boxes, extra])
    one, two = re.findall(r"\[[\d:, ]*\]", str(caught.value))
    named = [box for box in [*boxes, extra] if str(box) in (one, two)]
    assert (coverage(shape, named) > 1).any()


def test_a_hole_and_an_overlap_of_the_same_size_are_still_found() -> None:
    """W3: counting elements alone would be content."""
    with pytest.raises(TilingError, match="overlap"):
        check_tiling("w", (4,), [Box((0,), (2,)), Box((1,), (2,))])


def test_a_box_that_leaves_the_tensor_is_reported() -> None:
    with pytest.raises(TilingError, match=r"'w': box \[3:5\] exceeds the global shape \(4,\)"):
        check_tiling("w", (4,), [Box((0,), (3,)), Box((3,), (2,))])


def test_a_tensor_without_elements_still_needs_a_writer() -> None:
    check_tiling("w", (0, 3), [Box.whole((0, 3))])
    with pytest.raises(TilingError, match="'w': no rank is its main replica"):
        check_tiling("w", (0, 3), [])


def test_a_scalar_is_one_place() -> None:
    check_tiling("step", (), [Box((), ())])
    with pytest.raises(TilingError, match="overlap"):
        check_tiling("step", (), [Box((), ()), Box((), ())])
    with pytest.raises(TilingError, match="0 of 1 elements"):
        check_tiling("step", (), [])


def test_a_pinwheel_that_no_single_cut_divides_is_a_tiling() -> None:
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    check_tiling("w", (3, 3), pinwheel)
    with pytest.raises(TilingError, match="overlap"):
        check_tiling("w", (3, 3), [*pinwheel[:4], Box((1, 1), (1, 2))])


def test_a_large_grid_is_checked_in_linear_time() -> None:
    """P04: 256 x 256 pieces; comparing all pairs would take minutes."""
    boxes = [Box((2 * i, 3 * j), (2, 3)) for i in range(256) for j in range(256)]
    check_tiling("w", (512, 768), boxes)
