"""Small filesystems to fill up or to make read-only, where the machine lets us mount one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_filesystem(folder: Path, *, size: str = "1m") -> Iterator[Path]:
    """A tmpfs of this size; skips the test where mounting is not allowed."""
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no filesystem can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, capture_output=True)


def make_read_only(folder: Path) -> None:
    """Turns a mounted filesystem read-only, for root too."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, capture_output=True)
