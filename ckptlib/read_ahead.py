"""Files block by block, read ahead of whoever looks at them, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

from ckptlib import storage as st

BLOCK_BYTES = 4 * 1024 * 1024
"""Bytes per read: blocks that have just come are looked at in the processor's cache."""

MOST_READS = 16
"""At the same time, of all files together."""


class ReadAhead:
    """Reads several files at a time, of each as many blocks as the storage serves side by side, and no more.

    Of one file that many are in memory, and the one that is looked at: 12 MiB from a disk, 36 MiB from S3. A file that
    is smaller takes its size.

    Args:
        files: that are read at the same time.
    """

    def __init__(self, storage: st.Storage, files: int) -> None:
        self._storage = storage
        self._ahead = storage.capabilities.reads_at_once
        reads = min(files * self._ahead, MOST_READS)
        self._pool = ThreadPoolExecutor(reads, thread_name_prefix="ckptlib-read-ahead")

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def blocks(self, path: str, size: int) -> Iterator[tuple[int, memoryview]]:
        """Offset and content of each block, in order. A block is valid until the next one is asked for.

        Raises:
            OSError: a block could not be read; a file that is shorter than `size` is one such error.
        """
        if size <= BLOCK_BYTES:
            if size:
                block = memoryview(bytearray(size))
                self._storage.read_into(path, [(0, block)])
                yield 0, block
            return
        starts = iter(range(0, size, BLOCK_BYTES))
        count = -(-size // BLOCK_BYTES)
        free = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(min(self._ahead + 1, count))]
        pending: deque[tuple[int, memoryview, memoryview, Future[None]]] = deque()
        try:
            while True:
                while free and (start := next(starts, None)) is not None:
                    buffer = free.pop()
                    block = buffer[: min(BLOCK_BYTES, size - start)]
                    reading = self._pool.submit(self._storage.read_into, path, [(start, block)])
                    pending.append((start, block, buffer, reading))
                if not pending:
                    return
                start, block, buffer, reading = pending.popleft()
                reading.result()
                yield start, block
                free.append(buffer)
        finally:
            # Of one that the pool cancelled when it was closed nobody ever tells: only the others are waited for.
            wait([reading for _, _, _, reading in pending if not reading.cancel()])
