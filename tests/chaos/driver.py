"""Starts a job, kills one of its processes at a moment, and brings the job to its end as a launcher would.

A moment is drawn from a seed: how many ranks, which process, after which line of the ledger and how long after it.
"""

from __future__ import annotations

import multiprocessing.connection
import random
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from tests.chaos.trainer import Job, keep_store, train
from tests.support.ranks import context
from tests.support.workers import workers_of

PATIENCE = 120.0
"""Seconds for anything that has to happen; a loaded machine is slow, not broken."""


@dataclass(frozen=True)
class Moment:
    """When and whom to kill.

    Attributes:
        victim: ``trainer``, ``worker`` or ``launcher``.
        rank: whose, of the first two.
        after: the iteration whose save must have begun on the rank.
        delay: seconds after that.
        at_once: the next attempt begins while workers of this one may still be writing.
    """

    seed: int
    world: int
    victim: str
    rank: int
    after: int
    delay: float
    at_once: bool

    @classmethod
    def of(cls, seed: int, *, worlds: tuple[int, ...] = (2, 3, 4), saves: int = 8) -> Moment:
        """The moment of a seed."""
        chance = random.Random(seed)
        world = chance.choice(worlds)
        victim = chance.choices(["trainer", "worker", "launcher"], [4, 4, 1])[0]
        rank = chance.choice([0, chance.randrange(world)])  # half of the time the one that commits
        return cls(
            seed, world, victim, rank, chance.randint(1, saves), chance.uniform(0, 0.08), chance.random() < 0.5
        )  # fmt: skip

    def __str__(self) -> str:
        whom = self.victim if self.victim == "launcher" else f"{self.victim} {self.rank} of {self.world}"
        return f"seed {self.seed}: {whom}, {1000 * self.delay:.0f} ms after save {self.after} began"


def wait_until(what: str, done: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Waits until something is so.

    Raises:
        AssertionError: it never was.
    """
    deadline = time.monotonic() + patience
    while not done():
        assert time.monotonic() < deadline, f"{what}: not within {patience:g} s"
        time.sleep(0.002)


def kill_at(moment: Moment, folder: Path, *, saves: int = 8) -> Job:
    """Runs a job until a process of it was killed and all its trainers have ended."""
    ours, theirs = context.Pipe()
    launcher = context.Process(target=keep_store, args=(theirs,), daemon=True)
    launcher.start()
    job = Job(str(folder), moment.world, saves, uuid.uuid4().hex, ours.recv())
    trainers = [context.Process(target=train, args=(rank, job), daemon=True) for rank in range(moment.world)]
    try:
        for trainer in trainers:
            trainer.start()
        wait_until("the start", lambda: all("ready" in lines(job, rank) for rank in range(moment.world)))
        victim = _victim(moment, launcher, trainers)
        wait_until("the moment", lambda: f"begin {moment.after}" in lines(job, moment.rank))
        time.sleep(moment.delay)
        victim.send_signal(signal.SIGKILL)
        _see_to_the_end(job, trainers)
    finally:
        for process in (*trainers, launcher):
            process.kill()
            process.join(10)
            process.close()
        ours.close()
    return job


def _victim(moment: Moment, launcher: BaseProcess, trainers: list[BaseProcess]) -> psutil.Process:
    if moment.victim == "launcher":
        return psutil.Process(launcher.pid)
    trainer = psutil.Process(trainers[moment.rank].pid)
    if moment.victim == "trainer":
        return trainer
    (worker,) = workers_of(trainer.pid)
    return worker


def _see_to_the_end(job: Job, trainers: list[BaseProcess]) -> None:
    """As torchrun does: when a rank has ended before its time, the others get SIGTERM, then SIGKILL."""
    deadline = time.monotonic() + PATIENCE
    while running := [trainer for trainer in trainers if trainer.is_alive()]:
        assert time.monotonic() < deadline, "trainers did not end"
        multiprocessing.connection.wait([trainer.sentinel for trainer in running], timeout=1)
        if any(not trainer.is_alive() and lines(job, rank)[-1] != "closed" for rank, trainer in enumerate(trainers)):
            for trainer in trainers:
                trainer.terminate()
            for trainer in trainers:
                trainer.join(5)
                trainer.kill()


def lines(job: Job, rank: int) -> list[str]:
    """What a rank has written down."""
    path = job.ledger(rank)
    return path.read_text().splitlines() if path.exists() else []


def iterations(job: Job, rank: int, word: str) -> set[int]:
    """The iterations of which a rank has said something."""
    return {int(line.split()[1]) for line in lines(job, rank) if line.split()[0] == word}


def staged_by_all(job: Job) -> set[int]:
    """Iterations whose `save` has returned on every rank: nothing may be lost of them."""
    return set.intersection(*(iterations(job, rank, "staged") for rank in range(job.world)))
