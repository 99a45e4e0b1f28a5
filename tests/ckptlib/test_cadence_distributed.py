"""A run that is asked to leave: two real processes, a signal for one of them, and the checkpoint that both leave."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

import ckptlib
from tests.support.ranks import run_ranks


def train(rank: int, root: str) -> tuple[list[tuple[int, str]], str]:
    """The loop of the module's documentation. Rank 1 gets SIGUSR1 in the middle of step 5."""
    weight = torch.zeros(4)
    schedule = ckptlib.Schedule(save_interval=3, non_persistent_interval=2, exit_signals=("SIGUSR1",))
    saved: list[tuple[int, str]] = []
    checkpointer = ckptlib.Checkpointer(root, run="gpt", timeout=30.0)
    with ckptlib.ExitSignals(schedule.exit_signals) as signals:
        cadence = ckptlib.Cadence(schedule, signals=signals, timeout=30.0)
        reason = "it never left"
        for iteration in range(1, 100):
            weight += 1.0
            if (rank, iteration) == (1, 5):
                os.kill(os.getpid(), signal.SIGUSR1)
            dist.all_reduce(weight, op=dist.ReduceOp.MAX)
            action = cadence.should_save_now(iteration)
            if action.save:
                checkpointer.save({"weight": weight}, iteration=iteration, kind=action.save)
                saved.append((iteration, action.save))
            if action.exit:
                reason = action.reason
                break
    checkpointer.close()
    return saved, reason


def test_a_signal_for_one_rank_lets_all_save_and_leave_after_the_same_step(tmp_path: Path) -> None:
    first, second = run_ranks(2, train, str(tmp_path / "root"))
    assert first == second
    assert first == (
        [(2, "non_persistent_global"), (3, "persistent"), (4, "non_persistent_global"), (5, "persistent")],
        "SIGUSR1 on rank 1",
    )
    assert ckptlib.read(str(tmp_path / "root" / "iter_0000005"))["weight"].tolist() == [5.0] * 4
