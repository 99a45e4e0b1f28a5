"""Reads of byte ranges from POSIX files, straight into the buffers that want them."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckptlib.errors import StorageError
from ckptlib.storage import base
from ckptlib.storage.base import Range
from ckptlib.storage.posix_files import naming

IOV_MAX = 1024
"""Buffers per preadv(2) that every POSIX system takes."""

WINDOW_BYTES = 16 * 1024 * 1024
"""How much of a file is mapped at once."""

_MADV_POPULATE_READ = 22
"""Linux 5.14 and later."""


class ShortFileError(StorageError):
    """A file ends before what was to be read of it."""


def read_ranges(path: str, ranges: Sequence[Range]) -> None:
    """See `Storage.read_into`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with naming(path):
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


def read_table(path: str, offset: int, stride: int, rows: npt.NDArray[np.uint8]) -> None:
    """See `Storage.read_rows`."""
    step = max(1, WINDOW_BYTES // stride)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for first in range(0, len(rows), step):
            part, start = rows[first : first + step], offset + first * stride
            if not _copy_mapped(fd, start, stride, part):
                with naming(path):
                    for at, buffer in base.ranges_of_rows(start, stride, part):
                        _read_group(fd, path, at, [buffer])
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
            raise ShortFileError(errno.EIO, f"{path}: ends at byte {offset}; {lacking} more bytes were expected")
        offset += count
        while waiting and count >= len(waiting[-1]):
            count -= len(waiting.pop())
        if count:
            waiting[-1] = waiting[-1][count:]
