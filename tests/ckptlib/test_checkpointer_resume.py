"""Who decides what to resume from: a resolver, or storage; and what happens when the resolver cannot say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ckptlib
from ckptlib import Checkpointer, roots
from ckptlib.errors import CkptError, LoadIncompleteError, NoResumePointError
from ckptlib.events import Notice, ResumeChoice
from tests.support.roots import newest, small_state
from tests.support.trees import assert_same, blanked


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A run with checkpoints at 10, 20 and 30."""
    root = str(tmp_path / "run")
    checkpointer = Checkpointer(root, run="run")
    for iteration in (10, 20, 30):
        checkpointer.save(small_state(float(iteration)), iteration=iteration)
    return root


class Says:
    """A resolver that gives an answer, or raises it."""

    def __init__(self, answer: ResumeChoice | Exception | None) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str, int | None]] = []

    def resolve(self, *, run: str, root_url: str, at: int | None) -> ResumeChoice | None:
        self.asked.append((run, root_url, at))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def damage(root: str, iteration: int) -> None:
    """One flipped bit in the data of a checkpoint."""
    (path,) = Path(root, roots.iteration_name(iteration)).glob("*.distcp")
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((4,), float(iteration)).numpy().tobytes())] ^= 1
    path.write_bytes(data)


def test_the_resolver_decides_and_says_why(root: str) -> None:
    """R2."""
    url = os.path.join(root, roots.iteration_name(20))
    resolver = Says(ResumeChoice(url, 20, ckptlib.inspect(url).save_id, "newest verified"))
    state = blanked(small_state())
    restored = Checkpointer(root, run="run", resolver=resolver).restore(state)
    assert (restored.iteration, restored.reason) == (20, "newest verified")
    assert_same(state, small_state(20.0))
    assert resolver.asked == [("run", root, None)]


def test_a_resolver_that_finds_none_eligible_stops_the_job(root: str) -> None:
    """Never silently random weights, and never silently something else."""
    resolver = Says(NoResumePointError("all three are corrupt", rejected=[("30", "corrupt")]))
    with pytest.raises(NoResumePointError, match="all three are corrupt") as caught:
        Checkpointer(root, run="run", resolver=resolver).restore(blanked(small_state()), missing="start")
    assert caught.value.exit_code == 21


@pytest.mark.parametrize("answer", [ConnectionError("no route to host"), None], ids=["dead", "knows nothing"])
def test_without_the_resolvers_word_storage_is_asked_and_verified_now(root: str, answer: Exception | None) -> None:
    """S4: a dead catalog does not keep a job from resuming, and what it would have told is checked."""
    damage(root, 30)
    events: list[Notice] = []
    state = blanked(small_state())
    checkpointer = Checkpointer(root, run="run", resolver=Says(answer), on_event=events.append)
    restored = checkpointer.restore(state)
    assert restored.iteration == 20
    assert "verified now" in restored.reason
    assert_same(state, small_state(20.0))
    names = [event.name for event in events]
    assert names == (["resolver_failed"] if answer else []) + ["resume_candidate_rejected"]
    assert "iter_0000030" in events[-1].message
    assert newest(root) == (1, 30)  # it is still there: a corrupt copy is not deleted (V4)


def test_without_the_resolvers_word_an_iteration_is_still_exact(root: str) -> None:
    """R6."""
    damage(root, 30)
    dead = Says(ConnectionError("no route to host"))
    with pytest.raises(NoResumePointError, match="iter_0000030") as caught:
        Checkpointer(root, run="run", resolver=dead).restore(blanked(small_state()), at=30)
    assert [name for name, _ in caught.value.rejected] == ["iter_0000030"]
    assert Checkpointer(root, run="run", resolver=dead).restore(blanked(small_state()), at=10).iteration == 10


def test_a_dead_resolver_on_a_new_root_may_start(tmp_path: Path) -> None:
    dead = Says(ConnectionError("no route to host"))
    checkpointer = Checkpointer(str(tmp_path / "new"), run="run", resolver=dead)
    assert not checkpointer.restore(small_state(), missing="start").found


def test_without_a_resolver_a_damaged_checkpoint_is_an_error_that_names_it(root: str) -> None:
    """Nothing falls back silently: the newest committed one is what a resume without a catalog means."""
    damage(root, 30)
    with pytest.raises(LoadIncompleteError, match="iter_0000030") as caught:
        Checkpointer(root, run="run").restore(blanked(small_state()))
    assert caught.value.exit_code == 20
    state = blanked(small_state())
    with pytest.raises(CkptError, match="nothing was loaded"):
        Checkpointer(root, run="run").restore(state, verify="data")
    assert_same(state, blanked(small_state()))


def test_a_candidate_with_damaged_records_is_reported_and_passed_over(root: str) -> None:
    """R1: nobody can tell whether it is committed."""
    (decision,) = Path(root, roots.iteration_name(30)).rglob("decision.json")
    decision.write_bytes(decision.read_bytes()[:-20])
    events: list[Notice] = []
    restored = Checkpointer(root, run="run", on_event=events.append).restore(blanked(small_state()))
    assert restored.iteration == 20
    assert [event.name for event in events] == ["resume_candidate_rejected"]
    assert "iter_0000030" in events[0].message


def test_the_save_that_was_chosen_is_the_one_that_is_read(root: str) -> None:
    """W9, R2: a reader pins one save; a newer one in the same directory is not what was asked for."""
    url = os.path.join(root, roots.iteration_name(30))
    chosen = ckptlib.inspect(url).save_id
    second = Checkpointer(root, run="run")
    second.save(small_state(31.0), iteration=30)
    state = blanked(small_state())
    resolver = Says(ResumeChoice(url, 30, chosen, "the verified one"))
    assert Checkpointer(root, run="run", resolver=resolver).restore(state).save_id == chosen
    assert_same(state, small_state(30.0))
