"""Synchronous save with SHA-256 on, against `torch.distributed.checkpoint.save`, which hashes nothing.

The same state is saved by both in turn (A B A B ...), each time into a fresh directory. On tmpfs the CPU seconds of
the whole process tell; on a disk, with every file fsynced by both, the wall time does. Beside them stand the physical
limits: one `write` of the same bytes and an fsync, without and with one pass of SHA-256 over them in the same thread.
Medians and the median of the pairwise ratios are printed.

    python benchmarks/save_sync.py                  # 1 GiB, 7 pairs, /dev/shm and the current directory
    python benchmarks/save_sync.py --mib 256 --pairs 3 --disk /scratch
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
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import ckptlib

State = dict[str, Any]


@dataclass(frozen=True)
class Cost:
    """What one save took."""

    cpu: float
    wall: float


def training_state(mib: int) -> State:
    """A GPT's weights and AdamW moments in float32, about `mib` MiB, tensor by tensor as training has them.

    Twelve parameters per layer and the hidden size of GPT-2 small; the number of layers follows from the size.
    """
    hidden, vocabulary = 768, 50304
    shapes = {"embedding.weight": (vocabulary, hidden), "positions.weight": (1024, hidden)}
    layers = max(1, round((mib * 2**20 / 12 - (vocabulary + 1024) * hidden) / (12 * hidden**2)))
    for i in range(layers):
        for name, rows, columns in (
            ("attention.qkv", 3 * hidden, hidden),
            ("attention.out", hidden, hidden),
            ("mlp.up", 4 * hidden, hidden),
            ("mlp.down", hidden, 4 * hidden),
        ):
            shapes[f"layers.{i}.{name}.weight"] = (rows, columns)
            shapes[f"layers.{i}.{name}.bias"] = (rows,)
        for name in ("norm1", "norm2"):
            shapes[f"layers.{i}.{name}.weight"] = (hidden,)
            shapes[f"layers.{i}.{name}.bias"] = (hidden,)
    slots = {
        name: {"step": torch.tensor(1000.0), "exp_avg": torch.randn(shape), "exp_avg_sq": torch.randn(shape)}
        for name, shape in shapes.items()
    }
    return {"model": {name: torch.randn(shape) for name, shape in shapes.items()}, "optimizer": {"state": slots}}


def large_tensors(mib: int) -> State:
    """`mib` MiB in float32 tensors of 8 MiB: nothing but bytes, where only hashing and writing count."""
    return {f"layers.{i}.weight": torch.randn(2048, 1024) for i in range(mib // 8)}


def tensors_of(state: State) -> Iterator[torch.Tensor]:
    """Every tensor of a nested dict."""
    for value in state.values():
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from tensors_of(value)


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


def raw_write(state: State, path: str, *, hashed: bool = False) -> None:
    """The limit: the same bytes, one file, one fsync, nothing else; or SHA-256 besides."""
    digest = hashlib.sha256()
    os.makedirs(path)
    fd = os.open(os.path.join(path, "data"), os.O_WRONLY | os.O_CREAT)
    for tensor in tensors_of(state):
        view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        if hashed:
            digest.update(view)
        while view:
            view = view[os.write(fd, view) :]
    os.fsync(fd)
    os.close(fd)


def run(directory: str, state: State, pairs: int) -> dict[str, list[Cost]]:
    """Alternates the writers; one uncounted round first."""
    writers: dict[str, Callable[[str], None]] = {
        "ckptlib": lambda path: ckptlib.save(state, path, iteration=1) and None,
        "torch DCP": lambda path: dcp.save(state, storage_writer=dcp.FileSystemWriter(path)) and None,
        "raw write": lambda path: raw_write(state, path),
        "raw+sha256": lambda path: raw_write(state, path, hashed=True),
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
    for peer in ("torch DCP", "raw write", "raw+sha256"):
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
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tmpfs", default="/dev/shm")  # noqa: S108 - the point is that it is memory
    parser.add_argument("--disk", default=".")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is")
    results = {}
    for make in (training_state, large_tensors):
        state = make(options.mib)
        tensors = list(tensors_of(state))
        size = sum(tensor.nbytes for tensor in tensors) / 2**20
        print(
            f"\n{make.__name__}: {size:.0f} MiB in {len(tensors)} tensors, {options.pairs} pairs, {os.cpu_count()} CPUs"
        )
        for place, directory in (("tmpfs", options.tmpfs), ("disk", options.disk)):
            results[f"{make.__name__} {place}"] = report(place, run(directory, state, options.pairs))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
