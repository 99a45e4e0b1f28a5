"""Calls to the kernel that fail, for the files below one directory, as disks and network filesystems make them fail."""

from __future__ import annotations

import builtins
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

from tests.support.faults import Turns

ON_DESCRIPTORS = ("write", "pwrite", "writev", "fsync", "fdatasync", "preadv")
ON_NAMES = ("open", "replace", "link", "unlink", "mkdir", "rmdir", "scandir")

DiskKind = Literal[
    "error",        # it fails, and nothing was done
    "error_after",  # it was done, and fails: the answer of a network filesystem was lost
    "short",        # half of it was done, without an error: `write`, `preadv`
    "flip",         # one byte that was read is another: `preadv`
]  # fmt: skip


@dataclass
class DiskFault(Turns):
    """One thing that goes wrong with calls to the kernel.

    Attributes:
        operation: pattern of names in `os`: ``write``, ``f*sync``.
        key: pattern of paths.
        code: what `errno` says.
        skip, times: see `Turns`.
    """

    kind: DiskKind
    code: int
    operation: str = "*"
    key: str = "*"
    skip: int = 0
    times: int | None = 1
    seen: int = 0


@contextlib.contextmanager
def failing_disk(root: str, faults: Sequence[DiskFault]) -> Iterator[None]:
    """Has these faults below a directory, in this process."""
    lock = threading.Lock()

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            path = _path_of(args[0])
            fault = None
            if path.startswith(root):
                with lock:
                    fault = next((fault for fault in faults if fault.strikes(name, path)), None)
            if fault is None:
                return original(*args, **options)
            if fault.kind == "short" and name == "write":
                return original(args[0], memoryview(args[1])[: max(1, len(args[1]) // 2)])
            if fault.kind == "short" and name == "preadv":
                first = memoryview(args[1][0]).cast("B")
                return original(args[0], [first[: max(1, len(first) // 2)]], *args[2:])
            if fault.kind == "flip" and name == "preadv":
                count = original(*args, **options)
                memoryview(args[1][0]).cast("B")[0] ^= 0x20
                return count
            if fault.kind == "error_after":
                done = original(*args, **options)
                if name in ("open", "scandir"):
                    done.close() if hasattr(done, "close") else os.close(done)
            raise OSError(fault.code, os.strerror(fault.code), *([path] if name in ON_NAMES else []))

        return call

    with contextlib.ExitStack() as stack:
        for name in (*ON_DESCRIPTORS, *ON_NAMES):
            stack.enter_context(mock.patch.object(os, name, wrap(name, getattr(os, name))))
        stack.enter_context(mock.patch.object(builtins, "open", wrap("open", builtins.open)))
        yield


def _path_of(target: Any) -> str:
    """Of a name, or of what a descriptor is of."""
    if isinstance(target, int):
        try:
            return os.readlink(f"/proc/self/fd/{target}")
        except OSError:
            return ""
    return os.fspath(target) if isinstance(target, (str, os.PathLike)) else ""
