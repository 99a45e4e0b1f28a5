"""Non-persistent checkpoints of all ranks: the newest takes the place of the older ones, once it is committed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptlib
from ckptlib import Checkpointer, commit, exports, removal, restoring, roots, settling
from ckptlib.async_options import AsyncOptions
from ckptlib.errors import NoResumePointError, NotACheckpointError
from ckptlib.events import Notice
from ckptlib.roots import Found
from ckptlib.storage import PosixStorage
from tests.support.ranks import try_ranks
from tests.support.roots import Crash, crash_at, files_of, newest, note, noted, small_state, states, tracker
from tests.support.trees import assert_same, blanked

NP = "non_persistent_global"


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def job(root: str, **options: Any) -> Checkpointer:
    """The next attempt of the run."""
    return Checkpointer(root, **{"run": "run", **options})


def save(checkpointer: Checkpointer, *iterations: int, kind: Any = NP, **options: Any) -> None:
    for iteration in iterations:
        checkpointer.save(small_state(float(iteration)), iteration=iteration, kind=kind, **options)


def not_removing() -> Any:
    """The process ends before it comes to a removal."""
    return mock.patch.object(removal, "supersede", return_value=[])


def below(root: str) -> list[str]:
    return sorted(entry for entry in os.listdir(f"{root}/non_persistent") if entry != roots.TRACKER)


def test_the_newest_takes_the_place_of_the_older_ones_with_all_they_had(root: str) -> None:
    checkpointer = job(root)
    save(checkpointer, 5, kind="persistent")
    save(checkpointer, 10, 20, 30)
    assert below(root) == ["iter_0000030"]
    assert tracker(f"{root}/non_persistent") == "30"
    assert states(root) == {"iter_0000005": ["committed"], "non_persistent/iter_0000030": ["committed"]}


@pytest.mark.parametrize("worker", [pytest.param("process", marks=pytest.mark.deep), "thread"])
def test_whoever_commits_an_asynchronous_one_removes_the_older_ones(root: str, worker: Any) -> None:
    with job(root, io_mode="async", background=AsyncOptions(worker=worker)) as checkpointer:
        save(checkpointer, 10, 20)
    assert below(root) == ["iter_0000020"]


def test_nothing_is_removed_before_the_newer_one_is_committed(root: str) -> None:
    save(job(root), 10)
    before = files_of(f"{root}/non_persistent/iter_0000010")
    with crash_at(commit, "try_commit"):
        save(job(root), 20)
    assert files_of(f"{root}/non_persistent/iter_0000010") == before
    assert newest(root) == (1, 10)


def _removing_until(calls: int) -> Any:
    """The process ends after so many names have been removed from storage."""
    original = PosixStorage.remove
    left = calls

    def remove(self: PosixStorage, paths: Iterable[str]) -> None:
        nonlocal left
        for path in paths:
            if left == 0:
                raise Crash
            left -= 1
            original(self, [path])

    return mock.patch.object(PosixStorage, "remove", remove)


def test_a_crash_at_any_moment_of_a_removal_leaves_no_half_checkpoint_and_the_next_attempt_finishes_it(
    tmp_path: Path,
) -> None:
    """D2, D3, C29: tombstone, foreign marker, data; a reader of either kind sees the whole one or none."""
    before = str(tmp_path / "before")
    checkpointer = job(before)
    save(checkpointer, 10)
    with not_removing():
        save(checkpointer, 20)
    manifest = ckptlib.inspect(f"{before}/non_persistent/iter_0000020").manifest
    assert manifest is not None
    crashed, calls = True, 0
    while crashed:
        root = str(tmp_path / f"run{calls}")
        shutil.copytree(before, root)
        crashed = False
        with _removing_until(calls):
            try:
                removal.supersede(PosixStorage(), root, manifest.begin)
            except Crash:
                crashed = True
        old = f"{root}/non_persistent/iter_0000010"
        assert states(root).get("non_persistent/iter_0000010", ["deleted"]) == ["deleted"]
        if os.path.exists(f"{old}/metadata.json"):
            assert any(name.endswith(".distcp") for name in os.listdir(old)), "a foreign reader sees a half one"
        settling.settle(PosixStorage(), root, 2)
        removal.supersede_by_newest(PosixStorage(), root)
        assert below(root) == ["iter_0000020"]
        assert newest(root) == (1, 20)
        calls += 1
    assert calls > 8  # there were that many moments
    state = blanked(small_state())
    assert job(root).restore(state).iteration == 20
    assert_same(state, small_state(20.0))


@pytest.mark.parametrize("calls", [0, 4])
def test_finishing_a_removal_that_was_cut_short_takes_nothing_of_what_another_tool_has_written_since(
    tmp_path: Path, calls: int
) -> None:
    """D3: exports have the names of a format, so another tool's checkpoint of the same iteration has them too."""
    root, other = str(tmp_path / "run"), str(tmp_path / "other")
    save(job(root), 10)
    here = Path(root, "non_persistent", "iter_0000010")
    (old,) = commit.list_saves(PosixStorage(), str(here))
    with _removing_until(calls), pytest.raises(Crash):
        removal.remove_save(PosixStorage(), str(here), old.save_id)
    ckptlib.save(small_state(7.0), other, iteration=10)
    theirs = {name: data for name, data in files_of(other).items() if name[0] != "_" and not name.startswith(".ckpt/")}
    del theirs["checkpoint.json"]  # ours alone
    for name, data in theirs.items():
        (here / name).write_bytes(data)
    (here / "checkpoint.json").unlink(missing_ok=True)  # as a tool that begins with an empty directory
    assert {".metadata", "metadata.json", "common.pt"} <= set(theirs)
    job(root)
    assert {name: data for name, data in files_of(here).items() if not name.startswith(".ckpt/")} == theirs


def test_a_removal_that_never_began_is_made_up_for_at_the_next_start(root: str) -> None:
    with not_removing():
        save(job(root), 10, 20)
    assert below(root) == ["iter_0000010", "iter_0000020"]
    job(root)
    assert below(root) == ["iter_0000020"]


def test_a_removal_that_fails_fails_no_save_and_is_told(root: str) -> None:
    notices: list[Notice] = []
    checkpointer = job(root, on_event=notices.append)
    save(checkpointer, 10)
    with mock.patch.object(exports, "bury", side_effect=OSError(5, "Input/output error")):
        save(checkpointer, 20)
    assert newest(root) == (1, 20)
    assert [notice.name for notice in notices] == ["superseded_not_removed"]
    assert "iter_0000010" in notices[0].message
    save(checkpointer, 30)
    assert below(root) == ["iter_0000030"]


def test_a_worker_tells_of_what_it_could_not_remove(root: str) -> None:
    notices: list[Notice] = []
    thread = AsyncOptions(worker="thread")
    with job(root, io_mode="async", background=thread, on_event=notices.append) as checkpointer:
        save(checkpointer, 10)
        with mock.patch.object(exports, "bury", side_effect=OSError(5, "Input/output error")):
            save(checkpointer, 20)
            checkpointer.drain()
    assert [notice.name for notice in notices] == ["superseded_not_removed"]


def test_a_rolled_back_attempt_replaces_what_the_older_one_had_further_on(root: str) -> None:
    """W8: the order is (attempt, iteration)."""
    first = job(root)
    save(first, 100, kind="persistent")
    save(first, 200)
    second = job(root)
    second.restore(blanked(small_state()), at=100)
    save(second, 110)
    assert below(root) == ["iter_0000110"]


def test_what_is_not_a_checkpoint_of_ours_is_left_alone(root: str) -> None:
    """C22: sidecars of a caller keep their directory; names that only look like checkpoints are nobody's."""
    checkpointer = job(root)
    save(checkpointer, 10)
    for name in ("iter_0000010/wgrads", "iter_0000005.tmp", "iter_0000007", "energon/iter_0000010"):
        os.makedirs(f"{root}/non_persistent/{name}")
        Path(f"{root}/non_persistent/{name}/x").write_text("mine")
    save(checkpointer, 20)
    assert below(root) == ["energon", "iter_0000005.tmp", "iter_0000007", "iter_0000010", "iter_0000020"]
    assert [name for name in files_of(f"{root}/non_persistent/iter_0000010") if ".ckpt" not in name] == ["wgrads/x"]
    assert not commit.is_committed(PosixStorage(), f"{root}/non_persistent/iter_0000010")


def test_what_the_tracker_names_stays_until_the_tracker_moves_on(root: str) -> None:
    """With ``tracker="verified"`` whoever verifies moves it; a reader that follows it must find something."""
    checkpointer = job(root, tracker="verified")
    save(checkpointer, 10)
    roots.put_tracker(PosixStorage(), root, 10, NP)
    save(checkpointer, 20, 30)
    assert below(root) == ["iter_0000010", "iter_0000030"]
    roots.put_tracker(PosixStorage(), root, 30, NP)
    save(checkpointer, 40)
    assert below(root) == ["iter_0000030", "iter_0000040"]


def test_what_a_restore_is_reading_stays_and_pins_of_older_attempts_hold_nothing(root: str) -> None:
    checkpointer = job(root)
    save(checkpointer, 10)
    held = removal.pinned(
        PosixStorage(), root, 1, commit.list_saves(PosixStorage(), f"{root}/non_persistent/iter_0000010")[0].save_id
    )
    with held:
        save(checkpointer, 20)
        assert below(root) == ["iter_0000010", "iter_0000020"]
    save(checkpointer, 30)
    assert below(root) == ["iter_0000030"]
    os.makedirs(f"{root}/.ckpt/readers", exist_ok=True)
    save_id = commit.list_saves(PosixStorage(), f"{root}/non_persistent/iter_0000030")[0].save_id
    Path(f"{root}/.ckpt/readers/1.{save_id}").touch()  # of a reader that died
    second = job(root)
    save(second, 40)
    assert below(root) == ["iter_0000040"]


@pytest.mark.parametrize("name", [".1.{save_id}.0123456789abcdef.tmp", ".nfs0000000001", "1.other", "x.y.z"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_a_killed_reader_leaves_beside_its_pins_disturbs_no_save_and_no_start(
    root: str, name: str, mode: Any
) -> None:
    readers = f"{root}/.ckpt/readers"
    with job(root, io_mode=mode, background=AsyncOptions(worker="thread")) as checkpointer:
        save(checkpointer, 10)
        os.makedirs(readers, exist_ok=True)
        Path(readers, name.format(save_id="000001-01a22a100613-1ba085c8")).touch()
        save(checkpointer, 20)
    assert below(root) == ["iter_0000020"]
    job(root)
    assert [entry for entry in os.listdir(readers) if "000001-" in entry] == []


def test_pins_of_older_attempts_go_at_the_next_start_and_newer_ones_stay(root: str) -> None:
    save(job(root), 10)
    readers = Path(root, ".ckpt", "readers")
    readers.mkdir(exist_ok=True)
    for attempt in (1, 2, 3):
        (readers / f"{attempt}.000001-01a22a100613-1ba085c8").touch()
    job(root)
    assert sorted(entry.name[0] for entry in readers.iterdir()) == ["2", "3"]


def test_whatever_goes_wrong_with_an_older_one_the_save_has_succeeded(root: str) -> None:
    left: list[Notice] = []
    checkpointer = job(root, on_event=left.append)
    save(checkpointer, 10)
    with mock.patch.object(removal, "remove_save", side_effect=RuntimeError("odd")):
        save(checkpointer, 20)
    assert newest(root) == (1, 20)
    assert [notice.name for notice in left] == ["superseded_not_removed"]


def test_a_restore_pins_the_non_persistent_checkpoint_that_it_reads_and_no_other(root: str) -> None:
    checkpointer = job(root)
    save(checkpointer, 5, kind="persistent")
    save(checkpointer, 10)
    seen: list[list[str]] = []
    original = restoring.restore_from

    def restore_from(*args: Any) -> Any:
        seen.append(os.listdir(f"{root}/.ckpt/readers") if os.path.isdir(f"{root}/.ckpt/readers") else [])
        return original(*args)

    with mock.patch.object(ckptlib.resume_point, "restore_from", restore_from):
        for at in (5, None):
            checkpointer.restore(blanked(small_state()), at=at)
    assert [len(names) for names in seen] == [0, 1]
    assert os.listdir(f"{root}/.ckpt/readers") == []


def test_a_checkpoint_that_was_superseded_is_gone_and_not_corrupt(root: str) -> None:
    checkpointer = job(root)
    save(checkpointer, 10)
    url = f"{root}/non_persistent/iter_0000010"
    manifest = ckptlib.inspect(url).manifest
    assert manifest is not None
    expected = {entry.path: (entry.size, entry.sha256) for entry in manifest.files}
    save(checkpointer, 20)
    with pytest.raises(NotACheckpointError, match="gone"):
        ckptlib.verify(url, save_id=manifest.begin.save_id, expected=expected)


def test_c10_an_explicit_iteration_is_never_overridden_by_a_newer_non_persistent_one(root: str) -> None:
    """C10: persistent {100}, non-persistent {200}; 0 is a value."""
    checkpointer = job(root)
    save(checkpointer, 100, kind="persistent")
    save(checkpointer, 200)
    state = blanked(small_state())
    assert job(root).restore(state).iteration == 200
    assert job(root).restore(state, at=100).iteration == 100
    assert_same(state, small_state(100.0))
    for at in (0, 150):
        with pytest.raises(NoResumePointError, match=rf"iteration {at}\b"):
            job(root).restore(state, at=at)


def test_what_nothing_resumes_from_by_itself_takes_no_place(root: str) -> None:
    checkpointer = job(root)
    save(checkpointer, 10)
    save(checkpointer, 20, semantic_type="LOCAL")
    assert below(root) == ["iter_0000010", "iter_0000020"]
    assert job(root).restore(blanked(small_state())).iteration == 10
    assert below(root) == ["iter_0000010", "iter_0000020"]
    save(job(root), 30)
    assert below(root) == ["iter_0000030"]


def test_a_persistent_checkpoint_after_a_non_persistent_one_wins(root: str) -> None:
    checkpointer = job(root)
    save(checkpointer, 20)
    save(checkpointer, 30, kind="persistent")
    assert job(root).restore(blanked(small_state())).iteration == 30


def train_until_killed(rank: int, root: str, victim: int, delay: float) -> None:
    """Goes on from what is there, which must not be older than what had been saved before."""
    last = noted(f"{root}-saved")
    checkpointer = job(root, timeout=30.0)
    state = blanked(small_state())
    restored = checkpointer.restore(state, missing="start")
    assert restored.iteration >= last
    if restored.found:
        assert_same(state, small_state(float(restored.iteration)))
    if rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for iteration in range(restored.iteration + 10, restored.iteration + 10_000, 10):
        save(checkpointer, iteration)
        if rank == 0:
            note(f"{root}-saved", iteration)


@pytest.mark.deep
def test_ranks_that_are_killed_at_any_moment_leave_the_newest_one_whole(root: str) -> None:
    """C04: at no moment there is none; at most the newest two are there after a start."""
    rng = random.Random(3)
    for attempt in range(10):
        outcomes = try_ranks(2, train_until_killed, root, attempt % 2, 0.2 + rng.random(), wait_for=1, timeout=60)
        assert [outcome.text for outcome in outcomes if outcome.error is not None] == []
    job(root)
    assert [each.state for each in roots.scan_non_persistent(PosixStorage(), root)].count("committed") == 1


found = st.builds(
    lambda attempt, iteration, kind, state, number: Found(
        name="",
        path="",
        url="",
        iteration=iteration,
        kind=kind,
        state=state,
        save=commit.SaveState(f"{attempt:06d}-{number:012x}-00000000", None, None),
        format=None,
    ),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from(["persistent", NP, "release"]),
    st.sampled_from(["committed", "undecided", "aborted", "deleted", "damaged"]),
    st.integers(0, 5),
)


@given(st.lists(found), found, st.sampled_from([None, "0", "2"]), st.data())
def test_only_older_committed_ones_that_nobody_needs_are_superseded(
    there: list[Found], newer: Found, tracked: str | None, data: st.DataObject
) -> None:
    """Never one that is newer by (attempt, iteration), tracked, being read, persistent, or not a whole checkpoint."""
    ids = [each.save.save_id for each in there if each.save is not None]
    being_read = set(data.draw(st.lists(st.sampled_from(ids)))) if ids else set()
    for each in removal.superseded([*there, newer], newer.order, tracked, being_read):
        assert each.order < newer.order
        assert each.kind == NP
        assert each.state in ("committed", "deleted")
        assert str(each.iteration) != tracked
        assert each.save is not None
        assert each.save.save_id not in being_read
