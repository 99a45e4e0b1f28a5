"""Tensors and NumPy arrays of pickles: from checked views of checked bytes (R5).

Every function here is called with whatever a hostile pickle says: it checks types and sizes before it builds, and
what it builds is not larger than the bytes it came from.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptlib import archive
from ckptlib.errors import RecordError
from ckptlib.pickle_vm import Unfinished

DTYPES: dict[str, torch.dtype] = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
}

STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}
_NUMPY_DTYPE = re.compile(r"[<>=|]?(?:[biufc]\d{1,2}|\?|[SU]\d{1,6})")


def require(condition: bool, what: str) -> None:
    """Raises `ValueError` saying what is not as plain data would have it."""
    if not condition:
        raise ValueError(f"{what}: not as plain data would have it")


@dataclass(frozen=True)
class StorageKind:
    """What a pickle says of a storage: the dtype of its elements, None for bytes."""

    dtype: torch.dtype | None


@dataclass(frozen=True)
class StorageHandle:
    """A resolved persistent id: `data` are `nbytes` bytes, the record `data/<key>` of the container."""

    key: str
    dtype: torch.dtype | None
    nbytes: int
    data: torch.UntypedStorage


class Storages:
    """Resolves the persistent ids of one `torch.save` container that is in memory.

    Args:
        data: the container.
        layout: its records.
        where: for messages.
        materialise: copy the bytes; otherwise tensors are built on the meta device, to check a pickle only.
    """

    def __init__(self, data: bytes, layout: archive.Layout, where: str, *, materialise: bool = True) -> None:
        self._data = memoryview(data)
        self._layout = layout
        self._where = where
        self._materialise = materialise
        self._loaded: dict[str, StorageHandle] = {}

    @property
    def keys(self) -> list[str]:
        """The storages that were asked for."""
        return list(self._loaded)

    def load(self, identity: Any) -> StorageHandle:
        """The storage of a persistent id ``("storage", kind, key, location, elements)``."""
        key, dtype, nbytes = parse_storage_id(identity)
        known = self._loaded.get(key)
        if known is not None:
            require(known.nbytes == nbytes, f"storage {key!r} has two sizes")
            return StorageHandle(key, dtype, nbytes, known.data)
        record = self._layout.record(f"data/{key}", self._where)
        if record.size != nbytes:
            raise RecordError(f"{self._where}: storage {key!r} has {record.size} bytes, its pickle says {nbytes}")
        handle = StorageHandle(key, dtype, nbytes, self._bytes(record))
        self._loaded[key] = handle
        return handle

    def _bytes(self, record: archive.Record) -> torch.UntypedStorage:
        if not self._materialise:
            return torch.empty(record.size, dtype=torch.uint8, device="meta").untyped_storage()
        if not record.size:
            return torch.empty(0, dtype=torch.uint8).untyped_storage()
        copy = bytearray(self._data[record.offset : record.offset + record.size])
        return torch.frombuffer(copy, dtype=torch.uint8).untyped_storage()


def parse_storage_id(identity: Any) -> tuple[str, torch.dtype | None, int]:
    """Key, dtype of the elements (None: bytes) and size in bytes of a persistent id."""
    require(type(identity) is tuple and len(identity) == 5 and identity[0] == "storage", "a persistent id")
    _, kind, key, _, count = identity
    require(type(kind) is StorageKind and type(key) is str and type(count) is int and count >= 0, "a persistent id")
    return key, kind.dtype, count * (kind.dtype.itemsize if kind.dtype is not None else 1)


def check_view(offset: Any, size: Any, stride: Any, elements: int) -> None:
    """Whether a tensor's view stays inside its storage, and is not larger than it.

    Raises:
        ValueError: it does not, or something is of the wrong type.
    """
    axes = type(size) in (tuple, torch.Size) and type(stride) is tuple and len(size) == len(stride)
    require(
        axes and type(offset) is int and all(type(x) is int and x >= 0 for x in (offset, *size, *stride)), "a tensor"
    )
    count = math.prod(size)
    last = offset + sum((s - 1) * d for s, d in zip(size, stride, strict=True)) if count else offset
    if count > elements or last >= elements + (count == 0):
        raise ValueError(
            f"a tensor of {count} elements, offset {offset}, stride {stride}, on {elements} stored elements"
        )


# ------------------------------------------------------------------ tensors


def tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, _: Any = None
) -> torch.Tensor:
    """`torch._utils._rebuild_tensor_v2`."""
    require(type(storage) is StorageHandle and storage.dtype is not None, "a tensor's storage")
    return _view(storage, storage.dtype, offset, size, stride, requires_grad)


def tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, _: Any = None
) -> torch.Tensor:
    """`torch._utils._rebuild_tensor_v3`: dtypes without a storage class of their own."""
    require(type(storage) is StorageHandle and isinstance(dtype, torch.dtype), "a tensor's storage")
    return _view(storage, dtype, offset, size, stride, requires_grad)


def _view(
    storage: StorageHandle, dtype: torch.dtype, offset: Any, size: Any, stride: Any, requires_grad: Any
) -> torch.Tensor:
    check_view(offset, size, stride, storage.nbytes // dtype.itemsize)
    tensor = torch.empty(0, dtype=dtype, device=storage.data.device)
    tensor.set_(storage.data, offset, torch.Size(size), stride)
    return tensor.requires_grad_() if requires_grad is True and dtype.is_floating_point else tensor


def parameter(data: Any, requires_grad: Any, hooks: Any) -> torch.nn.Parameter:
    """`torch._utils._rebuild_parameter`."""
    require(type(data) is torch.Tensor and type(requires_grad) is bool, "a parameter")
    return torch.nn.Parameter(data, requires_grad)


def tensor_with_attributes(rebuild: Any, kind: Any, arguments: Any, state: Any) -> torch.Tensor:
    """`torch._tensor._rebuild_from_type_v2`: a tensor with Python attributes, which are dropped."""
    require(
        (kind is torch.Tensor or kind is torch.nn.Parameter) and type(arguments) is tuple, "a tensor of another class"
    )
    rebuilders: dict[Any, Callable[..., torch.Tensor]] = {
        torch._utils._rebuild_tensor_v2: tensor_v2,
        torch._utils._rebuild_tensor_v3: tensor_v3,
        torch._utils._rebuild_parameter: parameter,
    }
    require(isinstance(rebuild, types.FunctionType) and rebuild in rebuilders, "a tensor of another class")
    return rebuilders[rebuild](*arguments)


def size_of(*arguments: Any) -> torch.Size:
    """`torch.Size`, of plain numbers that fit a signed 64-bit integer."""
    (axes,) = arguments or ((),)
    require(type(axes) is tuple and all(type(x) is int and 0 <= x < 2**62 for x in axes), "torch.Size")
    return torch.Size(axes)


def device(kind: Any, index: Any = None) -> torch.device:
    """`torch.device`: a name, nothing is initialised."""
    require(type(kind) is str and (index is None or type(index) is int), "torch.device")
    return torch.device(kind) if index is None else torch.device(kind, index)


def layout(name: Any) -> torch.layout:
    """`torch.serialization._get_layout`."""
    require(name in ("torch.strided", "torch.sparse_coo"), "a tensor layout")
    return torch.strided if name == "torch.strided" else torch.sparse_coo


# ------------------------------------------------------------------ NumPy


class UnfinishedDtype(Unfinished):
    """`numpy.dtype`: numbers, booleans and fixed-length text."""

    def __init__(self, name: Any, align: Any = False, copy: Any = True) -> None:
        super().__init__()
        require(type(name) is str and _NUMPY_DTYPE.fullmatch(name) is not None, f"NumPy dtype {name!r}")
        self.dtype = np.dtype(name)


class UnfinishedArray(Unfinished):
    """`numpy.core.multiarray._reconstruct`: an array without content."""

    def __init__(self, kind: Any, shape: Any, typecode: Any) -> None:
        super().__init__()
        require(kind is np.ndarray, "a NumPy array of another class")


def finish_dtype(unfinished: UnfinishedDtype, state: Any) -> np.dtype[Any]:
    """Byte order is all that the state of a simple dtype says; fields, sub-arrays and objects are refused."""
    require(type(state) is tuple and len(state) == 8 and state[1] in ("<", ">", "|", "="), "a NumPy dtype")
    require(state[2] is None and state[3] is None and state[4] is None, "a structured NumPy dtype")
    dtype: np.dtype[Any] = unfinished.dtype.newbyteorder(state[1])
    return dtype


def finish_array(unfinished: UnfinishedArray, state: Any) -> np.ndarray[Any, Any]:
    """The array, from its raw bytes."""
    require(type(state) is tuple and len(state) == 5, "a NumPy array")
    _, shape, dtype, fortran, raw = state
    require(isinstance(dtype, np.dtype) and type(raw) is bytes and dtype.itemsize > 0, "a NumPy array of objects")
    require(type(shape) is tuple and all(type(x) is int and x >= 0 for x in shape), "a NumPy array")
    require(math.prod(shape) * dtype.itemsize == len(raw), "a NumPy array of another size")
    return np.frombuffer(bytearray(raw), dtype).reshape(shape, order="F" if fortran else "C")


def numpy_scalar(dtype: Any, raw: Any) -> Any:
    """`numpy.core.multiarray.scalar`."""
    require(isinstance(dtype, np.dtype) and type(raw) is bytes and len(raw) == dtype.itemsize > 0, "a NumPy scalar")
    return np.frombuffer(raw, dtype, 1)[0]
