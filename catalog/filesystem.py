"""Which kind of filesystem a path is on: SQLite's locks cannot be trusted on a network (S2)."""

from __future__ import annotations

import os
import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")

# Names as the kernel gives them. Locks there are absent, per host, or advisory over a lossy protocol, and WAL needs
# memory shared between all readers, which two hosts never have.
NETWORK = frozenset(
    {
        *("9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "cvmfs", "daos", "glusterfs", "gpfs", "lustre"),
        *("mfs", "ncpfs", "nfs", "nfs4", "orangefs", "panfs", "pvfs2", "quobyte", "smb3", "smbfs", "vboxsf", "wekafs"),
    }
)
# Filesystems in user space that are local; every other FUSE type (sshfs, s3fs, juicefs, gcsfuse, ...) counts as remote.
LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.ntfs-3g", "fuse.portal", "fuseblk"})


def filesystem_type(path: Path, mounts: str) -> str | None:
    """Type of the filesystem that holds `path` (which may not exist yet), from the text of a mountinfo file.

    The longest mount point that leads to `path` decides; of several mounts on one point the last one, which hides
    the others. None when nothing matches.
    """
    target = os.path.realpath(path)
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        head, separator, tail = line.partition(" - ")
        fields = head.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        if target == point or target.startswith(point.rstrip("/") + "/"):
            kind = tail.split(" ")[0]
            if best is None or len(point) >= best[0]:
                best = (len(point), kind)
    return None if best is None else best[1]


def is_network(kind: str) -> bool:
    """Whether a filesystem of this type is reached over a network, or may be."""
    return kind in NETWORK or (kind.startswith("fuse") and kind not in LOCAL_FUSE)


def network_filesystem(path: Path) -> str | None:
    """The filesystem type if `path` is on a network filesystem, else None (also where the system does not tell)."""
    try:
        mounts = MOUNTS.read_text()
    except OSError:
        return None
    kind = filesystem_type(path, mounts)
    return kind if kind is not None and is_network(kind) else None
