"""What goes wrong around asynchronous saves is told on every rank, and leaves nothing that looks like a checkpoint."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

import ckptlib
from ckptlib import AsyncOptions, Checkpointer, ShardedTensor, async_save, commit
from ckptlib.errors import BackgroundSaveError, FencedError, StagingError, StateError
from tests.support.filesystems import small_filesystem
from tests.support.ranks import context, run_ranks
from tests.support.roots import newest, states, tracker
from tests.support.workers import workers_stopped

THREAD = AsyncOptions(worker="thread")
QUICK = AsyncOptions(heartbeat=0.05)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def state(fill: float, size: int = 1000) -> dict[str, Any]:
    return {"model": {"w": torch.full((size,), fill)}}


def assert_restores(root: str, iteration: int, fill: float, size: int = 1000) -> None:
    target = state(-1.0, size)
    with Checkpointer(root, run="run") as job:
        assert job.restore(target).iteration == iteration
    assert torch.equal(target["model"]["w"], torch.full((size,), fill))


# --- storage and memory -----------------------------------------------------------------------------------------------


def test_a_worker_whose_disk_is_full_fails_that_save_by_name_and_writes_the_next(tmp_path: Path) -> None:
    with small_filesystem(tmp_path / "small", size="4m") as disk:
        root = str(disk / "run")
        unasked = {"posix": {"room": "off"}}  # or it is refused before anything is staged
        with Checkpointer(root, run="run", io_mode="async", storage_options=unasked) as job:
            job.save(state(1.0), iteration=1).wait(60)
            pending = job.save(state(2.0, 2_000_000), iteration=2)
            with pytest.raises(BackgroundSaveError, match=r"iteration 2 .*No space left on device.*__0_0\..*distcp"):
                pending.wait(60)
            assert len(list(disk.rglob("*.distcp"))) == 1, "what was written of it gave its space back"
            assert newest(root) == (1, 1)
            with pytest.raises(BackgroundSaveError, match="iteration 2"):
                job.save(state(3.0), iteration=3)
            job.save(state(3.0), iteration=3).wait(60)
        assert states(root) == {
            "iter_0000001": ["committed"],
            "iter_0000002": ["aborted"],
            "iter_0000003": ["committed"],
        }
        assert_restores(root, 3, 3.0)


def save_without_memory(rank: int, root: str) -> list[str]:
    """Rank 1 can map no more memory at the second of four saves; what each rank sees, and its own end of each."""
    seen = []
    with Checkpointer(root, run="run", io_mode="async", background=THREAD, timeout=30.0) as job:
        job.prepare(1 << 16)
        for iteration in (1, 2, 3, 4):
            size = 20_000_000 if iteration == 2 else 1000
            shard = ShardedTensor.from_rank_offsets("w", torch.full((size,), float(iteration)), (0, rank, 2))
            try:
                with little_memory() if (rank, iteration) == (1, 2) else contextlib.nullcontext():
                    pending = job.save({"model": {"w": shard}}, iteration=iteration)
                seen.append("staged")
                pending.wait(60)
            except (StagingError, BackgroundSaveError) as error:
                seen.append(f"{type(error).__name__} {'Cannot allocate memory' in str(error)}")
    return seen


def test_memory_that_cannot_be_had_on_one_rank_fails_that_save_everywhere_and_not_the_next(root: str) -> None:
    first, second = run_ranks(2, save_without_memory, root)
    assert first == ["staged", "staged", "BackgroundSaveError True", "BackgroundSaveError True", "staged"]
    assert second == ["staged", "StagingError True", "BackgroundSaveError True", "staged"]
    assert {name: found[-1] for name, found in states(root).items()} == {
        "iter_0000001": "committed",
        "iter_0000002": "aborted",
        "iter_0000004": "committed",
    }
    assert ckptlib.read(f"{root}/iter_0000004")["w"].tolist() == [4.0] * 2000


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """No room for anything large: mapping it fails as it does when the machine has no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (16 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# --- order, structure, lifetime ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_state_whose_structure_changes_between_saves_in_flight_is_saved_as_it_is(root: str, kind: Any) -> None:
    """Of P19's kind: keys that come and go, another dtype, another shape; each save has its own."""
    trees = [
        {"w": torch.ones(4)},
        {"w": torch.ones(4), "late": torch.full((3,), 5.0)},
        {"w": torch.ones(4, dtype=torch.bfloat16)},
        {"w": torch.ones(60_000), "nested": {"a": torch.zeros(2)}},
        {"other": torch.ones(4)},
        {"w": torch.ones(4)},
    ]
    with Checkpointer(root, run="run", io_mode="async", background=AsyncOptions(3, worker=kind)) as job:
        for iteration, tree in enumerate(trees):
            job.save({"model": tree}, iteration=iteration)
        assert job.drain(60)
    for iteration, tree in enumerate(trees):
        stored = ckptlib.read(f"{root}/iter_{iteration:07d}")
        wanted = {f"model.{name}": tensor for name, tensor in tree.items() if isinstance(tensor, torch.Tensor)}
        wanted |= {"model.nested.a": torch.zeros(2)} if iteration == 3 else {}
        found = {key: tensor for key, tensor in stored.items() if key.startswith("model.")}
        assert {*found} == {*wanted}
        assert all(found[key].dtype == wanted[key].dtype and torch.equal(found[key], wanted[key]) for key in wanted)


def test_nothing_is_saved_after_close_and_what_was_handed_over_is(root: str) -> None:
    job = Checkpointer(root, run="run", io_mode="async", background=AsyncOptions(2, worker="thread"))
    job.save(state(1.0), iteration=1)
    job.save(state(2.0), iteration=2)
    job.close()
    job.close()
    for call in (lambda: job.save(state(3.0), iteration=3), job.poll, lambda: job.prepare(1), lambda: job.restore({})):
        with pytest.raises(StateError, match="closed"):
            call()
    assert states(root) == {"iter_0000001": ["committed"], "iter_0000002": ["committed"]}


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.deep)])
def test_clocks_that_jump_change_neither_order_nor_what_is_waited_for(root: str, kind: Any) -> None:
    """Years forward, and back before the first save; also between a save and the one that replaces it."""
    clock = Clock()
    with (
        mock.patch.object(time, "time", clock),
        Checkpointer(root, run="run", io_mode="async", background=AsyncOptions(2, worker=kind)) as job,
    ):
        for iteration, clock.ahead in enumerate([0.0, 1e8, -1e8, 5.0, -7e4]):
            job.save(state(iteration), iteration=iteration)
        assert job.drain(60)
        clock.ahead = 1e8
        job.save(state(50.0), iteration=5).wait(60)
        clock.ahead = -1e8
        job.save(state(51.0), iteration=5, on_exists="replace").wait(60)
        assert tracker(root) == "5"
        assert_restores(root, 5, 51.0)
    for iteration in range(5):
        assert_holds(root, iteration, iteration)


class Clock:
    """The time of day, so many seconds ahead."""

    def __init__(self) -> None:
        self.ahead, self._now = 0.0, time.time

    def __call__(self) -> float:
        return self._now() + self.ahead


def assert_holds(root: str, iteration: int, fill: float) -> None:
    assert torch.equal(ckptlib.read(f"{root}/iter_{iteration:07d}")["model.w"], torch.full((1000,), float(fill)))


# --- two attempts at once ---------------------------------------------------------------------------------------------


def test_w8_an_older_checkpointer_on_the_same_root_is_fenced_with_a_save_in_flight(root: str) -> None:
    """What it had in flight is decided by the newer one; what it would begin is refused."""
    old = Checkpointer(root, run="run", io_mode="async", background=QUICK)
    old.save(state(1.0), iteration=1).wait(60)
    with workers_stopped():
        pending = old.save(state(2.0), iteration=2)
        new = Checkpointer(root, run="run", io_mode="async", background=THREAD, settle_wait=0.5)
        assert states(root)["iter_0000002"] == ["aborted"]
    with pytest.raises(BackgroundSaveError, match=r"iteration 2 .*attempt 2 began"):
        pending.wait(60)
    new.save(state(3.0), iteration=2).wait(60)
    with pytest.raises(BackgroundSaveError, match="iteration 2"):
        old.save(state(4.0), iteration=4)
    with pytest.raises(FencedError):
        old.save(state(4.0), iteration=4)
    old.close()
    new.close()
    assert newest(root) == (2, 2)
    assert states(root) == {
        "iter_0000001": ["committed"],
        "iter_0000002": ["aborted", "committed"],
        "iter_0000004": ["aborted"],  # begun, and then the newer attempt was seen
    }
    assert tracker(root) == "2"
    assert_restores(root, 2, 3.0)


def old_coordinator(root: str, moment: str, results: Any) -> None:
    """A trainer that is stopped at one moment of its second save, and does not know it when it goes on."""
    with Checkpointer(root, run="run", io_mode="async", background=THREAD) as job:
        job.save(state(1.0), iteration=1).wait(60)
        where, name = {
            "before begin": (commit, "begin_save"),
            "before staging": (async_save.BackgroundSaves, "launch"),
            "before the record": (commit, "publish_record"),
            "before the decision": (commit, "_decide"),
        }[moment]
        original = getattr(where, name)

        def stopped(*args: Any, **options: Any) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)
            return original(*args, **options)

        seen = []
        with mock.patch.object(where, name, stopped):
            try:
                job.save(state(2.0), iteration=2).wait(60)
                seen.append("saved")
            except (BackgroundSaveError, FencedError) as error:
                seen.append(type(error).__name__)
        for _ in range(2):
            try:
                job.save(state(4.0), iteration=4).wait(60)
                seen.append("saved")
            except (BackgroundSaveError, FencedError) as error:
                seen.append(type(error).__name__)
        results.send(seen)


MOMENTS = {
    "before begin": ["FencedError", "FencedError", "FencedError"],
    "before staging": ["BackgroundSaveError", "BackgroundSaveError", "FencedError"],
    "before the record": ["BackgroundSaveError", "BackgroundSaveError", "FencedError"],
    "before the decision": ["saved", "FencedError", "FencedError"],  # it was complete: the newer attempt committed it
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_w8_a_coordinator_that_was_stopped_across_the_takeover_changes_nothing_when_it_goes_on(
    root: str, moment: str
) -> None:
    ours, theirs = context.Pipe()
    old = context.Process(target=old_coordinator, args=(root, moment, theirs), daemon=True)
    old.start()
    try:
        wait_until_stopped(old)
        with Checkpointer(root, run="run", io_mode="async", background=THREAD, settle_wait=0.2) as new:
            settled = newest(root)
            assert settled == ((1, 2) if moment == "before the decision" else (1, 1))
            new.save(state(30.0), iteration=2).wait(60)
            os.kill(psutil.Process(old.pid).pid, signal.SIGCONT)
            assert ours.poll(60), "the old coordinator did not end"
            assert ours.recv() == MOMENTS[moment]
            new.save(state(31.0), iteration=3).wait(60)
        old.join(30)
    finally:
        old.kill()
        old.join(10)
    assert newest(root) == (2, 3)
    assert tracker(root) == "3"
    assert {name for name, found in states(root).items() if "committed" in found} == {
        "iter_0000001",
        "iter_0000002",
        "iter_0000003",
    }
    for iteration, fill in ((1, 1.0), (2, 30.0), (3, 31.0)):
        assert_holds(root, iteration, fill)
        assert ckptlib.verify(f"{root}/iter_{iteration:07d}").ok
    assert_restores(root, 3, 31.0)


def wait_until_stopped(process: BaseProcess) -> None:
    deadline = time.monotonic() + 60
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.02)
