"""Every way in which torch distributes a model: saved by four ranks, equal to its own `full_tensor()`, loaded back.

One launch runs all checks; each is a test of its own here. What one process can tell stands below them.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as TorchShard
from torch.distributed._shard.sharded_tensor import ShardedTensor as TorchShardedTensor
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import ckptlib
from ckptlib import Checkpointer, ModelParts, OptimizerParts, ShardedTensor
from ckptlib.errors import StateError
from ckptlib.integrations.dcp import CkptReader, CkptWriter
from ckptlib.state import flatten
from ckptlib.torch_leaves import Cut, shard_range
from tests.support.ranks import run_checks
from tests.support.trees import assert_same

pytestmark = pytest.mark.timeout(300)


class Layer(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, rows), nn.Linear(rows, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Net(nn.Module):
    """Layers of odd sizes, so that no number of ranks divides all of them; one bias of a single element."""

    def __init__(self, *, rows: int = 7, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(i): Layer(rows) for i in range(layers)})
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 1)
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def train(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], steps: int = 2, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def full(value: Any) -> Any:
    """Global tensors in place of distributed ones, by torch's own means. Collective."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach()
    if isinstance(value, torch.Tensor):
        return value.detach()
    return {name: full(inner) for name, inner in value.items()} if isinstance(value, dict) else value


def moments(model: nn.Module, optimizer: torch.optim.Optimizer, at: str = "optimizer") -> dict[str, torch.Tensor]:
    """Name on storage -> global tensor, for all that the optimizer has. Collective."""
    return {
        f"{at}.state.{name}.{slot}": full(value)
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state[parameter].items()
    }


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"model.{name}": full(value) for name, value in model.state_dict().items()}


def check_round_trip(make: Callable[[], nn.Module], optimize: Callable[[Any], torch.optim.Optimizer], url: str) -> None:
    """What is on storage is what torch gathers; and a fresh job that loads it goes on as if it had trained it."""
    model = make()
    optimizer = optimize(model.parameters())
    train(model, [optimizer])
    ckptlib.save({"model": model, "optimizer": optimizer}, url, iteration=1)
    assert_same(ckptlib.read(url), weights(model) | moments(model, optimizer))
    fresh = make()
    other = optimize(fresh.parameters())
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    report = ckptlib.load({"model": fresh, "optimizer": other}, url)
    assert report.bytes_read == report.bytes_needed
    assert_same(full(fresh.state_dict()), full(model.state_dict()))
    assert_same(moments(fresh, other), moments(model, optimizer))
    train(model, [optimizer], seed=1)
    train(fresh, [other], seed=1)
    assert_same(full(fresh.state_dict()), full(model.state_dict()))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, foreach=False)


# --- on four ranks ----------------------------------------------------------------------------------------------------


def sharded(mesh: Any, rows: int = 7) -> nn.Module:
    model = Net(rows=rows)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def check_fsdp2_with_even_and_uneven_and_empty_shards(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    check_round_trip(lambda: sharded(mesh), adamw, f"{folder}/fsdp2")


def check_hsdp_writes_each_shard_once(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check_round_trip(lambda: sharded(mesh), adamw, f"{folder}/hsdp")
    assert len(ckptlib.inspect(f"{folder}/hsdp").tensors["model.layers.0.up.weight"].chunks) == 2


def tensor_parallel(mesh: Any, rows: int) -> Net:
    model = Net(rows=rows)
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def check_tensor_parallel_by_parallelize_module(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    check_round_trip(lambda: tensor_parallel(mesh["tp"], 6), adamw, f"{folder}/tp")


def check_fsdp2_over_tensor_parallel(rank: int, folder: str) -> None:
    """`_StridedShard`: the rows of a rank are those of FSDP's cut of tensor parallelism's cut. 7 rows are uneven."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def make(rows: int) -> nn.Module:
        model = tensor_parallel(mesh["tp"], rows)
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    model = make(8)
    assert any(isinstance(p, _StridedShard) for x in model.parameters() for p in x.placements)  # type: ignore[attr-defined]
    check_round_trip(lambda: make(8), adamw, f"{folder}/fsdp2 over tp")
    uneven = make(7)
    url = ckptlib.save({"model": uneven}, f"{folder}/fsdp2 over tp, uneven", iteration=1).url
    assert_same(ckptlib.read(url), {f"model.{name}": value for name, value in Net(rows=7).state_dict().items()})
    fresh = make(7)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    ckptlib.load({"model": fresh}, url)
    for one, other in zip(fresh.parameters(), uneven.parameters(), strict=True):
        assert_same(one.to_local(), other.to_local())  # type: ignore[attr-defined]


def check_rows_that_fsdp2_and_dtensor_see_otherwise_are_refused_not_mixed_up(rank: int, folder: str) -> None:
    """5 rows over 2 x 4 ranks and the like: `full_tensor` itself returns them in a wrong order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(9.0)
    parts = distribute_tensor(whole, mesh, [_StridedShard(0, split_factor=4), Shard(0)], src_data_rank=None)
    with pytest.raises(StateError, match=r"'w': axis 0 of \(9,\).*only one strided shard"):
        ckptlib.save({"w": parts}, f"{folder}/odd", iteration=1)


def as_it_is(graph: Any, inputs: Any) -> Any:
    """A backend of torch.compile that needs no compiler."""
    return graph


def check_wrappers_leave_no_trace_in_names(rank: int, folder: str) -> None:
    """DDP, torch.compile and activation checkpointing: the names of the bare module, as torch's own API has them."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        model.layers["0"] = checkpoint_wrapper(model.layers["0"])
        model.layers["1"].up = torch.compile(model.layers["1"].up, backend=as_it_is)
        wrapped: Any = torch.compile(DistributedDataParallel(model), backend=as_it_is)
        return wrapped, torch.optim.SGD(wrapped.parameters(), momentum=0.9)

    model, optimizer = make()
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.randn_like(parameter).fill_(parameter.dim())
    url = ckptlib.save({"model": model, "optimizer": optimizer}, f"{folder}/wrapped", iteration=1).url
    bare = Net()
    names = [f"model.{name}" for name in bare.state_dict()]
    assert {*names} == {f"model.{name}" for name in get_model_state_dict(model)}
    buffers = [f"optimizer.state.{name}.momentum_buffer" for name, _ in bare.named_parameters()]
    assert {*ckptlib.inspect(url).tensors} == {*names, *buffers}
    fresh, other = make()
    for target, its_optimizer in ((bare, torch.optim.SGD(bare.parameters())), (fresh, other)):
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.zero_()
        ckptlib.load({"model": target, "optimizer": its_optimizer}, url)
        for parameter, wanted in zip(target.parameters(), Net().parameters(), strict=True):
            assert_same(parameter.detach(), wanted.detach())
            assert torch.all(its_optimizer.state[parameter]["momentum_buffer"] == parameter.dim())


def check_the_older_sharded_tensors_with_several_shards_per_rank(rank: int, folder: str) -> None:
    whole = torch.arange(48.0).reshape(8, 6)

    def make(source: torch.Tensor) -> TorchShardedTensor:
        shards = [
            TorchShard.from_tensor_and_offsets(source[row : row + 1, at : at + 3].clone(), [row, at], rank)
            for row in (rank, rank + 4)
            for at in (0, 3)
        ]
        return init_from_local_shards(shards, [8, 6])

    state = {"w": make(whole), "list": [make(whole), 1]}
    url = ckptlib.save(state, f"{folder}/older", iteration=1).url
    assert_same(ckptlib.read(url), {"w": whole, "list.0": whole})
    target = {"w": make(torch.zeros(8, 6)), "list": [make(torch.zeros(8, 6)), 0]}
    ckptlib.load(target, url)
    for shard in target["w"].local_shards():  # type: ignore[union-attr]
        (row, at), _ = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        assert_same(shard.tensor, whole[row : row + 1, at : at + 3])
    assert target["list"][1] == 1  # type: ignore[index]
    inner = {"w": torch.zeros(3, 2)}  # and any box of it by anybody
    part = ShardedTensor("w", inner["w"], (8, 6), ckptlib.sharding.Box((3, 2), (3, 2)))
    ckptlib.load({"w": part}, url, strict="return", check_coverage=False)
    assert_same(inner["w"], whole[3:6, 2:4])


def check_fsdp1_with_sharded_state_dicts(rank: int, folder: str) -> None:
    """Its optimizer as `FSDP.optim_state_dict` has it; the bare one holds ranges of flat parameters and is refused."""
    warnings.simplefilter("ignore")  # torch's own, of its older modules
    bare = Net()
    reference = adamw(bare.parameters())
    train(bare, [reference])
    for mesh, original in ((None, True), (init_device_mesh("cpu", (4,)), False)):

        def make(
            seed: int, mesh: Any = mesh, original: bool = original
        ) -> tuple[Any, torch.optim.Optimizer, dict[str, Any]]:
            model = FullyShardedDataParallel(
                Net(), device_id=torch.device("cpu"), device_mesh=mesh, use_orig_params=original
            )
            FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
            optimizer = adamw(model.parameters())
            train(model, [optimizer], seed=seed)
            return model, optimizer, FullyShardedDataParallel.optim_state_dict(model, optimizer)

        model, optimizer, by_name = make(seed=0)
        url = f"{folder}/fsdp1 {original}"
        ckptlib.save({"model": model, "optimizer": by_name}, url, iteration=1)
        found = ckptlib.read(url)
        for name, value in (weights(bare) | moments(bare, reference)).items():
            torch.testing.assert_close(found[name], value)
        with pytest.raises(StateError, match=r"optimizer: .*FSDP\.optim_state_dict"):
            ckptlib.save({"model": model, "optimizer": optimizer}, f"{url} bare", iteration=1)
        fresh, other, target = make(seed=7)
        ckptlib.load({"model": fresh, "optimizer": target}, url)
        other.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(fresh, other, target))
        train(model, [optimizer], seed=1)
        train(fresh, [other], seed=1)
        for one, two in zip(fresh.parameters(), model.parameters(), strict=True):
            assert_same(one.detach(), two.detach())


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "stateless": lambda p: torch.optim.SGD(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "groups": lambda p: torch.optim.AdamW(
        [
            {"params": [x for x in p if x.dim() > 1], "weight_decay": 0.1},
            {"params": [x for x in p if x.dim() <= 1], "weight_decay": 0.0, "betas": (0.8, 0.9)},
        ],
        lr=0.1,
        foreach=False,
    ),
}


def check_optimizers_of_every_kind_over_fsdp2(rank: int, folder: str) -> None:
    """Five of them over one model, in one state."""
    mesh = init_device_mesh("cpu", (4,))
    model, fresh = sharded(mesh), sharded(mesh)
    optimizers = {name: make([*model.parameters()]) for name, make in OPTIMIZERS.items()}
    others = {name: make([*fresh.parameters()]) for name, make in OPTIMIZERS.items()}
    train(model, [*optimizers.values()])
    for other in others.values():
        other.param_groups[-1]["weight_decay"] = 9.0
    url = ckptlib.save({"model": model, **optimizers}, f"{folder}/optimizers", iteration=1).url
    wanted = {name: moments(model, optimizer, name) for name, optimizer in optimizers.items()}
    assert not wanted["stateless"]
    assert_same(ckptlib.read(url), {k: v for part in [weights(model), *wanted.values()] for k, v in part.items()})
    ckptlib.load({"model": fresh, **others}, url)
    for name, other in others.items():
        assert_same(moments(fresh, other, name), wanted[name])
        for one, two in zip(other.param_groups, optimizers[name].param_groups, strict=True):
            assert {k: v for k, v in one.items() if k != "params"} == {k: v for k, v in two.items() if k != "params"}
    train(model, [*optimizers.values()], seed=1)
    train(fresh, [*others.values()], seed=1)
    assert_same(full(fresh.state_dict()), full(model.state_dict()))


def check_moments_of_another_precision_over_fsdp2(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (4,))

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = sharded(mesh).bfloat16()
        return model, adamw(model.parameters())

    model, optimizer = make()
    for parameter in model.parameters():
        third = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": third, "exp_avg_sq": third.clone()}
    url = ckptlib.save({"model": model, "optimizer": optimizer}, f"{folder}/precision", iteration=1).url
    fresh, other = make()
    ckptlib.load({"model": fresh, "optimizer": other}, url)
    assert_same(moments(fresh, other), moments(model, optimizer))
    assert {x.dtype for x in moments(fresh, other).values()} == {torch.float32}


def stages(pp_rank: int, pp: int, layers: int, virtual: int) -> list[Net]:
    """The virtual stages of a pipeline rank: layers dealt round robin, embedding and head where they belong."""
    parts = []
    for chunk in range(virtual):
        stage = chunk * pp + pp_rank
        each = layers // (pp * virtual)
        part = Net(layers=layers)
        part.layers = nn.ModuleDict({str(i): part.layers[str(i)] for i in range(stage * each, (stage + 1) * each)})
        if stage != pp * virtual - 1:
            del part.norm, part.head, part.seen
        parts.append(part)
    return parts


def optimizers_of(parts: list[Net]) -> list[torch.optim.Optimizer]:
    """Each with the same two groups; a stage's may be empty."""
    return [
        torch.optim.AdamW(
            [
                {"params": [p for p in part.parameters() if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in part.parameters() if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=0.1,
            foreach=False,
        )
        for part in parts
    ]


def with_gradients(parts: list[Net], optimizers: list[torch.optim.Optimizer]) -> None:
    for part in parts:
        for name, parameter in part.named_parameters():
            parameter.grad = torch.full_like(parameter, len(name) / 10)
    for optimizer in optimizers:
        optimizer.step()


def check_virtual_pipeline_stages_are_one_state_with_global_names(rank: int, folder: str) -> None:
    """PP 2 with two stages per rank, data parallel 2; what one rank with the whole model would save."""
    parts = stages(rank % 2, 2, 4, 2)
    optimizers = optimizers_of(parts)
    with_gradients(parts, optimizers)
    model = ModelParts(parts)
    url = f"{folder}/stages"
    ckptlib.save({"model": model, "optimizer": OptimizerParts(optimizers)}, url, iteration=1)
    whole = [Net(layers=4)]
    optimizer = optimizers_of(whole)
    with_gradients(whole, optimizer)
    assert_same(ckptlib.read(url), weights(whole[0]) | moments(whole[0], optimizer[0]))

    for pp, virtual in ((2, 2), (4, 1), (1, 4), (1, 1)):
        fresh = stages(rank % pp, pp, 4, virtual)
        others = optimizers_of(fresh)
        with torch.no_grad():
            for part in fresh:
                for parameter in part.parameters():
                    parameter.zero_()
        for other in others:
            other.param_groups[0]["lr"] = 9.0
        report = ckptlib.load({"model": ModelParts(fresh), "optimizer": OptimizerParts(others)}, url)
        assert (report.missing, report.unexpected) == ([], [])
        wanted = dict(whole[0].named_parameters())
        for part, other in zip(fresh, others, strict=True):
            assert [g["lr"] for g in other.param_groups] == [0.1, 0.1]
            for name, parameter in part.named_parameters():
                assert_same(parameter.detach(), wanted[name].detach())
                assert_same(dict(other.state[parameter]), dict(optimizer[0].state[wanted[name]]))


def check_torchs_own_checkpointing_takes_parts_too(rank: int, folder: str) -> None:
    parts = stages(rank % 2, 2, 4, 2)
    optimizers = optimizers_of(parts)
    with_gradients(parts, optimizers)
    model = ModelParts(parts)
    url = f"{folder}/stages by torch"
    dcp.save({"model": model, "optimizer": OptimizerParts(optimizers, model)}, storage_writer=CkptWriter(url))
    fresh = stages(rank % 2, 2, 4, 2)
    others = optimizers_of(fresh)
    dcp.load(
        {"model": ModelParts(fresh), "optimizer": OptimizerParts(others, ModelParts(fresh))},
        storage_reader=CkptReader(url),
    )
    for part, other, old, its in zip(fresh, others, parts, optimizers, strict=True):
        assert_same(dict(part.state_dict()), dict(old.state_dict()))
        for one, two in zip(part.parameters(), old.parameters(), strict=True):
            assert_same(dict(other.state[one]), dict(its.state[two]))


def check_layers_of_all_stages_are_stacked_under_one_key(rank: int, folder: str) -> None:
    """Megatron's form: a prepended layer axis; a stage says where its first layer lies."""

    def layers(pp: int, fill: bool) -> dict[str, Any]:
        each, first = 4 // pp, rank % pp * (4 // pp)
        return {
            f"layers.{i}": ShardedTensor.from_rank_offsets(
                "decoder.layers.up.weight",
                torch.full((2, 3), float(first + i) if fill else -1.0),
                (0, first + i, 4),
                prepend_axis_num=1,
                replica_id=rank // pp,
            )
            for i in range(each)
        }

    url = ckptlib.save(layers(4, True), f"{folder}/stacked", iteration=1).url
    stacked = torch.arange(4.0).reshape(4, 1, 1).expand(4, 2, 3)
    assert_same(ckptlib.read(url), {"decoder.layers.up.weight": stacked})
    for pp in (1, 2, 4):
        target = layers(pp, False)
        ckptlib.load(target, url)
        assert_same(target, layers(pp, True))


def check_experts_over_an_expert_parallel_mesh_and_as_boxes_are_the_same_tensor(rank: int, folder: str) -> None:
    """EP 2 x expert DP 2 by DTensors; EP 4 and EP 1 by boxes with an expert axis and copies over expert DP."""
    whole = torch.arange(4 * 6.0).reshape(4, 3, 2)

    def by_mesh(source: torch.Tensor) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert_dp", "ep"))
        return {"experts": distribute_tensor(source, mesh, [Replicate(), Shard(0)], src_data_rank=None)}

    def by_boxes(source: torch.Tensor, ep: int) -> dict[str, Any]:
        each, ep_rank, copy = 4 // ep, rank % ep, rank // ep
        return {
            f"expert {i}": ShardedTensor.from_rank_offsets(
                "experts", source[i].clone(), (0, i, 4), prepend_axis_num=1, replica_id=copy
            )
            for i in range(ep_rank * each, (ep_rank + 1) * each)
        }

    ckptlib.save(by_mesh(whole), f"{folder}/ep by mesh", iteration=1)
    for ep in (1, 2, 4):
        url = ckptlib.save(by_boxes(whole, ep), f"{folder}/ep {ep}", iteration=1).url
        for source in (url, f"{folder}/ep by mesh"):
            assert_same(ckptlib.read(source), {"experts": whole})
            boxes = by_boxes(torch.zeros_like(whole), ep)
            report = ckptlib.load(boxes, source)
            assert_same(boxes, by_boxes(whole, ep))
            assert report.bytes_read == 4 // ep * 6 * 4
            mesh = by_mesh(torch.zeros_like(whole))
            ckptlib.load(mesh, source)
            assert_same(mesh["experts"].to_local(), by_mesh(whole)["experts"].to_local())


def check_a_rank_outside_a_tensors_mesh_holds_nothing_of_it(rank: int, folder: str) -> None:
    """A mesh over a part of the job: the others have the DTensor without data."""
    mesh = dist.device_mesh.DeviceMesh("cpu", [1, 3])  # type: ignore[attr-defined]

    def make(source: torch.Tensor) -> dict[str, Any]:
        local = source.chunk(2)[(rank - 1) // 2] if rank in (1, 3) else torch.empty(0)
        return {"w": DTensor.from_local(local.clone(), mesh, [Shard(0)], shape=source.shape, stride=source.stride())}

    whole = torch.arange(10.0).reshape(5, 2)
    url = ckptlib.save(make(whole), f"{folder}/sub mesh", iteration=1).url
    assert_same(ckptlib.read(url), {"w": whole})
    target = make(torch.zeros_like(whole))
    ckptlib.load(target, url)
    assert_same(target["w"].to_local(), make(whole)["w"].to_local())


ON_FOUR = [
    check_fsdp2_with_even_and_uneven_and_empty_shards,
    check_hsdp_writes_each_shard_once,
    check_tensor_parallel_by_parallelize_module,
    check_fsdp2_over_tensor_parallel,
    check_rows_that_fsdp2_and_dtensor_see_otherwise_are_refused_not_mixed_up,
    check_wrappers_leave_no_trace_in_names,
    check_the_older_sharded_tensors_with_several_shards_per_rank,
    check_fsdp1_with_sharded_state_dicts,
    check_optimizers_of_every_kind_over_fsdp2,
    check_moments_of_another_precision_over_fsdp2,
    check_virtual_pipeline_stages_are_one_state_with_global_names,
    check_torchs_own_checkpointing_takes_parts_too,
    check_layers_of_all_stages_are_stacked_under_one_key,
    check_experts_over_an_expert_parallel_mesh_and_as_boxes_are_the_same_tensor,
    check_a_rank_outside_a_tensors_mesh_holds_nothing_of_it,
]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(4, ON_FOUR, str(tmp_path_factory.mktemp("adapters")), timeout=200)


@pytest.mark.parametrize("check", ON_FOUR, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_four_ranks(check: Callable[..., None], four: dict[str, str]) -> None:
    assert four[check.__name__] == ""


# --- in one process ---------------------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_shards_lie_where_torch_says(length: int, sizes: list[int]) -> None:
    """P12: uneven and empty ones too."""
    for index in itertools.product(*map(range, sizes)):
        shape, offset = _compute_local_shape_and_global_offset((length,), sizes, [*index], [Shard(0)] * len(sizes))
        start, size = shard_range(length, [Cut(parts, i) for parts, i in zip(sizes, index, strict=True)])
        assert size == shape[0]
        assert start == offset[0] or not size


@given(st.integers(0, 40), st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=2))
def test_strided_shards_are_the_rows_that_fsdp2_has_or_are_refused(length: int, dp: int, rest: list[int]) -> None:
    """The rows by FSDP2's own cutting; a refusal where DTensor's rule gives other rows to any rank."""
    sizes, factor = [dp, *rest], math.prod(rest)
    rows = torch.arange(length)
    strided = _StridedShard(0, split_factor=factor) if factor > 1 else Shard(0)
    same = True
    by_fsdp = {}
    for index in itertools.product(*map(range, sizes)):
        mine, by_rule = rows, rows
        order = [*zip(sizes, index, strict=True)]
        for parts, i in [*order[1:], order[0]] if factor > 1 else order:
            mine = Shard(0)._split_tensor(mine, parts, with_padding=False)[0][i]
        for (parts, i), placement in zip(order, [strided, *[Shard(0)] * len(rest)], strict=True):
            by_rule = placement._split_tensor(by_rule, parts, with_padding=False)[0][i]
        by_fsdp[index] = mine.tolist()
        same = same and torch.equal(mine, by_rule)
    for index, wanted in by_fsdp.items():
        cuts = [Cut(parts, i, factor if at == 0 else 1) for at, (parts, i) in enumerate(zip(sizes, index, strict=True))]
        if not same:
            with pytest.raises(StateError, match="so uneven"):
                shard_range(length, cuts)
            continue
        start, size = shard_range(length, cuts)
        assert [*range(start, start + size)] == wanted


def test_a_submodule_that_a_user_calls_module_keeps_its_name() -> None:
    outer = nn.Module()
    outer.module = nn.Linear(2, 2)
    outer._orig = nn.Linear(2, 2)
    assert {leaf.key for leaf in flatten({"m": outer}).tensors} == {
        "m.module.weight",
        "m.module.bias",
        "m._orig.weight",
        "m._orig.bias",
    }


def test_extra_state_and_custom_state_dicts_of_modules_come_back(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        extra: Any = None

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    class Custom(nn.Module):
        counter = 5

        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return {"counter": self.counter}

        def load_state_dict(self, state: Any) -> None:  # type: ignore[override]
            self.counter = state["counter"]

    model, custom = nn.Sequential(Extra(2, 2)), Custom()
    model[0].extra = {"scale": 2.0}
    ckptlib.save({"model": model, "custom": custom}, str(tmp_path / "it"), iteration=1)
    fresh, other = nn.Sequential(Extra(2, 2)), Custom()
    fresh[0].extra, other.counter = {"scale": 0.0}, 0
    ckptlib.load({"model": fresh, "custom": other}, str(tmp_path / "it"))
    assert fresh[0].extra == {"scale": 2.0}
    assert other.counter == 5
    assert_same(fresh[0].weight.detach(), model[0].weight.detach())


def test_parts_with_the_same_names_are_refused_with_both_parts() -> None:
    parts = [Net(), Net()]
    with pytest.raises(StateError, match=r"model parts 0 and 1 both have '\w+.*place in the whole model"):
        flatten({"model": ModelParts(parts)})


def test_parts_whose_groups_differ_are_refused_with_the_option() -> None:
    parts = stages(0, 1, 4, 2)
    optimizers = optimizers_of(parts)
    state = {"model": ModelParts(parts), "optimizer": OptimizerParts(optimizers)}
    flatten(state)
    optimizers[1].param_groups[1]["lr"] = 0.5
    with pytest.raises(StateError, match=r"optimizer: group 1 has lr = 0\.1 in part 0, 0\.5 in part 1"):
        flatten(state)
    other = torch.optim.AdamW(parts[1].parameters())
    with pytest.raises(StateError, match="part 0 has 2 parameter groups, part 1 has 1"):
        flatten(state | {"optimizer": OptimizerParts([optimizers[0], other])})


def test_a_run_resumes_with_parts_and_knows_their_learning_rate(tmp_path: Path) -> None:
    """Saved as two stages, resumed as one; the rate is recorded as that of any optimizer."""
    parts = stages(0, 1, 4, 2)
    optimizers = optimizers_of(parts)
    with_gradients(parts, optimizers)
    writer = Checkpointer(str(tmp_path), run="run")
    url = writer.save({"m": ModelParts(parts), "o": OptimizerParts(optimizers)}, iteration=1).url
    begin = ckptlib.inspect(url).manifest.begin
    assert begin.progress["lr"] == 0.1
    assert {"model", "optimizer"} <= {*begin.contents}
    whole = stages(0, 1, 4, 1)
    optimizer = optimizers_of(whole)
    restored = Checkpointer(str(tmp_path), run="run").restore({"m": whole[0], "o": OptimizerParts(optimizer)})
    assert restored.iteration == 1
    wanted = {name: value for part in parts for name, value in part.state_dict().items()}
    assert_same(dict(whole[0].state_dict()), wanted)


def test_parts_are_modules_and_optimizers() -> None:
    part = Net()
    with pytest.raises(StateError, match="model parts: expected modules, got SGD"):
        ModelParts([torch.optim.SGD(part.parameters())])  # type: ignore[list-item]
    with pytest.raises(StateError, match="optimizer parts: expected optimizers, got Net"):
        OptimizerParts([part])  # type: ignore[list-item]
    with pytest.raises(StateError, match="2 optimizers for 1 model parts"):
        OptimizerParts([torch.optim.SGD(part.parameters())] * 2, ModelParts([part]))
    with pytest.raises(StateError, match="no names without the model"):
        OptimizerParts([torch.optim.SGD(part.parameters())]).state_dict()


def test_a_tensor_that_keeps_its_data_in_others_is_refused_with_their_names() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(StateError, match=r"'m\.w': a TwoTensor keeps its data in other tensors; save those \(a, b\)"):
        flatten({"m": {"w": TwoTensor(torch.zeros(2), torch.zeros(2))}})
