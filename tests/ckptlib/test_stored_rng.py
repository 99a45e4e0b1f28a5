"""What each rank's streams continue from in checkpoints that Megatron-Core wrote (C37)."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib import Checkpointer, rng
from ckptlib.errors import RngStateError
from ckptlib.events import Notice
from ckptlib.sharding import ShardedObject
from ckptlib.source import Source, open_source
from ckptlib.stored_rng import StoredStreams, stored_streams
from ckptlib.topology import Topology
from tests.support.foreign import COLLECTION, SUBSET

NAMES = {"data-parallel-rng", "model-parallel-rng", "expert-parallel-rng"}


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    before = rng.capture()
    yield
    rng.restore(before)


def opened(name: str) -> Source:
    """A fixture; those that no clone has are skipped where the collection is absent."""
    for place in (SUBSET, COLLECTION):
        if (place / name).is_dir():
            return open_source(str(place / name / "ckpt" / "iter_0000010"))
    pytest.skip(f"the collection of Megatron fixtures is not at {COLLECTION}")


def found(source: Source, topology: Topology, rank: int) -> StoredStreams:
    stored = stored_streams(source, topology, rank)
    assert stored is not None
    return stored


class Running:
    """A tracker whose states are what CUDA's are: 16 bytes."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {name: torch.zeros(16, dtype=torch.uint8) for name in NAMES}

    def get_states(self) -> dict[str, Any]:
        return self.states

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states


def fingerprints(state: dict[str, Any]) -> dict[str, Any]:
    """The form of ``expected_rng.json``."""

    def sha(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    name, keys, *rest = state["np_rng_state"]
    return {
        "random_rng_state": sha(repr(state["random_rng_state"]).encode()),
        "np_rng_state": sha(keys.tobytes() + repr((name, *rest)).encode()),
        "torch_rng_state": sha(state["torch_rng_state"].numpy().tobytes()),
        "rng_tracker_states": {name: sha(t.numpy().tobytes()) for name, t in state["rng_tracker_states"].items()},
    }


def test_every_data_parallel_rank_gets_the_entry_that_megatron_listed_for_it() -> None:
    """``--data-parallel-random-init``: exactly the states that the ranks had, python, numpy and torch put back."""
    source = opened("td0192_tp1pp1dp2_dprng")
    expected = json.loads((Path(source.path).parents[1] / "expected_rng.json").read_text())
    for rank in range(2):
        stored = found(source, Topology(dp=2), rank)
        assert (stored.changed, stored.shared) == (None, False)
        running = Running()
        prepared = rng.prepare(stored.continuation, rng.RngTracker.of(running))
        assert (set(prepared.kept), prepared.seeded) == ({"default", *NAMES}, {})
        prepared.apply()
        now = rng.capture(rng.RngTracker.of(running))
        assert fingerprints(now) == {name: expected[rank][name] for name in fingerprints(now)}


def test_a_data_parallel_rank_more_than_megatron_listed_shares_what_is_equal_across_dp() -> None:
    source = opened("td0192_tp1pp1dp2_dprng")
    prepared = rng.prepare(found(source, Topology(dp=3), 2).continuation, rng.RngTracker.of(Running()))
    assert set(prepared.kept) == {"model-parallel-rng", "expert-parallel-rng"}
    assert set(prepared.seeded) == {"default", "data-parallel-rng"}


def test_one_entry_serves_all_data_parallel_ranks_of_its_cell() -> None:
    """Megatron's default, TP2 PP2: each cell its own; at another grid all is seeded, the same way every time."""
    source = opened("td0161_tp2pp2_w")
    topology = Topology(tp=2, pp=2, dp=2)
    kept = [found(source, topology, rank) for rank in range(8)]
    assert all(stored.shared and stored.changed is None for stored in kept)
    seen: dict[tuple[int, int], bytes] = {}
    for rank, stored in enumerate(kept):
        at = topology.coordinates(rank)
        assert stored.continuation.default is not None
        digest = rng.digest(stored.continuation.default)
        assert seen.setdefault((at.pp, at.tp), digest) == digest
    cells = [source.read_object(f"rng_state/shard_{pp}.{tp}_2.2")[0] for pp, tp in sorted(seen)]
    assert [seen[cell] for cell in sorted(seen)] == [rng.digest(cell) for cell in cells]

    other = [found(source, Topology(dp=2, cp=2), rank) for rank in (0, 1, 0)]
    assert {stored.changed for stored in other} == {"a (pp, tp) grid of 2 x 2 -> cp2-dp2"}
    assert all(set(stored.continuation.tracker.values()) == {None} for stored in other)
    first, second, again = (stored.continuation.seed("default") for stored in other)
    assert first == again != second


def test_the_expert_stream_of_one_shard_is_not_given_to_another() -> None:
    """EP2: Megatron keeps the first rank's alone, and would give it to both."""
    source = opened("td0192_tp1pp1dp2_moe_ep2_w")
    first, second = (found(source, Topology(dp=2, ep=2), rank).continuation for rank in range(2))
    assert first.tracker["expert-parallel-rng"] is not None
    assert second.tracker["expert-parallel-rng"] is None
    assert first.seed("expert-parallel-rng") != second.seed("expert-parallel-rng")
    assert second.tracker["model-parallel-rng"] is not None


def test_the_states_of_a_torch_dcp_checkpoint_are_put_together_again() -> None:
    source = opened("dcp0192_dp2_fsdp2_w")
    stored = found(source, Topology(dp=2), 1)
    assert (stored.changed, stored.shared) == (None, True)
    prepared = rng.prepare(stored.continuation, rng.RngTracker.of(Running()))
    assert set(prepared.kept) == {"default", *NAMES}


def test_a_restore_says_what_was_seeded_and_which_streams_have_no_place(tmp_path: Path) -> None:
    source = opened("td0161_tp2pp2_w")
    shutil.copytree(source.path, tmp_path / "run" / "iter_0000010")
    events: list[Notice] = []
    with Checkpointer(str(tmp_path / "run"), run="r", on_event=events.append) as job:
        job.restore({}, contents=["rng"], strict="return")
    seeded, dropped = (event for event in events if event.name.startswith("rng"))
    assert (seeded.name, [*seeded.data["seeded"]]) == ("rng_reseeded", ["default"])
    assert (dropped.name, set(dropped.data["dropped"])) == ("rng_streams_dropped", NAMES)


def test_damaged_grids_are_named(tmp_path: Path) -> None:
    url = str(tmp_path / "iter_0000001")
    state = rng.capture()
    ckptlib.save({"rng": ShardedObject(rng.KEY, [state], (2, 1), (0, 0))}, url, iteration=1)
    with pytest.raises(RngStateError, match="this cell of the grid is missing"):
        stored_streams(open_source(url), Topology(pp=2), 1)
    for i, (broken, message) in enumerate((([], "expected a list"), ([1], "expected a dict"), ([{}], "missing"))):
        url = str(tmp_path / f"iter_000001{i}")
        ckptlib.save({"rng": ShardedObject(rng.KEY, broken, (1, 1), (0, 0))}, url, iteration=1)
        with pytest.raises(RngStateError, match=message):
            stored_streams(open_source(url), Topology(), 0)


def test_a_checkpoint_without_any_has_none(tmp_path: Path) -> None:
    url = str(tmp_path / "iter_0000001")
    ckptlib.save({"w": torch.ones(2)}, url, iteration=1)
    assert stored_streams(open_source(url), Topology(), 0) is None
