"""The plain data that a checkpoint may hold as objects: the table of `ckptlib.safe_pickle`.

Every function here is called with whatever a hostile pickle says: it checks types and sizes before it builds, it
never calls what it was given, and what it builds is not larger than the pickle (or the storage) it came from.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import functools
import io
import pathlib
import signal
import types
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ckptlib import safe_tensors
from ckptlib.pickle_vm import Table
from ckptlib.safe_tensors import require

FOREIGN_PACKAGES = ("megatron", "transformer_engine")
"""Packages (besides ``nvidia_*``) whose classes appear in checkpoints, as values in `args`; they are never imported."""

_PLAIN = (list, dict, tuple, int, float, str, bool, bytes, type(None))
_FACTORIES = (*_PLAIN, set, collections.OrderedDict)


@dataclass
class Foreign:
    """An instance of a class that is not imported: an enum member, a dataclass, ... of Megatron-Core or its companions.

    Attributes:
        module, name: its class.
        args: what its constructor was given: ``(value,)`` for an enum member.
        state: its attributes, as the pickle held them; ``{"member": name}`` for an enum member known by name only.
    """

    module: str
    name: str
    args: tuple[Any, ...] = ()
    state: Any = field(default=None)

    def __hash__(self) -> int:
        return hash((self.module, self.name))

    def __getattr__(self, attribute: str) -> Any:
        # Only reached when ordinary lookup fails: attributes of the original object, and an enum member's value.
        if not attribute.startswith("_"):
            if attribute == "value" and len(self.args) == 1:
                return self.args[0]
            if type(self.state) is dict and attribute in self.state:
                return self.state[attribute]
        raise AttributeError(f"{self.module}.{self.name} stand-in has no attribute {attribute!r}")


@dataclass(frozen=True)
class ForeignClass:
    """A class or function that is not imported; calling it in a pickle gives a `Foreign`."""

    module: str
    name: str


def _generator(device: Any) -> torch.Generator | Foreign:
    # A generator of another device would initialise that device, here.
    require(isinstance(device, torch.device), "torch.Generator")
    return torch.Generator() if device.type == "cpu" else Foreign("torch._C", "Generator", (device,))


def _generator_state(generator: torch.Generator, state: Any) -> torch.Generator:
    require(type(state) is tuple and len(state) == 3 and type(state[2]) is torch.Tensor, "torch.Generator")
    if state[2].device.type != "meta":  # meta: only checked, see `Storages`
        generator.set_state(state[2])
    return generator


# ------------------------------------------------------------------ the standard library


def _encode(text: Any, encoding: Any) -> bytes:
    # How protocol 2 writes bytes.
    require(type(text) is str and encoding in ("latin1", "latin-1"), "bytes")
    return str(text).encode("latin1")


def _empty_bytes() -> bytes:
    # How protocol 2 writes no bytes.
    return b""


def _bytearray(content: Any = b"", encoding: Any = "latin-1") -> bytearray:
    # Never a number: bytearray(10**12) is a terabyte.
    if type(content) is str:
        content = _encode(content, encoding)
    require(type(content) is bytes, "bytearray")
    return bytearray(content)


def _elements(kind: Callable[[Iterable[Any]], Any]) -> Callable[..., Any]:
    """For set and frozenset: elements that hash at once."""

    def make(items: Any = ()) -> Any:
        require(type(items) in (list, tuple), kind.__name__)
        simple = (str, int, float, bool, bytes, type(None), torch.dtype, torch.Size)
        flat = [part for item in items for part in (item if type(item) is tuple else (item,))]
        require(all(type(part) in simple for part in flat), f"{kind.__name__} of nested elements")
        return kind(items)

    return make


def _ordered_dict(pairs: Any = ()) -> collections.OrderedDict[Any, Any]:
    require(type(pairs) in (list, tuple), "OrderedDict")
    require(
        all(type(pair) in (list, tuple) and len(pair) == 2 and type(pair[0]) in (str, int) for pair in pairs),
        "OrderedDict",
    )
    return collections.OrderedDict(pairs)


def _counter(counts: Any = None) -> collections.Counter[Any]:
    require(counts is None or type(counts) is dict, "Counter")
    return collections.Counter(counts)


def _defaultdict(factory: Any = None) -> collections.defaultdict[Any, Any]:
    require(factory is None or any(factory is allowed for allowed in _FACTORIES), "defaultdict of something unusual")
    return collections.defaultdict(factory)


def _deque(items: Any = (), maxlen: Any = None) -> collections.deque[Any]:
    require(type(items) in (list, tuple) and (maxlen is None or type(maxlen) is int), "deque")
    return collections.deque(items, maxlen)


def _numbers(kind: Callable[..., Any], types_: tuple[type, ...], count: range) -> Callable[..., Any]:
    """A constructor that takes plain numbers or text only."""

    def make(*arguments: Any) -> Any:
        require(len(arguments) in count and all(type(x) in types_ for x in arguments), kind.__name__)
        return kind(*arguments)

    return make


def _moment(kind: Callable[..., Any], length: int) -> Callable[..., Any]:
    """date, time, datetime from their packed bytes, with a fixed time zone at most."""

    def make(packed: Any, zone: Any = None) -> Any:
        require(type(packed) is bytes and len(packed) == length, kind.__name__)
        require(zone is None or type(zone) is datetime.timezone, kind.__name__)
        return kind(packed) if zone is None else kind(packed, zone)

    return make


def _timezone(offset: Any, name: Any = None) -> datetime.timezone:
    require(type(offset) is datetime.timedelta and (name is None or type(name) is str), "timezone")
    return datetime.timezone(offset) if name is None else datetime.timezone(offset, name)


def _with_attributes(instance: Any, state: Any) -> Any:
    if type(state) is tuple and len(state) == 2 and state[0] is None:
        state = state[1]
    require(type(state) is dict and all(type(name) is str for name in state), "attributes")
    instance.__dict__.update(state)
    return instance


def _bytes_io(instance: io.BytesIO, state: Any) -> io.BytesIO:
    require(type(state) is tuple and len(state) == 3 and type(state[0]) is bytes and type(state[1]) is int, "BytesIO")
    instance.write(state[0])
    instance.seek(min(state[1], len(state[0])))
    return instance


def _uuid(instance: uuid.UUID, state: Any) -> uuid.UUID:
    require(type(state) is dict and type(state.get("int")) is int, "UUID")
    return uuid.UUID(int=state["int"])


def _foreign(cls: ForeignClass, *arguments: Any) -> Foreign:
    return Foreign(cls.module, cls.name, arguments)


def _member(owner: Any, name: Any) -> Any:
    """``getattr`` in a pickle: how the first releases of Python 3.11 (Debian 12's among them) write an enum member.

    It is looked up among the members of an enum that the table knows; of a class that is not imported only the name is
    kept. Nothing else has attributes here.
    """
    require(type(name) is str, "getattr")
    if type(owner) is ForeignClass:
        return Foreign(owner.module, owner.name, state={"member": name})
    require(isinstance(owner, enum.EnumMeta) and name in owner.__members__, "getattr")
    return owner.__members__[name]


def _foreign_state(instance: Foreign, state: Any) -> Foreign:
    instance.state = state
    return instance


def _empty(kind: type) -> Callable[[], Any]:
    """Makes an object without calling its constructor, as pickle does."""
    return functools.partial(object.__new__, kind)


def _names() -> dict[tuple[str, str], tuple[Any, Callable[..., Any] | None]]:
    """(module, name) -> the object that a bare mention gives, and what a call of it does (None: not to be called)."""
    names: dict[tuple[str, str], tuple[Any, Callable[..., Any] | None]] = {
        ("_codecs", "encode"): (_encode, _encode),
        ("builtins", "set"): (set, _elements(set)),
        ("builtins", "frozenset"): (frozenset, _elements(frozenset)),
        ("builtins", "bytearray"): (bytearray, _bytearray),
        ("builtins", "complex"): (complex, _numbers(complex, (float, int), range(1, 3))),
        ("builtins", "range"): (range, _numbers(range, (int,), range(1, 4))),
        ("builtins", "getattr"): (_member, _member),
        ("builtins", "slice"): (slice, _numbers(slice, (int, type(None)), range(1, 4))),
        ("argparse", "Namespace"): (argparse.Namespace, _empty(argparse.Namespace)),
        ("types", "SimpleNamespace"): (types.SimpleNamespace, _numbers(types.SimpleNamespace, (), range(1))),
        ("collections", "OrderedDict"): (collections.OrderedDict, _ordered_dict),
        ("collections", "Counter"): (collections.Counter, _counter),
        ("collections", "defaultdict"): (collections.defaultdict, _defaultdict),
        ("collections", "deque"): (collections.deque, _deque),
        ("datetime", "date"): (datetime.date, _moment(datetime.date, 4)),
        ("datetime", "time"): (datetime.time, _moment(datetime.time, 6)),
        ("datetime", "datetime"): (datetime.datetime, _moment(datetime.datetime, 10)),
        ("datetime", "timedelta"): (datetime.timedelta, _numbers(datetime.timedelta, (int,), range(1, 4))),
        ("datetime", "timezone"): (datetime.timezone, _timezone),
        ("decimal", "Decimal"): (decimal.Decimal, _numbers(decimal.Decimal, (str,), range(1, 2))),
        ("uuid", "UUID"): (uuid.UUID, _empty(uuid.UUID)),
        ("signal", "Signals"): (signal.Signals, _numbers(signal.Signals, (int,), range(1, 2))),
        ("_io", "BytesIO"): (io.BytesIO, _numbers(io.BytesIO, (), range(1))),
        ("torch", "Size"): (torch.Size, safe_tensors.size_of),
        ("torch", "device"): (torch.device, safe_tensors.device),
        ("torch", "Tensor"): (torch.Tensor, None),
        ("torch.nn.parameter", "Parameter"): (torch.nn.Parameter, None),
        ("torch._C", "Generator"): (torch.Generator, _generator),
        ("torch.serialization", "_get_layout"): (torch.serialization._get_layout, safe_tensors.layout),
        ("torch._utils", "_rebuild_tensor_v2"): (torch._utils._rebuild_tensor_v2, safe_tensors.tensor_v2),
        ("torch._utils", "_rebuild_tensor_v3"): (torch._utils._rebuild_tensor_v3, safe_tensors.tensor_v3),
        ("torch._utils", "_rebuild_parameter"): (torch._utils._rebuild_parameter, safe_tensors.parameter),
        ("torch._tensor", "_rebuild_from_type_v2"): (
            torch._tensor._rebuild_from_type_v2,
            safe_tensors.tensor_with_attributes,
        ),
        ("torch.storage", "UntypedStorage"): (safe_tensors.StorageKind(None), None),
        ("numpy", "ndarray"): (np.ndarray, None),
        ("numpy", "dtype"): (np.dtype, safe_tensors.UnfinishedDtype),
    }
    for kind in _PLAIN:
        names["builtins", kind.__name__] = (kind, _empty_bytes if kind is bytes else None)
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"):
        # A path of another system cannot be made here, its pure form can.
        pure = pathlib.PurePosixPath if "Posix" in name else pathlib.PureWindowsPath
        path = pathlib.Path if name == type(pathlib.Path()).__name__ else pure
        for module in ("pathlib", "pathlib._local"):  # its home from Python 3.13 on
            names[module, name] = (path, _numbers(path, (str,), range(4096)))
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # NumPy 1 and 2
        names[module, "_reconstruct"] = (safe_tensors.UnfinishedArray, safe_tensors.UnfinishedArray)
        names[module, "scalar"] = (safe_tensors.numpy_scalar, safe_tensors.numpy_scalar)
    for name, number in signal.Signals.__members__.items():  # how Python 3.12 and later write a signal
        names["signal", name] = (number, None)
    for name, dtype in safe_tensors.DTYPES.items():
        names["torch", name] = (dtype, None)
    for name, dtype in safe_tensors.STORAGE_DTYPES.items():
        names["torch", name] = (safe_tensors.StorageKind(dtype), None)
    return names


@functools.cache
def _shared() -> tuple[dict[tuple[str, str], Any], dict[int, Callable[..., Any]]]:
    names = _names()
    calls = {id(value): call for value, call in names.values() if call is not None}
    return {name: value for name, (value, _) in names.items()}, calls


def _find(module: str, name: str) -> Any:
    value = _shared()[0].get((module, name), _shared)
    if value is not _shared:
        return value
    package = module.partition(".")[0]
    if package in FOREIGN_PACKAGES or package.startswith("nvidia_"):
        return ForeignClass(module, name)
    raise KeyError((module, name))


def object_table(persistent: Callable[[Any], Any] | None) -> Table:
    """The table of plain data. `persistent` resolves storages."""
    return Table(
        find=_find,
        calls=_shared()[1],
        call_types={ForeignClass: _foreign},
        builds={
            argparse.Namespace: _with_attributes,
            types.SimpleNamespace: _with_attributes,
            collections.OrderedDict: _with_attributes,
            io.BytesIO: _bytes_io,
            uuid.UUID: _uuid,
            torch.Generator: _generator_state,
            Foreign: _foreign_state,
            safe_tensors.UnfinishedDtype: safe_tensors.finish_dtype,
            safe_tensors.UnfinishedArray: safe_tensors.finish_array,
        },
        key_types=frozenset(
            {
                torch.Size,
                torch.dtype,
                torch.device,
                pathlib.PosixPath,
                pathlib.PurePosixPath,
                pathlib.PureWindowsPath,
                datetime.date,
                datetime.datetime,
                datetime.timedelta,
                uuid.UUID,
                decimal.Decimal,
                signal.Signals,
                Foreign,
                ForeignClass,
            }
        ),
        persistent=persistent,
    )
