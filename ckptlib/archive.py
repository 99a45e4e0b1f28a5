"""Reads the layout of a `torch.save` container: an uncompressed zip archive, at an offset in a file. Pure.

Only what `torch.save` writes is accepted: stored (never compressed) records that follow each other without gaps,
local headers, data descriptors and central directory in agreement. So a container cannot expand (zip bombs), cannot
show one thing to one reader and another to the next, and nearly every byte of it is either checked here or under a
record's CRC-32. 64-bit sizes are handled as zip64.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isal import isal_zlib

from ckptlib.errors import RecordError
from ckptlib.storage.base import Buffer, Storage

HEAD_BYTES = 2048
"""Read at the start of an item: the pickle of a tensor and the header of its payload end by byte 704 or so."""
TAIL_BYTES = 2048
"""Read at the end of an item: the records behind the payload and the central directory take about 900 bytes."""
WHOLE_BYTES = 16 * 1024
"""Items up to this length are read whole: one request instead of two."""

MAX_DIRECTORY_BYTES = 64 * 1024 * 1024

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED, _DESCRIPTOR = 0x0001, 0x0008


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a container.

    Attributes:
        name: without the archive's root directory: ``data.pkl``, ``data/0``.
        offset: first byte, relative to the container.
        size: bytes.
        crc32: as recorded, not yet compared.
    """

    name: str
    offset: int
    size: int
    crc32: int


@dataclass(frozen=True)
class Layout:
    """The records of one container, in storage order."""

    length: int
    records: Mapping[str, Record]

    def record(self, name: str, where: str) -> Record:
        """One record. `RecordError` when it is absent."""
        try:
            return self.records[name]
        except KeyError:
            raise RecordError(
                f"{where}: not a torch.save container: it has no record {name!r} (it has {', '.join(self.records)})"
            ) from None


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a container lies: `length` bytes at `offset` of a file."""

    offset: int
    length: int


class Window:
    """The parts of a container that were read: everything, or its two ends."""

    def __init__(self, length: int, head: Buffer, tail: Buffer) -> None:
        self.length = length
        self._head = memoryview(head)
        self._tail = memoryview(tail)

    def get(self, offset: int, size: int) -> memoryview | None:
        """Bytes of the container, or None when they were not read."""
        if offset < 0 or size < 0:
            return None
        if offset + size <= len(self._head):
            return self._head[offset : offset + size]
        start = offset - (self.length - len(self._tail))
        return self._tail[start : start + size] if start >= 0 and offset + size <= self.length else None

    def missing(self, where: str) -> Extent | None:
        """What must be read besides for `parse`, or None. The central directory of many records is long."""
        start, size, _, _ = _directory(self, where)
        return None if self.get(start, size) is not None else Extent(start, self.length - start)


class SparseWindow(Window):
    """Pieces of a container, by offset: what lies around its payloads."""

    def __init__(self, length: int, pieces: Sequence[tuple[int, Buffer]]) -> None:
        super().__init__(length, b"", b"")
        self._starts = [at for at, _ in pieces]
        self._pieces = [memoryview(data) for _, data in pieces]

    def get(self, offset: int, size: int) -> memoryview | None:
        """Bytes of the container, or None when they do not lie within one piece."""
        i = bisect.bisect_right(self._starts, offset) - 1
        if i < 0 or size < 0:
            return None
        first = offset - self._starts[i]
        return self._pieces[i][first : first + size] if first + size <= len(self._pieces[i]) else None


def parse(window: Window, where: str) -> Layout:
    """Layout of a container.

    Args:
        window: the parts that were read; the central directory must be among them (`Window.missing`). Local headers
            that were not read are taken to be where the records before them end.
        where: for messages.

    Raises:
        RecordError: not such a container, or damaged.
    """
    start, size, count, end = _directory(window, where)
    directory = window.get(start, size)
    if directory is None:
        raise RecordError(f"{where}: its central directory was not read")
    entries = _entries(directory, count, where)
    records: dict[str, Record] = {}
    roots = set()
    at = 0
    for i, entry in enumerate(entries):
        if entry.header_offset != at:
            raise RecordError(
                f"{where}: damaged container: {entry.name!r} is said to begin at {entry.header_offset}, not {at}"
            )
        next_at = entries[i + 1].header_offset if i + 1 < len(entries) else start
        first = _locate(window, entry, next_at, where)
        root, _, name = entry.name.partition("/")
        roots.add(root)
        if not name or name in records:
            raise RecordError(f"{where}: not a torch.save container: record {entry.name!r}")
        records[name] = Record(name, first, entry.size, entry.crc32)
        at = next_at
    if len(roots) != 1:
        raise RecordError(f"{where}: not a torch.save container: records below {sorted(roots) or 'nothing'}")
    if end != window.length:
        raise RecordError(f"{where}: damaged container: {window.length - end} bytes follow its end")
    return Layout(window.length, records)


def directory_start(window: Window, where: str) -> int:
    """Where the central directory begins, by the end record: its signature may stand in what is before it too.

    Raises:
        RecordError: there is no end record, or it is damaged.
    """
    return _directory(window, where)[0]


def parse_whole(data: bytes | memoryview, where: str) -> Layout:
    """Layout of a container that is in memory."""
    return parse(Window(len(data), data, data), where)


def check_crcs(data: bytes | memoryview, layout: Layout, where: str) -> None:
    """Compares the CRC-32 of every record of a container in memory.

    Raises:
        RecordError: one differs; names the record.
    """
    view = memoryview(data)
    for record in layout.records.values():
        check_crc(view[record.offset : record.offset + record.size], record, where)


def check_crc(content: bytes | memoryview, record: Record, where: str) -> None:
    """Compares the CRC-32 of one record. Raises like `check_crcs`."""
    found = isal_zlib.crc32(content)
    if found != record.crc32:
        raise RecordError(
            f"{where}: record {record.name!r} is damaged: CRC-32 {found:08x}, recorded {record.crc32:08x}"
        )


def read_windows(storage: Storage, path: str, extents: Sequence[Extent], where: str) -> list[Window]:
    """Reads what `parse` needs of several containers in one file, in one call to the storage.

    Raises:
        RecordError: an end record is damaged, so that its directory cannot be found.
        OSError: the file cannot be read, or is too short.
    """
    parts = []
    for extent in extents:
        whole = extent.length <= WHOLE_BYTES
        head = bytearray(extent.length if whole else HEAD_BYTES)
        tail = bytearray(0 if whole else TAIL_BYTES)
        parts.append((extent, head, tail))
    ranges = [(extent.offset, memoryview(head)) for extent, head, _ in parts]
    ranges += [(extent.offset + extent.length - len(tail), memoryview(tail)) for extent, _, tail in parts if tail]
    storage.read_into(path, sorted(ranges, key=lambda item: item[0]))
    windows = []
    for extent, head, tail in parts:
        window = Window(extent.length, head, tail or head)
        missing = window.missing(where)
        if missing is not None:
            tail = bytearray(missing.length)
            storage.read_into(path, [(extent.offset + missing.offset, memoryview(tail))])
            window = Window(extent.length, head, tail)
        windows.append(window)
    return windows


def read_layout(storage: Storage, path: str, size: int, where: str) -> Layout:
    """Layout of a file that is one container with any number of payloads, of which none is read.

    Raises:
        RecordError: not such a container, or damaged.
        OSError: the file cannot be read.
    """
    if size <= WHOLE_BYTES:
        data = bytearray(size)
        storage.read_into(path, [(0, memoryview(data))])
        return parse_whole(bytes(data), where)
    tail = bytearray(TAIL_BYTES)
    storage.read_into(path, [(size - TAIL_BYTES, memoryview(tail))])
    ends = Window(size, b"", tail)
    missing = ends.missing(where)
    if missing is not None:
        tail = bytearray(missing.length)
        storage.read_into(path, [(missing.offset, memoryview(tail))])
        ends = Window(size, b"", tail)
    start, length, count, _ = _directory(ends, where)
    directory = ends.get(start, length)
    assert directory is not None  # read above
    headers = sorted((entry.header_offset, len(entry.name.encode())) for entry in _entries(directory, count, where))
    spans: list[tuple[int, int]] = []
    for first, end in [
        *((at - _BEFORE, at + _LOCAL.size + name + _BEHIND) for at, name in headers),
        (start - _BEFORE, size),
    ]:
        first, end = max(first, 0), min(end, size)
        if spans and first <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((first, end))
    pieces = [(first, bytearray(end - first)) for first, end in spans]
    storage.read_into(path, [(at, memoryview(data)) for at, data in pieces])
    return parse(SparseWindow(size, pieces), where)


_BEFORE = 64
"""Bytes before a header: the data descriptor of the record before it is among them."""
_BEHIND = 4096 + 256
"""Bytes of a header behind its name: torch pads it to align the payload, to 64 bytes or to a page."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    flags: int
    stamp: tuple[int, int]
    version: int
    size: int
    crc32: int
    header_offset: int


def _directory(window: Window, where: str) -> tuple[int, int, int, int]:
    """Start and size of the central directory, its number of entries, and where the archive ends."""
    end = _read(window, window.length - _END.size, _END, b"PK\x05\x06", where, "end record")
    _, disk, start_disk, here, count, size, start, comment = end
    if disk or start_disk or here != count or comment:
        raise RecordError(f"{where}: damaged container: its end record says disk {disk}, {here} of {count}, {comment}")
    stop = window.length - _END.size
    locator_at = stop - _LOCATOR.size
    locator = window.get(locator_at, _LOCATOR.size)
    if locator is not None and bytes(locator[:4]) == b"PK\x06\x07":
        _, locator_disk, end64_at, disks = _LOCATOR.unpack(locator)
        end64 = _read(window, end64_at, _END64, b"PK\x06\x06", where, "zip64 end record")
        _, length, _, _, disk64, start_disk64, here64, count64, size64, start64 = end64
        consistent = (
            end64_at + _END64.size == locator_at and length == _END64.size - 12 and here64 == count64
            and not (locator_disk or disk64 or start_disk64) and disks == 1
            and count in (count64, _MAX16) and size in (size64, _MAX32) and start in (start64, _MAX32)
        )  # fmt: skip
        if not consistent:
            raise RecordError(f"{where}: damaged container: its two end records disagree")
        start, size, count, stop = start64, size64, count64, end64_at
    if start + size != stop or size > MAX_DIRECTORY_BYTES:
        raise RecordError(
            f"{where}: damaged container: {size} bytes of directory at {start}, but it ends at {stop} "
            f"(at most {MAX_DIRECTORY_BYTES} bytes are read)"
        )
    return start, size, count, window.length


def _entries(directory: memoryview, count: int, where: str) -> list[_Entry]:
    entries: list[_Entry] = []
    at, shared = 0, None
    while at < len(directory):
        if at + _CENTRAL.size > len(directory) or bytes(directory[at : at + 4]) != b"PK\x01\x02":
            raise RecordError(f"{where}: damaged container: no directory entry at byte {at} of the directory")
        (_, made_by, version, flags, method, time, date, crc32, stored, size, name_length, extra_length, comment_length,
         disk, internal, external, offset) = _CENTRAL.unpack_from(directory, at)  # fmt: skip
        name_at = at + _CENTRAL.size
        at = name_at + name_length + extra_length + comment_length
        if at > len(directory):
            raise RecordError(f"{where}: damaged container: a directory entry exceeds the directory")
        name = str(directory[name_at : name_at + name_length], "utf-8", "replace")
        extra = directory[name_at + name_length : name_at + name_length + extra_length]
        size, stored, offset = _zip64(extra, size, stored, offset, f"{where}: {name!r}")
        if method != 0 or flags & _ENCRYPTED or stored != size:
            raise RecordError(
                f"{where}: not a torch.save container: record {name!r} is compressed or encrypted (method {method}, "
                f"{stored} bytes for {size})"
            )
        # One writer wrote all entries: what it says of itself is the same in each.
        if disk or comment_length or shared not in (None, (made_by, version, internal, external)):
            raise RecordError(f"{where}: damaged container: the directory entry of {name!r} is unlike the others")
        shared = (made_by, version, internal, external)
        entries.append(_Entry(name, flags, (time, date), version, size, crc32, offset))
    if len(entries) != count:
        raise RecordError(f"{where}: damaged container: {len(entries)} directory entries, {count} announced")
    return entries


def _zip64(extra: memoryview, size: int, stored: int, offset: int, where: str) -> tuple[int, int, int]:
    """Replaces saturated 32-bit values by the 64-bit ones of the zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 0x0001:
            wanted = [value == _MAX32 for value in (size, stored, offset)]
            if length < 8 * sum(wanted) or at + 4 + length > len(extra):
                raise RecordError(f"{where}: damaged container: its zip64 field is too short")
            values = iter(struct.unpack_from(f"<{sum(wanted)}Q", extra, at + 4))
            size, stored, offset = (
                next(values) if saturated else value
                for value, saturated in zip((size, stored, offset), wanted, strict=True)
            )
        at += 4 + length
    return size, stored, offset


def _locate(window: Window, entry: _Entry, end: int, where: str) -> int:
    """First payload byte of a record, from its local header; everything around it is checked where it was read."""
    what = f"{where}: record {entry.name!r}"
    header = window.get(entry.header_offset, _LOCAL.size)
    if header is None:
        # Between the two ends that were read lies one large payload. Its record is the last whose header was read.
        raise RecordError(f"{what}: its header lies in a part that was not read")
    fields = _LOCAL.unpack(header)
    signature, version, flags, method, time, date, crc32, stored, size, name_length, extra_length = fields
    name_at = entry.header_offset + _LOCAL.size
    start: int = name_at + name_length + extra_length
    rest = window.get(name_at, name_length + extra_length)
    if rest is None or signature != b"PK\x03\x04" or bytes(rest[:name_length]) != entry.name.encode():
        raise RecordError(f"{what}: damaged container: no header of that name at byte {entry.header_offset}")
    if (version, flags, method, (time, date)) != (entry.version, entry.flags, 0, entry.stamp):
        raise RecordError(f"{what}: damaged container: its header and its directory entry disagree")
    streamed = bool(flags & _DESCRIPTOR)
    recorded = (entry.crc32, entry.size, entry.size)
    sizes_later = (0, 0, 0)
    narrow = tuple(min(value, _MAX32) for value in recorded)
    if (crc32, stored, size) != narrow and not (streamed and (crc32, stored, size) == sizes_later):
        raise RecordError(f"{what}: damaged container: its header and its directory entry disagree")
    _check_padding(rest[name_length:], what)
    _check_descriptor(window, start + entry.size, end, recorded, streamed, what)
    return start


def _check_padding(extra: memoryview, what: str) -> None:
    """torch pads headers with one field (``FB``), so that payloads are aligned: one byte value, repeated."""
    at = 0
    while at < len(extra):
        if at + 4 > len(extra):
            raise RecordError(f"{what}: damaged container: header field cut off")
        kind, length = struct.unpack_from("<2sH", extra, at)
        content = bytes(extra[at + 4 : at + 4 + length])
        known = kind == b"\x01\x00" or (kind == b"FB" and not content.strip(content[:1]))
        if len(content) != length or not known:
            raise RecordError(f"{what}: damaged container: header field {kind!r} is damaged")
        at += 4 + length


def _check_descriptor(
    window: Window, start: int, end: int, recorded: tuple[int, int, int], streamed: bool, what: str
) -> None:
    """Between a payload and the next header lies its data descriptor (crc, size, size), or nothing."""
    length = end - start
    form = {16: "<4sIII", 24: "<4sIQQ"}.get(length) if streamed else None
    if form is None and (streamed or length):
        raise RecordError(f"{what}: damaged container: {length} bytes lie behind its {recorded[1]} bytes")
    descriptor = window.get(start, length)
    if form is not None and descriptor is not None and struct.unpack(form, descriptor) != (b"PK\x07\x08", *recorded):
        raise RecordError(f"{what}: damaged container: its data descriptor and its directory entry disagree")


def _read(window: Window, at: int, form: struct.Struct, signature: bytes, where: str, what: str) -> tuple[int, ...]:
    data = window.get(at, form.size)
    if data is None or bytes(data[:4]) != signature:
        raise RecordError(
            f"{where}: not a torch.save container (no {what}); it is damaged, truncated or something else"
        )
    return form.unpack(data)
