"""Loads: one process against a raw read of the same bytes, and 2 shards loaded by 8 ranks against torch DCP.

First part: a training state is loaded into its own tensors, page cache warm. The limit is `preadv` of the same payload
bytes into the same memory. Second part: every tensor was saved in two halves; each of eight ranks, one after the other
in this process, loads its eighth. Bytes are counted by the kernel (``rchar`` in /proc/self/io). All loaders take
turns; medians and the median of the pairwise ratios are printed.

    python benchmarks/load.py                 # 1 GiB, 7 rounds, in the current directory
    python benchmarks/load.py --mib 256 --rounds 3
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
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from save_sync import large_tensors, tensors_of, training_state
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import ckptlib

RANKS = 8


@dataclass(frozen=True)
class Cost:
    """What one load took; bytes as the kernel counted them."""

    cpu: float
    wall: float
    bytes: int


def measure(load: Callable[[], Any]) -> Cost:
    """One load."""
    read, cpu, wall = _rchar(), time.process_time(), time.perf_counter()
    load()
    return Cost(time.process_time() - cpu, time.perf_counter() - wall, _rchar() - read)


def _rchar() -> int:
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def raw_read(path: str, state: dict[str, Any]) -> None:
    """The limit: as many bytes, from the file's start, straight into the tensors."""
    fd = os.open(path, os.O_RDONLY)
    offset = 0
    for tensor in tensors_of(state):
        if tensor.dim():
            view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            while view:
                count = os.preadv(fd, [view], offset)
                offset, view = offset + count, view[count:]
    os.close(fd)


class SlicePlanner(dcp.DefaultLoadPlanner):
    """torch's planner for a rank that holds rows [rank, rank + 1) / ranks of every tensor."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def create_local_plan(self) -> dcp.LoadPlan:
        """Requests boxes as a sharded rank would."""
        items = []
        for key, tensor in self.state_dict.items():
            offset = torch.Size((self._rank * tensor.shape[0], *(0,) * (tensor.dim() - 1)))
            chunk = ChunkStorageMetadata(offset, tensor.shape)
            items += create_read_items_for_chunk_list(key, self.metadata.state_dict_metadata[key], [chunk])
        return dcp.LoadPlan(items)

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        """By name: the chunk's offset is not the tensor's."""
        return self.state_dict[index.fqn]


def turns(loaders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Cost]]:
    """All loaders in turn; one uncounted round first, which also warms the page cache."""
    costs: dict[str, list[Cost]] = {name: [] for name in loaders}
    for round_ in range(rounds + 1):
        for name, load in loaders.items():
            cost = measure(load)
            if round_:
                costs[name].append(cost)
    return costs


def report(title: str, costs: dict[str, list[Cost]], needed: int) -> dict[str, float]:
    """Prints medians and ratios of the first loader to the others."""
    print(f"\n{title}")
    ours = next(iter(costs))
    ratios: dict[str, float] = {}
    for name, runs in costs.items():
        cpu, wall, read = (statistics.median(getattr(c, what) for c in runs) for what in ("cpu", "wall", "bytes"))
        print(f"  {name:12} cpu {cpu:6.2f} s   wall {wall:6.2f} s   read {read / needed:.3f} x the bytes needed")
        ratios[f"read / needed, {name}"] = round(read / needed, 3)
        if name != ours:
            pairs = list(zip(costs[ours], runs, strict=True))
            for what in ("cpu", "wall"):
                ratio = statistics.median(getattr(a, what) / getattr(b, what) for a, b in pairs)
                ratios[f"{what} {ours} / {name}"] = round(ratio, 3)
                print(f"    {what:4} {ours} / {name}: {ratio:.2f}")
    return ratios


def whole(directory: str, mib: int, rounds: int) -> dict[str, float]:
    """Part one."""
    state = training_state(mib)
    path = os.path.join(directory, "whole")
    ckptlib.save(state, path, iteration=1)
    (data,) = [name for name in os.listdir(path) if name.endswith(".distcp")]
    loaders = {
        "ckptlib": lambda: ckptlib.load(state, path),
        "raw read": lambda: raw_read(os.path.join(path, data), state),
        "torch DCP": lambda: dcp.load(state, checkpoint_id=path),
    }
    tensors = list(tensors_of(state))
    needed = sum(tensor.nbytes for tensor in tensors)
    return report(
        f"whole state: {needed / 2**20:.0f} MiB in {len(tensors)} tensors, warm", turns(loaders, rounds), needed
    )


def resharded(directory: str, mib: int, rounds: int) -> dict[str, float]:
    """Part two."""
    full = large_tensors(mib)
    path = os.path.join(directory, "halves")
    halves = {
        f"{name}.{half}": ckptlib.ShardedTensor.from_rank_offsets(name, tensor.chunk(2)[half], (0, half, 2))
        for name, tensor in full.items()
        for half in range(2)
    }
    ckptlib.save(halves, path, iteration=1)
    eighths = {name: torch.empty_like(tensor.chunk(RANKS)[0]) for name, tensor in full.items()}

    def ours() -> None:
        for rank in range(RANKS):
            wanted = {n: ckptlib.ShardedTensor.from_rank_offsets(n, t, (0, rank, RANKS)) for n, t in eighths.items()}
            ckptlib.load(wanted, path)
            check(rank)

    def theirs() -> None:
        for rank in range(RANKS):
            dcp.load(dict(eighths), checkpoint_id=path, planner=SlicePlanner(rank))
            check(rank)

    def check(rank: int) -> None:
        for name, tensor in full.items():
            assert eighths[name][0, 0] == tensor.chunk(RANKS)[rank][0, 0]

    needed = sum(tensor.nbytes for tensor in full.values())
    return report(
        f"2 shards by 8 ranks: {needed / 2**20:.0f} MiB in {len(full)} tensors, warm",
        turns({"ckptlib": ours, "torch DCP": theirs}, rounds),
        needed,
    )


def main() -> None:
    """Runs both parts and prints one JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", default=".")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is")
    directory = tempfile.mkdtemp(dir=options.directory)
    try:
        results = {
            "whole": whole(directory, options.mib, options.rounds),
            "resharded": resharded(directory, options.mib, options.rounds),
        }
    finally:
        shutil.rmtree(directory)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
