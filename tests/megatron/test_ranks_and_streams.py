"""Rank coordinates and RNG trackers, judged by the real Megatron-Core 0.19.2."""

from __future__ import annotations

import itertools
import json
import subprocess
from typing import Any

import pytest

from ckptlib.topology import Topology
from tests.megatron.judging import JUDGE_PYTHON, REPOSITORY

pytestmark = pytest.mark.megatron

AXES = ("tp", "cp", "dp", "pp", "ep", "etp")
TOPOLOGIES = [
    dict(zip(AXES, sizes, strict=True))
    for sizes in itertools.product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2), (1, 2, 4), (1, 2, 3))
    if (sizes[0] * sizes[1] * sizes[2]) % (sizes[4] * sizes[5]) == 0
]


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """One process, all questions."""
    done = subprocess.run(
        [str(JUDGE_PYTHON), "-m", "tests.megatron.real_ranks"],
        input=json.dumps({"topologies": TOPOLOGIES}),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def ours(topology: Topology, axis: str) -> list[list[int]]:
    """The ranks that differ on one axis alone."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(topology.world_size):
        at, expert = topology.coordinates(rank), topology.expert_coordinates(rank)
        dense = {"tp": at.tp, "cp": at.cp, "dp": at.dp, "pp": at.pp}
        experts = {"etp": expert.etp, "ep": expert.ep, "expert_dp": expert.dp, "pp": expert.pp}
        place = dense if axis in dense else experts
        found.setdefault(tuple(index for name, index in place.items() if name != axis), []).append(rank)
    return sorted(found.values())


def test_our_coordinates_make_megatrons_groups(answer: dict[str, Any]) -> None:
    assert len(TOPOLOGIES) > 150
    for sizes, groups in zip(TOPOLOGIES, answer["groups"], strict=True):
        topology = Topology(**sizes)
        assert {axis: ours(topology, axis) for axis in groups} == {
            axis: sorted(ranks) for axis, ranks in groups.items()
        }


def test_megatrons_tracker_gets_its_streams_back_in_the_form_it_uses(answer: dict[str, Any]) -> None:
    assert answer["trackers"] == [
        {"graph safe": graphable, "form": "Generator" if graphable else "Tensor", "same": True}
        for _saved in (False, True)
        for graphable in (False, True)
    ]
