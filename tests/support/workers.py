"""Finding the worker processes of asynchronous saves, as an operator would: in the process table."""

from __future__ import annotations

import psutil


def is_worker(process: psutil.Process) -> bool:
    """Whether it is a worker that has not ended; one whose parent does not ask for its end stays a zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "ckptlib.worker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def workers_of(pid: int) -> list[psutil.Process]:
    """Workers that a process has started and that have not ended."""
    return [process for process in psutil.Process(pid).children() if is_worker(process)]
