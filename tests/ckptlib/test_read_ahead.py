"""Blocks come in order, ahead of whoever looks at them, and never more of them than was said."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ckptlib import read_ahead
from ckptlib.read_ahead import MOST_READS, ReadAhead
from ckptlib.storage import PosixStorage, Range

BLOCK = 1000
AHEAD = 3


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "BLOCK_BYTES", BLOCK)


class Watched(PosixStorage):
    """Counts what is read at the same time and in all; some reads take longer than others.

    Args:
        together: no read ends before so many have been under way at the same time.
    """

    capabilities = replace(PosixStorage.capabilities, reads_at_once=AHEAD)

    def __init__(self, together: int = 1) -> None:
        super().__init__()
        self.changed = threading.Condition()
        self.together = together
        self.now = self.most = self.blocks = 0

    def read_into(self, path: str, ranges: Sequence[Range]) -> None:
        with self.changed:
            self.now, self.blocks = self.now + 1, self.blocks + 1
            self.most = max(self.most, self.now)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.most >= self.together, timeout=60)
        time.sleep(random.random() / 1000)
        try:
            super().read_into(path, ranges)
        finally:
            with self.changed:
                self.now -= 1


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(random.Random(7).randbytes(20 * BLOCK + 1))
    return path


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 20 * BLOCK + 1])
def test_all_blocks_come_in_order(file: Path, size: int) -> None:
    content = file.read_bytes()[:size]
    with ReadAhead(Watched(), files=2) as ahead:
        got = [(start, bytes(block)) for start, block in ahead.blocks(str(file), size)]
    assert [start for start, _ in got] == list(range(0, size, BLOCK))
    assert b"".join(data for _, data in got) == content


def test_no_more_is_read_than_a_few_blocks_ahead(file: Path) -> None:
    storage = Watched(together=AHEAD)
    with ReadAhead(storage, files=1) as ahead:
        for i, _ in enumerate(ahead.blocks(str(file), 20 * BLOCK)):
            assert storage.blocks <= i + 1 + AHEAD
    assert storage.most == AHEAD
    assert storage.blocks == 20


def test_many_files_share_the_reads_that_there_may_be(file: Path) -> None:
    storage = Watched(together=AHEAD + 1)
    with ReadAhead(storage, files=12) as ahead, ThreadPoolExecutor(12) as pool:
        sizes = pool.map(lambda _: sum(len(block) for _, block in ahead.blocks(str(file), 20 * BLOCK)), range(12))
        assert set(sizes) == {20 * BLOCK}
    assert AHEAD < storage.most <= MOST_READS


def test_a_file_that_is_shorter_than_it_was_is_an_error_and_ends_the_reading(file: Path) -> None:
    storage = Watched()
    with ReadAhead(storage, files=1) as ahead, pytest.raises(OSError, match="file"):
        list(ahead.blocks(str(file), 40 * BLOCK))
    assert storage.blocks <= 21 + AHEAD
    assert storage.now == 0


def test_whoever_stops_early_leaves_nothing_behind(file: Path) -> None:
    storage = Watched()
    with ReadAhead(storage, files=1) as ahead:
        blocks = ahead.blocks(str(file), 20 * BLOCK)
        next(blocks)
        blocks.close()  # type: ignore[attr-defined]
        assert storage.now == 0
    assert storage.blocks <= 1 + AHEAD


def test_a_reader_that_is_closed_after_the_pool_waits_for_nothing_that_never_began(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "MOST_READS", 1)  # so that blocks wait for their turn when the pool closes

    class Slow(Watched):
        def read_into(self, path: str, ranges: Sequence[Range]) -> None:
            time.sleep(0.1)
            super().read_into(path, ranges)

    with ReadAhead(Slow(), files=1) as ahead:
        blocks = ahead.blocks(str(file), 20 * BLOCK)
        next(blocks)
    closing = threading.Thread(target=blocks.close, daemon=True)  # type: ignore[attr-defined]
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
