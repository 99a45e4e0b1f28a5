"""``ckpt scan``: what a root holds, and taking it into the catalog (S3, W7, D4)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp

from catalog import Catalog
from tests.catalog.training import Training
from tests.cli.conftest import RUN, Ckpt, record


def test_a_scan_shows_what_it_would_do_and_does_nothing(ckpt: Ckpt, training: Training, catalog: Catalog) -> None:
    training.attempt(10, 20)
    (training.root / "notes.txt").write_text("mine")
    ended = ckpt("scan", str(training.root), "-o", "json")
    assert ended.code == 0
    plan = ended.json
    assert (plan["run"], plan["applied"], plan["known"], plan["new_attempts"]) == (RUN, False, 0, 1)
    assert [(item["name"], item["action"]) for item in plan["items"]] == [
        ("notes.txt", "unmanaged"),
        ("iter_0000010", "adopt"),
        ("iter_0000020", "adopt"),
    ]
    assert catalog.checkpoints() == []
    ended = ckpt("scan", str(training.root))
    assert f"ckpt scan {training.root} --adopt" in ended.err


def test_adopting_brings_the_catalog_in_line_and_twice_changes_nothing(
    ckpt: Ckpt, training: Training, catalog: Catalog
) -> None:
    training.attempt(10, 20)
    ended = ckpt("scan", str(training.root), "--adopt")
    assert ended.code == 0
    assert ended.out.count("  adopted") == 2
    assert ended.err == f"Next: ckpt verify '{RUN}'\n"
    assert [row["iteration"] for row in ckpt("ls", RUN, "-o", "json").json] == [10, 20]
    again = ckpt("scan", str(training.root), "--adopt", "-o", "json")
    assert (again.code, again.json["known"], again.json["items"]) == (0, 2, [])


def test_a_complete_save_that_nobody_decided_is_committed_and_adopted(
    ckpt: Ckpt, training: Training, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W7."""
    training.die_before_the_decision(30, monkeypatch)
    plan = ckpt("scan", str(training.root), "-o", "json").json
    assert [item["action"] for item in plan["items"]] == ["commit and adopt"]
    done = ckpt("scan", str(training.root), "--adopt", "-o", "json").json
    assert done["applied"] is True
    assert {item["action"] for item in done["items"]} == {"decided", "adopted"}
    assert catalog.checkpoint(RUN, 30).lifecycle == "finalized"


def test_a_checkpoint_that_is_gone_is_marked_missing_and_nothing_is_deleted(
    ckpt: Ckpt, training: Training, catalog: Catalog
) -> None:
    record(training, catalog, 10, 20)
    training.directory(10).rename(training.root.with_name("taken away"))
    plan = ckpt("scan", str(training.root), "-o", "json").json
    assert [(item["name"], item["action"]) for item in plan["items"]] == [("iter_0000010", "mark missing")]
    assert ckpt("scan", str(training.root), "--adopt").code == 0
    assert ckpt("ls", RUN).out.count("missing") == 1
    assert training.directory(20).is_dir()


def test_a_place_where_nothing_is_is_unavailable_and_nothing_becomes_missing(
    ckpt: Ckpt, training: Training, catalog: Catalog
) -> None:
    """D4."""
    record(training, catalog, 10)
    training.root.rename(training.root.with_name("unmounted"))
    for options in ([], ["--adopt"]):
        ended = ckpt("scan", str(training.root), *options, "-o", "json")
        assert ended.code == 1
        assert "mounted" in ended.error["error"]
        assert "mounted" in ended.json["unavailable"]
    assert catalog.checkpoint(RUN, 10).lifecycle == "finalized"


def test_a_wrong_run_name_is_refused(ckpt: Ckpt, training: Training, catalog: Catalog) -> None:
    training.attempt(10)
    ended = ckpt("scan", str(training.root), "--run", "other", "--adopt")
    assert (ended.code, ended.out) == (1, "")
    assert repr(RUN) in ended.err


def test_a_directory_without_checkpoints_says_what_a_root_is(ckpt: Ckpt, training: Training, catalog: Catalog) -> None:
    training.attempt(10)
    ended = ckpt("scan", str(training.directory(10)))
    assert ended.code == 0
    assert "iter_" in ended.err


def test_somebody_at_the_terminal_is_asked_first_and_no_is_cancelled(
    ckpt: Ckpt, training: Training, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.attempt(10)
    # The question itself needs a terminal; the pseudo-terminal test of the process covers that.
    monkeypatch.setattr("catalog.cli.context.Cli.asks", True)
    ended = ckpt("scan", str(training.root), "--adopt", answer="n\n")
    assert ended.code == 130
    assert "adopt" in ended.out
    assert "cancelled" in ended.err
    assert catalog.checkpoints() == []
    assert ckpt("scan", str(training.root), "--adopt", answer="y\n").code == 0
    assert [row.iteration for row in catalog.checkpoints()] == [10]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_that_others_wrote_has_no_attempt(ckpt: Ckpt, catalog: Catalog, tmp_path: Path) -> None:
    save_with_dcp({"model": {"weight": torch.arange(6.0)}}, checkpoint_id=tmp_path / "theirs" / "iter_0000005")
    assert ckpt("scan", str(tmp_path / "theirs"), "--run", "theirs", "--adopt").code == 0
    (listed,) = ckpt("ls", "theirs", "-o", "json").json
    assert (listed["iteration"], listed["attempt"]) == (5, None)
    assert ckpt("verify", "theirs@5").code == 0
    shown = ckpt("show", "theirs@5", "-o", "json").json
    assert (shown["attempt"], shown["format"], shown["adopted"]) == (None, "torch_dcp", True)
    assert {file["origin"] for file in shown["files"]} == {"first-read"}
