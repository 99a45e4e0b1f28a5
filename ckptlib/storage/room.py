"""Whether what is to be written fits, and what a filesystem means that says it is full. Pure."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass

from ckptlib.storage.filesystems import Room

LITTLE = 1024 * 1024
"""Bytes: what is left of a full filesystem may be so much, in pieces that nobody can have."""


@dataclass(frozen=True)
class Bound:
    """One limit that a save must stay within.

    Attributes:
        what: the filesystem, or a quota, for messages.
        code: the error number of going beyond it.
    """

    what: str
    room: Room
    code: int = errno.ENOSPC


@dataclass(frozen=True)
class Lack:
    """Why a save cannot fit."""

    code: int
    text: str


def first_lack(bounds: Iterable[Bound], size: int, files: int) -> Lack | None:
    """The first limit that so many bytes and files would go beyond; what is not known never is one."""
    for bound in bounds:
        free = bound.room.bytes
        if free is not None and size > free:
            return Lack(bound.code, f"{_amount(size)} are to be written, {_amount(free)} are free {bound.what}")
        names = bound.room.files
        if names is not None and files > names:
            return Lack(bound.code, f"{files} files are to be made, {names} more can be {bound.what}")
    return None


def why_full(code: int, room: Room, wanted: int, kind: str | None) -> str:
    """The clause that explains an error number of a full filesystem, by what is left on it; empty: it explains itself.

    Args:
        wanted: bytes that were to be written at once.
        kind: of the filesystem.
    """
    if code == errno.EDQUOT:
        tool = "lfs quota" if kind == "lustre" else "quota"
        return f"a quota of this user, group or project is used up ({tool} shows which)"
    if code != errno.ENOSPC:
        return ""
    if room.files == 0:
        return "the filesystem can hold no more files (df -i), whatever space is left"
    if room.bytes is None or room.bytes < max(wanted, LITTLE):
        return "" if room.bytes is None else f"{_amount(room.bytes)} are left on the filesystem"
    left = f"{_amount(room.bytes)} are free on the filesystem as a whole"
    if kind == "lustre":
        return (
            f"{left}: one of the targets (OSTs) that this file is striped over is full, although others are not. "
            "lfs df shows them; fewer or other stripes, or freeing space on that target, help"
        )
    return f"{left}: space that is kept for others, a quota, or one full target of a parallel filesystem"


def _amount(count: int) -> str:
    """``1.5 GiB``; small ones exactly."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
