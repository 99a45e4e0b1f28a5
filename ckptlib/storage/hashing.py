"""SHA-256 beside the write: a helper thread digests each buffer while the caller hands it to the kernel.

`hashlib` and `write(2)` both release the GIL, so on two cores the wall time of a save is the larger of the two,
not their sum. Small buffers are digested in place: waking a thread costs more than they do.
"""

from __future__ import annotations

import hashlib
import queue
import threading

from ckptlib.storage.base import Buffer

INLINE_BYTES = 256 * 1024
"""Buffers up to this size are digested by the caller when the thread is idle."""

QUEUE_BLOCKS = 8
"""Blocks that may wait: bounds the temporary copies that a fast writer can pile up before a slow digest."""

_STOP = object()


class StreamHasher:
    """SHA-256 of everything given to `update`, in order. Buffers stay unchanged until `settle` or `digest` returns."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._queue: queue.Queue[object] = queue.Queue(maxsize=QUEUE_BLOCKS)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def update(self, data: Buffer) -> None:
        """Appends a buffer."""
        if self._thread is None:
            if len(data) <= INLINE_BYTES:
                self._hash.update(data)
                return
            self._thread = threading.Thread(target=self._run, name="ckptlib-sha256", daemon=True)
            self._thread.start()
        self._queue.put(data)

    def settle(self) -> None:
        """Waits until everything that was given is digested."""
        if self._thread is not None:
            self._queue.join()
        if self._error is not None:
            raise self._error

    def digest(self) -> str:
        """Waits for the thread and returns 64 hex digits."""
        self.close()
        if self._error is not None:
            raise self._error
        return self._hash.hexdigest()

    def close(self) -> None:
        """Ends the thread. Safe to call twice."""
        if self._thread is not None:
            self._queue.put(_STOP)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (item := self._queue.get()) is not _STOP:
            try:
                if self._error is None:
                    self._hash.update(item)  # type: ignore[arg-type]
            except BaseException as error:  # noqa: BLE001 - raised where the digest is asked for
                self._error = error
            finally:
                self._queue.task_done()
