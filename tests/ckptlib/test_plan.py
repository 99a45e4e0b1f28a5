"""Write plans give every piece one writer; tilings and read plans against brute force in NumPy."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptlib.errors import DisagreementError, TilingError
from ckptlib.plan import (
    LocalPlan,
    TensorPiece,
    WritePlan,
    check_tiling,
    contiguous_runs,
    covers,
    intersect_chunks,
    make_write_plan,
    missing_elements,
    values_digest,
)
from ckptlib.sharding import Box
from tests.support.tilings import boxes_in, coverage, cut, grids, guillotine, shapes, slices

# --- tilings ----------------------------------------------------------------------------------------------------------


def is_tiling(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """The oracle: every element counted once; a tensor without elements needs somebody who has it."""
    inside = all(box.within(shape) for box in boxes)
    return inside and bool((coverage(shape, boxes) == 1).all()) and bool(boxes)


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
    assert covers(boxes, shape) == is_tiling(shape, boxes)


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
    with pytest.raises(TilingError, match=r"'w': .*would both be written") as caught:
        check_tiling("w", shape, [*boxes, extra])
    one, two = re.findall(r"\[[\d:, ]*\]", str(caught.value))
    named = [box for box in [*boxes, extra] if str(box) in (one, two)]
    assert (coverage(shape, named) > 1).any()


def test_a_hole_and_an_overlap_of_the_same_size_are_still_found() -> None:
    """W3: counting elements alone would be content."""
    with pytest.raises(TilingError, match="would both be written"):
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
    with pytest.raises(TilingError, match="would both be written"):
        check_tiling("step", (), [Box((), ()), Box((), ())])
    with pytest.raises(TilingError, match="0 of 1 elements"):
        check_tiling("step", (), [])


def test_a_pinwheel_that_no_single_cut_divides_is_a_tiling() -> None:
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    check_tiling("w", (3, 3), pinwheel)
    with pytest.raises(TilingError, match="would both be written"):
        check_tiling("w", (3, 3), [*pinwheel[:4], Box((1, 1), (1, 2))])


def test_a_large_grid_is_checked_in_linear_time() -> None:
    """P04: 256 x 256 pieces; comparing all pairs would take minutes."""
    boxes = [Box((2 * i, 3 * j), (2, 3)) for i in range(256) for j in range(256)]
    check_tiling("w", (512, 768), boxes)


# --- read plans -------------------------------------------------------------------------------------------------------


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


# --- write plans ------------------------------------------------------------------------------------------------------


def piece(key: str, shape: tuple[int, ...], box: Box, main: bool | None, dtype: str = "float32") -> TensorPiece:
    return TensorPiece(key, dtype, shape, box, 4 * box.volume, main)


@st.composite
def worlds(draw: st.DrawFn) -> list[LocalPlan]:
    """Ranks with replicated tensors, sharded ones with marked main replicas, grid cells and plain values."""
    world = draw(st.integers(1, 4))
    tensors: list[list[TensorPiece]] = [[] for _ in range(world)]
    objects: list[dict[str, bool]] = [{} for _ in range(world)]
    values: list[dict[str, str]] = [{} for _ in range(world)]
    ranks = st.integers(0, world - 1)
    holders = st.sets(ranks, min_size=1)
    for i in range(draw(st.integers(0, 4))):
        shape = draw(shapes(max_dims=2, max_side=4))
        if draw(st.booleans()):  # the plan chooses among those who have it
            for box in draw(guillotine(shape, max_cuts=2)):
                for rank in draw(holders):
                    tensors[rank].append(piece(f"t{i}", shape, box, None))
        else:
            for box in draw(guillotine(shape, max_cuts=2)):
                main, others = draw(ranks), draw(st.sets(ranks))
                for rank in {main, *others}:
                    tensors[rank].append(piece(f"t{i}", shape, box, rank == main))
    for i in range(draw(st.integers(0, 2))):
        main = draw(ranks)
        for rank in {main, *draw(st.sets(ranks))}:
            objects[rank][f"o{i}/shard_0_1"] = rank == main
    for i in range(draw(st.integers(0, 2))):
        for rank in draw(holders):
            values[rank][f"v{i}"] = f"digest {i}"
    return [LocalPlan(tuple(t), o, v) for t, o, v in zip(tensors, objects, values, strict=True)]


def written(local_plans: list[LocalPlan], plan: WritePlan) -> list[TensorPiece]:
    return [local.tensors[i] for local, mine in zip(local_plans, plan.ranks, strict=True) for i in mine.tensors]


@given(worlds())
def test_every_piece_has_exactly_one_writer(local_plans: list[LocalPlan]) -> None:
    """W3: the written pieces of each tensor tile it; every object and value is written once."""
    plan = make_write_plan(local_plans)
    boxes: dict[str, list[Box]] = {}
    for one in written(local_plans, plan):
        boxes.setdefault(one.key, []).append(one.box)
    for local in local_plans:
        for one in local.tensors:
            assert is_tiling(one.global_shape, boxes[one.key])
    for names, mine in (("objects", "objects"), ("values", "values")):
        everything = {name for local in local_plans for name in getattr(local, names)}
        assert Counter(name for rank in plan.ranks for name in getattr(rank, mine)) == Counter(everything)
    for local, rank in zip(local_plans, plan.ranks, strict=True):
        assert {*rank.objects} <= {name for name, main in local.objects.items() if main}
        assert {*rank.values} <= {*local.values}
        assert not any(local.tensors[i].main is False for i in rank.tensors)


@given(worlds())
def test_shared_values_are_those_that_every_rank_has(local_plans: list[LocalPlan]) -> None:
    plan = make_write_plan(local_plans)
    assert {*plan.shared_values} == set.intersection(*({*local.values} for local in local_plans))
    assert len({values_digest(local.values, plan.shared_values) for local in local_plans}) == 1


@given(worlds())
def test_a_plan_is_deterministic(local_plans: list[LocalPlan]) -> None:
    again = [
        LocalPlan(p.tensors, dict(reversed(p.objects.items())), dict(reversed(p.values.items()))) for p in local_plans
    ]
    assert make_write_plan(local_plans) == make_write_plan(again)


@given(worlds(), st.data())
def test_the_digest_changes_exactly_when_the_structure_does(local_plans: list[LocalPlan], data: st.DataObject) -> None:
    """W2; P19: a new key or another dtype is another plan, new contents are not."""
    digest = make_write_plan(local_plans).digest
    contents = [replace(p, values=dict.fromkeys(p.values, "new digest")) for p in local_plans]
    assert make_write_plan(contents).digest == digest
    rank = data.draw(st.integers(0, len(local_plans) - 1))
    added = piece("added", (2,), Box((0,), (2,)), None)
    changed = [replace(p, tensors=(*p.tensors, added)) if i == rank else p for i, p in enumerate(local_plans)]
    assert make_write_plan(changed).digest != digest
    other_dtype = [replace(p, tensors=tuple(replace(t, dtype="bfloat16") for t in p.tensors)) for p in local_plans]
    assert (make_write_plan(other_dtype).digest == digest) == (not any(p.tensors for p in local_plans))
    added_value = [replace(p, values={**p.values, "added": "digest"}) for p in local_plans]
    assert make_write_plan(added_value).digest != digest


def test_replicated_tensors_are_spread_over_the_ranks_by_bytes() -> None:
    """W3 dedup: eight equal tensors on four ranks are two each, a big one among small ones has a rank of its own."""
    local = LocalPlan(tuple(piece(f"t{i}", (8,), Box.whole((8,)), None) for i in range(8)), {}, {})
    assert [len(rank.tensors) for rank in make_write_plan([local] * 4).ranks] == [2, 2, 2, 2]
    big = piece("big", (24,), Box.whole((24,)), None)
    uneven = LocalPlan((*local.tensors[:3], big), {}, {})
    assert [rank.tensors for rank in make_write_plan([uneven] * 2).ranks] == [(3,), (0, 1, 2)]


def test_copies_of_unequal_load_go_to_the_rank_that_writes_less() -> None:
    own = piece("own", (64,), Box.whole((64,)), True)
    shared = piece("shared", (8,), Box.whole((8,)), None)
    plan = make_write_plan([LocalPlan((own, shared), {}, {}), LocalPlan((shared,), {}, {})])
    assert [rank.tensors for rank in plan.ranks] == [(0,), (0,)]


def test_a_disagreement_about_a_tensor_names_it_and_both_ranks() -> None:
    def with_shape(shape: tuple[int, ...], dtype: str = "float32") -> LocalPlan:
        return LocalPlan((piece("layers.w", shape, Box.whole(shape), None, dtype),), {}, {})

    with pytest.raises(DisagreementError, match=r"'layers\.w': rank 0 has float32 \(4,\), rank 2 has float32 \(5,\)"):
        make_write_plan([with_shape((4,)), with_shape((4,)), with_shape((5,))])
    with pytest.raises(DisagreementError, match=r"rank 0 has float32 .* rank 1 has bfloat16"):
        make_write_plan([with_shape((4,)), with_shape((4,), "bfloat16")])


def test_a_value_that_differs_between_ranks_is_named_with_both_ranks() -> None:
    with pytest.raises(DisagreementError, match=r"'args\.seed' differs between rank 0 and rank 1.*ShardedObject"):
        make_write_plan([LocalPlan((), {}, {"args.seed": "a"}), LocalPlan((), {}, {"args.seed": "b"})])


def test_a_tensor_without_a_main_replica_is_named() -> None:
    """Wrong `replica_id`."""
    half = piece("w", (4,), Box((0,), (2,)), True)
    other = piece("w", (4,), Box((2,), (2,)), False)
    with pytest.raises(TilingError, match=r"'w': 2 of 4 elements would be written; no rank is the main replica"):
        make_write_plan([LocalPlan((half,), {}, {}), LocalPlan((other,), {}, {})])


def test_a_tensor_with_two_main_replicas_is_named() -> None:
    """Wrong `replica_id`."""
    whole = piece("w", (4,), Box((0,), (4,)), True)
    with pytest.raises(TilingError, match=r"'w': \[0:4\] and \[0:4\] would both be written.*replica_id other than 0"):
        make_write_plan([LocalPlan((whole,), {}, {}), LocalPlan((whole,), {}, {})])


def test_objects_without_or_with_two_main_replicas_are_named() -> None:
    with pytest.raises(TilingError, match=r"'rng/shard_0_1': ranks 0 and 1 both call theirs the main replica"):
        make_write_plan([LocalPlan((), {"rng/shard_0_1": True}, {})] * 2)
    with pytest.raises(TilingError, match=r"'rng/shard_0_1': rank 0 has a copy, no rank calls its copy the main"):
        make_write_plan([LocalPlan((), {"rng/shard_0_1": False}, {})] * 2)


def test_a_name_that_is_a_tensor_here_and_a_value_there_is_refused() -> None:
    """Both would be stored under one name, and torch's metadata could keep only one of them."""
    tensor = LocalPlan((piece("ema", (4,), Box.whole((4,)), None),), {}, {})
    value = LocalPlan((), {}, {"ema": "digest of None"})
    with pytest.raises(DisagreementError, match=r"'ema'.*rank 0.*tensor.*rank 1.*value"):
        make_write_plan([tensor, value])
    with pytest.raises(DisagreementError, match=r"'ema'.*rank 0.*value.*rank 1.*tensor"):
        make_write_plan([value, tensor])


def test_an_empty_shard_never_takes_the_place_of_a_full_one() -> None:
    """torch's metadata knows a chunk by its offset: an empty chunk at the offset of a full one would hide it."""
    empty = piece("w", (4,), Box((0,), (0,)), True)
    full = piece("w", (4,), Box((0,), (4,)), True)
    plan = make_write_plan([LocalPlan((empty,), {}, {}), LocalPlan((full,), {}, {})])
    assert [rank.tensors for rank in plan.ranks] == [(), (0,)]


def test_cuts_at_the_edge_leave_an_empty_box() -> None:
    assert [box.volume for box in cut(Box.whole((3,)), 0, 0)] == [0, 3]
