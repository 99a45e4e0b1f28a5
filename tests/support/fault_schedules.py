"""Faults at random, the same for the same seed."""

from __future__ import annotations

import errno
import random
from typing import get_args

from tests.support.disk_faults import DiskFault, DiskKind
from tests.support.faults import Fault, Kind

REQUESTS = ("*", "*", "Put*", "Get*", "Head*", "List*", "Delete*", "Upload*", "C*MultipartUpload", "*Object")
FILES = (
    "*",
    "*",
    "*.distcp",
    "*decision.json",
    "*manifest.json",
    "*rank_*.json",
    "*begin.json",
    "*attempts*",
    "*index",
)
LASTING = ("slow_down", "internal_error", "cut_before", "forbidden", "expired_token", "skewed", "wrong_region")
"""What may also stay: until the schedule ends, every request that fits fails so."""

CALLS = ("*", "write", "f*sync", "replace", "link", "mkdir", "unlink", "open", "scandir", "preadv")
CODES = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EACCES, errno.EROFS)


def request_faults(seed: int) -> list[Fault]:
    """One to five, anywhere in a few hundred requests; some of them stay."""
    chance = random.Random(f"requests {seed}")
    faults = []
    for _ in range(chance.randint(1, 5)):
        kind: Kind = chance.choice(get_args(Kind))
        stays = kind in LASTING and chance.random() < 0.3
        operation = "GetObject" if kind == "flip_download" else chance.choice(REQUESTS)
        faults.append(
            Fault(
                kind,
                operation,
                key=chance.choice(FILES),
                skip=chance.choice((0, 0, 1, 2, 5, 10, 20, 50)),
                times=None if stays else chance.choice((1, 1, 1, 2, 3, 4, 8)),
            )
        )
    return faults


def disk_faults(seed: int) -> list[DiskFault]:
    """Two to six, anywhere in a few hundred calls; some of them stay."""
    chance = random.Random(f"calls {seed}")
    faults = []
    for _ in range(chance.randint(2, 6)):
        kind: DiskKind = chance.choice(("error", "error", "error_after", "short", "flip"))
        operation = chance.choice(CALLS)
        if kind == "short":
            operation = chance.choice(("write", "preadv"))
        elif kind == "flip":
            operation = "preadv"
        stays = kind == "error" and chance.random() < 0.3
        of_directories = operation in ("mkdir", "scandir")
        faults.append(
            DiskFault(
                kind,
                chance.choice(CODES),
                operation,
                key="*" if of_directories else chance.choice(FILES),
                skip=chance.choice((0, 0, 0, 1, 1, 2, 3, 5, 10, 30)),
                times=None if stays else chance.choice((1, 1, 1, 2, 3, 8)),
            )
        )
    return faults
