"""Saves and verification on a disk against the disk itself, with SHA-256 of every byte on.

Saving: `ckptlib.save` of 8 MiB tensors, records and commit included, beside what writes the same bytes into one file in
4 MiB pieces and fsyncs file and directory: as ``dd conv=fsync`` does it, and with its write-back started early, as ours
is. Verifying: ``level="data"`` of a checkpoint that is not in the page cache, beside the slower of two: its data file
read cold, in 8 MiB pieces, and SHA-256 of as many bytes in memory. All take turns; medians, and the median of the
ratios round by round. A ratio is what the limit takes, divided by what we take: 1.00 is the limit, and more is better.

A disk that is faster than SHA-256 on one core is not the limit of a save: the limit is then SHA-256, and printed too.

    python benchmarks/disk.py                         # 1 GiB, 7 rounds, in the current directory
    python benchmarks/disk.py --mib 256 --rounds 3 --disk /scratch
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from load import drop_cache
from save_sync import State, large_tensors, tensors_of

import ckptlib

WRITE_BYTES = 4 * 2**20
READ_BYTES = 8 * 2**20
FLUSH_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Cost:
    """What one of them took, and the CPU seconds of all its threads."""

    wall: float
    cpu: float


Costs = Mapping[str, list[Cost]]


def views(state: State) -> list[memoryview]:
    """The bytes of the state, tensor by tensor."""
    return [memoryview(tensor.view(-1).view(torch.uint8).numpy()) for tensor in tensors_of(state)]


def raw_write(state: State, folder: str, *, early: bool) -> None:
    """The same bytes into one file; durable at the end.

    Args:
        early: write-back is started as they come.
    """
    os.makedirs(folder)
    fd = os.open(os.path.join(folder, "data"), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    done = flushed = 0
    for view in views(state):
        for start in range(0, len(view), WRITE_BYTES):
            done += os.write(fd, view[start : start + WRITE_BYTES])
            if early and done - flushed >= FLUSH_BYTES:
                os.posix_fadvise(fd, flushed, done - flushed, os.POSIX_FADV_DONTNEED)
                flushed = done
    os.fsync(fd)
    os.close(fd)
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def sha256(state: State) -> None:
    """One core's SHA-256 of the same bytes, in memory."""
    digest = hashlib.sha256()
    for view in views(state):
        digest.update(view)


def read_cold(path: str) -> None:
    """The data file of a checkpoint, from front to back, as the disk gives it."""
    (file,) = Path(path).glob("*.distcp")
    buffer = memoryview(bytearray(READ_BYTES))
    fd = os.open(file, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    while os.readv(fd, [buffer]):
        pass
    os.close(fd)


def verify(path: str) -> None:
    """Ours, by digests of what is read back."""
    report = ckptlib.verify(path, level="data")
    assert report.ok, report


def cost(work: Callable[[], object]) -> Cost:
    """Of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def save_rounds(state: State, disk: str, rounds: int) -> Costs:
    """Everyone in turn, each into a fresh directory; one uncounted round first."""
    writers: dict[str, Callable[[str], object]] = {
        "ckptlib": lambda folder: ckptlib.save(state, folder, iteration=1),
        "dd-like": lambda folder: raw_write(state, folder, early=False),
        "dd-like, early write-back": lambda folder: raw_write(state, folder, early=True),
        "SHA-256 alone": lambda folder: sha256(state),
    }
    times: dict[str, list[Cost]] = {name: [] for name in writers}
    for round_ in range(rounds + 1):
        for name, write in writers.items():
            folder = tempfile.mkdtemp(dir=disk)
            os.sync()
            taken = cost(lambda write=write, folder=folder: write(os.path.join(folder, "iter_0000001")))  # type: ignore[misc]
            shutil.rmtree(folder)
            if round_:
                times[name].append(taken)
    return times


def verify_rounds(state: State, disk: str, rounds: int) -> Costs:
    """Everyone in turn, each time with nothing in the page cache."""
    folder = tempfile.mkdtemp(dir=disk)
    try:
        path = os.path.join(folder, "iter_0000001")
        ckptlib.save(state, path, iteration=1)
        work: dict[str, Callable[[], object]] = {
            "ckptlib": lambda: verify(path),
            "cold read": lambda: read_cold(path),
            "SHA-256 alone": lambda: sha256(state),
        }
        times: dict[str, list[Cost]] = {name: [] for name in work}
        for round_ in range(rounds + 1):
            for name, call in work.items():
                drop_cache(path)
                taken = cost(call)
                if round_:
                    times[name].append(taken)
        return times
    finally:
        shutil.rmtree(folder)


def ratio(costs: Costs, *limits: str) -> float:
    """The slowest of some limits, divided by ours: the median of the rounds."""
    slowest = (max(one.wall for one in of) for of in zip(*(costs[name] for name in limits), strict=True))
    return round(statistics.median(limit / ours.wall for limit, ours in zip(slowest, costs["ckptlib"], strict=True)), 3)


def show(title: str, costs: Costs, nbytes: int) -> None:
    """Medians and rates."""
    print(f"\n{title}")
    for name, taken in costs.items():
        wall, cpu = (statistics.median(getattr(one, what) for one in taken) for what in ("wall", "cpu"))
        least = min(one.wall for one in taken)
        print(f"  {name:26} {wall:6.2f} s   {nbytes / wall / 1e9:5.2f} GB/s   (min {least:.2f} s)   cpu {cpu:.2f} s")


def main() -> None:
    """Prints both tables, the ratios, and one JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--disk", default=".")
    options = parser.parse_args()
    state = large_tensors(options.mib)
    nbytes = sum(tensor.nbytes for tensor in tensors_of(state))
    saves = save_rounds(state, options.disk, options.rounds)
    show(f"save of {nbytes / 2**20:.0f} MiB, {os.cpu_count()} CPUs", saves, nbytes)
    checks = verify_rounds(state, options.disk, options.rounds)
    show(f"verify data of {nbytes / 2**20:.0f} MiB, cold", checks, nbytes)
    early = "dd-like, early write-back"
    results = {
        "save: dd-like / ckptlib": ratio(saves, "dd-like"),
        f"save: {early} / ckptlib": ratio(saves, early),
        f"save: the slower of {early} and SHA-256 / ckptlib": ratio(saves, early, "SHA-256 alone"),
        "verify data: the slower of cold read and SHA-256 / ckptlib": ratio(checks, "cold read", "SHA-256 alone"),
    }
    print()
    for name, value in results.items():
        print(f"  {name}: {value:.2f}")
    slower = min(one.wall for one in saves[early]) > min(one.wall for one in saves["SHA-256 alone"])
    print(f"  the disk is {'slower' if slower else 'faster'} than SHA-256 on one core")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
