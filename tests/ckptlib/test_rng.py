"""RNG state per rank: captured, put back, and deterministic where it cannot be put back."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch

from ckptlib import rng
from ckptlib.errors import StateError
from ckptlib.safe_pickle import dump_object, load_object
from ckptlib.sharding import is_main_replica
from ckptlib.topology import Topology


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    before = rng.capture()
    yield
    rng.restore(before)


def draws() -> tuple[object, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.normal()),
        np.random.rand(2).tolist(),
        torch.rand(3).tolist(),
    )


class Tracker:
    def __init__(self) -> None:
        self.states = {"model-parallel": torch.arange(16, dtype=torch.uint8)}

    def as_tracker(self) -> rng.RngTracker:
        def put(states: Mapping[str, torch.Tensor]) -> None:
            self.states = dict(states)

        return rng.RngTracker(lambda: self.states, put)


def test_all_generators_continue_as_if_nothing_had_happened() -> None:
    random.gauss(0, 1)  # leaves half a pair behind in the state
    np.random.normal()
    state = load_object(dump_object(rng.capture(), "rng"), "rng")  # as it comes from storage
    expected = [draws() for _ in range(3)]
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    rng.restore(state)
    assert [draws() for _ in range(3)] == expected


def test_named_trackers_are_part_of_the_state() -> None:
    one, two = Tracker(), Tracker()
    two.states = {"model-parallel": torch.zeros(16, dtype=torch.uint8)}
    rng.restore(rng.capture(one.as_tracker()), two.as_tracker())
    assert torch.equal(two.states["model-parallel"], one.states["model-parallel"])


def test_a_tracker_without_stored_states_is_refused_before_anything_changes() -> None:
    state = rng.capture()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(StateError, match="no tracker states"):
        rng.restore(state, Tracker().as_tracker())
    with pytest.raises(StateError, match="np_rng_state missing"):
        rng.restore({name: part for name, part in state.items() if name != "np_rng_state"})
    assert torch.equal(torch.get_rng_state(), before)


def test_a_reseed_is_deterministic_and_differs_by_rank() -> None:
    """C37: streams of ranks that have no state of their own are not correlated."""
    state = rng.capture()
    seen = {}
    for rank in (0, 1, 2, 0):
        seed = rng.reseed(state, rank)
        found = (seed, draws())
        assert seen.setdefault(rank, found) == found
    assert len({repr(found) for found in seen.values()}) == 3
    torch.manual_seed(1)
    other = rng.capture()
    assert rng.reseed(other, 0) != seen[0][0]


def test_every_rank_stores_its_own_state_and_one_per_model_parallel_place_for_megatron() -> None:
    """C37: Megatron's grid is (pp, tp) with the first data-parallel rank's state as the main replica."""
    topology = Topology(tp=2, dp=2, pp=2)
    state = rng.capture()
    cells = [rng.sharded(state, rank, 8, topology) for rank in range(8)]
    assert {cell[rng.KEY_BY_RANK].unique_key for cell in cells} == {f"rng_state_by_rank/shard_{r}_8" for r in range(8)}
    main = [cell[rng.KEY].unique_key for cell in cells if is_main_replica(cell[rng.KEY].replica_id)]
    assert sorted(main) == [f"rng_state/shard_{p}.{t}_2.2" for p in range(2) for t in range(2)]
    assert isinstance(cells[0][rng.KEY].data, list)


def test_without_a_topology_the_first_rank_stores_the_state_for_megatron() -> None:
    cells = [rng.sharded(rng.capture(), rank, 2, None)[rng.KEY] for rank in range(2)]
    assert [is_main_replica(cell.replica_id) for cell in cells] == [True, False]
    assert {cell.unique_key for cell in cells} == {"rng_state/shard_0.0_1.1"}
