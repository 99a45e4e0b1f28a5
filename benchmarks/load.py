"""Loads against the physical limit and against torch DCP: whole states warm and cold, small tensors, other shardings.

Whole: a training state is loaded into its own tensors; the limit is `preadv` of the same payload bytes into the same
memory, by one thread. Warm: from the page cache. Cold: after `posix_fadvise(DONTNEED)` on every file. Small: a
thousand tensors of 16 KiB, CPU time for each. Resharded: every tensor was saved in pieces; each rank of the new size,
one after the other in this process, loads its own, which torch DCP does by reading whole stored pieces. Bytes are
counted by the kernel (``rchar`` in /proc/self/io), containers and records included; columns, which are copied out of a
mapping that the kernel does not count, by the load's own report. All loaders take turns; medians and the median of the
pairwise ratios are printed.

    python benchmarks/load.py                 # 1 GiB, 7 rounds, in the current directory
    python benchmarks/load.py --mib 256 --rounds 3 --only whole resharded
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from save_sync import large_tensors, tensors_of, training_state
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import ckptlib

RESHARDS = ((2, 8, 0), (2, 4, 0), (2, 3, 0), (1, 8, 0), (2, 8, 1))
"""(ranks that saved, ranks that load, axis that is cut)."""

Results = dict[str, float]


@dataclass(frozen=True)
class Cost:
    """What one load took; bytes as the kernel counted them, or as it says itself if that is more."""

    cpu: float
    wall: float
    bytes: int


def measure(load: Callable[[], Any]) -> Cost:
    """One load."""
    read, cpu, wall = _rchar(), time.process_time(), time.perf_counter()
    said = load()
    cpu, wall, read = time.process_time() - cpu, time.perf_counter() - wall, _rchar() - read
    return Cost(cpu, wall, max(read, said if isinstance(said, int) else 0))


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


def drop_cache(path: str) -> None:
    """Has the kernel forget the content of every file below a directory."""
    for file in Path(path).rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class SlicePlanner(dcp.DefaultLoadPlanner):
    """torch's planner for a rank that holds one piece of every tensor along one axis."""

    def __init__(self, rank: int, ranks: int, axis: int, full: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._of = (rank, ranks, axis)
        self._full = full

    def create_local_plan(self) -> dcp.LoadPlan:
        """Requests boxes as a sharded rank would."""
        items = []
        for key, tensor in self.state_dict.items():
            chunk = ChunkStorageMetadata(torch.Size(piece_of(self._full[key], *self._of)[1]), tensor.shape)
            items += create_read_items_for_chunk_list(key, self.metadata.state_dict_metadata[key], [chunk])
        return dcp.LoadPlan(items)

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        """By name: the chunk's offset is not the tensor's."""
        return self.state_dict[index.fqn]


def piece_of(tensor: torch.Tensor, rank: int, ranks: int, axis: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A rank's piece as `torch.chunk` cuts, and where it begins."""
    pieces = tensor.chunk(ranks, axis)
    offset = [0] * tensor.dim()
    offset[axis] = sum(piece.shape[axis] for piece in pieces[:rank])
    return pieces[rank], tuple(offset)


def turns(
    loaders: dict[str, Callable[[], Any]], rounds: int, before: Callable[[], Any] = lambda: None
) -> dict[str, list[Cost]]:
    """All loaders in turn; one uncounted round first, which also warms the page cache.

    Args:
        before: done before each load, outside of what is measured.
    """
    costs: dict[str, list[Cost]] = {name: [] for name in loaders}
    for round_ in range(rounds + 1):
        for name, load in loaders.items():
            before()
            cost = measure(load)
            if round_:
                costs[name].append(cost)
    return costs


def report(title: str, costs: dict[str, list[Cost]], needed: int, tensors: int = 0) -> Results:
    """Prints medians and ratios of the first loader to the others."""
    print(f"\n{title}   (load average {os.getloadavg()[0]:.1f})")
    ours = next(iter(costs))
    results: Results = {}
    for name, runs in costs.items():
        cpu, wall, read = (statistics.median(getattr(c, what) for c in runs) for what in ("cpu", "wall", "bytes"))
        print(f"  {name:12} cpu {cpu:6.2f} s   wall {wall:6.2f} s   read {read / needed:.3f} x the bytes needed")
        if tensors:
            print(f"    {cpu / tensors * 1e6:.0f} us of CPU for each tensor")
        results[f"read / needed, {name}"] = round(read / needed, 3)
        if name != ours:
            pairs = list(zip(costs[ours], runs, strict=True))
            for what in ("cpu", "wall"):
                ratio = statistics.median(getattr(a, what) / getattr(b, what) for a, b in pairs)
                results[f"{what} {ours} / {name}"] = round(ratio, 3)
                print(f"    {what:4} {ours} / {name}: {ratio:.2f}   ({1 / ratio:.1f} times as fast)")
    return results


def whole(directory: str, state: dict[str, Any], rounds: int, *, cold: bool = False, small: bool = False) -> Results:
    """A whole state, by one process."""
    path = os.path.join(directory, "whole")
    ckptlib.save(state, path, iteration=1, on_exists="replace")
    data = max((name for name in os.listdir(path) if name.endswith(".distcp")), key=lambda name: name.split(".")[1])
    loaders = {
        "ckptlib": lambda: ckptlib.load(state, path),
        "raw read": lambda: raw_read(os.path.join(path, data), state),
        "torch DCP": lambda: dcp.load(state, checkpoint_id=path),
    }
    tensors = list(tensors_of(state))
    needed = sum(tensor.nbytes for tensor in tensors)
    costs = turns(loaders, rounds, (lambda: drop_cache(path)) if cold else (lambda: None))
    size = f"{needed / 2**20:.0f} MiB in {len(tensors)} tensors"
    return report(f"whole state: {size}, {'cold' if cold else 'warm'}", costs, needed, len(tensors) if small else 0)


def resharded(directory: str, mib: int, rounds: int, saved: int, loaded: int, axis: int) -> Results:
    """Pieces of `saved` ranks, by `loaded` ranks."""
    full = large_tensors(mib)
    path = os.path.join(directory, f"{saved} {loaded} {axis}")
    pieces = {
        f"{name}.{rank}": ckptlib.ShardedTensor.from_box(name, part, tensor.shape, offset)
        for name, tensor in full.items()
        for rank in range(saved)
        for part, offset in [piece_of(tensor, rank, saved, axis)]
    }
    ckptlib.save(pieces, path, iteration=1)
    # Memory that is used again, as that of a trainer's parameters: fresh pages would cost more than reading into them.
    parts = [
        {name: torch.zeros_like(piece_of(tensor, rank, loaded, axis)[0]) for name, tensor in full.items()}
        for rank in {0: 0, loaded - 1: 0}
    ]

    def targets(rank: int) -> dict[str, torch.Tensor]:
        return parts[-1] if rank == loaded - 1 else parts[0]

    def ours() -> int:
        read = 0
        for rank in range(loaded):
            wanted = {
                name: ckptlib.ShardedTensor.from_box(
                    name, part, full[name].shape, piece_of(full[name], rank, loaded, axis)[1]
                )
                for name, part in targets(rank).items()
            }
            read += ckptlib.load(wanted, path, check_coverage=False).bytes_read
            check(rank)
        return read

    def theirs() -> None:
        for rank in range(loaded):
            dcp.load(dict(targets(rank)), checkpoint_id=path, planner=SlicePlanner(rank, loaded, axis, full))
            check(rank)

    def check(rank: int) -> None:
        for name, tensor in full.items():
            assert targets(rank)[name][-1, -1] == piece_of(tensor, rank, loaded, axis)[0][-1, -1]

    needed = sum(tensor.nbytes for tensor in full.values())
    try:
        return report(
            f"{saved} -> {loaded} ranks along axis {axis}: {needed / 2**20:.0f} MiB in {len(full)} tensors, warm",
            turns({"ckptlib": ours, "torch DCP": theirs}, rounds),
            needed,
        )
    finally:
        shutil.rmtree(path)


def main() -> None:
    """Runs all parts and prints one JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", default=".")
    parser.add_argument("--only", nargs="+", default=["whole", "cold", "small", "resharded"])
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is")
    directory = tempfile.mkdtemp(dir=options.directory)
    results: dict[str, Results] = {}
    try:
        if {"whole", "cold"} & {*options.only}:
            state = training_state(options.mib)
            if "whole" in options.only:
                results["whole, warm"] = whole(directory, state, options.rounds)
            if "cold" in options.only:
                results["whole, cold"] = whole(directory, state, options.rounds, cold=True)
            del state
            shutil.rmtree(os.path.join(directory, "whole"))
        if "small" in options.only:
            few = {f"layers.{i}.weight": torch.randn(64, 64) for i in range(1000)}
            results["1,000 small tensors"] = whole(directory, few, options.rounds, small=True)
        if "resharded" in options.only:
            for saved, loaded, axis in RESHARDS:
                found = resharded(directory, options.mib, options.rounds, saved, loaded, axis)
                results[f"{saved} -> {loaded}, axis {axis}"] = found
    finally:
        shutil.rmtree(directory)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
