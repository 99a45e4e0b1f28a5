"""What a save that is written in the background costs a training loop that computes all the while.

A model is trained on one thread; steps while a save is in flight are compared with as many before and after it. The
call of `save` itself is not counted (`save_async.py` measures it). Wall time per step, which the worker's use of cores
and memory shows in, and CPU seconds per step, which only that of caches and memory does; medians over rounds, and the
quartiles, as the noise of the machine. With a core to spare the slow-down is to stay below 5 %.

    python benchmarks/save_slowdown.py                      # 512 MiB to /dev/shm and to the disk, as it is and niced
    python benchmarks/save_slowdown.py --mib 256 --rounds 5 --directory /scratch
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ckptlib import AsyncOptions, Checkpointer


@dataclass(frozen=True)
class Pace:
    """Seconds per step, by the clock and of this thread's CPU."""

    wall: float
    cpu: float

    def slower_than(self, *others: Pace) -> tuple[float, float]:
        """How many times as slow, by the clock and of the CPU."""
        return (
            self.wall / statistics.mean(other.wall for other in others),
            self.cpu / statistics.mean(other.cpu for other in others),
        )


def pace(step: Callable[[], None], done: Callable[[int], bool]) -> tuple[Pace, int]:
    """Runs steps until `done`, which is told how many there were; and how many there were."""
    wall, cpu, count = time.perf_counter(), time.thread_time(), 0
    while not (count and done(count)):
        step()
        count += 1
    return Pace((time.perf_counter() - wall) / count, (time.thread_time() - cpu) / count), count


def trainer() -> Callable[[], None]:
    """A step of a small model: a few milliseconds, one thread."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(128, 256)

    def step() -> None:
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        optimizer.step()

    return step


def measure(directory: str, mib: int, rounds: int, nice: int) -> tuple[list[float], list[float], list[float]]:
    """Slow-down by the clock and of the CPU, and how long each save was in flight, over the rounds."""
    state = {"model": {f"w{i}": torch.full((1024, 1024), float(i)) for i in range(max(1, mib // 4))}}
    folder = tempfile.mkdtemp(prefix="ckptlib-bench-", dir=directory)
    step = trainer()
    slower, seconds, steps = [], [], 50
    try:
        with Checkpointer(f"{folder}/run", run="bench", io_mode="async", background=AsyncOptions(nice=nice)) as job:
            for round_ in range(rounds + 1):
                before, _ = pace(step, lambda count: count >= steps)  # noqa: B023 - called here
                started = time.perf_counter()
                pending = job.save(state, iteration=round_)
                during, steps = pace(step, lambda count: ended(pending.wait))  # noqa: B023
                seconds.append(time.perf_counter() - started)
                after, _ = pace(step, lambda count: count >= steps)  # noqa: B023
                slower.append(during.slower_than(before, after))
                shutil.rmtree(f"{folder}/run/iter_{round_ - 1:07d}", ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wall, cpu = zip(*slower[1:], strict=True)  # the first one starts the worker and makes the memory
    return list(wall), list(cpu), seconds[1:]


def ended(wait: Callable[[float], object]) -> bool:
    """Whether a save is done."""
    try:
        wait(0)
    except TimeoutError:
        return False
    return True


def main() -> None:
    """Prints one line for each place and priority."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--directory", nargs="*", default=["/dev/shm", tempfile.gettempdir()])  # noqa: S108 - scratch
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.mib} MiB, {options.rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before")
    for directory in options.directory:
        for nice in (0, 19):
            wall, cpu, seconds = measure(directory, options.mib, options.rounds, nice)
            low, middle, high = statistics.quantiles(wall, n=4)
            print(
                f"{directory:12} nice {nice:2}: {100 * (middle - 1):+5.1f} % by the clock "
                f"(quartiles {100 * (low - 1):+.1f} to {100 * (high - 1):+.1f}), "
                f"{100 * (statistics.median(cpu) - 1):+5.1f} % of CPU; in flight {statistics.median(seconds):.2f} s"
            )


if __name__ == "__main__":
    main()
