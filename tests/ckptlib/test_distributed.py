"""Saves and loads by real ranks: what four wrote, four, three, two and one read, bit for bit.

Each launch runs many checks (see `tests.support.ranks.run_checks`); every check is a test of its own here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptlib
from ckptlib import LocalNonpersistentObject, ShardedObject, ShardedTensor, Topology
from ckptlib.errors import StateError
from tests.support.ranks import run_checks, run_ranks
from tests.support.trees import assert_same

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),  # of plain torch's own
]

# --- what is saved ----------------------------------------------------------------------------------------------------

ONE_AXIS: dict[str, tuple[tuple[int, ...], torch.dtype, Placement]] = {
    "six rows": ((6, 5), torch.float32, Shard(0)),  # P12: 2, 2, 2 and 0 rows on four ranks
    "one row": ((1, 3), torch.float32, Shard(0)),
    "seven columns": ((2, 7), torch.bfloat16, Shard(1)),
    "eight by three": ((8, 2, 3), torch.float64, Shard(0)),
    "replicated": ((3, 3), torch.float32, Replicate()),
    "scalar": ((), torch.int64, Replicate()),
    "empty": ((0, 4), torch.float32, Shard(0)),
    "flags": ((5,), torch.bool, Shard(0)),
    "fp8": ((4, 4), torch.float8_e4m3fn, Shard(0)),
}
TWO_AXES: dict[str, tuple[tuple[int, ...], tuple[Placement, Placement]]] = {
    "data parallel copies of tensor parallel rows": ((6, 4), (Replicate(), Shard(0))),
    "tensor parallel columns of data parallel rows": ((6, 5), (Shard(0), Shard(1))),
    "copied everywhere": ((2, 2), (Replicate(), Replicate())),
}


def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The global tensor of this name: the same on all ranks."""
    generator = torch.Generator().manual_seed(len(name))
    raw = torch.randint(0, 100, shape, generator=generator)
    if dtype == torch.bool:
        return raw % 2 == 0
    return raw.to(dtype)


def dtensors(world: int, make: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (world,))
    return {
        name: distribute_tensor(make(whole(name, shape, dtype)), mesh, [placement], src_data_rank=None)
        for name, (shape, dtype, placement) in ONE_AXIS.items()
    }


def dtensors_on_two_axes(make: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return {
        name: distribute_tensor(make(whole(name, shape)), mesh, placements, src_data_rank=None)
        for name, (shape, placements) in TWO_AXES.items()
    }


def megatron_like(rank: int, tp: int, make: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> dict[str, Any]:
    """Three stacked layers of a gated MLP: two pieces per rank and layer, a prepended axis, copies on dp ranks."""
    half, rows, columns = 4, 8, 3
    whole_fc1 = whole("fc1", (3, rows, columns))
    tp_rank, dp_rank = rank % tp, rank // tp
    part = half // tp
    state: dict[str, Any] = {}
    for layer in range(3):
        pieces = []
        for start in (tp_rank * part, half + tp_rank * part):  # gate, then up
            data = make(whole_fc1[layer, start : start + part].clone())
            pieces.append(
                ShardedTensor.from_box("fc1", data, (3, rows, columns), (layer, start, 0), replica_id=(0, dp_rank))
            )
        state[f"layers.{layer}"] = {"gate": pieces[0], "up": pieces[1]}
    return state


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(4, 8)
        self.norm = torch.nn.LayerNorm(4)
        self.down = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.down(torch.relu(self.up(x))))
        return out


def job(*, tp: bool) -> dict[str, Any]:
    """A model, its optimizer and scheduler; with `tp` on a mesh of two data and two tensor parallel ranks."""
    model = Mlp()
    if tp:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    }


def train(state: dict[str, Any], steps: int, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        state["optimizer"].zero_grad()
        loss = state["model"](torch.randn(4, 4, generator=generator)).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        losses.append(float(loss))
    return losses


def full(value: Any) -> Any:
    """Global tensors in place of distributed ones. Collective."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach()
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {name: full(inner) for name, inner in value.items()}
    return value


def local_bytes(value: Any) -> int:
    tensor = value.to_local() if isinstance(value, DTensor) else value
    return int(tensor.numel() * tensor.element_size())


def data_bytes(url: str) -> dict[str, int]:
    return {name: os.path.getsize(os.path.join(url, name)) for name in os.listdir(url) if name.endswith(".distcp")}


# --- on four ranks ----------------------------------------------------------------------------------------------------


def check_dtensors_come_back_and_each_rank_reads_only_its_part(rank: int, folder: str) -> None:
    """R3, P12."""
    state = {"model": dtensors(4)}
    result = ckptlib.save(state, f"{folder}/dtensors", iteration=1, topology=Topology(tp=4))
    target = {"model": dtensors(4, torch.zeros_like)}
    report = ckptlib.load(target, f"{folder}/dtensors")
    for name, value in state["model"].items():
        assert_same(target["model"][name].to_local(), value.to_local(), name)
    assert report.bytes_read == report.bytes_needed == sum(map(local_bytes, state["model"].values()))
    sizes = data_bytes(result.url)
    assert result.files == len(sizes)
    assert result.bytes >= sum(sizes.values())


def check_two_mesh_axes_come_back(rank: int, folder: str) -> None:
    state = {"model": dtensors_on_two_axes()}
    ckptlib.save(state, f"{folder}/two axes", iteration=1, topology=Topology(tp=2, dp=2))
    target = {"model": dtensors_on_two_axes(torch.zeros_like)}
    ckptlib.load(target, f"{folder}/two axes")
    for name, value in state["model"].items():
        assert_same(target["model"][name].to_local(), value.to_local(), name)


def check_several_pieces_of_a_tensor_per_rank_come_back(rank: int, folder: str) -> None:
    state = megatron_like(rank, 2)
    ckptlib.save(state, f"{folder}/megatron", iteration=1, topology=Topology(tp=2, dp=2))
    target = megatron_like(rank, 2, torch.zeros_like)
    report = ckptlib.load(target, f"{folder}/megatron")
    assert_same(target, state)
    assert report.bytes_read == report.bytes_needed == 3 * 2 * 2 * 3 * 4


def check_objects_and_values_come_back(rank: int, folder: str) -> None:
    class Loader:
        position = 17 if rank >= 0 else 0

        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position, "queue": [1, {"a": None}]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.position = state["position"]

    def tree(cell: Any, value: Any) -> dict[str, Any]:
        return {
            "cells": ShardedObject("cells", cell, (2, 2), (rank // 2, rank % 2)),
            "one": ShardedObject("one", value, replica_id=rank),
            "values": {"step": value, "list": [value, value]},
            "mine": LocalNonpersistentObject(rank),
            "loader": Loader(),
        }

    ckptlib.save(tree({"rank": rank}, 5), f"{folder}/objects", iteration=1)
    target = tree(None, None)
    target["loader"].position = 0
    ckptlib.load(target, f"{folder}/objects")
    assert target["cells"].data == {"rank": rank}
    assert target["one"].data == 5
    assert target["values"] == {"step": 5, "list": [5, 5]}
    assert target["mine"].obj == rank
    assert target["loader"].position == 17


def check_copies_are_written_once_and_by_all_ranks_alike(rank: int, folder: str) -> None:
    """Main-replica dedup: four copies of 64 KiB are 64 KiB, sixteen of each rank's files."""
    state = {f"w{i}": torch.full((1024,), float(i)) for i in range(16)}
    url = ckptlib.save(state, f"{folder}/copies", iteration=1).url
    sizes = data_bytes(url)
    assert len(sizes) == 4
    assert sum(sizes.values()) < 2 * 16 * 4096
    assert max(sizes.values()) < 1.1 * min(sizes.values())


def check_tensor_parallel_training_goes_on_as_if_uninterrupted(rank: int, folder: str) -> None:
    first = job(tp=True)
    train(first, 3)
    ckptlib.save(first, f"{folder}/training", iteration=3, topology=Topology(tp=2, dp=2))
    fresh = job(tp=True)
    train(fresh, 1, seed=9)
    ckptlib.load(fresh, f"{folder}/training")
    assert_same(full(fresh["model"].state_dict()), full(first["model"].state_dict()))
    assert train(fresh, 2, seed=5) == train(first, 2, seed=5)
    torch.save(full(first["model"].state_dict()), f"{folder}/later_{rank}.pt")


def check_sharded_data_parallel_over_tensor_parallel_is_stored_as_one_tensor(rank: int, folder: str) -> None:
    """FSDP2 over TP: the placements are strided shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Mlp()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    url = ckptlib.save({"model": model}, f"{folder}/fsdp", iteration=1, topology=Topology(tp=2, dp=2)).url
    assert_same(ckptlib.read(url), {f"model.{name}": value.detach() for name, value in Mlp().named_parameters()})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ckptlib.load({"model": model}, url)
    assert_same(full(model.state_dict()), dict(Mlp().state_dict()))


def check_pipeline_stages_have_layers_and_optimizer_groups_of_their_own(rank: int, folder: str) -> None:
    def stage(fill: float) -> dict[str, Any]:
        layer = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.constant_(layer.weight, fill)
        model = torch.nn.ModuleDict({f"layer{rank}": layer})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved = stage(float(rank))
    url = ckptlib.save(saved, f"{folder}/stages", iteration=1, topology=Topology(pp=4)).url
    target = stage(-1.0)
    report = ckptlib.load(target, url)  # strict: together the stages ask for everything that is there
    assert (report.missing, report.unexpected) == ([], [])
    assert_same(target["model"].state_dict(), saved["model"].state_dict())
    assert_same(target["optimizer"].state_dict(), saved["optimizer"].state_dict())


def check_plain_torch_reads_it_on_four_ranks(rank: int, folder: str) -> None:
    target: dict[str, Any] = {"model": dtensors(4, torch.zeros_like)}
    dcp.load(target, checkpoint_id=f"{folder}/dtensors")
    for name, value in dtensors(4).items():
        assert_same(target["model"][name].to_local(), value.to_local(), name)


def check_a_partial_sum_is_refused_by_name(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(StateError, match=r"'grad'.*partial sum"):
        ckptlib.save({"grad": partial}, f"{folder}/partial", iteration=1)
    assert not os.path.exists(f"{folder}/partial")


ON_FOUR = [
    check_dtensors_come_back_and_each_rank_reads_only_its_part,
    check_two_mesh_axes_come_back,
    check_several_pieces_of_a_tensor_per_rank_come_back,
    check_objects_and_values_come_back,
    check_copies_are_written_once_and_by_all_ranks_alike,
    check_tensor_parallel_training_goes_on_as_if_uninterrupted,
    check_sharded_data_parallel_over_tensor_parallel_is_stored_as_one_tensor,
    check_pipeline_stages_have_layers_and_optimizer_groups_of_their_own,
    check_plain_torch_reads_it_on_four_ranks,
    check_a_partial_sum_is_refused_by_name,
]

# --- on three and on two ranks, what four wrote -----------------------------------------------------------------------


def check_three_ranks_load_their_parts_of_what_four_wrote(rank: int, folder: str) -> None:
    """P12: save at 4, load at 3; through box intersections, reading only what is needed."""
    target = {"model": dtensors(3, torch.zeros_like)}
    report = ckptlib.load(target, f"{folder}/dtensors")
    for name, value in dtensors(3).items():
        assert_same(target["model"][name].to_local(), value.to_local(), name)
    assert report.bytes_read == report.bytes_needed == sum(map(local_bytes, target["model"].values()))


def check_three_ranks_save_and_load(rank: int, folder: str) -> None:
    state = {"model": dtensors(3)}
    url = ckptlib.save(state, f"{folder}/three", iteration=1).url
    assert_same(ckptlib.read(url), {f"model.{n}": whole(n, shape, dtype) for n, (shape, dtype, _) in ONE_AXIS.items()})


def check_one_tensor_parallel_rank_takes_up_training_of_two(rank: int, folder: str) -> None:
    """Saved at TP=2 x DP=2, loaded at TP=1 x DP=2: whole tensors, optimizer state included."""
    target = job(tp=False)
    train(target, 1, seed=3)
    ckptlib.load(target, f"{folder}/training")
    train(target, 2, seed=5)
    later = torch.load(f"{folder}/later_0.pt")
    for name, value in target["model"].state_dict().items():
        torch.testing.assert_close(value, later[name], rtol=1e-4, atol=1e-6)
    assert target["scheduler"].last_epoch == 5


def check_two_ranks_load_gated_pieces_of_other_tensor_parallel_sizes(rank: int, folder: str) -> None:
    for tp in (1, 2):
        target = megatron_like(rank, tp, torch.zeros_like)
        ckptlib.load(target, f"{folder}/megatron")
        assert_same(target, megatron_like(rank, tp))


ON_THREE = [check_three_ranks_load_their_parts_of_what_four_wrote, check_three_ranks_save_and_load]
ON_TWO = [
    check_one_tensor_parallel_rank_takes_up_training_of_two,
    check_two_ranks_load_gated_pieces_of_other_tensor_parallel_sizes,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def four(folder: Path) -> dict[str, str]:
    return run_checks(4, ON_FOUR, str(folder))


@pytest.fixture(scope="module")
def fewer(folder: Path, four: dict[str, str]) -> dict[str, str]:
    return run_checks(3, ON_THREE, str(folder)) | run_checks(2, ON_TWO, str(folder))


def sentence(check: Callable[..., None]) -> str:
    return check.__name__.removeprefix("check_")


@pytest.mark.parametrize("check", ON_FOUR, ids=sentence)
def test_on_four_ranks(check: Callable[..., None], four: dict[str, str]) -> None:
    assert four[check.__name__] == ""


@pytest.mark.parametrize("check", [*ON_THREE, *ON_TWO], ids=sentence)
def test_on_fewer_ranks(check: Callable[..., None], fewer: dict[str, str]) -> None:
    assert fewer[check.__name__] == ""


def test_one_process_reads_whole_tensors_of_what_four_ranks_wrote(folder: Path, four: dict[str, str]) -> None:
    assert_same(
        ckptlib.read(str(folder / "dtensors")),
        {f"model.{name}": whole(name, shape, dtype) for name, (shape, dtype, _) in ONE_AXIS.items()},
    )
    assert_same(
        ckptlib.read(str(folder / "two axes")),
        {f"model.{name}": whole(name, shape) for name, (shape, _) in TWO_AXES.items()},
    )
    assert_same(ckptlib.read(str(folder / "megatron")), {"fc1": whole("fc1", (3, 8, 3))})


def test_plain_torch_in_one_process_reads_what_four_ranks_wrote(folder: Path, four: dict[str, str]) -> None:
    wanted = {f"model.{name}": whole(name, shape, dtype) for name, (shape, dtype, _) in ONE_AXIS.items()}
    target = {name: torch.zeros_like(value) for name, value in wanted.items()}
    dcp.load(target, checkpoint_id=folder / "dtensors", no_dist=True)
    assert_same(target, wanted)
    values = {"values": {"step": 0, "list": None}}
    dcp.load(values, checkpoint_id=folder / "objects", no_dist=True)
    assert values == {"values": {"step": 5, "list": [5, 5]}}


def test_what_four_ranks_wrote_verifies(folder: Path, four: dict[str, str]) -> None:
    for name in ("dtensors", "two axes", "megatron", "objects", "training", "fsdp", "stages"):
        report = ckptlib.verify(str(folder / name))
        assert report.ok, (name, report.problems)
        info = ckptlib.inspect(str(folder / name))
        assert info.committed
        assert info.manifest.begin.world_size == 4


def save_and_load(rank: int, folder: str) -> str:
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.full((2,), float(rank)), (0, rank, 2))}
    for i in range(3):
        ckptlib.save(state, f"{folder}/{i}", iteration=i)
        ckptlib.load(state, f"{folder}/{i}")
    return "saved"


def test_ranks_that_met_over_a_file_save_and_load(tmp_path: Path) -> None:
    """A FileStore cannot delete keys in time, and waits otherwise than a TCPStore."""
    assert run_ranks(2, save_and_load, str(tmp_path), store_file=str(tmp_path / "store")) == ["saved", "saved"]
    assert torch.equal(ckptlib.read(str(tmp_path / "2"))["w"], torch.tensor([0.0, 0.0, 1.0, 1.0]))
