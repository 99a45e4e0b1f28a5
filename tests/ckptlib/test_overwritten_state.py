"""A state that is overwritten as soon as `save` returns is saved as it was: every kind of leaf, two saves in flight.

P05 (pytorch#144657): values of after the update. P18 (NeMo-RL#3312): later checkpoints are copies of the first.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as TorchShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckptlib import AsyncOptions, Checkpointer, ShardedTensor, background
from ckptlib.sharding import Box
from tests.support import overwritten
from tests.support.overwritten import Held, Make, held_tensors, noise
from tests.support.ranks import run_ranks
from tests.support.tilings import shapes
from tests.support.trees import assert_same
from tests.support.workers import workers_of

EXAMPLES = settings().max_examples // 6  # each has two saves and two loads


@dataclass(frozen=True)
class Job:
    checkpointer: Checkpointer
    iterations: Iterator[int]


@pytest.fixture(scope="module", params=["thread eager", "process eager", "thread overlapped"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One job for all examples: its arenas and its worker are used again and again, as in a training."""
    worker, staging = request.param.split()
    options = AsyncOptions(max_in_flight=2, worker=worker, staging=staging)
    root = tmp_path_factory.mktemp("overwritten") / "run"
    with Checkpointer(str(root), run="run", io_mode="async", background=options) as checkpointer:
        yield Job(checkpointer, itertools.count(1))


def kinds() -> st.SearchStrategy[Make]:
    plain = st.builds(
        overwritten.plain, st.sampled_from(overwritten.DTYPES), shapes(max_dims=3), st.sampled_from(overwritten.LAYOUTS)
    )
    others = [overwritten.expanded, overwritten.conjugated, overwritten.tied, overwritten.in_lists]
    others += [overwritten.values, overwritten.arrays, overwritten.cell, overwritten.stateful]
    return st.one_of(
        plain,
        st.sampled_from(others),
        st.builds(overwritten.shards, st.integers(1, 3)),
        st.builds(overwritten.flat_range, st.integers(0, 30)),
        st.builds(overwritten.factory, st.sampled_from(overwritten.FACTORIES)),
    )


@contextlib.contextmanager
def held_back(job: Job) -> Iterator[None]:
    """A worker that stands still, so that what is staged is written after all that happens meanwhile."""
    gate = threading.Event()
    written = background.write_package

    def late(*args: Any) -> Any:
        assert gate.wait(60)
        return written(*args)

    def release() -> None:
        gate.set()
        for worker in workers:
            worker.send_signal(signal.SIGCONT)

    workers = workers_of(os.getpid())
    for worker in workers:
        worker.send_signal(signal.SIGSTOP)
    try:
        with mock.patch.object(background, "write_package", late):
            yield
            release()
            assert job.checkpointer.drain(60)
    finally:
        release()


def state_of(held: list[Held]) -> dict[str, Any]:
    return {name: value for one in held for name, value in one.parts.items()}


def overwrite(held: list[Held], seed: int) -> None:
    for one in held:
        before = one.now()
        one.overwrite(seed)
        with contextlib.suppress(AssertionError):
            assert_same(one.now(), before)
            assert _is_empty(before), "the test overwrites nothing"


def _is_empty(content: Any) -> bool:
    """Also of a few bits: another seed may make the same ones."""
    return isinstance(content, list) and all(isinstance(x, torch.Tensor) and x.numel() < 8 for x in content)


@settings(max_examples=EXAMPLES)
@given(makes=st.lists(kinds(), min_size=1, max_size=6), stages=st.integers(0, 2))
def test_p05_p18_two_saves_in_flight_have_each_the_state_that_was_there(
    job: Job, makes: list[Make], stages: int
) -> None:
    if stages:
        makes = [*makes, overwritten.trained(stages)]
    held = [make(f"leaf{i}", 1001 + 2 * i) for i, make in enumerate(makes)]
    wanted: dict[int, tuple[list[Any], float]] = {}
    with held_back(job):
        for seed in (3, 5):
            iteration = next(job.iterations)
            torch.manual_seed(iteration)
            job.checkpointer.save(state_of(held), iteration=iteration)
            torch.manual_seed(iteration)
            wanted[iteration] = [one.now() for one in held], torch.rand(1).item()
            overwrite(held, seed * 1000)
    for iteration, (contents, drawn) in wanted.items():
        filled = [make(f"leaf{i}", 2 + 2 * i) for i, make in enumerate(makes)]
        job.checkpointer.restore(state_of(filled), at=iteration)
        assert torch.rand(1).item() == drawn
        for i, (one, content) in enumerate(zip(filled, contents, strict=True)):
            assert_same(one.now(), content, f"iteration {iteration}, leaf {i}")


def of_ranks(rank: int, seed: int) -> Held:
    """Everything that two ranks can hold together: shards of torch's and of ours, a sharded model and its AdamW."""
    mesh = init_device_mesh("cpu", (2,))
    own = seed + 100 * rank
    rows = distribute_tensor(noise(torch.bfloat16, (5, 4), seed), mesh, [Shard(0)])  # uneven: 3 and 2
    columns = distribute_tensor(noise(torch.float32, (3, 4), seed), mesh, [Shard(1)])
    everywhere = distribute_tensor(noise(torch.int64, (3,), seed), mesh, [Replicate()])
    shard = noise(torch.float32, (2, 3), own)
    old = init_from_local_shards([TorchShard.from_tensor_and_offsets(shard, [2 * rank, 0], rank)], 4, 3)
    ours, flat = noise(torch.float8_e5m2, (2, 2), own), noise(torch.float64, (7,), own)
    range_ = (0, 7) if rank == 0 else (7, 14)
    tensors: dict[str, Any] = {
        "rows": rows,
        "columns": columns.t(),
        "everywhere": everywhere,
        "old": old,
        "ours": ShardedTensor.from_rank_offsets("ours", ours, (1, rank, 2)),
        "flat": ShardedTensor.from_flat_range("flat", (7, 2), Box.whole((7, 2)), *range_, flat),
    }
    memory = [rows.to_local(), columns.to_local(), everywhere.to_local(), shard, ours, flat]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    fully_shard(model, mesh=mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(other: int) -> None:
        model(torch.randn(2, 3, generator=torch.Generator().manual_seed(other))).square().sum().backward()
        adam.step()

    train(seed)
    plain = held_tensors({"tensors": tensors, "model": model, "optimizer": adam}, memory)

    def now() -> Any:
        moments = [value for parameter in model.parameters() for value in adam.state[parameter].values()]
        trained = [*model.parameters(), *moments]
        local = [value.to_local() if isinstance(value, DTensor) else value for value in trained]
        return [*plain.now(), *(tensor.detach().clone() for tensor in local)]

    def overwrite(other: int) -> None:
        plain.overwrite(other)
        train(other)

    return Held(plain.parts, now, overwrite)


def save_and_overwrite(rank: int, root: str, worker: Any, staging: Any) -> None:
    options = AsyncOptions(max_in_flight=2, worker=worker, staging=staging)
    with Checkpointer(root, run="run", io_mode="async", background=options) as checkpointer:
        held = of_ranks(rank, 7)
        wanted = {}
        for iteration in range(1, 5):
            checkpointer.save(dict(held.parts), iteration=iteration)
            wanted[iteration] = held.now()
            held.overwrite(1000 * iteration)
        assert checkpointer.drain(60)
        for iteration, content in wanted.items():
            filled = of_ranks(rank, 8)
            checkpointer.restore(dict(filled.parts), at=iteration)
            assert_same(filled.now(), content, f"iteration {iteration} on rank {rank}")


@pytest.mark.parametrize("how", ["thread eager", "process eager", "thread overlapped"])
def test_p05_p18_shards_that_are_overwritten_are_saved_as_they_were(tmp_path: Path, how: str) -> None:
    run_ranks(2, save_and_overwrite, str(tmp_path / "run"), *how.split())
