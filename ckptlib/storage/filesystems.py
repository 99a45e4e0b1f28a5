"""What the kernel says of the filesystem that a path is on: its kind, and the room that is left on it.

What it does not say is None, and never a reason to refuse anything.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

_KINDS = {
    0x0BD00BD0: "lustre",
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x00C36400: "ceph",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x01021997: "9p",
    0x65735546: "fuse",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
}
"""``f_type`` of statfs(2)."""

NETWORK = frozenset({"lustre", "nfs", "cifs", "smb2", "ceph", "gpfs", "beegfs", "9p", "fuse"})
"""Kinds whose clients may show for a while what another host has changed since."""

MEMORY = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True)
class Room:
    """What is left for this process.

    Attributes:
        bytes: free; None: not known.
        files: names that may still be made; None: not known, or without limit.
    """

    bytes: int | None = None
    files: int | None = None


def nearest_directory(path: str) -> str:
    """The directory itself, or the nearest one above it that exists."""
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def kind(path: str) -> str | None:
    """What kind of filesystem an existing path is on; None: none that is known here."""
    statfs = _statfs()
    if statfs is None:
        return None
    answer = ctypes.create_string_buffer(1024)  # larger than the structure anywhere; its first member is the type
    if statfs(os.fsencode(path), answer) != 0:
        return None
    return _KINDS.get(ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF)


def room(path: str) -> Room:
    """The room on the filesystem of a path, which need not exist yet.

    What is kept for root counts for root. It may be kept for another user; then a full disk is found when it is full.
    """
    try:
        found = os.statvfs(nearest_directory(path))
    except OSError:
        return Room()
    privileged = os.geteuid() == 0
    blocks, names = (found.f_bfree, found.f_ffree) if privileged else (found.f_bavail, found.f_favail)
    return Room(
        blocks * found.f_frsize if found.f_blocks else None,  # some that are no disks say 0 of 0
        names if found.f_files else None,
    )


def refresh(path: str) -> None:
    """Has a client ask its server what the state of a file or directory is, past its caches, where it can do that."""
    statx = _statx()
    if statx is not None:
        statx(_AT_FDCWD, os.fsencode(path), _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS, ctypes.create_string_buffer(512))


def reserve(fd: int, size: int) -> bool:
    """Has the filesystem keep space for the first `size` bytes of a file; its size stays what it is.

    Never by writing zeros, as ``posix_fallocate`` does where the filesystem cannot.

    Returns:
        False: it cannot reserve anything.

    Raises:
        OSError: there is no such space (`errno.ENOSPC`, `errno.EDQUOT`, `errno.EFBIG`).
    """
    fallocate = _fallocate()
    if fallocate is None:
        return False
    if fallocate(fd, _KEEP_SIZE, 0, size) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(code, os.strerror(code))
    return False


_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE."""

_AT_FDCWD, _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS = -100, 0x2000, 0x7FF


@functools.cache
def _statfs() -> Callable[..., int] | None:
    return _call("statfs", [ctypes.c_char_p, ctypes.c_char_p])


@functools.cache
def _statx() -> Callable[..., int] | None:
    return _call("statx", [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p])


@functools.cache
def _fallocate() -> Callable[..., int] | None:
    wide = ctypes.c_longlong
    return _call("fallocate64", [ctypes.c_int, ctypes.c_int, wide, wide])


def _call(name: str, arguments: Sequence[type[ctypes._SimpleCData[Any]]]) -> Callable[..., int] | None:
    """A function of the C library; None where there is none of that name."""
    try:
        found = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError):
        return None
    found.argtypes, found.restype = arguments, ctypes.c_int
    return cast("Callable[..., int]", found)
