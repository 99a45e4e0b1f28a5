"""What a new attempt does with what an older one left (W7, W8)."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptlib
from ckptlib import Checkpointer, commit, exports, records, roots, settling
from ckptlib.errors import CheckpointExistsError, NoResumePointError, VersionError
from ckptlib.events import AttemptEvent, CommitEvent
from ckptlib.storage import resolve


class Listener:
    def __init__(self) -> None:
        self.commits: list[tuple[int, int]] = []

    def attempt_started(self, event: AttemptEvent) -> None:
        pass

    def committed(self, event: CommitEvent) -> None:
        self.commits.append((event.manifest.begin.attempt, event.manifest.begin.iteration))

    def close(self, timeout: float) -> None:
        pass


def _die(*args: object, **kwargs: object) -> None:
    raise OSError("killed")


def test_a_complete_save_of_a_dead_attempt_is_committed_and_listeners_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"model": {"w": torch.arange(4.0)}}
    with monkeypatch.context() as patch:
        patch.setattr(commit, "try_commit", _die)
        patch.setattr(commit, "decide_abort", _die)  # as after a SIGKILL: nobody tidies up
        with pytest.raises(OSError, match="killed"):
            Checkpointer(str(tmp_path), run="r").save(state, iteration=5)
    listener = Listener()
    with Checkpointer(str(tmp_path), run="r", listeners=[listener]) as checkpointer:
        assert listener.commits == [(1, 5)]
        restored = {"model": {"w": torch.zeros(4)}}
        assert checkpointer.restore(restored).iteration == 5
    assert restored["model"]["w"].tolist() == [0, 1, 2, 3]


def _saved(root: Path, *iterations: int) -> None:
    with Checkpointer(str(root), run="r") as checkpointer:
        for iteration in iterations:
            checkpointer.save({"model": {"w": torch.full((4,), float(iteration))}}, iteration=iteration)


def _restored(root: Path, **options: object) -> tuple[int, float]:
    state = {"model": {"w": torch.zeros(4)}}
    with Checkpointer(str(root), run="r") as checkpointer:
        iteration = checkpointer.restore(state, **options).iteration  # type: ignore[arg-type]
    return iteration, float(state["model"]["w"][0])


def _record(root: Path, iteration: int, name: str) -> Path:
    (found,) = (root / f"iter_{iteration:07d}" / ".ckpt").glob(f"0*/{name}")
    return found


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["manifest.json", "metadata", "common.pt"])
def test_a_damaged_older_checkpoint_does_not_keep_the_run_from_starting(tmp_path: Path, name: str) -> None:
    _saved(tmp_path, 100, 200)
    _record(tmp_path, 100, name).unlink()
    assert _restored(tmp_path) == (200, 200.0)


def test_r6_a_lost_begin_record_makes_a_checkpoint_no_older(tmp_path: Path) -> None:
    _saved(tmp_path, 100, 200)
    _record(tmp_path, 200, "begin.json").unlink()
    assert _restored(tmp_path) == (200, 200.0)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "200"


@pytest.mark.parametrize("name", ["begin.json", "decision.json"])
def test_a_run_with_only_damaged_checkpoints_does_not_start_from_random_weights(tmp_path: Path, name: str) -> None:
    _saved(tmp_path, 100)
    _flip(_record(tmp_path, 100, name))
    with pytest.raises(NoResumePointError, match=r"iter_0000100: .*damaged"):
        _restored(tmp_path, missing="start")


def test_w8_attempts_go_on_from_the_saves_in_a_root_copied_without_its_hidden_files(tmp_path: Path) -> None:
    first, copy = tmp_path / "first", tmp_path / "copy"
    for iteration in (100, 200, 300):
        _saved(first, iteration)
    copy.mkdir()
    for entry in first.iterdir():
        if entry.is_dir() and not entry.name.startswith("."):
            shutil.copytree(entry, copy / entry.name)
    with Checkpointer(str(copy), run="r") as checkpointer:
        assert checkpointer.attempt == 4
        checkpointer.save({"model": {"w": torch.full((4,), 400.0)}}, iteration=400)
    assert _restored(copy) == (400, 400.0)


@pytest.mark.parametrize("on_exists", ["error", "replace"])
def test_a_bare_save_that_could_never_be_read_is_refused(
    tmp_path: Path, on_exists: Literal["error", "replace"]
) -> None:
    _saved(tmp_path, 100)
    url = str(tmp_path / "iter_0000100")
    with pytest.raises(CheckpointExistsError, match="Checkpointer of that run"):
        ckptlib.save({"model": {"w": torch.zeros(4)}}, url, iteration=100, on_exists=on_exists)
    assert _restored(tmp_path) == (100, 100.0)


def test_w9_a_failed_replacement_of_a_foreign_checkpoint_gives_no_right_to_overwrite_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({"w": torch.ones(4)}, checkpoint_id=str(tmp_path), no_dist=True)
    state = {"w": torch.zeros(4)}
    with monkeypatch.context() as patch:
        patch.setattr(commit, "publish_record", _die)
        with pytest.raises(OSError, match="killed"):
            ckptlib.save(state, str(tmp_path), iteration=1, on_exists="replace")
    with pytest.raises(CheckpointExistsError, match="another tool wrote"):
        ckptlib.save(state, str(tmp_path), iteration=1)
    assert ckptlib.inspect(str(tmp_path)).committed
    assert ckptlib.verify(str(tmp_path)).ok
    ckptlib.load(state, str(tmp_path))
    assert state["w"].tolist() == [1, 1, 1, 1]
    assert [found.state for found in roots.scan_directory(*resolve(str(tmp_path)), "x", 1, "persistent")] == [
        "foreign",
        "aborted",
    ]


def test_r6_a_newest_checkpoint_of_a_newer_version_is_an_error_and_not_passed_over(tmp_path: Path) -> None:
    _saved(tmp_path, 100, 200)
    where = _record(tmp_path, 200, "decision.json")
    value = json.loads(where.read_bytes()) | {"schema": "2.0"}
    del value["digest"]
    value["digest"] = hashlib.sha256(records.canonical(value)).hexdigest()
    where.write_bytes(records.canonical(value) + b"\n")
    with pytest.raises(VersionError, match=r"iter_0000200.*Use a newer ckptlib"):
        _restored(tmp_path)


def test_a_lost_decision_of_an_exported_checkpoint_is_damage_and_never_becomes_an_abort(tmp_path: Path) -> None:
    _saved(tmp_path, 100)
    where = _record(tmp_path, 100, "decision.json")
    decision = where.read_bytes()
    where.unlink()
    with pytest.raises(NoResumePointError, match=r"iter_0000100: its commit decision is gone"):
        _restored(tmp_path, missing="start")
    where.write_bytes(decision)
    assert _restored(tmp_path) == (100, 100.0)


def test_a_good_export_is_not_replaced_by_the_damaged_file_it_was_copied_from(tmp_path: Path) -> None:
    """W5: the copy in the iteration directory may be all that is left."""
    result = Checkpointer(str(tmp_path), run="r").save({"model": {"w": torch.arange(4.0)}}, iteration=5)
    directory = Path(result.url)
    exported = (directory / "common.pt").read_bytes()
    (directory / ".ckpt" / result.save_id / "common.pt").write_bytes(exported[:-1] + bytes([exported[-1] ^ 1]))
    Checkpointer(str(tmp_path), run="r")
    assert (directory / "common.pt").read_bytes() == exported


def test_a_renamed_iteration_directory_is_not_taken_for_another_iteration(tmp_path: Path) -> None:
    """R6: what is restored at 200 would be the state of 100."""
    Checkpointer(str(tmp_path), run="r").save({"model": {"w": torch.arange(4.0)}}, iteration=100)
    (tmp_path / "iter_0000100").rename(tmp_path / "iter_0000200")
    with pytest.raises(NoResumePointError, match="of iteration 100: was the directory renamed"):
        Checkpointer(str(tmp_path), run="r").restore({"model": {"w": torch.zeros(4)}})


def test_a_start_does_not_read_every_old_checkpoint_again(tmp_path: Path) -> None:
    """W8: old checkpoints whose roll-forward has ended cost a start a few looks, and no comparison of exports."""
    root = str(tmp_path / "run")
    job = Checkpointer(root, run="run")
    for iteration in range(settling.COMPARED_AT_START + 4):
        job.save({"model": {"w": torch.ones(1)}}, iteration=iteration)
    with mock.patch.object(exports, "roll_forward", wraps=exports.roll_forward) as rolled:
        Checkpointer(root, run="run")
    assert rolled.call_count == settling.COMPARED_AT_START


def test_what_a_killed_trainer_told_nobody_is_told_at_the_next_start(tmp_path: Path) -> None:
    root = str(tmp_path)
    for iterations in ([1, 2], [3, 4], []):  # the last attempt came to no save
        job = Checkpointer(root, run="r")  # listened to by nobody
        for iteration in iterations:
            job.save({"model": {"w": torch.ones(1)}}, iteration=iteration)
    listener = Listener()
    Checkpointer(root, run="r", listeners=[listener])
    assert listener.commits == [(2, 3), (2, 4)]


def test_w5_an_old_checkpoint_whose_exports_were_not_finished_is_finished_at_the_next_start(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    job = Checkpointer(root, run="run")
    with mock.patch.object(exports, "roll_forward", side_effect=OSError("disk full")):
        job.save({"model": {"w": torch.ones(1)}}, iteration=0)
    for iteration in range(1, settling.COMPARED_AT_START + 2):
        job.save({"model": {"w": torch.ones(1)}}, iteration=iteration)
    assert not (tmp_path / "run/iter_0000000/metadata.json").exists()
    Checkpointer(root, run="run")
    assert (tmp_path / "run/iter_0000000/metadata.json").exists()
