"""Verifying real checkpoints: save, record, lease, read back, verdict, resume (S5, V1 to V4, W6, R2)."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptlib
from catalog import Catalog, Recorder, ResumeResolver, verification
from catalog.rows import VerifyLease
from catalog.verification import expected_digests, verify_leased
from ckptlib.errors import LeaseHeldError, NoResumePointError, StorageUnavailableError, SupersededError
from ckptlib.exports import integrity_bytes
from ckptlib.manifest import Decision, Manifest
from ckptlib.verification import VerifyReport
from tests.catalog.samples import Clock, empty_catalog
from tests.catalog.training import Training, flip_a_byte


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "run")


def lease(catalog: Catalog, **options: Any) -> VerifyLease:
    (taken,) = catalog.lease_unverified(owner="worker", ttl=60, **options)
    return taken


def verify_all(catalog: Catalog) -> dict[int, str]:
    """Drains the queue; iteration -> verdict."""
    while leases := catalog.lease_unverified(owner="worker", ttl=60):
        verify_leased(catalog, leases[0])
    return {row.iteration: row.verdict for row in catalog.checkpoints()}


def tracker_of(training: Training) -> str | None:
    path = training.root / "latest_checkpointed_iteration.txt"
    return path.read_text() if path.exists() else None


def test_save_record_verify_resume(catalog: Catalog, catalog_url: str, training: Training) -> None:
    """The spine: everything real, from a trainer's save to its restart."""
    training.attempt(100, 200, 300, listeners=[Recorder(catalog_url)])
    resolver = ResumeResolver(catalog_url)
    with pytest.raises(NoResumePointError, match=r"iteration 300, is not verified yet.*ckpt verify run"):
        training.attempt(resume=True, resolver=resolver)
    assert verify_all(catalog) == {100: "verified", 200: "verified", 300: "verified"}
    restored = training.attempt(400, resume=True, resolver=resolver, listeners=[Recorder(catalog_url)])
    assert restored is not None
    assert (restored.iteration, restored.progress["consumed_samples"]) == (300, 2400)
    assert restored.reason == "newest verified checkpoint of run 'run'"
    newest = catalog.checkpoint("run", 400)
    assert newest.parent == catalog.checkpoint("run", 300).save_id == catalog.attempts("run")[-1].resumed_from
    assert newest.metrics == {"loss": 1 / 401}


def test_a_flipped_byte_is_corrupt_and_the_resume_takes_the_one_before(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    training.attempt(100, 200, listeners=[Recorder(catalog_url)])
    flip_a_byte(training.data_file(200), at=1000)
    assert verify_all(catalog) == {100: "verified", 200: "corrupt"}
    (done,) = catalog.verifications(catalog.checkpoint("run", 200).id)
    assert list(done.failed) == [training.data_file(200).name]
    assert done.failed[training.data_file(200).name]["verdict"] == "digest"
    restored = training.attempt(resume=True, resolver=ResumeResolver(catalog_url))
    assert restored is not None
    assert restored.iteration == 100
    assert "1 newer rejected, the newest, iteration 200, is corrupt" in restored.reason


def test_the_catalogs_digests_are_compared_before_the_manifests(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    """V1: a save that was forged together with its manifest is found by the catalog's own copy."""
    training.attempt(100, listeners=[Recorder(catalog_url)])
    other = Training(training.root.parent / "other")
    other.attempt(100)
    stolen = other.data_file(100)
    shutil.copy(stolen, training.data_file(100))
    row = catalog.checkpoint("run", 100)
    taken = lease(catalog)
    assert expected_digests(taken)[training.data_file(100).name][0] == row.size - sum(
        file.size for file in catalog.files(row.id) if file.role in ("begin", "common", "index", "metadata")
    )
    report = verify_leased(catalog, taken)
    assert report.corrupt


def test_a_manifest_that_is_not_the_recorded_one_is_corrupt_whatever_its_files_say(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    """V1: digests of parts are in the manifest alone; one that was forged with its decision contradicts the catalog."""
    training.attempt(100, listeners=[Recorder(catalog_url)])
    directory = training.directory(100)
    save_id = catalog.checkpoint("run", 100).save_id
    control = directory / ".ckpt" / save_id
    manifest = Manifest.decode((control / "manifest.json").read_bytes(), "manifest")
    manifest = replace(manifest, tensors=manifest.tensors + 1)
    forged = manifest.encode()
    decision = Decision.decode((control / "decision.json").read_bytes(), "decision")
    digest = hashlib.sha256(forged).hexdigest()
    (control / "manifest.json").write_bytes(forged)
    (directory / "checkpoint.json").write_bytes(forged)
    (directory / "integrity.json").write_bytes(integrity_bytes(manifest))
    (control / "decision.json").write_bytes(replace(decision, manifest_sha256=digest).encode())
    assert ckptlib.verify(str(directory)).ok
    report = verify_leased(catalog, lease(catalog))
    assert report.corrupt
    assert any("not the manifest that the catalog recorded" in defect for defect in report.defects)


def test_an_unreadable_file_keeps_the_verdict_and_waits(
    catalog: Catalog, catalog_url: str, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V2, C33: a permission error says nothing about the bytes."""
    training.attempt(100, listeners=[Recorder(catalog_url)])
    if os.geteuid() == 0:  # root may read everything: let the storage refuse instead
        from ckptlib.storage import PosixStorage

        def refuse(self: PosixStorage, path: str, ranges: object) -> None:
            raise PermissionError(13, "Permission denied", path)

        monkeypatch.setattr(PosixStorage, "read_into", refuse)
    else:
        training.data_file(100).chmod(0)
    report = verify_leased(catalog, lease(catalog))
    assert report.unreadable
    row = catalog.checkpoint("run", 100)
    assert (row.verdict, row.verify_failures) == ("unverified", 1)
    assert catalog.lease_unverified(owner="worker", ttl=60) == []


def test_a_root_that_is_not_mounted_condemns_nothing(
    catalog: Catalog, catalog_url: str, training: Training, clock: Clock
) -> None:
    """D4: files that are missing with their root prove nothing; neither do those of another root in its place."""
    training.attempt(100, listeners=[Recorder(catalog_url)])
    away = training.root.rename(training.root.parent / "away")
    with pytest.raises(StorageUnavailableError, match=r"no \.ckpt/root\.json is there"):
        verify_leased(catalog, lease(catalog))
    Training(training.root, run="somebody else").attempt(100)
    clock.advance(3600)
    with pytest.raises(StorageUnavailableError, match="of run 'somebody else' is there"):
        verify_leased(catalog, lease(catalog))
    shutil.rmtree(training.root)
    away.rename(training.root)
    clock.advance(3600)
    assert verify_all(catalog) == {100: "verified"}


def test_a_root_that_goes_away_during_the_verification_condemns_nothing(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    training.attempt(100, listeners=[Recorder(catalog_url)])

    def unmount(done: int, total: int) -> None:
        if training.root.exists():
            training.root.rename(training.root.parent / "away")

    try:
        report = verify_leased(catalog, lease(catalog), threads=1, progress=unmount)
    except StorageUnavailableError:
        pass
    else:
        assert report.unreadable
    assert catalog.checkpoint("run", 100).verdict == "unverified"


def test_the_lease_is_renewed_while_there_is_progress(catalog: Catalog, catalog_url: str, training: Training) -> None:
    training.attempt(100, listeners=[Recorder(catalog_url)])
    taken = lease(catalog)
    seen = []

    def look(done: int, total: int) -> None:
        expires = catalog.checkpoint("run", 100).lease_expires_at
        assert expires is not None
        seen.append((done, total, expires))

    verify_leased(catalog, taken, progress=look, ttl=0.000001, threads=1)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0
    assert len({expires for _, _, expires in seen}) > 1


def test_a_lost_lease_stops_the_work_and_writes_nothing(
    catalog: Catalog, catalog_url: str, training: Training, clock: Clock
) -> None:
    training.attempt(100, listeners=[Recorder(catalog_url)])
    taken = lease(catalog)
    clock.advance(61)
    thief = replace(lease(catalog), owner="thief")
    blocks = 0

    def count(done: int, total: int) -> None:
        nonlocal blocks
        blocks += 1

    with pytest.raises(LeaseHeldError):
        verify_leased(catalog, taken, progress=count, ttl=0.000001, threads=1)
    assert blocks == 0, "it stopped at the first renewal"
    row = catalog.checkpoint("run", 100)
    assert (row.verdict, row.verify_failures) == ("unverified", 0)
    assert verify_leased(catalog, thief).ok


def test_work_that_was_interrupted_is_free_again_at_once(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    training.attempt(100, listeners=[Recorder(catalog_url)])

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify_leased(catalog, lease(catalog), progress=interrupt)
    assert verify_all(catalog) == {100: "verified"}
    kinds = [event.kind for event in catalog.events(checkpoint_id=catalog.checkpoint("run", 100).id)]
    assert kinds == ["saved", "verify-released", "verified"]


def test_work_that_failed_is_given_back_for_later(catalog: Catalog, catalog_url: str, training: Training) -> None:
    training.attempt(100, listeners=[Recorder(catalog_url)])

    def fail(done: int, total: int) -> None:
        raise RuntimeError("a bug in the display")

    with pytest.raises(RuntimeError):
        verify_leased(catalog, lease(catalog), progress=fail)
    assert catalog.lease_unverified(owner="worker", ttl=60) == []
    assert catalog.checkpoint("run", 100).verify_failures == 1


def test_a_database_that_dies_during_the_work_does_not_stop_the_reading(
    tmp_path: Path, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    path = empty_catalog(tmp_path)
    training.attempt(100, listeners=[Recorder(path)])
    with Catalog(path) as catalog, Catalog(path, timeout=0.05) as impatient:
        keeper = verification._Keeper(impatient, lease(catalog), 0.000001, None)
        with catalog.database.write():
            keeper(1, 2)
    assert "could not be renewed" in caplog.text


@pytest.mark.parametrize("level", ["listing", "structure"])
def test_a_shallow_look_grants_nothing(catalog: Catalog, catalog_url: str, training: Training, level: str) -> None:
    """V3."""
    training.attempt(100, listeners=[Recorder(catalog_url)])
    report = verify_leased(catalog, lease(catalog), level=level)
    assert report.ok
    assert catalog.checkpoint("run", 100).verdict == "unverified"
    assert lease(catalog).iteration == 100, "and it still waits"


def test_a_verified_checkpoint_is_not_condemned_by_the_save_that_took_its_exports(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    """W9: two saves in one directory; `.metadata` and the like belong to the newer one."""
    training.attempt(100, 200, listeners=[Recorder(catalog_url)])
    verify_all(catalog)
    training.attempt(200, at=100, listeners=[Recorder(catalog_url)])
    old, new = sorted((row for row in catalog.checkpoints() if row.iteration == 200), key=lambda row: row.attempt)
    assert verify_leased(catalog, lease(catalog, checkpoint_id=old.id, force=True)).ok
    assert verify_leased(catalog, lease(catalog, checkpoint_id=new.id, force=True)).ok
    assert [(row.attempt, row.branch) for row in catalog.checkpoints() if row.iteration == 200] == [
        (1, "abandoned"),
        (2, "live"),
    ]


# ---------------------------------------------------------------- the tracker follows (W6)


def test_a_tracker_that_is_left_to_the_verifier_names_the_newest_verified(
    catalog: Catalog, catalog_url: str, tmp_path: Path
) -> None:
    training = Training(tmp_path / "run", tracker="verified")
    training.attempt(100, 200, listeners=[Recorder(catalog_url)])
    assert tracker_of(training) is None
    verify_leased(catalog, lease(catalog))
    assert tracker_of(training) == "200", "the newest was verified first"
    verify_all(catalog)
    assert tracker_of(training) == "200", "an older one does not move it back"
    training.attempt(300, 400, resume=True, listeners=[Recorder(catalog_url)])
    flip_a_byte(training.data_file(400), at=1000)
    verify_all(catalog)
    assert tracker_of(training) == "300"


def test_a_corrupt_checkpoint_that_the_tracker_names_makes_it_name_the_newest_verified(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    training.attempt(100, 200, 300, listeners=[Recorder(catalog_url)])
    assert tracker_of(training) == "300"
    verify_leased(catalog, lease(catalog, checkpoint_id=catalog.checkpoint("run", 100).id))
    flip_a_byte(training.data_file(300), at=1000)
    assert verify_leased(catalog, lease(catalog)).corrupt
    assert tracker_of(training) == "100", "what was verified at that moment"
    assert verify_all(catalog) == {100: "verified", 200: "verified", 300: "corrupt"}
    assert tracker_of(training) == "100", "the trainer's own, otherwise"


def test_a_tracker_that_a_person_set_back_stays(catalog: Catalog, catalog_url: str, training: Training) -> None:
    training.attempt(100, 200, listeners=[Recorder(catalog_url)])
    verify_all(catalog)
    training.attempt(300, listeners=[Recorder(catalog_url)])
    (training.root / "latest_checkpointed_iteration.txt").write_text("100")
    verify_all(catalog)
    assert tracker_of(training) == "100"


def test_without_anything_verified_a_trainers_tracker_is_left_and_a_verifiers_goes(
    catalog: Catalog, catalog_url: str, training: Training, tmp_path: Path
) -> None:
    """Without a tracker Megatron starts from random weights: that is not done to who did not ask for it."""
    training.attempt(100, listeners=[Recorder(catalog_url)])
    flip_a_byte(training.data_file(100), at=1000)
    assert verify_all(catalog) == {100: "corrupt"}
    assert tracker_of(training) == "100"

    strict = Training(tmp_path / "strict", run="strict", tracker="verified")
    strict.attempt(100, listeners=[Recorder(catalog_url)])
    verify_all(catalog)
    assert tracker_of(strict) == "100"
    flip_a_byte(strict.data_file(100), at=1000)
    row = catalog.checkpoint("strict", 100)
    assert verify_leased(catalog, lease(catalog, checkpoint_id=row.id, force=True)).corrupt
    assert tracker_of(strict) is None


def test_a_read_only_root_does_not_keep_the_verdict_from_being_written(
    catalog: Catalog,
    catalog_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from ckptlib.storage import PosixStorage

    training = Training(tmp_path / "run", tracker="verified")
    training.attempt(100, listeners=[Recorder(catalog_url)])

    def refuse(self: PosixStorage, path: str, data: bytes) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(PosixStorage, "put", refuse)
    assert verify_all(catalog) == {100: "verified"}
    assert "tracker file could not be looked after" in caplog.text


def test_the_report_is_the_one_that_ckptlib_gives(catalog: Catalog, catalog_url: str, training: Training) -> None:
    training.attempt(100, listeners=[Recorder(catalog_url)])
    report = verify_leased(catalog, lease(catalog))
    assert isinstance(report, VerifyReport)
    direct = ckptlib.verify(str(training.directory(100)))
    assert report.files == direct.files


def test_a_checkpoint_that_was_superseded_is_missing_and_waits_for_nothing_any_more(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    training.attempt(100, 200, listeners=[Recorder(catalog_url)], kind="non_persistent_global")
    gone = catalog.checkpoint("run", 100)
    with pytest.raises(SupersededError):
        verify_leased(catalog, lease(catalog, checkpoint_id=gone.id, force=True))
    assert catalog.checkpoint_by_id(gone.id).lifecycle == "missing"
    assert verify_all(catalog) == {100: "unverified", 200: "verified"}


def test_a_superseded_checkpoint_of_a_root_that_is_not_there_is_not_missing(
    catalog: Catalog, catalog_url: str, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4."""
    training.attempt(100, 200, listeners=[Recorder(catalog_url)], kind="non_persistent_global")
    gone = catalog.checkpoint("run", 100)

    def unmounted(url: str, **options: Any) -> None:
        shutil.rmtree(training.root)
        raise SupersededError(url)

    monkeypatch.setattr(verification, "verify", unmounted)
    with pytest.raises(SupersededError):
        verify_leased(catalog, lease(catalog, checkpoint_id=gone.id, force=True))
    assert catalog.checkpoint_by_id(gone.id).lifecycle == "finalized"
