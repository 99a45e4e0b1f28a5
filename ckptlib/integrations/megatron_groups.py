"""Parameter groups and step counts of Megatron-Core's optimizers: what of an optimizer is not per parameter.

Which parameters are in a group is stored nowhere, and neither is the order of groups a part of a checkpoint: a group is
known by its fields. Pure, but for the optimizer that is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ckptlib.errors import StateError

STRUCTURE = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""Fields of a parameter group that say which parameters are in it."""

SCHEDULE = ("max_lr", "min_lr", "start_wd", "end_wd", "optimizer")
"""Fields of a parameter group that a user may override; Megatron-Core tells groups apart by these too."""


def match_groups(own: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """For each parameter group of an optimizer, the stored one.

    The first of these that holds for exactly one counts: equal in `STRUCTURE` and `SCHEDULE`; equal in `STRUCTURE`: the
    schedule was changed, and the optimizer's own stays; equal but for ``is_expert_parallel``: experts were in an
    optimizer of their own and are no more, or the reverse.

    Raises:
        StateError: a group has no counterpart, or several.
    """
    return [_match(group, stored) for group in own]


def _match(group: Mapping[str, Any], stored: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    anywhere = tuple(name for name in STRUCTURE if name != "is_expert_parallel")
    levels = ((*STRUCTURE, *SCHEDULE), STRUCTURE, (*anywhere, *SCHEDULE), anywhere)
    found: list[Mapping[str, Any]] = []
    for level in levels:
        found = [other for other in stored if _fields(other, level) == _fields(group, level)]
        if len(found) == 1:
            return found[0]
        if found and all(_options(other) == _options(found[0]) for other in found):
            return found[0]
    fields = dict(zip(levels[0], _fields(group, levels[0]), strict=True))
    raise StateError(
        f"optimizer: {len(found) or 'none'} of the stored parameter groups {'fit' if found else 'fits'} the one with "
        f"{fields}; they have {[_fields(other, levels[0]) for other in stored]}"
    )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "is_expert_parallel")}


def _fields(group: Mapping[str, Any], names: Iterable[str]) -> tuple[Any, ...]:
    """NeMo writes ``pre_wd_mult`` for ``wd_mult``; an absent field and None are the same."""
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in names)


def set_groups(inner: Any, stored: Sequence[Mapping[str, Any]], step: float | None) -> None:
    """The options of the parameter groups, and the step."""
    per_parameter = steps_per_parameter(inner)
    for own, group in zip(inner.param_groups, match_groups(inner.param_groups, stored), strict=True):
        for name, value in group.items():
            if name not in ("params", "step", *STRUCTURE, *SCHEDULE):
                own[name] = own[name].fill_(value) if isinstance(own.get(name), torch.Tensor) else value
        if step is None:
            continue
        if not per_parameter:
            own["step"] = own["step"].fill_(int(step)) if isinstance(own.get("step"), torch.Tensor) else int(step)
            continue
        for main in own["params"]:
            kept = inner.state[main].get("step")
            if not isinstance(kept, torch.Tensor):
                on_device = own.get("capturable") or own.get("fused")
                kept = torch.zeros((), dtype=torch.float32, device=main.device if on_device else "cpu")
            inner.state[main]["step"] = kept.fill_(step)


def steps_per_parameter(optimizer: Any) -> bool:
    """torch counts steps per parameter, fused optimizers per group."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


def common_step(optimizer: Any) -> float | int:
    """How often it has stepped.

    Raises:
        StateError: parameters have different steps.
    """
    if steps_per_parameter(optimizer):
        steps = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
    else:
        steps = {int(group["step"]) for group in optimizer.param_groups if group.get("step") and group["params"]}
    if len(steps) > 1:
        raise StateError(f"optimizer: parameters have different steps {sorted(steps)}; Megatron-Core knows one")
    return next(iter(steps), 0)


def plain_number(value: Any) -> Any:
    """A learning rate that lies on a GPU is a number in the common state."""
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
