"""A `torch.save` file of a whole tree: written around the memory of its tensors, read one tensor at a time.

As for single tensors (`ckptlib.container`), everything but the payloads and their CRC-32s follows from the structure.
So the file is made once without its payloads, while the state must not change, and written later, front to back, from
wherever the bytes lie then. What comes out is what `torch.load(weights_only=True)` reads.
"""

from __future__ import annotations

import io
import itertools
import pickle
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from isal import isal_zlib

from ckptlib import archive
from ckptlib import storage as st
from ckptlib.container import SparseSink
from ckptlib.errors import CkptError, StateError, UnsafePickleError, UnsupportedError
from ckptlib.safe_pickle import load_pickle
from ckptlib.safe_tensors import Storages
from ckptlib.state import memory_of
from ckptlib.writer import write_payload

_CENTRAL = b"PK\x01\x02"
_DESCRIPTOR = b"PK\x07\x08"


@dataclass(frozen=True)
class Skeleton:
    """A file without its payloads.

    Attributes:
        segments: bytes before, between and behind the payloads, with zeros for the CRC-32s: one more than payloads.
        payloads: bytes of each payload.
        crc_at: where in the last segment the CRC-32 of each payload is written a second time.
    """

    segments: tuple[bytes, ...]
    payloads: tuple[int, ...]
    crc_at: tuple[int, ...]

    @property
    def length(self) -> int:
        """Bytes of the whole file."""
        return sum(map(len, self.segments)) + sum(self.payloads)

    def write(
        self, stream: st.WriteStream, payloads: Iterable[memoryview], wrote: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Writes the file.

        Args:
            payloads: in order, each whole or in consecutive pieces; `storage.base.WriteStream.write` reads them.
            wrote: told of bytes as they are handed over.

        Raises:
            OSError: the storage failed.
        """
        stream.write(self.segments[0])
        wrote(len(self.segments[0]))
        crcs: list[int] = []
        pieces = iter(payloads)
        for i, size in enumerate(self.payloads):
            crc32, left = 0, size
            while left:
                piece = next(pieces)
                crc32 = isal_zlib.crc32(piece, crc32)
                write_payload(stream, piece, wrote)
                left -= len(piece)
            crcs.append(crc32)
            segment = bytearray(self.segments[i + 1])
            struct.pack_into("<I", segment, len(_DESCRIPTOR), crc32)
            if i + 1 == len(self.payloads):
                for at, crc in zip(self.crc_at, crcs, strict=True):
                    struct.pack_into("<I", segment, at, crc)
            stream.write(bytes(segment))
            wrote(len(segment))


def skeleton(tree: Any, where: str) -> tuple[Skeleton, list[int]]:
    """The file of a tree without its payloads: nothing is read from the memory of its tensors.

    Args:
        tree: plain data and CPU tensors.
        where: what it is, for messages.

    Returns:
        The skeleton, and the ``_cdata`` of the storage of each payload, in order. Storages without bytes have none.

    Raises:
        StateError: it holds something that no reader would load; names `where` and the type.
    """
    order = _Order()
    sink = SparseSink()
    try:
        with torch.serialization.skip_data():
            torch.save(tree, cast(IO[bytes], sink))  # write, seek, tell, flush are all it calls
        order.dump(tree)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError, RuntimeError, KeyError) as error:
        raise StateError(f"{where}: cannot be saved: {error}") from error
    pieces = sink.joined()
    length = pieces[-1][0] + len(pieces[-1][1])
    window = archive.SparseWindow(length, pieces)
    layout = archive.parse(window, where)
    _check_loadable(pieces, layout, where)
    holes = [(end, start - end) for (end, start) in _holes(pieces)]
    stored = [record for record in layout.records.values() if record.name.startswith("data/") and record.size]
    if [(record.offset, record.size) for record in stored] != holes:
        raise UnsupportedError(f"{where}: torch.save writes it in an unexpected form; it cannot be written in pieces")
    segments = tuple(data for _, data in pieces)
    crc_at = _crc_places(segments[-1], archive.directory_start(window, where) - pieces[-1][0], stored)
    return Skeleton(segments, tuple(size for _, size in holes), crc_at), [
        order.storages[int(record.name.removeprefix("data/"))] for record in stored
    ]


class _Order(pickle.Pickler):
    """Notes which storages a pickler meets, as `torch.save` numbers them."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=torch.serialization.DEFAULT_PROTOCOL)
        self.storages: list[int] = []
        self._seen: set[int] = set()

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.storage.TypedStorage | torch.UntypedStorage):
            return None
        storage = obj._untyped_storage if isinstance(obj, torch.storage.TypedStorage) else obj
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.storages.append(storage._cdata)
        return True


def _holes(pieces: list[tuple[int, bytes]]) -> Iterable[tuple[int, int]]:
    for (at, data), (start, _) in itertools.pairwise(pieces):
        yield at + len(data), start


def _crc_places(tail: bytes, at: int, stored: list[archive.Record]) -> tuple[int, ...]:
    """Where in the central directory, which begins at `at`, the CRC-32s of these records stand, in order."""
    places: dict[str, int] = {}
    while tail[at : at + 4] == _CENTRAL:
        name_length, extra_length, comment_length = struct.unpack_from("<HHH", tail, at + 28)
        _, _, name = tail[at + 46 : at + 46 + name_length].decode().partition("/")
        places[name] = at + 16
        at += 46 + name_length + extra_length + comment_length
    return tuple(places[record.name] for record in stored)


def _check_loadable(pieces: list[tuple[int, bytes]], layout: archive.Layout, where: str) -> None:
    record = layout.record("data.pkl", where)
    data = memoryview(pieces[0][1])[record.offset : record.offset + record.size]
    try:
        load_pickle(data, where, Storages(b"", layout, where, materialise=False).load)
    except CkptError as error:
        raise StateError(
            f"{where}: cannot be saved, because no reader would load it: {error}. Checkpoints hold plain data only: "
            "turn objects of your own into dicts (to_dict, state_dict) before saving."
        ) from error


class TorchFile:
    """A `torch.save` file on storage, read as plain data (R5).

    Args:
        path: the file.
        size: its bytes.

    Raises:
        RecordError: damaged, or something else.
        UnsafePickleError: a bare pickle.
        OSError: it cannot be read.
    """

    def __init__(self, storage: st.Storage, path: str, size: int) -> None:
        self.where = storage.url(path)
        self._storage = storage
        self._path = path
        self._unread: list[tuple[archive.Record, torch.Tensor]] = []
        start = bytearray(min(2, size))
        storage.read_into(path, [(0, memoryview(start))])
        if start[:1] == b"\x80":
            raise UnsafePickleError(f"{self.where}: refused: a bare pickle, not a torch.save container")
        self.layout = archive.read_layout(storage, path, size, self.where)
        order = self._small("byteorder") if "byteorder" in self.layout.records else b"little"
        if order != b"little":
            raise UnsupportedError(f"{self.where}: written on a big-endian machine; load and save it there")

    def tree(self) -> Any:
        """What was saved, tensors on the CPU. Their memory is not filled before `read`.

        Raises:
            RecordError, UnsafePickleError: damaged, or anything but plain data. Nothing was executed.
        """
        storages = _UnreadStorages(self.layout, self.where)
        tree = load_pickle(self._small("data.pkl"), self.where, storages.load)
        self._unread += storages.unread
        return tree

    def check(self) -> None:
        """What `tree` checks, without memory for tensors. Raises like it."""
        storages = Storages(b"", self.layout, self.where, materialise=False)
        load_pickle(self._small("data.pkl"), self.where, storages.load)

    def read(self) -> int:
        """Fills the tensors of the trees that were given out; each payload is compared with its CRC-32.

        Returns:
            Bytes that were read.

        Raises:
            RecordError: one is damaged.
            OSError: the file cannot be read.
        """
        count = 0
        while self._unread:
            record, data = self._unread.pop()
            memory = memory_of(data)
            self._storage.read_into(self._path, [(record.offset, memory)])
            archive.check_crc(memory, record, self.where)
            count += record.size
        return count

    def _small(self, name: str) -> bytes:
        record = self.layout.record(name, self.where)
        data = bytearray(record.size)
        self._storage.read_into(self._path, [(record.offset, memoryview(data))])
        archive.check_crc(memoryview(data), record, self.where)
        return bytes(data)


class _UnreadStorages(Storages):
    """Storages whose memory is there, and not filled yet."""

    def __init__(self, layout: archive.Layout, where: str) -> None:
        super().__init__(b"", layout, where)
        self.unread: list[tuple[archive.Record, torch.Tensor]] = []

    def _bytes(self, record: archive.Record) -> torch.UntypedStorage:
        data = torch.empty(record.size, dtype=torch.uint8)
        if record.size:
            self.unread.append((record, data))
        return data.untyped_storage()
