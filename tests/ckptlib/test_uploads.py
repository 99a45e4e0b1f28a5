"""A run on a fast first tier, uploaded in the background to where it is durable (W1 to W9 of each location, S4)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import fsspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptlib
from ckptlib import (
    AsyncOptions,
    Checkpointer,
    UploadOptions,
    beats,
    commit,
    locations,
    removal,
    roots,
    storage,
    transfer,
    trimming,
    uploading,
)
from ckptlib.errors import (
    BackgroundSaveError,
    FencedError,
    IntegrityError,
    NoResumePointError,
    RankFailedError,
    StateError,
    StorageUnavailableError,
    UnsupportedError,
)
from ckptlib.events import AttemptEvent, CommitEvent, Notice, ResumeChoice
from ckptlib.manifest import Begin
from ckptlib.sending import Pace
from ckptlib.sharding import ShardedTensor
from ckptlib.transfer import Transfer
from ckptlib.uploading import LeaderWatch, UploadJob, UploadRun
from ckptlib.workshop import Upload
from tests.support.ranks import run_ranks, try_ranks
from tests.support.roots import newest, states, tracker
from tests.support.s3_server import S3Server
from tests.support.workers import marked_workers, workers_of

IoMode = Literal["sync", "async"]


def state(fill: float = 0.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((64, 32), float(fill))}}


class Told:
    """What a run tells: notices by name, and commits to listeners."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.commits: list[tuple[str, int]] = []
        self.attempts: list[str] = []

    def __call__(self, notice: Notice) -> None:
        self.notices.append(notice)

    def attempt_started(self, event: AttemptEvent) -> None:
        self.attempts.append(event.root_url)

    def committed(self, event: CommitEvent) -> None:
        self.commits.append((str(event.root_url), event.manifest.begin.iteration))

    def close(self, timeout: float) -> None:
        pass

    def named(self, name: str) -> list[Notice]:
        return [notice for notice in self.notices if notice.name == name]


class Tiers:
    """A first tier and a durable location in one folder."""

    def __init__(self, folder: Path) -> None:
        self.first, self.durable = folder / "first", folder / "durable"

    def open(self, told: Told | None = None, worker: Any = "thread", **options: Any) -> Checkpointer:
        told = told or Told()
        upload = {name: options.pop(name) for name in ("keep", "limit", "kinds", "give_up_after") if name in options}
        return Checkpointer(
            options.pop("first", str(self.first)),
            run="r",
            upload=UploadOptions(options.pop("durable", str(self.durable)), **upload),
            background=AsyncOptions(worker=worker),
            on_event=told,
            listeners=[told],
            **options,
        )


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return Tiers(tmp_path)


def restored(checkpointer: Checkpointer, **options: Any) -> tuple[int, float, str]:
    into = state()
    found = checkpointer.restore(into, **options)
    return found.iteration, float(into["model"]["w"][0, 0]), found.url


def wait_until(condition: Callable[[], bool], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- what is saved becomes durable ------------------------------------------------------------------------------------


@pytest.mark.parametrize("io_mode", ["sync", "async"])
def test_what_is_committed_on_the_first_tier_becomes_durable(tiers: Tiers, io_mode: IoMode) -> None:
    told = Told()
    with tiers.open(told, io_mode=io_mode) as checkpointer:
        assert checkpointer.restore(state(), missing="start").found is False
        for iteration in (100, 200):
            checkpointer.save(state(iteration), iteration=iteration)
        assert checkpointer.drain(60)
        assert checkpointer.uploading == ()
    assert [notice.data["iteration"] for notice in told.named("uploaded")] == [100, 200]
    assert told.commits == [(str(tiers.durable), 100), (str(tiers.durable), 200)]
    assert told.attempts == [str(tiers.durable)]
    assert (
        states(tiers.first) == states(tiers.durable) == {"iter_0000100": ["committed"], "iter_0000200": ["committed"]}
    )
    assert tracker(tiers.first) == tracker(tiers.durable) == "200"
    for iteration in (100, 200):
        report = ckptlib.verify(str(tiers.durable / f"iter_{iteration:07d}"))
        assert set(report.files.values()) == {"ok"}
    near, far = ((root / "iter_0000200" / "checkpoint.json").read_bytes() for root in (tiers.first, tiers.durable))
    assert near == far


def test_a_worker_process_uploads_and_goes_on_when_the_trainer_is_killed(tiers: Tiers) -> None:
    """W7: it needs both storages, and nothing of the training process."""
    (outcome,) = try_ranks(1, _save_and_die, tiers)
    assert outcome.exitcode == -signal.SIGKILL
    wait_until(lambda: newest(tiers.durable) == (1, 5))
    wait_until(lambda: ckptlib.verify(str(tiers.durable / "iter_0000005")).ok)  # exports come after the decision


def _save_and_die(rank: int, tiers: Tiers) -> None:
    checkpointer = tiers.open(worker="process")
    checkpointer.save(state(5), iteration=5)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.deep
def test_what_a_dead_worker_did_not_upload_the_next_attempt_does(tiers: Tiers) -> None:
    """W8: nothing of it is undecided, so it is not aborted."""
    (outcome,) = try_ranks(1, _save_and_die_with_the_worker, tiers)
    assert outcome.exitcode == -signal.SIGKILL
    assert states(tiers.durable) == {"iter_0000005": ["undecided"]}
    told = Told()
    with tiers.open(told) as checkpointer:
        assert restored(checkpointer, strict="return") == (5, 5.0, str(tiers.first / "iter_0000005"))
        assert checkpointer.drain(60)
    assert told.commits == [(str(tiers.durable), 5)]
    assert newest(tiers.durable) == (1, 5)
    assert ckptlib.verify(str(tiers.durable / "iter_0000005")).ok


def _save_and_die_with_the_worker(rank: int, tiers: Tiers) -> None:
    checkpointer = tiers.open(worker="process", limit=1000.0)
    checkpointer.save({"model": {"w": torch.full((64, 32), 5.0)}, "more": {"x": torch.ones(2**22)}}, iteration=5)
    wait_until(lambda: states(tiers.durable) != {})
    for worker in workers_of(os.getpid()):
        worker.send_signal(signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_upload_that_was_cut_short_is_gone_on_with_and_not_aborted(tiers: Tiers) -> None:
    with Checkpointer(str(tiers.first), run="r") as checkpointer:
        url = checkpointer.save(state(3), iteration=3).url
    cut_short = Transfer.of(url, str(tiers.durable))
    cut_short.open(cut_short.plan())
    with tiers.open() as checkpointer:
        assert checkpointer.attempt == 2
        assert checkpointer.drain(60)
    assert states(tiers.durable) == {"iter_0000003": ["committed"]}


def test_a_half_made_upload_of_a_kind_that_is_not_uploaded_any_more_is_not_aborted(tiers: Tiers) -> None:
    with tiers.open(kinds=()) as checkpointer:
        url = checkpointer.save(state(3), iteration=3).url
    cut_short = Transfer.of(url, str(tiers.durable))
    cut_short.open(cut_short.plan())
    with tiers.open(kinds=()):
        pass
    assert states(tiers.durable) == {"iter_0000003": ["undecided"]}
    with tiers.open() as checkpointer:
        assert checkpointer.drain(60)
    assert states(tiers.durable) == {"iter_0000003": ["committed"]}


def test_an_upload_that_lost_its_first_tier_is_aborted_and_the_run_goes_on(tiers: Tiers) -> None:
    """W8: nobody will complete it."""
    with tiers.open() as checkpointer:
        checkpointer.save(state(1), iteration=1)
        assert checkpointer.drain(60)
    with Checkpointer(str(tiers.first), run="r") as checkpointer:
        url = checkpointer.save(state(2), iteration=2).url
    cut_short = Transfer.of(url, str(tiers.durable))
    cut_short.open(cut_short.plan())
    shutil.rmtree(tiers.first)
    with tiers.open() as checkpointer:
        assert checkpointer.attempt == 3
        assert restored(checkpointer)[0] == 1
    assert states(tiers.durable) == {"iter_0000001": ["committed"], "iter_0000002": ["aborted"]}


def test_s4_a_durable_location_that_fails_is_tried_again_and_fails_no_save(tiers: Tiers, tmp_path: Path) -> None:
    told = Told()
    with tiers.open(told) as checkpointer:
        tiers.durable.rename(tmp_path / "away")
        tiers.durable.touch()
        checkpointer.save(state(1), iteration=1)
        wait_until(lambda: bool(checkpointer.poll() or told.named("upload_failed")))
        assert checkpointer.uploading == (1,)
        tiers.durable.unlink()
        (tmp_path / "away").rename(tiers.durable)
        assert checkpointer.drain(60)
    assert told.named("upload_failed")[0].data["again_in"] == 1.0
    assert [notice.data["iteration"] for notice in told.named("uploaded")] == [1]


def test_a_checkpoint_that_cannot_be_uploaded_holds_up_no_newer_one(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, send, repaired = Told(), Transfer.send, threading.Event()

    def fail(transfer: Transfer, *args: Any, **options: Any) -> None:
        if "iter_0000001" in transfer.source.path and not repaired.is_set():
            raise OSError("bad sector")
        send(transfer, *args, **options)

    monkeypatch.setattr(Transfer, "send", fail)
    with tiers.open(told) as checkpointer:
        for iteration in (1, 2, 3):
            checkpointer.save(state(iteration), iteration=iteration)
        wait_until(lambda: bool(checkpointer.poll() or len(told.named("uploaded")) == 2))
        assert checkpointer.uploading == (1,)
        repaired.set()
        assert checkpointer.drain(60)
    assert [notice.data["iteration"] for notice in told.named("uploaded")] == [2, 3, 1]
    assert tracker(tiers.durable) == "3"


def test_what_fails_when_the_job_has_ended_is_given_up_when_the_time_for_all_is_over(tiers: Tiers) -> None:
    job = _job(committed(tiers), str(tiers.first), str(tiers.durable))
    shutil.rmtree(tiers.durable)
    tiers.durable.touch()
    run = UploadRun(job)
    assert run.attempt().again_in == 1.0
    assert run.attempt(until=time.monotonic()).is_last


def test_a_limit_holds_nobody_who_has_been_stopped() -> None:
    pace, stopped = Pace(1e-3), threading.Event()
    pace.spend(1, stopped)
    stopped.set()
    pace.spend(1, stopped)  # its turn would come after 1000 s


def test_a_worker_with_nothing_but_uploads_lets_go_of_the_trainers_errors_and_heeds_sigterm(tiers: Tiers) -> None:
    mark = uuid.uuid4().hex
    script = "import sys; from tests.ckptlib import test_uploads; test_uploads._save_and_leave(sys.argv[1])"
    trainer = subprocess.Popen(
        [sys.executable, "-c", script, str(tiers.first.parent)],
        stderr=subprocess.PIPE,
        env={**os.environ, "CKPTLIB_TEST_MARK": mark},
    )
    try:
        trainer.communicate(timeout=60)
        assert trainer.returncode == 0
        (worker,) = marked_workers("CKPTLIB_TEST_MARK", mark)
        worker.terminate()
        worker.wait(30)
    finally:
        for process in (trainer, *marked_workers("CKPTLIB_TEST_MARK", mark)):
            process.kill()
    assert states(tiers.durable) == {"iter_0000005": ["undecided"]}


def _save_and_leave(folder: str) -> None:
    tiers = Tiers(Path(folder))
    checkpointer = tiers.open(worker="process", limit=1000.0)
    checkpointer.save({"model": {"w": torch.ones(2**22)}}, iteration=5)
    wait_until(lambda: states(tiers.durable) != {})
    os._exit(0)


def test_an_upload_is_given_up_in_the_end_and_told(tiers: Tiers, tmp_path: Path) -> None:
    told = Told()
    with tiers.open(told, give_up_after=0.0) as checkpointer:
        tiers.durable.rename(tmp_path / "away")
        tiers.durable.touch()
        checkpointer.save(state(1), iteration=1)
        assert not checkpointer.drain(60)
        checkpointer.poll()
        assert not checkpointer.drain(60)  # still not durable, although it has been told
    assert [notice.data["again_in"] for notice in told.named("upload_failed")] == [None]


@pytest.mark.deep
def test_a_worker_that_is_killed_is_replaced_and_its_uploads_are_made(tiers: Tiers) -> None:
    with tiers.open(worker="process", limit=8 * 2**20) as checkpointer:
        checkpointer.save({"model": {"w": torch.ones(6 * 2**20)}}, iteration=1)
        checkpointer.save(state(2), iteration=2)
        wait_until(lambda: states(tiers.durable) != {})
        for worker in workers_of(os.getpid()):
            worker.send_signal(signal.SIGKILL)
        assert checkpointer.drain(120)
    assert states(tiers.durable) == {"iter_0000001": ["committed"], "iter_0000002": ["committed"]}


def test_what_is_not_durable_at_a_drain_is_told_and_goes_on(tiers: Tiers) -> None:
    told = Told()
    with tiers.open(told, limit=8 * 2**20) as checkpointer:
        checkpointer.save({"model": {"w": torch.ones(6 * 2**20)}}, iteration=1)  # its last block waits for two seconds
        assert not checkpointer.drain(0.2)
        assert [notice.data["iteration"] for notice in told.named("upload_unfinished")] == [1]
        assert states(tiers.first) == {"iter_0000001": ["committed"]}
        assert checkpointer.drain(60)
    assert states(tiers.durable) == {"iter_0000001": ["committed"]}


def at_the_first_upload(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Has something happen between the commit on the first tier and the first byte that is uploaded."""
    between, acts = Transfer.between, [act]

    def then_between(*args: Any) -> Transfer:
        if acts:
            acts.pop()()
        return between(*args)

    monkeypatch.setattr(Transfer, "between", then_between)


@pytest.mark.parametrize(
    ("removed", "notice"), [("", "upload_failed"), ("iter_0000001", "upload_lost")], ids=["first tier", "checkpoint"]
)
def test_what_went_before_it_was_durable_is_told_and_never_taken_for_uploaded(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch, removed: str, notice: str
) -> None:
    told = Told()
    at_the_first_upload(monkeypatch, lambda: shutil.rmtree(tiers.first / removed))
    with tiers.open(told, give_up_after=0.0) as checkpointer:
        checkpointer.save(state(1), iteration=1)
        assert not checkpointer.drain(60)
    assert [each.name for each in told.notices if each.name.startswith("upload")] == [notice]
    assert "iteration 1 " in told.named(notice)[0].message
    assert newest(tiers.durable) is None


def test_a_first_tier_that_comes_back_is_uploaded_from(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = Told()
    at_the_first_upload(monkeypatch, lambda: tiers.first.rename(tmp_path / "away"))
    with tiers.open(told) as checkpointer:
        checkpointer.save(state(1), iteration=1)
        wait_until(lambda: bool(checkpointer.poll() or told.named("upload_failed")))
        (tmp_path / "away").rename(tiers.first)
        assert checkpointer.drain(60)
    assert "the first tier is not there" in told.named("upload_failed")[0].message
    assert newest(tiers.durable) == (1, 1)


def test_a_non_persistent_checkpoint_that_a_newer_one_took_the_place_of_is_not_uploaded(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, saved = Told(), threading.Event()
    at_the_first_upload(monkeypatch, lambda: saved.wait(60))
    with tiers.open(told, kinds=("non_persistent_global",)) as checkpointer:
        for iteration in (1, 2):
            checkpointer.save(state(iteration), iteration=iteration, kind="non_persistent_global")
        saved.set()
        assert checkpointer.drain(60)
    assert [each.name for each in told.notices if each.name.startswith("upload")] == ["uploaded"]
    assert states(tiers.durable) == {"non_persistent/iter_0000002": ["committed"]}


def test_only_the_chosen_kinds_are_uploaded(tiers: Tiers) -> None:
    with tiers.open() as checkpointer:
        checkpointer.save(state(1), iteration=1, kind="non_persistent_global")
        checkpointer.save(state(2), iteration=2)
        assert checkpointer.drain(60)
    assert states(tiers.durable) == {"iter_0000002": ["committed"]}
    with tiers.open(kinds=("non_persistent_global",)) as checkpointer:
        assert checkpointer.drain(60)
    assert states(tiers.durable) == {"iter_0000002": ["committed"], "non_persistent/iter_0000001": ["committed"]}


def test_a_save_that_is_aborted_is_not_uploaded(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError("no disk")

    told = Told()
    monkeypatch.setattr("ckptlib.background.write_package", fail)
    with contextlib.suppress(BackgroundSaveError), tiers.open(told, io_mode="async") as checkpointer:
        checkpointer.save(state(1), iteration=1)
        assert not checkpointer.drain(60)
    assert told.named("upload_failed") == []
    assert states(tiers.durable) == {}


def test_a_checkpoint_that_was_replaced_before_its_upload_is_not_uploaded(tiers: Tiers) -> None:
    """W9: what took its place is, and nothing waits for what is gone."""
    told = Told()
    with tiers.open(told, limit=8 * 2**20) as checkpointer:
        checkpointer.save({"model": {"w": torch.ones(6 * 2**20)}}, iteration=1)  # the others wait for it
        checkpointer.save(state(2), iteration=2)
        replacing = checkpointer.save(state(3), iteration=2, on_exists="replace")
        assert checkpointer.drain(60)
    assert [notice.data["iteration"] for notice in told.named("uploaded")] == [1, 2]
    assert told.named("upload_failed") == []
    assert roots.scan(*storage.resolve(str(tiers.durable))).found[-1].order[2] == replacing.save_id
    assert states(tiers.durable) == {"iter_0000001": ["committed"], "iter_0000002": ["committed"]}


def test_a_damaged_checkpoint_is_never_durable(tiers: Tiers) -> None:
    told = Told()
    with Checkpointer(str(tiers.first), run="r") as checkpointer:
        path = Path(checkpointer.save(state(1), iteration=1).url)
    (data,) = path.glob("__*")
    damaged = bytearray(data.read_bytes())
    damaged[-2000] ^= 1
    data.write_bytes(damaged)
    with tiers.open(told) as checkpointer:
        assert not checkpointer.drain(60)
    (failure,) = told.named("upload_failed")
    assert f"{data.name}: damaged" in failure.message
    assert newest(tiers.durable) is None


def test_to_memory_and_by_a_thread(tiers: Tiers) -> None:
    durable = f"memory://{uuid.uuid4().hex}"
    with pytest.raises(UnsupportedError, match="a worker process cannot upload"):
        tiers.open(worker="process", durable=durable)
    with tiers.open(durable=durable) as checkpointer:
        checkpointer.save(state(1), iteration=1)
        assert checkpointer.drain(60)
    assert ckptlib.verify(f"{durable}/iter_0000001").ok
    fsspec.filesystem("memory").rm(durable.removeprefix("memory:/"), recursive=True)


def test_to_an_object_store(tiers: Tiers, s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    with tiers.open(durable=s3_url, io_mode="async") as checkpointer:
        checkpointer.save(state(7), iteration=7)
        assert checkpointer.drain(60)
    assert set(ckptlib.verify(f"{s3_url}/iter_0000007", level="store").files.values()) == {"ok"}
    shutil.rmtree(tiers.first)
    with tiers.open(durable=s3_url) as checkpointer:
        assert checkpointer.attempt == 2
        assert restored(checkpointer) == (7, 7.0, f"{s3_url}/iter_0000007")


# --- restore: the newest of both --------------------------------------------------------------------------------------


def test_a_lost_first_tier_resumes_from_the_durable_location(tiers: Tiers) -> None:
    """W8: attempts are numbered at the durable location, so they go on."""
    with tiers.open() as checkpointer:
        checkpointer.save(state(1), iteration=1)
        assert checkpointer.drain(60)
    shutil.rmtree(tiers.first)
    with tiers.open() as checkpointer:
        assert checkpointer.attempt == 2
        assert restored(checkpointer) == (1, 1.0, str(tiers.durable / "iter_0000001"))
        checkpointer.save(state(2), iteration=2)
        assert checkpointer.drain(60)
    assert states(tiers.first) == {"iter_0000002": ["committed"]}
    with tiers.open() as checkpointer:
        assert restored(checkpointer)[0] == 2
        assert restored(checkpointer, at=1) == (1, 1.0, str(tiers.durable / "iter_0000001"))
        with pytest.raises(NoResumePointError):
            restored(checkpointer, at=3)


def test_the_first_tier_is_read_where_it_is_as_new_and_intact(tiers: Tiers) -> None:
    told = Told()
    with tiers.open() as checkpointer:
        for iteration in (1, 2):
            checkpointer.save(state(iteration), iteration=iteration)
        assert checkpointer.drain(60)
    with tiers.open(told) as checkpointer:
        assert restored(checkpointer) == (2, 2.0, str(tiers.first / "iter_0000002"))
        (data,) = (tiers.first / "iter_0000002").glob("__*")
        damaged = bytearray(data.read_bytes())
        damaged[-2000] ^= 1
        data.write_bytes(damaged)
        assert restored(checkpointer) == (2, 2.0, str(tiers.durable / "iter_0000002"))
    assert "iter_0000002" in told.named("resume_candidate_rejected")[0].message


def test_the_first_tier_is_read_where_it_is_newer(tiers: Tiers) -> None:
    with tiers.open() as checkpointer:
        checkpointer.save(state(1), iteration=1)
        assert checkpointer.drain(60)
    with Checkpointer(str(tiers.first), run="r") as checkpointer:
        checkpointer.save(state(2), iteration=2)
    with tiers.open() as checkpointer:
        assert checkpointer.attempt == 3
        assert restored(checkpointer) == (2, 2.0, str(tiers.first / "iter_0000002"))
        assert checkpointer.drain(60)
    assert newest(tiers.durable) == (2, 2)


def test_the_durable_location_is_read_where_it_is_newer(tiers: Tiers) -> None:
    with tiers.open() as checkpointer:
        checkpointer.save(state(1), iteration=9)
        assert checkpointer.drain(60)
    with Checkpointer(str(tiers.durable), run="r") as checkpointer:
        checkpointer.save(state(2), iteration=2)
    with tiers.open() as checkpointer:
        assert restored(checkpointer) == (2, 2.0, str(tiers.durable / "iter_0000002"))


class Resolver:
    """Always chooses one iteration at the root that it is asked of; None: refuses."""

    def __init__(self, iteration: int | None) -> None:
        self.iteration = iteration
        self.asked: list[str] = []

    def resolve(self, *, run: str, root_url: str, at: int | None) -> ResumeChoice | None:
        self.asked.append(root_url)
        if self.iteration is None:
            raise NoResumePointError("none is eligible")
        path = Path(root_url, roots.iteration_name(self.iteration))
        (save_id,) = [entry.name for entry in (path / ".ckpt").iterdir()]
        return ResumeChoice(str(path), self.iteration, save_id, "verified")


def test_r2_a_resolver_chooses_among_what_is_durable(tiers: Tiers) -> None:
    """What it knows of and did not choose is not taken from the first tier; what it cannot know is."""
    with tiers.open() as checkpointer:
        for iteration in (1, 2):
            checkpointer.save(state(iteration), iteration=iteration)
        assert checkpointer.drain(60)
    resolver = Resolver(1)
    with tiers.open(resolver=resolver, kinds=()) as checkpointer:
        assert resolver.asked == []
        assert restored(checkpointer) == (1, 1.0, str(tiers.first / "iter_0000001"))
        assert resolver.asked == [str(tiers.durable)]
    with tiers.open(resolver=Resolver(None), kinds=()) as checkpointer:
        with pytest.raises(NoResumePointError, match="none is eligible"):
            restored(checkpointer)
        checkpointer.save(state(3), iteration=3)
    with tiers.open(resolver=resolver, kinds=()) as checkpointer:
        assert restored(checkpointer) == (3, 3.0, str(tiers.first / "iter_0000003"))
    shutil.rmtree(tiers.first)
    with tiers.open(resolver=resolver) as checkpointer:
        assert restored(checkpointer) == (1, 1.0, str(tiers.durable / "iter_0000001"))


@pytest.mark.parametrize("resolver", [None, Resolver(1)])
def test_d3_what_was_deleted_at_the_durable_location_does_not_return(tiers: Tiers, resolver: Resolver | None) -> None:
    """Neither by an upload nor by a restore, when nothing but the root's tombstone is left of it."""
    with tiers.open() as checkpointer:
        for iteration in (1, 2):
            checkpointer.save(state(iteration), iteration=iteration)
        assert checkpointer.drain(60)
    delete(tiers.durable, 2)
    assert states(tiers.durable) == {"iter_0000001": ["committed"]}
    told = Told()
    with tiers.open(told, resolver=resolver) as checkpointer:
        assert restored(checkpointer) == (1, 1.0, str(tiers.first / "iter_0000001"))
        assert checkpointer.drain(60)
    (rejected,) = told.named("resume_candidate_rejected")
    assert "iter_0000002: deleted" in rejected.message
    assert states(tiers.durable) == {"iter_0000001": ["committed"]}


def delete(root: Path, iteration: int) -> None:
    (found,) = [each for each in roots.scan(*storage.resolve(str(root))).found if each.iteration == iteration]
    assert found.save is not None
    removal.remove_save(storage.resolve(str(root))[0], found.path, found.save.save_id)


def test_what_leaves_the_first_tier_for_room_is_not_deleted(tiers: Tiers) -> None:
    with tiers.open(keep=1) as checkpointer:
        for iteration in (1, 2):
            checkpointer.save(state(iteration), iteration=iteration)
        assert checkpointer.drain(60)
    assert states(tiers.first) == {"iter_0000002": ["committed"]}
    transfer.copy(str(tiers.durable / "iter_0000001"), str(tiers.first))
    assert len(states(tiers.first)) == 2


def test_a_first_tier_that_cannot_be_read_is_told_and_the_durable_location_serves(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = roots.scan

    def without_first(store: Any, root: str) -> Any:
        if root == str(tiers.first):
            raise OSError(5, "Input/output error")
        return scan(store, root)

    told = Told()
    with tiers.open(told, kinds=()) as checkpointer:
        checkpointer.save(state(1), iteration=1)
        monkeypatch.setattr(roots, "scan", without_first)
        with pytest.raises(OSError, match="Input/output error"):  # nothing durable: it must not look like no checkpoint
            restored(checkpointer, missing="start")
        transfer.copy(str(tiers.first / "iter_0000001"), str(tiers.durable))
        assert restored(checkpointer) == (1, 1.0, str(tiers.durable / "iter_0000001"))
    assert "Input/output error" in told.named("first_tier_unread")[0].message


# --- room on the first tier -------------------------------------------------------------------------------------------


def test_older_checkpoints_leave_the_first_tier_when_they_are_durable(tiers: Tiers) -> None:
    with tiers.open(keep=1) as checkpointer:
        for iteration in (1, 2, 3):
            checkpointer.save(state(iteration), iteration=iteration)
        assert checkpointer.drain(60)
    assert states(tiers.first) == {"iter_0000003": ["committed"]}
    assert len(states(tiers.durable)) == 3
    assert not (tiers.first / "iter_0000001").exists()


def test_what_is_not_durable_or_is_read_stays_on_the_first_tier(tiers: Tiers) -> None:
    with tiers.open() as checkpointer:
        for iteration in (1, 2, 3):
            checkpointer.save(state(iteration), iteration=iteration)
        assert checkpointer.drain(60)
        first, durable = storage.resolve(str(tiers.first)), storage.resolve(str(tiers.durable))
        with Checkpointer(str(tiers.durable), run="r"):
            pass
        ids = {found.iteration: found.order[2] for found in roots.scan(*first).found}
        commit_of_1 = tiers.durable / "iter_0000001" / ".ckpt" / ids[1] / "decision.json"
        commit_of_1.unlink()
        with removal.pinned(*first, checkpointer.attempt, ids[2]):
            assert trimming.trim(*first, *durable, 1) == []
        assert trimming.trim(*first, *durable, 1) == [str(tiers.first / "iter_0000002")]


orders = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), unique=True, max_size=8)


@given(orders, st.integers(1, 4), st.integers(1, 9), st.sampled_from(["committed", "undecided", "deleted"]))
def test_the_newest_always_stay(found: list[tuple[int, int]], keep: int, tracked: int, other: Any) -> None:
    each = [_found(attempt, iteration, "committed") for attempt, iteration in found]
    strange = [_found(9, 9, other)] if other != "committed" else []
    gone = trimming.beyond([*each, *strange], keep, str(tracked), {each[0].order[2]} if each else set())
    newest_first = sorted(each, key=lambda one: one.order, reverse=True)
    assert not set(map(id, gone)) & set(map(id, newest_first[:keep]))
    assert all(one.state == "committed" and one.iteration != tracked for one in gone)
    assert not each or each[0] not in gone


def _found(attempt: int, iteration: int, state: Any) -> roots.Found:
    save = commit.SaveState(f"{attempt:06d}-{iteration:012x}-{0:08x}", None, None)
    return roots.Found(f"iter_{iteration:07d}", "", "", iteration, "persistent", state, save, "torch_dist")


# --- many ranks -------------------------------------------------------------------------------------------------------


def test_every_rank_sends_what_it_has_written(tiers: Tiers) -> None:
    sent = run_ranks(2, _save_together, tiers)
    assert all(nbytes > 1000 for nbytes in sent)
    assert set(ckptlib.verify(str(tiers.durable / "iter_0000004")).files.values()) == {"ok"}
    whole = ckptlib.read(str(tiers.durable / "iter_0000004"))["w"]
    assert torch.equal(whole, torch.arange(2.0).repeat_interleave(500))


def _sharded(rank: int, size: int = 500) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((size,), float(rank)), (0, rank, 2))}


def _save_together(rank: int, tiers: Tiers) -> int:
    told: list[int] = []
    with tiers.open() as checkpointer:
        uploads = checkpointer._uploads
        assert uploads is not None
        checkpointer.save(_sharded(rank), iteration=4)
        (upload,) = uploads._uploads
        assert checkpointer.drain(60)
        assert upload.outcome is not None
        told.append(upload.outcome.sent)
    return told[0]


def test_rank_0_sends_what_a_dead_rank_did_not(tiers: Tiers) -> None:
    zero, one = try_ranks(2, _one_dies, tiers)
    assert zero.ok, zero.text
    assert one.exitcode == -signal.SIGKILL
    assert set(ckptlib.verify(str(tiers.durable / "iter_0000004")).files.values()) <= {"ok", "extra"}
    assert newest(tiers.durable) == (1, 4)


def _one_dies(rank: int, tiers: Tiers) -> None:
    checkpointer = tiers.open(limit=None if rank == 0 else 100.0)
    checkpointer.save(_sharded(rank, 8 * 2**20), iteration=4)  # several blocks: a limit does not hold back the first
    if rank == 1:
        beat = tiers.durable / "iter_0000004" / ".ckpt"
        wait_until(lambda: bool(list(beat.glob("*/beat_1.json"))))
        os.kill(os.getpid(), signal.SIGKILL)
    uploads = checkpointer._uploads
    assert uploads is not None
    assert uploads.wait(60)


def test_another_number_of_ranks_uploads_what_is_left(tiers: Tiers) -> None:
    run_ranks(2, _save_without_upload, tiers)
    with tiers.open() as checkpointer:
        assert checkpointer.drain(10)  # nobody is waited for
    assert set(ckptlib.verify(str(tiers.durable / "iter_0000004")).files.values()) == {"ok"}


def _save_without_upload(rank: int, tiers: Tiers) -> None:
    with Checkpointer(str(tiers.first), run="r") as checkpointer:
        checkpointer.save(_sharded(rank), iteration=4)


@pytest.mark.deep
def test_all_ranks_hear_that_rank_0_has_given_up(tiers: Tiers) -> None:
    run_ranks(2, _save_without_upload, tiers)
    for data in (tiers.first / "iter_0000004").glob("__0_*"):
        data.write_bytes(b"x" * data.stat().st_size)
    assert run_ranks(2, _fail_to_upload, tiers) == [1, 1]
    assert newest(tiers.durable) is None


def _fail_to_upload(rank: int, tiers: Tiers) -> int:
    told = Told()
    with tiers.open(told) as checkpointer:
        assert not checkpointer.drain(40)
    return len(told.named("upload_failed"))


def test_a_first_tier_that_a_rank_does_not_share_is_refused(tiers: Tiers, tmp_path: Path) -> None:
    for outcome in try_ranks(2, _open_apart, tiers, tmp_path):
        assert isinstance(outcome.error, (StorageUnavailableError, RankFailedError)), outcome.text
        assert "rank 1 does not see what rank 0 has made there" in str(outcome.error)


def _open_apart(rank: int, tiers: Tiers, folder: Path) -> None:
    tiers.open(first=str(folder / f"host{rank}"))


def committed(tiers: Tiers) -> Begin:
    """A checkpoint of one rank on the first tier, whose upload has begun."""
    with Checkpointer(str(tiers.first), run="r") as checkpointer:
        url = checkpointer.save(state(5), iteration=5).url
    begun = Transfer.of(url, str(tiers.durable))
    begun.open(begun.plan())
    return begun.manifest.begin


def at_each_pause(monkeypatch: pytest.MonkeyPatch, acts: list[Callable[[], object]]) -> None:
    """Has others do something, in order, when whoever uploads waits for them."""
    monkeypatch.setattr(uploading._Pauses, "wait", lambda pauses: acts.pop(0)())


def test_that_an_earlier_attempt_gave_up_is_no_reason_to_give_up(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = committed(tiers)
    zero, one = (_job(begin, str(tiers.first), str(tiers.durable), rank=rank, world_size=2) for rank in (0, 1))
    path = str(tiers.durable / "iter_0000005")
    commit.publish_failure(storage.resolve(path)[0], path, begin.save_id, 0, "no room")
    at_each_pause(monkeypatch, [lambda: UploadRun(zero).attempt()])
    report = UploadRun(one).attempt()
    assert report.error is None
    assert report.decision is not None


def test_what_somebody_else_made_durable_is_not_given_up(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = committed(tiers)

    def fail(*args: Any) -> None:
        transfer.copy(str(tiers.first / "iter_0000005"), str(tiers.durable))
        raise IntegrityError("damaged")

    monkeypatch.setattr(uploading, "_send_leading", fail)
    report = UploadRun(_job(begin, str(tiers.first), str(tiers.durable))).attempt()
    assert report.error is None
    assert report.decision is not None


def test_rank_0_gives_signs_of_life_until_its_decision_is_there(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, decide = committed(tiers), Transfer.decide
    store, path = storage.resolve(str(tiers.durable / "iter_0000005"))

    def decide_late(transfer: Transfer) -> Any:
        before = beats.read_beats(store, path, begin)
        wait_until(lambda: beats.read_beats(store, path, begin) != before)
        return decide(transfer)

    monkeypatch.setattr(Transfer, "decide", decide_late)
    report = UploadRun(_job(begin, str(tiers.first), str(tiers.durable), heartbeat=0.02)).attempt()
    assert report.decision is not None
    assert list((tiers.durable / "iter_0000005" / ".ckpt" / begin.save_id).glob("beat_*")) == []


def test_what_was_sent_is_not_sent_again_when_rank_0_was_not_heard_of(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, send = committed(tiers), Transfer.send
    zero, one = (_job(begin, str(tiers.first), str(tiers.durable), rank=rank, world_size=2) for rank in (0, 1))
    sends: list[int] = []

    def counted(transfer: Transfer, entries: Any, *args: Any, **options: Any) -> None:
        sends.append(len(entries))
        send(transfer, entries, *args, **options)

    def give_up() -> None:
        raise TimeoutError

    monkeypatch.setattr(Transfer, "send", counted)
    at_each_pause(monkeypatch, [give_up, lambda: UploadRun(zero).attempt()])
    run = UploadRun(one)
    assert run.attempt().again_in == 1.0
    assert run.attempt().decision is not None
    assert sends == [0, 1]  # all files are rank 0's


def test_a_beat_that_an_earlier_attempt_left_is_no_sign_that_rank_0_is_lost() -> None:
    def beat(counter: int) -> beats.Beat:
        return beats.Beat("s", 0, counter, 0, 0, 2.0, "host", "", 1, 1, 0.0)

    watch = LeaderWatch()
    looks = [(beat(7), 0.0), (beat(7), beats.START - 1), (beat(1), beats.START), (beat(1), beats.START + 5)]
    assert [watch.is_lost(*look) for look in looks] == [False] * 4
    assert watch.is_lost(beat(1), beats.START + 7)
    never = LeaderWatch()
    assert [never.is_lost(beat(7), now) for now in (0.0, beats.START + 1, beats.START + 8)] == [False, False, True]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_w8_the_durable_location_fences_where_first_tiers_do_not_know_of_each_other(
    tiers: Tiers, tmp_path: Path
) -> None:
    old = tiers.open()
    old.save(state(1), iteration=1)
    with tiers.open(first=str(tmp_path / "other host")) as new:
        assert new.attempt == 2
        with pytest.raises(FencedError):
            old.save(state(2), iteration=2)
    old.close()


def test_a_fence_that_does_not_answer_is_told_and_fails_no_save(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    with tiers.open(told) as checkpointer:
        durable = checkpointer._places.durable
        assert durable is not None

        def fail(path: str) -> list[storage.Entry]:
            raise OSError("unreachable")

        with monkeypatch.context() as patch:
            patch.setattr(durable.storage, "list", fail)
            checkpointer.save(state(1), iteration=1)
        assert [notice.name for notice in told.named("fence_unanswered")] == ["fence_unanswered"]
        assert checkpointer.drain(60)


def test_a_durable_location_that_never_answers_holds_no_save_and_nothing_is_read_back_from_it(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, answers = Told(), threading.Event()
    with tiers.open(told) as checkpointer:
        durable = checkpointer._places.durable
        assert durable is not None
        checkpointer._places.fence.patience = 0.01

        def hang(path: str) -> Any:
            answers.wait()
            raise OSError("it is over")

        for name in ("list", "get"):
            monkeypatch.setattr(durable.storage, name, hang)
        for iteration in (1, 2):
            checkpointer.save(state(iteration), iteration=iteration)
        assert checkpointer.drain(60)
        answers.set()
    messages = [notice.message for notice in told.named("fence_unanswered")]
    assert ["no answer within" in messages[0], "an earlier question" in messages[1]] == [True, True]
    assert told.commits == [(str(tiers.durable), 1), (str(tiers.durable), 2)]


def test_a_fence_that_was_late_is_asked_again_when_it_has_answered() -> None:
    fence, answers = locations.Fence(patience=0.0), threading.Event()
    with pytest.raises(TimeoutError, match="no answer"):
        fence.ask(lambda: int(answers.wait()))
    with pytest.raises(TimeoutError, match="an earlier question"):
        fence.ask(lambda: pytest.fail("was asked"))
    fence.patience = 60.0
    late = fence._late
    answers.set()
    assert late is not None
    assert late.result(60) == 1
    assert fence.ask(lambda: 7) == 7


def test_a_first_tier_of_another_root_is_refused(tiers: Tiers, tmp_path: Path) -> None:
    for root in (tiers.first, tiers.durable):
        with Checkpointer(str(root), run="r"):
            pass
    with pytest.raises(StorageUnavailableError, match="not the first tier of"):
        tiers.open()


def test_a_location_is_no_first_tier_of_itself(tiers: Tiers) -> None:
    """Nothing could be told durable, and what is trimmed would be lost."""
    with Checkpointer(str(tiers.first), run="r") as checkpointer:
        checkpointer.save(state(1), iteration=1)
    shutil.copytree(tiers.first, tiers.durable)
    for durable in (str(tiers.first), str(tiers.durable)):
        with pytest.raises(StorageUnavailableError, match="itself, or a plain copy"):
            tiers.open(durable=durable)
    assert states(tiers.first) == {"iter_0000001": ["committed"]}


def test_locations_that_were_both_trained_from_are_not_mixed(tiers: Tiers) -> None:
    with tiers.open() as checkpointer:
        checkpointer.save(state(1), iteration=1)
    for root in (tiers.first, tiers.durable):
        with Checkpointer(str(root), run="r") as checkpointer:
            checkpointer.save(state(2), iteration=2)
    with pytest.raises(StorageUnavailableError, match=r"attempt 2 .* another process"):
        tiers.open()


@pytest.mark.parametrize(
    "options", [{"kinds": ("non_persistent_local",)}, {"keep": 0}, {"limit": 0.0}, {"give_up_after": -1.0}]
)
def test_options_out_of_their_range(options: dict[str, Any]) -> None:
    with pytest.raises(StateError, match=next(iter(options)).removesuffix("s")):
        UploadOptions("/durable", **options)


def test_credentials_are_not_shown() -> None:
    assert "secret" not in repr(UploadOptions("s3://bucket/run", storage_options={"secret": "secret"}))
    job = _job(
        Begin("000001-0-0", "r", 1, "a", 5, 1, "0" * 64),
        storage_options={"a": "secret"},
        target_options={"b": "secret"},
    )
    assert "secret" not in repr(Upload(job))


def _job(begin: Begin, first: str = "/first", durable: str = "/durable", **options: Any) -> UploadJob:
    """One rank's part in an upload, as `Uploads` makes it."""
    rest: dict[str, Any] = {"storage_options": None, "target_options": None, "rank": 0, "world_size": 1, **options}
    return UploadJob(
        number=1,
        begin=begin,
        attempt_id="this one",
        url=roots.iteration_path(first, begin.iteration, begin.kind),
        root=first,
        target=durable,
        single_writer=False,
        moves_tracker=True,
        commit_timeout=60.0,
        keep=None,
        limit=None,
        **{"give_up_after": 60.0, **rest},
    )
