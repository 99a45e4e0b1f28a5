"""How far a training is: what a state says of itself, and what is compared after a load (C38)."""

from __future__ import annotations

import copy
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ckptlib import Checkpointer
from ckptlib.errors import ProgressError, StateError
from ckptlib.events import Notice
from ckptlib.progress import check, check_names, numbers_of, observe, with_args


def an_optimizer(lr: float | torch.Tensor = 0.1) -> torch.optim.Optimizer:
    return torch.optim.AdamW(torch.nn.Linear(2, 1).parameters(), lr=lr)


class MegatronScheduler:
    """As Megatron-Core's `OptimizerParamScheduler`: a position in samples, and a rate that is made of it."""

    def __init__(self, optimizer: torch.optim.Optimizer, max_lr: float = 0.1) -> None:
        self.optimizer, self.max_lr, self.lr_decay_style, self.num_steps = optimizer, max_lr, "linear", 0
        self.step(0)

    def step(self, increment: int) -> None:
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.max_lr * (1 - self.num_steps / 1000)

    def state_dict(self) -> dict[str, Any]:
        return {"max_lr": self.max_lr, "lr_decay_style": self.lr_decay_style, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step(increment=state["num_steps"])  # as Megatron does: from wherever it is


class Sampler:
    def __init__(self, consumed_samples: int) -> None:
        self.consumed_samples = consumed_samples

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.consumed_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.consumed_samples = state["consumed"]


def test_a_state_says_its_rate_its_position_and_its_samples() -> None:
    optimizer = an_optimizer(0.5)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.step()
    scheduler.step()
    state = {"model": torch.nn.Linear(2, 1), "optim": [optimizer], "more": {"s": scheduler}, "data": Sampler(640)}
    expected = {"lr": 0.25, "scheduler_step": 1, "consumed_samples": 640}
    assert observe(state) == expected
    as_dicts = {"optim": optimizer.state_dict(), "s": scheduler.state_dict(), "consumed_samples": 640}
    assert observe(as_dicts) == expected


def test_every_kind_of_scheduler_and_rate_is_understood() -> None:
    optimizer = an_optimizer(torch.tensor(0.5))
    assert observe({"o": optimizer}) == {"lr": 0.5}
    made = [
        lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 1)], [5]
        ),
        lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(optimizer)], optimizer),
        lr_scheduler.ReduceLROnPlateau(optimizer),
        MegatronScheduler(an_optimizer()),
        MegatronScheduler(an_optimizer()).state_dict(),
    ]
    assert [observe({"s": scheduler}) for scheduler in made] == [{"scheduler_step": 0}] * 5


def test_what_merely_looks_alike_is_not_taken() -> None:
    state = {
        "num_steps": 3,
        "data": {"num_steps": 3, "last_epoch": 4, "lr": 0.1, "param_groups": []},
        "consumed_samples": True,
        "other": {"param_groups": [{"lr": "a lot"}]},
    }
    assert observe(state) == {}


def test_a_difference_is_an_error_that_names_both_numbers_unless_it_is_allowed() -> None:
    recorded, now = {"lr": 0.1, "scheduler_step": 7}, {"lr": 0.2, "scheduler_step": 7, "consumed_samples": 9}
    with pytest.raises(ProgressError, match=r"lr was 0\.1 at the save and is 0\.2 now") as caught:
        check(recorded, now, "here")
    assert caught.value.differences == {"lr": (0.1, 0.2)}
    assert check(recorded, now, "here", ["lr"]) == {"lr": (0.1, 0.2)}
    assert check({"lr": math.nan}, {"lr": math.nan}, "here") == {}
    assert check({"lr": 0.1}, {"lr": 0.1 + 1e-17}, "here") == {}


@pytest.mark.parametrize("names", ["lr", ["lr", "loss"]])
def test_only_what_is_compared_can_be_allowed(names: Any) -> None:
    with pytest.raises(StateError, match="out of lr, scheduler_step, consumed_samples"):
        check_names(names)


def test_consumed_samples_of_the_arguments_are_the_progress() -> None:
    assert with_args({"lr": 0.1}, Namespace(consumed_train_samples=64)) == {"lr": 0.1, "consumed_samples": 64}
    assert with_args({"consumed_samples": 64}, Namespace(consumed_train_samples=64)) == {"consumed_samples": 64}
    assert with_args({}, Namespace()) == with_args({}, None) == {}
    with pytest.raises(StateError, match=r"consumed_samples is 64, and args\.consumed_train_samples is 32"):
        with_args({"consumed_samples": 64}, Namespace(consumed_train_samples=32))


def test_numbers_of_numpy_and_torch_are_numbers_and_text_is_not() -> None:
    assert numbers_of("progress", {"a": torch.tensor(2), "b": 1.5}) == {"a": 2, "b": 1.5}
    for wrong in (True, "1", None):
        with pytest.raises(StateError, match="progress 'x'"):
            numbers_of("progress", {"x": wrong})


# --- through the facade -----------------------------------------------------------------------------------------------


def a_job(scheduler: type = MegatronScheduler) -> dict[str, Any]:
    optimizer = an_optimizer()
    return {"optimizer": optimizer, "opt_param_scheduler": scheduler(optimizer), "data": Sampler(0), "epoch": 0}


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A run that saved after 250 samples."""
    state = a_job()
    state["opt_param_scheduler"].step(250)
    state["data"].consumed_samples = 250
    state["epoch"] = 3
    Checkpointer(str(tmp_path), run="r").save(state, iteration=10)
    return str(tmp_path)


def test_what_the_state_says_is_recorded_without_being_asked_for(root: str) -> None:
    state = a_job()
    restored = Checkpointer(root, run="r").restore(state)
    assert restored.progress == pytest.approx({"lr": 0.075, "scheduler_step": 250, "consumed_samples": 250})
    assert (observe(state), state["epoch"]) == (restored.progress, 3)


def test_a_rate_that_the_trainer_calls_otherwise_is_recorded_as_it_says_and_compared_as_it_is(tmp_path: Path) -> None:
    """Many record the rate of the step that is done, and the state has that of the next."""
    Checkpointer(str(tmp_path), run="r").save(a_job(), iteration=10, progress={"lr": 77.0})
    assert Checkpointer(str(tmp_path), run="r").restore(a_job()).progress["lr"] == 77.0


def test_a_scheduler_that_is_stepped_twice_is_found(root: str) -> None:
    """slime#1547: it stood somewhere already, and the stored position is added."""
    state = a_job()
    state["opt_param_scheduler"].step(250)
    with pytest.raises(ProgressError) as caught:
        Checkpointer(root, run="r").restore(state)
    assert {name: pair[1] for name, pair in caught.value.differences.items()} == {
        "lr": pytest.approx(0.05),
        "scheduler_step": 500,
    }


def test_a_rate_that_was_changed_on_purpose_is_allowed_and_told(root: str) -> None:
    state = a_job()
    state["opt_param_scheduler"].max_lr = 1.0
    before = copy.copy(state)
    with pytest.raises(ProgressError, match="allow_changed=\\['lr'\\]"):
        Checkpointer(root, run="r").restore(before)
    events: list[Notice] = []
    state = a_job()
    state["opt_param_scheduler"].max_lr = 1.0
    Checkpointer(root, run="r", on_event=events.append).restore(state, allow_changed=["lr"])
    assert [(event.name, event.data["now"]) for event in events] == [("progress_changed", pytest.approx(0.75))]


def test_a_scheduler_that_is_left_out_beside_a_restored_optimizer_is_told(root: str) -> None:
    events: list[Notice] = []
    job = Checkpointer(root, run="r", on_event=events.append)
    job.restore(a_job(), contents=["optimizer", "data"])
    assert [(event.name, event.data["name"]) for event in events] == [("progress_not_restored", "scheduler_step")]
    events.clear()
    job.restore(a_job(), contents=["epoch"])
    assert events == [], "weights alone: nothing goes on"
