"""Fills a state from a stored tree of the same shape: what differs is known before anything is changed (R4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as TorchShardedTensor
from torch.distributed.tensor import DTensor

from ckptlib import torch_leaves
from ckptlib.errors import DtypeMismatchError, ShapeMismatchError, StateError
from ckptlib.layouts.own_state import check_whole, plain
from ckptlib.optim import load_numbered_state
from ckptlib.parts import ModelParts, OptimizerParts
from ckptlib.sharding import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    WholeValue,
)
from ckptlib.state import Path, dotted, is_stateful, item_setter, put_tuple

Assign = Callable[[Any], None]


@dataclass
class Filling:
    """What is to be done to a state, in order, and how it differs from what is stored.

    Attributes:
        tensors: targets and sources of the same shape and dtype; sources need not have been read yet.
        values: puts plain values into the state, then gives parts what was loaded of them.
        missing: names that the state has and the tree has not.
        unexpected: the other way round.
    """

    where: str
    tensors: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    values: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    @classmethod
    def plan(cls, state: Mapping[str, Any], stored: Mapping[str, Any], where: str) -> Filling:
        """Compares a state with a stored tree. Nothing is changed.

        Args:
            where: the file, for messages.

        Raises:
            ShapeMismatchError, DtypeMismatchError: a tensor is another one; names it.
            StateError: what is there is of another kind, or cannot be filled.
        """
        filling = cls(where)
        filling._mapping((), state, stored)
        return filling

    def _mapping(self, path: Path, target: Mapping[Any, Any], stored: Mapping[Any, Any]) -> None:
        kept = {name: value for name, value in target.items() if not isinstance(value, LocalNonpersistentObject)}
        self.missing += [dotted((*path, name)) for name in kept if name not in stored]
        self.unexpected += [dotted((*path, name)) for name in stored if name not in target]
        for name, value in kept.items():
            if name in stored:
                self._visit((*path, name), value, stored[name], item_setter(target, name))

    def _visit(self, path: Path, target: Any, stored: Any, assign: Assign) -> None:
        match target:
            case ShardedTensor() | ShardedTensorFactory() | DTensor():
                self._visit(path, plain(path, target), stored, assign)
            case ShardedObject():
                self._put(path, _attribute(target, "data"), stored)
            case WholeValue():
                self._put(path, _attribute(target, "obj"), stored)
            case TorchShardedTensor():
                self._sequence(path, plain(path, target), stored, _refuse(path))
            case torch.Tensor():
                self._tensor(path, target, stored)
            case torch.nn.Module():
                self._modules(path, ModelParts([target]), stored)
            case ModelParts():
                self._modules(path, target, stored)
            case torch.optim.Optimizer():
                self._optimizer(path, target, stored)
            case OptimizerParts():
                self._sequence(path, list(target.optimizers), stored, _refuse(path))
            case _ if is_stateful(target):
                self._stateful(path, target, stored)
            case Mapping() if target:
                self._mapping(path, target, self._expect(path, stored, Mapping))
            case list() | tuple() if _holds_parts(target):
                self._sequence(path, target, stored, assign)
            case _:
                self._put(path, assign, stored)

    def _tensor(self, path: Path, target: torch.Tensor, stored: Any) -> None:
        key = dotted(path)
        source = self._expect(path, stored, torch.Tensor)
        torch_leaves.check_plain(key, target)
        torch_leaves.check_fillable(key, target)
        if source.shape != target.shape:
            raise ShapeMismatchError(
                f"tensor {key!r}: {self.where} holds {tuple(source.shape)}, the state wants {tuple(target.shape)}. "
                "A whole state dict is loaded where it was saved: at the same topology, into the same model."
            )
        if source.dtype != target.dtype:
            raise DtypeMismatchError(
                f"tensor {key!r}: {self.where} holds {source.dtype}, the state wants {target.dtype}"
            )
        self.tensors.append((key, target.detach(), source))

    def _sequence(self, path: Path, target: list[Any] | tuple[Any, ...], stored: Any, assign: Assign) -> None:
        found = self._expect(path, stored, list | tuple)
        kept = [i for i, value in enumerate(target) if not isinstance(value, LocalNonpersistentObject)]
        if len(found) != len(kept):
            raise StateError(f"{dotted(path)}: {self.where} holds {len(found)} entries, the state has {len(kept)}")
        items = target if isinstance(target, list) else [*target]
        for i, item in zip(kept, found, strict=True):
            self._visit((*path, i), target[i], item, item_setter(items, i))
        if isinstance(target, tuple):
            self.values.append((dotted(path), lambda: put_tuple(target, items, assign)))

    def _modules(self, path: Path, model: ModelParts, stored: Any) -> None:
        entries = model.entries()
        inner = {name: entry.value for name, entry in entries.items()}
        self._mapping(path, inner, self._expect(path, stored, Mapping))
        self.values.append((dotted(path), lambda: model.load_entries(entries, inner)))

    def _optimizer(self, path: Path, optimizer: torch.optim.Optimizer, stored: Any) -> None:
        state = self._expect(path, stored, Mapping)
        sizes = [len(group["params"]) for group in state.get("param_groups", ())]
        own = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != own:
            raise StateError(
                f"{dotted(path)}: {self.where} holds parameter groups of {sizes} parameters, the optimizer has {own}"
            )
        self._slots(path, optimizer, state)
        self.values.append((dotted(path), lambda: load_numbered_state(optimizer, state)))

    def _slots(self, path: Path, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Compares the shapes of what is stored for each parameter: torch takes any, and fails at the next step.

        With what the optimizer has there; where it has nothing yet, with the parameter, of which a factored moment has
        axes of length 1. LBFGS keeps what it knows of all parameters, end to end, under the first one.
        """
        numbers = (number for group in state.get("param_groups", ()) for number in group["params"])
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        stored = self._expect((*path, "state"), state.get("state", {}), Mapping)
        for number, parameter in zip(numbers, parameters, strict=True):
            known = optimizer.state.get(parameter, {})
            for slot, value in self._expect((*path, "state", number), stored.get(number, {}), Mapping).items():
                if not isinstance(value, torch.Tensor) or value.ndim == 0:
                    continue
                at = (*path, "state", number, slot)
                held = plain(at, known.get(slot))
                if isinstance(held, torch.Tensor):
                    fits, wanted = value.shape == held.shape, held.shape
                else:
                    wanted = plain(at, parameter).shape
                    fits = isinstance(optimizer, torch.optim.LBFGS) or _is_moment_of(value.shape, wanted)
                if not fits:
                    raise ShapeMismatchError(
                        f"tensor {dotted(at)!r}: {self.where} holds {tuple(value.shape)}, the optimizer wants "
                        f"{tuple(wanted)}. A whole state dict is loaded where it was saved: into the same model."
                    )

    def _stateful(self, path: Path, target: Any, stored: Any) -> None:
        check_whole(path, target)
        inner = target.state_dict()
        if _holds_places(inner):  # shards are filled where they lie: the part would not know what to do with others
            self._visit(path, inner, stored, _refuse(path))
            self.values.append((dotted(path), lambda: target.load_state_dict(inner)))
        else:
            self.values.append((dotted(path), lambda: target.load_state_dict(stored)))

    def _put(self, path: Path, assign: Assign, stored: Any) -> None:
        self.values.append((dotted(path), lambda: assign(stored)))

    def _expect(self, path: Path, stored: Any, kind: Any) -> Any:
        if not isinstance(stored, kind):
            wanted = "tensor" if kind is torch.Tensor else "mapping" if kind is Mapping else "list"
            raise StateError(
                f"{dotted(path)}: {self.where} holds a {type(stored).__name__}, the state has a {wanted} there"
            )
        return stored


def _is_moment_of(shape: torch.Size, parameter: torch.Size) -> bool:
    return len(shape) == len(parameter) and all(one in (1, whole) for one, whole in zip(shape, parameter, strict=True))


def _holds_parts(value: Any) -> bool:
    """Whether a list has anything in it that is filled rather than replaced."""
    match value:
        case torch.Tensor() | OptimizerParts() | Mapping() | LocalNonpersistentObject():
            return True
        case list() | tuple():
            return any(map(_holds_parts, value))
    return _is_placed(value) or is_stateful(value)


def _holds_places(value: Any) -> bool:
    match value:
        case Mapping():
            return any(map(_holds_places, value.values()))
        case list() | tuple():
            return any(map(_holds_places, value))
    return _is_placed(value)


def _is_placed(value: Any) -> bool:
    places = (ShardedTensor, ShardedTensorFactory, ShardedObject, WholeValue, DTensor, TorchShardedTensor)
    return isinstance(value, places)


def _attribute(owner: Any, name: str) -> Assign:
    return lambda value: setattr(owner, name, value)


def _refuse(path: Path) -> Assign:
    def assign(value: Any) -> None:
        raise StateError(f"{dotted(path)}: a {type(value).__name__} cannot take the place of a whole part")

    return assign
