"""Steps that POSIX writes are made of: durable directories, temporary files, errors that say which file.

After a failed fsync the kernel may have dropped what it could not write and call the next one a success. So nothing
here syncs a file a second time: whoever tries again writes another file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator

from ckptlib.errors import StorageError
from ckptlib.storage import base, filesystems, room
from ckptlib.storage.base import Buffer


@contextlib.contextmanager
def naming(path: str, wanted: int = 0) -> Iterator[None]:
    """Calls on descriptors fail without saying for which file; and a full disk says little of what is full.

    Args:
        wanted: bytes that are to be written.

    Raises:
        StorageError: instead of a plain `OSError` without a path, or of a full filesystem or quota.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        if type(error) is not OSError:  # `PermissionError` stays what it is
            error.filename = error.filename or path
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if error.filename is not None and not full:
            raise
        raise _named(error, path, wanted) from error


def _named(error: OSError, path: str, wanted: int) -> StorageError:
    code = error.errno or errno.EIO
    text = f"[Errno {code}] {error.strerror or os.strerror(code)}: {path!r}"
    directory = filesystems.nearest_directory(base.parent(path))
    why = room.why_full(code, filesystems.room(directory), wanted, filesystems.kind(directory))
    return StorageError(code, f"{text}; {why}" if why else text, path)


def write_all(fd: int, data: Buffer) -> None:
    """write(2) until all is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def make_directory(path: str) -> None:
    """`mkdir -p` that makes each new name durable in its parent."""
    if os.path.isdir(path):
        return
    missing = [path]
    while not os.path.isdir(base.parent(missing[-1])):
        missing.append(base.parent(missing[-1]))
    for directory in reversed(missing):
        with naming(directory), contextlib.suppress(FileExistsError):  # another rank was faster
            os.mkdir(directory, 0o777)
        try:
            sync_directory(base.parent(directory))
        except PermissionError:  # it may be written and entered, not read
            sync_directory(directory)  # where names are journaled, its own goes with it


def sync_directory(path: str) -> None:
    """fsync of a directory: makes names in it durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems have no directory fsync
            raise
    finally:
        os.close(fd)


def write_temporary(path: str, data: bytes, *, durable: bool = True) -> str:
    """A new file beside `path` with this content; its name."""
    temporary = _temporary_name(path)
    try:
        # Closing may raise: quota errors of write-back.
        with naming(path, len(data)), open(temporary, "xb", buffering=0) as file:
            write_all(file.fileno(), data)
            if durable:
                os.fsync(file.fileno())
    except BaseException:
        unlink_quietly(temporary)
        raise
    return temporary


def second_name(source: str, target: str) -> str:
    """A temporary file beside `target` with the content of `source`: a link, where there are any."""
    temporary = _temporary_name(target)
    try:
        os.link(source, temporary)
    except OSError as error:
        if error.errno not in (*NEVER_LINKS, errno.EXDEV, errno.EMLINK):
            raise
        try:
            _copy_file(source, temporary)
        except BaseException:
            unlink_quietly(temporary)
            raise
    return temporary


def rename(temporary: str, target: str) -> bool:
    """Puts a temporary file into place; False: somebody took it for one that a dead process left, and removed it."""
    try:
        os.replace(temporary, target)
    except FileNotFoundError:
        if os.path.lexists(temporary):
            raise
        return False
    finally:
        unlink_quietly(temporary)  # a rename onto another name of the same file leaves both
    return True


def unlink_quietly(path: str) -> None:
    """Removes a file, if that is possible."""
    with contextlib.suppress(OSError):
        os.unlink(path)


NEVER_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""What filesystems answer that have no hard links."""


def _temporary_name(path: str) -> str:
    directory = base.parent(path)
    make_directory(directory)
    return base.join(directory, f".{base.basename(path)}.{uuid.uuid4().hex}.tmp")


def _copy_file(source: str, target: str) -> None:
    """A durable copy, made inside the kernel."""
    with naming(target):
        shutil.copyfile(source, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())
