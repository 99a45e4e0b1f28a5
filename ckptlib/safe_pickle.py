"""The only place where pickles of a checkpoint are read (R5): torch's ``.metadata`` and `torch.save` containers.

Both go through `ckptlib.pickle_vm` with a table of names. `torch.load(weights_only=True)` is not used: its list of
allowed classes belongs to the whole process, so a name allowed for one checkpoint would be allowed for everybody, a
`safe_globals` block would drop what Megatron registered for itself, and hostile archives would reach its C++ reader.

Classes of Megatron-Core and its companions are never imported: they become `Foreign` values that remember what the
pickle said. Plain data is what `ckptlib.safe_objects` lists; `dump_object` refuses to write anything else, so what is
saved can be loaded.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from ckptlib import archive, pickle_vm
from ckptlib.errors import CkptError, RecordError, StateError, UnsafePickleError, UnsupportedError
from ckptlib.safe_objects import Foreign, object_table
from ckptlib.safe_tensors import DTYPES, Storages

__all__ = ["Foreign", "check_object", "dump_object", "load_metadata", "load_object", "load_pickle"]


def load_metadata(data: bytes, where: str) -> metadata.Metadata:
    """Reads torch's ``.metadata`` (all versions, also those that name Megatron's subclasses).

    Args:
        data: the file.
        where: its path, for messages.

    Raises:
        UnsafePickleError: it names anything but the classes of such metadata. Nothing was executed.
        RecordError: it is damaged, or something else.
    """
    value = pickle_vm.interpret(data, where, _metadata_table())
    if not isinstance(value, metadata.Metadata) or not isinstance(getattr(value, "state_dict_metadata", None), dict):
        raise RecordError(f"{where}: not the metadata of a distributed checkpoint (a {type(value).__name__})")
    return value


def load_object(data: bytes, where: str) -> Any:
    """Reads a `torch.save` container of plain data: ``common.pt``, a bytes item. Every record's CRC-32 is checked.

    Tensors come back on the CPU. Classes of Megatron-Core and its companions come back as `Foreign`.

    Args:
        data: the container.
        where: what it is, for messages.

    Raises:
        UnsafePickleError: it holds anything but plain data, or is a bare pickle. Nothing was executed.
        RecordError: it is damaged, or something else.
        UnsupportedError: it was written on a big-endian machine.
    """
    layout = _layout(data, where)
    archive.check_crcs(data, layout, where)
    return _interpret(data, layout, where, Storages(data, layout, where))


def check_object(data: bytes, where: str) -> archive.Layout:
    """What `load_object` checks (CRC-32s aside), without building tensors. Raises like it.

    Returns:
        The layout of the container.
    """
    layout = _layout(data, where)
    _interpret(data, layout, where, Storages(data, layout, where, materialise=False))
    return layout


def load_pickle(data: bytes | memoryview, where: str, persistent: Callable[[Any], Any]) -> Any:
    """Reads the ``data.pkl`` of a container whose storages the caller resolves. Raises like `load_object`."""
    return pickle_vm.interpret(data, where, object_table(persistent))


def dump_object(value: Any, where: str) -> bytes:
    """`torch.save` of plain data.

    Args:
        value: plain data: numbers, text, bytes, containers, Namespaces, paths, dates, NumPy arrays, tensors, ...
        where: the value's dotted path, for messages.

    Raises:
        StateError: it holds something that `load_object` would refuse; names `where` and the type.
    """
    out = io.BytesIO()
    try:
        torch.save(value, out)
    except (
        pickle.PicklingError,
        AttributeError,
        TypeError,
        RecursionError,
        RuntimeError,
        NotImplementedError,
    ) as error:
        raise StateError(f"{where}: a {type_name(value)} cannot be saved: {error}") from error
    data = out.getvalue()
    try:
        check_object(data, where)
    except CkptError as error:
        raise StateError(
            f"{where}: a {type_name(value)} cannot be saved, because no reader would load it: {error}. Checkpoints "
            "hold plain data only: turn objects of your own into dicts (to_dict, state_dict) before saving."
        ) from error
    return data


def _layout(data: bytes, where: str) -> archive.Layout:
    if data[:1] == b"\x80":
        raise UnsafePickleError(f"{where}: refused: a bare pickle, not a torch.save container; nothing was executed")
    layout = archive.parse_whole(data, where)
    order = layout.records.get("byteorder")
    if order is not None and data[order.offset : order.offset + order.size] != b"little":
        raise UnsupportedError(
            f"{where}: written on a big-endian machine; load and save it there in little-endian order"
        )
    return layout


def _interpret(data: bytes, layout: archive.Layout, where: str, storages: Storages) -> Any:
    record = layout.record("data.pkl", where)
    return load_pickle(memoryview(data)[record.offset : record.offset + record.size], where, storages.load)


def type_name(value: Any) -> str:
    """The name of a value's type, for people."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# ------------------------------------------------------------------ .metadata

_MEGATRON_STRATEGY = "megatron.core.dist_checkpointing.strategies.torch"


def _fields(function: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any, Any], Any]:
    """A build function for a dataclass: checks the fields that readers use, then sets all of them."""

    def build(instance: Any, state: Any) -> Any:
        if type(state) is not dict or not all(type(name) is str for name in state):
            raise ValueError(f"{type(instance).__name__} with a state that is no dict of fields")
        function(instance, state)
        instance.__dict__.update(state)
        return instance

    return build


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"{what} of the wrong type or out of range")


def _any_fields(instance: Any, state: dict[str, Any]) -> None:
    """Nothing to check: readers do not use these."""


def _index_fields(instance: Any, state: dict[str, Any]) -> None:
    # Its hash is the hash of these two, so they must be what they say.
    _require(type(state.get("fqn")) is str, "MetadataIndex.fqn")
    _require(type(state.get("offset")) in (torch.Size, type(None)), "MetadataIndex.offset")


def _chunk_fields(instance: Any, state: dict[str, Any]) -> None:
    offsets, sizes = state.get("offsets"), state.get("sizes")
    _require(type(offsets) is torch.Size and type(sizes) is torch.Size, "ChunkStorageMetadata")
    _require(len(offsets) == len(sizes), "ChunkStorageMetadata")  # type: ignore[arg-type]


def _tensor_fields(instance: Any, state: dict[str, Any]) -> None:
    _require(type(state.get("properties")) is metadata.TensorProperties, "TensorStorageMetadata.properties")
    _require(type(state.get("size")) is torch.Size, "TensorStorageMetadata.size")
    chunks = state.get("chunks")
    _require(
        type(chunks) is list and all(type(chunk) is metadata.ChunkStorageMetadata for chunk in chunks),
        "TensorStorageMetadata.chunks",
    )


def _storage_fields(instance: Any, state: dict[str, Any]) -> None:
    _require(type(state.get("relative_path")) is str, "_StorageInfo.relative_path")
    for name in ("offset", "length"):
        value = state.get(name)
        _require(type(value) is int and 0 <= value < 2**62, f"_StorageInfo.{name}")


def _properties(instance: Any, state: Any) -> Any:
    _require(type(state) is tuple and len(state) == 5 and isinstance(state[0], torch.dtype), "TensorProperties")
    instance.__setstate__(state)
    return instance


@functools.cache
def _metadata_table() -> pickle_vm.Table:
    """The names of megatron.md 3.1 and how each is built."""
    names: dict[tuple[str, str], Any] = {}
    calls: dict[int, Callable[..., Any]] = {}
    builds: dict[type, Callable[[Any, Any], Any]] = {metadata.TensorProperties: _properties}
    records: dict[type, Callable[[Any, dict[str, Any]], None]] = {
        metadata.Metadata: _any_fields,
        metadata.TensorStorageMetadata: _tensor_fields,
        metadata.BytesStorageMetadata: _any_fields,
        metadata.ChunkStorageMetadata: _chunk_fields,
        metadata.MetadataIndex: _index_fields,
        metadata.StorageMeta: _any_fields,
        filesystem._StorageInfo: _storage_fields,
        planner.SavePlan: _any_fields,
        planner.WriteItem: _any_fields,
        planner.TensorWriteData: _any_fields,
    }
    for kind, check in records.items():
        names[kind.__module__, kind.__qualname__] = kind
        calls[id(kind)] = functools.partial(object.__new__, kind)
        builds[kind] = _fields(check)
    names[metadata.TensorProperties.__module__, "TensorProperties"] = metadata.TensorProperties
    calls[id(metadata.TensorProperties)] = functools.partial(object.__new__, metadata.TensorProperties)
    for enum in (metadata._MEM_FORMAT_ENCODING, planner.WriteItemType):
        names[enum.__module__, enum.__qualname__] = enum
        calls[id(enum)] = enum
    names[_MEGATRON_STRATEGY, "MCoreSavePlan"] = planner.SavePlan
    names[_MEGATRON_STRATEGY, "MCoreMetadata"] = metadata.Metadata
    objects = object_table(None)
    for module, name in _SHARED_NAMES:
        value = objects.find(module, name)
        names[module, name] = value
        if id(value) in objects.calls:
            calls[id(value)] = objects.calls[id(value)]
    names.update({("torch", name): dtype for name, dtype in DTYPES.items()})
    return pickle_vm.Table(
        find=lambda module, name: names[module, name],
        calls=calls,
        builds=builds,
        key_types=objects.key_types | {metadata.MetadataIndex},
    )


_SHARED_NAMES = (
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),  # members of the two enums, as the first releases of Python 3.11 write them
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),  # StorageMeta.checkpoint_id
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "PurePosixPath"),
)
