"""Write plans give every piece one writer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.errors import DisagreementError, TilingError
from ckptlib.plan import LocalPlan, TensorPiece, WritePlan, make_write_plan, values_digest
from ckptlib.sharding import Box
from tests.support.tilings import cut, guillotine, is_tiling, shapes


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
