"""Lustre: how a checkpoint's directory is striped, and what is left of its quotas.

All by the ``lfs`` command, where there is one. Nothing here ever fails a save: what cannot be had is a warning.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence

from ckptlib.storage import filesystems
from ckptlib.storage.filesystems import Room
from ckptlib.storage.room import Bound

log = logging.getLogger("ckptlib")

TIMEOUT = 10.0
"""Seconds for all that is asked of one checkpoint: the servers may be busy, and all ranks wait."""

MIB, GIB = 2**20, 2**30

STRIPE_SIZE = "4M"
"""Bytes that go to one target before the next: what a stream writes at once (`posix_stream.WRITE_BYTES`)."""

_STEPS = ((256 * MIB, "256M", 1), (4 * GIB, "4G", 4), (None, "-1", 8))
"""Up to which byte of a file, as ``lfs`` says it, over how many targets."""


def layout(size: int, files: int) -> list[str]:
    """Arguments of ``lfs setstripe`` for a directory that gets so many files of so many bytes in all. Pure.

    A progressive layout: the head of each file on one target, so that small files cost one object; what follows on
    more, so that a large file is neither bound to one target's speed nor fills one up alone. It has no more steps than
    files of twice the mean size reach: each costs every file another record.
    """
    largest = 2 * size // max(files, 1)
    arguments: list[str] = []
    for end, name, stripes in _STEPS:
        last = end is None or largest <= end
        arguments += ["-E", "-1" if last else name, "-c", str(stripes), "-S", STRIPE_SIZE]
        if last:
            break
    return arguments


def has_lfs() -> bool:
    """Whether the command is installed."""
    return shutil.which("lfs") is not None


class Lfs:
    """The command, for one checkpoint: all its calls together take `TIMEOUT` seconds at most."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + TIMEOUT

    def has_default_layout(self, directory: str) -> bool:
        """Whether an existing directory gives new files what the filesystem gives everywhere.

        False where somebody chose a layout or a pool for it, and where it cannot be told.
        """
        own = self._ask("getstripe", "-d", directory)
        top = filesystems.mount_point(directory)
        everywhere = self._ask("getstripe", "-d", top)
        if own is None or everywhere is None:
            return False
        return is_default(own.replace(directory, ""), everywhere.replace(top, ""))

    def set_layout(self, directory: str, arguments: Sequence[str]) -> bool:
        """Stripes what will be made in a directory from now on; files that are there stay as they are.

        Returns:
            Whether it was done; if not, a warning says why.
        """
        return self._ask("setstripe", *arguments, directory, warns=True) is not None

    def quotas(self, directory: str) -> Iterator[Bound]:
        """What is left of the quotas that new files in an existing directory count against, as far as is known."""
        try:
            found = os.stat(directory)
        except OSError as error:
            log.debug("%s: no quotas: %s", directory, error)
            return
        group = found.st_gid if found.st_mode & stat.S_ISGID else os.getegid()
        owners = [("-u", "user", os.geteuid()), ("-g", "group", group)]
        project = parse_project(self._ask("project", "-d", directory) or "")
        if project:
            owners.append(("-p", "project", project))
        for option, name, number in owners:
            answer = self._ask("quota", "-q", option, str(number), directory)
            if answer is not None:
                yield Bound(f"in the quota of {name} {number}", parse_quota(answer), errno.EDQUOT)

    def _ask(self, *arguments: str, warns: bool = False) -> str | None:
        """What ``lfs`` prints; None: it failed, or was not asked because the time is over."""
        try:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"not asked: the {TIMEOUT:g} s for all of it are over")
            done = subprocess.run(
                ["lfs", *arguments], capture_output=True, text=True, timeout=left, stdin=subprocess.DEVNULL
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            why = str(error)
        else:
            if done.returncode == 0:
                return done.stdout
            why = done.stderr.strip() or f"exit status {done.returncode}"
        log.log(logging.WARNING if warns else logging.DEBUG, "lfs %s: %s", " ".join(arguments), why)
        return None


def is_default(own: str, everywhere: str) -> bool:
    """Whether two answers of ``lfs getstripe -d``, without their paths, say that nobody chose anything. Pure.

    A directory without a layout of its own shows that of the filesystem, or says that it has none. A pool is a choice
    also where it is the filesystem's: what is set without one may land elsewhere.
    """
    if _POOL.search(own):
        return False
    return "no stripe info" in own or _words(own) in ([], _words(everywhere))


def parse_quota(answer: str) -> Room:
    """What ``lfs quota -q`` says is left before the hard limits. Pure; what it does not say is not known.

    The columns are kilobytes, quota, limit, grace, files, quota, limit, grace; the first may be on a line of its own
    after a long path. ``*`` marks what is over a quota, ``[]`` what some server has not confirmed; 0 is no limit.
    """
    words = answer.split()
    for start in range(len(words) - 7):
        used, soft, limit, grace, files, soft_files, file_limit, file_grace = map(_number, words[start : start + 8])
        if grace is not None or file_grace is not None or soft is None or soft_files is None:
            continue  # not the first column yet: what stands before it is a path
        if used is not None and limit is not None and files is not None and file_limit is not None:
            return Room(
                max(0, limit - used) * 1024 if limit else None,
                max(0, file_limit - files) if file_limit else None,
            )
    return Room()


def parse_project(answer: str) -> int:
    """The project that new files in a directory get, by ``lfs project -d``: ``1000 P /path``; 0: none. Pure.

    ``P``: they inherit it. Without, the number is that of the directory alone.
    """
    number, flag = [*answer.split(), "", ""][:2]
    return int(number) if flag == "P" and number.isdecimal() else 0


_POOL = re.compile(r"pool:\s*\S")


def _words(answer: str) -> list[str]:
    return answer.replace("(Default)", "").split()


def _number(word: str) -> int | None:
    word = word.rstrip("*").strip("[]")
    return int(word) if word.isdecimal() else None
