"""A rank's own state as a plain tree: what its parts say of themselves, with local tensors and no global places.

The tree is what `torch.load` gives back: dicts, lists, tuples, tensors and plain values; parts with a `state_dict` are
their state dicts, modules under their names without wrappers, optimizers as `torch.optim` numbers them. Tensors that
are one memory stay one memory; those that are views of something larger are stored without the rest of it.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as TorchShardedTensor
from torch.distributed.tensor import DTensor

from ckptlib import torch_leaves
from ckptlib.errors import StateError, UnsupportedError
from ckptlib.parts import ModelParts, OptimizerParts
from ckptlib.sharding import (
    Box,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    WholeValue,
)
from ckptlib.state import Path, TensorLeaf, dotted, is_stateful


@dataclass
class OwnState:
    """A captured state.

    Attributes:
        tree: plain, with stand-ins of the same shapes, dtypes and strides for tensors: memory that was never touched.
        tensors: ``_cdata`` of the storage of each stand-in -> the tensor whose elements fill it, in order.
        parts: the modules, optimizers and other objects with a state that were found in it.
    """

    tree: Any
    tensors: dict[int, TensorLeaf] = field(default_factory=dict)
    parts: list[Any] = field(default_factory=list)


def capture(state: Mapping[str, Any]) -> OwnState:
    """The state of this rank, as it is. Nothing is copied: tensors are views of the state.

    Raises:
        StateError: a tensor has no plain bytes, or a part contains itself; names the path.
        UnsupportedError: a part keeps what it has outside its state dict.
    """
    walker = _Walker()
    try:
        tree = {name: walker.visit((name,), value) for name, value in _items((), state)}
    except RecursionError as error:
        raise StateError("state: it contains itself, or is nested too deeply") from error
    return OwnState(tree, walker.tensors, walker.parts)


def plain(path: Path, value: Any) -> Any:
    """What stands for one value of a state, one level deep: parts become their state dicts, shards local tensors."""
    match value:
        case ShardedTensor() | ShardedTensorFactory() | ShardedObject():
            return value.data
        case WholeValue():
            return value.obj
        case DTensor():
            return value.to_local()
        case TorchShardedTensor():
            return [shard.tensor for shard in value.local_shards()]
        case torch.nn.Module():
            return ModelParts([value]).state_dict()
        case OptimizerParts():
            return [optimizer.state_dict() for optimizer in value.optimizers]
        case _ if is_stateful(value):
            check_whole(path, value)
            return value.state_dict()
    return value


def check_whole(path: Path, part: Any) -> None:
    """Refuses parts whose state dict is not all they have.

    Raises:
        UnsupportedError: names the part, and what to do.
    """
    members = getattr(part, "chained_optimizers", None) or [part]
    if any(hasattr(member, "get_parameter_state_dp_zero") for member in members):
        raise UnsupportedError(
            f"{dotted(path)}: a distributed optimizer has its moments outside its state dict (Megatron writes them to "
            "distrib_optim.pt), so a torch.save file would lack them. Save it as GLOBAL, or give the shards that "
            "ckptlib.integrations.megatron.megatron_state makes of it to a LOCAL save."
        )


class _Walker:
    def __init__(self) -> None:
        self.tensors: dict[int, TensorLeaf] = {}
        self.parts: list[Any] = []
        self._stand_ins: dict[tuple[Any, ...], torch.Tensor] = {}

    def visit(self, path: Path, value: Any) -> Any:
        self.parts += _parts(value)
        value = plain(path, value)
        if isinstance(value, torch.Tensor):
            return self._tensor(path, value)
        if isinstance(value, Mapping):
            kind = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
            return kind((name, self.visit((*path, name), inner)) for name, inner in _items(path, value))
        if type(value) in (list, tuple):
            kept = ((i, inner) for i, inner in enumerate(value) if not isinstance(inner, LocalNonpersistentObject))
            return type(value)(self.visit((*path, i), inner) for i, inner in kept)
        again = plain(path, value)
        return value if again is value else self.visit(path, again)

    def _tensor(self, path: Path, tensor: torch.Tensor) -> torch.Tensor:
        key = dotted(path)
        torch_leaves.check_plain(key, tensor)
        tensor = tensor.detach().resolve_conj().resolve_neg()
        memory = _Memory.of(tensor)
        known = self._stand_ins.get(memory.identity) if tensor.numel() else None
        if known is None:
            known = self._stand_ins[memory.identity] = torch.empty(memory.elements, dtype=tensor.dtype)
            self.tensors[known.untyped_storage()._cdata] = TensorLeaf(
                key, memory.tensor, tuple(memory.tensor.shape), Box.whole(tuple(memory.tensor.shape))
            )
        return known.as_strided(tensor.shape, memory.strides)


def _parts(value: Any) -> list[Any]:
    match value:
        case ModelParts():
            return [*value.modules]
        case OptimizerParts():
            return [*value.optimizers]
        case _:
            return [value] if is_stateful(value) else []


@dataclass(frozen=True)
class _Memory:
    """The memory of a tensor that is stored for it.

    Attributes:
        identity: equal for tensors that are stored together.
        elements: how many are stored.
        strides: of the tensor in what is stored.
        tensor: what is stored.
    """

    identity: tuple[Any, ...]
    elements: int
    strides: tuple[int, ...]
    tensor: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Memory:
        count, start = tensor.numel(), tensor.storage_offset()
        where = (tensor.untyped_storage()._cdata, tensor.dtype, start)
        if _is_dense(tensor):  # transposed ones too: their elements are written in the order of memory
            whole = tensor.as_strided((count,), (1,), start)
            return cls((*where, count), count, tensor.stride(), whole)
        strides = torch.empty(tensor.shape, device="meta").stride()
        return cls((*where, tuple(tensor.shape), tensor.stride()), count, strides, tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a stretch of memory without gaps, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _items(path: Path, mapping: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """The entries of a mapping that are saved."""
    if not isinstance(mapping, Mapping):
        raise StateError(f"state: expected a mapping from names to parts, got {type(mapping).__name__}")
    return [(name, value) for name, value in mapping.items() if not isinstance(value, LocalNonpersistentObject)]
