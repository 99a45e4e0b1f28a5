"""The facade on real ranks: RNG per rank, other topologies, re-saves with fewer ranks, and who may speak."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import ckptlib
from ckptlib import Checkpointer, ShardedTensor, Topology, commit
from ckptlib.events import AttemptEvent, CommitEvent, Notice
from ckptlib.storage import PosixStorage
from tests.support.ranks import run_ranks, try_ranks
from tests.support.roots import newest, tracker

pytestmark = pytest.mark.timeout(300)


def sharded(rank: int, world: int, fill: float) -> dict[str, Any]:
    """Twelve elements, split evenly."""
    data = torch.full((12 // world,), fill)
    return {"model": {"w": ShardedTensor.from_rank_offsets("w", data, (0, rank, world))}}


def draws() -> list[float]:
    """The next numbers of all three generators."""
    return [random.random(), float(np.random.rand()), *torch.rand(2).tolist()]


class Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def attempt_started(self, event: AttemptEvent) -> None:
        self.heard.append(f"attempt {event.attempt}")

    def committed(self, event: CommitEvent) -> None:
        self.heard.append(f"commit {event.manifest.begin.iteration}")

    def close(self, timeout: float) -> None:
        self.heard.append("close")


def save_with_own_rng(rank: int, root: str, world: int, topology: Topology, iteration: int) -> dict[str, Any]:
    """Every rank has streams of its own; what they would draw next is returned."""
    torch.manual_seed(100 + rank)
    np.random.seed(200 + rank)
    random.seed(300 + rank)
    listener = Listener()
    with Checkpointer(root, run="run", topology=topology, listeners=[listener]) as checkpointer:
        result = checkpointer.save(
            sharded(rank, world, float(iteration)), iteration=iteration, rerun_state={"rank": rank}
        )
    return {"next": draws(), "heard": listener.heard, "save_id": result.save_id, "bytes": result.bytes}


def restore_with_rng(rank: int, root: str, world: int, topology: Topology, at: int) -> dict[str, Any]:
    torch.manual_seed(0)
    events: list[Notice] = []
    checkpointer = Checkpointer(root, run="run", topology=topology, on_event=events.append)
    state = sharded(rank, world, -1.0)
    restored = checkpointer.restore(state, at=at)
    assert torch.equal(state["model"]["w"].data, torch.full((12 // world,), float(at)))
    notices = [(event.name, event.data.get("seed")) for event in events]
    return {"next": draws(), "events": notices, "rerun": restored.rerun_state, "attempt": checkpointer.attempt}


def test_every_rank_gets_its_own_random_streams_back_or_is_reseeded_for_all_to_see(tmp_path: Path) -> None:
    """C37: saved on 4, restored on 4: each its own; on 2, and from 2 on 4: deterministic, with an event.

    Reseeded streams differ, except within a tensor-parallel group: its ranks draw the same dropout.
    """
    root = str(tmp_path / "run")
    four, two = Topology(tp=2, dp=2), Topology(dp=2)
    saved = run_ranks(4, save_with_own_rng, root, 4, four, 10)
    assert len({tuple(rank["next"]) for rank in saved}) == 4
    assert [rank["heard"] for rank in saved] == [["attempt 1", "commit 10", "close"], [], [], []]
    assert len({(rank["save_id"], rank["bytes"]) for rank in saved}) == 1

    same = run_ranks(4, restore_with_rng, root, 4, four, 10)
    assert [rank["next"] for rank in same] == [rank["next"] for rank in saved]
    assert [rank["events"] for rank in same] == [[]] * 4
    assert [rank["rerun"] for rank in same] == [{"rank": rank} for rank in range(4)]
    assert {rank["attempt"] for rank in same} == {2}

    fewer = [run_ranks(2, restore_with_rng, root, 2, two, 10) for _ in range(2)]
    assert [rank["next"] for rank in fewer[0]] == [rank["next"] for rank in fewer[1]]
    assert fewer[0][0]["next"] != fewer[0][1]["next"]
    for rank in fewer[0]:
        assert [name for name, _ in rank["events"]] == ["rng_reseeded", "rerun_state_dropped"]
        assert rank["rerun"] is None

    run_ranks(2, save_with_own_rng, root, 2, two, 20)
    more = run_ranks(4, restore_with_rng, root, 4, four, 20)
    first, second, third, fourth = (rank["next"] for rank in more)
    assert first == second != third == fourth
    seeds = [seed for rank in more for name, seed in rank["events"] if name == "rng_reseeded"]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


# --- C09: re-saving with fewer ranks ----------------------------------------------------------------------------------


def bare_save(rank: int, url: str, world: int, fill: float) -> str:
    return ckptlib.save(sharded(rank, world, fill), url, iteration=100, on_exists="replace").save_id


def crash_after_rank_zero(rank: int, url: str, world: int, fill: float) -> None:
    """Rank 0 has written and recorded; rank 1 dies before it does, and rank 0 dies without a word."""
    publish = commit.publish_record

    def die(storage: Any, path: str, record: Any) -> None:
        if rank == 0:
            publish(storage, path, record)
        os._exit(9)

    with mock.patch.object(commit, "publish_record", die):
        bare_save(rank, url, world, fill)


def files_of_rank(url: str, rank: int) -> list[str]:
    return [name for name in os.listdir(url) if name.startswith(f"__{rank}_")]


def test_a_resave_with_fewer_ranks_is_the_old_one_until_it_is_the_new_one(tmp_path: Path) -> None:
    """C09, W9: a crash in the middle mixes no two generations; completed, no file of ranks 2 and 3 remains."""
    url = str(tmp_path / "iter_0000100")
    (old, *_) = run_ranks(4, bare_save, url, 4, 1.0)
    outcomes = try_ranks(2, crash_after_rank_zero, url, 2, 2.0)
    assert [outcome.exitcode for outcome in outcomes] == [9, 9]
    assert ckptlib.inspect(url).save_id == old
    assert torch.equal(ckptlib.read(url)["w"], torch.full((12,), 1.0))
    assert ckptlib.verify(url).ok
    (new, *_) = run_ranks(2, bare_save, url, 2, 3.0)
    assert ckptlib.inspect(url).save_id == new
    assert torch.equal(ckptlib.read(url)["w"], torch.full((12,), 3.0))
    report = ckptlib.verify(url)
    assert report.ok, report.problems
    assert files_of_rank(url, 2) == files_of_rank(url, 3) == []
    assert not [name for rank in range(2) for name in files_of_rank(url, rank) if old in name]


# --- fencing and settling on several ranks ----------------------------------------------------------------------------


def die_in_the_middle_of_the_second_save(rank: int, root: str, world: int, before_decision: bool) -> None:
    checkpointer = Checkpointer(root, run="run")
    checkpointer.save(sharded(rank, world, 10.0), iteration=10)
    name = "try_commit" if before_decision else "publish_record"
    with mock.patch.object(commit, name, side_effect=lambda *_, **__: os._exit(9)):
        checkpointer.save(sharded(rank, world, 20.0), iteration=20)


@pytest.mark.parametrize(("before_decision", "wanted"), [(True, 20), (False, 10)], ids=["all recorded", "not recorded"])
def test_the_next_attempt_finishes_or_aborts_what_a_dead_job_left(
    tmp_path: Path, before_decision: bool, wanted: int
) -> None:
    """W7, W8: commit needs no cooperation of the ranks that wrote."""
    root = str(tmp_path / "run")
    dying = 1 if before_decision else 2  # nobody tells rank 1 of a decision that rank 0 did not live to make
    outcomes = try_ranks(2, die_in_the_middle_of_the_second_save, root, 2, before_decision, wait_for=dying)
    assert outcomes[0].exitcode == 9
    checkpointer = Checkpointer(root, run="run")
    state = sharded(0, 1, -1.0)
    assert checkpointer.restore(state).iteration == wanted
    assert torch.equal(state["model"]["w"].data, torch.full((12,), float(wanted)))
    assert newest(root) == (1, wanted)
    assert tracker(root) == str(wanted)
    decisions = [s.decision.outcome for s in commit.list_saves(PosixStorage(), f"{root}/iter_0000020") if s.decision]
    assert decisions == ["commit" if before_decision else "abort"]
