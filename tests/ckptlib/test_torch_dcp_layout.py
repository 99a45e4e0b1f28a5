"""TORCH_DCP + torch_dcp through our own saves: what plain torch.distributed.checkpoint reads, at any topology."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptlib
from ckptlib import Checkpointer, ShardedObject, ShardedTensor
from ckptlib.background_saves import AsyncOptions
from ckptlib.errors import UnsupportedError
from ckptlib.manifest import IoMode
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def training(seed: int, steps: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": steps, "nested": {"a": [torch.ones(2), {"b": "text"}]}}


@pytest.mark.parametrize("io_mode", ["sync", "async"])
def test_plain_torch_loads_what_a_checkpointer_saved(tmp_path: Path, io_mode: IoMode) -> None:
    state = training(1, 2)
    args = {"layers": 2, "names": ["a", "b"]}
    with Checkpointer(
        str(tmp_path), run="gpt", semantic_type="TORCH_DCP", io_mode=io_mode, background=AsyncOptions(worker="thread")
    ) as job:
        job.save(state, iteration=2, args=args, progress={"consumed_samples": 8}, rerun_state={"mode": [1]}).wait(60)
        drawn = torch.rand(3)
    url = tmp_path / "iter_0000002"
    assert {path.name for path in url.iterdir()} - {path.name for path in url.glob("*.distcp")} == {
        ".ckpt", ".metadata", "checkpoint.json", "integrity.json",
    }  # fmt: skip
    assert not list(url.glob(".ckpt/*/common.pt"))
    info = ckptlib.inspect(str(url))
    assert (info.semantic_type, info.format, info.committed) == ("TORCH_DCP", "torch_dcp", True)
    for level in ("listing", "structure", "data"):
        assert ckptlib.verify(str(url), level=level).ok
    other = training(2)
    wanted = {
        "model": other["model"].state_dict(),
        "step": 0,
        "nested": {"a": [torch.zeros(2), {"b": ""}]},
        "args": {"layers": 0, "names": []},
        "progress": {"consumed_samples": 0},
    }
    dcp.load(wanted, checkpoint_id=url, no_dist=True)
    assert torch.equal(wanted["model"]["weight"], state["model"].weight)
    assert (wanted["step"], wanted["nested"]["a"][1], wanted["args"]) == (2, {"b": "text"}, args)
    assert wanted["nested"]["a"][0].tolist() == [1, 1]
    assert wanted["progress"] == {"consumed_samples": 8}
    with Checkpointer(str(tmp_path), run="gpt") as job:  # a resume point like any other
        restored = job.restore(other)
    assert (restored.iteration, restored.args, restored.rerun_state) == (2, args, {"mode": [1]})
    assert restored.progress["consumed_samples"] == 8
    assert torch.equal(torch.rand(3), drawn)
    assert str(other["optimizer"].state_dict()) == str(state["optimizer"].state_dict())


def test_torch_turns_it_into_one_file(tmp_path: Path) -> None:
    ckptlib.save(training(1), str(tmp_path / "c"), iteration=1, semantic_type="TORCH_DCP")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(found["model.weight"], training(1)["model"].weight)
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    assert "optimizer.state.weight.exp_avg" in metadata.state_dict_metadata


def ranks_save(rank: int, root: str) -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(30.0).reshape(10, 3)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "same": 5}
    with Checkpointer(root, run="gpt", semantic_type="TORCH_DCP") as job:
        torch.manual_seed(rank)
        job.save(state, iteration=1, args=argparse.Namespace(hidden=8))
        drawn = torch.rand(2).tolist()
        torch.manual_seed(17)
        target = {"w": distribute_tensor(torch.zeros(10, 3), mesh, [Shard(1)]), "same": 0}
        restored = job.restore(target)
        assert restored.args.hidden == 8
        assert torch.rand(2).tolist() == drawn, "every rank has its own streams"
        assert torch.equal(target["w"].full_tensor(), whole)
    plain = {"w": distribute_tensor(torch.zeros(10, 3), mesh, [Shard(0)]), "same": 0}
    dcp.load(plain, checkpoint_id=f"{root}/iter_0000001")
    assert torch.equal(plain["w"].full_tensor(), whole)
    return drawn


def test_ranks_save_shards_that_any_topology_and_plain_torch_load(tmp_path: Path) -> None:
    drawn = run_ranks(2, ranks_save, str(tmp_path))
    assert drawn[0] != drawn[1]
    url = tmp_path / "iter_0000001"
    target = {"w": torch.zeros(10, 3), "same": 0}
    ckptlib.load(target, str(url))
    assert torch.equal(target["w"], torch.arange(30.0).reshape(10, 3))
    alone = {"w": torch.zeros(10, 3)}
    dcp.load(alone, checkpoint_id=url, no_dist=True)
    assert torch.equal(alone["w"], target["w"])


def test_what_the_object_graph_cannot_hold_is_refused(tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    cell = {"cell": ShardedObject("cell", {"a": 1}, (1,), (0,))}
    with pytest.raises(UnsupportedError, match=r"cell/shard_0_1.*no grids of objects.*GLOBAL \+ torch_dist"):
        ckptlib.save(cell, url, iteration=1, semantic_type="TORCH_DCP")
    moved = {"model": {"w": ShardedTensor.from_box("decoder.w", torch.ones(2), (2,), (0,))}}
    with pytest.raises(UnsupportedError, match=r"'decoder\.w' lies at 'model\.w'"):
        ckptlib.save(moved, url, iteration=1, semantic_type="TORCH_DCP")
    assert not Path(url).exists()
    named = {"model": {"w": ShardedTensor.from_box("model.w", torch.ones(2), (2,), (0,))}}
    ckptlib.save(named, url, iteration=1, semantic_type="TORCH_DCP")
    found = {"model": {"w": torch.zeros(2)}}
    dcp.load(found, checkpoint_id=url, no_dist=True)
    assert found["model"]["w"].tolist() == [1, 1]
