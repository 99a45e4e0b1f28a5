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

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ckptlib import factories
from ckptlib.errors import StateError, UnsupportedError
from ckptlib.integrations.megatron_groups import common_step, plain_number, set_groups, steps_per_parameter
from ckptlib.optim import StoredState
from ckptlib.sharding import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedTensor,
    ShardedTensorFactory,
    WholeValue,
)

FORM = "fully_reshardable"
"""What Megatron-Core calls model space (``param_state_sharding_type``)."""

Placed = ShardedTensor | ShardedTensorFactory

Made = list[tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Main parameters of which the optimizer had no moments yet, and the moments that were made."""

_MAIN = ("param", "fp32_param")
_GROUPS = ("optimizer", "param_groups")
_COMMON_NAME = re.compile(r"(?:(\d+)\.)?(optimizer|grad_scaler|param_state_sharding_type|param_groups|state)")
"""A plain value of an optimizer, or of one in a chain, in the common state."""


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

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all members, as the optimizer itself has them: where a restore looks for the learning rate."""
        return [group for member in self._members if not _is_stub(member) for group in member.optimizer.param_groups]

    def state_dict(self) -> dict[Any, Any]:
        """What is stored: sharded tensors and, for the common state, plain values."""
        return self._tensors() | self._values()

    def state_to_load(self, stored: StoredState, prefix: str) -> dict[Any, Any]:
        """What to fill from a checkpoint, whichever of the supported optimizers, or chain of them, wrote it.

        Tensors are asked for as they are needed: the experts' have the same names, whether one optimizer has them or,
        with expert parallelism, a second. Plain values are asked for as they are stored.
        """
        main = next((name for name in _MAIN if stored.tensors_below(f"optimizer.state.{name}")), None)
        found = [match.groups() for match in map(_COMMON_NAME.fullmatch, stored.objects_below(prefix)) if match]
        names = {name for _, name in found}
        lacking = (*(_GROUPS if names.isdisjoint(_GROUPS) else ()), *({"grad_scaler"} - names))
        # What is not stored at all is asked for in its own place: it is missing, and will be called so.
        found += [(place, name) for place, own in _places(self._values()) for name in own if name in lacking]
        wanted: dict[Any, Any] = self._tensors(main)
        for place, name in found:
            (wanted if place is None else wanted.setdefault(int(place), {}))[name] = WholeValue(None)
        return wanted

    def steady_parts(self) -> list[torch.optim.Optimizer]:
        """See `ckptlib.steady`."""
        return [member.optimizer for member in self._members if not _is_stub(member)]

    def reload_model_params(self) -> None:
        """Makes main parameters from the weights: `Checkpointer.restore` asks for it when it loaded weights alone."""
        for member in self._members:
            if not _is_stub(member):
                member.reload_model_params()

    def load_state_dict(self, state_dict: Mapping[Any, Any]) -> None:
        """Gives a filled `state_to_load`, or a `state_dict`, to the optimizer. Tensors are already in place.

        Raises:
            StateError: a parameter group of the optimizer has no counterpart in the checkpoint.
        """
        places = [values for _, values in _places(state_dict)]
        scaler = next((values["grad_scaler"].obj for values in places if "grad_scaler" in values), None)
        groups, step = _stored_groups(places)
        for member, made in zip(self._members, state_dict["made"].obj, strict=True):
            for main, moments in made:
                member.optimizer.state[main].update(moments)
            if getattr(member, "grad_scaler", None) and scaler is not None:
                member.grad_scaler.load_state_dict(scaler)
            if groups and not _is_stub(member):
                set_groups(member.optimizer, groups, step)

    def _values(self) -> dict[Any, Any]:
        """The plain values, of several optimizers by number."""
        values = [_common(member) for member in self._members]
        return values[0] if len(values) == 1 else dict(enumerate(values))

    def _tensors(self, main: str | None = None) -> dict[Any, Any]:
        """The sharded tensors, and the moments that were made for them: a load adopts these, a save drops them.

        Args:
            main: what stored main parameters are called; None: as each optimizer calls them.
        """
        by_parameter: dict[int, Placed] = {}
        for piece in self._placed():
            by_parameter.setdefault(id(piece.data), piece)
        made: list[Made] = [[] for _ in self._members]
        tensors = [
            [*_tensors_of(member, by_parameter, its, main)] for member, its in zip(self._members, made, strict=True)
        ]
        return {"param_state": tensors, "made": LocalNonpersistentObject(made)}


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


def _tensors_of(member: Any, by_parameter: Mapping[int, Placed], made: Made, main: str | None) -> Iterator[Placed]:
    if _is_stub(member):
        return iter(())
    if _is_distributed(member):
        return _ranges(member, by_parameter, made, main or "param")
    return _whole(member, by_parameter, made, main or "fp32_param")


def _common(member: Any) -> dict[str, Any]:
    """Parameter groups, without their members, and the rest of the plain values, where Megatron-Core reads them."""
    values: dict[str, Any] = {}
    if not _is_stub(member) and any(group["params"] for group in member.optimizer.param_groups):
        groups = [
            {name: plain_number(value) for name, value in group.items() if name != "params"}
            for group in member.optimizer.param_groups
        ]
        step = common_step(member.optimizer)
        state = {"common_step": torch.tensor(float(step))} if steps_per_parameter(member.optimizer) else {}
        if _is_distributed(member):
            values["optimizer"] = {"param_groups": [group | {"step": step} for group in groups]}
        elif hasattr(member, "fp32_from_float16_groups"):
            values["optimizer"] = {"state": state, "param_groups": groups}
        else:
            values |= {"state": state, "param_groups": groups}
    if _is_distributed(member):
        values["param_state_sharding_type"] = FORM
    if getattr(member, "grad_scaler", None):
        values["grad_scaler"] = member.grad_scaler.state_dict()
    return {name: WholeValue(value) for name, value in values.items()}


def _ranges(member: Any, by_parameter: Mapping[int, Placed], made: Made, main_name: str) -> Iterator[ShardedTensor]:
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
                    for name, tensor in {main_name: main, **_moments(member, main, made)}.items():
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


def _whole(member: Any, by_parameter: Mapping[int, Placed], made: Made, main_name: str) -> Iterator[Placed]:
    """Main parameters and moments of whole local parameters, placed like the parameters."""
    for parameter, main in _pairs(member):
        piece = _piece_of(parameter, by_parameter)
        own = {} if main is parameter else {main_name: main}  # an fp32 parameter is its own main parameter
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


def _moments(member: Any, main: torch.Tensor, made: Made) -> dict[str, torch.Tensor]:
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


def _places(state: Mapping[Any, Any]) -> Iterator[tuple[str | None, Mapping[str, WholeValue]]]:
    """(number in a chain or None, its plain values) for every place where there are any."""
    yield None, {name: value for name, value in state.items() if isinstance(value, WholeValue)}
    for name, values in state.items():
        if isinstance(name, int):
            yield str(name), values


def _stored_groups(places: Iterable[Mapping[str, WholeValue]]) -> tuple[list[Mapping[str, Any]], float | None]:
    """All parameter groups, and how often the optimizer had stepped."""
    groups: list[Mapping[str, Any]] = []
    steps: list[Any] = []
    for values in places:
        inner = values["optimizer"].obj or {} if "optimizer" in values else {}
        state = values["state"].obj if "state" in values else inner.get("state")
        own = values["param_groups"].obj if "param_groups" in values else inner.get("param_groups")
        groups += own or []
        steps += [(state or {}).get("common_step"), *(group.get("step") for group in own or [])]
    step = next((step for step in steps if step is not None), None)
    return groups, None if step is None else float(step)


def _is_stub(member: Any) -> bool:
    """Whether no parameter is trained here."""
    return member.optimizer is None or bool(getattr(member, "is_stub_optimizer", False))


def _is_distributed(member: Any) -> bool:
    return hasattr(member, "gbuf_ranges")


def _with_last(replica_id: ReplicaId, last: int) -> ReplicaId:
    """(pp, tp, dp) of a parameter, with another last part."""
    return last if isinstance(replica_id, int) else (*replica_id[:-1], last)
