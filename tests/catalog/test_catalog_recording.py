"""Recording saves, attempts and roots: identity, idempotence, what a commit replaces, branches."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog import Catalog
from catalog.lineage import Node, branches
from catalog.rows import CheckpointRow
from ckptlib.errors import CatalogError, StaleWriteError, TransitionError
from ckptlib.topology import Topology
from tests.catalog.samples import CORRUPT, attempt, commit, save_id

Verified = Callable[..., CheckpointRow]


def kinds(catalog: Catalog, checkpoint_id: int | None = None) -> list[str]:
    return [event.kind for event in catalog.events("run", checkpoint_id)]


def test_a_recorded_save_comes_back_with_everything_its_manifest_says(catalog: Catalog) -> None:
    event = commit(
        1000, parent=save_id(900), progress={"consumed_samples": 2**40, "lr": 1e-4}, metrics={"val_loss": 1.5}
    )
    catalog.record(event, actor="trainer")
    (row,) = catalog.checkpoints("run")
    assert (row.iteration, row.save_id, row.attempt, row.lifecycle, row.verdict) == (
        1000,
        save_id(1000),
        1,
        "finalized",
        "unverified",
    )
    assert row.topology == Topology(tp=2, dp=2)
    assert row.contents == ("model", "optimizer")
    assert row.progress == {"consumed_samples": 2**40, "lr": 1e-4}
    assert row.metrics == {"val_loss": 1.5}
    assert row.parent == save_id(900)
    assert (row.url, row.path, row.root_id) == ("/data/run/iter_0001000", "iter_0001000", "root-1")
    assert (row.size, row.tensors, row.objects) == (107, 2, 1)
    assert row.created_at == datetime.fromtimestamp(1.7e9, UTC)
    assert abs(row.committed_at - datetime.now(UTC)) < timedelta(seconds=10), "by the database's clock, not the node's"
    files = {file.path: (file.role, file.origin) for file in catalog.files(row.id)}
    assert files == {
        f"__0_0.{save_id(1000)}.distcp": ("data", "writer"),
        f".ckpt/{save_id(1000)}/common.pt": ("common", "writer"),
        f".ckpt/{save_id(1000)}/manifest.json": ("manifest", "writer"),
        ".metadata": ("export", "writer"),
        "checkpoint.json": ("export", "writer"),
    }
    assert [(event.kind, event.actor) for event in catalog.events(checkpoint_id=row.id)] == [("saved", "trainer")]


def test_recording_the_same_save_twice_changes_nothing(catalog: Catalog) -> None:
    """S3."""
    first = catalog.record(commit(100))
    assert catalog.record(commit(100)) == first
    assert kinds(catalog) == ["attempt", "saved"]


def test_one_save_id_with_two_manifests_is_an_error(catalog: Catalog) -> None:
    catalog.record(commit(100))
    with pytest.raises(CatalogError, match=r"recorded .* with manifest"):
        catalog.record(commit(100, metrics={"loss": 3.0}))


def test_one_save_id_in_two_runs_is_two_checkpoints(catalog: Catalog) -> None:
    catalog.record(commit(100, run="a"))
    catalog.record(commit(100, run="b"))
    assert [row.run for row in catalog.checkpoints()] == ["a", "b"]


def test_a_save_without_a_run_is_refused_with_the_reason(catalog: Catalog) -> None:
    with pytest.raises(CatalogError, match="names no run"):
        catalog.record(commit(100, run=None))


def test_a_bare_save_is_filed_under_its_parent_directory(catalog: Catalog) -> None:
    row = catalog.record(commit(5, attempt=0, root_url=None, root_id=None))
    assert (row.root_url, row.path, row.root_id) == ("/data/loose", "iter_0000005", None)


@pytest.mark.parametrize("run", ["a run / with spaces", "ünïcode", "x" * 300, 'quote\'s "and" %s'])
def test_a_run_may_have_any_name(catalog: Catalog, run: str) -> None:
    catalog.record(commit(1, run=run))
    assert [known.name for known in catalog.runs()] == [run]
    assert catalog.checkpoint(run, 1).run == run


@pytest.mark.parametrize("iteration", [0, 10_000_000, 2**40])
def test_any_iteration_is_recorded(catalog: Catalog, iteration: int) -> None:
    catalog.record(commit(iteration))
    assert catalog.checkpoint("run", iteration).iteration == iteration


def test_metrics_that_are_no_finite_numbers_come_back_as_they_were(catalog: Catalog) -> None:
    row = catalog.record(commit(1, metrics={"nan": math.nan, "inf": math.inf, "ninf": -math.inf, "n": 3}))
    assert math.isnan(row.metrics["nan"])
    assert (row.metrics["inf"], row.metrics["ninf"], row.metrics["n"]) == (math.inf, -math.inf, 3)


def test_what_a_save_replaced_in_its_directory_is_finished_as_deleted(catalog: Catalog) -> None:
    """W9: ``on_exists="replace"`` removed it from storage."""
    old = catalog.record(commit(100))
    other = catalog.record(commit(200))
    new = catalog.record(commit(100, number=1, replaces=(old.save_id, other.save_id)))
    assert catalog.checkpoint_by_id(old.id).lifecycle == "deleted"
    assert kinds(catalog, old.id) == ["saved", "deleting", "deleted"]
    assert catalog.events(checkpoint_id=old.id)[-1].data["reason"] == f"replaced by save {new.save_id}"
    assert catalog.checkpoint_by_id(other.id).lifecycle == "finalized", "a record speaks for its own directory only"
    assert catalog.checkpoint("run", 100).id == new.id


def test_a_replaced_save_that_is_recorded_late_is_deleted_at_once(catalog: Catalog) -> None:
    catalog.record(commit(100, number=1, replaces=(save_id(100),)))
    assert catalog.record(commit(100)).lifecycle == "deleted"


def test_a_deleted_save_that_turns_up_again_is_reported_once_and_never_revived(catalog: Catalog) -> None:
    """S3."""
    row = catalog.record(commit(100))
    catalog.change(row.id, lifecycle="deleting", reason="test")
    catalog.change(row.id, lifecycle="deleted", reason="test")
    for _ in range(2):
        assert catalog.record(commit(100)).lifecycle == "deleted"
    assert kinds(catalog, row.id) == ["saved", "deleting", "deleted", "reappeared"]


def test_a_missing_save_that_is_recorded_again_has_returned(catalog: Catalog, verified: Verified) -> None:
    row = verified(100)
    catalog.mark_missing(row.id, reason="its directory is gone")
    back = catalog.record(commit(100))
    assert (back.lifecycle, back.verdict) == ("finalized", "unverified")
    assert kinds(catalog, row.id)[-2:] == ["missing", "returned"]


def test_a_change_decided_on_an_old_version_is_refused(catalog: Catalog, verified: Verified) -> None:
    """S1: compare-and-set."""
    row = catalog.record(commit(100))
    verified(100)
    with pytest.raises(StaleWriteError, match="version"):
        catalog.change(row.id, verdict="corrupt", reason="test", version=row.version)
    assert catalog.checkpoint_by_id(row.id).verdict == "verified"


def test_an_illegal_change_names_the_checkpoint_and_writes_nothing(catalog: Catalog) -> None:
    row = catalog.record(commit(100))
    with pytest.raises(TransitionError, match=r"run@100 .*finalized -> deleted"):
        catalog.change(row.id, lifecycle="deleted", reason="test")
    assert catalog.checkpoint_by_id(row.id) == row


def test_every_change_has_one_event_with_old_and_new(catalog: Catalog) -> None:
    """S1."""
    row = catalog.record(commit(100))
    catalog.change(row.id, verdict="suspect", reason="a resume failed", actor="ops")
    event = catalog.events(checkpoint_id=row.id)[-1]
    assert (event.kind, event.actor) == ("suspect", "ops")
    assert event.data == {"verdict": ["unverified", "suspect"], "version": 2, "reason": "a resume failed"}


def test_an_attempt_is_recorded_once_and_completed_later(catalog: Catalog) -> None:
    catalog.record(commit(100))
    catalog.record_attempt(attempt(1, resumed_from=save_id(50, 0)))
    catalog.record_attempt(attempt(1, resumed_from="something else"))
    (known,) = catalog.attempts("run")
    assert (known.number, known.host, known.pid) == (1, "node7", 4242)
    assert known.resumed_from == save_id(50, 0), "what is known never changes"
    assert kinds(catalog) == ["attempt", "saved"]


def test_a_moved_root_is_one_changed_location_and_no_changed_checkpoint(catalog: Catalog) -> None:
    """C15: identity is the root's id and the path below it, never the URL."""
    old = catalog.record(commit(100))
    new = catalog.record(commit(200, root_url="/elsewhere"))
    (location,) = catalog.locations("run")
    assert (location.url, location.root_id) == ("/elsewhere", "root-1")
    moved = catalog.checkpoint_by_id(old.id)
    assert (moved.save_id, moved.version, moved.url) == (old.save_id, old.version, "/elsewhere/iter_0000100")
    assert new.url == "/elsewhere/iter_0000200"
    assert "moved" in kinds(catalog)


def test_two_roots_of_one_run_are_two_locations(catalog: Catalog) -> None:
    """C12."""
    catalog.record(commit(100))
    row = catalog.record(commit(250, root_url="/scratch/run", root_id="root-2"))
    assert row.url == "/scratch/run/iter_0000250"
    assert [place.root_id for place in catalog.locations("run")] == ["root-1", "root-2"]


def test_a_place_that_gets_an_identity_later_stays_one_location(catalog: Catalog) -> None:
    catalog.record(commit(1, root_id=None))
    catalog.record(commit(2))
    assert [place.root_id for place in catalog.locations("run")] == ["root-1"]


def test_adopted_times_are_the_manifests_kept_in_the_order_of_the_run(catalog: Catalog) -> None:
    """retention.md 12b: a clock that was wrong does not reorder what is known to be ordered."""
    times = {100: 1_000_000.0, 200: 5_000_000.0, 300: 2_000_000.0, 400: 9e12, 500: 0.0}
    for iteration, decided_at in times.items():
        catalog.record(commit(iteration, decided_at=decided_at), adopted=True)
    rows = catalog.checkpoints("run")
    committed = [row.committed_at for row in rows]
    assert committed == sorted(committed)
    assert committed[0] == datetime.fromtimestamp(1_000_000, UTC)
    assert committed[2] == datetime.fromtimestamp(5_000_000, UTC), "claimed an earlier time than its predecessor"
    assert committed[-1] <= datetime.now(UTC), "nothing is committed in the future"
    assert all(row.adopted for row in rows)
    late = catalog.record(commit(150, decided_at=8_000_000.0), adopted=True)
    assert late.committed_at == datetime.fromtimestamp(5_000_000, UTC), "not after what follows it"


# ---------------------------------------------------------------- branches


def live(catalog: Catalog) -> list[tuple[int, int]]:
    return [(row.attempt, row.iteration) for row in catalog.checkpoints("run", branch="live")]


def test_a_rollback_abandons_the_old_branch_once_its_first_checkpoint_is_verified(
    catalog: Catalog, verified: Verified
) -> None:
    """retention.md 12c."""
    for iteration in (100, 200, 300):
        verified(iteration)
    catalog.record_attempt(attempt(2, resumed_from=save_id(100)))
    catalog.record(commit(150, attempt=2, parent=save_id(100)))
    assert live(catalog) == [(1, 100), (1, 200), (1, 300), (2, 150)], "an unverified newcomer proves nothing"
    verified(150, attempt=2, parent=save_id(100))
    assert live(catalog) == [(1, 100), (2, 150)]
    abandoned = catalog.checkpoint("run", 300)
    assert kinds(catalog, abandoned.id)[-1] == "abandoned"


def test_a_save_of_an_abandoned_branch_that_is_recorded_late_is_abandoned(catalog: Catalog, verified: Verified) -> None:
    verified(100)
    verified(150, attempt=2, parent=save_id(100))
    assert catalog.record(commit(200)).branch == "abandoned"
    assert catalog.record(commit(90)).branch == "live"


def test_later_saves_of_an_attempt_do_not_hide_what_it_resumed_from(catalog: Catalog, verified: Verified) -> None:
    """The parent of a later save is its own attempt's earlier one; the first may never have been recorded."""
    for iteration in (100, 200):
        verified(iteration)
    catalog.record_attempt(attempt(2, resumed_from=save_id(100)))
    verified(180, attempt=2, parent=save_id(150, 2))
    assert live(catalog) == [(1, 100), (2, 180)]
    assert catalog.attempts("run")[-1].resumed_from == save_id(100)


def test_a_corrupt_verdict_later_does_not_bring_the_old_branch_back(catalog: Catalog, verified: Verified) -> None:
    verified(100)
    verified(200)
    row = verified(150, attempt=2, parent=save_id(100))
    (lease,) = catalog.lease_unverified(owner="w", ttl=60, checkpoint_id=row.id, force=True)
    catalog.finish_verification(lease, CORRUPT)
    assert live(catalog) == [(1, 100), (2, 150)]


def nodes_of(*facts: tuple[int, int, bool]) -> list[Node]:
    return [
        Node(id, attempt, iteration, save_id(iteration, attempt), verified, "live")
        for id, (attempt, iteration, verified) in enumerate(facts)
    ]


def test_lineage_follows_parents_through_attempts_that_are_not_ancestors() -> None:
    nodes = nodes_of((1, 100, True), (1, 200, True), (2, 150, True), (3, 210, True), (3, 300, False))
    result = branches(nodes, {2: save_id(100, 1), 3: save_id(200, 1)})
    assert [node.iteration for node in nodes if result[node.id] == "live"] == [100, 200, 210, 300]


def test_without_a_known_parent_only_what_cannot_be_an_ancestor_is_left_behind() -> None:
    nodes = nodes_of((1, 500, True), (1, 600, True), (1, 700, True), (2, 600, True))
    result = branches(nodes, {})
    assert [(n.attempt, n.iteration) for n in nodes if result[n.id] == "live"] == [(1, 500), (1, 600), (2, 600)]


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Node], dict[int, str]]:
    """Runs of up to five attempts, each resumed from any checkpoint of an older one, or from nowhere known."""
    nodes: list[Node] = []
    parents: dict[int, str] = {}
    for attempt_number in range(1, draw(st.integers(1, 5)) + 1):
        start = 0
        if nodes and draw(st.booleans()):
            parent = draw(st.sampled_from(nodes))
            parents[attempt_number], start = parent.save_id, parent.iteration
        for iteration in sorted(draw(st.sets(st.integers(start + 1, start + 30), max_size=4))):
            this = save_id(iteration, attempt_number)
            nodes.append(Node(len(nodes), attempt_number, iteration, this, draw(st.booleans()), "live"))
    return nodes, parents


History = tuple[list[Node], dict[int, str]]


@given(histories(), st.randoms())
def test_branches_depend_on_history_alone_and_repeat(history: History, random: Random) -> None:
    nodes, parents = history
    result = branches(nodes, parents)
    shuffled = list(nodes)
    random.shuffle(shuffled)
    assert branches(shuffled, parents) == result
    again = [Node(n.id, n.attempt, n.iteration, n.save_id, n.verified, result[n.id]) for n in nodes]
    assert branches(again, parents) == result


@given(histories())
def test_the_tip_and_all_its_known_ancestors_are_live(history: History) -> None:
    nodes, parents = history
    result = branches(nodes, parents)
    proven = [node.attempt for node in nodes if node.verified]
    by_save = {node.save_id: node for node in nodes}
    for node in nodes:
        if not proven or node.attempt > max(proven):
            assert result[node.id] == "live", "nothing is decided by an attempt that proved nothing"
    if proven:
        current: int | None = max(proven)
        while current is not None:
            parent = by_save.get(parents.get(current, ""))
            if parent is not None:
                assert result[parent.id] == "live"
            current = None if parent is None else parent.attempt
