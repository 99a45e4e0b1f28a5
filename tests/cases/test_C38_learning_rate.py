"""C38: the learning rate must not jump after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptlib import Checkpointer

STEPS = 20


def a_job() -> tuple[dict[str, object], torch.optim.lr_scheduler.LRScheduler]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], [5])
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}, scheduler


def one_step(state: dict[str, object], scheduler: torch.optim.lr_scheduler.LRScheduler) -> float:
    optimizer = state["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    used = optimizer.param_groups[0]["lr"]
    optimizer.step()
    scheduler.step()
    return float(used)


def test_c38_the_first_step_after_a_resume_has_the_rate_of_the_uninterrupted_run(tmp_path: Path) -> None:
    """The rate at the save is recorded, and what the restored optimizer says is compared with it."""
    state, scheduler = a_job()
    for _ in range(10):
        last = one_step(state, scheduler)
    (rate,) = scheduler.get_last_lr()
    Checkpointer(str(tmp_path), run="r").save(state, iteration=10, progress={"lr": rate})
    uninterrupted = [one_step(state, scheduler) for _ in range(STEPS - 10)]

    state, scheduler = a_job()
    restored = Checkpointer(str(tmp_path), run="r").restore(state)
    assert restored.progress["lr"] == rate != last
    assert scheduler.get_last_lr() == [rate]
    assert [one_step(state, scheduler) for _ in range(STEPS - 10)] == pytest.approx(uninterrupted, abs=0)
