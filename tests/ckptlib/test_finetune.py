"""Restores of less than everything: weights alone for a new training, main parameters, another architecture refused."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptlib import Checkpointer, ShardedTensor
from ckptlib.errors import ArgsMismatchError, DtypeMismatchError, StateError
from tests.support.foreign import copy_of, subset

ARGS = Namespace(num_layers=1, hidden_size=4, num_attention_heads=2, vocab_size=11)


def job(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@pytest.fixture
def root(tmp_path: Path) -> str:
    root = str(tmp_path / "run")
    with Checkpointer(root, run="run") as checkpointer:
        checkpointer.save(job(1), iteration=10, args=ARGS, progress={"consumed_samples": 640})
    return root


def test_finetuning_takes_the_weights_and_nothing_else(root: str) -> None:
    state = job(2)
    moments = state["optimizer"].state[state["model"].weight]["exp_avg"].clone()
    notices: list[Any] = []
    with Checkpointer(root, run="run", on_event=notices.append) as checkpointer:
        restored = checkpointer.restore(state, finetune=True)
    assert (restored.found, restored.iteration, restored.source_iteration) == (True, 0, 10)
    assert restored.progress == {}
    assert "weights only" in restored.reason
    assert torch.equal(state["model"].weight, job(1)["model"].weight)
    assert torch.equal(state["optimizer"].state[state["model"].weight]["exp_avg"], moments)
    assert state["optimizer"].param_groups[0]["lr"] == 0.2
    assert notices == []


def test_finetuning_leaves_the_random_streams_alone(root: str) -> None:
    state = job(2)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    with Checkpointer(root, run="run") as checkpointer:
        checkpointer.restore(state, finetune=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_resume_says_the_same_iteration_twice(root: str) -> None:
    with Checkpointer(root, run="run") as checkpointer:
        restored = checkpointer.restore(job(1))
    assert (restored.iteration, restored.source_iteration) == (10, 10)


def test_a_restore_of_chosen_keys_leaves_the_rest_where_it_was(root: str) -> None:
    """The optimizer's rate is not the recorded one afterwards, and nobody said that it would be (C38)."""
    state = job(2)
    with Checkpointer(root, run="run") as checkpointer:
        restored = checkpointer.restore(state, keys=["model.*"])
        assert restored.iteration == 10
        assert torch.equal(state["model"].weight, job(1)["model"].weight)
        assert state["optimizer"].param_groups[0]["lr"] == 0.2
        half = {"net": torch.nn.Linear(4, 4).half()}
        report = checkpointer.restore(
            half, keys=["model.*"], rename={"net": "model"}, cast=True, strict="error", load_parallelism="dp"
        ).report
    assert torch.equal(half["net"].weight, job(1)["model"].weight.half())
    assert report is not None
    assert (report.missing, report.unexpected) == ([], [])


class Mixed:
    """An optimizer with fp32 main parameters, as Megatron-Core's: not part of what is loaded."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.main = {name: value.detach().float().clone() for name, value in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"main": self.main}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.main = state_dict["main"]

    def reload_model_params(self) -> None:
        self.main = {name: value.detach().float().clone() for name, value in self.model.named_parameters()}


@pytest.mark.parametrize("how", [{"finetune": True}, {"contents": ["model"]}], ids=["finetune", "contents"])
def test_main_parameters_are_made_anew_from_the_weights(root: str, how: dict[str, Any]) -> None:
    model = torch.nn.Linear(4, 4)
    state = {"model": model, "optimizer": Mixed(model)}
    with Checkpointer(root, run="run") as checkpointer:
        checkpointer.restore(state, **how)
    assert torch.equal(state["optimizer"].main["weight"], job(1)["model"].weight)


def test_finetuning_finds_weights_by_kind_by_name_or_as_told(root: str) -> None:
    with Checkpointer(root, run="run") as checkpointer:
        for name in ("model", "net"):
            state = {name: torch.nn.Linear(4, 4)}
            checkpointer.restore(state, finetune=True, strict="return", rename={name: "model"})
            assert torch.equal(state[name].weight, job(1)["model"].weight)
        plain = {"weights": {"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}}
        checkpointer.restore(plain, finetune=True, contents=["weights"], rename={"weights": "model"})
        assert torch.equal(plain["weights"]["weight"], job(1)["model"].weight)
        with pytest.raises(StateError, match="no part of the state is a torch module"):
            checkpointer.restore(plain, finetune=True)
        with pytest.raises(StateError, match="names the optimizer 'optimizer'"):
            checkpointer.restore(job(2), finetune=True, contents=["model", "optimizer"])


def test_another_architecture_is_refused_before_anything_is_read(root: str) -> None:
    """Also by the trainer of a rank that could load it: heads leave no trace in a shape."""
    state = job(2)
    before = state["model"].weight.detach().clone()
    with Checkpointer(root, run="run") as checkpointer:
        with pytest.raises(ArgsMismatchError, match="num_attention_heads is 2 in the checkpoint and 4 here"):
            checkpointer.restore(state, args=Namespace(**vars(ARGS) | {"num_attention_heads": 4}))
        assert torch.equal(state["model"].weight, before)
        assert checkpointer.restore(state, args=vars(ARGS)).iteration == 10


def test_a_foreign_checkpoints_arguments_are_compared_too(tmp_path: Path) -> None:
    """Before its tensors, of which nobody asks for any here."""
    fixture = next(fixture for fixture in subset() if fixture.format == "torch_dist")
    root = copy_of(fixture.name, tmp_path / "run").parent
    with (
        Checkpointer(str(root), run="run") as checkpointer,
        pytest.raises(ArgsMismatchError, match=r"num_layers is \d+ in the checkpoint and 99 here"),
    ):
        checkpointer.restore({}, args={"num_layers": 99}, contents=[], strict="return")


# --- main parameters of an optimizer ----------------------------------------------------------------------------------


@pytest.fixture
def megatron_like(tmp_path: Path) -> str:
    """bf16 weights, and the fp32 main parameters that they were rounded from, where Megatron-Core stores those."""
    root = str(tmp_path / "megatron")
    main = torch.linspace(0, 1, 12).reshape(3, 4)
    tensors = {
        "decoder.w": main.bfloat16(),
        "decoder.frozen": torch.ones(2).bfloat16(),
        "optimizer.state.param.decoder.w": main,
        "optimizer.state.exp_avg.decoder.w": main * 2,
    }
    state = {"all": [ShardedTensor.from_box(key, value, value.shape, (0,) * value.dim())
                     for key, value in tensors.items()]}  # fmt: skip
    with Checkpointer(root, run="m") as checkpointer:
        checkpointer.save(state, iteration=7)
    return root


def weights(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "model": [
            *(ShardedTensor.from_box("decoder.w", torch.zeros(1, 4, dtype=dtype), (3, 4), (i, 0)) for i in range(3)),
            ShardedTensor.from_box("decoder.frozen", torch.zeros(2).bfloat16(), (2,), (0,)),
        ]
    }


def test_weights_are_loaded_from_the_main_parameters(megatron_like: str) -> None:
    """Exactly in fp32; rounded in bf16, which the option allows by itself. What has none is loaded as it is."""
    main = torch.linspace(0, 1, 12).reshape(3, 4)
    with Checkpointer(megatron_like, run="m") as checkpointer:
        exact, rounded = weights(torch.float32), weights(torch.bfloat16)
        checkpointer.restore(exact, finetune=True, load_main_params=True)
        report = checkpointer.restore(rounded, finetune=True, load_main_params=True).report
    assert torch.equal(torch.cat([piece.data for piece in exact["model"][:3]]), main)
    assert torch.equal(torch.cat([piece.data for piece in rounded["model"][:3]]), main.bfloat16())
    assert torch.equal(exact["model"][3].data, torch.ones(2).bfloat16())
    assert report is not None
    assert report.cast == ["optimizer.state.param.decoder.w"]
    assert (report.missing, report.unexpected) == ([], [])


def test_main_parameters_beside_their_optimizer_are_a_contradiction(megatron_like: str, root: str) -> None:
    moment = ShardedTensor.from_box("optimizer.state.exp_avg.decoder.w", torch.zeros(3, 4), (3, 4), (0, 0))
    with Checkpointer(megatron_like, run="m") as checkpointer:
        with pytest.raises(StateError, match="the optimizer is loaded too"):
            checkpointer.restore(weights(torch.float32) | {"o": moment}, load_main_params=True)
        with pytest.raises(DtypeMismatchError, match=r"decoder\.w"):
            checkpointer.restore(weights(torch.float32), finetune=True)
    with Checkpointer(root, run="run") as checkpointer:
        with pytest.raises(StateError, match="the optimizer is loaded too"):
            checkpointer.restore(job(2), load_main_params=True)
        with pytest.raises(StateError, match="stores no main parameters"):
            checkpointer.restore(job(2), finetune=True, load_main_params=True)
