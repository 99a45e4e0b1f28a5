"""What a save costs the training loop: the stall of an asynchronous save against one warm memcpy of the same bytes.

In turn, in one process: a copy into memory that has been written to before (the limit), ours, torch's `async_save` as
it is by default, and with a stager that is reused; with ``--peers`` other libraries too. Each waits for its background
work before the next begins, so what is measured is the caller. Wall time and CPU seconds of the calling thread;
medians, the ratio to the copy of the same round, the first save apart; minor page faults of the process beside the
pages that were staged.

    python benchmarks/save_async.py                 # 1 GiB, 10 rounds, /dev/shm
    python benchmarks/save_async.py --mib 256 --rounds 5 --directory /scratch
    PYTHONPATH=out/peers python benchmarks/save_async.py --peers    # see benchmarks/support/peers.py
"""

from __future__ import annotations

import argparse
import glob
import mmap
import resource
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
from support.peers import peers
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ckptlib import AsyncOptions, Checkpointer


@dataclass(frozen=True)
class Stall:
    """What the caller waited for, and what it took."""

    wall: float
    cpu: float
    faults: int


def stalled(work: Callable[[], Any]) -> tuple[Stall, Any]:
    """Runs `work` and measures the calling thread."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    wall, cpu = time.perf_counter(), time.thread_time()
    result = work()
    ended = Stall(
        time.perf_counter() - wall,
        time.thread_time() - cpu,
        resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
    )
    return ended, result


def main() -> None:
    """Prints one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--directory", default="/dev/shm")  # noqa: S108 - memory, for scratch
    parser.add_argument("--peers", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    count = max(1, options.mib // 4)
    model = {f"w{i}": torch.full((1024, 1024), float(i)) for i in range(count)}
    nbytes = count * 4 * 2**20
    warm = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    folder = tempfile.mkdtemp(prefix="ckptlib-bench-", dir=options.directory)
    module = torch.nn.ParameterDict({name: torch.nn.Parameter(one, requires_grad=False) for name, one in model.items()})
    jobs = {
        "ours": Checkpointer(f"{folder}/ours", run="benchmark", io_mode="async"),
        "ours, overlapped *": Checkpointer(
            f"{folder}/overlapped", run="benchmark", io_mode="async", background=AsyncOptions(staging="overlapped")
        ),
    }
    for job in jobs.values():
        job.prepare({"model": module}, contents=["model"])
    stagers = {"torch, a reused stager": DefaultStager(StagingOptions(False, False, False, False))}

    def copy(round_: int) -> None:
        for name, tensor in model.items():
            warm[name].copy_(tensor)

    def ours(name: str) -> Callable[[int], Callable[[], object]]:
        return lambda round_: jobs[name].save({"model": module}, iteration=round_, contents=["model"]).wait

    def torchs(name: str) -> Callable[[int], Callable[[], object]]:
        def save(round_: int) -> Callable[[], object]:
            stager = stagers.get(name)
            extra: dict[str, Any] = {} if stager is None else {"async_stager": stager}
            future = dcp.async_save({"model": model}, checkpoint_id=f"{folder}/torch", no_dist=True, **extra)
            return future.result  # type: ignore[union-attr]

        return save

    others, end_others = peers(folder, model) if options.peers else ({}, lambda: None)
    ways: dict[str, Callable[[int], Any]] = {name: ours(name) for name in jobs}
    ways["torch, default"] = torchs("torch, default")
    ways |= {name: torchs(name) for name in stagers} | others
    copies: dict[str, list[Stall]] = {name: [] for name in ways}
    stalls: dict[str, list[Stall]] = {name: [] for name in ways}
    try:
        for round_ in range(options.rounds + 1):
            for name, way in ways.items():
                copies[name].append(stalled(lambda: copy(round_))[0])  # noqa: B023 - called here
                stall, finish = stalled(lambda: way(round_))  # noqa: B023
                stalls[name].append(stall)
                finish()
                shutil.rmtree(f"{folder}/torch", ignore_errors=True)
                for checkpoint in glob.glob(f"{folder}/peers/torch_checkpointing*/*"):
                    shutil.rmtree(checkpoint)
            for root in ("ours", "overlapped"):
                shutil.rmtree(f"{folder}/{root}/iter_{round_ - 1:07d}", ignore_errors=True)
        for job in jobs.values():
            job.close()
        end_others()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    pages = nbytes / mmap.PAGESIZE
    print(f"{nbytes / 2**20:.0f} MiB in {count} tensors, {options.rounds} rounds after the first, medians")
    for name in ways:
        wall = [stall.wall / one.wall for stall, one in zip(stalls[name], copies[name], strict=True)]
        cpu = [stall.cpu / one.cpu for stall, one in zip(stalls[name], copies[name], strict=True)]
        faults = statistics.median(stall.faults for stall in stalls[name][1:]) / pages
        print(
            f"{name:24} wall {statistics.median(stall.wall for stall in stalls[name][1:]):6.3f} s = "
            f"{statistics.median(wall[1:]):5.2f} x memcpy (first {wall[0]:5.2f}); CPU of the caller "
            f"{statistics.median(cpu[1:]):5.2f} x (first {cpu[0]:5.2f}); page faults {100 * faults:5.1f} % of the pages"
        )
    if any(name.endswith("*") for name in ways):
        print("*: copied beside the caller. Ours waits by itself before the state changes; elsewhere the caller has to")


if __name__ == "__main__":
    main()
