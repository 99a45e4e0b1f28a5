"""Torch optimizers by parameter name.

``Optimizer.state_dict`` numbers parameters by their order in the process, which says nothing on another topology.
Here the state of a parameter stands under the parameter's name, in the layout of
`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`:
``{"state": {name: {"exp_avg": …}}, "param_groups": [{…, "params": [name, …]}]}``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from ckptlib.errors import StateError

Names = Mapping[int, tuple[str, str]]
"""id(parameter) -> its name inside its module, and the same with the module's place in the state before it."""


class StoredState(Protocol):
    """What a checkpoint holds: the optimizer state to prepare for (see `skeleton`)."""

    def tensors_below(self, prefix: str) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Tensors whose key starts with ``prefix + "."``: rest of the key -> dtype, global shape."""

    def objects_below(self, prefix: str) -> Collection[str]:
        """Plain values whose key starts with ``prefix + "."``: rests of the keys."""


def named_state(optimizers: Sequence[torch.optim.Optimizer], names: Names, prefix: str) -> dict[str, Any]:
    """The state of optimizers by parameter name. Tensors are the optimizers' own, not copies.

    Raises:
        StateError: a parameter has no name (its module is not part of the state) while others have one; or the groups
            of several optimizers have other options.
    """
    name_of = _namer(optimizers, names, prefix)
    return {
        "state": {
            name_of(parameter): dict(optimizer.state[parameter])
            for optimizer in optimizers
            for parameter in _parameters(optimizer)
            if optimizer.state.get(parameter)
        },
        "param_groups": merge_groups(
            [
                [{**group, "params": [name_of(p) for p in group["params"]]} for group in optimizer.param_groups]
                for optimizer in optimizers
            ],
            prefix,
        ),
    }


def merge_groups(parts: Sequence[Sequence[Mapping[str, Any]]], prefix: str) -> list[dict[str, Any]]:
    """The parameter groups of several optimizers as those of one: matched by position, members one after the other.

    Raises:
        StateError: the optimizers have another number of groups, or other options for a group.
    """
    if not parts:
        return []
    merged = [dict(group) for group in parts[0]]
    for number, groups in enumerate(parts[1:], 1):
        if len(groups) != len(merged):
            raise StateError(
                f"{prefix}: part 0 has {len(merged)} parameter groups, part {number} has {len(groups)}; parts are made "
                "alike, a group without members in one of them is empty there"
            )
        for i, (one, other) in enumerate(zip(merged, groups, strict=True)):
            for option in sorted({*one, *other} - {"params"}):
                if option not in one or option not in other or not _same(one[option], other[option]):
                    raise StateError(
                        f"{prefix}: group {i} has {option} = {one.get(option)!r} in part 0, {other.get(option)!r} in "
                        f"part {number}; one option is stored for all of them"
                    )
            merged[i] = {**one, "params": [*one["params"], *other["params"]]}
    return merged


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


def skeleton(
    optimizers: Sequence[torch.optim.Optimizer], names: Names, prefix: str, stored: StoredState
) -> dict[str, Any]:
    """A state to load into: what the optimizers have, and for parameters without state, what the checkpoint has.

    A moment whose global shape is the parameter's is laid out like the parameter (a DTensor when that is one);
    anything else (``step``) is a whole tensor. Parameter groups are matched by position and ask for the options that
    are stored, so that one which a newer torch adds keeps its own value.

    Raises:
        StateError: the checkpoint has another number of parameter groups.
    """
    state = named_state(optimizers, names, prefix)
    name_of = _namer(optimizers, names, prefix)
    for parameter in (p for optimizer in optimizers for p in _parameters(optimizer)):
        name = name_of(parameter)
        if name in state["state"]:
            continue
        made = _slots(stored, f"{prefix}.state.{name}", parameter)
        if made:
            state["state"][name] = made
    groups = _stored_groups(stored, f"{prefix}.param_groups")
    if groups and len(groups) != len(state["param_groups"]):
        raise StateError(
            f"{prefix}: the checkpoint has {len(groups)} parameter groups, the optimizer {len(state['param_groups'])}"
        )
    return state | ({"param_groups": groups} if groups else {})


def load_named_state(
    optimizers: Sequence[torch.optim.Optimizer], names: Names, state: Mapping[str, Any], prefix: str
) -> None:
    """Gives a filled `skeleton` to the optimizers.

    Options of the groups come from the checkpoint, the members stay the optimizer's.
    """
    name_of = _namer(optimizers, names, prefix)
    for optimizer in optimizers:
        parameters = _parameters(optimizer)
        numbers = {name_of(parameter): i for i, parameter in enumerate(parameters)}
        numbered_groups = [
            {**own, **group, "params": [numbers[name_of(parameter)] for parameter in own["params"]]}
            for own, group in zip(optimizer.param_groups, state["param_groups"], strict=True)
        ]
        slots = {numbers[name]: dict(slots) for name, slots in state["state"].items() if name in numbers}
        load_numbered_state(optimizer, {"state": slots, "param_groups": numbered_groups})


def load_numbered_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """`load_state_dict`, exactly: torch casts moments to the parameter's dtype; one kept in another precision stays."""
    optimizer.load_state_dict(dict(state))
    parameters = _parameters(optimizer)
    for number, stored in state["state"].items():
        for slot, value in stored.items():
            held = optimizer.state[parameters[number]][slot]
            if isinstance(value, torch.Tensor) and held.dtype != value.dtype:
                optimizer.state[parameters[number]][slot] = value.to(held.device)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _slots(stored: StoredState, prefix: str, parameter: torch.Tensor) -> dict[str, Any]:
    """Places for what is stored below a prefix; a value that is loaded replaces its None."""
    made: dict[str, Any] = {slot: None for slot in stored.objects_below(prefix) if "." not in slot}
    return made | {
        slot: _like(parameter, dtype, shape)
        for slot, (dtype, shape) in stored.tensors_below(prefix).items()
        if "." not in slot
    }


def _stored_groups(stored: StoredState, prefix: str) -> list[dict[str, Any]]:
    rests = {*stored.objects_below(prefix), *stored.tensors_below(prefix)}
    count = 1 + max(
        (int(number) for number in (rest.partition(".")[0] for rest in rests) if number.isdecimal()), default=-1
    )
    anywhere = torch.empty(())
    return [_slots(stored, f"{prefix}.{i}", anywhere) for i in range(count)]


def _like(parameter: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(parameter.shape) == shape and shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device=parameter.device if shape else "cpu")


def _namer(optimizers: Sequence[torch.optim.Optimizer], names: Names, prefix: str) -> Callable[[torch.Tensor], str]:
    """Names parameters: by their module's names, or by number when the state holds no module for any of them."""
    parameters = [p for optimizer in optimizers for p in _parameters(optimizer)]
    if any(getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False) for p in parameters):
        raise StateError(
            f"{prefix}: its parameters are pieces of FSDP1's flat parameters, which know no rows. Put "
            "FSDP.optim_state_dict(model, optimizer) in its place, and load through FSDP.optim_state_dict_to_load"
        )
    unknown = [i for i, p in enumerate(parameters) if id(p) not in names]
    if unknown and len(unknown) < len(parameters):
        raise StateError(
            f"{prefix}: parameter {unknown[0]} of the optimizer belongs to no module in this state, others do. "
            "Put every module whose parameters it trains into the state."
        )
    if unknown:
        numbers = {id(p): str(i) for i, p in enumerate(parameters)}
        return lambda parameter: numbers[id(parameter)]
    short = {names[id(p)][0] for p in parameters}
    which = 0 if len(short) == len(parameters) else 1  # several modules that use the same names inside
    return lambda parameter: names[id(parameter)][which]
