"""POSIX filesystems: local disks, Lustre, NFS.

Promises of `base` kept here: a finished file is fsynced and so is its directory; small files are written under a
temporary name in the same directory, fsynced, then renamed (`put`) or hard-linked (`create`: `link(2)` fails when the
name exists, on NFS and Lustre too). Modes are ``0666 & ~umask``: never the 0600 of `tempfile`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shlex
import stat as stat_module
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ckptlib.errors import ExclusiveCreateError, StorageError
from ckptlib.storage import base, filesystems, lustre, room
from ckptlib.storage.base import Capabilities, Entry, Range
from ckptlib.storage.posix_files import (
    NEVER_LINKS,
    make_directory,
    rename,
    second_name,
    sync_directory,
    unlink_quietly,
    write_temporary,
)
from ckptlib.storage.posix_options import PosixOptions
from ckptlib.storage.posix_read import ShortFileError, read_ranges, read_table
from ckptlib.storage.posix_stream import PosixWriteStream
from ckptlib.storage.stale import Views, is_suspect

log = logging.getLogger("ckptlib")

LOCK_WAIT = 10.0
"""Seconds: a swap takes milliseconds, so whoever holds its lock for longer is stopped or dead."""

LOCK_PAUSE = 0.01
"""Seconds between two tries to get it."""


class PosixStorage(base.Defaults):
    """Storage on a mounted filesystem. Paths are ordinary absolute paths."""

    capabilities = Capabilities(exclusive_create=True, name="posix")

    def __init__(self, options: PosixOptions | None = None) -> None:
        self._options = options or PosixOptions()
        self._views = Views(self._options.stale_wait)

    def open_write(self, path: str, *, size: int | None = None) -> PosixWriteStream:
        """Starts a file under its own (unique) name; it counts only once a record names it."""
        return PosixWriteStream(path, size)

    def put(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Temporary file, fsync, rename, directory fsync."""
        while not rename(write_temporary(path, data, durable=durable), path):
            pass
        if durable:
            sync_directory(base.parent(path))

    def create(self, path: str, data: bytes) -> None:
        """Temporary file, fsync, hard link, directory fsync; the last also for a name that another writer made."""
        temporary = write_temporary(path, data)
        try:
            os.link(temporary, path)
        except OSError as error:
            filesystems.refresh(temporary)  # the number of links may be one of before
            if os.stat(temporary).st_nlink == 1:  # else it was done, and the answer to a repeated request is an error
                if isinstance(error, FileExistsError):
                    sync_directory(base.parent(path))
                if error.errno in NEVER_LINKS:
                    raise _no_links(path, error) from error
                raise
        finally:
            unlink_quietly(temporary)
        sync_directory(base.parent(path))

    def swap(self, path: str, old: bytes | None, new: bytes) -> bool:
        """Compared and replaced under a lock on the directory, which whoever swaps takes.

        Across hosts it is as good as the filesystem's ``flock`` of directories: Lustre mounted with ``flock`` has one,
        on NFS it holds within one host. Where there is none, or who holds it does not let go for `LOCK_WAIT` seconds,
        the comparison is all: whoever swaps must bear that two who swap at the same moment both succeed.
        """
        directory = base.parent(path)
        make_directory(directory)
        with _locked(directory):
            if base.get_or_none(self, path) != old:
                return False
            self.put(path, new)
            return True

    def copy(self, source: str, target: str) -> None:
        """A hard link under a temporary name, renamed; where there are no links, or no more of them, a copy."""
        directory = base.parent(target)
        while not rename(second_name(source, target), target):
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
        self._views.read(path, lambda: read_ranges(path, ranges), _may_be_stale)

    def read_rows(self, path: str, offset: int, stride: int, rows: npt.NDArray[np.uint8]) -> None:
        """Copies the rows out of the page cache, which holds whole pages anyway: no system call for each row."""
        self._views.read(path, lambda: read_table(path, offset, stride, rows), _may_be_stale)

    def list(self, path: str) -> list[Entry]:
        """One level, by name. Links are reported as what they are not: neither followed nor counted as directories."""
        filesystems.refresh(path)
        try:
            with os.scandir(path) as entries:
                found = [entry for entry in map(_entry, entries) if entry is not None]
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

    def await_size(self, path: str, size: int) -> int | None:
        """Looked at again, on network filesystems, while the file is absent or shorter."""
        return self._views.look(path, lambda: self.stat(path), lambda found: found is None or found < size)

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

    def prepare(self, path: str, *, size: int, files: int) -> None:
        """Compares what is to come with the space that is left, and with Lustre's quotas; stripes the directory there.

        What an older checkpoint takes that this one will replace is not free yet.
        """
        where = filesystems.nearest_directory(path)
        lfs = lustre.Lfs() if filesystems.kind(where) == "lustre" and lustre.has_lfs() else None
        if self._options.room == "auto":
            _require_room(path, where, lfs, size, files)
        stripe = self._options.stripe
        if lfs is None or stripe == "off" or (stripe == "auto" and not lfs.has_default_layout(where)):
            return
        make_directory(path)
        lfs.set_layout(path, lustre.layout(size, files) if stripe == "auto" else shlex.split(stripe))


def _require_room(path: str, where: str, lfs: lustre.Lfs | None, size: int, files: int) -> None:
    bounds = [room.Bound(f"on the filesystem of {where}", filesystems.room(where))]
    if lfs is not None:
        bounds += lfs.quotas(where)
    lack = room.first_lack(bounds, size, files)
    if lack is not None:
        text = (
            f"[Errno {lack.code}] {os.strerror(lack.code)}: {path!r}: {lack.text}. Nothing was written. Where a volume "
            "grows as it is needed, or compresses, storage_options={'posix': {'room': 'off'}} saves without asking."
        )
        raise StorageError(lack.code, text, path)


def _no_links(path: str, error: OSError) -> ExclusiveCreateError:
    code, kind = error.errno or errno.EPERM, filesystems.kind(base.parent(path)) or "of a kind that is not known"
    return ExclusiveCreateError(
        code,
        f"[Errno {code}] {error.strerror}: {path!r}: this filesystem ({kind}) has no hard links, so no file can be "
        "created exclusively and two writers could both commit. Save to a filesystem that has them.",
        path,
    )


def _may_be_stale(error: OSError) -> bool:
    return is_suspect(error) or isinstance(error, ShortFileError)


def _entry(found: os.DirEntry[str]) -> Entry | None:
    """None: it went while the directory was read, as temporary files do all the time; the others are still there."""
    if found.is_dir(follow_symlinks=False):
        return Entry(found.name, True, 0)
    try:
        return Entry(found.name, False, found.stat(follow_symlinks=False).st_size)
    except FileNotFoundError:
        return None


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
    """An exclusive lock on a directory, where there are locks; a holder that hangs is not waited for for ever."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + LOCK_WAIT
        while not _lock(fd):
            if time.monotonic() >= deadline:
                log.warning("%s: somebody has held its lock for %g s; going on without", directory, LOCK_WAIT)
                break
            time.sleep(LOCK_PAUSE)
        yield
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    """False: somebody else holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
            raise
    return True
