"""What may be chosen for a root on a mounted filesystem: ``storage_options={"posix": {...}}``."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptlib.errors import UnsupportedError


@dataclass(frozen=True)
class PosixOptions:
    """Choices for a mounted filesystem.

    Attributes:
        stripe: on Lustre, where the ``lfs`` command is installed: ``auto`` stripes the directory of each checkpoint by
            the sizes of its files, ``off`` leaves it as its parent is; anything else is handed to ``lfs setstripe``
            as its arguments: ``-c 4 -S 16M``. Elsewhere it means nothing.
        stale_wait: for how many seconds a file that a record names may be absent, or shorter than it was written,
            before it is called so: network filesystems show old views. None: 5 on those, 0 elsewhere.
        room: ``auto`` refuses a save that cannot fit in what the filesystem, or a quota, says is left; ``off`` does not
            ask: for volumes that grow as they are written, and filesystems that compress or say what is not so.

    Raises:
        UnsupportedError: a value is out of its range.
    """

    stripe: str = "auto"
    stale_wait: float | None = None
    room: str = "auto"

    def __post_init__(self) -> None:
        stripe: Any = self.stripe
        wait: Any = self.stale_wait
        if not isinstance(stripe, str) or (stripe not in ("auto", "off") and not _are_arguments(stripe)):
            raise UnsupportedError(
                f"stripe={stripe!r}: expected 'auto', 'off', or arguments of lfs setstripe such as '-c 4 -S 16M'"
            )
        if wait is not None and (isinstance(wait, bool) or not isinstance(wait, (int, float)) or not 0 <= wait <= 3600):
            raise UnsupportedError(f"stale_wait={wait!r}: expected seconds from 0 to 3600, or None")
        if self.room not in ("auto", "off"):
            raise UnsupportedError(f"room={self.room!r}: expected 'auto' or 'off'")

    @classmethod
    def of(cls, options: Any) -> PosixOptions:
        """The choices as a user wrote them down.

        Raises:
            UnsupportedError: there is no such choice; names those that there are.
        """
        if not isinstance(options, Mapping):
            raise UnsupportedError(f"storage_options['posix']: expected a dict, got {type(options).__name__}")
        known = cls.names()
        for name in options:
            if name not in known:
                raise UnsupportedError(f"storage_options['posix'] has {name!r}: expected {' or '.join(known)}")
        return cls(**options)

    @classmethod
    def names(cls) -> list[str]:
        """What may be chosen."""
        return [field.name for field in dataclasses.fields(cls)]


def _are_arguments(text: str) -> bool:
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that is not closed
        return False
    return bool(words) and words[0].startswith("-")
