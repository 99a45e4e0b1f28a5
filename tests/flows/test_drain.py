"""The drain on a real catalog with real checkpoints, without Prefect (S5, V2 to V4)."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from functools import partial

from catalog.catalog import Catalog
from catalog.leases import Findings
from catalog.rows import VerifyLease
from ckptlib.verification import Batches, VerifyReport
from flows.drain import Outcome, Summary, drain, next_lease, verify_one
from flows.settings import FlowsSettings
from tests.catalog.samples import Clock
from tests.flows.workshop import Workshop, flip_a_byte


def after_the_lease(workshop: Workshop, settings: FlowsSettings) -> Catalog:
    """The catalog as somebody sees it whose clock says that every lease has run out: no test waits for that."""
    clock = Clock()
    clock.advance(settings.lease_ttl + 1)
    return Catalog(workshop.db, clock=clock)


class Notes:
    """A reporter that remembers, and may do something when a checkpoint's turn has come."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.seen: list[tuple[int, int]] = []
        self.reports: dict[str, VerifyReport | None] = {}

    def begin(self, lease: VerifyLease) -> None:
        self.begun.append(lease.iteration)

    def progress(self, done: int, total: int) -> None:
        self.seen.append((done, total))

    def end(self, outcome: Outcome, report: VerifyReport | None) -> None:
        self.reports[outcome.name] = report


def drained(catalog: Catalog, settings: FlowsSettings, notes: Notes | None = None) -> Summary:
    return drain(catalog, settings, partial(verify_one, catalog, settings, reporter=notes or Notes()))


def results(summary: Summary) -> dict[str, str]:
    return {outcome.name: outcome.result for outcome in summary.outcomes}


def test_newest_checkpoint_is_verified_first(workshop: Workshop, settings: FlowsSettings) -> None:
    rows = workshop.save(1, 2, 3)
    notes = Notes()
    summary = drained(workshop.catalog, settings, notes)
    assert notes.begun == [3, 2, 1]
    assert [workshop.verdict(row) for row in rows] == ["verified"] * 3
    assert str(summary) == "3 verified"


def test_a_drain_that_may_not_read_leaves_for_others_what_no_store_vouches_for(
    workshop: Workshop, settings: FlowsSettings
) -> None:
    """V3: and one that reads everything reads again what only a store has vouched for."""
    (row,) = workshop.save(1)
    summary = drained(workshop.catalog, settings.model_copy(update={"level": "store"}))
    assert results(summary) == {"run@1": "unverifiable"}
    assert "keeps no digests of its own" in str(summary)
    assert workshop.verdict(row) == "unverifiable"
    assert results(drained(workshop.catalog, settings.model_copy(update={"level": "store"}))) == {}
    assert results(drained(workshop.catalog, settings)) == {"run@1": "verified"}

    (other,) = workshop.save(2, run="other")
    (lease,) = workshop.catalog.lease_unverified(owner="w", ttl=60, checkpoint_id=other.id)
    workshop.catalog.finish_verification(lease, Findings("ok", "store"))
    assert results(drained(workshop.catalog, settings)) == {}
    strict = settings.model_copy(update={"level": "data"})
    assert results(drained(workshop.catalog, strict)) == {"other@2": "verified"}
    assert workshop.catalog.checkpoint_by_id(other.id).verified_level == "data"
    assert results(drained(workshop.catalog, strict)) == {}


def test_flipped_byte_is_found_and_named_and_the_others_are_verified(
    workshop: Workshop, settings: FlowsSettings
) -> None:
    good, bad, newer = workshop.save(1, 2, 3)
    flip_a_byte(workshop.data_file(bad))
    notes = Notes()
    summary = drained(workshop.catalog, settings, notes)
    assert [workshop.verdict(row) for row in (good, bad, newer)] == ["verified", "corrupt", "verified"]
    report = notes.reports["run@2"]
    assert report is not None
    assert report.files[workshop.data_file(bad).name] == "digest"
    assert workshop.data_file(bad).name in str(summary)


def test_storage_that_is_away_condemns_nothing_and_is_tried_once_per_drain(
    workshop: Workshop, settings: FlowsSettings
) -> None:
    """V2, D4: unreadable keeps the verdict and backs off."""
    away, here = workshop.save(1, run="away")[0], workshop.save(1, run="here")[0]
    workshop.root("away").rename(workshop.path / "elsewhere")
    summary = drained(workshop.catalog, settings)
    assert results(summary) == {"away@1": "unreadable", "here@1": "verified"}
    assert workshop.verdict(away) == "unverified"
    assert workshop.verdict(here) == "verified"
    assert drained(workshop.catalog, settings).outcomes == []


def test_missing_file_is_corrupt_and_named(workshop: Workshop, settings: FlowsSettings) -> None:
    (row,) = workshop.save(1)
    gone = workshop.data_file(row)
    gone.unlink()
    summary = drained(workshop.catalog, settings)
    assert workshop.verdict(row) == "corrupt"
    assert f"{gone.name}: missing" in summary.outcomes[0].detail


def test_progress_ends_at_all_bytes(workshop: Workshop, settings: FlowsSettings) -> None:
    (row,) = workshop.save(1, floats=300_000)
    notes = Notes()
    drained(workshop.catalog, settings, notes)
    done, total = notes.seen[-1]
    assert done == total >= row.size


def test_a_checkpoint_larger_than_a_batch_is_read_in_several_and_judged_as_one(
    workshop: Workshop, settings: FlowsSettings
) -> None:
    (row,) = workshop.save(1, floats=5000)
    bad = workshop.data_file(row)
    flip_a_byte(bad)
    ran: list[str] = []

    def run(label: str, work: Callable[[], None]) -> None:
        work()
        ran.append(label)

    lease = next_lease(workshop.catalog, settings, run=None, handled=())
    assert lease is not None
    notes = Notes()
    outcome = verify_one(workshop.catalog, settings, lease, notes, batches=Batches(1 << 30, 3, run))
    report = notes.reports["run@1"]
    assert report is not None
    assert len(ran) > 1
    assert all(int(label.partition(" ")[0]) <= 3 for label in ran)
    assert outcome.result == "corrupt"
    assert [name for name, verdict in report.files.items() if verdict == "digest"] == [bad.name]
    assert {file.path for file in workshop.catalog.files(row.id)} <= report.files.keys()
    assert notes.seen[-1][0] == notes.seen[-1][1]


def test_a_lease_that_is_lost_between_two_batches_stops_the_work(workshop: Workshop, settings: FlowsSettings) -> None:
    (row,) = workshop.save(1)
    short = settings.model_copy(update={"lease_ttl": 1.0})
    ran: list[str] = []

    def run(label: str, work: Callable[[], None]) -> None:
        ran.append(label)
        if len(ran) == 2:
            time.sleep(1.1)  # also until the next renewal is due
            assert next_lease(workshop.catalog, settings, run=None, handled=()) is not None
        work()

    lease = next_lease(workshop.catalog, short, run=None, handled=())
    assert lease is not None
    outcome = verify_one(workshop.catalog, short, lease, Notes(), batches=Batches(1, 1, run))
    assert outcome.result == "lost"
    assert len(ran) == 2
    assert workshop.verdict(row) == "unverified"


def test_drain_of_one_run_leaves_the_others_alone(workshop: Workshop, settings: FlowsSettings) -> None:
    (mine,), (other,) = workshop.save(1, run="team/mine x"), workshop.save(1, run="other")
    work = partial(verify_one, workshop.catalog, settings, reporter=Notes())
    drain(workshop.catalog, settings, work, run="team/mine x")
    assert (workshop.verdict(mine), workshop.verdict(other)) == ("verified", "unverified")


def test_commit_during_the_linger_is_verified_by_the_same_drain(workshop: Workshop, settings: FlowsSettings) -> None:
    """Its event may have been dropped: it fell into the window of the event that started this drain."""
    lingering = settings.model_copy(update={"linger": 2.5})
    saver = threading.Timer(0.5, workshop.save, args=(7,))
    saver.start()
    began = time.monotonic()
    summary = drained(workshop.catalog, lingering)
    saver.join()
    assert results(summary) == {"run@7": "verified"}
    assert time.monotonic() - began >= 2.5


def test_work_of_a_killed_drain_is_done_by_a_later_one(workshop: Workshop, settings: FlowsSettings) -> None:
    """S5: nobody finishes or releases the lease; it runs out."""
    (row,) = workshop.save(1)
    assert next_lease(workshop.catalog, settings, run=None, handled=()) is not None
    assert drained(workshop.catalog, settings).outcomes == []
    with after_the_lease(workshop, settings) as catalog:
        assert results(drained(catalog, settings)) == {"run@1": "verified"}
    assert workshop.verdict(row) == "verified"


def test_worker_whose_lease_was_taken_over_writes_nothing(workshop: Workshop, settings: FlowsSettings) -> None:
    """S1: the token is part of the compare-and-set."""
    (row,) = workshop.save(1)
    slow = next_lease(workshop.catalog, settings, run=None, handled=())
    assert slow is not None
    with after_the_lease(workshop, settings) as catalog:
        assert next_lease(catalog, settings, run=None, handled=()) is not None
    flip_a_byte(workshop.data_file(row))
    outcome = verify_one(workshop.catalog, settings, slow, Notes())
    assert outcome.result == "lost"
    assert workshop.verdict(row) == "unverified"


def test_two_drains_share_the_work_and_do_nothing_twice(workshop: Workshop, settings: FlowsSettings) -> None:
    rows = workshop.save(*range(1, 9))
    summaries: list[Summary] = []

    def run() -> None:
        with Catalog(workshop.db) as catalog:
            summaries.append(drained(catalog, settings))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [outcome.name for summary in summaries for outcome in summary.outcomes]
    assert sorted(names) == sorted(row.name for row in rows)
    assert all(len(workshop.catalog.verifications(row.id)) == 1 for row in rows)


def test_one_checkpoint_that_cannot_be_handled_keeps_no_other_from_being_verified(
    workshop: Workshop, settings: FlowsSettings
) -> None:
    """An unknown level is our error, not the bytes': no verdict, and the drain goes on."""
    old, new = workshop.save(1, 2)

    def work(lease: VerifyLease) -> Outcome:
        level = "no such level" if lease.checkpoint_id == new.id else None
        return verify_one(workshop.catalog, settings, lease, Notes(), level=level)

    summary = drain(workshop.catalog, settings, work)
    assert results(summary) == {"run@2": "failed", "run@1": "verified"}
    assert (workshop.verdict(old), workshop.verdict(new)) == ("verified", "unverified")
    assert "no such level" in str(summary)


def test_deleted_directory_is_corrupt_and_stays_listed(workshop: Workshop, settings: FlowsSettings) -> None:
    """V4: a corrupt copy is never removed as a side effect."""
    (row,) = workshop.save(1)
    shutil.rmtree(row.url)
    drained(workshop.catalog, settings)
    assert workshop.verdict(row) in ("corrupt", "unverified")
    assert [found.id for found in workshop.catalog.checkpoints("run")] == [row.id]
