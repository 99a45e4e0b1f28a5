"""What the kernel says of the filesystem that a path is on: its kind, and the room that is left on it.

What it does not say is None, and never a reason to refuse anything.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

MOUNTS = "/proc/self/mountinfo"

NETWORK = frozenset(
    {
        *("9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "cvmfs", "daos", "glusterfs", "gpfs", "lustre"),
        *("mfs", "ncpfs", "nfs", "nfs4", "orangefs", "panfs", "pvfs2", "quobyte", "smb3", "smbfs", "vboxsf", "wekafs"),
    }
)
"""Names as the kernel gives them. Clients may show for a while what another host has changed since; locks are
absent, or hold within one host, or only as long as a connection does."""

LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.ntfs-3g", "fuse.portal", "fuseblk"})
"""Filesystems in user space that are local; every other FUSE type (sshfs, s3fs, juicefs, ...) counts as remote."""

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
    """What type of filesystem a path is on, or would be; None: the system does not tell."""
    try:
        with open(MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            return filesystem_type(path, file.read())
    except OSError:
        return None


def filesystem_type(path: str, mounts: str) -> str | None:
    """Type of the filesystem that holds `path` (which may not exist yet), from the text of a mountinfo file.

    The longest mount point that leads to `path` decides; of several mounts on one point the last one, which hides
    the others. None when nothing matches.
    """
    target = os.path.realpath(path)
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        head, separator, tail = line.partition(" - ")
        fields = head.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        if target == point or target.startswith(point.rstrip("/") + "/"):
            kind = tail.split(" ")[0]
            if best is None or len(point) >= best[0]:
                best = (len(point), kind)
    return None if best is None else best[1]


def mount_point(path: str) -> str:
    """The topmost directory of the filesystem that a path is on."""
    path = os.path.realpath(path)
    while not os.path.ismount(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def is_network(kind: str) -> bool:
    """Whether a filesystem of this type is reached over a network, or may be."""
    return kind in NETWORK or (kind.startswith("fuse") and kind not in LOCAL_FUSE)


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
