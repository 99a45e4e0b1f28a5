"""Sends files of a save to another storage: in bounded memory, several at a time, hashed on the way.

A file gets its name there only when it is whole and its digest is the manifest's. So whatever a copier was stopped
by, and however many copy the same save at once, what has the name of a file is that file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

from ckptlib import storage as st
from ckptlib.errors import IntegrityError
from ckptlib.manifest import FileEntry
from ckptlib.read_ahead import ReadAhead
from ckptlib.verify_store import judge

TEMPORARY = ".tmp"
"""How the name of a file ends that is being sent, on a storage that shows it before it is whole."""

THREADS = 4
"""Files that are sent at a time. Of each there are in memory the blocks that are read ahead, and those that its stream
lets wait."""


@dataclass(frozen=True)
class Place:
    """An iteration directory on a storage."""

    storage: st.Storage
    path: str

    def at(self, name: str) -> str:
        """The path of a file."""
        return st.join(self.path, name)

    def url(self, name: str = "") -> str:
        """For messages."""
        return self.storage.url(self.at(name) if name else self.path)


class Pace:
    """Holds senders back, so that together they move so many bytes per second at most; None: as fast as it goes.

    Raises:
        ValueError: no bytes could ever be moved.
    """

    def __init__(self, limit: float | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
        if limit is not None and not limit > 0:
            raise ValueError(f"limit {limit!r}: expected more than 0 bytes per second")
        self._limit = limit
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = 0.0

    def spend(self, nbytes: int, stopped: threading.Event | None = None) -> None:
        """Waits until so many bytes may be moved, or nobody wants them moved any more."""
        if self._limit is None:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self._limit
        if stopped is None:
            self._sleep(max(0.0, start - now))
        else:
            stopped.wait(max(0.0, start - now))


@dataclass(frozen=True)
class Sender:
    """Sends files from one place to another.

    Attributes:
        told: called with bytes as they are sent, from several threads.
    """

    source: Place
    target: Place
    pace: Pace = field(default_factory=Pace)
    threads: int = THREADS
    told: Callable[[int], None] = lambda nbytes: None

    def deliver_all(
        self,
        entries: Sequence[FileEntry],
        known: Mapping[str, FileEntry],
        done: Callable[[FileEntry, bool], None],
    ) -> None:
        """Sends what is not there of these files, the largest first. The first error stops all.

        Args:
            known: receipts, by path.
            done: called with each file that is there and durable, as the target keeps it, and whether it was sent; from
                several threads.

        Raises:
            IntegrityError: the bytes of a file are not those of the manifest.
            OSError: a storage failed.
        """
        order = sorted(entries, key=lambda entry: entry.size, reverse=True)
        failed = threading.Event()

        def work(entry: FileEntry) -> None:
            if not failed.is_set():
                there = find(self.target, entry, theirs, known.get(entry.path))
                done(there or self._send(entry, ours, theirs, failed), there is None)

        with (
            ReadAhead(self.source.storage, self.threads) as ours,
            ReadAhead(self.target.storage, self.threads) as theirs,
            ThreadPoolExecutor(self.threads, thread_name_prefix="ckptlib-send") as pool,
        ):
            futures = [pool.submit(work, entry) for entry in order]
            try:
                ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                failed.set()
            errors = [error for future in ended if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def _send(self, entry: FileEntry, ours: ReadAhead, theirs: ReadAhead, failed: threading.Event) -> FileEntry:
        """Sends one file, in the place of whatever else has its name. Raises as `deliver_all`."""
        storage, name = self.target.storage, self.target.at(entry.path)
        if storage.capabilities.whole_files:
            return self._send_whole(entry, name, ours, theirs, failed)
        temporary = f"{name}.{uuid.uuid4().hex}{TEMPORARY}"
        try:
            sent = self._write(entry, temporary, ours, failed, None)
            storage.copy(temporary, name)
        finally:
            with contextlib.suppress(OSError):
                storage.remove([temporary])
        return sent

    def _send_whole(
        self, entry: FileEntry, name: str, ours: ReadAhead, theirs: ReadAhead, failed: threading.Event
    ) -> FileEntry:
        try:
            if self.target.storage.stat(name) is not None:
                raise FileExistsError(errno.EEXIST, "file exists", name)
            return self._write(entry, name, ours, failed, hashlib.sha256())
        except FileExistsError:
            there = find(self.target, entry, theirs)
            if there is not None:  # another copier was faster: what it has sent may be committed, and must stay
                return there
            self.target.storage.remove([name])
            return self._write(entry, name, ours, failed, hashlib.sha256())

    def _write(
        self, entry: FileEntry, name: str, ours: ReadAhead, failed: threading.Event, digest: hashlib._Hash | None
    ) -> FileEntry:
        """Writes a file; with a digest nothing gets the name that has another one."""
        stream = self.target.storage.open_write(name, size=entry.size)
        try:
            self._pump(entry, stream, ours, failed, digest)
            if digest is not None:
                self._check(entry, digest.hexdigest())
            written = stream.finish()
        except BaseException:
            stream.abort()
            raise
        self._check(entry, written.sha256)
        return replace(entry, part_size=written.part_size, part_sha256=written.part_sha256)

    def _check(self, entry: FileEntry, sha256: str) -> None:
        if sha256 != entry.sha256:
            raise IntegrityError(
                f"{self.source.url(entry.path)}: damaged: its SHA-256 is {sha256}, the manifest says {entry.sha256}. "
                f"Nothing of it was committed at {self.target.url()}."
            )

    def _pump(
        self,
        entry: FileEntry,
        stream: st.WriteStream,
        ours: ReadAhead,
        failed: threading.Event,
        digest: hashlib._Hash | None,
    ) -> None:
        name = self.source.at(entry.path)
        size = self.source.storage.stat(name)
        if size != entry.size:
            found = "missing" if size is None else f"{size} bytes"
            raise IntegrityError(f"{self.source.url(entry.path)}: {found}, the manifest says {entry.size} bytes")
        for _, block in ours.blocks(name, entry.size):
            self.pace.spend(len(block), failed)
            if failed.is_set():
                raise _StoppedError
            stream.write(bytes(block))  # the next one is read into its memory, and the stream may keep this one
            if digest is not None:
                digest.update(block)
            self.told(len(block))


class _StoppedError(Exception):
    """Another file could not be sent: its error is the one that is raised."""


def find(place: Place, entry: FileEntry, reads: ReadAhead, receipt: FileEntry | None = None) -> FileEntry | None:
    """A file as a place keeps it, if it is there with the digest of the manifest; else None.

    Told by what the store vouches for, where that can be compared; else the file is read. Then nothing is known of
    its parts.

    Args:
        reads: of that place.
        receipt: of the copier that has sent it; None: it left none.
    """
    storage, name = place.storage, place.at(entry.path)
    if storage.stat(name) != entry.size:
        return None
    without_parts = replace(entry, part_size=None, part_sha256=())
    vouched = storage.vouched(name)
    sent = receipt or entry
    if vouched is not None and judge(vouched, entry.sha256, sent.part_size, sent.part_sha256).outcome == "ok":
        return without_parts if vouched.composite is None else sent
    digest = hashlib.sha256()
    for _, block in reads.blocks(name, entry.size):
        digest.update(block)
    return without_parts if digest.hexdigest() == entry.sha256 else None
