"""Megatron-Core's models and optimizers as parts of a ckptlib state, saved and restored in place.

::

    from ckptlib.integrations.megatron import megatron_state

    state = megatron_state(model, optimizer, opt_param_scheduler)      # on every rank, once
    with ckptlib.Checkpointer(root, run="gpt-8b", topology=ckptlib.Topology(tp=4, pp=2, dp=8)) as checkpointer:
        restored = checkpointer.restore(state, missing="start")
        ...
        checkpointer.save(state, iteration=iteration, args=args, progress={"consumed_samples": consumed})

What is written, Megatron-Core itself loads: weights as its ``sharded_state_dict()`` places them, optimizer state as its
``fully_reshardable`` form (`ckptlib.integrations.megatron_optimizer`), the rest in the common state. What
Megatron-Core saved in these forms is loaded here, at any TP, PP, EP and DP.

Megatron-Core is never imported: its wrappers are known by their attributes, so that any release, or none, will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ckptlib.errors import StateError, UnsupportedError
from ckptlib.integrations.megatron_optimizer import OptimizerState, content_metadata
from ckptlib.sharding import (
    Box,
    LocalNonpersistentObject,
    ReplicaId,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    WholeValue,
)

__all__ = ["ModelState", "megatron_state", "to_ckptlib", "to_state_dict"]

_TENSOR = ("key", "data", "dtype", "local_shape", "global_shape", "global_offset", "prepend_axis_num")
_FACTORY = ("key", "data", "build_fn", "merge_fn", "replica_id")
_OBJECT = ("key", "data", "global_shape", "global_offset", "replica_id", "unique_key")
_LOCAL = ("obj", "unwrap")

_OURS = (ShardedTensor, ShardedTensorFactory, ShardedObject, LocalNonpersistentObject, WholeValue)
_AS_IS = (*_OURS, torch.Tensor, torch.nn.Module)


def to_ckptlib(sharded_state_dict: Any, *, device: str | torch.device = "cpu") -> Any:
    """A Megatron-Core sharded state dict as a ckptlib state: the same nesting, our wrappers, the same memory.

    It can be saved, and loaded in place; `to_state_dict` then gives what ``model.load_state_dict`` takes::

        tree = {"model": to_ckptlib(model.sharded_state_dict())}
        ckptlib.load(tree, url)
        model.load_state_dict(to_state_dict(tree["model"]))

    Args:
        sharded_state_dict: nested dicts and lists of Megatron-Core's ``ShardedTensor``, ``ShardedObject``,
            ``ShardedTensorFactory`` and ``LocalNonpersistentObject``; anything else is left as it is.
        device: where tensors are made for ``ShardedTensor`` without data, such as a skeleton for a load; they are put
            into the given ``ShardedTensor`` too (its ``init_data``), and are zero until they are loaded.

    Raises:
        StateError: a factory has no data.
        UnsupportedError: a wrapper that is none of these.
    """
    value = sharded_state_dict
    if isinstance(value, _AS_IS):
        return value
    if isinstance(value, Mapping):
        return {name: to_ckptlib(part, device=device) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_ckptlib(part, device=device) for part in value] if _holds_wrappers(value) else value
    if _has(value, _TENSOR):
        return _tensor(value, device)
    if _has(value, _FACTORY):
        return _factory(value, device)
    if _has(value, _OBJECT):
        return ShardedObject(value.key, value.data, value.global_shape, value.global_offset, value.replica_id)
    if _has(value, _LOCAL):
        return LocalNonpersistentObject(value.obj)
    if _is_wrapper(value):
        raise UnsupportedError(f"{type(value).__module__}.{type(value).__qualname__}: unknown to this version")
    return value


def to_state_dict(state: Any) -> Any:
    """A ckptlib state without its wrappers: nested dicts and lists of the tensors and values in them."""
    match state:
        case ShardedTensor() | ShardedTensorFactory() | ShardedObject():
            return state.data
        case LocalNonpersistentObject() | WholeValue():
            return state.obj
        case Mapping():
            return {name: to_state_dict(part) for name, part in state.items()}
        case list() | tuple() if not hasattr(state, "_fields"):
            return type(state)(to_state_dict(part) for part in state)
        case _:
            return state


class ModelState:
    """A Megatron-Core model, or its virtual pipeline chunks, as a part of a state: anything with `state_dict`.

    Weights are written from, and read into, the model's own memory; ``_extra_state`` objects go through the model's
    ``load_state_dict``.

    Args:
        model: a module with ``sharded_state_dict``, or the list of them that Megatron-LM calls the model;
            ``DistributedDataParallel`` and ``Float16Module`` around them are looked through.
        options: handed to ``sharded_state_dict``, such as ``metadata``.

    Raises:
        StateError: a module has no ``sharded_state_dict``.
    """

    def __init__(self, model: torch.nn.Module | Sequence[torch.nn.Module], **options: Any) -> None:
        modules = [model] if isinstance(model, torch.nn.Module) else list(model)
        self.chunks = [_unwrapped(module) for module in modules]
        self._options = options

    def state_dict(self) -> dict[str, Any]:
        """The sharded state, in our wrappers; with several chunks, in the parts ``model0``, ``model1``, ..."""
        chunks = [to_ckptlib(_sharded_state_of(chunk)(**self._options)) for chunk in self.chunks]
        return chunks[0] if len(chunks) == 1 else {f"model{i}": chunk for i, chunk in enumerate(chunks)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Gives a filled `state_dict` to the model. Weights are already in place."""
        parts = [state_dict] if len(self.chunks) == 1 else [state_dict[f"model{i}"] for i in range(len(self.chunks))]
        for chunk, part in zip(self.chunks, parts, strict=True):
            chunk.load_state_dict(to_state_dict(part))

    def steady_parts(self) -> list[torch.nn.Module]:
        """See `ckptlib.steady`."""
        return self.chunks

    def placed(self) -> Iterator[ShardedTensor | ShardedTensorFactory]:
        """Every tensor of the model and where it lies; `data` is the parameter itself."""
        yield from _placed(self.state_dict())


class _ContentMetadata:
    """What says to Megatron-Core how the optimizer is stored. It describes what is written, so no load changes it."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> WholeValue:
        """It is one value in the common state."""
        return WholeValue(content_metadata(self._optimizer))

    def load_state_dict(self, state_dict: Any) -> None:
        """Another checkpoint's says nothing about the next one."""


def megatron_state(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Any = None,
    opt_param_scheduler: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """The state of a Megatron-Core training job, for `Checkpointer.save` and `restore`, `ckptlib.save` and `load`.

    It may be made once and used for every save: it holds the model and the optimizer, not their values. Nothing in it
    communicates.

    Args:
        model: see `ModelState`.
        optimizer: a ``DistributedOptimizer``, ``Float16OptimizerWithFloat16Params``, ``FP32Optimizer`` or a
            ``ChainedOptimizer`` of them; None: weights only. After a load without it, ``reload_model_params()`` makes
            its main parameters from the weights.
        opt_param_scheduler: an ``OptimizerParamScheduler``: anything with `state_dict`.
        options: handed to ``sharded_state_dict`` of the model, such as ``metadata``.

    Returns:
        ``model``, ``optimizer``, ``opt_param_scheduler``, ``content_metadata``: the names that Megatron-LM uses.

    Raises:
        StateError: a module has no ``sharded_state_dict``.
        UnsupportedError: an optimizer that is none of these.
    """
    model_state = ModelState(model, **options)
    state: dict[str, Any] = {"model": model_state}
    if optimizer is not None:
        state["optimizer"] = OptimizerState(optimizer, model_state.placed)
    if opt_param_scheduler is not None:
        state["opt_param_scheduler"] = opt_param_scheduler
    return state | {"content_metadata": _ContentMetadata(optimizer)}


def _tensor(value: Any, device: str | torch.device) -> ShardedTensor | ShardedTensorFactory:
    if value.data is None:
        value.init_data(device, torch.zeros)
    box = Box(tuple(value.global_offset), (1,) * value.prepend_axis_num + tuple(value.local_shape))
    mismatch = bool(getattr(value, "allow_shape_mismatch", False))
    part: slice | None = getattr(value, "flattened_range", None)

    def place(key: str, data: torch.Tensor, replica_id: ReplicaId) -> Any:
        if part is not None:  # Megatron-Core up to 0.15: a range of the flattened local tensor
            return ShardedTensor.from_flat_range(
                key,
                value.global_shape,
                box,
                part.start,
                part.stop,
                data,
                replica_id=replica_id,
                allow_shape_mismatch=mismatch,
            )
        return ShardedTensor(key, data, tuple(value.global_shape), box, replica_id, mismatch)

    if _is_quantized(value.data):
        return _dequantizing(value.key, value.data, place, lambda loaded: loaded, value.replica_id)
    if part is not None:
        return ShardedTensorFactory(value.key, value.data, place, torch.cat, value.replica_id)
    placed: ShardedTensor = place(value.key, value.data, value.replica_id)
    return placed


def _factory(value: Any, device: str | torch.device) -> ShardedTensorFactory:
    if value.data is None:
        raise StateError(f"tensor {value.key!r}: its factory has no data to take apart or to fill")

    def build(key: str, data: torch.Tensor, replica_id: ReplicaId) -> Any:
        part = getattr(value, "flattened_range", None)
        return to_ckptlib(value.build_fn(key, data, replica_id, part), device=device)

    if _is_quantized(value.data):
        return _dequantizing(value.key, value.data, build, value.merge_fn, value.replica_id)
    return ShardedTensorFactory(value.key, value.data, build, value.merge_fn, value.replica_id)


def _dequantizing(
    key: str,
    data: torch.Tensor,
    build: Callable[[str, torch.Tensor, ReplicaId], Any],
    merge: Callable[[Any], torch.Tensor],
    replica_id: ReplicaId,
) -> ShardedTensorFactory:
    """Stored in high precision, as Megatron-Core does it; copying into the tensor quantizes again.

    A plain tensor, such as the optimizer's of the same parameter, is taken as it is.
    """

    def build_plain(key: str, data: torch.Tensor, replica_id: ReplicaId) -> Any:
        return build(key, data.dequantize() if _is_quantized(data) else data, replica_id)

    return ShardedTensorFactory(key, data, build_plain, merge, replica_id)


def _is_quantized(tensor: torch.Tensor) -> bool:
    """Whether it is one of Transformer Engine's quantized tensors, which show the dtype they stand for."""
    return any(cls.__name__ in ("QuantizedTensor", "Float8Tensor") for cls in type(tensor).__mro__)


def _placed(tree: Any) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    match tree:
        case ShardedTensor() | ShardedTensorFactory():
            yield tree
        case Mapping():
            for part in tree.values():
                yield from _placed(part)
        case list():
            for part in tree:
                yield from _placed(part)


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The model itself, as Megatron-LM's `unwrap_model` gives it."""
    inner = module
    while isinstance(getattr(inner, "module", None), torch.nn.Module):
        inner = inner.module  # type: ignore[assignment]
    _sharded_state_of(inner)
    return inner


def _sharded_state_of(module: torch.nn.Module) -> Callable[..., Any]:
    method: Callable[..., Any] | None = getattr(module, "sharded_state_dict", None)
    if method is None:
        raise StateError(f"{type(module).__name__} has no sharded_state_dict(): it is not a Megatron-Core model")
    return method


def _has(value: Any, attributes: Sequence[str]) -> bool:
    return not isinstance(value, type) and all(hasattr(value, name) for name in attributes)


def _is_wrapper(value: Any) -> bool:
    return any(cls.__name__ == "ShardedBase" for cls in type(value).__mro__)


def _holds_wrappers(value: Any) -> bool:
    """Whether a list or tuple has a wrapper somewhere in it; one without is a plain value and stays what it is."""
    match value:
        case Mapping():
            return any(map(_holds_wrappers, value.values()))
        case list() | tuple():
            return any(map(_holds_wrappers, value))
        case _:
            return isinstance(value, _OURS) or _is_wrapper(value) or _has(value, _LOCAL)
