"""Finding the worker processes of asynchronous saves, as an operator would: in the process table."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from collections.abc import Iterator

import psutil


def is_worker(process: psutil.Process) -> bool:
    """Whether it is a worker that has not ended; one whose parent does not ask for its end stays a zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "ckptlib.worker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def marked_workers(name: str, value: str) -> list[psutil.Process]:
    """Workers that run with this in their environment: those of one test, whatever else runs on the machine."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if is_worker(process) and process.environ().get(name) == value:
                found.append(process)
    return found


def workers_of(pid: int) -> list[psutil.Process]:
    """Workers that a process has started and that have not ended."""
    return [process for process in psutil.Process(pid).children() if is_worker(process)]


def shared_segments() -> set[str]:
    """Names of shared memory: the files of ``/dev/shm``. Directories there are somebody's scratch."""
    segments = set()
    for entry in os.scandir("/dev/shm"):
        with contextlib.suppress(OSError):
            if stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                segments.add(entry.name)
    return segments


@contextlib.contextmanager
def workers_stopped(pid: int | None = None) -> Iterator[list[psutil.Process]]:
    """The workers of a process, this one's by default, stand still, as if a disk did not answer them."""
    workers = workers_of(os.getpid() if pid is None else pid)
    assert workers, "there is no worker to stop"
    for worker in workers:
        worker.send_signal(signal.SIGSTOP)
    try:
        yield workers
    finally:
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGCONT)


def assert_no_segment_is_left(before: set[str]) -> None:
    """Nothing with a name outlives the job; what others use meanwhile comes and goes."""
    deadline = time.monotonic() + 20
    while left := shared_segments() - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
