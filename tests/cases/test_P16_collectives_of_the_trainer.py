"""P16 (KempnerForge#104): background collectives of a checkpoint and a user's barrier share a process group.

P21 (radixark/Megatron-LM PR62, torchtitan PR31): gathering the plan over NCCL costs rank 0's GPU 24 GB.
"""

from __future__ import annotations

import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ckptlib
from ckptlib import AsyncOptions, Checkpointer, ShardedTensor
from tests.support.ranks import run_ranks

THREAD = AsyncOptions(max_in_flight=2, worker="thread")
"""In this process: a worker process of its own has no process group."""

COLLECTIVES = (
    "all_",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "reduce",
    "scatter",
    "send",
    "recv",
)


def state(rank: int, world: int) -> dict[str, object]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((2,), float(rank)), (0, rank, world)), "step": 1}


def save_beside_barriers(rank: int, folder: str) -> int:
    """Another thread of every rank runs barriers on the default group in a tight loop."""
    rounds = 0
    ended = threading.Event()

    def loop() -> None:
        nonlocal rounds
        going = torch.ones(1)
        while int(going):
            going = torch.tensor([0 if ended.is_set() else 1])
            dist.all_reduce(going, op=dist.ReduceOp.MIN)  # all leave in the same round
            rounds += 1

    thread = threading.Thread(target=loop)
    thread.start()
    for i in range(5):
        ckptlib.save(state(rank, 2), f"{folder}/{i}", iteration=i, timeout=30.0)
        ckptlib.load(state(rank, 2), f"{folder}/{i}", timeout=30.0)
    with Checkpointer(f"{folder}/run", run="run", io_mode="async", background=THREAD, timeout=30.0) as job:
        for i in range(5):
            job.save({"model": state(rank, 2)}, iteration=i)
            job.poll()
        job.save({"model": state(rank, 2)}, iteration=5).wait(30)
    ended.set()
    thread.join()
    return rounds


@pytest.mark.timeout(300)
def test_p16_saves_and_a_tight_loop_of_barriers_do_not_meet(tmp_path: Path) -> None:
    assert min(run_ranks(2, save_beside_barriers, str(tmp_path))) > 5


def save_without_collectives(rank: int, folder: str) -> int:
    """Every collective of torch.distributed raises, and so does every one of a process group itself."""
    patches = [
        mock.patch.object(module, name, side_effect=AssertionError(name))
        for module in (dist, dist.ProcessGroup)
        for name in dir(module)
        if name.startswith(COLLECTIVES) and callable(getattr(module, name))
    ]
    for patch in patches:
        patch.start()
    try:
        ckptlib.save(state(rank, 2), f"{folder}/bare", iteration=1)
        ckptlib.load(state(rank, 2), f"{folder}/bare")
        checkpointer = Checkpointer(f"{folder}/run", run="run")
        checkpointer.save({"model": state(rank, 2)}, iteration=1)
        checkpointer.restore({"model": state(rank, 2)})
        with Checkpointer(f"{folder}/async", run="run", io_mode="async", background=THREAD) as job:
            for i in range(3):
                job.save({"model": state(rank, 2)}, iteration=i)
                job.poll()
            assert job.drain(30)
    finally:
        for patch in patches:
            patch.stop()
    return len(patches)


@pytest.mark.timeout(300)
def test_p21_plans_and_decisions_travel_without_any_collective(tmp_path: Path) -> None:
    assert min(run_ranks(2, save_without_collectives, str(tmp_path))) > 15
