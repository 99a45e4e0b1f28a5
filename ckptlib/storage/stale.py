"""Clients of network filesystems show for a while what was there before: a name that is not there yet, a smaller size.

Whoever knows from a record what must be there asks again, for a few seconds, before it calls a file missing.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from ckptlib.storage import base, filesystems

T = TypeVar("T")

WAIT = 5.0
"""Seconds, on network filesystems. Asking past the caches ends most waits at once; some clients cannot."""

MAX_PAUSE = 0.5
"""Seconds between two looks, at most."""


def is_suspect(error: OSError) -> bool:
    """Whether an error may be that of a view that is out of date."""
    return isinstance(error, FileNotFoundError) or error.errno == errno.ESTALE


class Views:
    """How long to doubt what the client of a filesystem shows.

    Args:
        wait: seconds; None: `WAIT` on network filesystems, and not at all elsewhere.
        pause: waits so many seconds.
        clock: seconds.
    """

    def __init__(
        self,
        wait: float | None = None,
        *,
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wait = wait
        self._pause = pause
        self._clock = clock

    def look(self, path: str, look: Callable[[], T], is_doubtful: Callable[[T], bool]) -> T:
        """What `look` says of a file, as soon as that is beyond doubt or the time is over."""
        found = look()
        if not is_doubtful(found) or (seconds := self._seconds(path)) <= 0:
            return found
        deadline, pause = self._clock() + seconds, 0.01
        while True:
            filesystems.refresh(base.parent(path))
            filesystems.refresh(path)
            found = look()
            left = deadline - self._clock()
            if not is_doubtful(found) or left <= 0:
                return found
            self._pause(min(pause, left))
            pause = min(2 * pause, MAX_PAUSE)

    def read(self, path: str, read: Callable[[], None], is_doubtful: Callable[[OSError], bool]) -> None:
        """Does something to a file that is known to be there; raises what it raises when the time is over."""

        def attempt() -> OSError | None:
            try:
                read()
            except OSError as error:
                return error
            return None

        error = self.look(path, attempt, lambda error: error is not None and is_doubtful(error))
        if error is not None:
            raise error

    def _seconds(self, path: str) -> float:
        if self._wait is not None:
            return self._wait
        kind = filesystems.kind(filesystems.nearest_directory(base.parent(path)))
        return WAIT if kind is not None and filesystems.is_network(kind) else 0.0
