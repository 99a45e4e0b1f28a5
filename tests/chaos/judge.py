"""What must be true after any process of a job was killed, whenever it was."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

import ckptlib
from ckptlib import Checkpointer, roots, storage
from tests.chaos.driver import Moment, iterations, lines, staged_by_all, wait_until
from tests.chaos.trainer import TOKEN, Job, contents
from tests.support.roots import states, tracker
from tests.support.trees import assert_same
from tests.support.workers import marked_workers


def take_over(job: Job, moment: Moment) -> None:
    """The next attempt begins: while workers may still be writing, or when all that was staged has been decided."""
    if not moment.at_once:
        staged = staged_by_all(job)
        wait_until("decisions", lambda: staged <= committed(job) or not workers_of_job(job))
    with Checkpointer(job.root, run="chaos") as attempt:
        newest = max(committed(job), default=None)
        if newest is not None:
            cells = [contents(newest, rank, job.world)["cell"] for rank in range(job.world)]
            for cell in cells:
                cell.data = None
            assert attempt.restore({"cells": cells}, strict="return", contents=["cells"]).iteration == newest
            assert [cell.data for cell in cells] == [{"iteration": newest, "rank": r} for r in range(job.world)]


def judge(job: Job, moment: Moment) -> None:
    """Everything, after the next attempt has begun.

    Raises:
        AssertionError: with the moment, which repeats it.
    """
    with _named(moment):
        wait_until("the end of all workers", lambda: not workers_of_job(job))
        assert not holders_of_memory(job)
        visible = committed(job)
        lost = staged_by_all(job) - visible
        assert not lost, f"staged on all ranks, and lost: {sorted(lost)}; {states(job.root)}"
        for iteration in visible:
            assert_whole(job, iteration)
        assert_nothing_partial(job)
        if visible:
            assert tracker(job.root) == str(max(visible))
        if moment.victim == "worker":
            for rank in range(job.world):
                assert lines(job, rank)[-1] == "closed", f"rank {rank}: {lines(job, rank)}"
                assert not iterations(job, rank, "failed"), f"rank {rank}: {lines(job, rank)}"


def committed(job: Job) -> set[int]:
    """Iterations that a reader sees."""
    found = roots.scan(*storage.resolve(job.root)).found
    return {one.order[1] for one in found if one.state == "committed"}


def assert_whole(job: Job, iteration: int) -> None:
    """A checkpoint holds exactly what was there when its save was called."""
    url = f"{job.root}/iter_{iteration:07d}"
    report = ckptlib.verify(url, level="data")
    assert report.ok, report
    wanted = [contents(iteration, rank, job.world)["model"] for rank in range(job.world)]
    stored = ckptlib.read(url)
    assert_same(stored["w"], torch.cat([rank["w"].data for rank in wanted]), f"iteration {iteration}")
    assert_same(stored["model.everywhere"], wanted[0]["everywhere"], f"iteration {iteration}")
    assert Path(url, "metadata.json").exists(), f"{url} is committed but has no exports"


def assert_nothing_partial(job: Job) -> None:
    """What is not committed is aborted, or had not even begun, and looks like a checkpoint to nobody."""
    found = roots.scan(*storage.resolve(job.root)).found
    for one in found:
        begun = one.save is not None and one.save.begin is not None
        assert one.state in ("committed", "aborted") or not begun, f"{one.name}: {one.state}"
    exports = {"metadata.json", ".metadata", "checkpoint.json", "common.pt"}
    for name in {one.name for one in found} - {one.name for one in found if one.state == "committed"}:
        assert not exports & set(os.listdir(Path(job.root, name))), name


def workers_of_job(job: Job) -> list[psutil.Process]:
    """Worker processes of the job that have not ended, whoever their parent is now."""
    return marked_workers(TOKEN, job.token)


def holders_of_memory(job: Job) -> list[str]:
    """Processes of the job, or this one, that still hold staging memory."""
    held = []
    for process in (psutil.Process(), *workers_of_job(job)):
        for fd in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "ckptlib-staging" in os.readlink(fd):
                    held.append(f"{process.pid}: {os.readlink(fd)}")
    return held


@contextlib.contextmanager
def _named(moment: Moment) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{moment}: {error}") from error
