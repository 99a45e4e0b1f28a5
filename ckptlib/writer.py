"""Writes one rank's data files: containers one after the other, hashed on the way (W1, W2).

Nothing here knows about other ranks or about commits. A tensor on the CPU is written from its own memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from isal import isal_zlib

from ckptlib import storage as st
from ckptlib.container import template
from ckptlib.data_names import data_name
from ckptlib.index import ChunkItem, ItemIndex, Location, ObjectItem
from ckptlib.manifest import FileEntry
from ckptlib.plan import Part
from ckptlib.safe_pickle import dump_object
from ckptlib.sharding import Box
from ckptlib.state import FlatState, TensorLeaf, dtype_of, leaf_bytes

REPEATED_TENSOR_BYTES = 64
REPEATED_OBJECT_BYTES = 4096
"""Whole tensors and plain values up to this size stand in the index too (`ItemIndex.repeated`). Their number follows
from the structure of the state, not from the number of ranks: a rank's own things are in a `ShardedObject`."""


TOLD_BYTES = 64 * 1024 * 1024
"""A tensor is handed over in such pieces, so that progress is seen: a multiple of what a storage writes at once."""


@dataclass(frozen=True)
class RankFiles:
    """What a rank wrote: its files, where each item lies in them, and the payloads that the index repeats."""

    files: tuple[FileEntry, ...]
    chunks: tuple[ChunkItem, ...]
    objects: tuple[ObjectItem, ...]
    repeated: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)

    @property
    def count(self) -> int:
        """Number of data files."""
        return sum(entry.role == "data" for entry in self.files)

    def with_file(self, entry: FileEntry) -> RankFiles:
        """With one more file, which holds no items."""
        return replace(self, files=(*self.files, entry))

    def items(self) -> str:
        """The items, for the rank's record."""
        return ItemIndex.build(self.chunks, self.objects, self.repeated).to_record()


@dataclass(frozen=True)
class Blob:
    """An object, serialised before any byte is written, so that what cannot be saved is found in time.

    Attributes:
        key: its name.
        data: one `torch.save` container.
        wrapped: it is a list of one (Megatron's form of a sharded object).
    """

    key: str
    data: bytes
    wrapped: bool


def file_entry(name: str, written: st.Written) -> FileEntry:
    """What is recorded of a data file."""
    return FileEntry(name, written.size, written.sha256, part_size=written.part_size, part_sha256=written.part_sha256)


def serialise_objects(flat: FlatState, objects: Sequence[str], values: Sequence[str]) -> list[Blob]:
    """The objects and values that this rank writes.

    Raises:
        StateError: one of them is not plain data; names its path.
    """
    wanted_objects, wanted_values = set(objects), set(values)
    blobs = [Blob(o.key, dump_object([o.data], o.key), True) for o in flat.objects if o.key in wanted_objects]
    blobs += [Blob(v.key, dump_object(v.value, v.key), False) for v in flat.values if v.key in wanted_values]
    return blobs


class Passing(Sequence[TensorLeaf]):
    """Tensors that are there one after the other: memory of earlier ones is used again for later ones."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Payload bytes of all of them."""

    @abstractmethod
    def through(self, release: Callable[[], None]) -> Iterator[TensorLeaf]:
        """The tensors, in order, once. `release` is called before memory is used again, and ends all reads of it."""

    def __getitem__(self, i: Any) -> Any:
        raise TypeError("slices of a save are there one after the other")

    def __iter__(self) -> Iterator[TensorLeaf]:
        raise TypeError("slices of a save are gone through by `in_turn`")


def in_turn(tensors: Sequence[TensorLeaf], stream: st.WriteStream) -> Iterator[TensorLeaf]:
    """Tensors as they can be written to a stream, whose digest may lag behind what was handed to it."""
    return tensors.through(stream.release) if isinstance(tensors, Passing) else iter(tensors)


def payload_nbytes(tensors: Sequence[TensorLeaf]) -> int:
    """Payload bytes of tensors, without going through those that can be gone through once."""
    return tensors.nbytes if isinstance(tensors, Passing) else sum(leaf.nbytes for leaf in tensors)


def leaf_part(leaf: TensorLeaf, part: Part) -> TensorLeaf:
    """The rows of a leaf that this rank writes: a view."""
    if not leaf.box.shape or (part.start, part.stop) == (0, leaf.box.shape[part.axis]):
        return leaf
    offset, shape = [*leaf.box.offset], [*leaf.box.shape]
    offset[part.axis] += part.start
    shape[part.axis] = part.stop - part.start
    rows = leaf.tensor.reshape(leaf.box.shape).narrow(part.axis, part.start, shape[part.axis])
    return replace(leaf, tensor=rows, box=Box(tuple(offset), tuple(shape)))


def data_file_name(rank: int, number: int, save_id: str) -> str:
    """``__<rank>_<number>.<save_id>.distcp``, as `data_name`."""
    return data_name(rank, number, save_id, "distcp")


def write_rank_files(
    storage: st.Storage,
    path: str,
    save_id: str,
    rank: int,
    blobs: Sequence[Blob],
    tensors: Sequence[TensorLeaf],
    wrote: Callable[[int], None] = lambda nbytes: None,
) -> RankFiles:
    """Writes the rank's data file; a rank that owns nothing writes none.

    Args:
        storage, path: the iteration directory.
        blobs: objects, first in the file, as torch does it.
        tensors: the leaves that this rank writes; gone through once.
        wrote: told of payload bytes as they are handed to the storage.

    Returns:
        The files, durable, with digests computed from memory.

    Raises:
        OSError: the storage failed (disk full, ...); the partial file is removed as far as possible.
    """
    if not blobs and not tensors:
        return RankFiles((), (), ())
    name = data_file_name(rank, 0, save_id)
    repeated = {blob.key: blob.data for blob in blobs if not blob.wrapped and len(blob.data) <= REPEATED_OBJECT_BYTES}
    size = payload_nbytes(tensors) + sum(len(blob.data) for blob in blobs)
    stream = storage.open_write(st.join(path, name), size=size)
    try:
        chunks, objects, offset = [], [], 0
        for blob in blobs:
            stream.write(blob.data)
            wrote(len(blob.data))
            objects.append(ObjectItem(blob.key, blob.wrapped, Location(name, offset, len(blob.data))))
            offset += len(blob.data)
        for leaf in in_turn(tensors, stream):
            chunks.append(_write_tensor(stream, leaf, name, offset, wrote))
            offset += chunks[-1].location.length
            if leaf.box.shape == leaf.global_shape and leaf.nbytes <= REPEATED_TENSOR_BYTES:
                repeated[leaf.key] = bytes(leaf_bytes(leaf.tensor))
        written = stream.finish()
    except BaseException:
        stream.abort()
        raise
    return RankFiles((file_entry(name, written),), tuple(chunks), tuple(objects), repeated)


def write_payload(stream: st.WriteStream, payload: memoryview, wrote: Callable[[int], None]) -> None:
    """Writes the elements of a tensor, and tells of every piece of `TOLD_BYTES`."""
    for start in range(0, len(payload), TOLD_BYTES):
        stream.write(payload[start : start + TOLD_BYTES])
        wrote(min(TOLD_BYTES, len(payload) - start))


def _write_tensor(
    stream: st.WriteStream, leaf: TensorLeaf, name: str, offset: int, wrote: Callable[[int], None]
) -> ChunkItem:
    payload = leaf_bytes(leaf.tensor)
    form = template(dtype_of(leaf.dtype), leaf.box.shape)
    crc32 = isal_zlib.crc32(payload)
    stream.write(form.head)
    write_payload(stream, payload, wrote)
    stream.write(form.tail_with(crc32))
    location = Location(name, offset, form.length, offset + len(form.head), form.payload, crc32)
    return ChunkItem(leaf.key, leaf.dtype, leaf.global_shape, leaf.box, location)
