"""The item index: which chunk of which tensor lies where, as columns. Pure (numpy only).

A checkpoint of a million chunks must be planned and looked up in milliseconds, so there is no object per chunk:
`ItemIndex` keeps numpy columns, tensors sorted by key, the chunks of a tensor in one contiguous slice.
On storage it is a binary sidecar: magic, a JSON header that lists the columns, then each column, little-endian and
64-byte aligned. It is covered by the manifest's digest like any file of the save.
"""

from __future__ import annotations

import bisect
import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptlib import records
from ckptlib.errors import RecordError, StateError, VersionError
from ckptlib.sharding import Box

MAGIC = b"CKPTIDX1"
UNKNOWN = -1
"""In a chunk column: not recorded (foreign checkpoints), to be found from the container."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Location:
    """Where an item lies: a container at (file, offset, length), its raw payload inside it.

    Attributes:
        file: path relative to the iteration directory.
        offset: first byte of the container in the file.
        length: bytes of the container.
        payload_offset: first payload byte in the *file*, or `UNKNOWN`.
        payload_length: bytes of the payload, or `UNKNOWN`.
        crc32: CRC-32 (zip polynomial) of the payload, or `UNKNOWN`.
    """

    file: str
    offset: int
    length: int
    payload_offset: int = UNKNOWN
    payload_length: int = UNKNOWN
    crc32: int = UNKNOWN


@dataclass(frozen=True, slots=True)
class ChunkItem:
    """One stored chunk of a tensor."""

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    location: Location


@dataclass(frozen=True, slots=True)
class ObjectItem:
    """One stored object: a plain value under its dotted path, or a `ShardedObject` cell.

    Attributes:
        wrapped: the payload is ``torch.save([obj])`` (a sharded object), not ``torch.save(obj)``.
    """

    key: str
    wrapped: bool
    location: Location


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the index says of one tensor: its dtype (``torch.bfloat16`` is ``bfloat16``) and its global shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    chunks: int


@dataclass(frozen=True)
class Chunks:
    """The stored chunks of one tensor, as columns of equal length n.

    Attributes:
        offsets, shapes: (n, ndim) int64, the boxes.
        files: (n,) index into `ItemIndex.files`.
        locations: (n, 5) int64: container offset, container length, payload offset, payload length, CRC-32.
    """

    offsets: Int64s
    shapes: Int64s
    files: Int64s
    locations: Int64s

    def __len__(self) -> int:
        return len(self.files)

    def box(self, i: int) -> Box:
        """Box of chunk `i`."""
        return Box(tuple(self.offsets[i].tolist()), tuple(self.shapes[i].tolist()))


class ItemIndex:
    """All items of one checkpoint. Build it with `build`, read it with `decode`."""

    def __init__(self, header: Mapping[str, Any], columns: Mapping[str, Int64s]) -> None:
        self.files: list[str] = list(header["files"])
        self.keys: list[str] = list(header["tensor_keys"])
        self.dtypes: list[str] = list(header["tensor_dtypes"])
        self.object_keys: list[str] = list(header["object_keys"])
        self._columns = columns

    @classmethod
    def build(cls, chunks: Iterable[ChunkItem], objects: Iterable[ObjectItem] = ()) -> ItemIndex:
        """Index of these items.

        Raises:
            StateError: two chunks of a key disagree about dtype or global shape, or an object key comes twice.
        """
        by_key: dict[str, list[ChunkItem]] = {}
        for item in chunks:
            by_key.setdefault(item.key, []).append(item)
        object_items = sorted(objects, key=lambda item: item.key)
        files = sorted(
            {item.location.file for items in by_key.values() for item in items}
            | {item.location.file for item in object_items}
        )
        file_ids = {name: i for i, name in enumerate(files)}
        keys = sorted(by_key)
        shapes: list[int] = []
        shape_ends, chunk_ends, dtypes = [0], [0], []
        boxes: list[int] = []
        chunk_files: list[int] = []
        locations: list[tuple[int, ...]] = []
        for key in keys:
            items = sorted(by_key[key], key=lambda item: (item.box.offset, item.location.file, item.location.offset))
            first = items[0]
            for item in items:
                if (item.dtype, item.global_shape) != (first.dtype, first.global_shape):
                    raise StateError(
                        f"tensor {key!r}: one rank says {first.dtype} {first.global_shape}, another "
                        f"{item.dtype} {item.global_shape}"
                    )
                boxes.extend((*item.box.offset, *item.box.shape))
                chunk_files.append(file_ids[item.location.file])
                locations.append(_location_row(item.location))
            dtypes.append(first.dtype)
            shapes.extend(first.global_shape)
            shape_ends.append(len(shapes))
            chunk_ends.append(len(chunk_files))
        for one, two in itertools.pairwise(object_items):
            if one.key == two.key:
                raise StateError(f"object {one.key!r} is stored twice ({one.location.file}, {two.location.file})")
        columns = {
            "shape_ends": np.array(shape_ends, np.int64),
            "shapes": np.array(shapes, np.int64),
            "chunk_ends": np.array(chunk_ends, np.int64),
            "boxes": np.array(boxes, np.int64),
            "chunk_files": np.array(chunk_files, np.int64),
            "locations": np.array(locations, np.int64).reshape(-1, 5),
            "object_files": np.array([file_ids[item.location.file] for item in object_items], np.int64),
            "object_locations": np.array([_location_row(item.location) for item in object_items], np.int64).reshape(
                -1, 5
            ),
            "object_wrapped": np.array([item.wrapped for item in object_items], np.int64),
        }
        header = {
            "files": files,
            "tensor_keys": keys,
            "tensor_dtypes": dtypes,
            "object_keys": [item.key for item in object_items],
        }
        return cls(header, columns)

    def __contains__(self, key: str) -> bool:
        return self._find(key) is not None

    def tensor(self, key: str) -> TensorInfo:
        """Dtype and global shape of a tensor. `KeyError` when it is not stored."""
        i = self._position(key)
        starts, ends = self._columns["shape_ends"], self._columns["chunk_ends"]
        shape = tuple(self._columns["shapes"][starts[i] : starts[i + 1]].tolist())
        return TensorInfo(key, self.dtypes[i], shape, int(ends[i + 1] - ends[i]))

    def tensors(self) -> Iterator[TensorInfo]:
        """Every tensor, by key."""
        return map(self.tensor, self.keys)

    def keys_below(self, prefix: str) -> list[str]:
        """The tensor keys that start with this text, sorted."""
        return _starting_with(self.keys, prefix)

    def object_keys_below(self, prefix: str) -> list[str]:
        """The object keys that start with this text, sorted."""
        return _starting_with(self.object_keys, prefix)

    def chunk_item(self, info: TensorInfo, chunks: Chunks, i: int) -> ChunkItem:
        """Chunk `i` of a tensor as an object: for the few that a load needs."""
        location = _location(self.files[int(chunks.files[i])], chunks.locations[i])
        return ChunkItem(info.key, info.dtype, info.shape, chunks.box(i), location)

    def chunks(self, key: str) -> Chunks:
        """The stored chunks of a tensor: views, nothing is copied. `KeyError` when it is not stored."""
        i = self._position(key)
        ends = self._columns["chunk_ends"]
        start, stop = int(ends[i]), int(ends[i + 1])
        box_starts = self._box_starts()
        ndim = int(self._columns["shape_ends"][i + 1] - self._columns["shape_ends"][i])
        boxes = self._columns["boxes"][box_starts[i] : box_starts[i] + (stop - start) * 2 * ndim]
        boxes = boxes.reshape(stop - start, 2, ndim)
        return Chunks(
            offsets=boxes[:, 0],
            shapes=boxes[:, 1],
            files=self._columns["chunk_files"][start:stop],
            locations=self._columns["locations"][start:stop],
        )

    def objects(self) -> Iterator[ObjectItem]:
        """Every stored object, by key."""
        for i, key in enumerate(self.object_keys):
            yield self._object_at(i, key)

    def object(self, key: str) -> ObjectItem:
        """One stored object. `KeyError` when it is absent."""
        i = bisect.bisect_left(self.object_keys, key)
        if i == len(self.object_keys) or self.object_keys[i] != key:
            raise KeyError(key)
        return self._object_at(i, key)

    def has_object(self, key: str) -> bool:
        """Whether an object is stored under this key."""
        i = bisect.bisect_left(self.object_keys, key)
        return i < len(self.object_keys) and self.object_keys[i] == key

    def chunk_items(self) -> Iterator[ChunkItem]:
        """Every chunk as an object: for tests and exports, not for planning."""
        for info in self.tensors():
            chunks = self.chunks(info.key)
            for i in range(len(chunks)):
                yield self.chunk_item(info, chunks, i)

    def encode(self) -> bytes:
        """The binary sidecar."""
        columns = {name: np.ascontiguousarray(column, "<i8") for name, column in self._columns.items()}
        table: list[tuple[str, list[int], int]] = []
        offset = 0
        for name, column in columns.items():
            table.append((name, list(column.shape), offset))
            offset += -(-column.nbytes // 64) * 64
        header = json.dumps(
            {
                "files": self.files,
                "tensor_keys": self.keys,
                "tensor_dtypes": self.dtypes,
                "object_keys": self.object_keys,
                "columns": table,
            },
            separators=(",", ":"),
            ensure_ascii=False,
        ).encode()
        start = -(-(len(MAGIC) + 4 + len(header)) // 64) * 64
        out = bytearray(start + offset)
        struct.pack_into(f"<{len(MAGIC)}sI", out, 0, MAGIC, len(header))
        out[len(MAGIC) + 4 : len(MAGIC) + 4 + len(header)] = header
        for (_, _, at), column in zip(table, columns.values(), strict=True):
            out[start + at : start + at + column.nbytes] = column.tobytes()
        return bytes(out)

    @classmethod
    def decode(cls, data: bytes, where: str) -> ItemIndex:
        """Reads `encode`; columns are views of `data`.

        Raises:
            RecordError: not an index, or damaged.
            VersionError: an index of another version.
        """
        if data[:7] == MAGIC[:7] and data[7:8] not in (b"", MAGIC[7:]):
            raise VersionError(f"{where}: item index version {data[7:8]!r}; this ckptlib reads 1. Use a newer ckptlib.")
        try:
            magic, length = struct.unpack_from(f"<{len(MAGIC)}sI", data)
            if magic != MAGIC:
                raise RecordError(f"{where}: not an item index (starts with {data[:8]!r})")
            header = json.loads(data[len(MAGIC) + 4 : len(MAGIC) + 4 + length])
            start = -(-(len(MAGIC) + 4 + length) // 64) * 64
            columns = {}
            for name, shape, at in header["columns"]:
                count = int(np.prod(shape, dtype=np.int64))
                columns[name] = np.frombuffer(data, "<i8", count, start + at).reshape(shape)
            for file in header["files"]:
                records.relative_path(file, where)
            return cls(header, columns)
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{where}: damaged item index ({error})") from error

    def _find(self, key: str) -> int | None:
        i = bisect.bisect_left(self.keys, key)
        return i if i < len(self.keys) and self.keys[i] == key else None

    def _position(self, key: str) -> int:
        i = self._find(key)
        if i is None:
            raise KeyError(key)
        return i

    def _object_at(self, i: int, key: str) -> ObjectItem:
        location = _location(self.files[int(self._columns["object_files"][i])], self._columns["object_locations"][i])
        return ObjectItem(key, bool(self._columns["object_wrapped"][i]), location)

    def _box_starts(self) -> Int64s:
        if not hasattr(self, "_box_starts_cache"):
            ndims = np.diff(self._columns["shape_ends"])
            counts = np.diff(self._columns["chunk_ends"])
            self._box_starts_cache = np.concatenate(([0], np.cumsum(2 * ndims * counts)))
        return self._box_starts_cache


def _starting_with(keys: list[str], prefix: str) -> list[str]:
    low = bisect.bisect_left(keys, prefix)
    return keys[low : bisect.bisect_left(keys, prefix + chr(0x10FFFF), low)]


def _location_row(location: Location) -> tuple[int, int, int, int, int]:
    return (location.offset, location.length, location.payload_offset, location.payload_length, location.crc32)


def _location(file: str, row: Sequence[int] | Int64s) -> Location:
    return Location(file, *(int(x) for x in row))


def items_to_json(chunks: Sequence[ChunkItem], objects: Sequence[ObjectItem]) -> dict[str, Any]:
    """Items of one rank as JSON columns, for its record."""
    return {
        "chunks": [
            [c.key, c.dtype, list(c.global_shape), list(c.box.offset), list(c.box.shape), *_location_json(c.location)]
            for c in chunks
        ],
        "objects": [[o.key, int(o.wrapped), *_location_json(o.location)] for o in objects],
    }


def items_from_json(value: Mapping[str, Any], where: str) -> tuple[list[ChunkItem], list[ObjectItem]]:
    """Reads `items_to_json`."""
    try:
        chunks = [
            ChunkItem(key, dtype, tuple(shape), Box(tuple(offset), tuple(size)), Location(*location))
            for key, dtype, shape, offset, size, *location in value["chunks"]
        ]
        objects = [ObjectItem(key, bool(wrapped), Location(*location)) for key, wrapped, *location in value["objects"]]
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{where}: damaged item table ({error})") from error
    return chunks, objects


def _location_json(location: Location) -> list[Any]:
    return [location.file, *_location_row(location)]
