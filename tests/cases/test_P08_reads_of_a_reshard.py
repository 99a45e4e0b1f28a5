"""P08 (pytorch#76331): a load on other ranks read whole stored tensors: four times the bytes, or out of memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ckptlib
from ckptlib import ShardedTensor, fetch
from tests.support.ranks import run_ranks

ROWS, COLUMNS, TENSORS = 1536, 1024, 16
BYTES = ROWS * COLUMNS * TENSORS * 4
"""96 MiB: 12 MiB for each of eight ranks."""


def pieces(rank: int, ranks: int, axis: int, fill: bool) -> dict[str, Any]:
    """A rank's part of each tensor, as `torch.chunk` cuts it; every element says its place."""
    out = {}
    for i in range(TENSORS):
        sides = [range(ROWS), range(COLUMNS)]
        length = (ROWS, COLUMNS)[axis]
        step = -(-length // ranks)
        start = min(rank * step, length)
        sides[axis] = range(start, min(start + step, length))
        data = torch.zeros(len(sides[0]), len(sides[1]))
        if fill:
            torch.add(torch.tensor(sides[0])[:, None] * COLUMNS, torch.tensor(sides[1]), out=data).add_(i)
        offset = [0, 0]
        offset[axis] = start
        out[f"w{i}"] = ShardedTensor.from_box(f"w{i}", data, (ROWS, COLUMNS), offset)
    return out


def save(rank: int, url: str, ranks: int, axis: int) -> None:
    ckptlib.save(pieces(rank, ranks, axis, True), url, iteration=1)


def load(rank: int, url: str, ranks: int, axis: int) -> tuple[int, int, int, int]:
    """Bytes that are needed, that were read, that the kernel saw read, and by which the peak of memory grew."""
    target = pieces(rank, ranks, axis, False)
    ckptlib.load(target, url)  # imports, thread stacks
    for piece in target.values():
        piece.data.zero_()
    process, peak = psutil.Process(), Path("/proc/self/clear_refs")
    peak.write_text("5")  # the peak begins anew
    memory, seen = process.memory_info().rss, process.io_counters().read_chars
    report = ckptlib.load(target, url)
    seen = process.io_counters().read_chars - seen
    grown = _peak() - memory
    for name, wanted in pieces(rank, ranks, axis, True).items():
        assert torch.equal(target[name].data, wanted.data)
    return report.bytes_needed, report.bytes_read, seen, grown


def _peak() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peaks of memory are read from /proc")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
def test_p08_other_numbers_of_ranks_read_what_they_need_in_bounded_memory(tmp_path: Path, axis: int) -> None:
    """2 -> 3 and 2 -> 8, cut along either axis. Containers, index and records included: at most 1.05 times the bytes.

    Rows land in their tensors: the peak of memory does not grow. Columns are copied out of the file's pages, which
    count as the process's while they are mapped: for each reading thread those of one stored chunk, 3 MiB.
    """
    limit = 2**20 if axis == 0 else fetch.READERS * 3 * 2**20 + 2**20
    url = str(tmp_path / "it")
    run_ranks(2, save, url, 2, axis)
    for ranks in (3, 8):
        for needed, read, seen, grown in run_ranks(ranks, load, url, ranks, axis):
            assert read == needed
            assert seen <= 1.05 * needed
            assert grown <= limit, grown
        assert abs(needed * ranks - BYTES) < BYTES // 20
