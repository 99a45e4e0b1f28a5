"""Filesystems behind one small protocol. `resolve` finds the backend for a URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckptlib.errors import UnsupportedError
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
    get_or_none,
    join,
    parent,
    require_exclusive,
)
from ckptlib.storage.fsspec_store import FsspecStorage
from ckptlib.storage.local_paths import local_path
from ckptlib.storage.posix import PosixStorage
from ckptlib.storage.posix_options import PosixOptions

__all__ = [
    "Buffer",
    "Capabilities",
    "Entry",
    "FsspecStorage",
    "PosixOptions",
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
    "get_or_none",
    "join",
    "parent",
    "require_exclusive",
    "resolve",
]


def resolve(
    url: str, storage_options: Mapping[str, Any] | None = None, *, single_writer: bool = False
) -> tuple[Storage, str]:
    """The storage for a URL, and the path in it.

    A bare path, ``~`` path or ``file:`` URL is POSIX (`local_path`), ``s3://`` is S3; any other scheme goes to fsspec.

    Args:
        url: where; relative paths are made absolute.
        storage_options: see `S3Options`; what is not in them comes from fsspec's configuration (``FSSPEC_S3``, files in
            ``~/.config/fsspec``), then from boto3's. Elsewhere passed to the fsspec filesystem. ``"posix"`` is for
            paths, and for nothing else (`PosixOptions`); a path passes over the others, which may be for a second root.
        single_writer: see `S3Storage`, `FsspecStorage`.

    Raises:
        UnsupportedError: no such path can be.
        ValueError: the scheme is unknown to fsspec, there is no bucket in the URL, an option is unknown.
    """
    url = os.fspath(url)
    given = dict(storage_options or {})
    posix = given.pop("posix", {})
    scheme, separator, rest = url.partition("://")
    if separator and scheme in ("s3", "s3a"):
        from ckptlib.storage.s3 import S3Storage
        from ckptlib.storage.s3_options import S3Options

        # Tools disagree whether empty names are names; joined from pieces by different hands, one place has one path.
        path = "/".join(filter(None, rest.split("/")))
        if not path:
            raise ValueError(f"{url}: expected s3://bucket/prefix")
        import fsspec.config

        configured = fsspec.config.conf.get("s3", {})
        return S3Storage(S3Options.parse(given, configured), single_writer=single_writer), path
    local = local_path(url)
    if local is not None:
        for name in PosixOptions.names():
            if name in given:
                raise UnsupportedError(
                    f"storage_options has {name!r}: for a path it goes below 'posix': {{'posix': {{{name!r}: ...}}}}"
                )
        return PosixStorage(PosixOptions.of(posix)), local
    import fsspec

    options = given if url.startswith("memory://") else {"use_listings_cache": False, **given}
    fs, path = fsspec.core.url_to_fs(url, **options)
    return FsspecStorage(fs, single_writer=single_writer), path.rstrip("/")
