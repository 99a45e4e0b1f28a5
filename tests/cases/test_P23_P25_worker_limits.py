"""What a worker process may cost a trainer: no descriptor per tensor, and no wait for a disk that does not answer.

P23 (xtuner PR1859): "received 0 items of ancdata", one descriptor for each shared tensor. P25 (nvrx PR373): one write
that hangs in the kernel holds up the training loop.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ckptlib
from ckptlib import AsyncOptions, Checkpointer, background
from ckptlib.events import Notice
from tests.support.ranks import run_ranks
from tests.support.workers import workers_of, workers_stopped


def save_many_tensors(rank: int, root: str) -> int:
    """With 256 descriptors for the trainer, and as many for its worker; what the trainer has open at the end."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    options = AsyncOptions(max_in_flight=2)
    with Checkpointer(root, run="run", io_mode="async", background=options) as job:
        for iteration in (1, 2, 3):
            tensors = {f"w{i}": torch.full((3,), float(i + iteration)) for i in range(2000)}
            job.save({"model": tensors}, iteration=iteration)
        assert job.drain(60)
        (worker,) = workers_of(os.getpid())
        assert worker.num_fds() < 32
        return len(os.listdir("/proc/self/fd"))


def test_p23_thousands_of_tensors_need_no_descriptor_each(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    (opened,) = run_ranks(1, save_many_tensors, root)
    assert opened < 64
    stored = ckptlib.read(f"{root}/iter_0000003")
    assert len(stored) == 2000
    assert all(stored[f"model.w{i}"].tolist() == [i + 3.0] * 3 for i in range(0, 2000, 97))


def train_while_blocked(job: Checkpointer) -> list[float]:
    """Seconds of each call of a loop that saves at every step; the first save is never written meanwhile."""
    state = {"model": {"w": torch.ones(1000)}}
    stalls = []
    for iteration in range(2, 12):
        started = time.perf_counter()
        job.save(state, iteration=iteration)
        job.poll()
        stalls.append(time.perf_counter() - started)
        state["model"]["w"] += 1
    return stalls


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_p25_a_write_that_hangs_costs_the_training_loop_nothing(tmp_path: Path, kind: Any) -> None:
    root, notices, gate = str(tmp_path / "run"), list[Notice](), threading.Event()
    options = AsyncOptions(worker=kind, at_limit="skip")
    written = background.write_package

    def hanging(*args: Any) -> Any:
        assert gate.wait(120)
        return written(*args)

    with Checkpointer(root, run="run", io_mode="async", background=options, on_event=notices.append) as job:
        job.save({"model": {"w": torch.zeros(1000)}}, iteration=0).wait(60)
        with (
            workers_stopped() if kind == "process" else mock.patch.object(background, "write_package", hanging),
        ):
            job.save({"model": {"w": torch.zeros(1000)}}, iteration=1)
            stalls = train_while_blocked(job)
            gate.set()
        assert job.drain(60)
    assert max(stalls) < 1.0
    skipped = [notice.data["iteration"] for notice in notices if notice.name == "save_skipped"]
    assert skipped == [*range(2, 12)]
    assert torch.equal(ckptlib.read(f"{root}/iter_0000001")["model.w"], torch.zeros(1000))
