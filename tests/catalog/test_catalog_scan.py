"""Comparing roots on storage with the catalog, and rebuilding it from them (S3, W7, D4, C15, C22)."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptlib
from catalog import Catalog, Recorder
from catalog.rows import CheckpointRow
from catalog.scan import Item, ScanResult, apply, plan_scan
from catalog.verification import verify_leased
from ckptlib.errors import CatalogError
from tests.catalog.samples import T0, empty_catalog
from tests.catalog.training import Training

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "run")


def scan_and_apply(training: Training, catalog: Catalog) -> ScanResult:
    return apply(plan_scan(str(training.root), catalog), catalog, actor="scan")


def names(items: tuple[Item, ...]) -> list[str]:
    return [item.name for item in items]


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def verify(catalog: Catalog, row: CheckpointRow) -> None:
    (lease,) = catalog.lease_unverified(owner="w", ttl=60, checkpoint_id=row.id, force=True)
    verify_leased(catalog, lease)


def test_a_plan_changes_nothing_and_can_be_printed(catalog: Catalog, training: Training) -> None:
    training.attempt(100, 200)
    before = tree(training.root)
    plan = plan_scan(str(training.root), catalog)
    assert tree(training.root) == before
    assert catalog.runs() == []
    assert plan.pending
    assert names(plan.adopt) == ["iter_0000100", "iter_0000200"]
    value = json.loads(json.dumps(plan.to_json()))
    assert (value["run"], value["attempts"], len(value["adopt"])) == ("run", [1], 2)
    assert value["adopt"][0]["size"] > 0


def test_applying_twice_adopts_once(catalog: Catalog, training: Training) -> None:
    training.attempt(100, 200)
    plan = plan_scan(str(training.root), catalog)
    assert [row.iteration for row in apply(plan, catalog).adopted] == [100, 200]
    events = len(catalog.events())
    again = plan_scan(str(training.root), catalog)
    assert not again.pending
    assert again.known == 2
    apply(plan, catalog)
    assert len(catalog.events()) == events


def test_the_catalog_is_rebuilt_from_storage_with_attempts_and_lineage(
    catalog: Catalog, catalog_url: str, training: Training, tmp_path: Path
) -> None:
    """S3: what is lost are verdicts, holds and history; nothing else."""
    recorder = [Recorder(catalog_url)]
    training.attempt(100, 200, 300, listeners=recorder)
    training.attempt(150, at=100, listeners=recorder)
    training.attempt(250, 10_000_000, resume=True, listeners=recorder)
    (tmp_path / "second").mkdir()
    with Catalog(empty_catalog(tmp_path / "second")) as rebuilt:
        scan_and_apply(training, rebuilt)
        assert [facts(row) for row in rebuilt.checkpoints()] == [facts(row) for row in catalog.checkpoints()]
        assert [(a.number, a.attempt_id, a.resumed_from, a.host, a.pid) for a in rebuilt.attempts("run")] == [
            (a.number, a.attempt_id, a.resumed_from, a.host, a.pid) for a in catalog.attempts("run")
        ]
        for row in rebuilt.checkpoints():
            assert rebuilt.files(row.id) == catalog.files(catalog.checkpoint("run", row.iteration, row.save_id).id)
            verify(rebuilt, row)
        for row in catalog.checkpoints():
            verify(catalog, row)
        branches = {(row.attempt, row.iteration): row.branch for row in rebuilt.checkpoints()}
        assert branches == {(row.attempt, row.iteration): row.branch for row in catalog.checkpoints()}
        assert [key for key, branch in branches.items() if branch == "live"] == [
            (1, 100),
            (2, 150),
            (3, 250),
            (3, 10_000_000),
        ]


def facts(row: CheckpointRow) -> CheckpointRow:
    """A row without what a rebuilt catalog cannot know: its own ids and times, and that it was adopted."""
    return replace(row, id=0, seq=0, run_id=0, adopted=False, committed_at=T0, recorded_at=T0)


def test_a_save_that_is_complete_and_undecided_is_committed_and_adopted(
    catalog: Catalog, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W7: anybody can decide."""
    training.attempt(100)
    training.die_before_the_decision(200, monkeypatch)
    plan = plan_scan(str(training.root), catalog)
    assert names(plan.decide) == ["iter_0000200"]
    assert names(plan.adopt) == ["iter_0000100"]
    result = apply(plan, catalog)
    assert [(item.name, item.reason) for item in result.decided] == [("iter_0000200", "committed")]
    assert [row.iteration for row in catalog.checkpoints()] == [100, 200]
    assert ckptlib.verify(str(training.directory(200))).ok, "its exports are there, too"
    assert not plan_scan(str(training.root), catalog).pending


def test_what_is_not_complete_is_named_and_left_alone(
    catalog: Catalog, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.die_before_the_decision(100, monkeypatch)
    (record,) = (training.directory(100) / ".ckpt" / training.save_ids(100)[0]).glob("rank_*.json")
    record.unlink()
    before = tree(training.root)
    plan = plan_scan(str(training.root), catalog)
    assert [(item.name, item.reason) for item in plan.incomplete] == [
        ("iter_0000100", "1 of 1 ranks have not finished")
    ]
    apply(plan, catalog)
    assert tree(training.root) == before
    assert catalog.checkpoints() == []


def test_discovery_is_by_record_at_depth_one_and_the_rest_is_unmanaged(catalog: Catalog, training: Training) -> None:
    """C22: sidecars, leftovers and copies with a checkpoint's name count for nothing."""
    training.attempt(100)
    training.attempt(150, resume=True, kind="non_persistent_global")
    for name in ("energon/iter_0000100", "iter_0000100.tmp", "iter_0000100_backup", "wgrads/iter_0000100", "iter_100"):
        (training.root / name).mkdir(parents=True)
        (training.root / name / "common.pt").write_bytes(b"x")
    (training.root / "iter_0000300").mkdir()
    (training.root / "progress.txt").write_text("")
    before = tree(training.root)
    plan = plan_scan(str(training.root), catalog)
    assert names(plan.adopt) == ["iter_0000100", "non_persistent/iter_0000150"]
    assert sorted(names(plan.unmanaged)) == [
        "energon",
        "iter_0000100.tmp",
        "iter_0000100_backup",
        "iter_0000300",
        "iter_100",
        "progress.txt",
        "wgrads",
    ]
    apply(plan, catalog)
    assert [(row.iteration, row.kind) for row in catalog.checkpoints()] == [
        (100, "persistent"),
        (150, "non_persistent_global"),
    ]
    assert tree(training.root) == before


def test_a_checkpoint_of_another_run_in_this_root_is_not_ours(
    catalog: Catalog, training: Training, tmp_path: Path
) -> None:
    """C24, C32."""
    other = Training(tmp_path / "other", run="other run")
    other.attempt(500)
    training.attempt(100)
    shutil.copytree(other.directory(500), training.directory(500))
    plan = plan_scan(str(training.root), catalog)
    assert [(item.name, item.reason) for item in plan.unmanaged] == [("iter_0000500", "belongs to run 'other run'")]
    assert names(plan.adopt) == ["iter_0000100"]


def test_what_is_gone_becomes_missing_and_returns_unverified(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    training.attempt(100, 200, listeners=[Recorder(catalog_url)])
    verify(catalog, catalog.checkpoint("run", 100))
    training.directory(100).rename(training.root.parent / "aside")
    result = scan_and_apply(training, catalog)
    assert [(row.iteration, row.lifecycle) for row in result.missing] == [(100, "missing")]
    event = catalog.events(checkpoint_id=catalog.checkpoint("run", 100).id)[-1]
    assert event.data["reason"] == "scan: its commit decision is gone"
    (training.root.parent / "aside").rename(training.directory(100))
    plan = plan_scan(str(training.root), catalog)
    assert names(plan.returned) == ["iter_0000100"]
    (row,) = apply(plan, catalog).returned
    assert (row.lifecycle, row.verdict) == ("finalized", "unverified")


def test_a_checkpoint_that_changed_since_the_plan_is_skipped(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    training.attempt(100, listeners=[Recorder(catalog_url)])
    row = catalog.checkpoint("run", 100)
    shutil.rmtree(training.directory(100))
    plan = plan_scan(str(training.root), catalog)
    catalog.change(row.id, lifecycle="deleting", reason="somebody was faster")
    assert apply(plan, catalog).missing == ()
    assert catalog.checkpoint("run", 100).lifecycle == "deleting"


def test_damage_is_for_verification_to_judge_and_makes_nothing_missing(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    training.attempt(100, listeners=[Recorder(catalog_url)])
    decision = training.directory(100) / ".ckpt" / training.save_ids(100)[0] / "decision.json"
    decision.write_bytes(decision.read_bytes()[:-5])
    plan = plan_scan(str(training.root), catalog)
    assert plan.missing == ()
    assert names(plan.incomplete) == ["iter_0000100"]
    verify(catalog, catalog.checkpoint("run", 100))
    assert catalog.checkpoint("run", 100).verdict == "corrupt"


def test_a_deleted_checkpoint_that_is_there_again_is_reported_and_stays_deleted(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    """S3."""
    training.attempt(100, listeners=[Recorder(catalog_url)])
    row = catalog.checkpoint("run", 100)
    catalog.change(row.id, lifecycle="deleting", reason="test")
    catalog.change(row.id, lifecycle="deleted", reason="test")
    plan = plan_scan(str(training.root), catalog)
    assert names(plan.reappeared) == ["iter_0000100"]
    apply(plan, catalog)
    apply(plan, catalog)
    assert catalog.checkpoint("run", 100).lifecycle == "deleted"
    kinds = [event.kind for event in catalog.events(checkpoint_id=row.id)]
    assert kinds == ["saved", "deleting", "deleted", "reappeared"]


# ---------------------------------------------------------------- roots that are not what they seem (D4, C15)


def test_a_root_whose_identity_is_absent_is_unavailable_and_nothing_becomes_missing(
    catalog: Catalog, catalog_url: str, training: Training
) -> None:
    training.attempt(100, listeners=[Recorder(catalog_url)])
    away = training.root.rename(training.root.parent / "away")
    training.root.mkdir()
    plan = plan_scan(str(training.root), catalog, run="run")
    assert "Is the storage mounted?" in plan.unavailable
    assert not plan.pending
    with pytest.raises(CatalogError, match="mounted"):
        apply(plan, catalog)
    assert catalog.checkpoint("run", 100).lifecycle == "finalized"
    training.root.rmdir()
    away.rename(training.root)
    assert plan_scan(str(training.root), catalog).unavailable == ""


def test_a_moved_root_is_bound_again_by_its_identity(catalog: Catalog, catalog_url: str, training: Training) -> None:
    """C15: same ids, same verdicts, same holds."""
    training.attempt(100, 200, listeners=[Recorder(catalog_url)])
    row = catalog.checkpoint("run", 100)
    verify(catalog, row)
    catalog.hold(row.id, owner="ana", reason="figure 3")
    before = catalog.checkpoint("run", 100)
    moved = Training(training.root.rename(training.root.parent / "renamed"))
    plan = plan_scan(str(moved.root), catalog)
    assert plan.moved_from == str(training.root)
    assert (plan.adopt, plan.missing, plan.known) == ((), (), 2)
    apply(plan, catalog)
    after = catalog.checkpoint("run", 100)
    assert after == replace(before, root_url=str(moved.root), url=f"{moved.root}/iter_0000100")
    assert [hold.owner for hold in catalog.holds(after.id)] == ["ana"]
    verify(catalog, after)
    assert catalog.checkpoint("run", 100).verdict == "verified"


def test_a_copied_root_is_no_second_checkpoint(
    catalog: Catalog, catalog_url: str, training: Training, tmp_path: Path
) -> None:
    """C15: copy instead of move."""
    training.attempt(100, listeners=[Recorder(catalog_url)])
    shutil.copytree(training.root, tmp_path / "copy")
    plan = plan_scan(str(tmp_path / "copy"), catalog)
    assert "a copy of" in plan.unavailable
    assert not plan.pending
    assert [place.url for place in catalog.locations("run")] == [str(training.root)]


def test_a_root_of_another_run_is_an_error(catalog: Catalog, training: Training) -> None:
    training.attempt(100)
    with pytest.raises(CatalogError, match="belongs to run 'run', not to 'mine'"):
        plan_scan(str(training.root), catalog, run="mine")


def test_an_empty_directory_is_not_taken_for_a_run(catalog: Catalog, tmp_path: Path) -> None:
    assert "nothing is there" in plan_scan(str(tmp_path / "nowhere"), catalog).unavailable


# ---------------------------------------------------------------- what others wrote


def test_a_plain_torch_checkpoint_is_adopted_and_gets_its_digests_at_the_first_reading(
    catalog: Catalog, tmp_path: Path
) -> None:
    """V1: first-read."""
    root = tmp_path / "theirs"
    state = {"model": {"weight": torch.arange(12.0)}, "optimizer": {"momentum": torch.zeros(12)}, "iteration": 7}
    dcp.save(state, checkpoint_id=root / "iter_0000007", no_dist=True)
    plan = plan_scan(str(root), catalog)
    assert (plan.run, plan.root_id, names(plan.adopt)) == ("theirs", None, ["iter_0000007"])
    (row,) = apply(plan, catalog).adopted
    assert (row.iteration, row.format, row.attempt, row.adopted) == (7, "torch_dcp", -1, True)
    assert row.save_id.startswith("foreign-")
    assert set(row.contents) >= {"model", "optimizer"}
    assert {(file.sha256, file.origin) for file in catalog.files(row.id)} == {(None, "first-read")}
    assert not plan_scan(str(root), catalog).pending
    verify(catalog, row)
    assert catalog.checkpoint("theirs", 7).verdict == "verified"
    assert all(file.sha256 for file in catalog.files(row.id))
    assert {file.origin for file in catalog.files(row.id)} == {"first-read"}
    data = root / "iter_0000007" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    verify(catalog, row)
    assert catalog.checkpoint("theirs", 7).verdict == "corrupt"


def test_a_foreign_checkpoint_that_is_not_finished_is_not_adopted(catalog: Catalog, tmp_path: Path) -> None:
    root = tmp_path / "theirs"
    dcp.save({"model": {"weight": torch.arange(12.0)}}, checkpoint_id=root / "iter_0000007", no_dist=True)
    (root / "iter_0000007" / "__0_0.distcp").unlink()
    plan = plan_scan(str(root), catalog)
    assert [(item.name, "missing" in item.reason) for item in plan.incomplete] == [("iter_0000007", True)]
    assert plan.adopt == ()


def test_a_hostile_foreign_checkpoint_is_named_and_never_executed(catalog: Catalog, tmp_path: Path) -> None:
    """R5."""
    marker = tmp_path / "executed"
    root = tmp_path / "theirs"
    dcp.save({"model": {"weight": torch.arange(12.0)}}, checkpoint_id=root / "iter_0000007", no_dist=True)
    (root / "iter_0000007" / ".metadata").write_bytes(b"cos\nsystem\n(S'touch " + os.fsencode(marker) + b"'\ntR.")
    plan = plan_scan(str(root), catalog)
    assert plan.adopt == ()
    assert "system" in plan.incomplete[0].reason
    assert not marker.exists()


def test_two_foreign_saves_of_one_shape_are_two_checkpoints(catalog: Catalog, tmp_path: Path) -> None:
    root = tmp_path / "theirs"
    for iteration in (10, 20):
        dcp.save(
            {"model": {"w": torch.ones(3) * iteration}}, checkpoint_id=root / f"iter_{iteration:07d}", no_dist=True
        )
    shutil.copy(root / "iter_0000010" / ".metadata", root / "iter_0000020" / ".metadata")
    rows = apply(plan_scan(str(root), catalog), catalog).adopted
    assert len({row.save_id for row in rows}) == 2


MEGATRON = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "megatron"


@pytest.mark.skipif(not MEGATRON.is_dir(), reason=f"the Megatron checkpoints are not at {MEGATRON}")
def test_real_megatron_checkpoints_are_adopted_verified_and_described(catalog: Catalog) -> None:
    name = "td0192_tp1pp1dp2_fr"
    (row,) = apply(plan_scan(str(MEGATRON / name / "ckpt"), catalog, run=name), catalog).adopted
    assert (row.iteration, row.format) == (10, "torch_dist")
    assert row.topology is not None
    assert row.topology.dp == 2
    assert set(row.contents) >= {"args", "model", "optimizer", "rng", "scheduler"}
    assert {file.origin for file in catalog.files(row.id)} >= {"imported"}
    verify(catalog, row)
    assert catalog.checkpoint(name, 10).verdict == "verified"


@pytest.mark.skipif(not MEGATRON.is_dir(), reason=f"the Megatron checkpoints are not at {MEGATRON}")
def test_optimizer_state_that_we_cannot_load_is_named_with_its_form(catalog: Catalog) -> None:
    name = "td0192_tp2pp1dp2_dpr"
    (row,) = apply(plan_scan(str(MEGATRON / name / "ckpt"), catalog, run=name), catalog).adopted
    assert "optimizer:dp_reshardable" in row.contents
    assert "optimizer" not in row.contents


def test_the_local_pieces_of_a_rank_are_no_checkpoints_of_a_run(
    catalog: Catalog, training: Training, tmp_path: Path
) -> None:
    local = ckptlib.LocalOptions(str(tmp_path / "local"))
    Training(training.root, local=local).attempt(100, kind="non_persistent_local")
    (directory,) = (tmp_path / "local").glob("*/rank_00000")
    plan = plan_scan(str(directory), catalog)
    assert not plan.pending
    (item,) = plan.unmanaged
    assert item.reason == "rank 0's piece of a local checkpoint: of use to that rank alone"
