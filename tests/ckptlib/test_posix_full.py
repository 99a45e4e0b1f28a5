"""A disk that fills up anywhere in a save: an error that names a file, or a commit; never half a marker; then on."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib import Checkpointer, background_saves, commit, records
from ckptlib.errors import BackgroundSaveError, CkptError, StorageError
from ckptlib.storage import PosixStorage, filesystems
from tests.support.filesystems import small_filesystem
from tests.support.roots import newest, small_state
from tests.support.trees import assert_same, blanked

MIB = 2**20
MARKERS = ("begin.json", "rank_0.json", "manifest.json", "decision.json")


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that does not say what is left on it: a save finds out."""
    monkeypatch.setattr(filesystems, "room", lambda path: filesystems.Room())


def assert_no_half_marker(folder: Path) -> None:
    """Every record that has its name is whole; what was being written has another name, or is gone."""
    for path in folder.rglob("*.json"):
        if commit.SAVE_ID.fullmatch(path.parent.name):
            records.decode(re.sub(r"_\d+$", "", path.stem), path.read_bytes(), str(path))


@contextmanager
def full_at(marker: str, nbytes: int) -> Iterator[list[int]]:
    """The disk is full when so many bytes of a marker have been written; the sizes that were tried."""
    write, sizes = os.write, []

    def limited(fd: int, data: Any) -> int:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if not name.startswith(f".{marker}."):
            return write(fd, data)
        at = os.lseek(fd, 0, os.SEEK_CUR)
        if at == 0:
            sizes.append(len(data))
        if at >= nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, memoryview(data)[: nbytes - at])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", limited)
        yield sizes


def failure_of(state: dict[str, Any], url: str, **options: Any) -> str | None:
    """What a save fails with; None: it succeeds."""
    try:
        ckptlib.save(state, url, iteration=1, **options)
    except CkptError as error:
        return str(error)
    return None


def boundaries(marker: str, root: str, step: int) -> Iterator[int]:
    """Numbers of bytes from none to all but one."""
    with full_at(marker, 2**40) as sizes:
        ckptlib.save(small_state(0.0), f"{root}/measured", iteration=1)
    (size,) = sizes
    return itertools.chain(range(0, size, step), [size - 1])


@pytest.mark.parametrize("step", [211, pytest.param(1, marks=[pytest.mark.deep, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("marker", MARKERS)
def test_a_disk_that_fills_within_a_marker_leaves_the_old_checkpoint_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: str, step: int
) -> None:
    """W4: at every byte of it (`make test-deep`; here at every 211th)."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # thousands of saves, and no power failure
    for nbytes in boundaries(marker, str(tmp_path), step):
        url = str(tmp_path / f"full_at_{nbytes}")
        ckptlib.save(small_state(0.0), url, iteration=1)
        with full_at(marker, nbytes) as sizes:
            failure = failure_of(small_state(1.0), url, on_exists="replace")
        if failure is None:
            assert nbytes >= sizes[-1]  # this one is shorter: it has times in it
        else:
            assert re.search(rf"No space left.*{marker}", failure)
        assert_no_half_marker(Path(url))
        assert not list(Path(url).rglob("*.tmp"))
        assert ckptlib.read(url)["model.w"][0] == (failure is None)
        ckptlib.save(small_state(2.0), url, iteration=1, on_exists="replace")
        assert ckptlib.read(url)["model.w"][0] == 2
        assert ckptlib.verify(url).ok
        shutil.rmtree(url)


def test_a_marker_is_whole_or_not_there_wherever_its_write_ends(tmp_path: Path) -> None:
    """At every byte, of a file as such."""
    store, content = PosixStorage(), os.urandom(400)
    for nbytes in range(len(content)):
        with full_at("decision.json", nbytes), pytest.raises(StorageError, match=r"No space left.*decision.json"):
            store.create(str(tmp_path / "decision.json"), content)
        assert os.listdir(tmp_path) == []
    store.create(str(tmp_path / "decision.json"), content)
    with full_at("decision.json", 100), pytest.raises(StorageError, match="No space left"):
        store.put(str(tmp_path / "decision.json"), b"x" * 400)
    assert store.get(str(tmp_path / "decision.json")) == content
    assert os.listdir(tmp_path) == ["decision.json"]


def leave_free(disk: Path, pages: int) -> Path:
    """A file that takes all of a filesystem but so many of its pages."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        while (free := os.statvfs(disk).f_bfree) > pages:
            file.write(bytes(4096 * min(free - pages, 256)))
    return filler


def test_a_disk_that_fills_anywhere_in_a_save_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, blind: None
) -> None:
    """On a filesystem that really is full: with no page left, with one, and so on until the save succeeds."""
    with small_filesystem(tmp_path / "small", size="4m") as disk:
        root = str(disk / "run")
        job = Checkpointer(root, run="run")
        job.save(small_state(0.0), iteration=1)
        outcomes = []
        for pages in itertools.count():
            before = newest(root)
            filler = leave_free(disk, pages)
            iteration = pages + 2
            failure = None
            try:
                job.save(small_state(1.0), iteration=iteration)
            except CkptError as error:
                failure = str(error)
            outcomes.append("saved" if failure is None else "failed")
            assert failure is None or ("No space left" in failure and str(disk) in failure)
            assert_no_half_marker(disk)
            assert newest(root) == ((1, iteration) if outcomes[-1] == "saved" else before)
            complete = outcomes[-1] == "saved" and ckptlib.verify(f"{root}/iter_{iteration:07d}").ok
            filler.unlink()
            if complete:
                break
        assert outcomes.count("failed") >= 5
        again = Checkpointer(root, run="run")
        again.save(small_state(2.0), iteration=1000)
        state = blanked(small_state())
        assert again.restore(state).iteration == 1000
        assert_same(state, small_state(2.0))


def big_state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((MIB,), value)}}  # 4 MiB


def test_an_asynchronous_save_that_cannot_fit_is_refused_before_anything_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged: list[int] = []
    with small_filesystem(tmp_path / "small", size="2m") as disk:
        with Checkpointer(str(disk / "run"), run="run", io_mode="async") as job:
            copy = background_saves.BackgroundSaves._copy
            monkeypatch.setattr(
                background_saves.BackgroundSaves, "_copy", lambda *args, **of: staged.append(1) or copy(*args, **of)
            )
            with pytest.raises(StorageError, match=r"4\.0 MiB are to be written.*free on the filesystem of .*small"):
                job.save(big_state(1.0), iteration=1)
            assert staged == []
            assert not (disk / "run" / "iter_0000001").exists()
            job.save(small_state(1.0), iteration=2).wait(60)
        assert staged == [1]
        assert newest(str(disk / "run")) == (1, 2)


def test_a_disk_that_fills_while_a_worker_writes_fails_that_save_and_no_other(tmp_path: Path, blind: None) -> None:
    with small_filesystem(tmp_path / "small", size="2m") as disk:
        root = str(disk / "run")
        with Checkpointer(root, run="run", io_mode="async") as job:
            job.save(small_state(1.0), iteration=1).wait(60)
            with pytest.raises(BackgroundSaveError, match=r"No space left.*iter_0000002/__0_0\..*distcp"):
                job.save(big_state(1.0), iteration=2).wait(60)
            assert_no_half_marker(disk)
            assert newest(root) == (1, 1)
            with pytest.raises(BackgroundSaveError, match="No space left"):
                job.save(small_state(2.0), iteration=3)  # it tells of the one before
            job.save(small_state(3.0), iteration=4).wait(60)
        assert newest(root) == (1, 4)
        assert not list(disk.rglob("iter_0000002/__0_0*"))
