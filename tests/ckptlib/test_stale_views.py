"""Old views of network filesystems are waited out, for a bounded time, before a recorded file is called missing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptlib
from ckptlib.errors import CkptError
from ckptlib.storage import PosixOptions, PosixStorage, filesystems, stale
from ckptlib.storage.stale import Views


class Time:
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses = 0

    def pause(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.pauses += 1


def views(time: Time, wait: float | None = 5.0) -> Views:
    return Views(wait, pause=time.pause, clock=lambda: time.now)


@given(st.floats(0, 20), st.floats(0, 10))
def test_a_view_is_believed_when_the_time_is_over_and_not_before(becomes_right: float, wait: float) -> None:
    time = Time()
    seen = views(time, wait).look("/d/file", lambda: time.now >= becomes_right, lambda right: not right)
    assert seen == (becomes_right <= time.now)
    assert time.now <= wait + 1e-9
    assert seen or time.now == pytest.approx(wait)
    assert time.pauses <= 8 + wait / stale.MAX_PAUSE


@pytest.mark.parametrize(("kind", "waits"), [("nfs", True), ("lustre", True), ("tmpfs", False), (None, False)])
def test_only_network_filesystems_are_doubted(monkeypatch: pytest.MonkeyPatch, kind: str | None, waits: bool) -> None:
    monkeypatch.setattr(filesystems, "kind", lambda path: kind)
    time = Time()
    assert views(time, None).look("/d/file", lambda: 0, lambda found: True) == 0
    assert time.now == pytest.approx(stale.WAIT if waits else 0.0)


def test_the_server_is_asked_past_the_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory first: what it lacks nobody looks up."""
    asked: list[str] = []
    monkeypatch.setattr(filesystems, "refresh", asked.append)
    views(Time(), 0.001).look(str(tmp_path / "file"), lambda: None, lambda found: True)
    assert asked[:2] == [str(tmp_path), str(tmp_path / "file")]


def test_a_listing_is_never_an_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(filesystems, "refresh", asked.append)
    assert PosixStorage().list(str(tmp_path)) == []
    assert asked == [str(tmp_path)]


def test_asking_the_server_changes_nothing_and_never_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for name in ("", "file", "absent", "file/below"):
        filesystems.refresh(str(tmp_path / name))
    assert os.listdir(tmp_path) == ["file"]


class OldView:
    """The first looks at every file below a directory see what was there before: nothing, or less."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, suffix: str, times: int, size: int | None) -> None:
        self.left = times
        self._suffix = suffix
        self._size = size
        for name in ("stat", "open", "preadv"):
            monkeypatch.setattr(os, name, getattr(self, f"_{name}")(getattr(os, name)))

    def _shows_it(self, path: Any) -> bool:
        if str(path).endswith(self._suffix) and self.left > 0:
            self.left -= 1
            return True
        return False

    def _stat(self, stat: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def look(path: Any, *args: Any, **options: Any) -> os.stat_result:
            if not self._shows_it(path):
                return stat(path, *args, **options)
            if self._size is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return os.stat_result([*stat(path)[:6], self._size, 0, 0, 0])

        return look

    def _open(self, open_: Callable[..., int]) -> Callable[..., int]:
        def look(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if flags & os.O_ACCMODE == os.O_RDONLY and self._size is None and self._shows_it(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return open_(path, flags, *args, **options)

        return look

    def _preadv(self, preadv: Callable[..., int]) -> Callable[..., int]:
        def look(fd: int, buffers: Any, offset: int) -> int:
            if self._size is not None and self._shows_it(os.readlink(f"/proc/self/fd/{fd}")):
                return 0  # the end of the file, as far as is seen
            return preadv(fd, buffers, offset)

        return look


NFS = {"posix": {"stale_wait": 30}}


@pytest.mark.parametrize("size", [None, 10])
def test_a_commit_waits_for_the_data_that_a_record_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    """W3: a rank's file that another client wrote, and that is not seen yet or not whole."""
    old = OldView(monkeypatch, ".distcp", 3, size)
    ckptlib.save({"w": torch.ones(1000)}, str(tmp_path / "a"), iteration=1, storage_options=NFS)
    assert old.left == 0
    assert ckptlib.verify(str(tmp_path / "a")).ok


@pytest.mark.parametrize("size", [None, 10])
def test_a_load_waits_for_the_files_that_the_manifest_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    ckptlib.save({"w": torch.ones(1000)}, str(tmp_path / "a"), iteration=1)
    old = OldView(monkeypatch, ".distcp", 3, size)
    state = {"w": torch.zeros(1000)}
    ckptlib.load(state, str(tmp_path / "a"), storage_options=NFS)
    assert old.left == 0
    assert state["w"].eq(1).all()


@pytest.mark.parametrize("size", [None, 10])
def test_what_stays_missing_is_missing_in_the_end_and_at_once_on_a_local_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    ckptlib.save({"w": torch.ones(1000)}, str(tmp_path / "a"), iteration=1)
    for options, looks in (({"posix": {"stale_wait": 0.05}}, 3), ({}, 1)):
        with monkeypatch.context() as patch:
            old = OldView(patch, ".distcp", 10**9, size)
            with pytest.raises((OSError, CkptError), match=r"__0_0\..*distcp"):
                ckptlib.load({"w": torch.zeros(1000)}, str(tmp_path / "a"), storage_options=options)
            assert 10**9 - old.left >= looks


def test_a_file_that_the_server_has_replaced_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ESTALE: the name means another file now."""
    (tmp_path / "data").write_bytes(b"0123456789")
    preadv, failures = os.preadv, [errno.ESTALE, errno.ESTALE]

    def reading(fd: int, buffers: Any, offset: int) -> int:
        if failures:
            raise OSError(failures.pop(), "Stale file handle")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", reading)
    found = bytearray(4)
    PosixStorage(PosixOptions(stale_wait=30)).read_into(str(tmp_path / "data"), [(2, memoryview(found))])
    assert found == b"2345"


def test_an_error_that_no_view_explains_is_raised_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_bytes(b"0123456789")
    calls: list[int] = []

    def failing(fd: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OSError, match=r"Input/output error.*data"):
        PosixStorage(PosixOptions(stale_wait=30)).read_into(str(tmp_path / "data"), [(2, memoryview(bytearray(4)))])
    assert calls == [2]
