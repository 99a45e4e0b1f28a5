"""Old views of network filesystems are waited out, for a bounded time, before a recorded file is called missing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import ckptlib
from ckptlib import commit, formats
from ckptlib.errors import CkptError
from ckptlib.storage import PosixOptions, PosixStorage, filesystems, resolve, stale
from ckptlib.storage.stale import Views
from ckptlib.verify_files import LOOKS, Expected, FileChecker
from tests.support.old_view import OldView


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


@pytest.mark.parametrize(
    ("name", "size"), [(".distcp", None), (".distcp", 10), (commit.DECISION, None), (commit.MANIFEST, None)]
)
def test_a_verification_calls_nothing_corrupt_that_is_only_not_seen_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: int | None
) -> None:
    """V2: by size alone, and by its bytes."""
    at = str(tmp_path / "a")
    save_id = ckptlib.save({"w": torch.ones(1000)}, at, iteration=1).save_id
    for level in ("listing", "data"):
        with monkeypatch.context() as patch:
            old = OldView(patch, name, 5, size)
            assert ckptlib.verify(at, level=level, save_id=save_id, storage_options=NFS).problems == ()
            assert old.left == 0


def test_a_verification_waits_for_a_file_and_not_for_each_of_very_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []

    class Waiting(PosixStorage):
        def await_size(self, path: str, size: int) -> int | None:
            waited.append(path)
            return self.stat(path)

    checker = FileChecker(Waiting(), str(tmp_path), level="listing")
    checks = checker.check({str(number): Expected(size=1) for number in range(500)})
    assert {check.verdict for check in checks.values()} == {"missing"}
    assert LOOKS <= len(waited) < 2 * LOOKS


def test_a_foreign_checkpoint_is_not_incomplete_because_its_data_is_not_seen_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1: torch's metadata says how long each file is."""
    dcp.save({"w": torch.ones(1000)}, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    storage, path = resolve(str(tmp_path / "a"), NFS)
    old = OldView(monkeypatch, ".distcp", 3, 10)
    assert formats.is_foreign_complete(storage, path, "torch_dcp") == (True, "")
    assert old.left == 0


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
