"""Hypothesis strategies for shapes and for boxes that tile them."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st

from ckptlib.sharding import Box


def shapes(*, min_dims: int = 0, max_dims: int = 4, min_side: int = 0, max_side: int = 6) -> st.SearchStrategy:
    """Shapes, 0-dimensional and empty ones included."""
    return st.lists(st.integers(min_side, max_side), min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...], *, allow_empty: bool = True) -> Box:
    """Any box inside a shape; with `allow_empty=False` only where every side is at least 1."""
    offset, size = [], []
    for side in shape:
        start = draw(st.integers(0, side if allow_empty else side - 1))
        offset.append(start)
        size.append(draw(st.integers(0 if allow_empty else 1, side - start)))
    return Box(tuple(offset), tuple(size))


@st.composite
def guillotine(draw: st.DrawFn, shape: tuple[int, ...], *, max_cuts: int = 8) -> list[Box]:
    """Boxes that tile a shape, made by cutting one box in two again and again; in any order.

    A cut may fall on an edge, which leaves an empty box: uneven shardings have those.
    """
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, max_cuts)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[axis]))
        boxes += cut(box, axis, at)
    return draw(st.permutations(boxes))


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...], *, max_parts: int = 4) -> list[Box]:
    """Boxes that tile a shape as a grid, with uneven and empty parts as `torch.chunk` makes them."""
    boxes = [Box.whole(shape)]
    for axis, side in enumerate(shape):
        parts = draw(st.integers(1, max_parts))
        step = -(-side // parts)
        edges = [min(i * step, side) for i in range(parts + 1)]
        boxes = [
            Box(
                (*box.offset[:axis], low, *box.offset[axis + 1 :]),
                (*box.shape[:axis], high - low, *box.shape[axis + 1 :]),
            )
            for box in boxes
            for low, high in itertools.pairwise(edges)
        ]
    return boxes


def cut(box: Box, axis: int, at: int) -> list[Box]:
    """Two boxes: `box` cut across `axis`, `at` elements from its start."""
    offset, shape = list(box.offset), list(box.shape)
    low = Box(box.offset, (*shape[:axis], at, *shape[axis + 1 :]))
    offset[axis] += at
    high = Box(tuple(offset), (*shape[:axis], shape[axis] - at, *shape[axis + 1 :]))
    return [low, high]


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index of a NumPy array or tensor."""
    return tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))


def coverage(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """How many boxes cover each element: the brute-force truth about a tiling."""
    count = np.zeros(shape, np.int64)
    for box in boxes:
        count[slices(box)] += 1
    return count


def is_tiling(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """The oracle: every element counted once; a tensor without elements needs somebody who has it."""
    inside = all(box.within(shape) for box in boxes)
    return inside and bool((coverage(shape, boxes) == 1).all()) and bool(boxes)
