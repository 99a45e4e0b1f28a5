"""R2, S4: the catalog decides what a trainer resumes from, and a dead one does not keep it from resuming."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from catalog import Catalog, Recorder, ResumeResolver
from catalog.verification import verify_leased
from ckptlib.commit import DECISION
from ckptlib.errors import NoCatalogError, NoResumePointError
from ckptlib.events import Notice
from tests.catalog.training import Training, flip_a_byte
from tests.support.old_view import OldView


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "run")


def verify_all(catalog: Catalog) -> None:
    while leases := catalog.lease_unverified(owner="worker", ttl=60):
        verify_leased(catalog, leases[0])


def test_an_explicit_iteration_is_exact(catalog: Catalog, catalog_url: str, training: Training) -> None:
    """R6."""
    training.attempt(0, 100, 200, listeners=[Recorder(catalog_url)])
    verify_all(catalog)
    resolver = ResumeResolver(catalog_url)
    for at in (0, 100):
        choice = resolver.resolve(run="run", root_url=str(training.root), at=at)
        assert choice is not None
        assert (choice.iteration, choice.url) == (at, str(training.directory(at)))
    with pytest.raises(
        NoResumePointError, match="no checkpoint at iteration 150; the nearest are 0, 100, 200"
    ) as raised:
        resolver.resolve(run="run", root_url=str(training.root), at=150)
    assert raised.value.exit_code == 21


def test_every_rejected_candidate_is_named_with_its_reason(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    training.attempt(100, 200, listeners=[Recorder(catalog_url)])
    flip_a_byte(training.data_file(200), at=1000)
    (lease,) = catalog.lease_unverified(owner="w", ttl=60)
    verify_leased(catalog, lease)
    with pytest.raises(NoResumePointError) as raised:
        ResumeResolver(catalog_url).resolve(run="run", root_url=str(training.root), at=None)
    (newest, corrupt), (oldest, waiting) = raised.value.rejected
    assert newest.startswith("run@200 (")
    assert corrupt.startswith("is corrupt")
    assert oldest.startswith("run@100 (")
    assert waiting == "is not verified yet"


def test_unverified_ones_are_taken_where_that_is_allowed(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    training.attempt(100, listeners=[Recorder(catalog_url)])
    choice = ResumeResolver(catalog_url, allow_unverified=True).resolve(run="run", root_url=str(training.root), at=None)
    assert choice is not None
    assert choice.reason == "newest unverified checkpoint of run 'run'"


def test_a_run_that_the_catalog_does_not_know_is_left_to_the_storage(catalog_url: str, training: Training) -> None:
    assert ResumeResolver(catalog_url).resolve(run="run", root_url=str(training.root), at=None) is None
    training.attempt(100)
    restored = training.attempt(resume=True, resolver=ResumeResolver(catalog_url))
    assert restored is not None
    assert restored.iteration == 100


def test_a_checkpoint_that_is_gone_from_storage_is_passed_over(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    """R1: the same predicate as everywhere; a job must not die of what somebody removed by hand."""
    training.attempt(100, 200, listeners=[Recorder(catalog_url)])
    verify_all(catalog)
    shutil.rmtree(training.directory(200))
    choice = ResumeResolver(catalog_url).resolve(run="run", root_url=str(training.root), at=None)
    assert choice is not None
    assert choice.iteration == 100
    assert "iteration 200, is missing" in choice.reason


def test_a_checkpoint_whose_decision_is_not_seen_yet_is_waited_for(
    catalog: Catalog, catalog_url: str, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R2: the catalog recorded it; a client of a network filesystem may show what was there before."""
    training.attempt(100, 200, listeners=[Recorder(catalog_url)])
    verify_all(catalog)
    old = OldView(monkeypatch, DECISION, 3, None)
    resolver = ResumeResolver(catalog_url, storage_options={"posix": {"stale_wait": 30}})
    choice = resolver.resolve(run="run", root_url=str(training.root), at=None)
    assert choice is not None
    assert (choice.iteration, old.left) == (200, 0)


def test_what_is_newer_on_storage_and_unknown_is_pointed_out(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    training.attempt(100, listeners=[Recorder(catalog_url)])
    verify_all(catalog)
    training.attempt(200, resume=True)
    choice = ResumeResolver(catalog_url).resolve(run="run", root_url=str(training.root), at=None)
    assert choice is not None
    assert choice.iteration == 100
    assert "iteration 200 on storage is newer and not in the catalog" in choice.reason


def test_a_root_that_was_moved_is_resumed_where_it_is_now(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    """C15."""
    training.attempt(100, listeners=[Recorder(catalog_url)])
    verify_all(catalog)
    moved = Training(training.root.rename(training.root.parent / "renamed"))
    restored = moved.attempt(resume=True, resolver=ResumeResolver(catalog_url))
    assert restored is not None
    assert restored.url == str(moved.directory(100))


@pytest.mark.parametrize("state", ["absent", "locked", "old schema"])
def test_a_dead_catalog_does_not_keep_a_job_from_resuming(
    catalog: Catalog, catalog_url: str, training: Training, state: str
) -> None:
    """S4: then the storage is asked, what it has is verified at once, and the job says so."""
    training.attempt(100, 200)
    flip_a_byte(training.data_file(200), at=1000)
    notices: list[Notice] = []
    resolver = ResumeResolver(f"{catalog_url}.none" if state == "absent" else catalog_url, timeout=0.2)
    if state == "old schema":
        with catalog.database.write() as (connection, _):
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0000'")
    training.options["on_event"] = notices.append
    started = time.monotonic()
    if state == "locked":
        # A writer blocks no reader in WAL mode: the resolver still answers, and knows nothing of the run.
        with catalog.database.write():
            restored = training.attempt(resume=True, resolver=resolver)
    else:
        restored = training.attempt(resume=True, resolver=resolver)
        assert "resolver_failed" in [notice.name for notice in notices]
    assert time.monotonic() - started < 10
    assert restored is not None
    assert restored.iteration == 100


def test_the_resolver_itself_says_what_is_wrong(tmp_path: Path, training: Training) -> None:
    with pytest.raises(NoCatalogError, match="ckpt init"):
        ResumeResolver(str(tmp_path / "none.db")).resolve(run="run", root_url=str(training.root), at=None)


def test_a_run_on_several_roots_resumes_from_the_one_that_has_the_newest(
    catalog: Catalog, catalog_url: str, tmp_path: Path, training: Training
) -> None:
    """C12."""
    training.attempt(100, listeners=[Recorder(catalog_url)])
    scratch = Training(tmp_path / "scratch")
    scratch.attempt(250, listeners=[Recorder(catalog_url)])
    verify_all(catalog)
    for root in (training.root, scratch.root):
        choice = ResumeResolver(catalog_url).resolve(run="run", root_url=str(root), at=None)
        assert choice is not None
        assert choice.url == str(scratch.directory(250))
