"""How much memory this process may still take before the kernel ends somebody for it (Linux)."""

from __future__ import annotations

import contextlib
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """What can be taken without swapping: of the machine, and of this process's control group (version 2) and those
    above it; None where the system does not say."""
    limits = [left for left in (_of_machine(), *_of_groups()) if left is not None]
    return min(limits, default=None)


def _of_machine() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _of_groups() -> list[int]:
    left = []
    with contextlib.suppress(OSError, ValueError):
        (own,) = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
        group = CGROUPS / own.strip("/")
        while group.is_relative_to(CGROUPS):
            with contextlib.suppress(OSError, ValueError):  # "max", or the root group, which has no limit
                limit = int((group / "memory.max").read_text())
                used = int((group / "memory.current").read_text())
                left.append(max(0, limit - used + _reclaimable(group)))
            group = group.parent
    return left


def _reclaimable(group: Path) -> int:
    """Cached pages of files that were read once: they go when somebody needs the memory."""
    for line in (group / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0
