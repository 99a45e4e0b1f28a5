"""Tensors that are stored in another form than they are held: taken apart on save, put together on load."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptlib
from ckptlib import ShardedTensorFactory, factories
from ckptlib.errors import LoadIncompleteError, ShapeMismatchError, StateError
from ckptlib.sharding import ShardedObject, ShardedTensor

HIDDEN, FFN, GROUPS, Q_ROWS, KV_ROWS, LAYERS = 3, 8, 4, 4, 2, 2


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def pieces(built: Any) -> list[ShardedTensor]:
    match built:
        case dict():
            return [piece for part in built.values() for piece in pieces(part)]
        case list():
            return [piece for part in built for piece in pieces(part)]
        case _:
            return [built]


def stored(ranks: Sequence[Sequence[ShardedTensor]]) -> dict[str, np.ndarray[Any, Any]]:
    """The global tensors that the pieces of all ranks make; NaN where there is a hole."""
    out: dict[str, np.ndarray[Any, Any]] = {}
    for piece in (piece for rank in ranks for piece in rank):
        whole = out.setdefault(piece.key, np.full(piece.global_shape, np.nan, np.float32))
        where = tuple(slice(o, e) for o, e in zip(piece.box.offset, piece.box.end, strict=True))
        assert np.isnan(whole[where]).all(), f"{piece.key}: {piece.box} is stored twice"
        whole[where] = piece.data.reshape(piece.box.shape).numpy()
    return out


def gated(local: torch.Tensor, rank: int, size: int, **options: Any) -> ShardedTensorFactory:
    return factories.swiglu("fc1", local, rank, size, **options)


def qkv(local: torch.Tensor, rank: int, size: int, **options: Any) -> ShardedTensorFactory:
    return factories.fused_qkv("qkv", local, rank, size, q_rows=Q_ROWS, kv_rows=KV_ROWS, **options)


def of_rank(kind: str, rank: int, size: int, rest: tuple[int, ...] = (HIDDEN,)) -> ShardedTensorFactory:
    """Each rank's local tensor is numbered through."""
    rows = {"qkv": GROUPS * (Q_ROWS + 2 * KV_ROWS)}.get(kind, 2 * FFN)
    local = numbered(rows, *rest).chunk(size)[rank].clone()
    if kind == "qkv":
        return qkv(local, rank, size)
    return gated(local, rank, size, interleaved=kind == "interleaved")


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("rest", [(), (HIDDEN,)], ids=["bias", "weight"])
def test_a_gated_mlp_is_stored_as_all_gates_then_all_ups(size: int, rest: tuple[int, ...]) -> None:
    gate, up = numbered(2, FFN, *rest)
    ranks = [torch.cat([gate.chunk(size)[t], up.chunk(size)[t]]) for t in range(size)]
    built = [pieces(gated(local, t, size).build()) for t, local in enumerate(ranks)]
    assert [piece.box.offset[0] for piece in built[-1]] == [FFN - FFN // size, 2 * FFN - FFN // size]
    assert np.array_equal(stored(built)["fc1"], torch.cat([gate, up]).numpy())


@pytest.mark.parametrize("size", [1, 2])
def test_gates_and_ups_that_alternate_are_stored_in_the_same_halves(size: int) -> None:
    gate, up = numbered(2, FFN, HIDDEN)
    ranks = [torch.stack([gate.chunk(size)[t], up.chunk(size)[t]], 1).flatten(0, 1) for t in range(size)]
    built = [pieces(gated(local, t, size, interleaved=True).build()) for t, local in enumerate(ranks)]
    assert np.array_equal(stored(built)["fc1"], torch.cat([gate, up]).numpy())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_fused_projection_is_stored_as_queries_keys_and_values(size: int) -> None:
    q, k, v = numbered(GROUPS, Q_ROWS, HIDDEN), -numbered(GROUPS, KV_ROWS, HIDDEN), 100 * numbered(GROUPS, KV_ROWS, 3)
    fused = torch.cat([q, k, v], 1).flatten(0, 1)
    built = [pieces(qkv(local, t, size).build()) for t, local in enumerate(fused.chunk(size))]
    whole = {"qkv.q": q.flatten(0, 1).numpy(), "qkv.k": k.flatten(0, 1).numpy(), "qkv.v": v.flatten(0, 1).numpy()}
    found = stored(built)
    assert found.keys() == whole.keys()
    assert all(np.array_equal(found[key], whole[key]) for key in whole)


def test_layers_and_experts_are_axes_before_the_tensors_own() -> None:
    built = gated(numbered(2 * FFN, HIDDEN), 0, 1)
    layered = factories.swiglu(
        "fc1", built.data, 1, 2, (0, 1, LAYERS), prepend_axis_num=1, replica_id=(0, 0, 3)
    ).build()
    assert [piece.box.offset for piece in layered] == [(1, FFN, 0), (1, 3 * FFN, 0)]
    assert {piece.global_shape for piece in layered} == {(LAYERS, 4 * FFN, HIDDEN)}
    assert {piece.replica_id for piece in layered} == {(0, 0, 3)}


@pytest.mark.parametrize("kind", ["halves", "interleaved", "qkv"])
def test_what_is_built_is_merged_again(kind: str) -> None:
    factory = of_rank(kind, 1, 2)
    built = factory.build()
    copied = {name: [p.data.clone() for p in part] for name, part in built.items()} if kind == "qkv" else None
    merged = factory.merge(copied or [piece.data.clone() for piece in built])
    assert torch.equal(merged, factory.data)
    assert factories.are_its_memory(factory.data, [piece.data for piece in pieces(built)])


@given(
    st.sampled_from(["halves", "interleaved", "qkv"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([(), (3,), (2, 3), (1,)]),
    st.lists(st.integers(0, 10_000), max_size=5),
)
def test_flat_ranges_of_what_a_factory_takes_apart_tile_what_it_stores(
    kind: str, size: int, rest: tuple[int, ...], cuts: list[int]
) -> None:
    """What ranks of a distributed optimizer own, cut anywhere, is exactly the tensor that a whole shard would store."""
    whole, flat = [], []
    for rank in range(size):
        factory = of_rank(kind, rank, size, rest)
        whole.append(pieces(factory.build_fn("state." + factory.key, factory.data, 0)))
        local = factory.data.reshape(-1)
        ends = sorted({cut % (local.numel() + 1) for cut in cuts} | {0, local.numel()})
        for start, stop in itertools.pairwise(ends):
            owned = local[start:stop].clone()
            parts = factories.flat_range(factory, start, stop, owned, key="state." + factory.key)
            assert sum(part.data.numel() for part in parts) == stop - start
            assert len(parts) <= (2 * factory.data.dim() + 1) * len(whole[-1])
            assert all(
                part.data.untyped_storage().data_ptr() == owned.untyped_storage().data_ptr() for part in parts
            ), "a copy would not be filled on load"
            flat.append(parts)
    expected, found = stored(whole), stored(flat)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


def test_a_flat_range_of_one_gated_half_is_at_most_three_boxes() -> None:
    local = numbered(2 * FFN, 7)
    for start in range(local.numel()):
        for stop in (start + 1, start + 9, FFN * 7):
            if start < stop <= FFN * 7:
                assert len(factories.flat_range(gated(local, 0, 1), start, stop, local.reshape(-1)[start:stop])) <= 3


def test_a_flat_range_of_a_transposing_factory_is_refused() -> None:
    factory = factories.transposed("w", numbered(4, 6))
    with pytest.raises(StateError, match="'w': its factory transposes or copies"):
        factories.flat_range(factory, 0, 5, torch.zeros(5))
    copying = ShardedTensorFactory(
        "w", numbered(4), lambda key, data, replica: ShardedTensor.from_rank_offsets(key, data * 2), lambda x: x / 2
    )
    with pytest.raises(StateError, match="transposes or copies"):
        factories.flat_range(copying, 0, 2, torch.zeros(2))


def test_a_flat_range_that_leaves_the_tensor_or_has_other_elements_is_refused() -> None:
    factory = gated(numbered(4, 2), 0, 1)
    with pytest.raises(StateError, match="leaves"):
        factories.flat_range(factory, 0, 9, torch.zeros(9))
    with pytest.raises(StateError, match="elements for the range"):
        factories.flat_range(factory, 0, 3, torch.zeros(4))


def test_views_that_leave_a_hole_or_overlap_are_not_the_tensors_memory() -> None:
    tensor = numbered(6, 4)
    assert factories.are_its_memory(tensor, [tensor[2:], tensor[:2]])
    assert factories.are_its_memory(tensor, [tensor.mT])
    assert factories.are_its_memory(tensor, [tensor[:, :1], tensor[:, 1:]])
    assert not factories.are_its_memory(tensor, [tensor[:2]])
    assert not factories.are_its_memory(tensor, [tensor[:4], tensor[2:4]])
    assert not factories.are_its_memory(tensor, [tensor.clone()])
    assert not factories.are_its_memory(tensor[:, 1:], [tensor[:, 1:]])  # not dense: it is merged and copied
    assert not factories.are_its_memory(tensor, [])


# --- through a checkpoint ---------------------------------------------------------------------------------------------


def test_what_one_rank_stored_through_factories_is_read_by_two(tmp_path: Path) -> None:
    """Saved as by one rank of TP=1, loaded as by each rank of TP=2, straight into its own memory."""
    fc1, fused = numbered(2 * FFN, HIDDEN), numbered(GROUPS * (Q_ROWS + 2 * KV_ROWS), HIDDEN)
    ckptlib.save({"mlp": gated(fc1, 0, 1), "attention": [qkv(fused, 0, 1)]}, str(tmp_path), iteration=1)
    gate, up = fc1.chunk(2)
    for t in range(2):
        want = torch.cat([gate.chunk(2)[t], up.chunk(2)[t]])
        mine, mine_qkv = torch.zeros_like(want), torch.zeros(fused.shape[0] // 2, HIDDEN)
        state = {"mlp": gated(mine, t, 2), "attention": [qkv(mine_qkv, t, 2)]}
        report = ckptlib.load(state, str(tmp_path), check_coverage=False)
        assert torch.equal(mine, want)
        assert torch.equal(mine_qkv, fused.chunk(2)[t])
        assert report.bytes_read == report.bytes_needed == mine.nbytes + mine_qkv.nbytes


def test_a_transposed_tensor_is_stored_transposed_and_comes_back(tmp_path: Path) -> None:
    weight = numbered(4, 6)
    ckptlib.save({"w": factories.transposed("w", weight)}, str(tmp_path), iteration=1)
    assert torch.equal(ckptlib.read(str(tmp_path))["w"], weight.mT)
    back = torch.zeros(4, 6)
    ckptlib.load({"w": factories.transposed("w", back)}, str(tmp_path))
    assert torch.equal(back, weight)


def fp8(data: torch.Tensor, scale: torch.Tensor) -> ShardedTensorFactory:
    """Stored in bfloat16, held in FP8 with one scale: it dequantizes on save and requantizes on load."""

    def build(key: str, data: torch.Tensor, replica_id: Any) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, (data.float() * scale).bfloat16(), replica_id=replica_id)

    def merge(loaded: torch.Tensor) -> torch.Tensor:
        scale.copy_(loaded.float().abs().max() / torch.finfo(torch.float8_e4m3fn).max)
        return (loaded.float() / scale).to(torch.float8_e4m3fn)

    return ShardedTensorFactory("w", data, build, merge)


def test_an_fp8_tensor_is_stored_in_high_precision_and_quantized_again(tmp_path: Path) -> None:
    values = torch.linspace(-3, 3, 64).reshape(8, 8)
    scale = values.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    held = (values / scale).to(torch.float8_e4m3fn)
    ckptlib.save({"w": fp8(held, scale)}, str(tmp_path), iteration=1)
    stored_values = ckptlib.read(str(tmp_path))["w"]
    assert stored_values.dtype == torch.bfloat16
    assert torch.equal(stored_values, (held.float() * scale).bfloat16())
    back, its_scale = torch.zeros(8, 8, dtype=torch.float8_e4m3fn), torch.ones(())
    ckptlib.load({"w": fp8(back, its_scale)}, str(tmp_path))
    assert torch.equal(back.view(torch.uint8), held.view(torch.uint8))
    assert torch.allclose(its_scale, scale, rtol=1e-2)


def test_a_parameter_and_a_view_of_a_larger_tensor_are_filled_in_place(tmp_path: Path) -> None:
    weight = numbered(2 * FFN, HIDDEN)
    ckptlib.save({"w": gated(weight, 0, 1)}, str(tmp_path), iteration=1)
    parameter = torch.nn.Parameter(torch.zeros(2 * FFN, HIDDEN))
    ckptlib.load({"w": gated(parameter, 0, 1)}, str(tmp_path))
    assert torch.equal(parameter.detach(), weight)
    larger = torch.zeros(2 * FFN, HIDDEN + 1)
    ckptlib.load({"w": gated(larger[:, 1:], 0, 1)}, str(tmp_path))
    assert torch.equal(larger[:, 1:], weight)
    assert not larger[:, 0].any()


def test_a_factory_may_build_objects_beside_tensors(tmp_path: Path) -> None:
    scale = [2.0]

    def build(key: str, data: torch.Tensor, replica_id: Any) -> dict[str, Any]:
        return {"t": ShardedTensor.from_rank_offsets(key, data.clone()), "s": ShardedObject(f"{key}.scale", scale[0])}

    def merge(loaded: dict[str, Any]) -> torch.Tensor:
        scale[0] = loaded["s"]
        tensor: torch.Tensor = loaded["t"]
        return tensor

    ckptlib.save({"w": ShardedTensorFactory("w", numbered(3), build, merge)}, str(tmp_path), iteration=1)
    scale[0] = 1.0
    back = torch.zeros(3)
    ckptlib.load({"w": ShardedTensorFactory("w", back, build, merge)}, str(tmp_path))
    assert torch.equal(back, numbered(3))
    assert scale == [2.0]


def test_a_factory_that_builds_anything_else_is_refused_by_name(tmp_path: Path) -> None:
    bad = ShardedTensorFactory("w", numbered(3), lambda key, data, replica: {"a": data}, lambda loaded: loaded["a"])
    with pytest.raises(StateError, match=r"factory 'w': it built a Tensor"):
        ckptlib.save({"w": bad}, str(tmp_path), iteration=1)


def test_a_merge_of_another_shape_or_dtype_says_that_the_load_is_incomplete(tmp_path: Path) -> None:
    def build(key: str, data: torch.Tensor, replica_id: Any) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, data.clone())

    ckptlib.save({"w": ShardedTensorFactory("w", numbered(3), build, lambda x: x)}, str(tmp_path), iteration=1)
    for wrong in (lambda x: x[:2], lambda x: x.double()):
        with pytest.raises(LoadIncompleteError, match="factory 'w': it merged"):
            ckptlib.load({"w": ShardedTensorFactory("w", torch.zeros(3), build, wrong)}, str(tmp_path))


def test_a_gated_tensor_of_another_size_changes_nothing(tmp_path: Path) -> None:
    """R4."""
    ckptlib.save({"w": gated(numbered(2 * FFN, HIDDEN), 0, 1)}, str(tmp_path), iteration=1)
    back = torch.zeros(2 * FFN, HIDDEN)
    with pytest.raises(ShapeMismatchError, match="fc1"):
        ckptlib.load({"w": gated(back, 0, 2)}, str(tmp_path), check_coverage=False)
    assert not back.any()


def test_uneven_halves_and_partial_groups_are_refused() -> None:
    with pytest.raises(StateError, match="no two halves"):
        gated(numbered(3, 2), 0, 1)
    with pytest.raises(StateError, match="no whole number of query groups"):
        qkv(numbered(9, 2), 0, 1)
