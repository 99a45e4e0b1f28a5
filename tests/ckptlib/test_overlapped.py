"""Copies that are made beside the next forward and backward, and what waits for them by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import ckptlib
from ckptlib import Checkpointer, copying, overlap
from ckptlib.async_options import AsyncOptions
from ckptlib.errors import BackgroundSaveError, CheckpointExistsError, RankFailedError, StagingError, StateError
from ckptlib.events import Notice
from tests.support.ranks import run_ranks

OVERLAPPED = AsyncOptions(worker="thread", staging="overlapped")


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture(autouse=True)
def no_copy_is_left() -> Iterator[None]:
    yield
    assert not overlap._running


class Gate:
    """Holds back the copies that are made in threads."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self._copy = copying.Copier.copy

    def copy(self, copier: copying.Copier, *args: Any, **options: Any) -> None:
        self.reached.set()
        assert self.opened.wait(60)
        self._copy(copier, *args, **options)

    def open_later(self, seconds: float = 0.2) -> None:
        threading.Timer(seconds, self.opened.set).start()


@pytest.fixture
def gate() -> Iterator[Gate]:
    it = Gate()
    with mock.patch.object(copying.Copier, "copy", lambda copier, *args, **options: it.copy(copier, *args, **options)):
        yield it
        it.opened.set()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def training() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A module, its optimizer with moments, and a forward and backward."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = torch.randn(16, 4)

    def forward_backward() -> None:
        optimizer.zero_grad()
        model(inputs).square().sum().backward()

    forward_backward()
    optimizer.step()
    return model, optimizer, forward_backward


def copied(tree: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tree.items()}


def assert_stored(url: str, weights: dict[str, torch.Tensor], moments: dict[str, torch.Tensor]) -> None:
    stored = ckptlib.read(url)
    for name, tensor in weights.items():
        assert torch.equal(stored[f"model.{name}"], tensor), name
    for name, tensor in moments.items():
        assert torch.equal(stored[f"optimizer.state.{name}.exp_avg"], tensor), name


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {name: optimizer.state[parameter]["exp_avg"].clone() for name, parameter in model.named_parameters()}


def test_an_optimizer_waits_for_the_copy_and_a_forward_does_not(root: str, gate: Gate) -> None:
    """Buffers change in the forward pass, weights and moments in the step: the checkpoint has those of the save."""
    model, optimizer, forward_backward = training()
    weights, moments = copied(model.state_dict()), moments_of(model, optimizer)
    with Checkpointer(root, run="run", io_mode="async", background=OVERLAPPED) as job:
        pending = job.save({"model": model, "optimizer": optimizer}, iteration=1)
        assert gate.reached.wait(60)
        forward_backward()
        assert not torch.equal(model[1].running_mean, weights["1.running_mean"])
        assert not gate.opened.is_set()
        gate.open_later()
        optimizer.step()
        assert gate.opened.is_set(), "the step waited"
        assert pending.wait(60).save_id
    assert not torch.equal(model[0].weight, weights["0.weight"])
    assert_stored(f"{root}/iter_0000001", weights, moments)


@pytest.mark.parametrize("what", ["module", "part of a module", "optimizer", "restore", "load", "next save"])
def test_whatever_changes_or_reads_the_state_waits_for_the_copy(root: str, gate: Gate, what: str) -> None:
    model, optimizer, _ = training()
    with Checkpointer(root, run="run", io_mode="async", background=OVERLAPPED) as job:
        gate.opened.set()
        job.save({"model": model, "optimizer": optimizer}, iteration=1).wait(60)
        gate.opened.clear()
        optimizer.step()
        weights, moments = copied(model.state_dict()), moments_of(model, optimizer)
        job.save({"model": model, "optimizer": optimizer}, iteration=2)
        gate.open_later()
        match what:
            case "module":
                model.load_state_dict(network().state_dict())
            case "part of a module":
                model[0].load_state_dict(network()[0].state_dict())
            case "optimizer":
                optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
            case "restore":
                job.restore({"model": model, "optimizer": optimizer}, at=1)
            case "load":
                ckptlib.load({"model": model}, f"{root}/iter_0000001", strict="return")
            case _:
                job.save({"model": model, "optimizer": optimizer}, iteration=3)
        assert gate.opened.is_set()
    assert_stored(f"{root}/iter_0000002", weights, moments)


def test_two_states_in_flight_are_two_checkpoints(root: str) -> None:
    """torch's reused stager leaves the second state in the first checkpoint."""
    options = AsyncOptions(worker="thread", staging="overlapped", max_in_flight=2)
    model, optimizer, forward_backward = training()
    kept = []
    with Checkpointer(root, run="run", io_mode="async", background=options) as job:
        for iteration in range(1, 7):
            kept.append((copied(model.state_dict()), moments_of(model, optimizer)))
            job.save({"model": model, "optimizer": optimizer}, iteration=iteration)
            forward_backward()
            optimizer.step()
    for iteration, (weights, moments) in enumerate(kept, 1):
        assert_stored(f"{root}/iter_{iteration:07d}", weights, moments)


def test_a_change_that_nothing_waited_for_fails_the_save_and_names_the_tensor(root: str, gate: Gate) -> None:
    model, optimizer, _ = training()
    job = Checkpointer(root, run="run", io_mode="async", background=OVERLAPPED)
    pending = job.save({"model": model, "optimizer": optimizer}, iteration=1)
    assert gate.reached.wait(60)
    with torch.no_grad():
        model[2].bias.mul_(2)  # an average of weights, say: no optimizer's step
    gate.opened.set()
    with pytest.raises(StagingError, match=r"'model.2.bias' was changed in place.*wait_staged"):
        pending.wait(60)
    with pytest.raises(BackgroundSaveError, match=r"iteration 1 .*model.2.bias"):
        job.save({"model": model}, iteration=2)
    job.save({"model": model}, iteration=3)
    assert job.wait_staged(60)
    with torch.no_grad():
        model[2].bias.mul_(2)
    job.close()
    assert [path.parent.name for path in Path(root).glob("iter_*/metadata.json")] == ["iter_0000003"]


def test_what_is_no_part_of_a_module_or_optimizer_is_copied_at_once(root: str, gate: Gate) -> None:
    model, _, _ = training()
    tree: dict[str, Any] = {
        "model": model,
        "average": {"w": torch.ones(3)},
        "seen": [1, 2],
        "nested": {"a": {"b": [torch.ones(2)]}},
        "cell": ckptlib.ShardedObject("cell", {"x": [1]}, (1,), (0,)),
    }
    with Checkpointer(root, run="run", io_mode="async", background=OVERLAPPED) as job:
        job.save(tree, iteration=1)
        tree["average"]["w"].zero_()
        tree["nested"]["a"]["b"][0].zero_()
        tree["seen"].append(3)
        tree["cell"].data["x"].append(2)
        gate.opened.set()
    target = {
        **tree,
        "cell": ckptlib.ShardedObject("cell", None, (1,), (0,)),
        "seen": [],
        "average": {"w": torch.zeros(3)},
    }
    ckptlib.load(target, f"{root}/iter_0000001", strict="return")
    assert torch.equal(target["average"]["w"], torch.ones(3))
    assert torch.equal(tree["nested"]["a"]["b"][0], torch.ones(2))
    assert target["seen"] == [1, 2]
    assert target["cell"].data == {"x": [1]}


def test_a_state_of_which_nothing_is_known_is_staged_eagerly_and_says_so(root: str, gate: Gate) -> None:
    gate.opened.set()
    notices: list[Notice] = []
    tree = {"model": {"w": torch.zeros(17 * 2**20)}}
    with Checkpointer(root, run="run", io_mode="async", background=OVERLAPPED, on_event=notices.append) as job:
        for iteration in (1, 2):
            job.save(tree, iteration=iteration)
            assert not overlap._running
            tree["model"]["w"] += 1
    (notice,) = [notice for notice in notices if notice.name == "staged_eagerly"]
    assert "68 MiB of the state, 'model.w' first" in notice.message
    assert ckptlib.read(f"{root}/iter_0000002")["model.w"][0] == 1


def test_what_keeps_a_save_from_beginning_is_raised_by_the_next_call(root: str) -> None:
    """W9 is looked at beside the training; nothing is written, and later saves are not harmed."""
    model, optimizer, _ = training()
    with Checkpointer(root, run="run", io_mode="async", background=OVERLAPPED) as job:
        job.save({"model": model, "optimizer": optimizer}, iteration=1).wait(60)
        pending = job.save({"model": model, "optimizer": optimizer}, iteration=1)
        with pytest.raises(CheckpointExistsError):
            pending.wait(60)
        with pytest.raises(CheckpointExistsError):
            job.save({"model": model, "optimizer": optimizer}, iteration=2)
        job.save({"model": model, "optimizer": optimizer}, iteration=3).wait(60)


def ranks_that_fail(rank: int, root: str) -> None:
    """A state that cannot be saved on rank 1 is raised there at once, and on all ranks by the next call."""
    model, optimizer, forward_backward = training()
    job = Checkpointer(root, run="run", io_mode="async", background=OVERLAPPED, timeout=60)
    tree: dict[str, Any] = {"model": model, "optimizer": optimizer}
    job.save(tree, iteration=1)
    forward_backward()
    optimizer.step()
    broken = {**tree, "broken": torch.zeros(2).to_sparse()} if rank == 1 else tree
    if rank == 1:
        with pytest.raises(StateError, match="sparse"):
            job.save(broken, iteration=2)
    else:
        job.save(broken, iteration=2)
    with pytest.raises((StateError, RankFailedError), match="sparse"):
        job.save(tree, iteration=3)
    job.save(tree, iteration=4)
    optimizer.step()
    # A failure that only rank 1 knows of is told to all by the call after the next.
    with mock.patch.object(copying.Copier, "copy", side_effect=StagingError("no memory") if rank == 1 else None):
        job.save(tree, iteration=5)
        job.wait_staged(60)
    told = []
    for iteration in (6, 7, 8):
        try:
            job.save(tree, iteration=iteration)
        except BackgroundSaveError as error:
            told.append((iteration, error.iteration))
    assert told == [(7, 5)], told
    job.close(60)


def test_ranks_stay_in_step_when_one_fails(root: str) -> None:
    run_ranks(2, ranks_that_fail, root)
    found = sorted(path.parent.name for path in Path(root).glob("iter_*/metadata.json"))
    assert found == ["iter_0000001", "iter_0000004", "iter_0000006", "iter_0000008"]


def test_a_process_that_begins_anew_finds_its_memory_and_worker_and_waits_for_nobody(root: str, gate: Gate) -> None:
    """After the process group was rebuilt in the same process; the old checkpointer was never closed."""
    model, optimizer, _ = training()
    old = Checkpointer(root, run="run", io_mode="async", background=OVERLAPPED)
    gate.opened.set()
    old.save({"model": model, "optimizer": optimizer}, iteration=1).wait(60)
    worker = old._background.worker
    gate.opened.clear()
    gate.reached.clear()
    old.save({"model": model, "optimizer": optimizer}, iteration=2)
    assert gate.reached.wait(60)
    with Checkpointer(root, run="run", io_mode="async", background=OVERLAPPED) as job:
        started = time.monotonic()
        overlap.wait_for_copies()
        assert time.monotonic() - started < 30
        gate.opened.set()
        assert job.attempt == 2
        assert job._background.worker is worker
        job.save({"model": model, "optimizer": optimizer}, iteration=3).wait(60)
    with pytest.raises(BackgroundSaveError, match=r"iteration 2 .*aborted by settle"):
        old.close()
    assert Path(root, "iter_0000003/metadata.json").exists()
