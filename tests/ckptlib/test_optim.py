"""Optimizers are saved by parameter name and fill fresh optimizers, whatever the order of their parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib.errors import KeyMismatchError, StateError
from ckptlib.state import flatten
from tests.support.trees import assert_same


class Model(torch.nn.Module):
    """Two layers; `tied` makes the output share the input's weight."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.outer = torch.nn.Linear(4, 4, bias=False)
        if tied:
            self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.norm(self.inner(x)))
        return out


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4, generator=generator)).square().sum().backward()
        optimizer.step()


def slots(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Any]:
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if optimizer.state.get(p)}


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: x for name, x in group.items() if name != "params"} for group in optimizer.param_groups]


def test_state_is_stored_under_the_parameters_names() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    keys = {leaf.key for leaf in flatten({"model": model, "optimizer": optimizer}).tensors}
    assert {"optimizer.state.inner.weight.exp_avg", "optimizer.state.norm.bias.step"} <= keys
    alone = {leaf.key for leaf in flatten({"optimizer": optimizer}).tensors}
    assert "optimizer.state.0.exp_avg" in alone  # no module gives it names


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=1e-2),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=1e-2),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), amsgrad=True),
        lambda p: torch.optim.LBFGS(p, lr=1e-2),
    ],
    ids=["adamw", "sgd without state", "sgd with momentum", "adagrad", "adamw with a tensor lr", "lbfgs untrained"],
)
def test_a_fresh_optimizer_gets_state_and_options_back(make: Any, tmp_path: Path) -> None:
    model = Model()
    optimizer = make(model.parameters())
    if not isinstance(optimizer, torch.optim.LBFGS):
        train(model, optimizer)
    ckptlib.save({"model": model, "optimizer": optimizer}, str(tmp_path / "it"), iteration=1)
    other = Model()
    fresh = make(other.parameters())
    fresh.param_groups[0]["lr"] = fresh.param_groups[0]["lr"] * 100
    ckptlib.load({"model": other, "optimizer": fresh}, str(tmp_path / "it"))
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(slots(fresh, other), slots(optimizer, model))
    assert_same(options(fresh), options(optimizer))
    if not isinstance(optimizer, torch.optim.LBFGS):
        train(model, optimizer, seed=1)
        train(other, fresh, seed=1)
        assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_parameters_in_another_order_and_other_groups_find_their_state_by_name(tmp_path: Path) -> None:
    model = Model()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    train(model, optimizer)
    ckptlib.save({"model": model, "optimizer": optimizer}, str(tmp_path / "it"), iteration=1)
    other = Model()
    decay, rest = ([p for p in other.parameters() if (p.dim() > 1) == wanted][::-1] for wanted in (True, False))
    fresh = torch.optim.AdamW([{"params": decay}, {"params": rest}])
    ckptlib.load({"model": other, "optimizer": fresh}, str(tmp_path / "it"))
    assert_same(slots(fresh, other), slots(optimizer, model))
    assert [group["weight_decay"] for group in fresh.param_groups] == [0.1, 0.0]


def test_tied_weights_have_one_optimizer_state_and_stay_tied(tmp_path: Path) -> None:
    model = Model(tied=True)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    ckptlib.save({"model": model, "optimizer": optimizer}, str(tmp_path / "it"), iteration=1)
    other = Model(tied=True)
    fresh = torch.optim.AdamW(other.parameters())
    ckptlib.load({"model": other, "optimizer": fresh}, str(tmp_path / "it"))
    assert other.outer.weight is other.inner.weight
    assert torch.equal(other.outer.weight, model.inner.weight)
    assert_same(slots(fresh, other), slots(optimizer, model))


def test_parameters_that_were_never_trained_have_no_state(tmp_path: Path) -> None:
    model = Model()
    model.outer.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    train(model, optimizer)
    ckptlib.save({"model": model, "optimizer": optimizer}, str(tmp_path / "it"), iteration=1)
    other = Model()
    other.outer.weight.requires_grad_(False)
    fresh = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad])
    ckptlib.load({"model": other, "optimizer": fresh}, str(tmp_path / "it"))
    assert {*slots(fresh, other)} == {"inner.weight", "inner.bias", "norm.weight", "norm.bias"}


def test_moments_of_another_precision_than_the_parameter_stay_exact(tmp_path: Path) -> None:
    model = Model().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        exact = torch.full(parameter.shape, 1 / 3)
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": exact, "exp_avg_sq": exact.clone()}
    ckptlib.save({"model": model, "optimizer": optimizer}, str(tmp_path / "it"), iteration=1)
    other = Model().bfloat16()
    fresh = torch.optim.AdamW(other.parameters())
    ckptlib.load({"model": other, "optimizer": fresh}, str(tmp_path / "it"))
    assert_same(slots(fresh, other), slots(optimizer, model))


def test_two_models_with_the_same_names_inside_are_told_apart(tmp_path: Path) -> None:
    generator, critic = Model(), Model()
    optimizer = torch.optim.AdamW([*generator.parameters(), *critic.parameters()])
    train(torch.nn.Sequential(generator, critic), optimizer)
    state = {"models": {"g": generator, "c": critic}, "optimizer": optimizer}
    assert "optimizer.state.models.g.inner.weight.exp_avg" in {leaf.key for leaf in flatten(state).tensors}
    ckptlib.save(state, str(tmp_path / "it"), iteration=1)
    one, two = Model(), Model()
    fresh = torch.optim.AdamW([*one.parameters(), *two.parameters()])
    ckptlib.load({"models": {"g": one, "c": two}, "optimizer": fresh}, str(tmp_path / "it"))
    assert_same(slots(fresh, one), slots(optimizer, generator))
    assert_same(slots(fresh, two), slots(optimizer, critic))


def test_a_parameter_whose_module_is_not_in_the_state_is_refused() -> None:
    model, stray = Model(), Model()
    optimizer = torch.optim.AdamW([*model.parameters(), *stray.parameters()])
    train(torch.nn.Sequential(model, stray), optimizer)
    with pytest.raises(StateError, match="optimizer: parameter 5 of the optimizer belongs to no module in this state"):
        flatten({"model": model, "optimizer": optimizer})


def test_another_number_of_groups_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """R4."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    ckptlib.save({"model": model, "optimizer": optimizer}, str(tmp_path / "it"), iteration=1)
    other = Model()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    parameters = list(other.parameters())
    fresh = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}])
    with pytest.raises(StateError, match="optimizer: the checkpoint has 1 parameter groups, the optimizer 2"):
        ckptlib.load({"model": other, "optimizer": fresh}, str(tmp_path / "it"))
    assert_same(dict(other.state_dict()), before)
    assert not fresh.state


def test_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """R4: the optimizer that asks is the one that is trained here."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    ckptlib.save({"model": model, "optimizer": optimizer}, str(tmp_path / "it"), iteration=1)
    other = torch.nn.Sequential(torch.nn.Linear(4, 4))
    fresh = torch.optim.AdamW(other.parameters())
    train(other, fresh)
    before = slots(fresh, other)
    with pytest.raises(KeyMismatchError) as caught:
        ckptlib.load({"model": other, "optimizer": fresh}, str(tmp_path / "it"))
    assert "model.0.weight" in caught.value.missing
    assert "optimizer.state.inner.weight.exp_avg" in caught.value.unexpected
    assert_same(slots(fresh, other), before)
