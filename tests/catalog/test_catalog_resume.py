"""Resume-point selection: which checkpoint, and why none of the newer ones (R2, R6, V4, retention.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog import Catalog
from catalog.resume import DEFAULT_KINDS, NEEDS, Found, NoneYet, NotEligible, Request, newest_first, select, why_not
from catalog.rows import CheckpointRow
from catalog.states import BRANCHES, GRANTS, LIFECYCLES, VERDICTS
from ckptlib.errors import UnsupportedError
from tests.catalog.samples import commit, row

KINDS = ("persistent", "non_persistent_global", "non_persistent_local", "release")
PARTS = ("model", "optimizer", "scheduler", "rng")


@st.composite
def rows(draw: st.DrawFn) -> list[CheckpointRow]:
    """Rows of one run in any state; iterations and attempts collide often."""
    result = []
    for id in range(1, draw(st.integers(0, 8)) + 1):
        result.append(
            row(
                id,
                draw(st.integers(0, 4)) * 100,
                attempt=draw(st.integers(0, 3)),
                kind=draw(st.sampled_from(KINDS)),
                semantic_type=draw(st.sampled_from(["GLOBAL", "GLOBAL", "LEGACY", "LOCAL"])),
                lifecycle=draw(st.sampled_from(LIFECYCLES)),
                verdict=draw(st.sampled_from(VERDICTS)),
                verified_level=draw(st.sampled_from(GRANTS)),
                branch=draw(st.sampled_from(BRANCHES)),
                contents=tuple(draw(st.sets(st.sampled_from(PARTS)))),
            )
        )
    return draw(st.permutations(result))


requests = st.builds(
    Request,
    run=st.just("run"),
    at=st.none() | st.integers(0, 4).map(lambda n: n * 100),
    purpose=st.sampled_from(["train", "eval"]),
    allow_unverified=st.booleans(),
    require=st.sampled_from(GRANTS),
    kinds=st.just(DEFAULT_KINDS) | st.sets(st.sampled_from(KINDS), min_size=1).map(frozenset),
)


@given(rows(), requests)
def test_the_choice_is_the_newest_eligible_one(found_rows: list[CheckpointRow], request: Request) -> None:
    result = select(newest_first(found_rows), request)
    eligible = [r for r in found_rows if why_not(r, request) is None and request.at in (None, r.iteration)]
    if isinstance(result, Found):
        assert result.row == max(eligible, key=lambda r: (r.attempt, r.iteration, r.seq))
        assert all(rejected.order > result.row.order for rejected, _ in result.rejected_newer)
    else:
        assert eligible == []


@given(rows(), requests)
def test_what_is_chosen_is_never_corrupt_suspect_abandoned_or_insufficient(
    found_rows: list[CheckpointRow], request: Request
) -> None:
    """V4."""
    result = select(newest_first(found_rows), request)
    if isinstance(result, Found):
        chosen = result.row
        assert chosen.lifecycle == "finalized"
        assert chosen.verdict == "verified" or (
            request.allow_unverified and chosen.verdict not in ("corrupt", "suspect")
        )
        assert request.require == "store" or request.allow_unverified or chosen.verified_level == "data"
        assert chosen.branch == "live"
        assert chosen.kind in request.kinds
        assert chosen.semantic_type != "LOCAL" or request.at == chosen.iteration
        assert set(chosen.contents) >= NEEDS[request.purpose]


@given(rows(), requests)
def test_every_rejected_candidate_has_a_reason_and_none_is_left_out(
    found_rows: list[CheckpointRow], request: Request
) -> None:
    result = select(newest_first(found_rows), request)
    candidates = [
        r for r in found_rows if r.lifecycle not in ("writing", "aborted") and request.at in (None, r.iteration)
    ]
    if isinstance(result, Found):
        newer = {r.id for r in candidates if r.order > result.row.order}
        assert {r.id for r, _ in result.rejected_newer} == newer
    elif isinstance(result, NotEligible):
        assert {r.id for r, _ in result.rejected} == {r.id for r in candidates}
        assert all(reason for _, reason in result.rejected)
        assert result.message
    else:
        assert candidates == []
        assert request.at is None


@given(rows(), requests, st.randoms())
def test_the_order_of_the_rows_does_not_matter(
    found_rows: list[CheckpointRow], request: Request, random: Random
) -> None:
    shuffled = list(found_rows)
    random.shuffle(shuffled)
    assert select(newest_first(shuffled), request) == select(newest_first(found_rows), request)


@given(rows(), requests)
def test_allowing_unverified_never_goes_back(found_rows: list[CheckpointRow], request: Request) -> None:
    strict = select(newest_first(found_rows), replace(request, allow_unverified=False))
    relaxed = select(newest_first(found_rows), replace(request, allow_unverified=True))
    if isinstance(strict, Found):
        assert isinstance(relaxed, Found)
        assert relaxed.row.order >= strict.row.order


@given(rows(), requests)
def test_rows_after_the_choice_are_never_read(found_rows: list[CheckpointRow], request: Request) -> None:
    """A resume reads the few newest rows of a run, however many it has."""
    ordered = newest_first(found_rows)
    rest = iter(ordered)
    result = select(rest, request)
    if isinstance(result, Found):
        assert list(rest) == ordered[ordered.index(result.row) + 1 :]


def test_an_explicit_iteration_is_exact_or_an_error() -> None:
    """C10, R6."""
    rows = newest_first([row(1, 100), row(2, 200, kind="non_persistent_global")])
    assert select(rows, Request("run")).row.iteration == 200  # type: ignore[union-attr]
    assert select(rows, Request("run", at=100)).row.iteration == 100  # type: ignore[union-attr]
    nothing = select(rows, Request("run", at=150))
    assert isinstance(nothing, NotEligible)
    assert "no checkpoint at iteration 150; the nearest are 100, 200" in nothing.message


def test_iteration_zero_is_a_value() -> None:
    """C10, R6."""
    assert isinstance(select([row(1, 100)], Request("run", at=0)), NotEligible)
    assert select(newest_first([row(1, 0), row(2, 100)]), Request("run", at=0)).row.iteration == 0  # type: ignore[union-attr]


def test_a_later_attempt_wins_over_a_higher_iteration() -> None:
    """W8: order is (attempt, iteration)."""
    rows = newest_first([row(1, 1300), row(2, 1310, attempt=1), row(3, 1050, attempt=2)])
    assert select(rows, Request("run")).row.id == 3  # type: ignore[union-attr]


def test_a_corrupt_newest_gives_the_one_before_with_the_reason() -> None:
    result = select(newest_first([row(1, 100), row(2, 200, verdict="corrupt")]), Request("run"))
    assert isinstance(result, Found)
    assert [(r.iteration, why) for r, why in result.rejected_newer] == [
        (200, "is corrupt: its bytes are not what was written")
    ]


def test_a_model_only_checkpoint_serves_evaluation_but_no_training() -> None:
    rows = [row(1, 100, contents=("model",))]
    assert isinstance(select(rows, Request("run", purpose="eval")), Found)
    refused = select(rows, Request("run"))
    assert isinstance(refused, NotEligible)
    assert "holds no optimizer, needed to train" in refused.message


def test_releases_and_local_copies_are_used_on_request_only() -> None:
    rows = newest_first([row(1, 0, kind="release"), row(2, 50, kind="non_persistent_local")])
    assert isinstance(select(rows, Request("run")), NotEligible)
    assert select(rows, Request("run", kinds=frozenset({"release"}))).row.kind == "release"  # type: ignore[union-attr]


def test_a_run_without_checkpoints_starts_from_the_beginning() -> None:
    assert select([], Request("run")) == NoneYet("run")
    assert select([row(1, 100, lifecycle="aborted")], Request("run")) == NoneYet("run")


def test_a_run_whose_checkpoints_are_all_gone_does_not_start_over_silently() -> None:
    result = select([row(1, 100, lifecycle="deleted")], Request("run"))
    assert isinstance(result, NotEligible)
    assert "is deleted" in result.message


def test_a_policy_may_want_what_was_read_back() -> None:
    """V3."""
    rows = newest_first([row(1, 100, verified_level="data"), row(2, 200, verified_level="store")])
    assert select(rows, Request("run")).row.iteration == 200  # type: ignore[union-attr]
    strict = select(rows, Request("run", require="data"))
    assert isinstance(strict, Found)
    assert strict.row.iteration == 100
    ((_, reason),) = strict.rejected_newer
    assert reason == "is verified by the store's digests only, and was to be read back"


def test_an_unverifiable_checkpoint_is_taken_only_unread() -> None:
    rows = [row(1, 100, verdict="unverifiable")]
    refused = select(rows, Request("run"))
    assert isinstance(refused, NotEligible)
    assert "is unverifiable: its store keeps no digests" in refused.message
    assert isinstance(select(rows, Request("run", allow_unverified=True)), Found)


def test_an_unknown_purpose_is_an_error() -> None:
    with pytest.raises(UnsupportedError, match="expected one of eval, train"):
        Request("run", purpose="fun")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="expected one of store, data"):
        Request("run", require="listing")  # type: ignore[arg-type]


# ---------------------------------------------------------------- through the database


def test_the_catalog_gives_the_newest_verified(catalog: Catalog, verified: Callable[..., CheckpointRow]) -> None:
    verified(100)
    verified(200)
    catalog.record(commit(300))
    result = catalog.resume_point("run")
    assert isinstance(result, Found)
    assert result.row.iteration == 200
    assert [(r.iteration, why) for r, why in result.rejected_newer] == [(300, "is not verified yet")]
    newest = catalog.resume_point("run", allow_unverified=True)
    assert isinstance(newest, Found)
    assert newest.row.iteration == 300
    assert catalog.resume_point("another") == NoneYet("another")
    assert isinstance(catalog.resume_point("another", at=0), NotEligible)
