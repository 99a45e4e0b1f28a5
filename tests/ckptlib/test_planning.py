"""Ranks keep plans: a steady state sends digests, any change is planned anew, and nothing that must agree is missed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptlib.errors import DisagreementError
from ckptlib.pieces import LocalPlan, PieceTable, TensorPiece
from ckptlib.plan import make_write_plan
from ckptlib.planning import KEPT, Offer, PlanCache, Share
from ckptlib.sharding import Box

WORLD = 3


def structure(rank: int, *, dtype: str = "float32", extra: bool = False, seed: str = "a") -> LocalPlan:
    """A sharded tensor, a replicated one, a value that all have and one that two of three have."""
    half = 4
    shape = (WORLD * half,)
    pieces = [
        TensorPiece("sharded", dtype, shape, Box((rank * half,), (half,)), 4 * half, True),
        TensorPiece("copied", dtype, (half,), Box.whole((half,)), 4 * half, None),
    ]
    if extra:
        pieces.append(TensorPiece("late", dtype, (half,), Box.whole((half,)), 4 * half, None))
    values = {"seed": seed} | ({"stage": "last"} if rank else {})
    return LocalPlan(PieceTable.build(pieces), {}, values)


def settle(caches: list[PlanCache], locals_: list[LocalPlan]) -> tuple[list[Share], bool]:
    """One save's planning, as `run_save` does it. Returns the shares, and whether structures were sent."""
    offers = [cache.offer(local) for cache, local in zip(caches, locals_, strict=True)]
    settled = caches[0].settle(offers)
    sent = settled is None
    if settled is None:
        settled = caches[0].settle([Offer(local) for local in locals_])
        assert settled is not None
    plan, is_known = settled
    shares = []
    for rank, (cache, local) in enumerate(zip(caches, locals_, strict=True)):
        share = cache.share(local, plan.digest) if is_known else Share.of(plan, rank)
        assert share is not None
        cache.keep(local, share)
        shares.append(share)
    return shares, sent or any(offer.local is not None for offer in offers)


def expected(locals_: list[LocalPlan]) -> list[Share]:
    plan = make_write_plan(locals_)
    return [Share.of(plan, rank) for rank in range(WORLD)]


@pytest.fixture
def caches() -> list[PlanCache]:
    return [PlanCache() for _ in range(WORLD)]


def test_a_steady_state_sends_no_structure(caches: list[PlanCache]) -> None:
    state = [structure(rank) for rank in range(WORLD)]
    assert settle(caches, state) == (expected(state), True)
    for seed in "abc":  # contents of values change at every save, and are no structure
        state = [structure(rank, seed=seed) for rank in range(WORLD)]
        assert settle(caches, state) == (expected(state), False)


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_change_on_one_rank_is_planned_anew_with_all(caches: list[PlanCache], who: int) -> None:
    """P19 as a kind: a key that appears on any rank."""
    before = [structure(rank) for rank in range(WORLD)]
    settle(caches, before)
    after = [structure(rank, extra=rank == who) for rank in range(WORLD)]
    assert settle(caches, after) == (expected(after), True)
    assert settle(caches, after) == (expected(after), False)
    assert settle(caches, before) == (expected(before), False)  # both are kept


def test_another_dtype_is_another_structure(caches: list[PlanCache]) -> None:
    """P19: torch's plan cache compares no dtypes."""
    settle(caches, [structure(rank) for rank in range(WORLD)])
    halves = [structure(rank, dtype="bfloat16") for rank in range(WORLD)]
    assert settle(caches, halves) == (expected(halves), True)


@pytest.mark.parametrize("name", ["seed", "stage"])
def test_values_that_come_to_differ_are_found_although_the_plan_is_kept(caches: list[PlanCache], name: str) -> None:
    """W3, for values of all ranks and for those of some."""
    state = [structure(rank) for rank in range(WORLD)]
    settle(caches, state)
    state[2] = replace(state[2], values={**state[2].values, name: "other"})
    with pytest.raises(DisagreementError, match=rf"'{name}' differs between rank [01] and rank 2"):
        settle(caches, state)


def test_a_rank_that_lost_its_plans_makes_all_send_their_structures(caches: list[PlanCache]) -> None:
    state = [structure(rank) for rank in range(WORLD)]
    settle(caches, state)
    caches[1] = PlanCache()
    assert settle(caches, state) == (expected(state), True)
    caches[0] = PlanCache()  # rank 0 has no whole plans any more
    assert settle(caches, state) == (expected(state), True)


def test_only_the_last_structures_are_kept(caches: list[PlanCache]) -> None:
    states = [[structure(rank, dtype=f"kind{i}") for rank in range(WORLD)] for i in range(KEPT + 1)]
    for state in states:
        settle(caches, state)
    assert settle(caches, states[-1]) == (expected(states[-1]), False)
    assert settle(caches, states[0]) == (expected(states[0]), True)
