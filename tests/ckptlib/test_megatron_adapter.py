"""Megatron-Core's wrappers are known by their attributes: here are look-alikes, so that nothing of it is needed.

Real jobs are in `tests/megatron/test_megatron_training.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib.errors import StateError, UnsupportedError
from ckptlib.integrations.megatron import ModelState, megatron_state, to_ckptlib, to_state_dict
from ckptlib.integrations.megatron_groups import match_groups
from ckptlib.sharding import Box, LocalNonpersistentObject, ShardedTensorFactory


class ShardedBase:
    """Megatron-Core's base class of its wrappers."""


@dataclass
class Sharded(ShardedBase):
    """`megatron.core.dist_checkpointing.mapping.ShardedTensor`."""

    key: str
    data: torch.Tensor | None
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None = None
    replica_id: Any = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def init_data(self, device: Any, init_fn: Any = torch.empty) -> None:
        self.data = init_fn(self.local_shape, dtype=self.dtype, device=device)


@dataclass
class Factory(ShardedBase):
    """`ShardedTensorFactory`."""

    key: str
    data: torch.Tensor | None
    build_fn: Callable[..., Any]
    merge_fn: Callable[..., Any]
    replica_id: Any = 0
    flattened_range: slice | None = None


@dataclass
class Cell(ShardedBase):
    """`ShardedObject`."""

    key: str
    data: Any
    global_shape: tuple[int, ...] = (1,)
    global_offset: tuple[int, ...] = (0,)
    replica_id: Any = 0
    unique_key: str = "x"


class Local:
    """`LocalNonpersistentObject`."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        return self.obj


def row(key: str, data: torch.Tensor | None, number: int, count: int, **options: Any) -> Sharded:
    """A rank's rows of a (count * 2, 3) tensor."""
    return Sharded(key, data, torch.float32, (2, 3), (2 * count, 3), (2 * number, 0), **options)


def gated(data: torch.Tensor | None, **options: Any) -> Factory:
    """As `apply_swiglu_sharded_factory` at TP1."""

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> list[Sharded]:
        assert flattened_range is None
        halves = torch.chunk(data, 2)
        return [
            Sharded(key, half, half.dtype, tuple(half.shape), tuple(data.shape), (i * len(half), 0), (2, 1), replica_id)
            for i, half in enumerate(halves)
        ]

    return Factory("fc1", data, build, torch.cat, **options)


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + int(torch.Size(shape).numel())).reshape(shape)


def test_megatron_is_not_imported() -> None:
    assert not any(name.split(".")[0] == "megatron" for name in sys.modules)


def test_a_sharded_state_dict_becomes_a_state_in_the_same_memory() -> None:
    weight = numbered(2, 3)
    tree = to_ckptlib(
        {
            "layers": [row("w", weight, 1, 4, replica_id=(0, 0, 1), allow_shape_mismatch=True)],
            "layer": Sharded("p", weight, weight.dtype, (2, 3), (5, 2, 3), (4, 0, 0), prepend_axis_num=1),
            "extra": Cell("e._extra_state", None, (4,), (2,), (0, 1, 0)),
            "mine": Local([1]),
            "plain": (1, [2]),
        }
    )
    (placed,) = tree["layers"]
    assert (placed.key, placed.global_shape, placed.box) == ("w", (8, 3), Box((2, 0), (2, 3)))
    assert (placed.replica_id, placed.allow_shape_mismatch, placed.data) == ((0, 0, 1), True, weight)
    assert tree["layer"].box == Box((4, 0, 0), (1, 2, 3))
    assert tree["extra"].unique_key == "e._extra_state/shard_2_4"
    assert tree["mine"] == LocalNonpersistentObject([1])
    assert tree["plain"] == (1, [2])
    plain = to_state_dict(tree)
    assert plain["layers"][0] is weight
    assert (plain["extra"], plain["mine"], plain["plain"]) == (None, [1], (1, [2]))


def test_a_factory_is_saved_in_halves_and_filled_in_place(tmp_path: Path) -> None:
    weight = numbered(4, 3)
    ckptlib.save({"model": to_ckptlib({"fc1": gated(weight)})}, str(tmp_path), iteration=1)
    assert torch.equal(ckptlib.read(str(tmp_path))["fc1"], weight)
    back = torch.nn.Parameter(torch.zeros(4, 3))
    tree = {"model": to_ckptlib({"fc1": gated(back)})}
    ckptlib.load(tree, str(tmp_path))
    assert torch.equal(back.detach(), weight)
    assert to_state_dict(tree["model"])["fc1"] is back


def test_a_skeleton_without_data_gets_its_memory_here(tmp_path: Path) -> None:
    """Megatron-Core's `init_data`, for a load into nothing yet."""
    ckptlib.save({"w": to_ckptlib(row("w", numbered(2, 3), 0, 1))}, str(tmp_path), iteration=1)
    skeleton = row("w", None, 0, 1)
    tree = {"w": to_ckptlib(skeleton)}
    ckptlib.load(tree, str(tmp_path))
    assert torch.equal(to_state_dict(tree)["w"], numbered(2, 3))
    assert skeleton.data is tree["w"].data


def test_a_factory_without_data_is_refused_by_name() -> None:
    with pytest.raises(StateError, match="'fc1': its factory has no data"):
        to_ckptlib(gated(None))


def test_a_range_of_a_flattened_tensor_is_placed_as_boxes(tmp_path: Path) -> None:
    """Megatron-Core up to 0.15 describes a distributed optimizer so."""
    weight = numbered(2, 3)
    parts = [slice(0, 2), slice(2, 6)]
    tree = [to_ckptlib(row("w", weight.reshape(-1)[part].clone(), 0, 1, flattened_range=part)) for part in parts]
    ckptlib.save({"w": tree}, str(tmp_path), iteration=1)
    assert torch.equal(ckptlib.read(str(tmp_path))["w"], weight)
    back = [torch.zeros(2), torch.zeros(4)]
    tree = [to_ckptlib(row("w", own, 0, 1, flattened_range=part)) for own, part in zip(back, parts, strict=True)]
    ckptlib.load({"w": tree}, str(tmp_path))
    assert torch.equal(torch.cat(back), weight.reshape(-1))


def test_a_wrapper_of_a_kind_to_come_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Later.*unknown to this version"):
        to_ckptlib({"x": type("Later", (ShardedBase,), {})()})


class QuantizedTensor(torch.Tensor):
    """Looks like Transformer Engine's: shows bfloat16, holds FP8 and a scale, quantizes what is copied into it."""

    held: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> QuantizedTensor:
        made: QuantizedTensor = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16)
        made.quantize(values)
        return made

    def quantize(self, values: torch.Tensor) -> None:
        self.scale = values.float().abs().max() / torch.finfo(torch.float8_e4m3fn).max
        self.held = (values.float() / self.scale).to(torch.float8_e4m3fn)

    def dequantize(self) -> torch.Tensor:
        return (self.held.float() * self.scale).bfloat16()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            args[0].quantize(args[1])
            return args[0]
        raise NotImplementedError(f"{func} on a quantized tensor")


@pytest.mark.parametrize("in_halves", [False, True])
def test_a_quantized_parameter_is_stored_in_high_precision_and_quantized_again(tmp_path: Path, in_halves: bool) -> None:
    def described(data: torch.Tensor) -> Any:
        whole = Sharded("w", data, torch.bfloat16, (4, 2), (4, 2), (0, 0))
        return to_ckptlib(gated(data) if in_halves else whole)

    parameter = QuantizedTensor(numbered(4, 2))
    ckptlib.save({"w": described(parameter)}, str(tmp_path), iteration=1)
    (stored,) = ckptlib.read(str(tmp_path)).values()
    assert torch.equal(stored, parameter.dequantize())
    back = QuantizedTensor(torch.ones(4, 2))
    ckptlib.load({"w": described(back)}, str(tmp_path))
    assert torch.equal(back.held.float(), parameter.held.float())
    assert isinstance(described(parameter), ShardedTensorFactory)


# --- models -----------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A model of Megatron-Core: one weight under a global name, one `_extra_state`."""

    def __init__(self, number: int, count: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(numbered(2, 3) * (number + 1))
        self.extra: Any = {"amax": number}
        self.number, self.count = number, count

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
        return {
            f"{prefix}weight": row("layers.weight", self.weight, self.number, self.count),
            f"{prefix}_extra_state": Cell("layers._extra_state", self.extra, (self.count,), (self.number,)),
        }


class Wrapped(torch.nn.Module):
    """DistributedDataParallel, Float16Module."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def test_virtual_stages_are_saved_and_loaded_in_any_number_of_chunks(tmp_path: Path) -> None:
    chunks = [Wrapped(Wrapped(Layer(number, 3))) for number in range(3)]
    ckptlib.save(megatron_state(chunks), str(tmp_path), iteration=1)
    for number in range(3):
        other = Layer(number, 3)
        with torch.no_grad():
            other.weight.zero_()
        other.extra = None
        ckptlib.load(megatron_state(other), str(tmp_path), strict="return", check_coverage=False)
        assert torch.equal(other.weight, numbered(2, 3) * (number + 1))
        assert other.extra == {"amax": number}


def test_what_is_no_megatron_model_is_refused() -> None:
    with pytest.raises(StateError, match="Linear has no sharded_state_dict"):
        ModelState(torch.nn.Linear(1, 1))


# --- optimizers -------------------------------------------------------------------------------------------------------


@dataclass
class PlainOptimizer:
    """`FP32Optimizer`."""

    optimizer: Any
    config: Any = field(default_factory=SimpleNamespace)


def test_an_fp32_optimizer_is_saved_by_the_names_of_its_model_and_loaded_before_its_first_step(tmp_path: Path) -> None:
    model = Layer(0, 1)
    optimizer = PlainOptimizer(torch.optim.AdamW([{"params": [model.weight], "wd_mult": 1.0, "lr_mult": 1.0}], lr=0.5))
    for _ in range(3):
        model.weight.grad = torch.ones(2, 3)
        optimizer.optimizer.step()
    ckptlib.save(megatron_state(model, optimizer), str(tmp_path), iteration=1)
    assert {"optimizer.state.exp_avg.layers.weight", "optimizer.state.exp_avg_sq.layers.weight"} < set(
        ckptlib.read(str(tmp_path))
    )
    other = Layer(0, 1)
    fresh = PlainOptimizer(torch.optim.AdamW([{"params": [other.weight], "wd_mult": 1.0, "lr_mult": 1.0}], lr=0.1))
    ckptlib.load(megatron_state(other, fresh), str(tmp_path))
    assert fresh.optimizer.param_groups[0]["lr"] == 0.5
    for one in (model, other):
        one.weight.grad = torch.full((2, 3), 0.5)
    optimizer.optimizer.step()
    fresh.optimizer.step()
    assert torch.equal(model.weight, other.weight)
    assert fresh.optimizer.state[other.weight]["step"] == 4


class Range:
    """`megatron.core.optimizer.distrib_optimizer.Range`."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end


class Distributed:
    """`DistributedOptimizer`: a rank's share of a buffer of parameters, no matter where rows end."""

    distributed_optimizer_instance_id = 0

    def __init__(self, parameters: list[torch.nn.Parameter], dp: int, rank: int) -> None:
        total = sum(parameter.numel() for parameter in parameters)
        low, high = total * rank // dp, total * (rank + 1) // dp
        param_map, at = {}, 0
        for parameter in parameters:
            start, end = max(low - at, 0), min(high - at, parameter.numel())
            if start < end:
                param_map[parameter] = {"param": Range(start, end)}
            at += parameter.numel()
        self.gbuf_ranges = [{("bf16", "fp32"): [{"param_map": param_map}]}]
        self.model_float16_groups = [[*param_map]]
        mains = [
            parameter.detach().reshape(-1)[ranges["param"].start : ranges["param"].end].float().clone()
            for parameter, ranges in param_map.items()
        ]
        self.shard_fp32_from_float16_groups = [mains]
        self.model_fp32_groups: list[list[Any]] = [[]]
        self.shard_fp32_groups: list[list[Any]] = [[]]
        self.optimizer = torch.optim.AdamW([{"params": mains, "wd_mult": 1.0, "lr_mult": 1.0}], lr=0.5)
        self.config = SimpleNamespace()

    def step(self) -> None:
        for main in self.shard_fp32_from_float16_groups[0]:
            main.grad = main.sin()
        self.optimizer.step()


class Gated(torch.nn.Module):
    """A gated weight and one in two named parts, each described by a factory, and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = torch.nn.Parameter(numbered(4, 3))
        self.mixer = torch.nn.Parameter(-numbered(5, 3))
        self.norm = torch.nn.Parameter(numbered(7))

    def sharded_state_dict(self) -> dict[str, Any]:
        def split(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> list[Sharded]:
            """As `megatron.core.ssm.utils` does it."""
            return [
                Sharded(
                    f"{key}.{name}", part, part.dtype, tuple(part.shape), tuple(part.shape), (0, 0), None, replica_id
                )
                for name, part in zip("zx", torch.split(data, [2, 3]), strict=True)
            ]

        norm = Sharded("norm", self.norm, torch.float32, (7,), (7,), (0,), replica_id=(0, 0, 3))
        return {
            "fc1": gated(self.fc1, replica_id=(0, 0, 1)),
            "mixer": Factory("mixer", self.mixer, split, torch.cat, (0, 0, 1)),
            "norm": norm,
        }


def jobs(dp: int, steps: int) -> list[tuple[Gated, Distributed]]:
    """Every data-parallel rank of a job."""
    made = []
    for rank in range(dp):
        model = Gated()
        optimizer = Distributed([*model.parameters()], dp, rank)
        for _ in range(steps):
            optimizer.step()
        made.append((model, optimizer))
    return made


def states(ranks: list[tuple[Gated, Distributed]]) -> dict[str, Any]:
    """The optimizers of all ranks in one state; whoever saves it writes what all would."""
    return {f"rank {i}": megatron_state(model, optimizer)["optimizer"] for i, (model, optimizer) in enumerate(ranks)}


def slots(optimizer: Distributed) -> list[dict[str, torch.Tensor]]:
    """Main parameter and moments of each share."""
    mains = optimizer.shard_fp32_from_float16_groups[0]
    return [{"param": main, **{n: v for n, v in optimizer.optimizer.state[main].items() if v.dim()}} for main in mains]


@pytest.mark.parametrize("dp", [1, 3, 8])
def test_ranges_of_a_distributed_optimizer_are_stored_in_model_space_and_loaded_at_any_dp(
    tmp_path: Path, dp: int
) -> None:
    ckptlib.save(states(jobs(dp, steps=2)), str(tmp_path), iteration=1)
    stored = ckptlib.read(str(tmp_path))
    names = (["fc1"], ["mixer.z", "mixer.x"], ["norm"])
    ((_, whole),) = jobs(1, steps=2)
    assert len(stored) == 3 * 4
    for keys, wanted in zip(names, slots(whole), strict=True):
        for slot, value in wanted.items():
            parts = [stored[f"optimizer.state.{slot}.{key}"].reshape(-1) for key in keys]
            assert torch.equal(torch.cat(parts), value)
    for other in (2, 5):
        fresh = jobs(other, steps=0)
        ckptlib.load(states(fresh), str(tmp_path), strict="return", keys=["optimizer.state.*"])
        for (_, optimizer), (_, trained) in zip(fresh, jobs(other, steps=2), strict=True):
            for found, wanted in zip(slots(optimizer), slots(trained), strict=True):
                assert found.keys() == wanted.keys() == {"param", "exp_avg", "exp_avg_sq"}
                assert all(torch.equal(found[slot], wanted[slot]) for slot in wanted)


def test_a_parameter_of_another_model_is_refused(tmp_path: Path) -> None:
    stranger = PlainOptimizer(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, 3))]))
    with pytest.raises(StateError, match=r"not in the model's sharded_state_dict.*keep_vars"):
        ckptlib.save(megatron_state(Layer(0, 1), stranger), str(tmp_path), iteration=1)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"config": SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True)}, "precision_aware"),
        ({"ddp_config": SimpleNamespace(use_megatron_fsdp=True)}, "DTensors"),
        ({"optimizer": SimpleNamespace(sub_optimizers=[])}, "offload"),
    ],
)
def test_optimizers_that_keep_their_state_elsewhere_are_refused(attributes: dict[str, Any], reason: str) -> None:
    optimizer = SimpleNamespace(**{"optimizer": None, **attributes})
    with pytest.raises(UnsupportedError, match=f"not supported.*{reason}"):
        megatron_state(Layer(0, 1), optimizer)


def test_parameter_groups_are_known_by_their_fields_not_by_their_order() -> None:
    decayed = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "max_lr": 0.1}
    plain = {**decayed, "wd_mult": 0.0}
    experts = {**decayed, "is_expert_parallel": True}
    assert match_groups([plain, decayed], [decayed, plain]) == [plain, decayed]
    assert match_groups([decayed, experts], [experts, decayed]) == [decayed, experts]
    assert match_groups([{**decayed, "max_lr": 0.2}], [decayed, plain]) == [decayed]  # the schedule was changed
    assert match_groups([experts], [decayed, plain]) == [decayed]  # experts were with the others
    nemo = {"pre_wd_mult": 1.0, "pre_lr_mult": 1.0, "is_expert_parallel": False, "max_lr": 0.1}
    assert match_groups([decayed], [nemo]) == [nemo]
    with pytest.raises(StateError, match="none of the stored parameter groups fits"):
        match_groups([{**decayed, "lr_mult": 3.0}], [decayed, plain])
    with pytest.raises(StateError, match="2 of the stored parameter groups fit"):
        match_groups([{**decayed, "max_lr": 0.3}], [{**decayed, "lr": 1}, {**decayed, "max_lr": 0.2, "lr": 2}])
