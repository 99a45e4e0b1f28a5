"""Write plans give every piece one writer."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib import plan as plans
from ckptlib.errors import DisagreementError, TilingError
from ckptlib.pieces import LocalPlan, PieceTable, TensorPiece
from ckptlib.plan import Part, WritePlan, make_write_plan, values_digest
from ckptlib.sharding import Box
from tests.support.tilings import cut, guillotine, is_tiling, shapes


def piece(key: str, shape: tuple[int, ...], box: Box, main: bool | None, dtype: str = "float32") -> TensorPiece:
    return TensorPiece(key, dtype, shape, box, 4 * box.volume, main)


def has(
    *pieces: TensorPiece, objects: dict[str, bool] | None = None, values: dict[str, str] | None = None
) -> LocalPlan:
    return LocalPlan(PieceTable.build(pieces), objects or {}, values or {})


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
        shape = draw(shapes(max_dims=3, max_side=4))
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
    return [has(*t, objects=o, values=v) for t, o, v in zip(tensors, objects, values, strict=True)]


def box_of(one: TensorPiece, part: Part) -> Box:
    """The rows of a piece that a part names."""
    if not one.box.shape:
        return one.box
    offset, shape = [*one.box.offset], [*one.box.shape]
    offset[part.axis] += part.start
    shape[part.axis] = part.stop - part.start
    return Box(tuple(offset), tuple(shape))


def written(local_plans: list[LocalPlan], plan: WritePlan) -> dict[str, list[Box]]:
    boxes: dict[str, list[Box]] = {}
    for local, mine in zip(local_plans, plan.ranks, strict=True):
        for part in mine.parts:
            one = local.tensors[part.piece]
            boxes.setdefault(one.key, []).append(box_of(one, part))
    return boxes


@given(worlds(), st.booleans())
def test_every_piece_has_exactly_one_writer(local_plans: list[LocalPlan], fine: bool) -> None:
    """W3: the written parts of each tensor tile it, cut or not; every object and value is written once."""
    with pytest.MonkeyPatch.context() as patch:
        if fine:
            patch.setattr(plans, "SPLIT_MIN_BYTES", 4)
        plan = make_write_plan(local_plans)
    boxes = written(local_plans, plan)
    for local in local_plans:
        for one in local.tensors:
            assert is_tiling(one.global_shape, boxes[one.key])
    for names, mine in (("objects", "objects"), ("values", "values")):
        everything = {name for local in local_plans for name in getattr(local, names)}
        assert Counter(name for rank in plan.ranks for name in getattr(rank, mine)) == Counter(everything)
    for rank, (local, own) in enumerate(zip(local_plans, plan.ranks, strict=True)):
        assert {*own.objects} <= {name for name, main in local.objects.items() if main}
        assert {*own.values} <= {*local.values}
        assert plan.nbytes[rank] == sum(4 * box_of(local.tensors[p.piece], p).volume for p in own.parts)


def column_bytes(table: PieceTable) -> int:
    """Bytes of all columns; the names are the state's own strings."""
    return sum(column.nbytes for column in vars(table).values() if isinstance(column, np.ndarray))


@given(worlds())
def test_a_table_of_pieces_says_what_the_pieces_said(local_plans: list[LocalPlan]) -> None:
    for local in local_plans:
        assert column_bytes(PieceTable.build([*local.tensors])) == column_bytes(local.tensors)
        assert [*PieceTable.build([*local.tensors])] == [*local.tensors]
        assert [*pickle.loads(pickle.dumps(local)).tensors] == [*local.tensors]


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
    one, two = make_write_plan(local_plans), make_write_plan(again)
    assert (one.ranks, one.shared_values, one.digest) == (two.ranks, two.shared_values, two.digest)


@given(worlds(), st.data())
def test_the_digest_changes_exactly_when_the_structure_does(local_plans: list[LocalPlan], data: st.DataObject) -> None:
    """W2; P19: a new key or another dtype is another plan, new contents are not."""
    digest = make_write_plan(local_plans).digest
    contents = [replace(p, values=dict.fromkeys(p.values, "new digest")) for p in local_plans]
    assert make_write_plan(contents).digest == digest
    rank = data.draw(st.integers(0, len(local_plans) - 1))
    added = piece("added", (2,), Box((0,), (2,)), None)
    changed = [
        replace(p, tensors=PieceTable.build([*p.tensors, added])) if i == rank else p for i, p in enumerate(local_plans)
    ]
    assert make_write_plan(changed).digest != digest
    other_dtype = [
        replace(p, tensors=PieceTable.build([replace(t, dtype="bfloat16") for t in p.tensors])) for p in local_plans
    ]
    assert (make_write_plan(other_dtype).digest == digest) == (not any(len(p.tensors) for p in local_plans))
    added_value = [replace(p, values={**p.values, "added": "digest"}) for p in local_plans]
    assert make_write_plan(added_value).digest != digest


def pieces_of(plan: WritePlan) -> list[list[int]]:
    return [[part.piece for part in rank.parts] for rank in plan.ranks]


def test_replicated_tensors_are_spread_over_the_ranks_by_bytes() -> None:
    """W3 dedup: eight equal tensors on four ranks are two each, a big one among small ones has a rank of its own."""
    equal = [piece(f"t{i}", (8,), Box.whole((8,)), None) for i in range(8)]
    assert [*map(len, pieces_of(make_write_plan([has(*equal)] * 4)))] == [2, 2, 2, 2]
    big = piece("big", (24,), Box.whole((24,)), None)
    assert pieces_of(make_write_plan([has(*equal[:3], big)] * 2)) == [[3], [0, 1, 2]]


def test_copies_of_unequal_load_go_to_the_rank_that_writes_less() -> None:
    own = piece("own", (64,), Box.whole((64,)), True)
    shared = piece("shared", (8,), Box.whole((8,)), None)
    assert pieces_of(make_write_plan([has(own, shared), has(shared)])) == [[0], [0]]


def test_copies_of_a_main_replica_share_its_work() -> None:
    """As Megatron-Core's fully parallel save: `replica_id` says which are alike, not who has to write."""
    layers = [piece(f"layer{i}", (8,), Box.whole((8,)), True) for i in range(4)]
    copies = [replace(layer, main=False) for layer in layers]
    assert pieces_of(make_write_plan([has(*layers), has(*copies)])) == [[0, 2], [1, 3]]


def test_a_copy_of_another_part_than_the_main_replicas_is_not_written() -> None:
    whole = piece("w", (4,), Box((0,), (4,)), True)
    half = piece("w", (4,), Box((0,), (2,)), False)
    assert pieces_of(make_write_plan([has(half), has(whole)])) == [[], [0]]


def test_one_huge_replicated_tensor_is_cut_into_rows_for_all_its_holders() -> None:
    rows, width = 50_257, 1024
    table = replace(piece("embedding", (rows, width), Box.whole((rows, width)), None), nbytes=4 * rows * width)
    small = [piece(f"bias{i}", (width,), Box.whole((width,)), None) for i in range(30)]
    plan = make_write_plan([has(table, *small)] * 6)
    assert plan.nbytes.max() <= 1.05 * plan.nbytes.mean()
    parts = sorted(part for rank in plan.ranks for part in rank.parts if part.piece == 0)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert len(parts) <= 6 * (plans.SPLIT_SHARE + 1)


def test_the_ranks_of_a_gpt_write_within_five_percent_of_each_other() -> None:
    """Tensor parallel 4 x data parallel 16 x expert parallel 8 in data parallel; each group shares its own copies."""
    tp, dp, ep, hidden, layers = 4, 16, 8, 2048, 4
    ranks: list[list[TensorPiece]] = [[] for _ in range(tp * dp)]

    def add(rank: int, key: str, shape: tuple[int, ...], box: Box, main: bool) -> None:
        ranks[rank].append(TensorPiece(key, "bfloat16", shape, box, 2 * box.volume, main))

    for rank in range(tp * dp):
        d, t = divmod(rank, tp)
        vocabulary = 50_304
        add(rank, "embedding", (vocabulary, hidden), Box((vocabulary // tp * t, 0), (vocabulary // tp, hidden)), d == 0)
        for layer in range(layers):
            name = f"layers.{layer}"
            wide = (3 * hidden, hidden)
            add(rank, f"{name}.qkv", wide, Box((wide[0] // tp * t, 0), (wide[0] // tp, hidden)), d == 0)
            add(rank, f"{name}.norm", (hidden,), Box.whole((hidden,)), rank == 0)
            experts = (16, 4 * hidden, hidden)
            local = experts[0] // ep
            box = Box((local * (d % ep), experts[1] // tp * t, 0), (local, experts[1] // tp, hidden))
            add(rank, f"{name}.experts", experts, box, d < ep)
    plan = make_write_plan([has(*pieces) for pieces in ranks])
    assert plan.nbytes.max() <= 1.05 * plan.nbytes.mean()


def test_a_plan_costs_less_than_256_bytes_for_each_piece() -> None:
    whole = Box.whole((8, 8, 8, 8))
    local = has(*(piece(f"t{i}", whole.shape, whole, None) for i in range(100)))
    assert column_bytes(local.tensors) <= 256 * 100
    plan = make_write_plan([local] * 2)
    assert plan.parts.nbytes <= 256 * 100


def test_a_disagreement_about_a_tensor_names_it_and_both_ranks() -> None:
    def with_shape(shape: tuple[int, ...], dtype: str = "float32") -> LocalPlan:
        return has(piece("layers.w", shape, Box.whole(shape), None, dtype))

    with pytest.raises(DisagreementError, match=r"'layers\.w': rank 0 has float32 \(4,\), rank 2 has float32 \(5,\)"):
        make_write_plan([with_shape((4,)), with_shape((4,)), with_shape((5,))])
    with pytest.raises(DisagreementError, match=r"rank 0 has float32 \(4,\), rank 1 has float32 \(4, 1\)"):
        make_write_plan([with_shape((4,)), with_shape((4, 1))])
    with pytest.raises(DisagreementError, match=r"rank 0 has float32 .* rank 1 has bfloat16"):
        make_write_plan([with_shape((4,)), with_shape((4,), "bfloat16")])


def test_a_value_that_differs_between_ranks_is_named_with_both_ranks() -> None:
    with pytest.raises(DisagreementError, match=r"'args\.seed' differs between rank 0 and rank 1.*ShardedObject"):
        make_write_plan([has(values={"args.seed": "a"}), has(values={"args.seed": "b"})])


def test_a_tensor_without_a_main_replica_is_named() -> None:
    """Wrong `replica_id`."""
    half = piece("w", (4,), Box((0,), (2,)), True)
    other = piece("w", (4,), Box((2,), (2,)), False)
    with pytest.raises(TilingError, match=r"'w': 2 of 4 elements are covered; no rank is the main replica"):
        make_write_plan([has(half), has(other)])


def test_a_tensor_with_two_main_replicas_is_named() -> None:
    """Wrong `replica_id`."""
    whole = piece("w", (4,), Box((0,), (4,)), True)
    with pytest.raises(TilingError, match=r"'w': \[0:4\] and \[0:4\] overlap.*replica_id other than 0"):
        make_write_plan([has(whole), has(whole)])


def test_a_tensor_that_is_marked_on_one_rank_and_plain_on_another_is_named() -> None:
    """A `ShardedTensor` here and a plain tensor there: nobody knows whether they are copies."""
    marked, plain = piece("w", (4,), Box((0,), (4,)), True), piece("w", (4,), Box((0,), (4,)), None)
    with pytest.raises(TilingError, match=r"'w': \[0:4\] and \[0:4\] overlap"):
        make_write_plan([has(marked), has(plain)])


def test_objects_without_or_with_two_main_replicas_are_named() -> None:
    with pytest.raises(TilingError, match=r"'rng/shard_0_1': ranks 0 and 1 both call theirs the main replica"):
        make_write_plan([has(objects={"rng/shard_0_1": True})] * 2)
    with pytest.raises(TilingError, match=r"'rng/shard_0_1': rank 0 has a copy, no rank calls its copy the main"):
        make_write_plan([has(objects={"rng/shard_0_1": False})] * 2)


def test_a_name_that_is_a_tensor_here_and_a_value_there_is_refused() -> None:
    """Both would be stored under one name, and torch's metadata could keep only one of them."""
    tensor = has(piece("ema", (4,), Box.whole((4,)), None))
    value = has(values={"ema": "digest of None"})
    with pytest.raises(DisagreementError, match=r"'ema'.*rank 0.*tensor.*rank 1.*value"):
        make_write_plan([tensor, value])
    with pytest.raises(DisagreementError, match=r"'ema'.*rank 0.*value.*rank 1.*tensor"):
        make_write_plan([value, tensor])


def test_an_empty_shard_never_takes_the_place_of_a_full_one() -> None:
    """torch's metadata knows a chunk by its offset: an empty chunk at the offset of a full one would hide it."""
    empty = piece("w", (4,), Box((0,), (0,)), True)
    full = piece("w", (4,), Box((0,), (4,)), True)
    assert pieces_of(make_write_plan([has(empty), has(full)])) == [[], [0]]


def test_the_greedy_choice_is_that_of_a_plain_loop() -> None:
    """The heaps are an index over the loads, not another rule."""
    generator = np.random.default_rng(7)
    sizes = generator.integers(1, 500, 60).tolist()
    holders = [sorted(generator.choice(5, generator.integers(2, 6), replace=False).tolist()) for _ in sizes]
    ranks: list[list[TensorPiece]] = [[] for _ in range(5)]
    for i, (size, among) in enumerate(zip(sizes, holders, strict=True)):
        for rank in among:
            ranks[rank].append(piece(f"t{i:02}", (size,), Box.whole((size,)), None))
    expected = [0] * 5
    for i in sorted(range(60), key=lambda i: (-sizes[i], i)):
        best = min(holders[i], key=lambda rank: (expected[rank], rank))
        expected[best] += 4 * sizes[i]
    assert make_write_plan([has(*own) for own in ranks]).nbytes.tolist() == expected


def test_cuts_at_the_edge_leave_an_empty_box() -> None:
    assert [box.volume for box in cut(Box.whole((3,)), 0, 0)] == [0, 3]
