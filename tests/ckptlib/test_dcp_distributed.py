"""torchtitan-style trainers change one line: their `dcp.save`, `dcp.async_save` and `dcp.load` on real ranks."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptlib
from ckptlib.integrations.dcp import CkptReader, CkptWriter
from ckptlib.source import open_source
from tests.support.ranks import run_checks, run_ranks

pytestmark = pytest.mark.timeout(300)


class AppState(Stateful):
    """As in torch's tutorial and torchtitan: model and optimizer by parameter name, sharded by FSDP2."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self) -> float:
        torch.manual_seed(7)
        loss = self.model(torch.rand(4, 5)).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optimizer"]
        )


def a_save_and_a_load_continue_the_training(rank: int, root: str) -> None:
    app = AppState(1)
    losses = [app.step() for _ in range(2)]
    dcp.save({"app": app, "step": 2}, storage_writer=CkptWriter(f"{root}/step-2"))
    expected = [app.step() for _ in range(2)]

    other = AppState(2)
    state: dict[str, Any] = {"app": other, "step": 0}
    dcp.load(state, storage_reader=CkptReader(f"{root}/step-2"))
    assert state["step"] == 2
    assert [other.step() for _ in range(2)] == expected != losses


def what_is_saved_behind_the_training_is_what_was_there_when_it_was_asked_for(rank: int, root: str) -> None:
    """`async_save` stages a copy; its thread has a gloo group of its own."""
    app = AppState(1)
    app.step()
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=60))
    pending = dcp.async_save({"app": app}, storage_writer=CkptWriter(f"{root}/async-1"), process_group=group)
    expected = [app.step() for _ in range(2)]  # while it is being saved
    pending.result(timeout=60)

    other = AppState(2)
    dcp.load({"app": other}, storage_reader=CkptReader(f"{root}/async-1"))
    assert [other.step() for _ in range(2)] == expected


def kept_plans_save_every_step(rank: int, root: str) -> None:
    """Only the first save sends plans; the ranks learn of each later one all the same."""
    app = AppState(1)
    for step in (1, 2, 3):
        app.step()
        dcp.save(
            {"app": app, "step": step, "of_rank": {f"r{rank}": torch.full((2,), float(step))}},
            storage_writer=CkptWriter(f"{root}/kept-{step}"),
            planner=dcp.DefaultSavePlanner(enable_plan_caching=True),
        )
    expected = app.step()
    other = AppState(2)
    state: dict[str, Any] = {"app": other, "step": 0, "of_rank": {"r0": torch.zeros(2), "r1": torch.zeros(2)}}
    dcp.load(state, storage_reader=CkptReader(f"{root}/kept-3"))
    assert other.step() == expected
    assert (state["step"], state["of_rank"]["r1"].tolist()) == (3, [3, 3])


CHECKS = [
    a_save_and_a_load_continue_the_training,
    what_is_saved_behind_the_training_is_what_was_there_when_it_was_asked_for,
    kept_plans_save_every_step,
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One launch of two ranks; what went wrong in each check."""
    root = tmp_path_factory.mktemp("dcp")
    return {"root": str(root), **run_checks(2, CHECKS, str(root))}


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_torchs_calls_work_with_our_storage(verdicts: dict[str, str], check: str) -> None:
    assert not verdicts[check], verdicts[check]


def test_each_is_committed_and_verifies(verdicts: dict[str, str]) -> None:
    for name in ("step-2", "async-1", "kept-3"):
        url = str(Path(verdicts["root"]) / name)
        assert ckptlib.verify(url).ok
        manifest = open_source(url).manifest
        assert manifest is not None
        assert "app" in manifest.begin.contents


def load_on_another_number_of_ranks(rank: int, url: str) -> float:
    app = AppState(3)
    dcp.load({"app": app}, storage_reader=CkptReader(url))
    return app.step()


def test_another_number_of_ranks_goes_on_from_it(verdicts: dict[str, str]) -> None:
    """Uneven shards: 7 rows over 3 ranks."""
    url = str(Path(verdicts["root"]) / "step-2")
    losses = run_ranks(3, load_on_another_number_of_ranks, url)
    assert losses == pytest.approx([run_ranks(1, load_on_another_number_of_ranks, url)[0]] * 3, rel=1e-5)
