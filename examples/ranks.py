"""Starts the ranks of a training job on this machine, and ends them: politely, or as a power cut would.

Does what ``torchrun --standalone`` does, with all ranks in one process group and nothing in between, so that one
signal reaches all of them at the same moment.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from flows.process import die_with_parent


class RanksFailedError(RuntimeError):
    """Raised when a rank ended with an error, or not in time; the message ends with the log."""


class Ranks:
    """The processes of one job. Must be started from the main thread; they die with the process that started them."""

    def __init__(self, count: int, command: Sequence[str], *, log: Path, env: Mapping[str, str]) -> None:
        """Starts `command` `count` times, with the variables that torchrun sets; output goes to `log`."""
        self.log = log
        self.processes: list[subprocess.Popen[bytes]] = []
        rendezvous = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        parent = os.getpid()
        try:
            with log.open("ab") as output:
                for rank in range(count):
                    self.processes.append(
                        subprocess.Popen(
                            command,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            env={**env, **rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                            process_group=self.processes[0].pid if self.processes else 0,
                            preexec_fn=lambda: die_with_parent(parent),
                        )
                    )
        except BaseException:
            self.kill()
            raise

    @property
    def group(self) -> int:
        """Number of the process group."""
        return self.processes[0].pid

    def running(self) -> bool:
        """Whether any rank runs; once one has failed, the others wait for it in vain and are ended.

        Raises:
            RanksFailedError: a rank ended with an error.
        """
        statuses = [process.poll() for process in self.processes]
        if any(statuses):
            self.kill()
            raise RanksFailedError(f"ranks ended with status {statuses}; end of {self.log}:\n{self.tail()}")
        return None in statuses

    def wait(self, timeout: float) -> None:
        """Waits until all ranks have ended well.

        Raises:
            RanksFailedError: one ended with an error, or they need more than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while self.running():
            if time.monotonic() > deadline:
                self.kill()
                raise RanksFailedError(f"not finished within {timeout:g} s; end of {self.log}:\n{self.tail()}")
            time.sleep(0.1)

    def freeze(self) -> bool:
        """Stops every rank where it is (SIGSTOP); False when one of them has ended meanwhile."""
        os.killpg(self.group, signal.SIGSTOP)
        # A rank inside a system call stops when the call returns: only then is nothing more going to change.
        states = [
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            for process in self.processes
            if process.returncode is None
        ]
        return len(states) == len(self.processes) and all(s is not None and s.si_code == os.CLD_STOPPED for s in states)

    def thaw(self) -> None:
        """Lets frozen ranks go on."""
        os.killpg(self.group, signal.SIGCONT)

    def kill(self) -> list[int]:
        """SIGKILL to the whole group, and waits for the end; returns every rank's exit status (-9: killed)."""
        if any(process.returncode is None for process in self.processes):
            # The group's number belongs to us as long as one member has not been waited for.
            os.killpg(self.group, signal.SIGKILL)
        return [process.wait() for process in self.processes]

    def tail(self, lines: int = 30) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
