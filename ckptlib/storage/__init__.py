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

    A bare path, ``~`` path or ``file://`` URL is POSIX, ``s3://`` is S3; any other scheme goes to fsspec.

    Args:
        url: where; relative paths are made absolute.
        storage_options: see `S3Options`; elsewhere passed to the fsspec filesystem.
        single_writer: see `S3Storage`, `FsspecStorage`.

    Raises:
        ValueError: the scheme is unknown to fsspec, there is no bucket in the URL, an option is unknown.
    """
    url = os.fspath(url)
    scheme, separator, rest = url.partition("://")
    if separator and scheme in ("s3", "s3a"):
        from ckptlib.storage.s3 import S3Storage
        from ckptlib.storage.s3_options import S3Options

        # Tools disagree whether empty names are names; joined from pieces by different hands, one place has one path.
        path = "/".join(filter(None, rest.split("/")))
        if not path:
            raise ValueError(f"{url}: expected s3://bucket/prefix")
        return S3Storage(S3Options.parse(storage_options or {}), single_writer=single_writer), path
    if "://" not in url or url.startswith("file://"):
        path = os.path.abspath(os.path.expanduser(url.removeprefix("file://")))
        return PosixStorage(), path
    import fsspec

    options = {"use_listings_cache": False, **(storage_options or {})}
    if url.startswith("memory://"):
        options = dict(storage_options or {})
    fs, path = fsspec.core.url_to_fs(url, **options)
    return FsspecStorage(fs, single_writer=single_writer), path.rstrip("/")
