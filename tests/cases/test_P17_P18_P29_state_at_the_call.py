"""What an asynchronous save holds is the state at its call, whatever becomes of it before it is written.

P17 (KempnerForge#102): `latest` moves before the save is durable. P18 (NeMo-RL#3312): every later checkpoint is a copy
of the first. P29 (Megatron-Bridge#3267): the tracker records a later step. The worker stands still meanwhile.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ckptlib
from ckptlib import AsyncOptions, Checkpointer
from tests.support.ranks import context
from tests.support.roots import newest, states, tracker
from tests.support.workers import workers_of, workers_stopped


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpointer]:
    """One worker process for all tests: each takes seconds to start."""
    options = AsyncOptions(max_in_flight=3)
    root = str(tmp_path_factory.mktemp("state") / "run")
    with Checkpointer(root, run="run", io_mode="async", background=options) as checkpointer:
        checkpointer.prepare(1 << 16)
        yield checkpointer


def test_p18_new_memory_at_every_save_is_what_that_save_holds(job: Checkpointer) -> None:
    old = []
    with workers_stopped():
        for iteration in range(3):
            state = {"model": {"w": torch.full((1000,), float(iteration))}}
            old.append(state["model"]["w"])  # so that the allocator cannot use its memory again
            job.save(state, iteration=iteration)
        assert len({tensor.data_ptr() for tensor in old}) == 3
    assert job.drain(60)
    for iteration in range(3):
        stored = ckptlib.read(f"{job.root}/iter_{iteration:07d}")["model.w"]
        assert torch.equal(stored, torch.full((1000,), float(iteration)))


def test_p29_the_record_the_common_state_and_the_tracker_have_the_step_of_the_call(job: Checkpointer) -> None:
    progress, metrics = {"consumed_samples": 80.0}, {"loss": 2.0}
    args = argparse.Namespace(lr=0.5, betas=[0.9, 0.95])
    state: dict[str, Any] = {"model": {"w": torch.ones(2)}, "history": [1, [2]], "iteration_of_mine": 10}
    with workers_stopped():
        job.save(state, iteration=10, progress=progress, metrics=metrics, args=args)
        progress["consumed_samples"], metrics["loss"] = 88.0, 0.0
        args.lr = 0.25
        args.betas.append(0.0)
        state["history"][1].append(3)
        state["iteration_of_mine"] = 11
        state["model"]["w"].fill_(99.0)
    assert job.drain(60)
    url = f"{job.root}/iter_0000010"
    begin = ckptlib.inspect(url).manifest.begin
    assert (begin.iteration, begin.progress["consumed_samples"], begin.metrics["loss"]) == (10, 80, 2.0)
    assert tracker(job.root) == "10"
    target: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "history": None, "iteration_of_mine": None, "args": None}
    ckptlib.load(target, url, strict="return")
    assert target["history"] == [1, [2]]
    assert target["iteration_of_mine"] == 10
    assert (target["args"].lr, target["args"].betas) == (0.5, [0.9, 0.95])
    assert torch.equal(target["model"]["w"], torch.ones(2))


def stop_with_a_save_in_flight(root: str) -> None:
    """The worker stands still when the second save is handed over, and so does the trainer after it."""
    job = Checkpointer(root, run="run", io_mode="async")
    job.save({"model": {"w": torch.full((4,), 1.0)}}, iteration=100).wait(60)
    (worker,) = workers_of(os.getpid())
    worker.send_signal(signal.SIGSTOP)
    job.save({"model": {"w": torch.full((4,), 2.0)}}, iteration=200)
    # Both at once: a trainer that lives longer hands what it has staged to another worker.
    os.kill(os.getpid(), signal.SIGSTOP)


def test_p17_latest_loads_when_everything_is_killed_between_dispatch_and_finish(root: str) -> None:
    trainer = context.Process(target=stop_with_a_save_in_flight, args=(root,), daemon=True)
    trainer.start()
    try:
        process = psutil.Process(trainer.pid)
        deadline = time.monotonic() + 60
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (worker,) = workers_of(process.pid)
    finally:
        trainer.kill()
        trainer.join(10)
    worker.kill()
    assert tracker(root) == "100"
    assert newest(root) == (1, 100)
    target = {"model": {"w": torch.zeros(4)}}
    with Checkpointer(root, run="run", settle_wait=0) as job:  # nobody is left to wait for
        assert job.restore(target).iteration == 100
    assert torch.equal(target["model"]["w"], torch.ones(4))
    assert states(root) == {"iter_0000100": ["committed"], "iter_0000200": ["aborted"]}
