"""The item index: which chunk of which tensor lies where, as columns. Pure (numpy only).

A checkpoint of a million chunks must be planned and looked up in milliseconds, so there is no object per chunk:
`ItemIndex` keeps numpy columns, tensors sorted by key, the chunks of a tensor in one contiguous slice.
On storage it is a binary sidecar: magic, a JSON header that lists the columns, then each column, little-endian, in the
narrowest type that holds it, 64-byte aligned. It is covered by the manifest's digest like any file of the save. A rank
tells what it wrote as the index of its own items (`to_record`); the index of the save is all of these merged.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptlib.errors import RecordError
from ckptlib.index_columns import Columns, Names, Rows, assemble, decode, encode, joined
from ckptlib.sharding import Box
from ckptlib.tiling import Boxes, check_tilings, padded, stacked

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
    """All items of one checkpoint. Build it with `build` or `merge`, read it with `decode`.

    Attributes:
        files, keys, dtype_names, object_keys: the texts that columns refer to, sorted.
        repeated: payload of small items that every rank reads, by key: scalars of an optimizer, plain values. Whoever
            has the index need not open the file of another rank for them.
    """

    def __init__(self, names: Names, columns: Columns, repeated: Mapping[str, bytes] | None = None) -> None:
        self.files, self.keys, self.dtype_names, self.object_keys = names
        self.repeated: Mapping[str, bytes] = repeated or {}
        self._names = names
        self._columns = columns

    @classmethod
    def build(
        cls,
        chunks: Iterable[ChunkItem],
        objects: Iterable[ObjectItem] = (),
        repeated: Mapping[str, bytes] | None = None,
    ) -> ItemIndex:
        """Index of these items.

        Raises:
            StateError: two chunks of a key disagree about dtype or global shape, or an object key comes twice.
        """
        items, object_items = list(chunks), list(objects)
        axes = max((len(item.global_shape) for item in items), default=0) or 1
        files = [item.location.file for item in items]
        object_files = [item.location.file for item in object_items]
        return cls(
            *assemble(
                Rows(
                    keys=[item.key for item in items],
                    dtypes=[item.dtype for item in items],
                    dtype=np.arange(len(items)),
                    ndims=np.array([len(item.global_shape) for item in items], np.int64),
                    tensor_shapes=padded([item.global_shape for item in items], axes, 1),
                    rows=np.arange(len(items)),
                    offsets=padded([item.box.offset for item in items], axes, 0),
                    shapes=padded([item.box.shape for item in items], axes, 1),
                    files=files + object_files,
                    file=np.arange(len(files)),
                    locations=_location_rows([item.location for item in items]),
                    object_keys=[item.key for item in object_items],
                    object_file=np.arange(len(object_files)) + len(files),
                    object_locations=_location_rows([item.location for item in object_items]),
                    object_wrapped=np.array([item.wrapped for item in object_items], np.int64),
                )
            ),
            repeated,
        )

    @classmethod
    def merge(cls, parts: Sequence[ItemIndex]) -> ItemIndex:
        """The index of all items of several indexes, in whatever order they are given.

        Raises:
            StateError: as for `build`.
        """
        columns = [part._columns for part in parts]
        axes = max((column.tensor_shapes.shape[1] for column in columns), default=1)

        def shifted(rows: Sequence[Int64s], counts: Sequence[int]) -> Int64s:
            starts = np.cumsum([0, *counts])[: len(rows)]
            out: Int64s = joined(rows, (0,)) + np.repeat(starts, [len(row) for row in rows])
            return out

        file_counts = [len(part.files) for part in parts]
        per_tensor = [column.chunk_ends[1:] - column.chunk_ends[:-1] for column in columns]
        return cls(
            *assemble(
                Rows(
                    keys=[key for part in parts for key in part.keys],
                    dtypes=[name for part in parts for name in part.dtype_names],
                    dtype=shifted([column.dtypes for column in columns], [len(part.dtype_names) for part in parts]),
                    ndims=joined([column.ndims for column in columns], (0,)),
                    tensor_shapes=stacked([column.tensor_shapes for column in columns], axes, 1),
                    rows=np.repeat(np.arange(sum(map(len, per_tensor))), joined(per_tensor, (0,))),
                    offsets=stacked([column.offsets for column in columns], axes, 0),
                    shapes=stacked([column.shapes for column in columns], axes, 1),
                    files=[file for part in parts for file in part.files],
                    file=shifted([column.files for column in columns], file_counts),
                    locations=joined([column.locations for column in columns], (0, 5)),
                    object_keys=[key for part in parts for key in part.object_keys],
                    object_file=shifted([column.object_files for column in columns], file_counts),
                    object_locations=joined([column.object_locations for column in columns], (0, 5)),
                    object_wrapped=joined([column.object_wrapped for column in columns], (0,)),
                )
            ),
            {key: data for part in parts for key, data in part.repeated.items()},
        )

    @property
    def dtypes(self) -> list[str]:
        """Dtype of each tensor, by key."""
        return [self.dtype_names[code] for code in self._columns.dtypes.tolist()]

    @property
    def nbytes(self) -> int:
        """Bytes of the columns in memory."""
        return sum(column.nbytes for column in vars(self._columns).values())

    def __contains__(self, key: str) -> bool:
        return self._find(key) is not None

    def tensor(self, key: str) -> TensorInfo:
        """Dtype and global shape of a tensor. `KeyError` when it is not stored."""
        i, columns = self._position(key), self._columns
        shape = tuple(columns.tensor_shapes[i, : columns.ndims[i]].tolist())
        count = int(columns.chunk_ends[i + 1] - columns.chunk_ends[i])
        return TensorInfo(key, self.dtype_names[columns.dtypes[i]], shape, count)

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
        i, columns = self._position(key), self._columns
        rows = slice(int(columns.chunk_ends[i]), int(columns.chunk_ends[i + 1]))
        axes = slice(0, int(columns.ndims[i]))
        return Chunks(
            offsets=columns.offsets[rows, axes],
            shapes=columns.shapes[rows, axes],
            files=columns.files[rows],
            locations=columns.locations[rows],
        )

    def spans(self, keys: Sequence[str]) -> tuple[Int64s, Int64s]:
        """Where the chunks of tensors begin and end in `all_chunks`. `KeyError` when one is not stored."""
        positions = np.fromiter(map(self._position, keys), np.int64, len(keys))
        return self._columns.chunk_ends[positions], self._columns.chunk_ends[positions + 1]

    @property
    def all_chunks(self) -> Chunks:
        """The chunks of all tensors, one after the other, with D axes each (`ckptlib.tiling.padded`): views."""
        columns = self._columns
        return Chunks(columns.offsets, columns.shapes, columns.files, columns.locations)

    def check_tilings(self) -> None:
        """Checks that the chunks of every tensor cover it exactly once (W3).

        Raises:
            TilingError: names the tensor and the hole or the overlap.
        """
        columns = self._columns
        rows = np.repeat(np.arange(len(self.keys)), np.diff(columns.chunk_ends))
        check_tilings(self.keys, columns.tensor_shapes, columns.ndims, Boxes(rows, columns.offsets, columns.shapes))

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
        return encode(self._names, self._columns, self.repeated)

    @classmethod
    def decode(cls, data: bytes, where: str) -> ItemIndex:
        """Reads `encode`.

        Raises:
            RecordError: not an index, or damaged.
            VersionError: an index of another version.
        """
        return cls(*decode(data, where))

    def to_record(self) -> str:
        """The sidecar as text, for a rank's record."""
        return self.encode().hex()  # three times as fast to read as base64, and records live for minutes

    @classmethod
    def from_record(cls, text: str, where: str) -> ItemIndex:
        """Reads `to_record`. Raises as `decode`."""
        try:
            data = bytes.fromhex(text)
        except (TypeError, ValueError) as error:
            raise RecordError(f"{where}: damaged item table ({error})") from error
        return cls.decode(data, where)

    def _find(self, key: str) -> int | None:
        i = bisect.bisect_left(self.keys, key)
        return i if i < len(self.keys) and self.keys[i] == key else None

    def _position(self, key: str) -> int:
        i = self._find(key)
        if i is None:
            raise KeyError(key)
        return i

    def _object_at(self, i: int, key: str) -> ObjectItem:
        location = _location(self.files[int(self._columns.object_files[i])], self._columns.object_locations[i])
        return ObjectItem(key, bool(self._columns.object_wrapped[i]), location)


def _location_rows(locations: Sequence[Location]) -> Int64s:
    rows = [(at.offset, at.length, at.payload_offset, at.payload_length, at.crc32) for at in locations]
    return np.array(rows, np.int64).reshape(-1, 5)


def _starting_with(keys: list[str], prefix: str) -> list[str]:
    low = bisect.bisect_left(keys, prefix)
    return keys[low : bisect.bisect_left(keys, prefix + chr(0x10FFFF), low)]


def _location(file: str, row: Sequence[int] | Int64s) -> Location:
    return Location(file, *(int(x) for x in row))
