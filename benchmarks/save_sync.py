"""Synchronous save with SHA-256 on, against `torch.distributed.checkpoint.save`, which hashes nothing.

The same state is saved by both in turn (A B A B ...), each time into a fresh directory. On tmpfs the CPU seconds of
the whole process tell; on a disk, with every file fsynced by both, the wall time does. Beside them stands the physical
limit: one `write` of the same bytes and an fsync. Medians and the median of the pairwise ratios are printed.

    python benchmarks/save_sync.py                  # 1 GiB, 7 pairs, /dev/shm and the current directory
    python benchmarks/save_sync.py --mib 256 --pairs 3 --disk /scratch
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed.checkpoint as dcp

import ckptlib

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Cost:
    """What one save took."""

    cpu: float
    wall: float


def make_state(mib: int, tensors: int) -> State:
    """`mib` MiB of float32 in equal tensors, like the weights and moments of a model."""
    elements = mib * 1024 * 1024 // 4 // tensors
    return {f"layers.{i}.weight": torch.randn(elements // 1024, 1024) for i in range(tensors)}


def measure(save: Callable[[str], None], directory: str) -> Cost:
    """One save into a fresh directory below `directory`; removed afterwards."""
    path = tempfile.mkdtemp(dir=directory)
    try:
        os.sync()
        cpu, wall = time.process_time(), time.perf_counter()
        save(os.path.join(path, "iter_0000001"))
        return Cost(time.process_time() - cpu, time.perf_counter() - wall)
    finally:
        shutil.rmtree(path)


def raw_write(state: State, path: str) -> None:
    """The limit: the same bytes, one file, one fsync, nothing else."""
    os.makedirs(path)
    fd = os.open(os.path.join(path, "data"), os.O_WRONLY | os.O_CREAT)
    for tensor in state.values():
        view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        while view:
            view = view[os.write(fd, view) :]
    os.fsync(fd)
    os.close(fd)


def run(directory: str, state: State, pairs: int) -> dict[str, list[Cost]]:
    """Alternates the three writers; one uncounted round first."""
    writers: dict[str, Callable[[str], None]] = {
        "ckptlib": lambda path: ckptlib.save(state, path, iteration=1) and None,
        "torch DCP": lambda path: dcp.save(state, storage_writer=dcp.FileSystemWriter(path)) and None,
        "raw write": lambda path: raw_write(state, path),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in writers}
    for round_ in range(pairs + 1):
        for name, save in writers.items():
            cost = measure(save, directory)
            if round_:
                costs[name].append(cost)
    return costs


def report(place: str, costs: dict[str, list[Cost]]) -> dict[str, float]:
    """Prints the medians and the ratios to torch DCP and to the raw write; returns the ratios."""
    print(f"\n{place}")
    ratios = {}
    for name, runs in costs.items():
        cpu, wall = (statistics.median(getattr(cost, what) for cost in runs) for what in ("cpu", "wall"))
        print(f"  {name:10} cpu {cpu:6.2f} s   wall {wall:6.2f} s   (wall min {min(c.wall for c in runs):.2f})")
    for peer in ("torch DCP", "raw write"):
        for what in ("cpu", "wall"):
            pairs = zip(costs["ckptlib"], costs[peer], strict=True)
            ratio = statistics.median(getattr(ours, what) / getattr(theirs, what) for ours, theirs in pairs)
            ratios[f"{what} ckptlib / {peer}"] = round(ratio, 3)
            print(f"  {what:4} ckptlib / {peer}: {ratio:.2f}")
    return ratios


def main() -> None:
    """Runs both places and prints one JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tmpfs", default="/dev/shm")  # noqa: S108 - the point is that it is memory
    parser.add_argument("--disk", default=".")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is")
    state = make_state(options.mib, options.tensors)
    print(f"{options.mib} MiB in {options.tensors} tensors, {options.pairs} pairs, {os.cpu_count()} CPUs")
    results = {}
    for place, directory in (("tmpfs", options.tmpfs), ("disk", options.disk)):
        results[place] = report(f"{place} ({directory})", run(directory, state, options.pairs))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
