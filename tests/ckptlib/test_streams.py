"""Which random streams are equal and which differ, on any topology, and what each continues from (C37)."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from ckptlib import streams
from ckptlib.topology import Topology

BASE = bytes(32)
NAMES = (streams.DEFAULT, streams.DATA_PARALLEL, streams.MODEL_PARALLEL, streams.EXPERT_PARALLEL, "of-ones-own")
SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    tp, cp, dp, pp = (draw(SIZES) for _ in range(4))
    assume(tp * cp * dp * pp <= 64)
    stage = tp * cp * dp
    etp = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, stage // etp + 1) if stage // etp % n == 0]))
    return Topology(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, vpp=draw(st.sampled_from([1, 2])))


def seeds(topology: Topology, stream: str) -> list[int]:
    return [streams.seed_of(BASE, stream, topology, rank) for rank in range(topology.world_size)]


def groups(values: list[object]) -> set[frozenset[int]]:
    """The sets of ranks that have the same."""
    return {frozenset(rank for rank, other in enumerate(values) if other == value) for value in values}


@given(topologies())
def test_seeded_streams_are_equal_and_differ_as_megatrons_do(topology: Topology) -> None:
    """Default: equal in a TP group. Tensor-parallel: by TP rank, equal across DP and CP. Expert: by EP x ETP."""
    ranks = range(topology.world_size)
    dense = [topology.coordinates(rank) for rank in ranks]
    expert = [topology.expert_coordinates(rank) for rank in ranks]
    expected: dict[str, list[object]] = {
        streams.DEFAULT: [(at.pp, at.dp, at.cp) for at in dense],
        streams.DATA_PARALLEL: [(at.pp, at.dp, at.cp) for at in dense],
        streams.MODEL_PARALLEL: [(at.pp, at.tp) for at in dense],
        streams.EXPERT_PARALLEL: [(at.pp, at.ep, at.etp) for at in expert],
        "of-ones-own": [*ranks],
    }
    for stream, same in expected.items():
        assert groups([*seeds(topology, stream)]) == groups(same), stream
    every = [seed for stream in NAMES for seed in {*seeds(topology, stream)}]
    assert len(every) == len({*every}), "no two streams are one"
    assert all(0 <= seed < 2**63 for seed in every)


@given(topologies(), topologies())
def test_what_must_be_equal_is_equal_after_any_change_of_topology(saved: Topology, now: Topology) -> None:
    """Two ranks of one group continue from saved ranks of one group, or from the same seed; others from others."""
    for stream in NAMES:
        origins: dict[object, set[object]] = {}
        for rank in range(now.world_size):
            of = streams.continues_from(stream, saved, now, rank)
            origin = ("seed",) if of is None else streams.place_of(stream, saved, of)
            origins.setdefault(streams.place_of(stream, now, rank), set()).add(origin)
        assert all(len(origin) == 1 for origin in origins.values()), stream
        kept = [origin for (origin,) in origins.values() if origin != ("seed",)]
        assert len(kept) == len({*kept}), f"{stream}: two groups would draw the same numbers"


@given(topologies(), SIZES)
def test_the_same_places_keep_their_own_and_another_dp_keeps_what_it_can(topology: Topology, dp: int) -> None:
    for rank in range(topology.world_size):
        for stream in NAMES:
            assert streams.continues_from(stream, topology, replace(topology, vpp=7), rank) == rank
    assume(topology.tp * topology.cp * dp % (topology.ep * topology.etp) == 0)
    now = replace(topology, dp=dp)
    for rank in range(now.world_size):
        at = now.coordinates(rank)
        for stream in NAMES:
            of = streams.continues_from(stream, topology, now, rank)
            if at.dp < topology.dp:
                assert of == topology.rank_at(at), "a rank that was there keeps its own"
            elif stream in (streams.MODEL_PARALLEL, streams.EXPERT_PARALLEL):
                assert of is not None, "it is equal across DP"
            else:
                assert of is None


@given(topologies(), topologies())
def test_any_other_change_seeds_every_stream(saved: Topology, now: Topology) -> None:
    assume(replace(saved, dp=1, ep=1, etp=1) != replace(now, dp=1, ep=1, etp=1, vpp=saved.vpp))
    assert {streams.continues_from(stream, saved, now, rank) for stream in NAMES for rank in range(now.world_size)} == {
        None
    }


def test_a_seed_is_what_the_design_says_and_another_checkpoint_gives_another() -> None:
    """Pinned: a change of the rule would change resumed trainings."""
    topology = Topology(tp=2, dp=2)
    assert streams.seed_of(BASE, streams.DEFAULT, topology, 3) == PINNED
    assert streams.seed_of(b"\1" + BASE[1:], streams.DEFAULT, topology, 3) != PINNED
    assert streams.seed_of(BASE, streams.DEFAULT, Topology(dp=4), 1) == PINNED, "a place, whatever stands around it"


PINNED = 6566861270307182029


@given(topologies(), st.integers(1, 16))
def test_megatrons_cells_give_each_rank_its_entry(now: Topology, entries: int) -> None:
    """One entry serves all; DP entries are found by DP rank, as Megatron does; DP x CP entries by both."""
    grid = (now.pp, now.tp)
    for rank in range(now.world_size):
        at = now.coordinates(rank)
        for stream in (streams.DEFAULT, streams.MODEL_PARALLEL):
            cell = streams.cell_of(stream, grid, entries, now, rank)
            if cell is None:
                assert stream == streams.DEFAULT
                assert at.dp >= entries > 1
                continue
            assert (cell.pp, cell.tp) == (at.pp, at.tp)
            if entries == 1:
                assert cell.entry == 0
            elif entries == now.dp * now.cp:
                assert cell.entry == streams.entry_of(at, now)
            else:
                assert cell.entry == (at.dp if at.dp < entries else 0)
        assert streams.cell_of(streams.DEFAULT, (now.pp + 1, now.tp), entries, now, rank) is None


@given(topologies())
def test_no_two_expert_shards_continue_from_one_entry(now: Topology) -> None:
    for entries in {1, now.dp, now.dp * now.cp}:
        seen: dict[object, object] = {}
        for rank in range(now.world_size):
            cell = streams.cell_of(streams.EXPERT_PARALLEL, (now.pp, now.tp), entries, now, rank)
            if cell is not None:
                place = streams.place_of(streams.EXPERT_PARALLEL, now, rank)
                assert seen.setdefault(cell, place) == place


def test_the_full_list_begins_with_what_megatron_indexes_by_dp_rank() -> None:
    topology = Topology(cp=2, dp=3)
    numbers = [streams.entry_of(topology.coordinates(rank), topology) for rank in range(6)]
    assert numbers == [0, 3, 1, 4, 2, 5]
