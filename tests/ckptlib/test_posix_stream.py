"""How a large file is written on POSIX: aligned, reserved beforehand, durable at its end, not twice after an error."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import io
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptlib.errors import StorageError
from ckptlib.storage import PosixStorage, filesystems, posix_stream
from ckptlib.storage.posix_stream import WRITE_BYTES
from tests.support.filesystems import small_filesystem

MIB = 2**20


@pytest.fixture
def store() -> PosixStorage:
    return PosixStorage()


@pytest.fixture
def reserving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files have their space reserved too, on any filesystem."""
    monkeypatch.setattr(posix_stream, "RESERVED_BYTES", 1)
    monkeypatch.setattr(filesystems, "MEMORY", frozenset())


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each write(2) wrote."""
    lengths: list[int] = []
    write = os.write

    def noted(fd: int, data: Any) -> int:
        lengths.append(write(fd, data))
        return lengths[-1]

    monkeypatch.setattr(os, "write", noted)
    return lengths


def failing(code: int, calls: list[int]) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        calls.append(1)
        raise OSError(code, os.strerror(code))

    return fail


# --- writes -----------------------------------------------------------------------------------------------------------


def test_large_writes_end_at_multiples_of_a_stripe(tmp_path: Path, store: PosixStorage, written: list[int]) -> None:
    """A head of 1,400 bytes before each tensor shifts none of what follows by more than one write."""
    stream = store.open_write(str(tmp_path / "data"))
    content = b""
    for nbytes in (9 * MIB, 3 * MIB, 13 * MIB):
        for piece in (b"h" * 1400, os.urandom(nbytes)):
            stream.write(piece)
            content += piece
    assert stream.finish().sha256 == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "data").read_bytes() == content
    ends = list(itertools.accumulate(written))
    assert all(start // WRITE_BYTES == (end - 1) // WRITE_BYTES for start, end in itertools.pairwise([0, *ends]))
    assert len(written) <= len(content) // WRITE_BYTES + 6


def test_write_back_begins_at_whole_stripes(
    tmp_path: Path, store: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[int, int]] = []
    monkeypatch.setattr(posix_stream, "_start_writeback", lambda fd, offset, length: started.append((offset, length)))
    stream = store.open_write(str(tmp_path / "data"))
    for _ in range(5):
        stream.write(b"x" * 1000)
        stream.write(bytes(7 * MIB))
    stream.finish()
    assert started[0][0] == 0
    assert all(one + length == other for (one, length), (other, _) in itertools.pairwise(started))
    assert all(length % WRITE_BYTES == 0 for _, length in started)


def test_signals_do_not_cut_a_write_short(tmp_path: Path, store: PosixStorage) -> None:
    """EINTR: a profiler's timer goes off a thousand times a second."""
    hits: list[int] = []
    before = signal.signal(signal.SIGPROF, lambda number, frame: hits.append(number))
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    try:
        block, digest = os.urandom(8 * MIB), hashlib.sha256()
        stream = store.open_write(str(tmp_path / "data"))
        while len(hits) < 20:
            stream.write(block)
            digest.update(block)
        assert stream.finish().sha256 == digest.hexdigest()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    assert hashlib.sha256((tmp_path / "data").read_bytes()).hexdigest() == digest.hexdigest()


# --- reservations -----------------------------------------------------------------------------------------------------


def test_what_does_not_fit_fails_before_its_first_byte(
    tmp_path: Path, store: PosixStorage, reserving: None, written: list[int]
) -> None:
    with small_filesystem(tmp_path / "small", size="1m") as disk:
        with pytest.raises(StorageError, match=r"No space left.*/small/data") as caught:
            store.open_write(str(disk / "data"), size=4 * MIB)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(disk / "data"))
        assert os.listdir(disk) == []
        assert written == []


@pytest.mark.parametrize("hint", [100, 3 * MIB, 20 * MIB])
def test_a_reserved_file_ends_where_its_content_ends(
    tmp_path: Path, store: PosixStorage, reserving: None, hint: int
) -> None:
    """Whatever was expected; and what was reserved for nothing is given back."""
    path = tmp_path / "data"
    content = os.urandom(3 * MIB)
    stream = store.open_write(str(path), size=hint)
    assert path.stat().st_size == 0
    if hint > MIB and path.stat().st_blocks * 512 < hint:
        pytest.skip("this filesystem reserves nothing")
    stream.write(content)
    stream.finish()
    assert path.read_bytes() == content
    assert path.stat().st_blocks * 512 <= len(content) + MIB


def test_what_a_failed_reservation_kept_is_given_back(
    tmp_path: Path, store: PosixStorage, reserving: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filesystem may have kept a part before it said that it could not."""
    reserve = filesystems.reserve
    monkeypatch.setattr(filesystems, "reserve", lambda fd, size: reserve(fd, size) and False)
    stream = store.open_write(str(tmp_path / "data"), size=20 * MIB)
    if (tmp_path / "data").stat().st_blocks * 512 < 20 * MIB:
        pytest.skip("this filesystem reserves nothing")
    stream.write(b"x" * 100_000)
    stream.finish()
    assert (tmp_path / "data").stat().st_blocks * 512 <= MIB


def test_advice_that_is_refused_fails_nothing(
    tmp_path: Path, store: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in sandboxes that do not have the call."""
    refused: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", failing(errno.ENOSYS, refused))
    stream = store.open_write(str(tmp_path / "data"))
    for _ in range(4):
        stream.write(bytes(4 * MIB))
    assert stream.finish().size == 16 * MIB
    assert refused


def test_no_zeros_are_written_where_nothing_can_be_reserved(
    tmp_path: Path, store: PosixStorage, reserving: None, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS and older Lustre, where the C library would write them."""

    def cannot(*args: Any) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(filesystems, "_fallocate", lambda: cannot)
    stream = store.open_write(str(tmp_path / "data"), size=8 * MIB)
    stream.write(b"x" * 100_000)
    assert stream.finish().size == 100_000
    assert written == [100_000]
    assert (tmp_path / "data").stat().st_size == 100_000


def test_small_files_and_files_in_memory_are_not_reserved(
    tmp_path: Path, store: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(filesystems, "reserve", lambda fd, size: asked.append(size) is not None)
    with small_filesystem(tmp_path / "small") as disk:
        for name, folder, size in (("a", tmp_path, MIB), ("b", disk, 100 * MIB), ("c", tmp_path, 100 * MIB)):
            store.open_write(str(folder / name), size=size).finish()
    assert asked == [100 * MIB]


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_failed_fsync_is_never_tried_again(
    tmp_path: Path, store: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may have dropped the pages that it could not write, and would call a second one a success."""
    syncs: list[int] = []
    stream = store.open_write(str(tmp_path / "data"))
    stream.write(b"x" * MIB)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.EIO, syncs))
        for _ in range(2):
            with pytest.raises(StorageError, match=r"Input/output error: .*data") as caught:
                stream.finish()
            assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "data"))
    assert len(syncs) == 1
    with pytest.raises(StorageError, match="Input/output error"):
        stream.finish()  # not even when the disk says that all is well
    stream.abort()
    assert os.listdir(tmp_path) == []


def test_a_failed_write_is_never_gone_on_from(
    tmp_path: Path, store: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = store.open_write(str(tmp_path / "data"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing(errno.EIO, []))
        with pytest.raises(StorageError, match=r"Input/output error: .*data"):
            stream.write(b"x" * MIB)
    for go_on in (lambda: stream.write(b"y" * MIB), stream.finish):
        with pytest.raises(StorageError, match=r"Input/output error: .*data"):
            go_on()
    stream.abort()
    assert os.listdir(tmp_path) == []


def test_an_error_at_close_is_an_error_of_the_file(
    tmp_path: Path, store: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS and quotas may speak only then."""

    class Full(io.FileIO):
        def close(self) -> None:
            was_open = not self.closed
            super().close()
            if was_open:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(posix_stream, "open", lambda path, mode, buffering: Full(path, "xb"), raising=False)
    stream = store.open_write(str(tmp_path / "data"))
    stream.write(b"x")
    with pytest.raises(StorageError, match=r"quota exceeded: .*data.*quota of this user") as caught:
        stream.finish()
    assert caught.value.errno == errno.EDQUOT
    stream.abort()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_with_room_on_it_says_what_may_be_full(
    tmp_path: Path, store: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One OST of Lustre, and the others are not."""
    monkeypatch.setattr(filesystems, "kind", lambda path: "lustre")
    monkeypatch.setattr(filesystems, "room", lambda path: filesystems.Room(459 * 2**30, 10**9))
    stream = store.open_write(str(tmp_path / "data"))
    monkeypatch.setattr(os, "write", failing(errno.ENOSPC, []))
    with pytest.raises(StorageError, match=r"No space left.*data'; 459.0 GiB are free .*\(OSTs\).*lfs df"):
        stream.write(b"x" * MIB)
    stream.abort()
