"""P04 (pytorch#163548): validating a plan took time quadratic in the number of chunks.

Time itself is measured in `benchmarks/plan.py`; here the work is counted, which no busy machine can change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from ckptlib.index import ChunkItem, ItemIndex, Location
from ckptlib.pieces import LocalPlan, PieceTable, TensorPiece
from ckptlib.plan import make_write_plan
from ckptlib.sharding import Box


def calls(work: Callable[[], Any]) -> int:
    """Python and C functions that are called in `work`: what an object per chunk costs."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def rank(number: int, world: int, tensors: int) -> LocalPlan:
    boxes = Box((4 * number, 0), (4, 8))
    pieces = [TensorPiece(f"layers.{i}", "bfloat16", (4 * world, 8), boxes, 64, True) for i in range(tensors)]
    return LocalPlan(PieceTable.build(pieces), {}, {"seed": "same"})


def tiles(number: int, side: int, tensors: int) -> LocalPlan:
    row, column = divmod(number, side)
    box = Box((2 * row, 2 * column), (2, 2))
    pieces = [TensorPiece(f"layers.{i}", "bfloat16", (2 * side, 2 * side), box, 8, True) for i in range(tensors)]
    return LocalPlan(PieceTable.build(pieces), {}, {})


@pytest.mark.parametrize("make", [rank, tiles])
def test_p04_planning_and_checking_grow_with_the_chunks_not_with_their_square(make: Callable[..., LocalPlan]) -> None:
    """W3."""
    small, large = 8, 32
    counts = []
    for side in (small, large):
        world = side * side
        plans = [make(number, world if make is rank else side, 16) for number in range(world)]
        counts.append(calls(lambda plans=plans: make_write_plan(plans)))  # type: ignore[misc]
    growth = (large / small) ** 2
    assert counts[1] <= 1.2 * growth * counts[0]


def test_p04_indexing_the_records_of_many_ranks_takes_a_few_calls_for_each() -> None:
    def record(number: int, world: int) -> ItemIndex:
        box = Box((number,), (1,))
        chunks = [ChunkItem(f"t{i}", "float32", (world,), box, Location(f"__{number}_0", i, 1)) for i in range(16)]
        return ItemIndex.build(chunks)

    counts = []
    for world in (64, 1024):
        parts = [record(number, world) for number in range(world)]
        counts.append(calls(lambda parts=parts: ItemIndex.merge(parts).check_tilings()))  # type: ignore[misc]
    assert counts[1] <= 1.2 * 16 * counts[0]
