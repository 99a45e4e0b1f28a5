"""Sizes of the parallel axes, and where each rank stands."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptlib.errors import StateError
from ckptlib.topology import Coordinates, Topology

SIZES = st.integers(1, 4)


@given(SIZES, SIZES, SIZES, SIZES)
def test_every_rank_has_its_own_coordinates_with_tp_fastest_and_pp_slowest(tp: int, cp: int, dp: int, pp: int) -> None:
    topology = Topology(tp=tp, cp=cp, dp=dp, pp=pp)
    ranks = range(topology.world_size)
    seen = {topology.coordinates(rank) for rank in ranks}
    assert len(seen) == topology.world_size == tp * cp * dp * pp
    for rank in ranks:
        at = topology.coordinates(rank)
        assert rank == at.tp + tp * (at.cp + cp * (at.dp + dp * at.pp))


def test_the_order_is_megatrons_default() -> None:
    assert Topology(tp=2, pp=2, dp=2).coordinates(5) == Coordinates(tp=1, cp=0, dp=0, pp=1)


@given(SIZES, SIZES, SIZES, SIZES)
def test_the_ranks_of_one_tensor_parallel_group_are_one_replica(tp: int, cp: int, dp: int, pp: int) -> None:
    topology = Topology(tp=tp, cp=cp, dp=dp, pp=pp)
    groups: dict[int, set[int]] = {}
    for rank in range(topology.world_size):
        groups.setdefault(topology.replica(rank), set()).add(topology.coordinates(rank).tp)
    assert list(groups.values()) == [{*range(tp)}] * (cp * dp * pp)


def test_a_rank_outside_the_world_is_refused() -> None:
    for rank in (-1, 4):
        with pytest.raises(StateError, match=f"rank {rank} is outside"):
            Topology(tp=2, dp=2).coordinates(rank)


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None])
def test_a_size_that_is_no_positive_integer_is_refused_by_name(value: object) -> None:
    with pytest.raises(StateError, match="dp="):
        Topology(dp=value)  # type: ignore[arg-type]


def test_expert_sizes_must_divide_the_ranks_of_a_pipeline_stage() -> None:
    assert Topology(tp=2, dp=2, ep=4).ep == 4
    with pytest.raises(StateError, match="ep"):
        Topology(tp=2, dp=2, ep=3)


@given(SIZES, SIZES, SIZES, SIZES, SIZES, SIZES, SIZES)
def test_a_topology_survives_json_and_ignores_axes_of_the_future(
    tp: int, pp: int, vpp: int, cp: int, ep: int, etp: int, dp: int
) -> None:
    assume((tp * cp * dp) % (ep * etp) == 0)
    topology = Topology(tp, pp, vpp, cp, ep, etp, dp)
    assert Topology.from_json({**topology.to_json(), "hyper": 7}) == topology


def test_people_see_only_the_axes_that_are_used() -> None:
    assert str(Topology(tp=2, dp=2)) == "tp2-dp2"
    assert str(Topology()) == "tp1"
