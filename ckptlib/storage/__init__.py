"""Filesystems behind one small protocol. `resolve` finds the backend for a URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckptlib.storage.base import (
    Buffer,
    Capabilities,
    Entry,
    Range,
    Storage,
    Unfinished,
    Vouched,
    WriteStream,
    Written,
    basename,
    coalesce,
    count_requests,
    join,
    parent,
)
from ckptlib.storage.fsspec_store import FsspecStorage
from ckptlib.storage.posix import PosixStorage

__all__ = [
    "Buffer",
    "Capabilities",
    "Entry",
    "FsspecStorage",
    "PosixStorage",
    "Range",
    "Storage",
    "Unfinished",
    "Vouched",
    "WriteStream",
    "Written",
    "basename",
    "coalesce",
    "count_requests",
    "join",
    "parent",
    "resolve",
]


def resolve(
    url: str, storage_options: Mapping[str, Any] | None = None, *, single_writer: bool = False
) -> tuple[Storage, str]:
    """The storage for a URL, and the path in it.

    A bare path, ``~`` path or ``file://`` URL is POSIX; any other scheme goes to fsspec.

    Args:
        url: where; relative paths are made absolute.
        storage_options: passed to the fsspec filesystem.
        single_writer: see `FsspecStorage`.

    Raises:
        ValueError: the scheme is unknown to fsspec.
    """
    url = os.fspath(url)
    if "://" not in url or url.startswith("file://"):
        path = os.path.abspath(os.path.expanduser(url.removeprefix("file://")))
        return PosixStorage(), path
    import fsspec

    options = {"use_listings_cache": False, **(storage_options or {})}
    if url.startswith("memory://"):
        options = dict(storage_options or {})
    fs, path = fsspec.core.url_to_fs(url, **options)
    return FsspecStorage(fs, single_writer=single_writer), path.rstrip("/")
