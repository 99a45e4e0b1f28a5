"""State tree -> leaves with global coordinates, and back.

A state is a nested dict whose leaves are tensors, DTensors, `ShardedTensor`, `ShardedObject`, `ShardedTensorFactory`,
`LocalNonpersistentObject`, `WholeValue`, `Stateful` objects (anything with ``state_dict`` and ``load_state_dict``),
torch optimizers and plain values. Names follow torch's distributed checkpoint (`traverse_state_dict`), which reads
what is written here: the dotted path, the elements of a list by number when it holds tensors or dicts, any other list
and every tuple as one value. The `Sharded*` leaves carry names of their own, as in Megatron-Core.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as TorchShardedTensor
from torch.distributed.tensor import DTensor

from ckptlib import factories, optim, torch_leaves
from ckptlib.errors import StateError
from ckptlib.parts import ModelParts, OptimizerParts
from ckptlib.pieces import TensorPiece
from ckptlib.sharding import (
    Box,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    WholeValue,
    is_main_replica,
)

Path = tuple[str | int, ...]


@dataclass
class TensorLeaf:
    """A local tensor and where it lies.

    Attributes:
        tensor: local data, detached; its elements fill `box` in order.
        main: True: this rank writes it; False: another does; None: every rank has the same, the plan chooses one.
    """

    key: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    box: Box
    main: bool | None = None
    allow_shape_mismatch: bool = False

    @property
    def dtype(self) -> str:
        """``float32``, ``bfloat16``, ..."""
        return dtype_name(self.tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return self.box.volume * self.tensor.element_size()

    def piece(self, dtype: str | None = None) -> TensorPiece:
        """What plans know of it; `dtype` instead of its own."""
        return TensorPiece(
            self.key, self.dtype if dtype is None else dtype, self.global_shape, self.box, self.nbytes, self.main
        )


@dataclass
class ObjectLeaf:
    """A `ShardedObject` cell; `assign` puts a loaded value back into the tree."""

    key: str
    data: Any
    main: bool
    assign: Callable[[Any], None]


@dataclass
class ValueLeaf:
    """A plain value under its dotted path; `assign` puts a loaded value back into the tree.

    Attributes:
        of_rank: it may differ between ranks, and the first rank's is stored: for people, no reader needs it.
    """

    key: str
    path: Path
    value: Any
    assign: Callable[[Any], None]
    of_rank: bool = False


@dataclass(frozen=True)
class Finisher:
    """Gives a part of the state what was loaded of it. `leaves`: all that is below the part."""

    run: Callable[[], None]
    leaves: tuple[TensorLeaf | ObjectLeaf | ValueLeaf, ...]

    def __call__(self) -> None:
        self.run()


@dataclass
class FlatState:
    """The leaves of one rank's state.

    Attributes:
        finishers: run after the leaves are filled.
        lists: path of each list whose elements are leaves of their own -> its length.
        elsewhere: tensors whose name is not the path at which they lie -> that path.
        parts: the modules, optimizers and other objects with a state that were found in the tree.
    """

    tensors: list[TensorLeaf] = field(default_factory=list)
    objects: list[ObjectLeaf] = field(default_factory=list)
    values: list[ValueLeaf] = field(default_factory=list)
    finishers: list[Finisher | Callable[[], None]] = field(default_factory=list)
    lists: dict[Path, int] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)
    parts: list[Any] = field(default_factory=list)

    def object_keys(self) -> set[str]:
        """Names of the sharded objects and plain values."""
        return {leaf.key for leaf in self.objects} | {leaf.key for leaf in self.values}

    def common(self) -> dict[str, Any]:
        """The plain values as a nested dict: the common state that Megatron readers expect.

        A list is a list again when none of its elements held a tensor; else a dict from numbers to what is left.
        """
        root: dict[Any, Any] = {}
        for leaf in self.values:
            node = root
            for name in leaf.path[:-1]:
                node = node.setdefault(name, {})
            node[leaf.path[-1]] = leaf.value
        for path, length in sorted(self.lists.items(), key=lambda entry: -len(entry[0])):  # inner ones first
            _put_list(root, path, length)
        return root


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Inverse of `dtype_name`.

    Raises:
        StateError: torch here has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"dtype {name!r} is unknown to torch {torch.__version__}")
    return dtype


def flatten(state: Mapping[str, Any], *, stored: optim.StoredState | None = None) -> FlatState:
    """Leaves of a state tree.

    Args:
        state: the tree; its root must be a mapping.
        stored: for a load: what the checkpoint holds below a prefix. A fresh optimizer has no moments yet;
            they are made from it. None for a save.

    Raises:
        StateError: two leaves have the same name, or a leaf cannot be saved; names the path.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"state: expected a mapping from names to parts, got {type(state).__name__}")
    return _Walker(state, stored).run()


class _Walker:
    def __init__(self, state: Mapping[str, Any], stored: optim.StoredState | None) -> None:
        self._state = state
        self._stored = stored
        self._flat = FlatState()
        self._seen: dict[str, Path] = {}
        self._of_rank: set[Path] = set()

    def run(self) -> FlatState:
        for name, value in self._state.items():
            with _finite(name):
                self._walk((name,), value, item_setter(self._state, name))
        return self._flat

    @functools.cached_property
    def _names(self) -> optim.Names:
        """Of parameters; only optimizers need them, and a state may have none."""
        return _parameter_names(self._state)

    def _walk(self, path: Path, value: Any, assign: Callable[[Any], None]) -> None:
        if type(value) is torch.Tensor:  # most of what there is: no finisher, nothing inside
            self._tensor(path, value)
            return
        flat = self._flat
        tensors, objects, values = len(flat.tensors), len(flat.objects), len(flat.values)
        first = len(flat.finishers)
        self._visit(path, value, assign)
        for i in range(first, len(flat.finishers)):
            finish = flat.finishers[i]
            if not isinstance(finish, Finisher):  # not of something deeper inside
                below: list[TensorLeaf | ObjectLeaf | ValueLeaf] = [*flat.tensors[tensors:], *flat.objects[objects:]]
                flat.finishers[i] = Finisher(finish, (*below, *flat.values[values:]))

    def _visit(self, path: Path, value: Any, assign: Callable[[Any], None]) -> None:
        match value:
            case LocalNonpersistentObject():
                return
            case ShardedTensor():
                self._sharded_tensor(path, value)
            case ShardedTensorFactory():
                built = factories.build(value)
                self._walk(path, built, _refuse_assign(path))
                self._flat.finishers.append(functools.partial(factories.merge, value, built))
            case WholeValue():
                self._claim(dotted(path), path)
                self._flat.values.append(ValueLeaf(dotted(path), path, value.obj, _obj_setter(value)))
            case ShardedObject():
                self._claim(value.unique_key, path)
                main = is_main_replica(value.replica_id)
                self._flat.objects.append(ObjectLeaf(value.unique_key, value.data, main, _data_setter(value)))
            case torch.Tensor():
                self._tensor(path, value)
            case torch.nn.Module():
                self._modules(path, ModelParts([value]))
            case ModelParts():
                self._modules(path, value)
            case torch.optim.Optimizer():
                self._optimizer(path, OptimizerParts([value]))
            case OptimizerParts():
                self._optimizer(path, value)
            case Mapping() if value:
                for name, inner in value.items():
                    if not isinstance(name, str | int):
                        raise StateError(
                            f"{dotted(path)}: key {name!r} is a {type(name).__name__}, expected str or int"
                        )
                    self._walk((*path, name), inner, item_setter(value, name))
            case list() | tuple() if _is_walked(value):
                items = value if isinstance(value, list) else [*value]
                if isinstance(value, list):
                    self._flat.lists[path] = len(items)
                for i, inner in enumerate(items):
                    self._walk((*path, i), inner, item_setter(items, i))
                if isinstance(value, tuple):
                    self._flat.finishers.append(functools.partial(put_tuple, value, items, assign))
            case _ if is_stateful(value):
                stateful: Any = value
                self._flat.parts.append(stateful)
                if self._stored is not None and hasattr(stateful, "state_to_load"):
                    inner = stateful.state_to_load(self._stored, dotted(path))
                else:
                    inner = stateful.state_dict()
                if inner:
                    self._walk(path, inner, _refuse_assign(path))
                self._flat.finishers.append(lambda: stateful.load_state_dict(inner))
            case _:
                self._claim(dotted(path), path)
                self._flat.values.append(ValueLeaf(dotted(path), path, value, assign, path in self._of_rank))

    def _modules(self, path: Path, model: ModelParts) -> None:
        self._flat.parts += model.modules
        entries = model.entries()
        inner = {name: entry.value for name, entry in entries.items()}
        if inner:
            self._walk(path, inner, _refuse_assign(path))
        self._flat.finishers.append(lambda: model.load_entries(entries, inner))

    def _optimizer(self, path: Path, parts: OptimizerParts) -> None:
        self._flat.parts += parts.optimizers
        prefix = dotted(path)
        if self._stored is None:
            state = optim.named_state(parts.optimizers, self._names, prefix)
        else:
            state = optim.skeleton(parts.optimizers, self._names, prefix, self._stored)
        # Members of a group differ between pipeline stages; a load takes them from the optimizer, not from here.
        self._of_rank.update((*path, "param_groups", i, "params") for i in range(len(state["param_groups"])))
        self._walk(path, state, _refuse_assign(path))
        if self._stored is not None:
            self._flat.finishers.append(lambda: optim.load_named_state(parts.optimizers, self._names, state, prefix))

    def _tensor(self, path: Path, tensor: torch.Tensor) -> None:
        key = dotted(path)
        self._claim(key, path)
        for placed in torch_leaves.place(key, tensor):
            if self._stored is not None:
                torch_leaves.check_fillable(key, placed.tensor)
            self._flat.tensors.append(TensorLeaf(key, placed.tensor, placed.global_shape, placed.box))

    def _sharded_tensor(self, path: Path, value: ShardedTensor) -> None:
        # One rank may hold several pieces of one global tensor (gated MLP halves), so the box is part of the name. It
        # may hold another copy too, which is not the main replica (tied embeddings).
        if value.box.volume and is_main_replica(value.replica_id):
            self._claim(f"{value.key} {value.box}", path)
        if value.key != dotted(path):
            self._flat.elsewhere[value.key] = dotted(path)
        torch_leaves.check_plain(value.key, value.data)
        if self._stored is not None:
            torch_leaves.check_fillable(value.key, value.data)
        self._flat.tensors.append(
            TensorLeaf(
                value.key,
                value.data.detach(),
                value.global_shape,
                value.box,
                is_main_replica(value.replica_id),
                value.allow_shape_mismatch,
            )
        )

    def _claim(self, key: str, path: Path) -> None:
        if not key:
            raise StateError("state: the empty name is not allowed")
        if not key.isascii() and not _is_text(key):
            raise StateError(f"state: the name {key!r} is no text: it has half of a surrogate pair in it")
        if key in self._seen:
            raise StateError(f"two leaves are named {key!r}: at {dotted(self._seen[key])} and at {dotted(path)}")
        self._seen[key] = path


def content_names(state: Mapping[str, Any]) -> set[str]:
    """What a state holds: the names of its parts, and for a torch object its kind, whatever its name.

    A resume asks for a checkpoint with ``model`` and ``optimizer``; a trainer may call its optimizer ``adam``.

    Raises:
        StateError: a name at the top is no string.
    """
    for name in state:
        if not isinstance(name, str):
            raise StateError(f"state: the name {name!r} is a {type(name).__name__}, expected a string: {str(name)!r}")
    kinds: dict[str, tuple[type, ...]] = {
        "model": (torch.nn.Module, ModelParts),
        "optimizer": (torch.optim.Optimizer, OptimizerParts),
        "scheduler": (torch.optim.lr_scheduler.LRScheduler,),
    }
    return {*state} | {kind for kind, types in kinds.items() if any(isinstance(x, types) for x in state.values())}


def dotted(path: Path) -> str:
    """``("model", "layers", 0)`` -> ``model.layers.0``."""
    return ".".join(map(str, path))


def leaf_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor in order, as bytes: its own memory where it is contiguous and on the CPU."""
    return memory_of(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable. Axes of size 1 may have any stride in one, so none is used."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # ndarray is a buffer


def _is_walked(value: list[Any] | tuple[Any, ...]) -> bool:
    """Whether the elements are leaves of their own: as torch has it, or because only leaves can be placed."""
    return _holds_placed(value) or (isinstance(value, list) and _holds_leaves(value))


def _holds_leaves(value: list[Any]) -> bool:
    """torch's rule: a list with a tensor or a dict in it, or in a list in it."""
    return any(
        isinstance(item, torch.Tensor | Mapping) or (isinstance(item, list) and _holds_leaves(item)) for item in value
    )


def _holds_placed(value: Any) -> bool:
    """Whether there is anything in it that says where it lies, or that has a state: it cannot be a plain value."""
    match value:
        case DTensor() | TorchShardedTensor() | ShardedTensor() | ShardedObject() | LocalNonpersistentObject():
            return True
        case torch.optim.Optimizer() | OptimizerParts():
            return True
        case ShardedTensorFactory() | WholeValue():
            return True
        case Mapping():
            return any(map(_holds_placed, value.values()))
        case list() | tuple():
            return any(map(_holds_placed, value))
        case _:
            return is_stateful(value)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_stateful(value: Any) -> bool:
    """What torch calls Stateful: saved through `state_dict`, restored through `load_state_dict`.

    One whose state depends on what is stored has ``state_to_load(stored, prefix)`` too: an `optim.StoredState`, and its
    own dotted path -> what to fill and then hand to `load_state_dict`.
    """
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict") and not isinstance(value, type)


def _parameter_names(state: Mapping[str, Any]) -> optim.Names:
    """The names that the parameters of an optimizer have in the modules of the same state."""
    names: dict[int, tuple[str, str]] = {}

    def visit(path: Path, value: Any) -> None:
        if isinstance(value, torch.nn.Module | ModelParts):
            parts = value if isinstance(value, ModelParts) else ModelParts([value])
            for name, parameter in parts.named_parameters():
                names.setdefault(id(parameter), (name, dotted((*path, name))))
        elif isinstance(value, Mapping):
            for name, inner in value.items():
                if type(inner) is not torch.Tensor:
                    visit((*path, name), inner)
        elif isinstance(value, list | tuple):
            for i, inner in enumerate(value):
                visit((*path, i), inner)

    for name, part in state.items():
        with _finite(name):
            visit((name,), part)
    return names


@contextlib.contextmanager
def _finite(name: str) -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise StateError(f"{name}: it contains itself, or is nested too deeply") from error


def item_setter(container: Any, name: Any) -> Callable[[Any], None]:
    """What puts a loaded value into its place in a container; a StateError when that cannot be changed."""

    def assign(value: Any) -> None:
        try:
            container[name] = value
        except TypeError as error:
            raise StateError(f"{name!r}: cannot be put back into a {type(container).__name__}") from error

    return assign


def put_tuple(old: tuple[Any, ...], items: list[Any], assign: Callable[[Any], None]) -> None:
    """A tuple cannot be filled in place: where a plain value in it changed, a new one takes its place."""
    if any(one is not other for one, other in zip(old, items, strict=True)):
        make = getattr(old, "_make", tuple)  # named tuples
        assign(make(items))


def _put_list(root: dict[Any, Any], path: Path, length: int) -> None:
    """Turns the dict from numbers that stands for a list into the list, if every element is there."""
    node: Any = root
    for name in path[:-1]:
        node = node.get(name) if isinstance(node, dict) else None
    items = node.get(path[-1]) if isinstance(node, dict) else None
    if isinstance(items, dict) and len(items) == length:
        node[path[-1]] = [items[i] for i in range(length)]


def _data_setter(cell: ShardedObject) -> Callable[[Any], None]:
    def assign(value: Any) -> None:
        cell.data = value

    return assign


def _obj_setter(whole: WholeValue) -> Callable[[Any], None]:
    def assign(value: Any) -> None:
        whole.obj = value

    return assign


def _refuse_assign(path: Path) -> Callable[[Any], None]:
    def assign(value: Any) -> None:
        raise StateError(f"{dotted(path)}: a {type(value).__name__} cannot take the place of a whole part")

    return assign
