"""Whether a storage keeps the promises of `base`: each is tried, with tiny files below a prefix of its own.

For people who set up a new store, and for those who wonder why one behaves as it does. Everything that is written is
removed again. What a storage says of itself (versioning, lifecycle rules, kind of filesystem) comes from its `notices`.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptlib.errors import ExclusiveCreateError
from ckptlib.storage import base
from ckptlib.storage.base import Storage, Unfinished, Written
from ckptlib.storage.s3_parts import composite

Outcome = Literal["ok", "limited", "unsafe", "failed"]
"""limited: something is lost, nothing is at risk; unsafe: checkpoints could be; failed: it could not be tried."""

RACERS = 8
SMALL = b"a small file\n"


class LimitedError(Exception):
    """Raised by a test for what this storage cannot do and nothing depends on."""


@dataclass(frozen=True)
class Finding:
    """What became of one test.

    Attributes:
        promise: what was tried, as a sentence that should be true.
        detail: what was found, where that is not it.
    """

    promise: str
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True)
class Examination:
    """What was found out about a storage.

    Attributes:
        url: where.
        storage: short name of the kind.
        write_rate, read_rate: bytes per second of one stream, with digests; of ranged reads. None: not measured.
        left: what could not be removed.
    """

    url: str
    storage: str
    findings: tuple[Finding, ...]
    write_rate: float | None = None
    read_rate: float | None = None
    left: tuple[str, ...] = ()

    def count(self, outcome: Outcome) -> int:
        """How many tests ended so."""
        return sum(finding.outcome == outcome for finding in self.findings)


@dataclass
class _Bench:
    """Where tests work: two storages of the same place, as two processes have them; a directory; paths to remove."""

    store: Storage
    other: Storage
    root: str
    size: int
    made: list[str] = field(default_factory=list)
    write_rate: float | None = None
    read_rate: float | None = None
    written: Written = field(default_factory=lambda: Written(0, ""))

    def path(self, *names: str) -> str:
        """A path that is removed at the end."""
        path = base.join(self.root, *names)
        self.made.append(path)
        return path

    def stream(self, path: str, content: bytes) -> Written:
        """Writes a file."""
        stream = self.store.open_write(path, size=len(content))
        try:
            stream.write(content)
            return stream.finish()
        except BaseException:
            stream.abort()
            raise


def examine(url: str, storage_options: Mapping[str, Any] | None = None, *, size: int = 64 * 1024 * 1024) -> Examination:
    """Tries every promise below ``<url>/.ckpt-doctor-<random>``.

    Args:
        url: a place where checkpoints shall go; need not exist.
        size: bytes of the file whose writing and reading is timed.

    Raises:
        ValueError: the URL or an option cannot be meant.
    """
    from ckptlib.storage import resolve

    store, path = resolve(url, storage_options)
    other, _ = resolve(url, storage_options)
    bench = _Bench(store, other, base.join(path, f".ckpt-doctor-{uuid.uuid4().hex[:12]}"), size)
    findings: list[Finding] = []
    new = _is_new(store, path)
    try:
        for promise, risk, test in _TESTS:
            findings.append(_try(bench, promise, risk, test))
            if test is _write_and_read and findings[-1].outcome != "ok":
                break  # nothing else can be told
    finally:
        left = _clean(bench, path if new else bench.root)
    try:
        findings += [Finding(text, "unsafe" if risk else "limited") for text, risk in store.notices(path)]
    except OSError as error:
        findings.append(Finding("the storage tells of itself", "failed", describe(error)))
    return Examination(
        store.url(path), store.capabilities.name, tuple(findings), bench.write_rate, bench.read_rate, tuple(left)
    )


def describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _try(bench: _Bench, promise: str, risk: Outcome, test: Callable[[_Bench], None]) -> Finding:
    try:
        test(bench)
    except LimitedError as error:
        return Finding(promise, "limited", str(error))
    except ExclusiveCreateError as error:
        return Finding(promise, "unsafe", str(error))
    except AssertionError as error:
        return Finding(promise, risk, str(error))
    except (OSError, ValueError) as error:
        return Finding(promise, "failed", describe(error))
    return Finding(promise, "ok")


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise AssertionError(otherwise)


def _is_new(store: Storage, path: str) -> bool:
    try:
        return all(entry.name != base.basename(path) for entry in store.list(base.parent(path)))
    except OSError:
        return False


def _clean(bench: _Bench, top: str) -> list[str]:
    """Removes what the tests made, up to the directory `top` if it is empty then; what remains."""
    try:
        for upload in bench.store.unfinished(bench.root):
            bench.store.discard(upload)
    except OSError:
        pass  # a test of its own tells
    directories = {base.parent(path) for path in bench.made} - {bench.root}
    paths = [*dict.fromkeys(bench.made), *sorted(directories, key=len, reverse=True), bench.root, top]
    try:
        return [bench.store.url(path) for path in bench.store.remove_each(dict.fromkeys(paths))]
    except OSError:
        return [bench.store.url(bench.root)]


def _write_and_read(bench: _Bench) -> None:
    path = bench.path("file")
    bench.store.put(path, SMALL)
    _expect(bench.store.get(path) == SMALL, "other bytes came back")
    _expect(bench.store.stat(path) == len(SMALL), "another size came back")


def _see_others(bench: _Bench) -> None:
    """T04: a cache of listings or attributes would show."""
    path = bench.path("seen", "file")
    directory = base.parent(path)
    _expect(bench.other.list(directory) == [] and bench.other.stat(path) is None, "it is there before it is written")
    for content in (b"one", b"a longer one"):
        bench.store.put(path, content)
        _expect(bench.other.stat(path) == len(content), "a size is not seen by others at once")
        _expect([entry.size for entry in bench.other.list(directory)] == [len(content)], "a listing is stale")
        _expect(bench.other.get(path) == content, "old content is read")
    bench.store.remove([path])
    _expect(bench.other.stat(path) is None and bench.other.list(directory) == [], "a removal is not seen by others")


def _create(bench: _Bench) -> None:
    path = bench.path("created")
    bench.store.create(path, SMALL)
    try:
        bench.other.create(path, b"other")
    except FileExistsError:
        pass
    else:
        raise AssertionError("a second writer was told that it created the same file: both could commit")
    _expect(bench.store.get(path) == SMALL, "the loser changed the file")
    wins = _race(lambda i: _created(bench.store if i % 2 else bench.other, bench.path("raced"), i))
    _expect(wins == 1, f"{wins} of {RACERS} that raced were told that they created the same file")


def _created(store: Storage, path: str, number: int) -> bool:
    try:
        store.create(path, str(number).encode())
    except FileExistsError:
        return False
    return True


def _swap(bench: _Bench) -> None:
    path = bench.path("swapped")
    bench.store.put(path, SMALL)
    wins = _race(lambda i: (bench.store if i % 2 else bench.other).swap(path, SMALL, str(i).encode()))
    _expect(wins == 1, f"{wins} of {RACERS} that raced replaced the same content: a tracker may go back for a moment")


def _race(run: Callable[[int], bool]) -> int:
    start = threading.Barrier(RACERS)

    def racer(number: int) -> bool:
        start.wait(60)
        return run(number)

    with ThreadPoolExecutor(RACERS) as pool:
        return sum(pool.map(racer, range(RACERS)))


def _stream(bench: _Bench) -> None:
    path = bench.path("data")
    content = os.urandom(min(bench.size, 1024 * 1024)) * max(1, bench.size // (1024 * 1024))
    started = time.perf_counter()
    written = bench.stream(path, content)
    bench.written = written
    bench.write_rate = len(content) / (time.perf_counter() - started)
    _expect(written.sha256 == hashlib.sha256(content).hexdigest(), "another digest than that of the bytes")
    part = bytearray(10)
    bench.other.read_into(path, [(5, memoryview(part))])
    _expect(part == content[5:15], "a range of a file is other bytes of it")
    found = bytearray(len(content))
    step = max(1, -(-len(found) // 16))
    view = memoryview(found)
    started = time.perf_counter()
    bench.other.read_into(path, [(at, view[at : at + step]) for at in range(0, len(found), step)])
    bench.read_rate = len(content) / (time.perf_counter() - started)
    _expect(found == content, "other bytes came back")


def _short_read(bench: _Bench) -> None:
    path = bench.path("short")
    bench.store.put(path, SMALL)
    try:
        bench.store.read_into(path, [(0, memoryview(bytearray(len(SMALL) + 1)))])
    except OSError:
        return
    raise AssertionError("a file that ends too early is read without an error")


def _abort(bench: _Bench) -> None:
    path = bench.path("aborted")
    stream = bench.store.open_write(path)
    stream.write(bytes(min(bench.size, 32 * 1024 * 1024)))
    stream.abort()
    _expect(bench.other.stat(path) is None, "a file that was given up is there")


def _copy(bench: _Bench) -> None:
    source, target = bench.path("source"), bench.path("copy", "of")
    bench.store.put(source, SMALL)
    bench.store.copy(source, target)
    _expect(bench.other.get(target) == SMALL, "other bytes came back")


def _names(bench: _Bench) -> None:
    for name in ("a b", "ünïcode", "#?%", "dots..", "x" * 200):
        path = bench.path("names", name)
        bench.store.put(path, name.encode())
        _expect(bench.other.get(path) == name.encode(), f"{name!r} is another file")
    found = [entry.name for entry in bench.other.list(base.join(bench.root, "names"))]
    _expect("a b" in found and "#?%" in found, f"names are listed as others: {found}")


def _list_beside_writers(bench: _Bench) -> None:
    stays = [str(i) for i in range(20)]
    for name in stays:
        bench.store.put(bench.path("listed", name), b"", durable=False)
    comes, directory = bench.path("listed", "comes and goes"), base.join(bench.root, "listed")

    def write() -> None:
        for _ in range(20):
            bench.store.put(comes, SMALL, durable=False)
            bench.store.remove([comes])

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while True:
            last = writing.done()
            found = {entry.name for entry in bench.other.list(directory)}
            _expect(found.issuperset(stays), f"{len(found.intersection(stays))} of {len(stays)} files are listed")
            if last:
                break
        writing.result()


def _remove(bench: _Bench) -> None:
    paths = [bench.path("many", str(i)) for i in range(50)]
    for path in paths:
        bench.store.put(path, b"")
    failures = bench.store.remove_each([*paths, bench.path("many", "never was")])
    _expect(
        not failures, f"{len(failures)} of {len(paths)} files were not removed: {next(iter(failures.values()), '')}"
    )
    _expect(bench.other.list(base.join(bench.root, "many")) == [], "what was removed is listed")


def _unfinished(bench: _Bench) -> None:
    _expect(bench.store.unfinished(bench.root) == [], "uploads remain that were given up")
    if bench.store.capabilities.name != "s3":
        return
    stream = bench.store.open_write(bench.path("unfinished", "file"))
    found: Sequence[Unfinished] = []
    for _ in range(16):  # until there is a whole part of it
        stream.write(bytes(8 * 1024 * 1024))
        stream.release()
        if found := bench.other.unfinished(bench.root):
            break
    for upload in found:
        bench.other.discard(upload)
    stream.abort()
    _expect(len(found) == 1, f"{len(found)} of 1 upload is listed: what killed processes leave is not found")
    _expect(bench.store.unfinished(bench.root) == [], "an upload that was discarded is still there")


def _vouch(bench: _Bench) -> None:
    """Of a small file, and of the one that was written as a stream, perhaps in parts."""
    small = bench.stream(bench.path("vouched"), SMALL)
    for path, written in ((bench.path("vouched"), small), (bench.path("data"), bench.written)):
        said = bench.store.vouched(path)
        if said is None:
            raise LimitedError("no digest of its own that could be relied on: verifying means reading")
        fits = said.sha256 == written.sha256 or said.composite == composite(written.part_sha256)
        _expect(fits, "it keeps another digest than that of the bytes")


_TESTS: tuple[tuple[str, Outcome, Callable[[_Bench], None]], ...] = (
    ("a small file is written and read back", "unsafe", _write_and_read),
    ("others see at once what was written, replaced and removed", "unsafe", _see_others),
    ("of several that create a file, exactly one succeeds", "unsafe", _create),
    ("of several that replace the same content, exactly one succeeds", "limited", _swap),
    ("a stream is written, hashed, and read in ranges", "unsafe", _stream),
    ("a read beyond the end of a file is an error", "unsafe", _short_read),
    ("a stream that is given up leaves no file", "unsafe", _abort),
    ("a file is copied", "unsafe", _copy),
    ("names mean what they say", "limited", _names),
    ("a listing has all that stays while others write and remove", "unsafe", _list_beside_writers),
    ("files are removed in bulk, each with its own result", "unsafe", _remove),
    ("unfinished uploads can be listed, and there are none", "limited", _unfinished),
    ("the store keeps SHA-256 digests that it checked", "limited", _vouch),
)
