"""Saves in the background: the state may change at once, the trainer may die, nothing that was staged is lost (W7)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

import ckptlib
from ckptlib import Checkpointer, background, background_saves, commit, exports, packing, staging, worker, workshop
from ckptlib.async_options import AsyncOptions
from ckptlib.background import Job, Outcome
from ckptlib.errors import (
    BackgroundSaveError,
    CheckpointExistsError,
    CkptError,
    SaveLimitError,
    StagingError,
    StateError,
    UnsupportedError,
)
from ckptlib.events import AttemptEvent, CommitEvent, Notice
from ckptlib.manifest import Decision
from ckptlib.staging import Pool
from ckptlib.storage import Storage
from tests.support.ranks import run_ranks
from tests.support.workers import is_worker, marked_workers, shared_segments

THREAD = AsyncOptions(worker="thread")


def state(fill: float) -> dict[str, Any]:
    """Plain, transposed, strided, empty and tied tensors, and several dtypes."""
    base = torch.full((6, 8), fill)
    return {
        "model": {
            "plain": torch.full((5, 3), fill, dtype=torch.bfloat16),
            "transposed": torch.full((4, 7), fill).T,
            "strided": base[::2, 1::3],
            "tied": base,
            "scalar": torch.tensor(fill),
            "empty": torch.empty(0, 4),
            "whole numbers": torch.full((3,), int(fill)),
        },
        "step": int(fill),
    }


def change(tree: dict[str, Any], fill: float) -> None:
    for tensor in tree["model"].values():
        tensor.fill_(fill)


def assert_holds(url: str, fill: float) -> None:
    stored = ckptlib.read(url)
    for name, tensor in state(fill)["model"].items():
        assert torch.equal(stored[f"model.{name}"], tensor), name
    target = state(0)
    ckptlib.load(target, url)
    assert target["step"] == fill


def committed(root: str) -> list[str]:
    return sorted(path.parent.name for path in Path(root).glob("iter_*/metadata.json"))


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("CKPTLIB_TEST_MARK", mark)
    yield
    deadline = time.monotonic() + 20
    while left := marked_workers("CKPTLIB_TEST_MARK", mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


class Listener:
    def __init__(self) -> None:
        self.commits: list[int] = []

    def attempt_started(self, event: AttemptEvent) -> None:
        pass

    def committed(self, event: CommitEvent) -> None:
        self.commits.append(event.manifest.begin.iteration)

    def close(self, timeout: float) -> None:
        pass


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_p05_what_changes_after_save_returns_is_not_in_the_checkpoint(root: str, kind: Any) -> None:
    """P05 (pytorch#144657), for every layout of memory; iterations become checkpoints in order."""
    listener = Listener()
    options = AsyncOptions(worker=kind, max_in_flight=2)
    with Checkpointer(root, run="run", io_mode="async", background=options, listeners=[listener]) as job:
        tree = state(0)
        for iteration in range(1, 5):
            change(tree, iteration)
            tree["step"] = iteration
            pending = job.save(tree, iteration=iteration)
            change(tree, -1)
            assert pending.bytes > 0
        assert pending.wait(60).files == 1
        job.poll()
        for iteration in range(1, 5):
            assert_holds(f"{root}/iter_{iteration:07d}", iteration)
            assert ckptlib.verify(f"{root}/iter_{iteration:07d}").ok
        assert listener.commits == [1, 2, 3, 4]
        assert Path(root, "latest_checkpointed_iteration.txt").read_text() == "4"
        assert ckptlib.inspect(f"{root}/iter_0000004").manifest.begin.io_mode == "async"  # type: ignore[union-attr]
    resumed = state(0)
    assert Checkpointer(root, run="run").restore(resumed).iteration == 4


def test_memory_is_staged_in_once_and_used_again(root: str) -> None:
    with Checkpointer(root, run="run", io_mode="async", background=THREAD) as job:
        with mock.patch.object(staging, "Arena", wraps=staging.Arena) as made:
            for iteration in range(6):
                job.save(state(iteration), iteration=iteration)
            assert job.drain(60)
        assert made.call_count == 1
        assert_holds(f"{root}/iter_0000005", 5)


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_states_of_changing_size_are_written_from_their_own_memory(root: str, kind: Any) -> None:
    """Arenas are closed and made anew, perhaps where one was before: the worker must not take one for another."""
    sizes = [1000, 300_000, 50, 2_000_000, 5_000_000, 300_000, 400_000, 50]
    with Checkpointer(root, run="run", io_mode="async", background=AsyncOptions(2, worker=kind)) as job:
        for iteration, size in enumerate(sizes):
            job.save({"w": torch.full((size,), float(iteration))}, iteration=iteration)
        assert job.drain(60)
        process = job._background.worker
        if isinstance(process, worker.WorkerProcess):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert maps.count("ckptlib-staging") <= 2, "the memory of arenas that were closed is given back"
    for iteration, size in enumerate(sizes):
        stored = ckptlib.read(f"{root}/iter_{iteration:07d}")["w"]
        assert torch.equal(stored, torch.full((size,), float(iteration))), iteration


def test_a_thread_that_is_not_waited_for_still_writes_what_was_staged(root: str) -> None:
    gate = threading.Event()
    with mock.patch.object(workshop, "run_job", slow(gate)):
        job = Checkpointer(root, run="run", io_mode="async", background=THREAD)
        pending = job.save(state(1), iteration=1)
        job.close(timeout=0.01)
        gate.set()
        assert pending.wait(60).files == 1
    assert_holds(f"{root}/iter_0000001", 1)


class Unreadable(dict[str, Any]):
    """Pickled here, and nowhere else to be read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise ImportError('no such module')",))


def test_a_worker_that_cannot_read_its_job_fails_it_and_ends(root: str) -> None:
    job = Checkpointer(root, run="run", io_mode="async")
    job.prepare(4096)
    process = job._background.worker
    assert isinstance(process, worker.WorkerProcess)
    options: Any = Unreadable()
    unreadable = mock.Mock(side_effect=lambda **of: replace(Job(**of), storage_options=options))
    with mock.patch.object(background_saves, "Job", unreadable):
        pending = job.save(state(1), iteration=1)
    with pytest.raises(BackgroundSaveError, match="worker process ended"):
        pending.wait(60)
    assert not psutil.pid_exists(process.pid)
    with pytest.raises(BackgroundSaveError, match="worker process ended"):
        job.close()


def slow(gate: threading.Event) -> Callable[..., Outcome]:
    def run(job: Job, *args: Any) -> Outcome:
        assert gate.wait(60)
        return background.run_job(job, *args)

    return run


@pytest.mark.parametrize("at_limit", ["skip", "error", "wait"])
def test_what_happens_at_the_limit_is_what_the_caller_chose(root: str, at_limit: Any) -> None:
    gate, notices = threading.Event(), list[Notice]()
    options = AsyncOptions(worker="thread", at_limit=at_limit)
    with (
        mock.patch.object(workshop, "run_job", slow(gate)),
        Checkpointer(root, run="run", io_mode="async", background=options, on_event=notices.append) as job,
    ):
        job.save(state(1), iteration=1)
        if at_limit == "skip":
            assert job.save(state(2), iteration=2).save_id == ""
            assert [notice.name for notice in notices] == ["save_skipped"]
        elif at_limit == "error":
            with pytest.raises(SaveLimitError, match="1 saves are in flight on rank 0"):
                job.save(state(2), iteration=2)
        else:
            threading.Timer(0.2, gate.set).start()
            job.save(state(2), iteration=2)
        gate.set()
        assert job.drain(60)
    assert committed(root) == ["iter_0000001", "iter_0000002"][: 2 if at_limit == "wait" else 1]
    assert_holds(f"{root}/iter_0000001", 1)


def test_a_synchronous_save_waits_for_those_in_flight(root: str) -> None:
    gate = threading.Event()
    with (
        mock.patch.object(workshop, "run_job", slow(gate)),
        Checkpointer(root, run="run", io_mode="async", background=THREAD) as job,
    ):
        job.save(state(1), iteration=1)
        threading.Timer(0.2, gate.set).start()
        job.save(state(2), iteration=2, io_mode="sync")
        assert Path(root, "iter_0000001/metadata.json").exists()


def test_a_save_that_fails_in_the_background_is_told_once_and_harms_no_other(root: str) -> None:
    notices: list[Notice] = []
    with Checkpointer(root, run="run", io_mode="async", background=THREAD, on_event=notices.append) as job:
        job.save(state(1), iteration=1).wait(60)
        with mock.patch.object(background, "write_package", side_effect=OSError(28, "No space left on device")):
            pending = job.save(state(2), iteration=2)
            with pytest.raises(BackgroundSaveError, match=r"iteration 2 .*No space left"):
                pending.wait(60)
        with pytest.raises(BackgroundSaveError, match=r"iteration 2 .*No space left") as caught:
            job.save(state(3), iteration=3)
        assert caught.value.iteration == 2
        job.save(state(4), iteration=4).wait(60)
        assert [notice.name for notice in notices] == ["save_failed"]
    assert sorted(path.parent.name for path in Path(root).glob("iter_*/metadata.json")) == [
        "iter_0000001",
        "iter_0000004",
    ]
    assert Checkpointer(root, run="run").restore(state(0)).iteration == 4


def test_the_last_save_that_failed_is_told_when_the_checkpointer_is_closed(root: str) -> None:
    job = Checkpointer(root, run="run", io_mode="async", background=THREAD)
    with mock.patch.object(background, "write_package", side_effect=OSError("gone")):
        job.save(state(1), iteration=1)
        with pytest.raises(BackgroundSaveError, match="gone"):
            job.close()
    with pytest.raises(StateError, match="closed"):
        job.save(state(2), iteration=2)


def end_worker(job: Checkpointer, number: signal.Signals) -> None:
    process = job._background.worker
    assert isinstance(process, worker.WorkerProcess)
    os.kill(process.pid, number)


def test_what_a_worker_that_is_killed_had_is_written_by_another(root: str) -> None:
    """What is staged outlives the worker, as it outlives the trainer."""
    with Checkpointer(root, run="run", io_mode="async", background=AsyncOptions(max_in_flight=2)) as job:
        job.prepare(1 << 20)
        end_worker(job, signal.SIGSTOP)
        first, second = job.save(state(1), iteration=1), job.save(state(2), iteration=2)
        end_worker(job, signal.SIGKILL)
        first.wait(60)
        second.wait(60)
        job.save(state(3), iteration=3).wait(60)
    for iteration in (1, 2, 3):
        assert_holds(f"{root}/iter_{iteration:07d}", iteration)
        assert ckptlib.verify(f"{root}/iter_{iteration:07d}").ok


class Killed(BaseException):
    """Ends a job where a SIGKILL would."""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (packing, "write_rank_files"),
        (commit, "write_common"),
        (commit, "publish_record"),
        (background, "_commit"),
        (exports, "conclude"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_another_worker_goes_on_wherever_the_first_one_ended(root: str, module: Any, name: str, after: bool) -> None:
    """W2, W4: what was not recorded is written again; what was recorded, or decided, stands."""
    arenas: list[Any] = []
    jobs: list[Job] = []

    def end(job: Job, arena: Any, *rest: Any) -> Outcome:
        jobs.append(job)
        arenas.append(arena)
        return Outcome(job.number, error="not written")

    with (
        mock.patch.object(workshop, "run_job", end),
        Checkpointer(root, run="run", io_mode="async", background=THREAD) as trainer,
    ):
        with pytest.raises(BackgroundSaveError):
            trainer.save(state(1), iteration=1).wait(60)
        real = getattr(module, name)

        def killed(*args: Any, **options: Any) -> Any:
            if after:
                real(*args, **options)
            raise Killed

        with mock.patch.object(module, name, killed), pytest.raises(Killed):
            background.run_job(jobs[0], arenas[0])
        outcome = background.run_job(replace(jobs[0], again=True), arenas[0])
        assert outcome.error is None
        assert outcome.decision is not None
        assert outcome.decision.outcome == "commit"
        with contextlib.suppress(BackgroundSaveError):  # what this test made of the first worker
            trainer.close()
    assert_holds(f"{root}/iter_0000001", 1)
    assert ckptlib.verify(f"{root}/iter_0000001").ok
    assert len(list(Path(root).glob("iter_0000001/__0_*"))) == 1


def stopped_worker(*args: Any, **options: Any) -> worker.WorkerProcess:
    process = worker.WorkerProcess(*args, **options)
    os.kill(process.pid, signal.SIGSTOP)
    return process


def test_a_save_that_ends_two_workers_fails_on_its_own(root: str) -> None:
    with Checkpointer(root, run="run", io_mode="async") as job:
        job.prepare(1 << 20)
        end_worker(job, signal.SIGSTOP)
        first = job._background.worker
        pending = job.save(state(1), iteration=1)
        with mock.patch.object(workshop, "WorkerProcess", side_effect=stopped_worker):
            end_worker(job, signal.SIGKILL)
            while job._background.worker in (None, first):
                time.sleep(0.01)
            end_worker(job, signal.SIGKILL)
            with pytest.raises(BackgroundSaveError, match=r"iteration 1 .*worker process ended"):
                pending.wait(60)
        decision = next(Path(root).glob("iter_0000001/.ckpt/*/decision.json")).read_text()
        assert "abort" in decision, "nobody waits for what will not come"
        with pytest.raises(BackgroundSaveError, match="iteration 1"):
            job.save(state(2), iteration=2)
        job.save(state(3), iteration=3).wait(60)
    assert_holds(f"{root}/iter_0000003", 3)


def test_a_worker_that_ends_after_its_part_was_done_has_not_failed(root: str) -> None:
    jobs: list[Job] = []

    def run(job: Job, *args: Any) -> Outcome:
        jobs.append(job)
        return background.run_job(job, *args)

    with (
        mock.patch.object(workshop, "run_job", run),
        Checkpointer(root, run="run", io_mode="async", background=THREAD) as job,
    ):
        job.save(state(1), iteration=1).wait(60)
    decided = background.give_up(jobs[0], "its worker process ended")
    assert decided.error is None
    assert decided.decision is not None
    assert background.give_up(replace(jobs[0], rank=1), "its worker process ended") == Outcome(1)


def test_an_iteration_that_exists_is_refused_before_anything_is_staged(root: str) -> None:
    """W9."""
    with Checkpointer(root, run="run", io_mode="async", background=THREAD) as job:
        job.save(state(1), iteration=1).wait(60)
        with pytest.raises(CheckpointExistsError):
            job.save(state(1), iteration=1)
        job.save(state(2), iteration=1, on_exists="replace").wait(60)
    assert_holds(f"{root}/iter_0000001", 2)


def test_a_save_beyond_the_staging_budget_is_refused_and_leaves_no_checkpoint(root: str) -> None:
    options = AsyncOptions(worker="thread", staging_budget=64)
    with Checkpointer(root, run="run", io_mode="async", background=options) as job:
        with pytest.raises(StagingError, match="does not fit into the staging_budget"):
            job.save(state(1), iteration=1)
        assert not list(Path(root).glob("iter_*/metadata.json"))
        job.save(state(1), iteration=1, io_mode="sync")


def test_idle_memory_that_is_too_small_does_not_count_against_the_budget() -> None:
    pool = Pool(generations=2, budget=100 << 12)
    pool.give_back(pool.take(40 << 12))
    large = pool.take(80 << 12)
    assert pool.nbytes == large.size == 80 << 12
    with pytest.raises(StagingError, match="budget"):
        pool.take(40 << 12)
    pool.give_back(large)
    pool.close()


def test_memory_that_does_not_suffice_for_all_saves_in_flight_is_given_back() -> None:
    pool = Pool(generations=2, budget=3 << 12)
    with pytest.raises(StagingError, match="budget"):
        pool.prepare(2 << 12)
    pool.give_back(pool.take(2 << 12))
    assert pool.nbytes == 2 << 12
    pool.close()


def test_what_a_worker_process_cannot_reach_is_refused_at_once() -> None:
    with pytest.raises(UnsupportedError, match=r"in the memory of this process.*or a worker thread"):
        Checkpointer("memory://async/run", run="run", io_mode="async", single_writer=True)
    with Checkpointer("memory://async/run", run="run", io_mode="async", background=THREAD, single_writer=True) as job:
        job.save(state(1), iteration=1).wait(60)
    assert_holds("memory://async/run/iter_0000001", 1)


@pytest.mark.parametrize("options", [{"max_in_flight": 0}, {"at_limit": "hope"}, {"worker": "fork"}], ids=str)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(StateError, match=next(iter(options))):
        AsyncOptions(**options)


TRAINER = """
    import os, signal, sys, torch
    from ckptlib import Checkpointer
    job = Checkpointer(sys.argv[1], run="run", io_mode="async")
    job.save({"model": {"w": torch.arange(1 << 20)}}, iteration=7)
    print("staged", flush=True)
    if sys.argv[2] == "itself":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
"""


@pytest.mark.parametrize("whom", [pytest.param("itself", marks=pytest.mark.deep), "its process group"])
def test_p17_a_trainer_that_is_killed_after_staging_loses_nothing(root: str, whom: str) -> None:
    """P17 (KempnerForge#102), W7: the worker finishes, commits, moves the tracker and ends; no memory has a name."""
    shared = shared_segments()
    command = [sys.executable, "-c", textwrap.dedent(TRAINER), root, whom]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "staged\n"
        if whom != "itself":
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait(30)
    tracker = Path(root, "latest_checkpointed_iteration.txt")
    deadline = time.monotonic() + 60
    while not tracker.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert tracker.read_text() == "7"
    assert torch.equal(ckptlib.read(f"{root}/iter_0000007")["model.w"], torch.arange(1 << 20))
    assert shared_segments() <= shared


def test_a_worker_that_has_only_just_been_started_is_not_ended_by_the_signals_that_end_processes(root: str) -> None:
    """Its start takes seconds, and it may have been handed a save by then."""
    with Checkpointer(root, run="run", io_mode="async") as job:
        pending = job.save(state(1), iteration=1)
        process = job._background.worker
        assert isinstance(process, worker.WorkerProcess)
        for number in worker.IGNORED:
            os.kill(process.pid, number)
        assert pending.wait(60).files == 1
        assert worker_masks(process.pid) == 0
    assert_holds(f"{root}/iter_0000001", 1)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def worker_masks(pid: int) -> int:
    """The signals that a process has blocked."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["SigBlk"], 16)


FORKING = """
    import os, signal, sys, time, torch
    from ckptlib import Checkpointer
    job = Checkpointer(sys.argv[1], run="run", io_mode="async")
    job.prepare(1 << 20)
    if os.fork() == 0:
        time.sleep(600)  # a data loader's worker that nobody told
    job.save({"model": {"w": torch.ones(4)}}, iteration=1).wait()
    print(job._background.worker.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_child_of_the_trainer_does_not_keep_the_worker_waiting(root: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(FORKING), root]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        try:
            deadline = time.monotonic() + 30
            while psutil.pid_exists(pid) and is_worker(psutil.Process(pid)):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            os.killpg(trainer.pid, signal.SIGKILL)


def two_ranks(rank: int, root: str) -> list[str]:
    """Rank 1's worker fails at iteration 2, and rank 0 learns of it after iteration 3; what each rank sees."""
    seen = []
    commit = background._commit

    def late(storage: Storage, path: str, job: Job) -> Decision:
        if job.begin.iteration == 2:
            time.sleep(2)
        return commit(storage, path, job)

    with (
        mock.patch.object(background, "_commit", late),
        Checkpointer(root, run="run", io_mode="async", background=AsyncOptions(2, worker="thread")) as job,
    ):
        for iteration in (1, 2, 3, 4):
            tree = {"w": ckptlib.ShardedTensor.from_rank_offsets("w", torch.full((2,), float(iteration)), (0, rank, 2))}
            failing = rank == 1 and iteration == 2
            try:
                with mock.patch.object(
                    background, "write_package", side_effect=OSError("disk of rank 1") if failing else None,
                    wraps=None if failing else background.write_package,
                ):  # fmt: skip
                    job.save(tree, iteration=iteration)
                    if rank == 1 or iteration != 2:
                        assert job.drain(60, at_deadline="leave")
                seen.append("saved")
            except BackgroundSaveError as error:
                seen.append(f"failed: {error.iteration} {'disk of rank 1' in str(error)}")
                assert job.drain(60, at_deadline="leave")
    return seen


def test_a_failure_on_one_rank_surfaces_on_every_rank_at_the_next_save_and_once(root: str) -> None:
    """P20 as a kind: the commit needs every record; rank 0 does not wait for one that will not come."""
    assert run_ranks(2, two_ranks, root) == [["saved", "saved", "failed: 2 True", "saved"]] * 2
    assert committed(root) == ["iter_0000001", "iter_0000004"]
    assert ckptlib.read(f"{root}/iter_0000004")["w"].tolist() == [4.0] * 4


def no_room_on_one_rank(rank: int, root: str) -> list[str]:
    """Rank 1's first save takes longer than a rank waits; what each rank sees."""
    gate, seen = threading.Event(), []
    with (
        mock.patch.object(workshop, "run_job", slow(gate) if rank == 1 else background.run_job),
        mock.patch.object(background, "_commit", return_value=None),
        Checkpointer(root, run="run", io_mode="async", background=THREAD, timeout=1.0) as job,
    ):
        for iteration in (1, 2, 3):
            if iteration == 3:
                gate.set()
            try:
                job.save({"w": torch.zeros(2)}, iteration=iteration)
                seen.append("saved")
            except CkptError as error:
                seen.append(type(error).__name__)
    return seen


def test_ranks_without_room_are_known_to_all_and_the_next_save_finds_all_in_step(root: str) -> None:
    first, second = run_ranks(2, no_room_on_one_rank, root)
    assert first[1] in ("RankFailedError", "RankTimeoutError")  # both have waited for one timeout then
    assert [first[0], *first[2:]] == ["saved", "saved"]
    assert second == ["saved", "SaveLimitError", "saved"]


def test_an_iteration_that_is_being_written_exists(root: str) -> None:
    """W9."""
    gate = threading.Event()
    with (
        mock.patch.object(workshop, "run_job", slow(gate)),
        Checkpointer(root, run="run", io_mode="async", background=AsyncOptions(2, worker="thread")) as job,
    ):
        first = job.save(state(1), iteration=1)
        with pytest.raises(CheckpointExistsError, match="still being written"):
            job.save(state(2), iteration=1)
        threading.Timer(0.2, gate.set).start()
        second = job.save(state(3), iteration=1, on_exists="replace")
        assert job.drain(60)
    assert_holds(f"{root}/iter_0000001", 3)
    saves = {path.parent.name for path in Path(root, "iter_0000001/.ckpt").glob("*/decision.json")}
    assert saves == {second.save_id} != {first.save_id}


def test_the_tracker_does_not_go_back_within_an_attempt(root: str) -> None:
    tracker = Path(root, "latest_checkpointed_iteration.txt")
    with Checkpointer(root, run="run", io_mode="async", background=THREAD) as job:
        job.save(state(1), iteration=20).wait(60)
        job.save(state(1), iteration=10).wait(60)
        assert tracker.read_text() == "20"
        job.save(state(1), iteration=15, io_mode="sync")
        assert tracker.read_text() == "20"


def test_an_io_mode_that_is_none_is_refused(root: str) -> None:
    mode: Any = "asynch"
    with Checkpointer(root, run="run") as job, pytest.raises(UnsupportedError, match="'asynch'"):
        job.save(state(1), iteration=1, io_mode=mode)
    assert not Path(root, "iter_0000001").exists()
