"""A storage in memory whose every effect is one named step, so that a scheduler can stand between any two of them.

`Disk` is an immutable snapshot of a POSIX filesystem; `Disk.apply` carries out one `Step`. `RecordingStorage` keeps
the `Storage` protocol by asking a *performer* for one step after the other: by itself it owns a disk and performs
them at once; the explorer performs them when it is the actor's turn, or never (a crash).

What is modelled of POSIX: directories exist by themselves and are made in a step of their own, before the file in
them; `put` and `create` become visible at once and whole; a stream's file is visible from `open_write` on, first
empty, then in part, and whole only after `finish`; a crash leaves it as it is. `Disk.after_power_loss` drops what
was never finished.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptlib.errors import StorageError
from ckptlib.storage import base
from ckptlib.storage.base import Buffer, Capabilities, Entry, Written

READING = frozenset({"get", "list", "stat", "read", "receive", "gather"})
"""Steps that change nothing."""


class Step(NamedTuple):
    """One step of an actor.

    Attributes:
        kind: ``mkdir create put swap open part finish remove`` change a path, ``get list stat read`` look at one.
            The explorer adds steps of its own (messages).
        data: content, for those that write; ranges for ``read``.
    """

    kind: str
    path: str
    data: Any = None

    def __str__(self) -> str:
        return f"{self.kind} {self.path}"


@dataclass(frozen=True)
class Failure:
    """The result of a step that fails: the error that the storage raises."""

    code: int
    path: str

    def error(self) -> OSError:
        """A fresh error."""
        return OSError(self.code, os.strerror(self.code), self.path)


class Partial(bytes):
    """Content of a file whose stream is not finished: visible, and lost when the power goes."""


Content = bytes | None
"""Of a file; None is a directory."""


@functools.cache
def _mark(path: str, content: Content) -> int:
    kind = type(content).__name__
    return int.from_bytes(hashlib.blake2b(repr((path, kind, content)).encode(), digest_size=16).digest())


class Disk:
    """A snapshot. Equal content gives the same `key`, by whatever way it came about."""

    __slots__ = ("_children", "files", "key", "seen")

    def __init__(self, files: Mapping[str, Content], key: int) -> None:
        self.files = files
        self.key = key
        self.seen: dict[Any, Any] = {}
        """For whoever explores: answers to steps that only read."""
        self._children: dict[str, dict[str, Content]] | None = None

    @classmethod
    def of(cls, files: Mapping[str, Content]) -> Disk:
        """A disk with these files; their directories must be among them."""
        key = 0
        for path, content in files.items():
            key ^= _mark(path, content)
        return cls(files, key)

    def change(self, path: str, content: Content, *, remove: bool = False) -> Disk:
        """The disk after one file or directory came, changed or went."""
        files = dict(self.files)
        key = self.key
        if path in files:
            key ^= _mark(path, files.pop(path))
        if not remove:
            files[path] = content
            key ^= _mark(path, content)
        return Disk(files, key)

    def after_power_loss(self) -> Disk:
        """What is left when every machine stops at once: finished files only."""
        return Disk.of({path: data for path, data in self.files.items() if not isinstance(data, Partial)})

    def is_dir(self, path: str) -> bool:
        """Whether a directory of this name exists."""
        return path == "/" or self.files.get(path, b"") is None

    def file(self, path: str) -> bytes | None:
        """Content of a file, None when there is none."""
        return self.files.get(path)

    def children(self, path: str) -> Mapping[str, Content]:
        """Name -> content, one level below."""
        if self._children is None:
            self._children = {}
            for name, content in self.files.items():
                self._children.setdefault(base.parent(name), {})[base.basename(name)] = content
        return self._children.get(path, {})

    def difference(self, other: Disk) -> set[str]:
        """What somebody who looks can tell them apart by: files by name, listings as ``<directory>/*``."""
        changed = {path for path, content in self.files.items() if other.files.get(path, self) != content}
        changed |= other.files.keys() - self.files.keys()
        parents = {base.parent(path) for path in changed}
        return changed | {f"{path}/*" for path in parents if self.entries(path) != other.entries(path)}

    def entries(self, path: str) -> tuple[Entry, ...]:
        """The listing of a directory."""
        children = sorted(self.children(path).items())
        return tuple(Entry(name, content is None, len(content or b"")) for name, content in children)

    def apply(self, step: Step) -> tuple[Any, Disk]:
        """Carries out one step: its result (a `Failure` for an error) and the disk after it."""
        kind, path, data = step
        if kind in ("get", "list", "stat", "read"):
            return self._look(kind, path, data), self
        if kind == "mkdir":
            missing, disk = _missing_directories(self, path), self
            for directory in missing:
                disk = disk.change(directory, None)
            return None, disk
        there = path in self.files
        if kind == "remove":
            if not there:
                return None, self
            keep = self.is_dir(path) and bool(self.children(path))  # what is not ours is in it
            return None, self if keep else self.change(path, None, remove=True)
        if kind == "swap":
            old, new = data
            if self.file(path) != old:
                return False, self
            return True, self.apply(Step("put", path, new))[1]
        if self.is_dir(path):
            return Failure(errno.EISDIR if kind == "put" else errno.EEXIST, path), self
        if there and kind in ("create", "open"):
            return Failure(errno.EEXIST, path), self
        if not self.is_dir(base.parent(path)):  # somebody removed it after it was made
            return Failure(errno.ENOENT, path), self
        return None, self.change(path, Partial(data) if kind in ("open", "part") else data)

    def _look(self, kind: str, path: str, data: Any) -> Any:
        if kind == "list":
            return self.entries(path)
        content = self.file(path)
        if kind == "stat":
            return None if content is None else len(content)
        if content is None:
            return Failure(errno.EISDIR if self.is_dir(path) else errno.ENOENT, path)
        if kind == "get":
            return bytes(content)
        return tuple(bytes(content[offset : offset + length]) for offset, length in data)


def _missing_directories(disk: Disk, path: str) -> list[str]:
    missing = []
    while not disk.is_dir(path):
        missing.append(path)
        path = base.parent(path)
    return missing[::-1]


EMPTY = Disk.of({})


class RecordingStorage(base.Defaults):
    """The `Storage` protocol over single steps.

    Args:
        perform: carries out a step and returns its result; None: a disk of its own, at once.
    """

    capabilities = Capabilities(exclusive_create=True, name="recording")

    def __init__(self, perform: Callable[[Step], Any] | None = None) -> None:
        self.disk = EMPTY
        self.steps: list[Step] = []
        self._perform = perform or self._perform_here

    def _perform_here(self, step: Step) -> Any:
        self.steps.append(step)
        result, self.disk = self.disk.apply(step)
        return result

    def _do(self, kind: str, path: str, data: Any = None) -> Any:
        result = self._perform(Step(kind, path, data))
        if isinstance(result, Failure):
            raise result.error()
        return result

    def open_write(self, path: str, *, size: int | None = None) -> RecordingStream:
        """Two steps: the directory, the empty file."""
        self._do("mkdir", base.parent(path))
        self._do("open", path, b"")
        return RecordingStream(self._do, path)

    def put(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Two steps: the directory, the file."""
        self._do("mkdir", base.parent(path))
        self._do("put", path, bytes(data))

    def create(self, path: str, data: bytes) -> None:
        """Two steps: the directory, the file."""
        self._do("mkdir", base.parent(path))
        self._do("create", path, bytes(data))

    def copy(self, source: str, target: str) -> None:
        """Three steps: what is there, the directory, the file."""
        self.put(target, self.get(source))

    def swap(self, path: str, old: bytes | None, new: bytes) -> bool:
        """Two steps: the directory; comparison and replacement, which are one."""
        self._do("mkdir", base.parent(path))
        done: bool = self._do("swap", path, (old, bytes(new)))
        return done

    def get(self, path: str) -> bytes:
        """One step."""
        content: bytes = self._do("get", path)
        return content

    def read_into(self, path: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """One step."""
        views = [(offset, buffer.cast("B")) for offset, buffer in ranges]
        parts = self._do("read", path, tuple((offset, len(view)) for offset, view in views))
        for (offset, view), part in zip(views, parts, strict=True):
            if len(part) != len(view):
                raise StorageError(errno.EIO, f"{path}: got {len(part)} of {len(view)} bytes at offset {offset}")
            view[:] = part

    def list(self, path: str) -> list[Entry]:
        """One step."""
        return list(self._do("list", path))

    def stat(self, path: str) -> int | None:
        """One step."""
        size: int | None = self._do("stat", path)
        return size

    def remove_each(self, paths: Iterable[str]) -> dict[str, OSError]:
        """One step for each path."""
        failures: dict[str, OSError] = {}
        for path in paths:
            try:
                self._do("remove", path)
            except OSError as error:
                failures[path] = error
        return failures

    def url(self, path: str) -> str:
        """``recording://path``."""
        return f"recording://{path}"


class RecordingStream:
    """A file that grows in view of everybody: empty, half of what was written, all."""

    def __init__(self, do: Callable[..., Any], path: str) -> None:
        self._do = do
        self._path = path
        self._data = bytearray()

    def write(self, data: Buffer) -> None:
        """No step: what is written becomes visible at some time before `finish`."""
        self._data += data

    def release(self) -> None:
        """No step: all is copied."""

    def finish(self) -> Written:
        """Two steps: half of the file, all of it."""
        self._do("part", self._path, bytes(self._data[: len(self._data) // 2]))
        self._do("finish", self._path, bytes(self._data))
        return Written(len(self._data), hashlib.sha256(self._data).hexdigest())

    def abort(self) -> None:
        """One step: the file goes."""
        self._do("remove", self._path)
