"""Megatron-Core's optimizers in model space, each rank exactly its own bytes, without communication.

A ``DistributedOptimizer`` owns ranges of flattened parameters. Its own ``sharded_state_dict`` stores them as buckets,
which no other TP or PP can load, or gathers everything first (``fully_reshardable``). Here its range map is walked
instead, and each range becomes boxes of the parameter's global tensor: what is written is the ``fully_reshardable``
form, under its names, and any topology loads it.

Names on storage (``<key>``: the model's key), as Megatron-Core 0.15 and later has them:

=====================================  =================================================================
``DistributedOptimizer``               ``optimizer.state.{param,exp_avg,exp_avg_sq}.<key>``
``Float16OptimizerWithFloat16Params``  ``optimizer.state.{fp32_param,exp_avg,exp_avg_sq}.<key>``
``FP32Optimizer``                      ``optimizer.state.{exp_avg,exp_avg_sq}.<key>``
=====================================  =================================================================

The common state has the parameter groups (``step`` in them), the gradient scaler and the form's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ckptlib import factories
from ckptlib.errors import StateError, UnsupportedError
from ckptlib.sharding import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedTensor,
    ShardedTensorFactory,
    WholeValue,
)

FORM = "fully_reshardable"
"""What Megatron-Core calls model space (``param_state_sharding_type``)."""

STRUCTURE = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""Fields of a parameter group that say which parameters are in it."""

SCHEDULE = ("max_lr", "min_lr", "start_wd", "end_wd", "optimizer")
"""Fields of a parameter group that a user may override; Megatron-Core tells groups apart by these too."""

Placed = ShardedTensor | ShardedTensorFactory


class OptimizerState:
    """A Megatron-Core optimizer as a part of a state.

    Moments and main parameters are written from, and read into, the optimizer's own memory. An optimizer that has not
    stepped yet gets its moments when the state is loaded; saved, they are zeros.

    Args:
        optimizer: a ``DistributedOptimizer``, ``Float16OptimizerWithFloat16Params``, ``FP32Optimizer`` or a
            ``ChainedOptimizer`` of them.
        placed: gives the model's tensors and where they lie; `data` is the parameter itself.

    Raises:
        UnsupportedError: the optimizer keeps its state in another way.
    """

    def __init__(self, optimizer: Any, placed: Callable[[], Iterable[Placed]]) -> None:
        self._members = list(members(optimizer))
        self._placed = placed

    def state_dict(self) -> dict[Any, Any]:
        """What is stored: sharded tensors and, for the common state, plain values."""
        by_parameter: dict[int, Placed] = {}
        for piece in self._placed():
            by_parameter.setdefault(id(piece.data), piece)
        states = [_state_of(member, by_parameter) for member in self._members]
        return states[0] if len(states) == 1 else dict(enumerate(states))

    def load_state_dict(self, state_dict: Mapping[Any, Any]) -> None:
        """Gives a filled `state_dict` to the optimizer. Tensors are already in place.

        Raises:
            StateError: a parameter group of the optimizer has no counterpart in the checkpoint.
        """
        states = [state_dict] if len(self._members) == 1 else [state_dict[i] for i in range(len(self._members))]
        for member, state in zip(self._members, states, strict=True):
            _finish(member, state)


def members(optimizer: Any) -> Iterator[Any]:
    """The optimizers of a chain, or the one.

    Raises:
        UnsupportedError: one of them keeps its state in another way.
    """
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        names = {cls.__name__ for cls in (*type(optimizer).__mro__, *type(member).__mro__)}
        config = getattr(member, "config", None)
        reason = ""
        if "LayerWiseDistributedOptimizer" in names:
            reason = "each rank has whole parameters of its own"
        elif getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False):
            reason = "main parameters are inside the fused optimizer (use_precision_aware_optimizer)"
        elif getattr(getattr(member, "ddp_config", None), "use_megatron_fsdp", False):
            reason = "Megatron-FSDP holds its state as DTensors: save them as they are"
        elif hasattr(getattr(member, "optimizer", None), "sub_optimizers"):
            reason = "its state is spread over a CPU and a GPU optimizer (optimizer_cpu_offload)"
        elif not hasattr(member, "optimizer"):
            reason = "it wraps no torch optimizer"
        if reason:
            raise UnsupportedError(
                f"{type(member).__name__}: not supported: {reason}. Supported: DistributedOptimizer, "
                "Float16OptimizerWithFloat16Params, FP32Optimizer, and chains of them."
            )
        yield member


def content_metadata(optimizer: Any) -> dict[str, Any]:
    """What Megatron-LM asks a checkpoint before it loads an optimizer (``content_metadata`` of the common state)."""
    shared = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if optimizer is None or not any(_is_distributed(member) for member in members(optimizer)):
        return shared
    return {
        "distrib_optim_sharding_type": FORM,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        **shared,
    }


# --- what is stored ---------------------------------------------------------------------------------------------------


def _state_of(member: Any, by_parameter: Mapping[int, Placed]) -> dict[str, Any]:
    if member.optimizer is None or getattr(member, "is_stub_optimizer", False):
        return {}  # no parameter is trained here
    made: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
    if _is_distributed(member):
        tensors: list[Placed] = [*_ranges(member, by_parameter, made)]
        state: dict[str, Any] = {"param_state": tensors, "param_state_sharding_type": FORM}
    else:
        tensors = [*_whole(member, by_parameter, made)]
        state = {"tensors": tensors}
    # Made for this state only: a load adopts them, a save leaves the optimizer as it was.
    state["made"] = LocalNonpersistentObject(made)
    if tensors:
        state |= _common(member)
    if getattr(member, "grad_scaler", None):
        state["grad_scaler"] = WholeValue(member.grad_scaler.state_dict())
    return state


def _common(member: Any) -> dict[str, Any]:
    """The parameter groups, without their members, in the places where Megatron-Core reads them."""
    groups = [{k: _number(v) for k, v in g.items() if k != "params"} for g in member.optimizer.param_groups]
    step = _step(member.optimizer)
    if _is_distributed(member):
        return {"optimizer": WholeValue({"param_groups": [group | {"step": step} for group in groups]})}
    state = {} if not _steps_per_parameter(member.optimizer) else {"common_step": torch.tensor(float(step))}
    if hasattr(member, "fp32_from_float16_groups"):
        return {"optimizer": WholeValue({"state": state, "param_groups": groups})}
    return {"state": WholeValue(state), "param_groups": WholeValue(groups)}


def _ranges(
    member: Any,
    by_parameter: Mapping[int, Placed],
    made: list[tuple[torch.Tensor, dict[str, torch.Tensor]]],
) -> Iterator[ShardedTensor]:
    """The ranges that this rank owns, of main parameters and moments, as boxes of the parameters' global tensors."""
    mains = dict(_mains(member))
    for buffer in member.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    piece, main = _piece_of(parameter, by_parameter), mains[id(parameter)]
                    owned = ranges["param"]
                    # Of the data-parallel ranks only this one has the range; instances of the optimizer are copies.
                    replica_id = _with_last(piece.replica_id, member.distributed_optimizer_instance_id)
                    for name, tensor in {"param": main, **_moments(member, main, made)}.items():
                        key = f"optimizer.state.{name}.{piece.key}"
                        yield from _range_of(piece, key, owned.start, owned.end, tensor, replica_id)


def _range_of(
    piece: Placed, key: str, start: int, stop: int, data: torch.Tensor, replica_id: ReplicaId
) -> list[ShardedTensor]:
    if isinstance(piece, ShardedTensorFactory):
        return factories.flat_range(piece, start, stop, data.detach(), key=key, replica_id=replica_id)
    return ShardedTensor.from_flat_range(
        key,
        piece.global_shape,
        piece.box,
        start,
        stop,
        data.detach(),
        replica_id=replica_id,
        allow_shape_mismatch=piece.allow_shape_mismatch,
    )


def _whole(
    member: Any,
    by_parameter: Mapping[int, Placed],
    made: list[tuple[torch.Tensor, dict[str, torch.Tensor]]],
) -> Iterator[Placed]:
    """Main parameters and moments of whole local parameters, placed like the parameters."""
    for parameter, main in _pairs(member):
        piece = _piece_of(parameter, by_parameter)
        own = {} if main is parameter else {"fp32_param": main}  # an fp32 parameter is its own main parameter
        for name, tensor in {**own, **_moments(member, main, made)}.items():
            yield replace(piece, key=f"optimizer.state.{name}.{piece.key}", data=tensor)


def _pairs(member: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter of the model, what the inner optimizer steps in its place), for optimizers of whole parameters."""
    if hasattr(member, "fp32_from_float16_groups"):
        for group, mains in zip(member.float16_groups, member.fp32_from_float16_groups, strict=True):
            yield from zip(group, mains, strict=True)
        for group in member.fp32_from_fp32_groups:
            yield from ((parameter, parameter) for parameter in group)
        return
    for options in member.optimizer.param_groups:
        yield from ((parameter, parameter) for parameter in options["params"])


def _mains(member: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """id of a parameter of the model -> the part of its main parameter that this rank owns, for a distributed one."""
    for models, mains in (
        (member.model_float16_groups, member.shard_fp32_from_float16_groups),
        (member.model_fp32_groups, member.shard_fp32_groups),
    ):
        for group, shards in zip(models, mains, strict=True):
            yield from ((id(parameter), shard) for parameter, shard in zip(group, shards, strict=True))


def _moments(
    member: Any, main: torch.Tensor, made: list[tuple[torch.Tensor, dict[str, torch.Tensor]]]
) -> dict[str, torch.Tensor]:
    """The optimizer's tensors that are shaped like a main parameter; zeros, noted in `made`, where it has none yet."""
    state = member.optimizer.state.get(main, {})
    found = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and _alike(value, main)}
    if not found:
        names = getattr(member, "optimizer_state_keys", _state_keys(member.optimizer))
        found = {name: torch.zeros_like(main, dtype=torch.float32, requires_grad=False) for name in names}
        made.append((main, found))
    return found


def _state_keys(optimizer: Any) -> tuple[str, ...]:
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if optimizer.defaults["momentum"] else ()
    return ("exp_avg", "exp_avg_sq")


def _alike(value: torch.Tensor, main: torch.Tensor) -> bool:
    return value.shape == main.shape and (value.dim() > 0 or main.dim() == 0)


def _piece_of(parameter: torch.Tensor, by_parameter: Mapping[int, Placed]) -> Placed:
    try:
        return by_parameter[id(parameter)]
    except KeyError:
        raise StateError(
            f"optimizer: its parameter of shape {tuple(parameter.shape)} is not in the model's sharded_state_dict(). "
            "Give the model that it trains, whose state must hold parameters themselves (keep_vars=True)."
        ) from None


# --- after a load -----------------------------------------------------------------------------------------------------


def _finish(member: Any, state: Mapping[str, Any]) -> None:
    """Moments that were made, the step, options of the parameter groups, the gradient scaler."""
    if not state:
        return
    inner = member.optimizer
    for main, moments in state["made"].obj:
        inner.state[main].update(moments)
    if "grad_scaler" in state:
        member.grad_scaler.load_state_dict(state["grad_scaler"].obj)
    if not (state.get("param_state") or state.get("tensors")):
        return
    if "optimizer" in state:
        common = state["optimizer"].obj
        stored, step = common["param_groups"], common.get("state", {}).get("common_step")
    else:
        stored, step = state["param_groups"].obj, state["state"].obj.get("common_step")
    groups = match_groups(inner.param_groups, stored)
    if step is None:
        step = next((group["step"] for group in stored if group.get("step") is not None), None)
    per_parameter = _steps_per_parameter(inner)
    for own, group in zip(inner.param_groups, groups, strict=True):
        for name, value in group.items():
            if name not in ("params", "step", *STRUCTURE, *SCHEDULE):
                own[name] = own[name].fill_(value) if isinstance(own.get(name), torch.Tensor) else value
        if step is not None and not per_parameter:
            own["step"] = own["step"].fill_(int(step)) if isinstance(own.get("step"), torch.Tensor) else int(step)
    if step is not None and per_parameter:
        for group in inner.param_groups:
            for main in group["params"]:
                on_device = group.get("capturable") or group.get("fused")
                kept = inner.state[main].get("step")
                if not isinstance(kept, torch.Tensor):
                    kept = torch.zeros((), dtype=torch.float32, device=main.device if on_device else "cpu")
                inner.state[main]["step"] = kept.fill_(float(step))


def match_groups(own: list[dict[str, Any]], stored: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """For each parameter group of an optimizer, the stored one.

    Their order is not part of a checkpoint: Megatron-Core compares fields. Groups are equal in `STRUCTURE` and
    `SCHEDULE`, or in `STRUCTURE` alone where that is enough to tell them apart: then the schedule was changed, and the
    optimizer's own stays.

    Raises:
        StateError: a group has no counterpart, or several.
    """
    found = []
    for group in own:
        alike = [other for other in stored if _fields(other, STRUCTURE) == _fields(group, STRUCTURE)]
        same = [other for other in alike if _fields(other, SCHEDULE) == _fields(group, SCHEDULE)]
        candidates = same or alike
        if len(candidates) != 1:
            fields = dict(zip((*STRUCTURE, *SCHEDULE), _fields(group, (*STRUCTURE, *SCHEDULE)), strict=True))
            raise StateError(
                f"optimizer: {len(candidates)} stored parameter groups fit the one with {fields}; there are "
                f"{[_fields(other, (*STRUCTURE, *SCHEDULE)) for other in stored]}"
            )
        found.append(candidates[0])
    return found


def _fields(group: Mapping[str, Any], names: Iterable[str]) -> tuple[Any, ...]:
    """NeMo writes ``pre_wd_mult`` for ``wd_mult``; an absent field and None are the same."""
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in names)


def _is_distributed(member: Any) -> bool:
    return hasattr(member, "gbuf_ranges")


def _steps_per_parameter(optimizer: Any) -> bool:
    """torch counts steps per parameter, fused optimizers per group."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


def _step(optimizer: Any) -> float | int:
    """How often it has stepped.

    Raises:
        StateError: parameters have different steps.
    """
    if _steps_per_parameter(optimizer):
        steps = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
    else:
        steps = {int(group["step"]) for group in optimizer.param_groups if group.get("step") and group["params"]}
    if len(steps) > 1:
        raise StateError(f"optimizer: parameters have different steps {sorted(steps)}; Megatron-Core knows one")
    return next(iter(steps), 0)


def _number(value: Any) -> Any:
    """A learning rate that lies on a GPU is a number in the common state."""
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def _with_last(replica_id: ReplicaId, last: int) -> ReplicaId:
    """(pp, tp, dp) of a parameter, with another last part."""
    return last if isinstance(replica_id, int) else (*replica_id[:-1], last)
