"""A training job that saves asynchronously and writes down what it has reached, durably, before it goes on.

What is saved follows from iteration and rank alone, so a judge needs no copy of it. Right after `save` returns the
state is overwritten with nonsense: whatever is written later than it should be is seen.
"""

from __future__ import annotations

import datetime
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptlib import AsyncOptions, Checkpointer, ShardedObject, ShardedTensor
from ckptlib.errors import BackgroundSaveError

TOKEN = "CKPTLIB_CHAOS_TOKEN"
"""An environment variable that every worker inherits: who belongs to which job."""

ROWS = 1 << 10


@dataclass(frozen=True)
class Job:
    """A job's settings, the same on all ranks."""

    folder: str
    world: int
    saves: int
    token: str
    port: int = 0

    @property
    def root(self) -> str:
        """Its checkpoints."""
        return f"{self.folder}/run"

    def ledger(self, rank: int) -> Path:
        """What a rank has reached."""
        return Path(self.folder, f"ledger_{rank}")


def contents(iteration: int, rank: int, world: int) -> dict[str, Any]:
    """The state of a rank at an iteration."""
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    shard = torch.randint(-(2**31), 2**31 - 1, (ROWS, 64), dtype=torch.int32, generator=generator)
    return {
        "model": {
            "w": ShardedTensor.from_rank_offsets("w", shard, (0, rank, world)),
            "everywhere": torch.full((ROWS,), float(iteration)),
        },
        "cell": ShardedObject("cell", {"iteration": iteration, "rank": rank}, (world,), (rank,)),
    }


def overwrite(state: dict[str, Any]) -> None:
    """The step after the save."""
    state["model"]["w"].data.zero_()
    state["model"]["everywhere"].fill_(-1.0)
    state["cell"].data["iteration"] = -1


class Ledger:
    """Lines that survive this process and the machine."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *words: object) -> None:
        """One line."""
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())
        os.fsync(self._file)


def train(rank: int, job: Job) -> None:
    """One rank, which meets the others over the launcher's store."""
    os.environ[TOKEN] = job.token
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", job.port, None, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world, timeout=limit)
    save_to_the_end(rank, job)


def save_to_the_end(rank: int, job: Job) -> None:
    """One rank of the job, to its end: ``ready``, ``begin N``, ``staged N``, ``failed N``, ``closed``."""
    torch.set_num_threads(1)
    ledger = Ledger(job.ledger(rank))
    options = AsyncOptions(max_in_flight=2, commit_timeout=60.0)
    checkpointer = Checkpointer(job.root, run="chaos", io_mode="async", background=options, timeout=60.0)
    checkpointer.prepare(1 << 20)
    ledger.write("ready")
    try:
        for iteration in range(1, job.saves + 1):
            state = contents(iteration, rank, job.world)
            ledger.write("begin", iteration)
            try:
                checkpointer.save(state, iteration=iteration)
                ledger.write("staged", iteration)
            except BackgroundSaveError as error:
                ledger.write("failed", error.iteration)
            overwrite(state)
        checkpointer.drain(60)
        checkpointer.close()
        ledger.write("closed")
    except BackgroundSaveError as error:  # of the last ones, at the end
        ledger.write("failed", error.iteration)
        ledger.write("closed")
    except BaseException as error:
        ledger.write("stopped", type(error).__name__, *str(error).split())
        raise
    finally:
        os._exit(0)  # gloo's threads may wait for peers that are gone


def keep_store(port: Any) -> None:
    """The launcher: hosts the store through which the ranks agree, until it is killed."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    port.send(store.port)
    port.recv()


def main() -> None:
    """A rank under torchrun: ``trainer.py FOLDER TOKEN SAVES``."""
    folder, token, saves = sys.argv[1:]
    dist.init_process_group("gloo")
    save_to_the_end(dist.get_rank(), Job(folder, dist.get_world_size(), int(saves), token))


if __name__ == "__main__":
    main()
