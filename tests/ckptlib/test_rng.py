"""RNG state per rank: captured, put back, and deterministic where it cannot be put back."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from ckptlib import rng
from ckptlib.errors import RngStateError
from ckptlib.safe_objects import Foreign
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
    """As Megatron-Core's `CudaRNGStatesTracker`: tensors, or generators when CUDA graphs are to capture them."""

    def __init__(self, states: Mapping[str, torch.Tensor | torch.Generator], graphable: bool = False) -> None:
        self.states_ = dict(states)
        self.use_cudagraphable_rng = graphable

    def get_states(self) -> dict[str, torch.Tensor | torch.Generator]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor | torch.Generator]) -> None:
        self.states_ = states

    def draws(self, name: str) -> list[float]:
        """What the stream gives next."""
        state = self.states_[name]
        if isinstance(state, torch.Tensor):
            state = torch.Generator().set_state(state)
        return torch.rand(3, generator=state).tolist()


def cpu_state(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def as_stored(tracker: Tracker | None = None) -> Mapping[str, Any]:
    """The state of this process as it comes from storage."""
    captured = rng.capture(None if tracker is None else rng.RngTracker.of(tracker))
    return dict(load_object(dump_object(captured, "rng"), "rng"))


def continuation(state: Mapping[str, Any], **seeds: int) -> rng.Continuation:
    """All that is stored continues; what is not has these seeds."""
    return rng.Continuation(state, rng.tracker_tensors(state), lambda name: seeds[name.replace("-", "_")])


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


@pytest.mark.parametrize("stored_as_generators", [False, True])
@pytest.mark.parametrize("running_as_generators", [False, True])
def test_streams_go_on_whatever_form_the_trackers_have(stored_as_generators: bool, running_as_generators: bool) -> None:
    """A tracker may hold tensors or graphable generators, before and after; what it draws is the same."""
    make = {
        False: lambda seed: cpu_state(seed),
        True: lambda seed: torch.Generator().manual_seed(seed),
    }
    saved = Tracker({"model-parallel-rng": make[stored_as_generators](5)}, stored_as_generators)
    state = as_stored(saved)
    expected = saved.draws("model-parallel-rng")
    running = Tracker({"model-parallel-rng": make[running_as_generators](6)}, running_as_generators)
    rng.restore(state, rng.RngTracker.of(running))
    form = torch.Generator if running_as_generators else torch.Tensor
    assert isinstance(running.states_["model-parallel-rng"], form)
    assert running.draws("model-parallel-rng") == expected


def test_a_tracker_without_streams_yet_gets_the_stored_ones_in_its_form() -> None:
    state = as_stored(Tracker({"model-parallel-rng": cpu_state(5)}))
    for graphable, form in ((True, torch.Generator), (False, torch.Tensor)):
        running = Tracker({}, graphable)
        rng.restore(state, rng.RngTracker.of(running))
        assert isinstance(running.states_["model-parallel-rng"], form)


def test_generators_that_megatron_stored_as_they_are_are_read() -> None:
    """Also those of a GPU, which are not made here: only their state is taken (R5)."""
    state = dict(rng.capture())
    of_gpu = Foreign("torch._C", "Generator", (torch.device("cuda"),), (7, 0, cpu_state(7)))
    state["rng_tracker_states"] = {"a": torch.Generator().manual_seed(5), "b": of_gpu}
    tensors = rng.tracker_tensors(state)
    assert torch.equal(tensors["a"], cpu_state(5))
    assert torch.equal(tensors["b"], cpu_state(7))


def test_a_captured_stream_is_a_copy() -> None:
    tracker = Tracker({"s": cpu_state(5)})
    captured = rng.capture(rng.RngTracker.of(tracker))["rng_tracker_states"]["s"]
    live = tracker.states_["s"]
    assert isinstance(live, torch.Tensor)
    live.zero_()
    assert torch.equal(captured, cpu_state(5))


def test_an_empty_tracker_is_an_error_that_says_what_to_do() -> None:
    """At the save, and at the resume of a checkpoint that has none."""
    empty = rng.RngTracker.of(Tracker({}))
    with pytest.raises(RngStateError, match="Seed it first"):
        rng.capture(empty)
    state = rng.capture()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(RngStateError, match="no tracker states"):
        rng.restore(state, rng.RngTracker.of(Tracker({"s": cpu_state(1)})))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("np_rng_state", None, "np_rng_state missing"),
        ("torch_rng_state", torch.zeros(3, dtype=torch.uint8), "does not fit its generator"),
        ("random_rng_state", (3, (1, 2), None), "does not fit its generator"),
        ("rng_tracker_states", {"s": "not a state"}, "stream 's' is a str"),
        ("rng_tracker_states", {"s": torch.zeros(16, dtype=torch.uint8)}, "another kind of device"),
        ("rng_tracker_states", {"s": torch.zeros(5056)}, "no uint8 tensor"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(part: str, value: object, message: str) -> None:
    tracker = Tracker({"s": cpu_state(1)})
    state = dict(rng.capture(rng.RngTracker.of(tracker)))
    if value is None:
        del state[part]
    else:
        state[part] = value
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(RngStateError, match=message):
        rng.restore(state, rng.RngTracker.of(tracker))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.equal(torch.as_tensor(tracker.states_["s"]), cpu_state(1))


def test_a_graphable_stream_that_fits_no_generator_is_refused() -> None:
    state = as_stored(Tracker({"s": torch.zeros(16, dtype=torch.uint8)}))
    with pytest.raises(RngStateError, match="no state of a generator on cpu"):
        rng.restore(state, rng.RngTracker.of(Tracker({}, graphable=True)))


def test_streams_that_are_not_stored_are_seeded_and_those_without_a_place_named() -> None:
    """Another model after the resume: it has experts now, and no stream of the older name."""
    state = as_stored(Tracker({"model-parallel-rng": cpu_state(5), "old": cpu_state(6)}))
    running = Tracker({"model-parallel-rng": cpu_state(1), "expert-parallel-rng": cpu_state(2)})
    prepared = rng.prepare(continuation(state, expert_parallel_rng=77), rng.RngTracker.of(running))
    assert prepared.kept == ("default", "model-parallel-rng")
    assert prepared.seeded == {"expert-parallel-rng": 77}
    assert prepared.dropped == ("old",)
    prepared.apply()
    assert set(running.states_) == {"model-parallel-rng", "expert-parallel-rng"}
    assert torch.equal(torch.as_tensor(running.states_["expert-parallel-rng"]), cpu_state(77))
    assert rng.prepare(continuation(state)).dropped == ("model-parallel-rng", "old"), "no tracker has no place for any"


def test_a_seeded_stream_has_the_form_of_its_tracker() -> None:
    seed = 0x0102030405060708
    plan = rng.Continuation(None, {"s": None}, lambda name: seed)
    cuda = Tracker({"s": torch.zeros(16, dtype=torch.uint8)})
    rng.prepare(plan, rng.RngTracker.of(cuda)).apply()
    assert torch.as_tensor(cuda.states_["s"]).tolist() == [8, 7, 6, 5, 4, 3, 2, 1, *[0] * 8], "Philox: seed, offset"
    graphable = Tracker({"s": torch.Generator()}, graphable=True)
    rng.prepare(plan, rng.RngTracker.of(graphable)).apply()
    assert graphable.draws("s") == torch.rand(3, generator=torch.Generator().manual_seed(seed)).tolist()
    unknown = Tracker({"s": torch.zeros(7, dtype=torch.uint8)})
    with pytest.raises(RngStateError, match="7 bytes"):
        rng.prepare(plan, rng.RngTracker.of(unknown))


def test_a_seeded_default_stream_is_deterministic() -> None:
    found = []
    for seed in (1, 2, 1):
        rng.prepare(rng.Continuation(None, {}, lambda name, seed=seed: seed)).apply()
        found.append(draws())
    assert found[0] == found[2] != found[1]


def test_the_digest_that_seeds_are_derived_from_covers_every_part() -> None:
    state = as_stored(Tracker({"s": cpu_state(5)}))
    digest = rng.digest(state)
    assert rng.digest(as_stored(Tracker({"s": cpu_state(5)}))) == digest
    assert len(digest) == 32
    others = [
        {**state, "random_rng_state": random.Random(1).getstate()},
        {**state, "np_rng_state": np.random.RandomState(1).get_state()},
        {**state, "torch_rng_state": cpu_state(1)},
        {**state, "cuda_rng_state": torch.zeros(16, dtype=torch.uint8)},
        {**state, "rng_tracker_states": {"s": cpu_state(6)}},
        {**state, "rng_tracker_states": {"t": cpu_state(5)}},
    ]
    assert len({digest, *map(rng.digest, others)}) == 7


def test_a_gpu_without_a_stored_state_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved on a machine without CUDA, resumed on one that has it."""
    state = as_stored()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeded.append)
    prepared = rng.prepare(continuation(state, default=9))
    assert (prepared.kept, prepared.seeded) == (("default",), {"cuda": 9})
    prepared.apply()
    assert seeded == [9]


def test_every_rank_stores_its_own_state_and_one_per_model_parallel_place_for_megatron() -> None:
    """C37: Megatron's grid is (pp, tp) with the first data-parallel rank's state as the main replica."""
    topology = Topology(tp=2, dp=2, pp=2)
    state = rng.capture()
    cells = [rng.sharded(state, rank, 8, topology) for rank in range(8)]
    assert {cell[rng.KEY_BY_RANK].unique_key for cell in cells} == {f"rng_state_by_rank/shard_{r}_8" for r in range(8)}
    main = [cell[rng.KEY].unique_key for cell in cells if is_main_replica(cell[rng.KEY].replica_id)]
    assert sorted(main) == [f"rng_state/shard_{p}.{t}_2.2" for p in range(2) for t in range(2)]
    assert isinstance(cells[0][rng.KEY].data, list)


def test_the_full_grid_lists_every_rank_of_a_cell_with_the_context_parallel_axis_outside() -> None:
    """Megatron indexes by DP rank alone: the entries of CP rank 0 come first. Rank 0 writes, the others do not."""
    topology = Topology(tp=2, cp=2, dp=2)
    states = [{**rng.capture(), "cuda_rng_state": rank} for rank in range(8)]
    first = rng.sharded(states[0], 0, 8, topology, states, every_rank=True)
    listed = {cell.global_offset: [entry["cuda_rng_state"] for entry in cell.data] for cell in first[rng.KEY].values()}
    assert listed == {(0, 0): [0, 4, 2, 6], (0, 1): [1, 5, 3, 7]}
    assert [*rng.sharded(states[3], 3, 8, topology, None, every_rank=True)] == [rng.KEY_BY_RANK]


def test_without_a_topology_the_first_rank_stores_the_state_for_megatron() -> None:
    cells = [rng.sharded(rng.capture(), rank, 2, None)[rng.KEY] for rank in range(2)]
    assert [is_main_replica(cell.replica_id) for cell in cells] == [True, False]
    assert {cell.unique_key for cell in cells} == {"rng_state/shard_0.0_1.1"}
