"""Saves back to back, with workers that are killed on the way: nothing grows, in trainers or in workers."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

import ckptlib
from ckptlib import AsyncOptions, Checkpointer, ShardedTensor
from tests.support.ranks import run_ranks
from tests.support.workers import assert_no_segment_is_left, shared_segments, workers_of

MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """What a process holds.

    Attributes:
        own: bytes of memory that no other process shares.
        staging: bytes of staging memory that are mapped.
        objects: of Python's, 0 where they cannot be counted.
    """

    own: int
    staging: int
    descriptors: int
    threads: int
    objects: int = 0


def look(process: psutil.Process, objects: int = 0) -> Sample:
    maps = [line.split()[0].split("-") for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            if "ckptlib-staging" in line]  # fmt: skip
    return Sample(
        own=process.memory_full_info().uss,
        staging=sum(int(end, 16) - int(start, 16) for start, end in maps),
        descriptors=process.num_fds(),
        threads=process.num_threads(),
        objects=objects,
    )


def save_again_and_again(rank: int, root: str, world: int, saves: int, kill_every: int, look_every: int) -> list[str]:
    """What has grown between the second look and the last, on this rank and in its worker."""
    trainer: list[Sample] = []
    worker: list[Sample] = []
    shard = torch.empty(MIB // 4)
    with Checkpointer(root, run="run", io_mode="async", background=AsyncOptions(2), timeout=120.0) as job:
        job.prepare(MIB)
        for iteration in range(1, saves + 1):
            shard.fill_(iteration)
            tree = {"model": {"w": ShardedTensor.from_rank_offsets("w", shard, (0, rank, world))}}
            job.save(tree, iteration=iteration)
            if iteration % kill_every == 0:
                for process in workers_of(os.getpid()):
                    process.kill()
            if rank == 0:
                shutil.rmtree(f"{root}/iter_{iteration - 5:07d}", ignore_errors=True)
            if iteration % look_every == look_every - 1:  # and not just after a worker was killed
                assert job.drain(120)
                gc.collect()
                trainer.append(look(psutil.Process(), len(gc.get_objects())))
                worker += [look(process) for process in workers_of(os.getpid())]
    return grown("trainer", trainer) + grown("worker", worker)


def grown(name: str, samples: list[Sample]) -> list[str]:
    """By how much, in words; empty: by nothing."""
    assert len(samples) >= 3, samples
    first, last = samples[1], samples[-1]
    found = [
        f"{name}: {what} from {getattr(first, what)} to {getattr(last, what)}"
        for what in ("staging", "descriptors", "threads")
        if getattr(last, what) > getattr(first, what)
    ]
    third = max(1, len(samples) // 3)
    for what, allowed in (("own", 4 * MIB), ("objects", 500)):
        early, late = (
            statistics.median(getattr(sample, what) for sample in some)
            for some in (samples[1:][:third], samples[-third:])
        )
        if late > early + allowed:
            found.append(f"{name}: {what} from {early:.0f} to {late:.0f}")
    return found


def soak(tmp_path: Path, world: int, saves: int, *, kill_every: int, look_every: int, timeout: float) -> None:
    segments = shared_segments()
    root = str(tmp_path / "run")
    grew = run_ranks(world, save_again_and_again, root, world, saves, kill_every, look_every, timeout=timeout)
    assert grew == [[]] * world
    assert torch.equal(ckptlib.read(f"{root}/iter_{saves:07d}")["w"], torch.full((world * MIB // 4,), float(saves)))
    assert_no_segment_is_left(segments)


@pytest.mark.timeout(300)
def test_a_dozen_saves_back_to_back_and_a_worker_that_is_killed_leave_nothing_behind(tmp_path: Path) -> None:
    soak(tmp_path, 2, 12, kill_every=6, look_every=2, timeout=200.0)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_saves_of_four_ranks_and_ten_killed_workers_leave_nothing_behind(tmp_path: Path) -> None:
    soak(tmp_path, 4, 100, kill_every=10, look_every=5, timeout=1800.0)
