"""S1: the two facts of a checkpoint and their legal moves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.states import (
    LIFECYCLE_MOVES,
    LIFECYCLES,
    VERDICT_MOVES,
    VERDICTS,
    Lifecycle,
    State,
    Verdict,
    grants,
    level_for,
    transition,
)
from ckptlib.errors import TransitionError

states = st.builds(State, st.sampled_from(LIFECYCLES), st.sampled_from(VERDICTS))
lifecycles = st.none() | st.sampled_from(LIFECYCLES)
verdicts = st.none() | st.sampled_from(VERDICTS)


@given(states, lifecycles, verdicts)
def test_every_change_is_in_the_tables_or_refused(
    state: State, lifecycle: Lifecycle | None, verdict: Verdict | None
) -> None:
    try:
        new = transition(state, lifecycle=lifecycle, verdict=verdict)
    except TransitionError:
        return
    assert new.lifecycle == (lifecycle or state.lifecycle)
    assert new.lifecycle == state.lifecycle or new.lifecycle in LIFECYCLE_MOVES[state.lifecycle]
    if new.verdict != state.verdict:
        assert new.lifecycle == "finalized", "nothing is learnt about bytes that are not there"
        came_back = (state.lifecycle, state.verdict) == ("missing", "verified")
        assert new.verdict in VERDICT_MOVES[state.verdict] or came_back


@given(states)
def test_asking_for_what_holds_already_changes_nothing(state: State) -> None:
    assert transition(state, lifecycle=state.lifecycle, verdict=state.verdict) == state


@given(states, st.lists(st.tuples(lifecycles, verdicts), max_size=8))
def test_deleted_is_final_and_only_reached_through_deleting(
    state: State, moves: list[tuple[Lifecycle | None, Verdict | None]]
) -> None:
    path = [state.lifecycle]
    for lifecycle, verdict in moves:
        try:
            state = transition(state, lifecycle=lifecycle, verdict=verdict)
        except TransitionError:
            continue
        if state.lifecycle != path[-1]:
            path.append(state.lifecycle)
    for before, after in itertools.pairwise(path):
        assert before != "deleted"
        assert after != "deleted" or before == "deleting"


def test_a_verified_checkpoint_that_was_missing_is_unverified_when_it_returns() -> None:
    assert transition(State("missing", "verified"), lifecycle="finalized") == State("finalized", "unverified")
    assert transition(State("missing", "corrupt"), lifecycle="finalized") == State("finalized", "corrupt")


def test_a_suspect_checkpoint_is_not_cleared_by_good_digests() -> None:
    with pytest.raises(TransitionError, match="suspect -> verified"):
        transition(State("finalized", "suspect"), verdict="verified")


@pytest.mark.parametrize(
    ("level", "verdicts"),
    [
        ("listing", set()),
        ("structure", set()),
        ("store", {"unverified", "verified", "unverifiable"}),
        ("data", {"unverified", "verified", "unverifiable", "corrupt"}),
    ],
)
def test_a_level_verifies_what_it_can_tell_something_new_of(level: str, verdicts: set[str]) -> None:
    """V3, V4: a corrupt copy has to be read."""
    assert {verdict for verdict in VERDICTS if grants(level, verdict)} == verdicts
    assert {verdict for verdict in VERDICTS if level_for(level, verdict) != level} == set()
    assert {verdict for verdict in VERDICTS if level_for("auto", verdict) == "data"} == {"corrupt"}


def test_a_refusal_names_the_moves_that_are_possible() -> None:
    with pytest.raises(TransitionError, match=r"deleting -> finalized .* it can become deleted"):
        transition(State("deleting"), lifecycle="finalized")
    with pytest.raises(TransitionError, match="final"):
        transition(State("deleted"), lifecycle="finalized")
