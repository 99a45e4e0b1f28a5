"""Child processes that never outlive the process that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

RUNNER_PID = "CKPT_FLOWS_RUNNER_PID"
"""Environment variable of the embedded set: the process that its flow runs must not outlive."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Makes the kernel send `signum` to this process when its parent `parent` dies; exits if it is dead already.

    Linux only: elsewhere nothing happens, and a child of a SIGKILLed parent stays until somebody ends it.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:  # it died between our start and the call above, so no signal will come
        os._exit(1)


def die_with_runner() -> None:
    """For a flow run: ends with the runner of the embedded set, even if that is killed. Elsewhere nothing happens."""
    runner = os.environ.get(RUNNER_PID)
    if runner is not None:
        die_with_parent(int(runner))


@dataclass
class Child:
    """A process in a session of its own, so that a terminal's Ctrl-C reaches only us and its group is ours to end."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group."""
        return self.process.pid

    def exited(self) -> int | None:
        """Its exit status, or None while it runs."""
        return self.process.poll()

    def stop(self, grace: float) -> None:
        """SIGTERM, up to `grace` seconds, then SIGKILL for whatever of its process group is left."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
        # Also after a clean exit: a grandchild may have been left behind.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log, for an error message."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"({self.log}: {error.strerror})"
        return "\n".join(text.splitlines()[-lines:])


def start(
    name: str, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path, pass_fds: Sequence[int] = ()
) -> Child:
    """Starts `command` with its output in `log`; the log of the start before is kept as ``<log>.1``.

    Must be called from the main thread of a process without other threads: the kernel ties the child to the thread
    that started it, and a hook runs between fork and exec.
    """
    parent = os.getpid()
    if log.exists():
        log.replace(log.with_name(log.name + ".1"))
    out: IO[bytes]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
        )
    return Child(name, process, log)


def wait_until(ready: Callable[[], bool], *, timeout: float, pause: float = 0.2) -> bool:
    """Calls `ready` every `pause` seconds until it is true; False after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not ready():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
    return True
