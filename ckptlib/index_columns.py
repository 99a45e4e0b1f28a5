"""The columns behind `ckptlib.index`: put together from items in any order, written to bytes and read back. Pure."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckptlib import records
from ckptlib.errors import RecordError, StateError, VersionError
from ckptlib.tiling import sorted_rows

MAGIC = b"CKPTIDX2"

Int64s = npt.NDArray[np.int64]


class Names(NamedTuple):
    """The texts of an index; columns refer to them by number."""

    files: list[str]
    keys: list[str]
    dtypes: list[str]
    objects: list[str]


@dataclass(frozen=True)
class Columns:
    """The columns of an index: K tensors, n chunks, m objects; all tensors have D axes (`ckptlib.tiling.padded`).

    Attributes:
        dtypes, ndims, tensor_shapes: (K,), (K,), (K, D), by key. Dtypes are numbers in `Names.dtypes`.
        chunk_ends: (K + 1,) where the chunks of each tensor begin, and the end.
        offsets, shapes, files, locations: (n, D), (n, D), (n,), (n, 5), by key and offset; see `ckptlib.index.Chunks`.
        object_files, object_locations, object_wrapped: (m,), (m, 5), (m,), by key.
    """

    dtypes: Int64s
    ndims: Int64s
    tensor_shapes: Int64s
    chunk_ends: Int64s
    offsets: Int64s
    shapes: Int64s
    files: Int64s
    locations: Int64s
    object_files: Int64s
    object_locations: Int64s
    object_wrapped: Int64s

    def check(self, names: Names) -> None:
        """Refuses columns that do not fit each other or the names."""
        tensors, objects, chunks = len(names.keys), len(names.objects), len(self.files)
        axes = self.tensor_shapes.shape[-1]
        found = tuple(column.shape for column in vars(self).values())
        expected = (
            (tensors,), (tensors,), (tensors, axes), (tensors + 1,), (chunks, axes), (chunks, axes), (chunks,),
            (chunks, 5), (objects,), (objects, 5), (objects,),
        )  # fmt: skip
        if found != expected:
            raise ValueError(f"columns have the shapes {found}, expected {expected}")
        for column, limit, name in (
            (self.dtypes, len(names.dtypes), "dtypes"),
            (self.files, len(names.files), "files"),
            (self.ndims, axes + 1, "ndims"),
            (self.object_files, len(names.files), "object_files"),
        ):
            # As unsigned numbers negative ones are huge: one pass instead of two.
            if column.size and column.view(np.uint64).max() >= limit:
                raise ValueError(f"column {name} leaves 0..{limit - 1}")
        ends = self.chunk_ends
        if ends[0] != 0 or ends[-1] != chunks or (ends[1:] < ends[:-1]).any():
            raise ValueError("column chunk_ends does not divide the chunks")


@dataclass(frozen=True)
class Rows:
    """Items in no particular order; names may repeat.

    Tensor k is of dtype `dtypes[dtype[k]]`; chunk i is of tensor `keys[rows[i]]` and lies in `files[file[i]]`, object
    i in `files[object_file[i]]`.
    """

    keys: Sequence[str]
    dtypes: Sequence[str]
    dtype: Int64s
    ndims: Int64s
    tensor_shapes: Int64s
    rows: Int64s
    offsets: Int64s
    shapes: Int64s
    files: Sequence[str]
    file: Int64s
    locations: Int64s
    object_keys: Sequence[str]
    object_file: Int64s
    object_locations: Int64s
    object_wrapped: Int64s


def assemble(items: Rows) -> tuple[Names, Columns]:
    """Sorts items into the columns of an index.

    Raises:
        StateError: two chunks of a key disagree about dtype or global shape, or an object key comes twice.
    """
    keys, key = _numbered(items.keys)
    dtype_names, dtype_number = _numbered(items.dtypes)
    dtype = dtype_number[items.dtype]
    files, file_number = _numbered(items.files)
    first = np.zeros(len(keys), np.int64)
    first[key[::-1]] = np.arange(len(key))[::-1]  # the last assignment to a place stands: the first of each name
    of_first = first[key]
    wrong = (dtype != dtype[of_first]) | (items.ndims != items.ndims[of_first])
    wrong |= (items.tensor_shapes != items.tensor_shapes[of_first]).any(axis=1)
    if wrong.any():
        row = int(np.argmax(wrong))
        one, two = (
            f"{dtype_names[dtype[at]]} {tuple(items.tensor_shapes[at, : items.ndims[at]].tolist())}"
            for at in (int(of_first[row]), row)
        )
        raise StateError(f"tensor {items.keys[row]!r}: one rank says {one}, another {two}")
    file = file_number[items.file]
    row_key = key[items.rows]
    order = sorted_rows(row_key, *items.offsets.T)
    again = (row_key[order[1:]] == row_key[order[:-1]]) & (items.offsets[order[1:]] == items.offsets[order[:-1]]).all(
        axis=1
    )
    if again.any():  # chunks without elements, or what a check of the tiling will refuse: in a definite order too
        order = sorted_rows(row_key, *items.offsets.T, file, items.locations[:, 0])
    counts = np.bincount(key[items.rows], minlength=len(keys))
    object_keys, object_number = _numbered(items.object_keys)
    object_order = np.argsort(object_number, kind="stable")
    twice = np.flatnonzero(np.diff(object_number[object_order]) == 0)
    if len(twice):
        one, two = object_order[twice[0]], object_order[twice[0] + 1]
        places = ", ".join(items.files[int(items.object_file[at])] for at in (one, two))
        raise StateError(f"object {items.object_keys[one]!r} is stored twice ({places})")
    columns = Columns(
        dtypes=dtype[first],
        ndims=items.ndims[first],
        tensor_shapes=items.tensor_shapes[first],
        chunk_ends=np.concatenate(([0], np.cumsum(counts))),
        offsets=items.offsets[order],
        shapes=items.shapes[order],
        files=file[order],
        locations=items.locations[order],
        object_files=file_number[items.object_file[object_order]],
        object_locations=items.object_locations[object_order],
        object_wrapped=items.object_wrapped[object_order],
    )
    return Names(files, keys, dtype_names, object_keys), columns


def _numbered(names: Sequence[str]) -> tuple[list[str], Int64s]:
    """The different names, sorted, and the number of each given one."""
    different = sorted(set(names))
    numbers = {name: number for number, name in enumerate(different)}
    return different, np.fromiter(map(numbers.__getitem__, names), np.int64, len(names))


def joined(columns: Sequence[Int64s], empty: tuple[int, ...]) -> Int64s:
    """Columns after each other; `empty` is the shape of none."""
    return np.concatenate(columns) if columns else np.zeros(empty, np.int64)


def encode(names: Names, columns: Columns, repeated: Mapping[str, bytes]) -> bytes:
    """The binary sidecar (see `ckptlib.index`)."""
    table: list[tuple[str, str, tuple[int, ...], int]] = []
    narrow: list[npt.NDArray[np.integer]] = []
    offset = 0
    for name, column in vars(columns).items():
        narrow.append(np.ascontiguousarray(column, _narrowest(column)))
        table.append((name, narrow[-1].dtype.str, column.shape, offset))
        offset += -(-narrow[-1].nbytes // 64) * 64
    header = json.dumps(
        {
            **names._asdict(),
            "repeated": {key: base64.b64encode(data).decode() for key, data in sorted(repeated.items())},
            "columns": table,
        },
        separators=(",", ":"),
        ensure_ascii=False,
    ).encode()
    start = -(-(len(MAGIC) + 4 + len(header)) // 64) * 64
    out = bytearray(start + offset)
    struct.pack_into(f"<{len(MAGIC)}sI", out, 0, MAGIC, len(header))
    out[len(MAGIC) + 4 : len(MAGIC) + 4 + len(header)] = header
    for (_, _, _, at), column in zip(table, narrow, strict=True):
        out[start + at : start + at + column.nbytes] = column.tobytes()
    return bytes(out)


def decode(data: bytes, where: str) -> tuple[Names, Columns, dict[str, bytes]]:
    """Reads `encode`. Raises `RecordError` or `VersionError`, as `ItemIndex.decode`."""
    if data[:7] == MAGIC[:7] and data[7:8] not in (b"", MAGIC[7:]):
        raise VersionError(
            f"{where}: an item index of version {data[7:8]!r}; {MAGIC[7:]!r} is read here; use the ckptlib of its time"
        )
    try:
        magic, length = struct.unpack_from(f"<{len(MAGIC)}sI", data)
        if magic != MAGIC:
            raise RecordError(f"{where}: not an item index (starts with {data[:8]!r})")
        header = json.loads(data[len(MAGIC) + 4 : len(MAGIC) + 4 + length])
        start = -(-(len(MAGIC) + 4 + length) // 64) * 64
        read = {}
        for name, dtype, shape, at in header["columns"]:
            if dtype not in _STORED_TYPES:
                raise ValueError(f"column {name} has the type {dtype!r}")
            column = np.frombuffer(data, dtype, math.prod(shape), start + at).astype(np.int64)
            read[name] = column if len(shape) == 1 else column.reshape(shape)
        names = Names(*(header[name] for name in Names._fields))
        for file in names.files:
            records.relative_path(file, where)
        columns = Columns(**read)
        columns.check(names)
        repeated = {key: base64.b64decode(text, validate=True) for key, text in header["repeated"].items()}
        return names, columns, repeated
    except (struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise RecordError(f"{where}: damaged item index ({error})") from error


_STORED_TYPES = ("|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<i8")


def _narrowest(column: Int64s) -> str:
    low, high = (int(column.min()), int(column.max())) if column.size else (0, 0)
    for name in _STORED_TYPES[:-1]:
        limits = np.iinfo(name)
        if limits.min <= low and high <= limits.max:
            return name
    return _STORED_TYPES[-1]
