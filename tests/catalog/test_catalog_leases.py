"""S5: the queue of verifications, its leases and its verdicts."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog import Catalog
from catalog.leases import BACKOFF, BACKOFF_LIMIT, FileFinding, backoff
from catalog.rows import CheckpointRow, VerifyLease
from ckptlib.errors import CatalogError, LeaseHeldError, StaleWriteError
from tests.catalog.samples import CORRUPT, GOOD, UNREADABLE, UNVERIFIABLE, Clock, Report, commit, save_id

Verified = Callable[..., CheckpointRow]


def lease(catalog: Catalog, owner: str = "worker", **options: object) -> VerifyLease:
    (taken,) = catalog.lease_unverified(owner=owner, ttl=60, **options)  # type: ignore[arg-type]
    return taken


def test_a_lease_says_what_to_verify_and_with_which_digests(catalog: Catalog) -> None:
    row = catalog.record(commit(100))
    taken = lease(catalog)
    assert (taken.checkpoint_id, taken.run, taken.iteration, taken.save_id) == (row.id, "run", 100, save_id(100))
    assert (taken.url, taken.size, taken.root_id) == (row.url, row.size, "root-1")
    assert taken.files == catalog.files(row.id)
    held = catalog.checkpoint_by_id(row.id)
    assert (held.lease_owner, held.version) == ("worker", row.version), "a lease is nobody's reason to decide anew"


def test_the_newest_is_verified_first(catalog: Catalog) -> None:
    for iteration in (100, 200, 300):
        catalog.record(commit(iteration))
    assert [taken.iteration for taken in catalog.lease_unverified(owner="w", ttl=60, limit=2)] == [300, 200]
    assert [taken.iteration for taken in catalog.lease_unverified(owner="w", ttl=60, limit=9)] == [100]


def test_what_is_leased_is_taken_by_nobody_else_until_the_lease_expires(catalog: Catalog, clock: Clock) -> None:
    row = catalog.record(commit(100))
    first = lease(catalog, "first")
    assert catalog.lease_unverified(owner="second", ttl=60) == []
    with pytest.raises(LeaseHeldError, match="first verifies it") as raised:
        catalog.lease_unverified(owner="second", ttl=60, checkpoint_id=row.id, force=True)
    assert raised.value.exit_code == 11
    clock.advance(61)
    assert lease(catalog, "second").token != first.token


def test_of_two_that_verified_one_writes_the_verdict(catalog: Catalog, clock: Clock) -> None:
    """S1: the lease's token is part of the compare-and-set."""
    row = catalog.record(commit(100))
    first = lease(catalog, "first")
    clock.advance(61)
    second = lease(catalog, "second")
    with pytest.raises(LeaseHeldError, match="second took over"):
        catalog.finish_verification(first, CORRUPT)
    with pytest.raises(LeaseHeldError):
        catalog.renew(first, 60)
    with pytest.raises(LeaseHeldError):
        catalog.release(first, reason="test")
    assert catalog.checkpoint_by_id(row.id).verdict == "unverified"
    assert catalog.finish_verification(second, GOOD).verdict == "verified"
    with pytest.raises(StaleWriteError, match="is gone"):
        catalog.finish_verification(first, CORRUPT)
    assert [event.kind for event in catalog.events(checkpoint_id=row.id)] == ["saved", "verified"]
    assert len(catalog.verifications(row.id)) == 1


def test_an_expired_lease_that_nobody_took_is_still_its_owners(catalog: Catalog, clock: Clock) -> None:
    catalog.record(commit(100))
    taken = lease(catalog)
    clock.advance(3600)
    taken = catalog.renew(taken, 60)
    clock.advance(3600)
    assert catalog.finish_verification(taken, GOOD).verdict == "verified"


def test_a_renewed_lease_lasts_from_now(catalog: Catalog, clock: Clock) -> None:
    catalog.record(commit(100))
    taken = lease(catalog)
    clock.advance(50)
    renewed = catalog.renew(taken, 60)
    assert renewed.expires_at > taken.expires_at
    clock.advance(50)
    assert catalog.lease_unverified(owner="other", ttl=60) == []


def test_a_checkpoint_that_goes_away_takes_its_lease_with_it(catalog: Catalog) -> None:
    row = catalog.record(commit(100))
    taken = lease(catalog)
    catalog.record(commit(100, number=1, replaces=(row.save_id,)))
    with pytest.raises(StaleWriteError, match="deleted"):
        catalog.finish_verification(taken, GOOD)
    with pytest.raises(StaleWriteError):
        catalog.renew(taken, 60)
    assert catalog.checkpoint_by_id(row.id).verdict == "unverified"


def test_a_hold_placed_meanwhile_does_not_waste_the_verification(catalog: Catalog) -> None:
    row = catalog.record(commit(100))
    taken = lease(catalog)
    catalog.hold(row.id, owner="me", reason="paper")
    assert catalog.finish_verification(taken, GOOD).verdict == "verified"


@pytest.mark.parametrize(
    ("report", "level", "verdict"),
    [
        (GOOD, "data", "verified"),
        (GOOD, "store", "verified"),
        (GOOD, "structure", "unverified"),
        (GOOD, "listing", "unverified"),
        (CORRUPT, "data", "corrupt"),
        (CORRUPT, "listing", "corrupt"),
        (UNREADABLE, "data", "unverified"),
        (UNVERIFIABLE, "store", "unverifiable"),
        (Report(ok=False), "data", "unverified"),
    ],
)
def test_the_verdict_follows_from_the_report_and_its_level(
    catalog: Catalog, report: Report, level: str, verdict: str
) -> None:
    """V2, V3."""
    catalog.record(commit(100))
    row = catalog.finish_verification(lease(catalog), report, level=level)
    assert row.verdict == verdict
    assert (row.verified_level, row.verified_at is not None) == (
        (level, True) if verdict == "verified" else (None, False)
    )
    assert row.lease_owner is None
    (done,) = catalog.verifications(row.id)
    assert (done.level, done.verdict, done.bytes_read) == (level, verdict, 107)


def test_what_is_unverifiable_waits_for_whoever_reads_it(catalog: Catalog) -> None:
    """V3: and then it is verified."""
    row = catalog.record(commit(100))
    assert catalog.finish_verification(lease(catalog), UNVERIFIABLE, level="store").verdict == "unverifiable"
    (done,) = catalog.verifications(row.id)
    assert (done.outcome, done.counts, done.failed) == ("unverifiable", {"unverifiable": 1}, {})
    assert done.problems == ("x.distcp: unverifiable: no word",)
    assert not catalog.lease_unverified(owner="w", ttl=60, level="store")
    assert [catalog.waiting("run", level=level) != [] for level in ("store", "auto", "data")] == [False, True, True]
    verified = catalog.finish_verification(lease(catalog, level="auto"), GOOD, level="data")
    assert (verified.verdict, verified.verified_level) == ("verified", "data")
    assert not catalog.waiting("run", level="data")


def test_what_the_store_vouched_for_waits_for_whoever_wants_it_read(catalog: Catalog) -> None:
    """V3: the level is recorded, and only `data` adds to `store`."""
    catalog.record(commit(100))
    assert catalog.finish_verification(lease(catalog), GOOD, level="store").verified_level == "store"
    assert [catalog.waiting(level=level) != [] for level in ("store", "auto", "data")] == [False, False, True]
    taken = lease(catalog, level="data")
    assert catalog.finish_verification(taken, GOOD, level="data").verified_level == "data"
    assert not catalog.waiting(level="data")


@pytest.mark.parametrize(("report", "level"), [(GOOD, "store"), (GOOD, "listing"), (UNVERIFIABLE, "store")])
def test_a_weaker_look_takes_nothing_from_a_checkpoint_that_was_read_back(
    catalog: Catalog, report: Report, level: str
) -> None:
    row = catalog.record(commit(100))
    catalog.finish_verification(lease(catalog), GOOD, level="data")
    after = catalog.finish_verification(lease(catalog, checkpoint_id=row.id, force=True), report, level=level)
    assert (after.verdict, after.verified_level) == ("verified", "data")


@pytest.mark.parametrize("first", ["store", "data"])
def test_a_corrupt_copy_is_verified_again_only_by_being_read(catalog: Catalog, first: str) -> None:
    """V3, V4: the store's word is of what it was given, and bytes went bad there since."""
    row = catalog.record(commit(100))
    steps = ((GOOD, "store", "verified"), (CORRUPT, first, "corrupt"), (GOOD, "store", "corrupt"))
    for report, level, verdict in (*steps, (GOOD, "data", "verified")):
        taken = lease(catalog, checkpoint_id=row.id, force=True)
        after = catalog.finish_verification(taken, report, level=level)
        assert after.verdict == verdict
    assert after.verified_level == "data"


def test_a_verification_keeps_the_verdict_of_every_file_that_is_not_ok(catalog: Catalog) -> None:
    row = catalog.record(commit(100))
    checks = {"a": FileFinding("ok"), "b": FileFinding("ok"), "c": FileFinding("missing"), "t": FileFinding("extra")}
    report = Report(ok=False, corrupt=True, checks=checks, problems=("c is missing",))
    catalog.finish_verification(lease(catalog), report, worker="flow-7")
    (done,) = catalog.verifications(row.id)
    assert done.counts == {"ok": 2, "missing": 1, "extra": 1}
    assert done.failed == {"c": {"verdict": "missing", "detail": ""}}
    assert (done.problems, done.worker, done.outcome) == (("c is missing",), "flow-7", "corrupt")


def test_unreadable_keeps_the_old_verdict_and_waits_longer_each_time(
    catalog: Catalog, clock: Clock, verified: Verified
) -> None:
    """V2: storage that is not mounted proves nothing."""
    row = verified(100)
    taken = lease(catalog, checkpoint_id=row.id, force=True)
    assert catalog.finish_verification(taken, UNREADABLE).verdict == "verified"

    row = catalog.record(commit(200))
    for failures in (1, 2):
        after = catalog.finish_verification(lease(catalog), UNREADABLE)
        assert (after.verdict, after.verify_failures) == ("unverified", failures)
        assert catalog.lease_unverified(owner="w", ttl=60) == []
        clock.advance(backoff(failures) + 1)
    assert catalog.finish_verification(lease(catalog), GOOD).verify_failures == 0
    assert [event.kind for event in catalog.events(checkpoint_id=row.id)][1:] == [
        "verify-deferred",
        "verify-deferred",
        "verified",
    ]


def test_force_does_not_wait_out_a_backoff(catalog: Catalog) -> None:
    row = catalog.record(commit(100))
    catalog.finish_verification(lease(catalog), UNREADABLE)
    assert catalog.lease_unverified(owner="w", ttl=60, checkpoint_id=row.id) == []
    assert lease(catalog, checkpoint_id=row.id, force=True).checkpoint_id == row.id


@given(st.integers(1, 100))
def test_the_backoff_doubles_up_to_a_limit(failures: int) -> None:
    assert BACKOFF <= backoff(failures) <= backoff(failures + 1) <= min(2 * backoff(failures), BACKOFF_LIMIT)


def test_released_work_is_free_at_once_or_after_a_while(catalog: Catalog, clock: Clock) -> None:
    catalog.record(commit(100))
    catalog.release(lease(catalog), reason="cancelled")
    catalog.release(lease(catalog), reason="out of memory", retry_after=30)
    assert catalog.lease_unverified(owner="w", ttl=60) == []
    clock.advance(31)
    assert lease(catalog).iteration == 100


def test_forced_verification_takes_what_has_a_verdict_already(catalog: Catalog, verified: Verified) -> None:
    row = verified(100)
    assert catalog.lease_unverified(owner="w", ttl=60) == []
    taken = lease(catalog, checkpoint_id=row.id, force=True)
    assert catalog.finish_verification(taken, CORRUPT).verdict == "corrupt"
    taken = lease(catalog, checkpoint_id=row.id, force=True)
    assert catalog.finish_verification(taken, GOOD).verdict == "verified", "a restored copy is good again"


def test_a_suspect_checkpoint_stays_suspect_when_its_bytes_are_right(catalog: Catalog, verified: Verified) -> None:
    """C16: they were right when the resume failed, too."""
    row = verified(100)
    catalog.change(row.id, verdict="suspect", reason="NaN three steps after the resume")
    taken = lease(catalog, checkpoint_id=row.id, force=True)
    assert catalog.finish_verification(taken, GOOD).verdict == "suspect"


def test_work_can_be_limited_to_a_run_or_passed_over(catalog: Catalog) -> None:
    first = catalog.record(commit(100, run="a"))
    second = catalog.record(commit(100, run="b"))
    assert lease(catalog, run="a").run == "a"
    assert catalog.lease_unverified(owner="w", ttl=60, limit=9, exclude={first.id, second.id}) == []
    assert lease(catalog, exclude={first.id}).checkpoint_id == second.id


def test_what_is_not_finalized_cannot_be_verified(catalog: Catalog) -> None:
    row = catalog.record(commit(100))
    catalog.mark_missing(row.id, reason="test")
    assert catalog.lease_unverified(owner="w", ttl=60) == []
    with pytest.raises(CatalogError, match="is missing; only a finalized one"):
        catalog.lease_unverified(owner="w", ttl=60, checkpoint_id=row.id, force=True)
    with pytest.raises(CatalogError, match="no checkpoint with id 99"):
        catalog.lease_unverified(owner="w", ttl=60, checkpoint_id=99)


# ---------------------------------------------------------------- holds


def test_a_hold_is_placed_listed_and_released(catalog: Catalog, clock: Clock) -> None:
    row = catalog.record(commit(100))
    hold = catalog.hold(row.id, owner="ana", reason="figure 3")
    assert [(h.owner, h.kind, h.reason) for h in catalog.holds(row.id)] == [("ana", "pin", "figure 3")]
    assert catalog.checkpoint_by_id(row.id).version == row.version + 1, "a plan made before must notice"
    catalog.release_hold(hold.id)
    assert catalog.release_hold(hold.id).released_at is not None
    assert catalog.holds(row.id) == []
    assert [h.id for h in catalog.holds(row.id, active=False)] == [hold.id]
    assert [event.kind for event in catalog.events(checkpoint_id=row.id)] == ["saved", "held", "hold-released"]


def test_a_hold_ends_by_itself(catalog: Catalog, clock: Clock) -> None:
    row = catalog.record(commit(100))
    until = row.committed_at.replace(year=row.committed_at.year + 1)
    catalog.hold(row.id, owner="flow", kind="resume-scheduled", reason="Monday", expires_at=until)
    assert len(catalog.holds()) == 1
    clock.advance(400 * 86400)
    assert catalog.holds() == []


def test_a_hold_on_what_is_being_deleted_fails(catalog: Catalog) -> None:
    """D1."""
    row = catalog.record(commit(100))
    catalog.change(row.id, lifecycle="deleting", reason="test")
    with pytest.raises(CatalogError, match="is deleting, a hold can no longer save it"):
        catalog.hold(row.id, owner="ana", reason="too late")


def test_a_hold_that_makes_no_sense_is_refused(catalog: Catalog) -> None:
    row = catalog.record(commit(100))
    with pytest.raises(CatalogError, match="expected one of pin"):
        catalog.hold(row.id, owner="ana", reason="x", kind="wish")
    with pytest.raises(CatalogError, match="in the past"):
        catalog.hold(row.id, owner="ana", reason="x", expires_at=row.committed_at.replace(year=2000))
    with pytest.raises(CatalogError, match="no hold with id 5"):
        catalog.release_hold(5)


# ---------------------------------------------------------------- at the same time


def test_workers_at_the_same_time_share_the_work_and_never_a_checkpoint(catalog: Catalog, catalog_url: str) -> None:
    for iteration in range(12):
        catalog.record(commit(iteration))
    taken: list[int] = []
    failures: list[Exception] = []
    start = threading.Barrier(4)

    def work(name: str) -> None:
        try:
            with Catalog(catalog_url) as own:
                start.wait()
                while leases := own.lease_unverified(owner=name, ttl=60):
                    taken.append(leases[0].checkpoint_id)
                    own.finish_verification(leases[0], GOOD)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"worker-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(taken) == [row.id for row in catalog.checkpoints()], "each exactly once"
    assert {row.verdict for row in catalog.checkpoints()} == {"verified"}


def test_recorders_at_the_same_time_record_each_save_once(catalog: Catalog, catalog_url: str) -> None:
    """S3: a trainer, a scan and an operator may report the same save in the same moment."""
    failures: list[Exception] = []
    start = threading.Barrier(4)

    def work() -> None:
        try:
            with Catalog(catalog_url) as own:
                start.wait()
                for iteration in range(5):
                    own.record(commit(iteration))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [row.iteration for row in catalog.checkpoints()] == [0, 1, 2, 3, 4]
    assert [event.kind for event in catalog.events("run")].count("saved") == 5
