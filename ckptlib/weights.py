"""Weights without the rest of a training: which parts of a state they are, and what follows from loading them alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ckptlib.errors import StateError
from ckptlib.parts import ModelParts, OptimizerParts

_MODEL_NAME = re.compile(r"model\d*")
_TRAINING_STATE = re.compile(r"(?:chained_\d+\.)?(?:optimizer|opt_param_scheduler|lr_scheduler|scheduler)(?:[./].*)?")


def weights_of(parts: Mapping[str, Any], *, named: bool) -> dict[str, Any]:
    """The parts of a state that are weights: torch modules, and parts called ``model``, ``model0``, ``model1``, ...

    Args:
        named: `parts` are those that the caller named; all of them are weights then.

    Raises:
        StateError: there are none, or an optimizer was named.
    """
    if named:
        if optimizers := _optimizers(parts):
            raise StateError(f"finetune: contents names the optimizer {optimizers[0]!r}, and only weights are loaded")
        return dict(parts)
    weights = {
        name: part
        for name, part in parts.items()
        if isinstance(part, torch.nn.Module | ModelParts) or _MODEL_NAME.fullmatch(name)
    }
    if not weights:
        raise StateError(
            "finetune: no part of the state is a torch module or called 'model' (it has "
            f"{', '.join(map(repr, parts)) or 'none'}); name the weights: contents=[...]"
        )
    return weights


def is_training_state(key: str) -> bool:
    """Whether a stored key belongs to an optimizer or a scheduler, by the names that Megatron and torch give them."""
    return _TRAINING_STATE.fullmatch(key) is not None


def check_main_params(wanted: Mapping[str, Any]) -> None:
    """Refuses weights from an optimizer's main parameters beside that optimizer.

    Args:
        wanted: the parts that are loaded.

    Raises:
        StateError: an optimizer is one of them.
    """
    if optimizers := _optimizers(wanted):
        raise StateError(
            f"load_main_params: the optimizer is loaded too ({optimizers[0]!r}), and would make the weights from its "
            "main parameters itself. Leave it out of `contents`, or leave out load_main_params."
        )


def refresh_main_params(state: Mapping[str, Any], loaded: Collection[str]) -> None:
    """Has optimizers that were not loaded make their fp32 main parameters from the weights that were.

    The hook is Megatron-Core's name for it, ``reload_model_params()``; torch's own optimizers keep no second copy of a
    parameter, so that there is nothing to do for them.
    """
    for name, part in state.items():
        refresh = getattr(part, "reload_model_params", None)
        if name not in loaded and callable(refresh):
            refresh()


def _optimizers(parts: Mapping[str, Any]) -> list[str]:
    return [name for name, part in parts.items() if isinstance(part, torch.optim.Optimizer | OptimizerParts)]
