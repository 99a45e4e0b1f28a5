"""The state file of the embedded set: where its API is, for trainers, for `ckpt flows` and for people."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ckptlib.errors import LeaseHeldError

STATE_FILE = "serve.json"
_LOCK_FILE = "serve.lock"


@dataclass(frozen=True)
class ServeState:
    """A running embedded set.

    Attributes:
        pid: of `ckpt flows serve`; SIGTERM to it ends everything.
        api_url: what trainers and clients set as ``PREFECT_API_URL``.
        database: URL or path of the catalog it works on.
        started_at: seconds since the epoch.
    """

    pid: int
    api_url: str
    database: str
    started_at: float

    def write(self, state_dir: Path) -> None:
        """Publishes it atomically: a reader sees all of it or nothing."""
        path = state_dir / STATE_FILE
        temporary = path.with_name(f"{path.name}.{self.pid}")
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)


def remembered(state_dir: Path) -> ServeState | None:
    """The state file, also that of a set which is gone; None when there is none that can be read."""
    try:
        return ServeState(**json.loads((state_dir / STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def running(state_dir: Path) -> ServeState | None:
    """The embedded set that runs on this directory and is ready, or None."""
    state = remembered(state_dir)
    if state is None:
        return None
    try:
        descriptor = os.open(state_dir / _LOCK_FILE, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return state
    else:
        return None
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(state_dir: Path) -> Iterator[None]:
    """Holds the directory for one embedded set. The kernel gives it back however the process ends.

    Raises:
        LeaseHeldError: another one holds it.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(state_dir / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            other = remembered(state_dir)
            who = f"process {other.pid}, {other.api_url}" if other else "another process that is starting"
            raise LeaseHeldError(
                f"the flows already run in {state_dir} ({who}); use that one, end it, or set CKPT_FLOWS_STATE_DIR"
            ) from error
        yield
    finally:
        os.close(descriptor)
