"""What the ranks of a load ask for together is each tensor once, by main replicas, or nothing is loaded (R4)."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
import torch

import ckptlib
from ckptlib import Checkpointer, ShardedTensor, planning
from ckptlib.errors import TilingError
from ckptlib.sharding import Box
from tests.support.ranks import run_ranks

WHOLE = torch.arange(8.0)


def part(first: int, size: int, replica: int = 0) -> ShardedTensor:
    return ShardedTensor("w", torch.full((size,), -1.0), (8,), Box((first,), (size,)), replica)


REQUESTS = {
    "halves": ([part(0, 4), part(4, 4)], None),
    "a copy beside the whole": ([part(0, 8), part(2, 3, replica=1)], None),
    "an overlap": ([part(0, 5), part(4, 4)], r"'w': \[0:5\] and \[4:8\] overlap"),
    "two main replicas": ([part(0, 8), part(0, 8)], r"'w': \[0:8\] and \[0:8\] overlap"),
    "a hole": ([part(0, 3), part(4, 4)], r"'w': 7 of 8 elements are covered"),
    "only copies": ([part(0, 4, replica=1), part(4, 4, replica=1)], r"'w': 0 of 8 elements are covered"),
}


def each(rank: int, url: str) -> dict[str, tuple[str | None, list[float]]]:
    """For each case: what this rank's load raised, and what its tensor holds afterwards."""
    seen: dict[str, tuple[str | None, list[float]]] = {}
    for name, (parts, _) in REQUESTS.items():
        error = None
        try:
            ckptlib.load({"w": parts[rank]}, url)
        except TilingError as raised:
            error = str(raised)
        seen[name] = (error, parts[rank].data.tolist())
    return seen


def test_r4_requests_that_do_not_fit_together_are_refused_on_all_ranks_and_change_nothing(tmp_path: Path) -> None:
    ckptlib.save({"w": WHOLE}, str(tmp_path / "it"), iteration=1)
    ranks = run_ranks(2, each, str(tmp_path / "it"))
    for name, (parts, match) in REQUESTS.items():
        for rank, one in enumerate(parts):
            error, values = ranks[rank][name]
            (first,), (size,) = one.box.offset, one.box.shape
            if match is None:
                assert (error, values) == (None, WHOLE[first : first + size].tolist()), name
            else:
                assert error is not None, name
                assert "Nothing was loaded" in error
                assert re.search(match, error), error
                assert values == [-1.0] * size


def test_a_part_of_a_job_loads_alone_when_it_says_so(tmp_path: Path) -> None:
    url = str(tmp_path / "it")
    ckptlib.save({"w": WHOLE}, url, iteration=1)
    with pytest.raises(TilingError, match="check_coverage=False"):
        ckptlib.load({"w": part(4, 4)}, url)
    wanted = part(4, 4)
    ckptlib.load({"w": wanted}, url, check_coverage=False)
    assert torch.equal(wanted.data, WHOLE[4:])


def test_a_checkpointer_checks_one_structure_once(tmp_path: Path) -> None:
    job = Checkpointer(str(tmp_path / "run"), run="run")
    job.save({"w": WHOLE}, iteration=1)
    with mock.patch.object(planning, "make_write_plan", wraps=planning.make_write_plan) as planned:
        job.restore({"w": torch.zeros(8)})
        job.restore({"w": torch.zeros(8)})
        assert planned.call_count == 1
