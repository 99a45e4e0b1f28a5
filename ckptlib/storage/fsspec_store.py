"""Any other fsspec filesystem: correct, not fast, and honest about what it cannot promise.

fsspec filesystems differ in what a half-written file becomes: several publish it, also when an exception or the garbage
collector closes it. So nothing is streamed into a final name: a stream collects its blocks, in memory and then in a
temporary file of this host, and is uploaded in one call, whose result is looked at. Exclusive creation is promised only
where it was checked: `memory://`, within one process. Some (sftp, ftp, smb, hdfs) write to the final name itself, so
sizes are looked at and what was cut off is removed; a reader may still see it before that. Errors of other libraries
become `StorageError`.
"""

from __future__ import annotations

import contextlib
import errno
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ckptlib.errors import ExclusiveCreateError, StorageError, StorageTimeoutError
from ckptlib.storage import base
from ckptlib.storage.base import Buffer, Capabilities, Entry, Range, Written
from ckptlib.storage.hashing import StreamHasher

SPOOL_BYTES = 64 * 1024 * 1024
"""A stream that grows beyond this goes to a temporary file."""

_KEPT = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
"""Errors that say by their class what happened: filesystems raise them without an error number."""

_create_lock = threading.Lock()
"""memory:// is a dictionary of this process; this lock makes check-and-set on it one step."""


class FsspecStorage(base.Defaults):
    """Storage through an `fsspec.AbstractFileSystem`.

    Args:
        fs: the filesystem, made without a listings cache.
        single_writer: the caller vouches that nobody else writes; allows `create` where it is not exclusive.
    """

    def __init__(self, fs: Any, *, single_writer: bool = False) -> None:
        self.fs = fs
        protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
        self._protocol = protocol
        self._single_writer = single_writer
        self.capabilities = Capabilities(
            exclusive_create=protocol == "memory", name=protocol, whole_files=protocol == "memory"
        )

    def open_write(self, path: str, *, size: int | None = None) -> FsspecWriteStream:
        """Collects in memory; uploads at `finish`."""
        if self.stat(path) is not None:
            raise FileExistsError(errno.EEXIST, "file exists", path)
        return FsspecWriteStream(self, path)

    def put(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """One upload; its size is looked at, unless it need not be durable."""
        self._make_parent(path)
        with self.asking("write", path):
            self.fs.pipe_file(path, data)
        if durable and (stored := self.stat(path)) != len(data):
            self._refuse_cut(path, data, stored)

    def create(self, path: str, data: bytes) -> None:
        """Exclusive on memory://; elsewhere only with `single_writer`."""
        if not (self.capabilities.exclusive_create or self._single_writer):
            raise ExclusiveCreateError(
                f"{self.url(path)}: {self._protocol}:// cannot create a file exclusively, so two writers could both "
                "commit. Pass single_writer=True if you are sure that only this job writes here."
            )
        with _create_lock:
            if self.stat(path) is not None:
                raise FileExistsError(errno.EEXIST, "file exists", path)
            try:
                self.put(path, data)
            except Exception:
                with contextlib.suppress(OSError):  # the name was free: half a file must not take it
                    if (stored := self.stat(path)) is not None:
                        self._refuse_cut(path, data, stored)
                raise

    def swap(self, path: str, old: bytes | None, new: bytes) -> bool:
        """One step within this process; across processes only as good as `single_writer`."""
        with _create_lock:
            if base.get_or_none(self, path) != old:
                return False
            self.put(path, new)
            return True

    def copy(self, source: str, target: str) -> None:
        """One copy inside the store, where it can."""
        self._make_parent(target)
        with self.asking("copy", target):
            self.fs.cp_file(source, target)

    def get(self, path: str) -> bytes:
        """Reads a small file."""
        with self.asking("read", path):
            return bytes(self.fs.cat_file(path))

    def read_into(self, path: str, ranges: Sequence[Range]) -> None:
        """One ranged read for each group of neighbours; side by side where the filesystem can."""
        groups = [group for group in base.coalesce(ranges) if any(len(buffer) for _, buffer in group)]
        starts = [group[0][0] for group in groups]
        ends = [start + sum(len(buffer) for _, buffer in group) for start, group in zip(starts, groups, strict=True)]
        with self.asking("read", path):
            if len(groups) == 1:
                parts = [self.fs.cat_file(path, start=starts[0], end=ends[0])]
            else:
                parts = self.fs.cat_ranges([path] * len(groups), starts, ends, on_error="raise")
        for start, end, group, part in zip(starts, ends, groups, parts, strict=True):
            data = memoryview(part)
            if len(data) != end - start:
                found = f"got {len(data)} of {end - start} bytes at offset {start}"
                raise StorageError(errno.EIO, f"{self.url(path)}: {found}")
            for at, buffer in group:
                buffer.cast("B")[:] = data[at - start : at - start + len(buffer)]

    def list(self, path: str) -> list[Entry]:
        """One level, by name; caches are dropped first."""
        self.fs.invalidate_cache()
        try:
            with self.asking("list", path):
                found = self.fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        entries = [
            Entry(base.basename(info["name"]), info["type"] == "directory", int(info.get("size") or 0))
            for info in found
            if info["name"].strip("/") != path.strip("/")  # ls of a file, and some stores' directory markers
        ]
        return sorted(entries, key=lambda entry: entry.name)

    def stat(self, path: str) -> int | None:
        """Size of a file; None when there is none."""
        self.fs.invalidate_cache()
        try:
            with self.asking("look", path):
                info = self.fs.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def remove_each(self, paths: Iterable[str]) -> dict[str, OSError]:
        """One by one."""
        failures: dict[str, OSError] = {}
        for path in paths:
            try:
                with self.asking("removal", path):
                    if self.fs.isdir(path):
                        if not self.list(path):
                            with contextlib.suppress(FileExistsError):  # s3fs: only buckets can be removed so
                                self.fs.rmdir(path)
                    else:
                        self.fs.rm_file(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                failures[path] = error
        return failures

    def url(self, path: str) -> str:
        """``protocol://path``."""
        local = self._protocol in ("file", "local")  # paths are absolute there
        return f"{self._protocol}://{path if local else path.lstrip('/')}"

    @contextlib.contextmanager
    def asking(self, what: str, path: str) -> Iterator[None]:
        """Errors of a filesystem's own libraries, which are of many kinds, become `StorageError`; all name the file."""
        try:
            yield
        except (StorageError, *_KEPT) as error:
            self._name(error, path)
            raise
        except TimeoutError as error:
            said = f": {error}" if str(error) else ""
            raise StorageTimeoutError(errno.ETIMEDOUT, f"{self.url(path)}: {what}: no answer in time{said}") from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                self._name(error, path)
                raise
            raise StorageError(errno.EIO, f"{self.url(path)}: {what}: {type(error).__name__}: {error}") from error

    def _name(self, error: OSError, path: str) -> None:
        if error.errno is not None and error.filename is None and not isinstance(error, StorageError):
            error.filename = self.url(path)

    def upload(self, path: str, file: str) -> None:
        """One upload of a file of this host."""
        self._make_parent(path)
        with self.asking("upload", path):
            self.fs.put_file(file, path)

    def _refuse_cut(self, path: str, data: bytes, stored: int | None) -> None:
        """Removes a file that lost its end. Other content is another writer's, who came later."""
        if stored is not None:
            if stored >= len(data) or self.get(path) != data[:stored]:
                return
            with contextlib.suppress(OSError):
                self.remove([path])
        raise StorageError(errno.EIO, f"{self.url(path)}: wrote {len(data)} bytes, store has {_count(stored)}")

    def _make_parent(self, path: str) -> None:
        with self.asking("making of a directory", base.parent(path)):
            self.fs.makedirs(base.parent(path), exist_ok=True)


class FsspecWriteStream:
    """Collects copies of blocks, uploads once."""

    def __init__(self, storage: FsspecStorage, path: str) -> None:
        self._storage = storage
        self._path = path
        self._hasher = StreamHasher()
        self._data = bytearray()
        self._spool: Any = None
        self._size = 0

    def write(self, data: Buffer) -> None:
        """Copies: the upload happens later."""
        self._hasher.update(data)
        self._data += data
        self._size += memoryview(data).nbytes
        if len(self._data) > SPOOL_BYTES:
            self._write_spool()

    def release(self) -> None:
        """All is copied; the digest catches up."""
        self._hasher.settle()

    def finish(self) -> Written:
        """Uploads; checks the size that the store reports."""
        digest = self._hasher.digest()
        try:
            self._publish()
        except Exception:
            with contextlib.suppress(OSError):  # the name was free: half a file must not stay under it
                if self._storage.stat(self._path) not in (None, self._size):
                    self._storage.remove([self._path])
            raise
        finally:
            self._drop()
        return Written(self._size, digest)

    def abort(self) -> None:
        """Nothing was published."""
        self._hasher.close()
        self._drop()

    def _publish(self) -> None:
        if self._spool is None:
            self._storage.put(self._path, bytes(self._data), durable=False)  # its size is looked at below
        else:
            self._write_spool()
            self._storage.upload(self._path, self._spool.name)
        stored = self._storage.stat(self._path)
        if stored != self._size:
            where = self._storage.url(self._path)
            raise StorageError(errno.EIO, f"{where}: wrote {self._size} bytes, store has {_count(stored)}")

    def _write_spool(self) -> None:
        view = memoryview(self._data)
        try:
            if self._spool is None:  # in TMPDIR; it goes when it is closed, or dropped
                self._spool = tempfile.NamedTemporaryFile(prefix="ckptlib-", buffering=0)  # noqa: SIM115
            while view:
                view = view[self._spool.write(view) :]
        except OSError as error:
            where, place = self._storage.url(self._path), self._spool.name if self._spool else "a temporary file"
            raise StorageError(
                error.errno or errno.EIO,
                f"{where}: its first {self._size} bytes cannot be kept in {place} of this host, where they wait for "
                f"the upload: {error.strerror or error}. Point TMPDIR to a directory with room for the whole file.",
            ) from error
        self._data = bytearray()

    def _drop(self) -> None:
        self._data = bytearray()
        if self._spool is not None:
            self._spool.close()


def _count(stored: int | None) -> str:
    return "no such file" if stored is None else str(stored)
