"""Full disks, read-only and failing ones: the error names a file, and the old checkpoint stays loadable."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib import Checkpointer
from ckptlib.errors import StorageError
from ckptlib.storage import filesystems
from tests.support.filesystems import make_read_only, small_filesystem
from tests.support.roots import newest, small_state
from tests.support.trees import assert_same, blanked


def big_state(mib: float) -> dict[str, Any]:
    return {"model": {"w": torch.zeros(int(mib * 2**18)), "b": torch.zeros(3)}}


def assert_restores(root: str, iteration: int, state: dict[str, Any]) -> None:
    found = blanked(state)
    assert Checkpointer(root, run="run").restore(found).iteration == iteration
    assert_same(found, state)


@pytest.mark.parametrize("known", [True, False])
def test_a_full_disk_fails_the_save_by_name_and_the_old_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """A full disk, on a filesystem that really is full: seen before the first byte, or in the middle of the save."""
    if not known:
        monkeypatch.setattr(filesystems, "room", lambda path: filesystems.Room())
    with small_filesystem(tmp_path / "small", size="1m") as disk:
        root = str(disk / "run")
        checkpointer = Checkpointer(root, run="run")
        checkpointer.save(small_state(1.0), iteration=10)
        place = "iter_0000020'" if known else r"iter_0000020/__0_0\..*distcp"
        with pytest.raises(StorageError, match=rf"No space left on device.*{place}") as caught:
            checkpointer.save(big_state(4), iteration=20)
        assert caught.value.errno == errno.ENOSPC
        assert not list(disk.rglob("__0_0.*.distcp"))[1:]  # the partial file gave its space back
        assert os.path.exists(f"{root}/iter_0000020") != known  # nothing was begun
        assert newest(root) == (1, 10)
        assert_restores(root, 10, small_state(1.0))
        third = Checkpointer(root, run="run")
        third.save(small_state(3.0), iteration=20)  # there is room for a small one, at the same iteration
        assert_restores(root, 20, small_state(3.0))


def test_a_read_only_filesystem_fails_by_name_and_is_still_read(tmp_path: Path) -> None:
    """A read-only directory."""
    with small_filesystem(tmp_path / "small") as disk:
        url = str(disk / "iter_0000001")
        ckptlib.save(small_state(1.0), url, iteration=1)
        make_read_only(disk)
        for call in (
            lambda: ckptlib.save(small_state(2.0), str(disk / "iter_0000002"), iteration=2),
            lambda: ckptlib.save(small_state(2.0), url, iteration=1, on_exists="replace"),
            lambda: Checkpointer(str(disk), run="run"),
        ):
            with pytest.raises(OSError, match=r"Read-only file system.*small") as caught:
                call()
            assert caught.value.errno == errno.EROFS
        state = blanked(small_state())
        ckptlib.load(state, url, verify="data")
        assert_same(state, small_state(1.0))


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_directory_that_refuses_new_names_fails_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The same where nothing can be mounted, and where permissions do not bind the user."""
    url = str(tmp_path / "iter_0000001")
    ckptlib.save(small_state(1.0), url, iteration=1)
    monkeypatch.setattr("builtins.open", _refusing_open(code))
    monkeypatch.setattr(os, "mkdir", _refuse(code))
    for place, options in ((str(tmp_path / "other"), {}), (url, {"on_exists": "replace"})):
        with pytest.raises(OSError, match=str(tmp_path)) as caught:
            ckptlib.save(small_state(2.0), place, iteration=1, **options)
        assert caught.value.errno == code
    monkeypatch.undo()
    state = blanked(small_state())
    ckptlib.load(state, url)
    assert_same(state, small_state(1.0))


def _refuse(code: int) -> Callable[..., Any]:
    def refuse(path: Any, *args: Any, **options: Any) -> Any:
        raise OSError(code, os.strerror(code), str(path))

    return refuse


def _refusing_open(code: int) -> Callable[..., Any]:
    original = open

    def refusing(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "r" not in mode:
            raise OSError(code, os.strerror(code), str(path))
        return original(path, mode, *args, **options)

    return refusing


@pytest.mark.parametrize(("call", "code"), [("write", errno.ENOSPC), ("fsync", errno.EIO), ("link", errno.EDQUOT)])
def test_whichever_call_of_a_save_fails_there_is_the_old_or_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """W1 to W6: before the decision an error and the old one; after it success and the new one. Every call in turn."""
    url = str(tmp_path / "iter_0000001")
    ckptlib.save(small_state(0.0), url, iteration=1)
    original = getattr(os, call)
    outcomes = []
    for failing in itertools.count(1):
        calls = itertools.count(1)
        failed = False

        def sometimes(*args: Any, calls: Any = calls, failing: int = failing) -> Any:
            nonlocal failed
            if threading.current_thread() is not threading.main_thread():
                return original(*args)  # threads of other tests' servers write too
            if next(calls) == failing:
                failed = True
                raise OSError(code, os.strerror(code), *args[:1] if isinstance(args[0], str) else ())
            return original(*args)

        before = ckptlib.read(url)["model.w"][0]
        with monkeypatch.context() as patch:
            patch.setattr(os, call, sometimes)
            try:
                ckptlib.save(small_state(float(failing)), url, iteration=1, on_exists="replace")
                outcomes.append("saved")
            except OSError as caught:
                error: OSError | None = caught
                outcomes.append("failed")
        if outcomes[-1] == "failed":
            assert error is not None
            assert error.errno == code
            assert str(tmp_path) in str(error)
        now = ckptlib.read(url)["model.w"][0]
        assert now == (failing if outcomes[-1] == "saved" else before)
        if not failed:
            break
    assert outcomes == sorted(outcomes)  # first failures, from some call on only successes
    assert outcomes.count("failed") >= 3
    assert ckptlib.verify(url).ok


def test_a_failing_read_is_an_error_with_the_file_not_a_wrong_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "iter_0000001")
    ckptlib.save({"w": torch.ones(1000)}, url, iteration=1)

    def failing(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises((OSError, ckptlib.errors.LoadIncompleteError), match=r"__0_0\..*distcp"):
        ckptlib.load({"w": torch.zeros(1000)}, url)


def test_a_short_file_is_an_error_with_the_file_not_a_wrong_value(tmp_path: Path) -> None:
    url = str(tmp_path / "iter_0000001")
    ckptlib.save({"w": torch.ones(1000)}, url, iteration=1)
    (name,) = (name for name in os.listdir(url) if name.endswith(".distcp"))
    os.truncate(f"{url}/{name}", 2000)
    with pytest.raises((OSError, ckptlib.errors.CkptError), match=rf"{name}: ends at byte 2000"):
        ckptlib.load({"w": torch.zeros(1000)}, url)
