"""C37: every rank's random streams come back as its own, or are re-seeded for all to see (real gloo ranks)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptlib import Checkpointer, Topology
from ckptlib.events import Notice
from ckptlib.source import open_source
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)

SAVED, DENSE = Topology(tp=2, dp=2, ep=2, etp=2), Topology(tp=2, dp=2)
TENSOR, EXPERT, DATA = "model-parallel-rng", "expert-parallel-rng", "data-parallel-rng"


class Tracker:
    """Megatron-Core's CUDA tracker, on the CPU: `model_parallel_cuda_manual_seed` gives it its streams."""

    def __init__(self, topology: Topology, rank: int, seed: int, graphable: bool = False) -> None:
        at, expert = topology.coordinates(rank), topology.expert_coordinates(rank)
        self.use_cudagraphable_rng = graphable
        seeds = {DATA: seed, TENSOR: seed + 2718 + at.tp, EXPERT: seed + 1024 + 100 * expert.ep + expert.etp}
        made = {name: torch.Generator().manual_seed(n) for name, n in seeds.items()}
        self.states_: dict[str, Any] = (
            {**made} if graphable else {name: generator.get_state() for name, generator in made.items()}
        )

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states


def streams(tracker: Tracker) -> dict[str, list[float]]:
    """What each stream would give next; nothing is consumed."""
    tensors = {
        name: state.get_state() if isinstance(state, torch.Generator) else state
        for name, state in tracker.states_.items()
    }
    drawn = {name: torch.rand(2, generator=torch.Generator().set_state(t)).tolist() for name, t in tensors.items()}
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    drawn["default"] = [random.random(), float(np.random.rand()), *torch.rand(2).tolist()]
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])
    return drawn


def save(rank: int, root: str) -> dict[str, list[float]]:
    replica = SAVED.coordinates(rank).dp
    torch.manual_seed(100 + replica)
    np.random.seed(200 + replica)
    random.seed(300 + replica)
    tracker = Tracker(SAVED, rank, 1234, graphable=True)
    for iteration, topology, every_rank in ((10, SAVED, False), (20, SAVED, True), (30, DENSE, False)):
        with Checkpointer(
            root, run="r", topology=topology, rng_tracker=tracker, data_parallel_random_init=every_rank
        ) as checkpointer:
            checkpointer.save({"w": torch.ones(2)}, iteration=iteration)
    return streams(tracker)


def restore(rank: int, root: str, places: list[tuple[int, Topology]]) -> list[dict[str, Any]]:
    """Iterations on topologies, one after the other, each time from streams that are somewhere else."""
    results = []
    for number, (iteration, topology) in enumerate(places):
        torch.manual_seed(number)
        tracker = Tracker(topology, rank, number)
        events: list[Notice] = []
        with Checkpointer(
            root, run="r", topology=topology, rng_tracker=tracker, on_event=events.append
        ) as checkpointer:
            checkpointer.restore({"w": torch.zeros(2)}, at=iteration)
        results.append({"streams": streams(tracker), "events": [(event.name, dict(event.data)) for event in events]})
    return results


def of(ranks: list[dict[str, Any]], stream: str) -> list[tuple[float, ...]]:
    return [tuple(rank["streams"][stream]) for rank in ranks]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, list[float]]]]:
    """Saved by four ranks, TP2 DP2, experts over EP2 x ETP2; what each would have drawn next."""
    root = str(tmp_path_factory.mktemp("run"))
    return root, run_ranks(4, save, root)


def test_c37_every_rank_continues_exactly_or_deterministically(
    saved: tuple[str, list[dict[str, list[float]]]],
) -> None:
    root, before = saved
    other = Topology(dp=4, ep=4)
    results = run_ranks(4, restore, root, [(10, SAVED), (10, other), (10, other)])
    same, first, second = ([rank[i] for rank in results] for i in range(3))

    assert [rank["streams"] for rank in same] == before
    assert [rank["events"] for rank in same] == [[]] * 4

    assert first == second, "deterministic, whatever the streams were"
    assert len({*of(first, "default")}) == 4, "no TP group: every rank its own"
    assert len({*of(first, DATA)}) == 4
    assert len({*of(first, TENSOR)}) == 1, "equal across DP"
    assert len({*of(first, EXPERT)}) == 4, "EP4: another in every expert shard"
    for rank, (name, data) in enumerate(rank["events"][0] for rank in first):
        assert (name, data["rank"], data["kept"]) == ("rng_reseeded", rank, [])
        assert set(data["seeded"]) == {"default", DATA, TENSOR, EXPERT}
    assert not {*of(first, "default")} & {tuple(rank["default"]) for rank in before}


def test_c37_ranks_that_are_left_keep_their_own(saved: tuple[str, list[dict[str, list[float]]]]) -> None:
    """DP2 -> DP1: nothing is seeded, and it is said that other ranks' streams are gone. EP2 -> EP1: all is seeded."""
    root, before = saved
    places = [(30, Topology(tp=2)), (10, Topology(tp=2, etp=2))]
    kept, seeded = zip(*run_ranks(2, restore, root, places), strict=True)
    assert [rank["streams"] for rank in kept] == before[:2]
    assert [rank["events"][0][1]["seeded"] for rank in kept] == [{}, {}]
    assert len({*of(seeded, "default")}) == len({*of(seeded, DATA)}) == 1, "one TP group"
    assert len({*of(seeded, TENSOR)}) == len({*of(seeded, EXPERT)}) == 2
    assert {name for rank in (*kept, *seeded) for name, _ in rank["events"]} == {"rng_reseeded"}


def test_c37_megatron_finds_the_states_of_all_data_parallel_ranks_when_it_wants_them(
    saved: tuple[str, list[dict[str, list[float]]]],
) -> None:
    """One entry in each cell of the (pp, tp) grid, and DP entries under ``data_parallel_random_init``."""
    root, _ = saved
    for iteration, entries in ((10, 1), (20, 2)):
        source = open_source(str(Path(root) / f"iter_{iteration:07d}"))
        for rank in range(4):
            own = source.read_object(f"rng_state_by_rank/shard_{rank}_4")
            at = SAVED.coordinates(rank)
            cell = source.read_object(f"rng_state/shard_0.{at.tp}_1.2")
            assert len(cell) == entries
            if at.dp < entries:
                assert torch.equal(cell[at.dp]["torch_rng_state"], own["torch_rng_state"])
                assert isinstance(cell[at.dp]["rng_tracker_states"][TENSOR], torch.Tensor), "no generator is stored"
