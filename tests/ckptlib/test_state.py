"""A state tree and its leaves: names, digests of plain values, and what cannot be saved."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ckptlib.errors import StateError
from ckptlib.packing import ShardedContent
from ckptlib.plan import make_write_plan
from ckptlib.sharding import Box, LocalNonpersistentObject, ShardedObject, ShardedTensor
from ckptlib.state import dtype_of, flatten, leaf_bytes
from ckptlib.value_digest import value_digest


def names(state: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    flat = flatten(state)
    return [leaf.key for leaf in flat.tensors], [leaf.key for leaf in flat.objects], [leaf.key for leaf in flat.values]


def test_leaves_are_named_by_their_dotted_path() -> None:
    state = {
        "model": {"layers": [{"w": torch.zeros(1)}, {"w": torch.zeros(1)}], 7: torch.zeros(1), "größe": torch.zeros(1)},
        "scheduler": {"base_lrs": [0.1, 0.2], "empty": {}, "nothing": None},
        "step": 3,
    }
    tensors, objects, values = names(state)
    assert tensors == ["model.layers.0.w", "model.layers.1.w", "model.7", "model.größe"]
    assert values == ["scheduler.base_lrs", "scheduler.empty", "scheduler.nothing", "step"]
    assert objects == []


def test_the_wrappers_carry_names_of_their_own_and_local_objects_are_dropped() -> None:
    state = {
        "a": ShardedTensor("decoder.w", torch.zeros(1, 2), (4, 2), Box((3, 0), (1, 2))),
        "b": ShardedObject("rng", [], (2,), (1,)),
        "c": LocalNonpersistentObject(object()),
    }
    assert names(state) == (["decoder.w"], ["rng/shard_1_2"], [])


def test_one_rank_may_hold_several_pieces_of_a_tensor() -> None:
    halves = [ShardedTensor("fc1", torch.zeros(2), (8,), Box((at,), (2,))) for at in (0, 4)]
    assert names({"gate_and_up": halves})[0] == ["fc1", "fc1"]


def test_two_leaves_of_one_name_are_refused_with_both_places() -> None:
    for state in (
        {"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)},
        {"a": {"b": 1}, "a.b": 2},
        {"x": ShardedObject("rng", 1), "y": ShardedObject("rng", 2)},
    ):
        with pytest.raises(StateError, match="two leaves are named"):
            flatten(state)


def test_a_sharded_tensor_and_another_leaf_of_the_same_name_are_refused() -> None:
    sharded = ShardedTensor("w", torch.zeros(2), (2,), Box((0,), (2,)))
    for other in (torch.zeros(2), 3):
        with pytest.raises(StateError, match=r"'w'.*(overlap|one name can hold one of them)"):
            make_write_plan([ShardedContent(flatten({"w": other, "elsewhere": sharded})).describe()])


@pytest.mark.parametrize("state", [{"": 1}, [torch.zeros(1)], None, torch.zeros(1)], ids=repr)
def test_a_state_must_be_a_mapping_with_names(state: Any) -> None:
    with pytest.raises(StateError, match="state"):
        flatten(state)


def test_a_key_that_is_no_name_is_refused_with_its_path() -> None:
    with pytest.raises(StateError, match=r"model\.layers: key \(1, 2\) is a tuple"):
        flatten({"model": {"layers": {(1, 2): torch.zeros(1)}}})


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: torch.zeros(3).to_sparse(), "layout"),
        (lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.zeros(3, device="meta"), "meta device"),
    ],
    ids=["sparse", "quantized", "meta"],
)
@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning", "ignore:.*quantize.*:DeprecationWarning")
def test_tensors_without_plain_dense_data_are_refused_by_name(make: Any, what: str) -> None:
    tensor = make()
    with pytest.raises(StateError, match=rf"'model\.w'.*{what}"):
        flatten({"model": {"w": tensor}})
    if what == "meta device":
        with pytest.raises(StateError, match=rf"'key'.*{what}"):
            flatten({"w": ShardedTensor("key", tensor, (3,), Box((0,), (3,)))})


def test_a_stateful_object_is_saved_through_its_state_and_gets_it_back() -> None:
    class Loader:
        def __init__(self) -> None:
            self.loaded: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"position": 5, "buffer": torch.arange(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    loader = Loader()
    flat = flatten({"data": loader})
    assert [leaf.key for leaf in flat.tensors] == ["data.buffer"]
    (value,) = flat.values
    value.assign(9)
    for finish in flat.finishers:
        finish()
    assert loader.loaded["position"] == 9


def test_a_class_with_state_methods_is_no_stateful_object() -> None:
    assert names({"kind": torch.nn.Linear})[2] == ["kind"]


def test_lists_with_tensors_or_dicts_are_walked_and_other_lists_and_tuples_are_values() -> None:
    """torch's rule (`traverse_state_dict`): what plain torch asks for is stored under the names it asks for."""
    state = {
        "groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": ["a", "b"]}, {"lr": 0.2}],
        "deep": [[1, [{"x": 1}]], 2],
        "plain": [1, [2, (3,)]],
        "pair": (torch.zeros(1), 1.0),
        "mixed": [torch.zeros(1), 5],
    }
    ours = {*names(state)[0], *names(state)[2]}
    assert ours == {*flatten_state_dict(state)[0]}
    assert {"groups.0.lr", "groups.0.params", "deep.0.1.0.x", "plain", "pair", "mixed.0", "mixed.1"} <= ours


def test_tuples_are_walked_where_something_in_them_must_be_placed_and_replaced_when_a_value_changes() -> None:
    one, two = (ShardedTensor(key, torch.zeros(2), (2,), Box((0,), (2,))) for key in "vw")
    same = ([two],)
    state = {"opt": {"pair": (one, 1.0), "same": same}}
    flat = flatten(state)
    assert [leaf.key for leaf in flat.tensors] == ["v", "w"]
    next(leaf for leaf in flat.values if leaf.key == "opt.pair.1").assign(2.5)
    for finish in flat.finishers:
        finish()
    assert state["opt"]["pair"][1] == 2.5
    assert state["opt"]["same"] is same


def test_plain_values_become_the_nested_common_state() -> None:
    state = {
        "args": argparse.Namespace(lr=0.1),
        "a": {"x": 1, "t": torch.zeros(1), "b": {"y": [1, 2]}},
        "groups": [{"lr": 1, "inner": [{"z": 1}]}, {"lr": 2}],
        "part": [torch.zeros(1), 7],
        "numbered": {0: {"u": 1}, 1: 2},
    }
    assert flatten(state).common() == {
        "args": argparse.Namespace(lr=0.1),
        "a": {"x": 1, "b": {"y": [1, 2]}},
        "groups": [{"lr": 1, "inner": [{"z": 1}]}, {"lr": 2}],
        "part": {1: 7},
        "numbered": {0: {"u": 1}, 1: 2},
    }


@given(st.integers(0, 6), st.integers(1, 4), st.data())
def test_the_bytes_of_a_leaf_are_its_elements_in_order_however_it_lies_in_memory(
    rows: int, columns: int, data: st.DataObject
) -> None:
    base = torch.arange(4 * rows * columns, dtype=torch.int32).reshape(2 * rows, 2 * columns)
    view = data.draw(
        st.sampled_from([base, base.t(), base[::2, ::2], base[:, 1:], base.t()[1:, ::2], base[:0], base.flatten()[3:]])
    )
    assert bytes(leaf_bytes(view)) == np.ascontiguousarray(view.numpy()).tobytes()


def test_lazy_conjugates_and_negatives_are_written_as_they_read() -> None:
    complex_view = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert complex_view.is_conj()
    assert bytes(leaf_bytes(complex_view)) == np.array([1 - 2j, 3 + 1j], np.complex64).tobytes()
    negative = complex_view.imag
    assert negative.is_neg()
    assert bytes(leaf_bytes(negative)) == np.array([-2, 1], np.float32).tobytes()


def test_a_dtype_that_torch_does_not_have_is_refused() -> None:
    for name in ("float3", "nn", "Tensor", ""):
        with pytest.raises(StateError, match="unknown to torch"):
            dtype_of(name)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(PLAIN, PLAIN)
def test_equal_values_have_equal_digests_and_others_differ(one: Any, two: Any) -> None:
    """W3: ranks are compared by these digests."""
    alike = repr(one) == repr(two)  # tells 1 from True and NaN from NaN's absence
    assert (value_digest(one) == value_digest(two)) == alike


def test_digests_ignore_order_of_names_sharing_and_a_namespaces_rank() -> None:
    shared = [1, 2]
    assert value_digest({"a": 1, "b": 2}) == value_digest({"b": 2, "a": 1})
    assert value_digest([shared, shared]) == value_digest([[1, 2], [1, 2]])
    assert value_digest({1, 2, 3}) == value_digest({3, 1, 2})
    assert value_digest(argparse.Namespace(lr=1, rank=0)) == value_digest(argparse.Namespace(lr=1, rank=7))
    assert value_digest(argparse.Namespace(lr=1)) != value_digest(argparse.Namespace(lr=2))


def test_digests_see_into_arrays_and_tensors() -> None:
    for one, two in (
        (np.arange(4), np.arange(4).reshape(2, 2)),
        (np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int64)),
        (np.array([1, 2]), np.array([1, 3])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.bfloat16)),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
        ([1, 2], [1, [2]]),
        ([[1], [2]], [[1, 2]]),
        ({"a": {"b": 1}}, {"a": {}, "b": 1}),
    ):
        assert value_digest({"x": one}) == value_digest({"x": one})
        assert value_digest({"x": one}) != value_digest({"x": two})
