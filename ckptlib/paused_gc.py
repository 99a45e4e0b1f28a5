"""A pause for Python's cycle collector while a million things are made and none of them is garbage.

The collector looks through everything that is alive each time their number has grown by some part. Over the records
of thousands of ranks that is half of the time, and finds nothing: what is made here has no cycles. (Torch's loads of
``.metadata`` become three to four times as fast without it.)
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """No cycles are collected in this process meanwhile. Reference counts free what they always do.

    Pauses may be nested and overlap, also of several threads; a collector that the program has switched off stays off.
    """
    global _pauses, _was_enabled
    with _lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _was_enabled:
                gc.enable()
