"""Failures that others had, as far as recording, discovery and the choice of a resume point go (lifecycle cases)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from catalog import Catalog, Recorder, ResumeResolver
from catalog.resume import Found, NotEligible
from catalog.scan import apply, plan_scan
from catalog.verification import verify_leased
from ckptlib import roots
from ckptlib.errors import NoResumePointError
from ckptlib.storage import resolve
from tests.catalog.samples import empty_catalog
from tests.catalog.training import Training, flip_a_byte


@pytest.fixture
def url(tmp_path: Path) -> str:
    return empty_catalog(tmp_path)


@pytest.fixture
def catalog(url: str) -> Iterator[Catalog]:
    with Catalog(url) as opened:
        yield opened


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "run")


def verify_all(catalog: Catalog) -> None:
    while leases := catalog.lease_unverified(owner="worker", ttl=60):
        verify_leased(catalog, leases[0])


def resume(catalog: Catalog, at: int | None = None) -> tuple[int, int]:
    """(attempt, iteration) of the resume point."""
    result = catalog.resume_point("run", at=at)
    assert isinstance(result, Found), result
    return result.row.attempt, result.row.iteration


def test_c01_nothing_names_a_checkpoint_before_its_commit(
    catalog: Catalog, url: str, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C01: tracker, row and event come after the decision; a save that dies just before it leaves none of them."""
    training.attempt(100, listeners=[Recorder(url)])
    training.die_before_the_decision(200, monkeypatch, listeners=[Recorder(url)])
    assert [row.iteration for row in catalog.checkpoints("run")] == [100]
    assert [event.kind for event in catalog.events("run")].count("saved") == 1
    assert (training.root / "latest_checkpointed_iteration.txt").read_text() == "100"
    storage, root = resolve(str(training.root))
    newest = roots.newest_committed(storage, root)
    assert newest is not None
    assert newest.iteration == 100


def test_c07_a_run_that_was_rolled_back_saves_at_any_iteration(
    catalog: Catalog, url: str, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C07: a save that failed is no state; the next attempt saves below and at it, and is listed."""
    recorder = [Recorder(url)]
    training.attempt(1600, 1800, listeners=recorder)
    verify_all(catalog)
    training.die_before_the_decision(1820, monkeypatch)
    assert resume(catalog) == (1, 1800)
    resolver = ResumeResolver(url)
    restored = training.attempt(1620, 1800, 1820, at=1600, resolver=resolver, listeners=recorder)
    assert restored is not None
    assert restored.iteration == 1600
    verify_all(catalog)
    newest = [(row.attempt, row.iteration) for row in catalog.checkpoints("run", branch="live")]
    assert newest == [(1, 1600), (3, 1620), (3, 1800), (3, 1820)]
    assert resume(catalog) == (3, 1820)


def test_c10_an_explicit_iteration_is_never_overridden(catalog: Catalog, url: str, training: Training) -> None:
    """C10: persistent {100}, non-persistent {200}."""
    recorder = [Recorder(url)]
    training.attempt(100, listeners=recorder)
    training.attempt(200, resume=True, kind="non_persistent_global", listeners=recorder)
    verify_all(catalog)
    assert resume(catalog) == (2, 200)
    assert resume(catalog, at=100) == (1, 100)
    for at in (0, 150):
        assert isinstance(catalog.resume_point("run", at=at), NotEligible)
        with pytest.raises(NoResumePointError) as raised:
            training.attempt(at=at, resolver=ResumeResolver(url))
        assert raised.value.exit_code == 21
    restored = training.attempt(at=100, resolver=ResumeResolver(url))
    assert restored is not None
    assert restored.iteration == 100


def test_c12_the_newest_of_all_roots_of_a_run_wins(
    catalog: Catalog, url: str, tmp_path: Path, training: Training
) -> None:
    """C12: the load root has 100, the save root a non-persistent 250."""
    training.attempt(100, listeners=[Recorder(url)])
    scratch = Training(tmp_path / "scratch")
    scratch.attempt(250, kind="non_persistent_global", listeners=[Recorder(url)])
    verify_all(catalog)
    assert resume(catalog) == (1, 250)


def test_c15_a_root_that_was_renamed_keeps_its_checkpoints(catalog: Catalog, url: str, training: Training) -> None:
    """C15: mv runA runB; the same rows, with their verdicts and holds."""
    training.attempt(100, 200, listeners=[Recorder(url)])
    verify_all(catalog)
    pinned = catalog.checkpoint("run", 100)
    catalog.hold(pinned.id, owner="ana", reason="best so far")
    before = [(row.id, row.save_id, row.verdict) for row in catalog.checkpoints("run")]
    moved = Training(training.root.rename(training.root.parent / "runB"))
    apply(plan_scan(str(moved.root), catalog), catalog)
    assert [(row.id, row.save_id, row.verdict) for row in catalog.checkpoints("run")] == before
    assert [hold.reason for hold in catalog.holds(pinned.id)] == ["best so far"]
    assert {row.root_url for row in catalog.checkpoints("run")} == {str(moved.root)}
    (lease,) = catalog.lease_unverified(owner="w", ttl=60, checkpoint_id=pinned.id, force=True)
    assert verify_leased(catalog, lease).ok


def test_c15_a_copy_is_no_second_checkpoint(catalog: Catalog, url: str, tmp_path: Path, training: Training) -> None:
    """C15: copy instead of move."""
    training.attempt(100, listeners=[Recorder(url)])
    shutil.copytree(training.root, tmp_path / "copy")
    assert not plan_scan(str(tmp_path / "copy"), catalog).pending
    assert len(catalog.checkpoints("run")) == 1


def test_c16_a_corrupt_recovery_copy_gives_way_to_the_checkpoint_before_it(
    catalog: Catalog, url: str, training: Training
) -> None:
    """C16, first half: non-persistent 250 with one flipped byte, persistent 200 good."""
    recorder = [Recorder(url)]
    training.attempt(150, 200, listeners=recorder)
    training.attempt(250, resume=True, kind="non_persistent_global", listeners=recorder)
    flip_a_byte(max((training.root / "non_persistent" / "iter_0000250").glob("__*.distcp")), at=1000)
    verify_all(catalog)
    assert resume(catalog) == (1, 200)
    catalog.change(catalog.checkpoint("run", 200).id, verdict="suspect", reason="two resumes from it failed")
    assert resume(catalog) == (1, 150)


def test_c18_modification_times_order_nothing(catalog: Catalog, url: str, training: Training) -> None:
    """C18: mtimes equal, reversed, in 1970; and a later attempt at a lower iteration is the newer one."""
    recorder = [Recorder(url)]
    training.attempt(500, 600, 700, listeners=recorder)
    verify_all(catalog)
    plans = []
    for times in ((0, 0, 0), (3e9, 2e9, 1e9), (1e9, 2e9, 3e9)):
        for iteration, when in zip((500, 600, 700), times, strict=True):
            for path in training.directory(iteration).rglob("*"):
                os.utime(path, (when, when))
        assert resume(catalog) == (1, 700)
        with Catalog(empty_catalog(_fresh(training.root.parent))) as other:
            result = apply(plan_scan(str(training.root), other), other)
            plans.append([(row.attempt, row.iteration) for row in result.adopted])
    assert plans == [[(1, 500), (1, 600), (1, 700)]] * 3
    training.attempt(100, listeners=recorder)
    verify_all(catalog)
    assert resume(catalog) == (2, 100)


def _fresh(parent: Path) -> Path:
    """A new directory."""
    made = parent / f"catalog-{len(list(parent.glob('catalog-*')))}"
    made.mkdir()
    return made


def test_c22_sidecars_are_no_checkpoints(catalog: Catalog, training: Training) -> None:
    """C22: one checkpoint; everything else with such a name is reported and never touched."""
    training.attempt(100)
    others = ("energon/iter_0000100", "iter_0000100.tmp", "iter_0000100_backup", "wgrads/iter_0000100")
    for name in others:
        (training.root / name).mkdir(parents=True)
        (training.root / name / "data.pt").write_bytes(b"x")
    plan = plan_scan(str(training.root), catalog)
    apply(plan, catalog)
    assert [row.path for row in catalog.checkpoints()] == ["iter_0000100"]
    assert {item.name for item in plan.unmanaged} == {name.split("/")[0] for name in others}
    assert all((training.root / name / "data.pt").exists() for name in others)


def test_c32_a_copy_without_its_commit_marker_is_never_a_checkpoint(
    catalog: Catalog, training: Training, tmp_path: Path
) -> None:
    """C32: cp -r of the data alone into a managed root: named, not adopted, not removed."""
    other = Training(tmp_path / "other", run="other")
    other.attempt(500)
    training.attempt(100)
    training.directory(500).mkdir()
    for path in other.directory(500).glob("__*.distcp"):
        shutil.copy(path, training.directory(500))
    plan = plan_scan(str(training.root), catalog)
    assert [item.name for item in plan.unmanaged] == ["iter_0000500"]
    apply(plan, catalog)
    assert [row.iteration for row in catalog.checkpoints()] == [100]
    assert any(training.directory(500).iterdir())
