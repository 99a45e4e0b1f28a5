"""Sizes of the parallel axes, and where each rank stands."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptlib.errors import StateError
from ckptlib.topology import Coordinates, ExpertCoordinates, Topology

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


def megatron_groups(order: list[str], sizes: dict[str, int], axis: str) -> list[list[int]]:
    """The rank groups of an axis, as Megatron-Core's `RankGenerator.get_ranks` makes them (its own formula).

    A rank is the sum of index x stride, axes in the order given, the first with stride 1
    (`generate_masked_orthogonal_rank_groups`).
    """
    strides, stride = {}, 1
    for name in order:
        strides[name] = stride
        stride *= sizes[name]
    others = [name for name in order if name != axis]
    starts = [0]
    for name in others:
        starts = [start + index * strides[name] for index in range(sizes[name]) for start in starts]
    return sorted([start + index * strides[axis] for index in range(sizes[axis])] for start in starts)


EVERY_SIZE = st.tuples(SIZES, SIZES, SIZES, SIZES, SIZES, SIZES)


@given(EVERY_SIZE)
def test_dense_and_expert_groups_are_megatrons(every: tuple[int, ...]) -> None:
    """tp-cp-dp-pp for the dense layers, etp-ep-dp-pp for the experts: two counts of the same ranks."""
    tp, cp, dp, pp, ep, etp = every
    assume((tp * cp * dp) % (ep * etp) == 0)
    topology = Topology(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp)
    ranks = range(topology.world_size)
    dense = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    expert = {"etp": etp, "ep": ep, "dp": topology.expert_dp, "pp": pp}
    for place_of, sizes in ((topology.coordinates, dense), (topology.expert_coordinates, expert)):
        places = [asdict(place_of(rank)) for rank in ranks]
        for axis in sizes:
            groups: dict[tuple[int, ...], list[int]] = {}
            for rank, place in enumerate(places):
                groups.setdefault(tuple(index for name, index in place.items() if name != axis), []).append(rank)
            assert sorted(groups.values()) == megatron_groups([*sizes], sizes, axis)
    for rank in ranks:
        assert topology.rank_at(topology.coordinates(rank)) == rank
        assert topology.expert_rank_at(topology.expert_coordinates(rank)) == rank


def test_a_place_outside_the_topology_is_refused_by_name() -> None:
    topology = Topology(tp=2, dp=2, ep=2)
    with pytest.raises(StateError, match="dp=2 is outside"):
        topology.rank_at(Coordinates(tp=0, cp=0, dp=2, pp=0))
    with pytest.raises(StateError, match="expert ep=2 is outside"):
        topology.expert_rank_at(ExpertCoordinates(etp=0, ep=2, dp=0, pp=0))


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
