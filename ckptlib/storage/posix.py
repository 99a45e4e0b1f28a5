"""POSIX filesystems: local disks, Lustre, NFS.

Promises of `base` kept here: a finished file is fsynced and so is its directory; small files are written under a
temporary name in the same directory, fsynced, then renamed (`put`) or hard-linked (`create`: `link(2)` fails when the
name exists, on NFS and Lustre too). Modes are ``0666 & ~umask``: never the 0600 of `tempfile`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import stat as stat_module
import uuid
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ckptlib.errors import StorageError
from ckptlib.storage import base
from ckptlib.storage.base import Buffer, Capabilities, Entry, Range, Written
from ckptlib.storage.hashing import StreamHasher

WRITE_BYTES = 4 * 1024 * 1024
"""Bytes per write(2): a multiple of common stripe and page sizes, small enough to overlap with hashing."""


IOV_MAX = 1024
"""Buffers per preadv(2) that every POSIX system takes."""

SMALL_BYTES = 64 * 1024
"""Pieces up to this size are copied together: a system call costs more than the copy."""

WINDOW_BYTES = 16 * 1024 * 1024
"""How much of a file is mapped at once."""

_MADV_POPULATE_READ = 22
"""Linux 5.14 and later."""

FLUSH_BYTES = 8 * 1024 * 1024
"""How much may be dirty before write-back is started: the disk works while the rest is still being hashed."""


class PosixStorage(base.Defaults):
    """Storage on a mounted filesystem. Paths are ordinary absolute paths."""

    capabilities = Capabilities(exclusive_create=True, name="posix")

    def open_write(self, path: str, *, size: int | None = None) -> PosixWriteStream:
        """Starts a file under its own (unique) name; it counts only once a record names it."""
        return PosixWriteStream(path)

    def put(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Temporary file, fsync, rename, directory fsync."""
        while not _rename(self._write_temporary(path, data, durable=durable), path):
            pass
        if durable:
            sync_directory(base.parent(path))

    def create(self, path: str, data: bytes) -> None:
        """Temporary file, fsync, hard link, directory fsync; the last also for a name that another writer made."""
        temporary = self._write_temporary(path, data)
        try:
            os.link(temporary, path)
        except FileExistsError:
            sync_directory(base.parent(path))
            raise
        finally:
            _unlink_quietly(temporary)
        sync_directory(base.parent(path))

    def swap(self, path: str, old: bytes | None, new: bytes) -> bool:
        """Compared and replaced under a lock on the directory, which whoever swaps takes.

        Across hosts it is as good as the filesystem's ``flock``: NFSv4 and Lustre (mounted with ``flock``) have it;
        where there is none, the comparison is all.
        """
        directory = base.parent(path)
        make_directory(directory)
        with _locked(directory):
            try:
                found: bytes | None = self.get(path)
            except FileNotFoundError:
                found = None
            if found != old:
                return False
            self.put(path, new)
            return True

    def copy(self, source: str, target: str) -> None:
        """A hard link under a temporary name, renamed; where there are no links, or no more of them, a copy."""
        directory = base.parent(target)
        while not _rename(_second_name(source, target), target):
            pass
        sync_directory(directory)

    def shares(self, one: str, other: str) -> bool:
        """By inode."""
        try:
            return os.path.samefile(one, other)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def same_content(self, one: str, other: str) -> bool:
        """Two names of one file are the same; others are compared."""
        return self.shares(one, other) or base.equal_bytes(self, one, other)

    def get(self, path: str) -> bytes:
        """Reads a small file."""
        with open(path, "rb") as file:
            return file.read()

    def read_into(self, path: str, ranges: Sequence[Range]) -> None:
        """`preadv(2)` straight into the buffers, neighbours together. There may be very many short ranges."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with _naming(path):
                start = 0
                while start < len(ranges):
                    offset, buffer = ranges[start]
                    stop, end = start + 1, offset + len(buffer)
                    while stop < len(ranges) and ranges[stop][0] == end:
                        end += len(ranges[stop][1])
                        stop += 1
                    if stop > start + 1 or os.preadv(fd, (buffer,), offset) != len(buffer):
                        _read_group(fd, path, offset, [buffer for _, buffer in ranges[start:stop]])
                    start = stop
        finally:
            os.close(fd)

    def read_rows(self, path: str, offset: int, stride: int, rows: npt.NDArray[np.uint8]) -> None:
        """Copies the rows out of the page cache, which holds whole pages anyway: no system call for each row."""
        step = max(1, WINDOW_BYTES // stride)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for first in range(0, len(rows), step):
                part, start = rows[first : first + step], offset + first * stride
                if not _copy_mapped(fd, start, stride, part):
                    with _naming(path):
                        for at, buffer in base.ranges_of_rows(start, stride, part):
                            _read_group(fd, path, at, [buffer])
        finally:
            os.close(fd)

    def list(self, path: str) -> list[Entry]:
        """One level, by name. Links are reported as what they are not: neither followed nor counted as directories."""
        try:
            with os.scandir(path) as entries:
                found = [
                    Entry(
                        entry.name,
                        entry.is_dir(follow_symlinks=False),
                        0 if entry.is_dir(follow_symlinks=False) else entry.stat(follow_symlinks=False).st_size,
                    )
                    for entry in entries
                ]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(found, key=lambda entry: entry.name)

    def stat(self, path: str) -> int | None:
        """Size of a regular file; None when there is none."""
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat_module.S_ISREG(status.st_mode) else None

    def remove_each(self, paths: Iterable[str]) -> dict[str, OSError]:
        """Unlinks files, then directories that became empty and are named too."""
        failures: dict[str, OSError] = {}
        for path in paths:
            try:
                _remove(path)
            except OSError as error:
                failures[path] = error
        return failures

    def url(self, path: str) -> str:
        """The path itself."""
        return path

    def _write_temporary(self, path: str, data: bytes, *, durable: bool = True) -> str:
        directory = base.parent(path)
        make_directory(directory)
        temporary = base.join(directory, f".{base.basename(path)}.{uuid.uuid4().hex}.tmp")
        try:
            # Closing may raise: quota errors of write-back.
            with _naming(path), open(temporary, "xb", buffering=0) as file:
                _write_all(file.fileno(), data)
                if durable:
                    os.fsync(file.fileno())
        except BaseException:
            _unlink_quietly(temporary)
            raise
        return temporary


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        if not os.path.isdir(path) or os.path.islink(path):
            raise
        with contextlib.suppress(OSError):  # not empty: it holds what is not ours
            os.rmdir(path)


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    """An exclusive lock on a directory, where the filesystem has locks."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
                raise
        yield
    finally:
        os.close(fd)


def _second_name(source: str, target: str) -> str:
    """A temporary file beside `target` with the content of `source`."""
    directory = base.parent(target)
    make_directory(directory)
    temporary = base.join(directory, f".{base.basename(target)}.{uuid.uuid4().hex}.tmp")
    try:
        os.link(source, temporary)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            _copy_file(source, temporary)
        except BaseException:
            _unlink_quietly(temporary)
            raise
    return temporary


def _rename(temporary: str, target: str) -> bool:
    """Puts a temporary file into place; False: somebody took it for one that a dead process left, and removed it."""
    try:
        os.replace(temporary, target)
    except FileNotFoundError:
        if os.path.lexists(temporary):
            raise
        return False
    finally:
        _unlink_quietly(temporary)  # a rename onto another name of the same file leaves both
    return True


_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""What filesystems answer that have no hard links, or no more of them for this file."""


def _copy_file(source: str, target: str) -> None:
    """A durable copy, made inside the kernel."""
    with _naming(target):
        shutil.copyfile(source, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())


class PosixWriteStream:
    """One file, written front to back, hashed beside the write, and on its way to the disk before it ends."""

    def __init__(self, path: str) -> None:
        make_directory(base.parent(path))
        self._path = path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by finish or abort
        self._hasher = StreamHasher()
        self._small = bytearray()
        self._size = 0
        self._flushed = 0

    def write(self, data: Buffer) -> None:
        """Hands blocks to the digest thread, then to the kernel; small pieces are collected first."""
        view = memoryview(data).cast("B")
        if len(view) <= SMALL_BYTES:
            self._small += view
            if len(self._small) >= WRITE_BYTES:
                self._write_small()
            return
        self._write_small()
        for start in range(0, len(view), WRITE_BYTES):
            self._write_block(view[start : start + WRITE_BYTES])

    def release(self) -> None:
        """The kernel has what was written; the digest catches up."""
        self._hasher.settle()

    def finish(self) -> Written:
        """fsync of the file, then of its directory."""
        with _naming(self._path):
            try:
                self._write_small()
                os.fsync(self._file.fileno())
            finally:
                self._file.close()
        sync_directory(base.parent(self._path))
        return Written(self._size, self._hasher.digest())

    def abort(self) -> None:
        """Closes and unlinks; the caller is already handling an error."""
        self._hasher.close()
        with contextlib.suppress(OSError):
            self._file.close()
        _unlink_quietly(self._path)

    def _write_small(self) -> None:
        if self._small:
            block, self._small = self._small, bytearray()
            self._write_block(memoryview(block))

    def _write_block(self, block: memoryview) -> None:
        self._hasher.update(block)
        with _naming(self._path):
            _write_all(self._file.fileno(), block)
        self._size += len(block)
        if self._size - self._flushed >= FLUSH_BYTES:
            _start_writeback(self._file.fileno(), self._flushed, self._size - self._flushed)
            self._flushed = self._size


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Calls on descriptors fail without saying for which file; a full disk must name one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and not isinstance(error, StorageError):
            error.filename = path
        raise


def make_directory(path: str) -> None:
    """`mkdir -p` that makes each new name durable in its parent."""
    if os.path.isdir(path):
        return
    missing = [path]
    while not os.path.isdir(base.parent(missing[-1])):
        missing.append(base.parent(missing[-1]))
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another rank was faster
            os.mkdir(directory, 0o777)
        sync_directory(base.parent(directory))


def sync_directory(path: str) -> None:
    """fsync of a directory: makes names in it durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _naming(path):
            os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems have no directory fsync
            raise
    finally:
        os.close(fd)


def _copy_mapped(fd: int, offset: int, stride: int, rows: npt.NDArray[np.uint8]) -> bool:
    """Copies rows from a mapping of the file whose pages are known to be there.

    A page that cannot be had would end the process when it is touched, so all of them are asked for first, by a call
    that can fail.

    Returns:
        False: they cannot be had so, and `preadv` shall say why.
    """
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    end = offset + (len(rows) - 1) * stride + rows.shape[1]
    if end > os.fstat(fd).st_size:
        return False
    try:
        with mmap.mmap(fd, end - start, mmap.MAP_SHARED, mmap.PROT_READ, offset=start) as mapped:
            mapped.madvise(_MADV_POPULATE_READ)
            data = np.frombuffer(mapped, np.uint8)[offset - start :]
            try:
                rows[...] = np.lib.stride_tricks.as_strided(data, rows.shape, (stride, 1), writeable=False)
            finally:
                del data  # the mapping ends with its last user
    except OSError:
        return False
    return True


def _read_group(fd: int, path: str, offset: int, buffers: Sequence[memoryview]) -> None:
    """Fills buffers from one contiguous part of a file."""
    waiting = [buffer.cast("B") for buffer in reversed(buffers) if len(buffer)]
    while waiting:
        count = os.preadv(fd, waiting[: -IOV_MAX - 1 : -1], offset)
        if count == 0:
            lacking = sum(map(len, waiting))
            raise StorageError(errno.EIO, f"{path}: ends at byte {offset}; {lacking} more bytes were expected")
        offset += count
        while waiting and count >= len(waiting[-1]):
            count -= len(waiting.pop())
        if count:
            waiting[-1] = waiting[-1][count:]


def _write_all(fd: int, data: Buffer) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _start_writeback(fd: int, offset: int, length: int) -> None:
    """Starts writing pages to the disk without waiting. On Linux POSIX_FADV_DONTNEED does that first of all; what is
    already clean leaves the page cache, where it would only push out the trainer's own pages."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def _unlink_quietly(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
