"""P09 (pytorch#125740): every rank needed every file, because scalar optimizer state was kept by other ranks only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptlib
from ckptlib.storage import PosixStorage
from tests.support.ranks import run_ranks

WORLD = 3


def trained(seed: int) -> dict[str, Any]:
    """A model sharded by FSDP2 and its AdamW, after a step: every parameter has a scalar `step`."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 6))
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "seen": 17}


def save_and_load(rank: int, url: str) -> set[str]:
    """The data files that this rank opens to load what it saved on the same layout."""
    state = trained(1)
    ckptlib.save(state, url, iteration=1)
    dist.barrier()
    opened: set[str] = set()
    original = PosixStorage.read_into

    def watched(self: PosixStorage, path: str, *args: Any, **options: Any) -> Any:
        opened.add(Path(path).name)
        return original(self, path, *args, **options)

    other = trained(2)
    with mock.patch.object(PosixStorage, "read_into", watched):
        ckptlib.load(other, url)
    for one, two in zip(state["model"].parameters(), other["model"].parameters(), strict=True):
        assert torch.equal(one.to_local(), two.to_local())
        assert state["optimizer"].state[one]["step"] == other["optimizer"].state[two]["step"] == 1
    assert other["seen"] == 17
    return {name for name in opened if name.endswith(".distcp")}


def test_p09_a_load_on_the_same_layout_opens_only_the_ranks_own_file(tmp_path: Path) -> None:
    for rank, opened in enumerate(run_ranks(WORLD, save_and_load, str(tmp_path / "step"))):
        assert all(re.match(rf"__{rank}_\d+\.", name) for name in opened), (rank, opened)
        assert opened
