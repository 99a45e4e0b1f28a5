"""P12 (pytorch#150862, #108869, PR163480): empty and uneven shards break deduplication or the load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckptlib
from ckptlib import ShardedTensor
from tests.support.ranks import run_ranks

SIX, ONE = torch.arange(12.0).reshape(6, 2), torch.tensor([[7.0, 8.0]])


def placed(world: int, six: torch.Tensor, one: torch.Tensor) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (world,))
    return {
        "six": distribute_tensor(six, mesh, [Shard(0)], src_data_rank=None),
        "one": distribute_tensor(one, mesh, [Shard(0)], src_data_rank=None),
    }


def save(rank: int, url: str, world: int) -> int:
    ckptlib.save(placed(world, SIX, ONE), url, iteration=1)
    return int(placed(world, SIX, ONE)["six"].to_local().numel())


def load(rank: int, urls: list[str], world: int) -> list[int]:
    read = []
    for url in urls:
        target: dict[str, Any] = placed(world, torch.zeros_like(SIX), torch.zeros_like(ONE))
        read.append(ckptlib.load(target, url).bytes_read)
        for name, wanted in placed(world, SIX, ONE).items():
            assert torch.equal(target[name].to_local(), wanted.to_local())
    return read


@pytest.mark.timeout(300)
def test_p12_six_rows_on_four_ranks_and_one_row_on_two_are_loaded_by_three(tmp_path: Path) -> None:
    four, two = urls = [str(tmp_path / world) for world in ("four", "two")]
    assert run_ranks(4, save, four, 4) == [4, 4, 4, 0]
    assert run_ranks(2, save, two, 2) == [6, 6]
    for read in zip(*run_ranks(3, load, urls, 3), strict=True):
        assert sum(read) == 4 * (SIX.numel() + ONE.numel())
    for url in urls:
        found = ckptlib.read(url)
        assert torch.equal(found["six"], SIX)
        assert torch.equal(found["one"], ONE)


@pytest.mark.parametrize(("rows", "saved", "loaded"), [(4096, 30, 7), (4096, 7, 30), (5, 8, 3), (30, 30, 4)])
def test_p12_rows_that_no_number_of_ranks_divides_are_cut_anywhere(
    tmp_path: Path, rows: int, saved: int, loaded: int
) -> None:
    """The pieces of all ranks, in one process."""
    whole = torch.arange(rows * 2).reshape(rows, 2)

    def pieces(world: int, source: torch.Tensor) -> list[ShardedTensor]:
        step = -(-rows // world)
        cuts = [(min(i * step, rows), min((i + 1) * step, rows)) for i in range(world)]
        return [ShardedTensor.from_box("w", source[a:b].clone(), (rows, 2), (a, 0)) for a, b in cuts]

    url = str(tmp_path / "it")
    ckptlib.save({"w": pieces(saved, whole)}, url, iteration=1)
    target = pieces(loaded, torch.zeros_like(whole))
    report = ckptlib.load({"w": target}, url)
    assert torch.equal(torch.cat([piece.data for piece in target]), whole)
    assert report.bytes_read == report.bytes_needed == rows * 2 * 8
