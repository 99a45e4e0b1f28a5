"""The seam between the protocol and a filesystem: a few operations with exact promises.

Paths are strings in the storage's own namespace, joined with ``/`` (`join`); they are never turned into `pathlib`
objects, which mangle URIs. Every backend keeps the same promises and passes the same behaviour suite:

* `open_write` / `WriteStream.finish`: when `finish` returns, the file and its name are durable. Until then nothing
  may count on it. An exception or a dropped stream never publishes a file as finished.
* `put`: all or nothing, replaces, durable. `create`: the same, and fails with `FileExistsError` if the name exists;
  of several that race, exactly one succeeds (unless `capabilities.exclusive_create` is false). The others may build on
  what is there: it is durable before they are told.
* `list`, `stat`, `get` see every write that finished before they began, by whomever. No listing caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ckptlib.errors import ExclusiveCreateError

Buffer = bytes | bytearray | memoryview
Range = tuple[int, memoryview]
"""Offset in a file, and the buffer that the bytes from there fill."""


@dataclass(frozen=True)
class Capabilities:
    """What a storage can promise.

    Attributes:
        exclusive_create: `create` is atomic and exclusive, or finds out that it is not and raises
            `ExclusiveCreateError`; without it a commit needs `single_writer` (W4).
        name: short name for messages: ``posix``, ``s3``, ``memory``, ...
        whole_files: a file that is being written is not seen under its name before it is finished.
        reads_at_once: reads of one file that it serves side by side faster than one after the other.
    """

    exclusive_create: bool
    name: str
    whole_files: bool = False
    reads_at_once: int = 2


@dataclass(frozen=True)
class Entry:
    """One name in a directory."""

    name: str
    is_dir: bool
    size: int


@dataclass(frozen=True)
class Written:
    """What a finished stream wrote: bytes, and SHA-256 (hex) of exactly those bytes as they were in memory.

    Attributes:
        part_size: bytes of every part but the last; None: the file has no part digests.
        part_sha256: SHA-256 (hex) of each part, where the storage stores files in parts that it checks.
    """

    size: int
    sha256: str
    part_size: int | None = None
    part_sha256: tuple[str, ...] = ()


@dataclass(frozen=True)
class Vouched:
    """What a store knows of a file by itself: it computed the digests over the bytes that it stored, and keeps them.

    Attributes:
        size: bytes.
        sha256: (hex) of the whole content; None: not kept.
        composite: SHA-256 (hex) of the raw SHA-256 digests of its parts, one after the other; None: not kept.
        parts: how many parts `composite` is of.
    """

    size: int
    sha256: str | None = None
    composite: str | None = None
    parts: int | None = None


@dataclass(frozen=True)
class Unfinished:
    """A file that somebody began to write and that has no name yet; it takes space until it is discarded.

    Attributes:
        path: the name it would get.
        token: the store's own name for it.
        started: when it began: seconds since the epoch, by the store's clock.
    """

    path: str
    token: str
    started: float


class WriteStream(Protocol):
    """A file being written from front to back."""

    def write(self, data: Buffer) -> None:
        """Appends. The buffer must not change before `release` or `finish` returns."""

    def release(self) -> None:
        """Returns when nothing that was handed over is read any more."""

    def finish(self) -> Written:
        """Makes the file durable under its name."""

    def abort(self) -> None:
        """Gives up; removes what it can. Never raises."""


COMPARE_BYTES = 8 * 1024 * 1024
"""Bytes of each file that are compared at a time."""


class Storage(Protocol):
    """A filesystem, as the protocol needs it. Errors: `FileNotFoundError`, `FileExistsError`, `PermissionError`,
    other `OSError` with the path."""

    capabilities: Capabilities

    def open_write(self, path: str, *, size: int | None = None) -> WriteStream:
        """Starts a new file; `FileExistsError` if the name exists. Makes parent directories.

        Args:
            size: bytes that will be written, about, when they are known: a file that cannot fit can fail at once.
        """

    def put(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Writes a small file atomically, replacing an older one.

        Args:
            durable: False for what is worth nothing after a power failure: it need not wait for a busy disk.
        """

    def create(self, path: str, data: bytes) -> None:
        """Writes a small file atomically if, and only if, the name is free."""

    def swap(self, path: str, old: bytes | None, new: bytes) -> bool:
        """Writes a small file atomically if, and only if, its content is still `old`; None: there is no file.

        Returns:
            False: somebody else changed it; nothing was written.
        """

    def copy(self, source: str, target: str) -> None:
        """Makes a file have the content of another, however large: all or nothing, replacing an older one, durable.

        Where the filesystem can, both names share the bytes (`shares`). Neither file is ever changed in place.
        """

    def shares(self, one: str, other: str) -> bool:
        """Whether two names are known to be one file: then what is true of one content is true of the other."""

    def same_content(self, one: str, other: str) -> bool:
        """Whether both files exist and hold the same bytes; told without reading them where they are shared."""

    def get(self, path: str) -> bytes:
        """The whole content of a small file."""

    def read_into(self, path: str, ranges: Sequence[Range]) -> None:
        """Fills each byte buffer from its offset; neighbours in one request. A short read is an `OSError`."""

    def read_rows(self, path: str, offset: int, stride: int, rows: npt.NDArray[np.uint8]) -> None:
        """Fills the rows of a table of bytes, (n, length), each from `stride` bytes after the one before.

        For very many short rows with small gaps, where a request for each would cost more than its bytes.
        """

    def list(self, path: str) -> list[Entry]:
        """Entries one level below, sorted by name; empty when the directory is absent."""

    def stat(self, path: str) -> int | None:
        """Size of a file in bytes; None when it is absent or a directory."""

    def await_size(self, path: str, size: int) -> int | None:
        """`stat` of a file that a record says is there with at least `size` bytes.

        Where a storage may show an old view, it is asked again for a few seconds before the file counts as missing.
        """

    def resuming(self) -> Storage:
        """The same storage, for whoever writes files again whose writer is known to be dead: what it sent may stand."""

    def vouched(self, path: str) -> Vouched | None:
        """What the store itself knows of a file's content, without anybody reading it; None: nothing.

        Never what a client only told it: a store that was not seen to reject a wrong digest vouches for nothing.
        """

    def first_part(self, path: str) -> int | None:
        """Bytes of the first of the parts that `Vouched.composite` is of; None: the store does not say."""

    def remove_each(self, paths: Iterable[str]) -> dict[str, OSError]:
        """Removes files, all that it can; a directory that is named goes when it is empty. What is gone is fine.

        Returns:
            Why the others are still there, by path.
        """

    def remove(self, paths: Iterable[str]) -> None:
        """The same; afterwards raises the first error, if there was any."""

    def unfinished(self, path: str) -> Sequence[Unfinished]:
        """Files below a directory, at any depth, that were begun and have no name yet, where the storage keeps such."""

    def discard(self, unfinished: Unfinished) -> None:
        """Gives one of them up. Already gone is fine; its writer, if it lives, then fails."""

    def prepare(self, path: str, *, size: int, files: int) -> None:
        """Told of a directory before the first file in it: so many files, so many bytes in all, are to come.

        Raises:
            StorageError: they cannot fit (`errno.ENOSPC`, `errno.EDQUOT`).
        """

    def notices(self, path: str) -> Sequence[tuple[str, bool]]:
        """What people should know about keeping checkpoints here, and for each whether it puts them at risk."""

    def url(self, path: str) -> str:
        """The path as a URL that `ckptlib.storage.resolve` takes back."""


def require_exclusive(storage: Storage, url: str, *, single_writer: bool) -> None:
    """A place that two could commit to is refused, unless the caller vouches for being alone (W4).

    Raises:
        ExclusiveCreateError: it is one.
    """
    if not (storage.capabilities.exclusive_create or single_writer):
        raise ExclusiveCreateError(
            f"{url}: {storage.capabilities.name} cannot create a file exclusively, so two writers could both commit. "
            "Pass single_writer=True if you are sure that nobody else writes here."
        )


def get_or_none(storage: Storage, path: str) -> bytes | None:
    """A small file, or None when it is absent."""
    try:
        return storage.get(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


class Defaults:
    """What a storage does where it has no better way."""

    def shares(self, one: str, other: str) -> bool:
        """Not known."""
        return False

    def same_content(self: Storage, one: str, other: str) -> bool:
        """Compares them block by block."""
        return equal_bytes(self, one, other)

    def read_rows(self: Storage, path: str, offset: int, stride: int, rows: npt.NDArray[np.uint8]) -> None:
        """One range for each row."""
        self.read_into(path, ranges_of_rows(offset, stride, rows))

    def await_size(self: Storage, path: str, size: int) -> int | None:
        """What is seen is what is there."""
        return self.stat(path)

    def resuming(self: Storage) -> Storage:
        """Nothing of it stands."""
        return self

    def vouched(self, path: str) -> Vouched | None:
        """Nothing."""
        return None

    def first_part(self, path: str) -> int | None:
        """It has none."""
        return None

    def remove(self: Storage, paths: Iterable[str]) -> None:
        """`remove_each`, then the first error."""
        failures = self.remove_each(paths)
        for path, error in failures.items():
            if len(failures) > 1:
                error.add_note(f"{self.url(path)} is the first of {len(failures)} files that could not be removed")
            raise error

    def unfinished(self, path: str) -> Sequence[Unfinished]:
        """None: files have their names from the beginning."""
        return []

    def discard(self, unfinished: Unfinished) -> None:
        """There are none."""

    def prepare(self, path: str, *, size: int, files: int) -> None:
        """Nothing to prepare."""

    def notices(self, path: str) -> Sequence[tuple[str, bool]]:
        """Nothing is known."""
        return []


def equal_bytes(storage: Storage, one: str, other: str) -> bool:
    """`Storage.same_content` by reading both files, block by block."""
    size = storage.stat(one)
    if size is None or storage.stat(other) != size:
        return False
    left, right = (memoryview(bytearray(min(size, COMPARE_BYTES))) for _ in range(2))
    for start in range(0, size, COMPARE_BYTES):
        length = min(COMPARE_BYTES, size - start)
        try:
            storage.read_into(one, [(start, left[:length])])
            storage.read_into(other, [(start, right[:length])])
        except FileNotFoundError:
            return False
        if left[:length] != right[:length]:
            return False
    return True


def ranges_of_rows(offset: int, stride: int, rows: npt.NDArray[np.uint8]) -> list[Range]:
    """The same as ranges; see `Storage.read_rows`."""
    return [(offset + i * stride, memoryview(row)) for i, row in enumerate(rows)]


def coalesce(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Groups neighbouring ranges: each group is one contiguous part of the file, and one request."""
    group: list[Range] = []
    end = -1
    for offset, buffer in ranges:
        if group and offset != end:
            yield group
            group = []
        group.append((offset, buffer))
        end = offset + len(buffer)
    if group:
        yield group


def count_requests(ranges: Sequence[Range]) -> int:
    """How many contiguous parts of a file these ranges are."""
    return sum(1 for _ in coalesce(ranges))


def join(path: str, *names: str) -> str:
    """Appends names to a path."""
    return "/".join([path.rstrip("/"), *names])


def parent(path: str) -> str:
    """The path without its last name."""
    head, _, _ = path.rstrip("/").rpartition("/")
    return head or "/"


def basename(path: str) -> str:
    """The last name of a path."""
    return path.rstrip("/").rpartition("/")[2]
