"""Files against what is known of them: size, SHA-256, CRC-32 of stored records; one verdict each (V2)."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from isal import isal_zlib

from ckptlib import commit, verify_store
from ckptlib import storage as st
from ckptlib.read_ahead import BLOCK_BYTES, ReadAhead

Verdict = Literal["ok", "missing", "extra", "size", "digest", "unreadable", "unverifiable"]
Origin = Literal["writer", "imported", "first-read"]
Level = Literal["listing", "store", "structure", "data"]
Asked = Level | Literal["auto"]
Progress = Callable[[int, int], None]

LOOKS = 16
"""Files whose size, or whose digests the store keeps, are asked for at the same time: a request each, no content."""

BAD: frozenset[Verdict] = frozenset({"missing", "size", "digest"})
"""Verdicts that mean: these are not the bytes that were written."""


@dataclass(frozen=True)
class FileCheck:
    """The verdict on one file.

    Attributes:
        size: bytes found; None when it is missing or unreadable.
        sha256: of the bytes that were read; None when they were not read.
        expected_sha256: what it was compared with.
        origin: where that came from (V1); None when there is nothing to compare with.
        detail: what is wrong, for people; empty when all is well.
        by_store: the verdict follows from the digests that the store keeps; nobody read the bytes.
    """

    verdict: Verdict
    size: int | None = None
    sha256: str | None = None
    expected_sha256: str | None = None
    origin: Origin | None = None
    detail: str = ""
    by_store: bool = False


@dataclass(frozen=True)
class Sealed:
    """A range of a file that carries a CRC-32 of its own."""

    offset: int
    size: int
    crc32: int
    what: str


@dataclass(frozen=True)
class Expected:
    """What is known of a file.

    Attributes:
        size: exact size; None when unknown.
        at_least: smallest size that everything in it needs.
        sha256: None when unknown.
        ending: its last bytes, if they are always these: tells a file that was cut off from one that was changed.
        sealed: ranges with a CRC-32, in order, not overlapping; compared on the way.
        part_size, part_sha256: of the parts in which it was handed to a store; none where it was not.
        control: a small file of the protocol or for other readers, no payload: it is read where the store has no word.
    """

    size: int | None = None
    sha256: str | None = None
    origin: Origin | None = None
    at_least: int = 0
    ending: bytes = b""
    sealed: tuple[Sealed, ...] = ()
    part_size: int | None = None
    part_sha256: tuple[str, ...] = ()
    control: bool = False


@dataclass
class Findings:
    """What a verification found.

    Attributes:
        checks: verdicts by path relative to the checkpoint's directory.
        defects: what is wrong beyond single files.
    """

    checks: dict[str, FileCheck] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)


def describe(error: OSError) -> str:
    """An error for people, in one line."""
    return error.strerror or str(error) or type(error).__name__


def cut_off(data: bytes, ending: bytes) -> bool:
    """Whether a file that should end in `ending` was cut off, rather than changed in one of these bytes."""
    tail = data[-len(ending) :]
    return bool(ending) and (len(tail) < len(ending) or sum(a != b for a, b in zip(tail, ending, strict=True)) > 1)


def read_small(storage: st.Storage, path: str, name: str, *, recorded: bool = True) -> bytes | FileCheck:
    """Content of a small file, or the verdict that it cannot be had.

    Args:
        recorded: something says that it is there: where it is not seen, it is waited for (`Storage.await_size`).
    """
    where = st.join(path, name)
    try:
        data = commit.get_recorded(storage, where, 1) if recorded else st.get_or_none(storage, where)
    except OSError as error:
        return FileCheck("unreadable", detail=describe(error))
    return FileCheck("missing", detail="the file is not there") if data is None else data


def damaged(data: bytes, ending: bytes, detail: str, origin: Origin | None = None) -> FileCheck:
    """Verdict on a small file that does not read as what it should be."""
    verdict: Verdict = "size" if cut_off(data, ending) else "digest"
    return FileCheck(verdict, len(data), hashlib.sha256(data).hexdigest(), None, origin, detail)


def check_bytes(data: bytes, expected: Expected) -> FileCheck:
    """Verdict on a small file that is in memory."""
    return _judge(len(data), hashlib.sha256(data).hexdigest(), data[-64:], expected, "")


def _run_here(label: str, work: Callable[[], None]) -> None:
    work()


@dataclass(frozen=True)
class Batches:
    """How the files of a large checkpoint are shared out, for whoever schedules or shows the work.

    Attributes:
        size: bytes after which a batch ends; a file is never divided.
        files: files after which it ends.
        run: called once per batch, one after the other, with a label for people and the work; must call the work.
    """

    size: int = 4 << 30
    files: int = 500
    run: Callable[[str, Callable[[], None]], None] = _run_here


class _StoppedError(Exception):
    """Another thread of the same check failed: its error is the one that is raised."""


Looked = Mapping[str, FileCheck | int]
"""What is known of files without reading them: a verdict, or the size of one that remains to be read."""


class FileChecker:
    """Checks files of one directory with a few threads.

    Args:
        storage, path: the checkpoint's directory.
        level: ``listing`` and ``structure`` compare sizes; ``store`` what the store vouches for; ``data`` reads and
            hashes every byte; ``auto`` those of which the store's word does not say that all is well.
        threads: how many files are read at the same time, ahead of whoever hashes them (`read_ahead`).
        progress: called with (bytes done, bytes in all) as blocks are read; from any of the threads, one at a time.
        batches: how reading is shared out; None: all at once.
    """

    def __init__(
        self,
        storage: st.Storage,
        path: str,
        *,
        level: Asked,
        threads: int = 2,
        progress: Progress | None = None,
        batches: Batches | None = None,
    ) -> None:
        self._storage = storage
        self._path = path
        self._asked = level
        self._threads = max(1, threads)
        self._progress = progress
        self._batches = batches
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._total = 0
        self._by_store = False
        self._in_vain = 0
        self.bytes_read = 0

    @property
    def level(self) -> Level:
        """How deep it looks; of ``auto`` what that came to: ``store`` when one file or more were taken at its word."""
        if self._asked == "auto":
            return "store" if self._by_store else "data"
        return self._asked

    def look(self, expected: Mapping[str, Expected]) -> Looked:
        """What sizes alone, or a store's digests, say of the files."""
        look = self._ask if self._asked in ("store", "auto") else self._compare_size
        with ThreadPoolExecutor(LOOKS, thread_name_prefix="ckptlib-look") as pool:
            looked = dict(zip(expected, pool.map(look, expected, expected.values()), strict=True))
        self._by_store |= any(isinstance(found, FileCheck) and found.by_store for found in looked.values())
        return looked

    def check(self, expected: Mapping[str, Expected], looked: Looked | None = None) -> dict[str, FileCheck]:
        """One verdict per file, by name.

        Args:
            looked: what `look` found, for who has come between.
        """
        looked = self.look(expected) if looked is None else looked
        checks = {name: found for name, found in looked.items() if isinstance(found, FileCheck)}
        sizes = {name: found for name, found in looked.items() if not isinstance(found, FileCheck)}
        self._total = sum(sizes.values())
        # Longest first: the last thread to finish then ends with a short one.
        order = sorted(sizes, key=sizes.__getitem__, reverse=True)
        if self._batches is None:
            self._read_all(order, sizes, expected, checks)
        else:
            for names in _share_out(order, sizes.__getitem__, self._batches):
                label = f"{len(names)} files, {sum(map(sizes.__getitem__, names)) / 2**30:.2f} GiB"
                self._batches.run(label, partial(self._read_all, names, sizes, expected, checks))
        return {name: checks[name] for name in sorted(checks)}

    def _read_all(
        self,
        names: Sequence[str],
        sizes: Mapping[str, int],
        expected: Mapping[str, Expected],
        checks: dict[str, FileCheck],
    ) -> None:
        if not names:
            return
        self._stopped.clear()  # whoever runs a batch may run it again after an error
        with (
            ReadAhead(self._storage, self._threads) as ahead,
            ThreadPoolExecutor(self._threads, thread_name_prefix="ckptlib-verify") as pool,
        ):
            try:
                found = pool.map(lambda name: self._read(ahead, name, sizes[name], expected[name]), names)
                checks.update(zip(names, found, strict=True))
            except BaseException:  # also Ctrl-C, and whatever `progress` raises: the other threads stop at once
                self._stopped.set()
                raise

    def _ask(self, name: str, want: Expected) -> FileCheck | int:
        """What the store says of a file by itself; its size, where somebody has to read it."""
        file = st.join(self._path, name)
        try:
            vouched = self._storage.vouched(file)
            judged = self._weigh(file, vouched, want)
        except FileNotFoundError:
            return _missing(want)
        except OSError as error:
            return FileCheck("unreadable", None, None, want.sha256, want.origin, describe(error))
        size = self._size(name, want) if vouched is None else _fitting(vouched.size, want)
        if isinstance(size, FileCheck):
            return size
        if judged.outcome == "ok":
            return FileCheck("ok", size, None, want.sha256, want.origin, by_store=True)
        if self._asked == "auto" or (want.control and size <= BLOCK_BYTES and judged.outcome == "unknown"):
            return size
        verdict: Verdict = "digest" if judged.outcome == "digest" else "unverifiable"
        return FileCheck(verdict, size, None, want.sha256, want.origin, judged.detail)

    def _weigh(self, file: str, vouched: st.Vouched | None, want: Expected) -> verify_store.Judged:
        """What follows from the store's word; how long its parts are is asked only where they differ."""
        if vouched is None:
            return verify_store.Judged("unknown", verify_store.no_word(self._storage.capabilities.name))
        judged = verify_store.judge(vouched, want.sha256, want.part_size, want.part_sha256)
        if judged.outcome == "digest" and vouched.sha256 is None:
            first = self._storage.first_part(file)
            if not verify_store.same_parts(first, vouched.size, want.part_size):
                return verify_store.Judged("unknown", verify_store.OTHER_PARTS)
        return judged

    def _compare_size(self, name: str, want: Expected) -> FileCheck | int:
        """The size of a file that is to be read; else the verdict that it gives."""
        size = self._size(name, want)
        if self._asked == "data" or isinstance(size, FileCheck):
            return size
        return FileCheck("ok", size, None, want.sha256, want.origin)

    def _size(self, name: str, want: Expected) -> FileCheck | int:
        """Size of a file, or the verdict that its size alone gives."""
        try:
            size = self._look(st.join(self._path, name), want.at_least if want.size is None else want.size)
        except OSError as error:
            return FileCheck("unreadable", None, None, want.sha256, want.origin, describe(error))
        if size is None:
            return _missing(want)
        return _fitting(size, want)

    def _look(self, file: str, least: int) -> int | None:
        """The size of a recorded file; old views are waited out, unless so many waits were in vain that all is gone."""
        if self._in_vain >= LOOKS:
            return self._storage.stat(file)
        size = self._storage.await_size(file, least)
        if size is None or size < least:
            with self._lock:
                self._in_vain += 1
        return size

    def _read(self, ahead: ReadAhead, name: str, size: int, want: Expected) -> FileCheck:
        try:
            digest, tail, damage = self._hash(ahead, st.join(self._path, name), size, want.sealed)
        except FileNotFoundError:
            return FileCheck("missing", None, None, want.sha256, want.origin, "the file vanished while it was checked")
        except OSError as error:
            again = self._size(name, want)
            if isinstance(again, FileCheck) and again.verdict in BAD:  # cut off while it was read
                return again
            return FileCheck("unreadable", size, None, want.sha256, want.origin, describe(error))
        return _judge(size, digest, tail, want, damage)

    def _hash(self, ahead: ReadAhead, file: str, size: int, sealed: Sequence[Sealed]) -> tuple[str, bytes, str]:
        """SHA-256, last bytes, and what the CRC-32s inside say is damaged.

        The whole is hashed in order, also where digests of parts are known: it is what every record of a file holds,
        on every storage. Several processors are kept busy by several files.
        """
        whole = hashlib.sha256()
        watch = _SealedReader(sealed)
        tail = b""
        for start, block in ahead.blocks(file, size):
            if self._stopped.is_set():
                raise _StoppedError
            whole.update(block)
            watch.feed(start, block)
            tail = (tail + bytes(block[-64:]))[-64:]
            self._advance(len(block))
        return whole.hexdigest(), tail, watch.damage

    def _advance(self, count: int) -> None:
        with self._lock:
            self.bytes_read += count
            if self._progress is not None:
                self._progress(self.bytes_read, self._total)


def _share_out(names: Sequence[str], size_of: Callable[[str], int], batches: Batches) -> Iterator[list[str]]:
    """Consecutive names; a batch ends before it gets larger than it may be."""
    batch: list[str] = []
    size = 0
    for name in names:
        if batch and (size + size_of(name) > batches.size or len(batch) >= batches.files):
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += size_of(name)
    if batch:
        yield batch


class _SealedReader:
    """Follows a file block by block and compares the CRC-32 of each sealed range."""

    def __init__(self, sealed: Sequence[Sealed]) -> None:
        self._sealed = sealed
        self._next = 0
        self._crc32 = 0
        self.damage = ""

    def feed(self, start: int, block: memoryview) -> None:
        """Takes the next block, which begins at `start` of the file."""
        stop = start + len(block)
        while self._next < len(self._sealed) and self._sealed[self._next].offset < stop:
            part = self._sealed[self._next]
            first, last = max(part.offset, start), min(part.offset + part.size, stop)
            if first < last:
                self._crc32 = isal_zlib.crc32(block[first - start : last - start], self._crc32)
            if part.offset + part.size > stop:
                return
            if self._crc32 != part.crc32 and not self.damage:
                self.damage = f"{part.what}: CRC-32 {self._crc32:08x}, recorded {part.crc32:08x}"
            self._next += 1
            self._crc32 = 0


def _missing(want: Expected) -> FileCheck:
    return FileCheck("missing", None, None, want.sha256, want.origin, "the file is not there")


def _fitting(size: int, want: Expected) -> FileCheck | int:
    """The size, if a file may have it."""
    if want.size is not None and size != want.size:
        return FileCheck("size", size, None, want.sha256, want.origin, f"{size} bytes, expected {want.size}")
    if size < want.at_least:
        detail = f"{size} bytes, at least {want.at_least} expected"
        return FileCheck("size", size, None, want.sha256, want.origin, detail)
    return size


def _judge(size: int, digest: str, tail: bytes, want: Expected, damage: str) -> FileCheck:
    verdict: Verdict = "ok"
    detail = damage
    if want.size is not None and size != want.size:
        verdict, detail = "size", f"{size} bytes, expected {want.size}"
    elif want.sha256 is not None and digest != want.sha256:
        verdict = "size" if cut_off(tail, want.ending) else "digest"
        if verdict == "size":
            detail = f"cut off after {size} bytes"
        elif want.sealed and not damage:
            detail = "its bytes are not those recorded, although every CRC-32 in it fits: maybe the record is damaged"
        else:
            detail = damage or "its bytes are not those recorded"
    elif damage:
        verdict = "digest"
    return FileCheck(verdict, size, digest, want.sha256, want.origin, detail)
