"""Which path on a mounted filesystem a user means."""

from __future__ import annotations

import os
from urllib.parse import unquote

from ckptlib.errors import UnsupportedError


def local_path(url: str) -> str | None:
    """The absolute path that a bare path, one that begins with ``~``, or a ``file:`` URL means; None: another URL.

    ``%20`` and the like mean what they say in a path, and a character in a ``file:`` URL, as `pathlib.Path.as_uri`
    writes it. Links are not resolved: a root keeps the name that it was given.

    Raises:
        UnsupportedError: it is empty, names another host or an unknown user, or cannot be a path.
    """
    if not url:
        raise UnsupportedError("the path is empty: expected a directory, or a URL such as s3://bucket/run")
    if url.startswith("file:"):
        path = _path_of_file_url(url)
    elif "://" in url:
        return None
    else:
        path = url
    if "\0" in path:
        raise UnsupportedError(f"{url!r}: a path cannot contain a NUL character")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~") and path.startswith("~"):
        name = path.partition("/")[0]
        raise UnsupportedError(f"{url!r}: there is no home directory for {name!r}; ./{path} means a directory here")
    return os.path.abspath(expanded)


def _path_of_file_url(url: str) -> str:
    rest = url.removeprefix("file:")
    if not rest.startswith("//"):
        path = rest
    else:
        host, slash, tail = rest.removeprefix("//").partition("/")
        if host not in ("", "localhost") and not host.startswith("~"):
            raise UnsupportedError(
                f"{url!r}: names the host {host!r}, and files of other hosts cannot be reached so. A path needs three "
                f"slashes: file:///{host}{slash}{tail}"
            )
        path = f"{host}{slash}{tail}" if host.startswith("~") else f"{slash}{tail}"
    if not path.startswith(("/", "~")):
        raise UnsupportedError(f"{url!r}: expected an absolute path, as in file:///data/run")
    return unquote(path)
