"""``ckpt runs ls``, ``ls`` and ``show``: what people see, and the same for programs."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

import ckptlib
from catalog import Catalog, Recorder
from catalog.leases import Findings
from ckptlib import Checkpointer
from tests.catalog.training import Training, flip_a_byte
from tests.cli.conftest import RUN, Ckpt, Direct, record, verify


def test_an_empty_catalog_says_what_to_do_next(ckpt: Ckpt, catalog: Catalog) -> None:
    for verb in (["runs", "ls"], ["ls"]):
        ended = ckpt(*verb)
        assert (ended.code, ended.out) == (0, "")
        assert "ckpt scan ROOT --adopt" in ended.err
        assert ckpt(*verb, "-o", "json").json == []
        assert ckpt(*verb, "-q").err == ""


@pytest.mark.usefixtures("past")
def test_checkpoints_are_listed_newest_last_with_iterations_unpadded(ckpt: Ckpt) -> None:
    header, *lines = ckpt("ls").lines
    names = ["RUN", "ITER", "ATTEMPT", "KIND", "LIFECYCLE", "VERDICT", "SIZE", "SAVED", "METRICS"]
    assert header.split() == names
    assert [line.removeprefix(RUN).split()[0] for line in lines] == ["0", "90", "10000000"]
    assert [line.removeprefix(RUN).split()[4] for line in lines] == ["unverified", "verified", "corrupt"]
    assert all(re.search(r"\d KiB  20\d\d-\d\d-\d\d \d\d:\d\d CET  loss=", line) for line in lines)


def test_the_json_form_has_every_field_with_utc_times_and_bytes(
    ckpt: Ckpt, past: Training, history: tuple[Catalog, Training]
) -> None:
    row = history[0].checkpoint(RUN, 90)
    listed = ckpt("ls", RUN, "-o", "json").json[1]
    assert listed == {
        "run": RUN,
        "iteration": 90,
        "attempt": 1,
        "kind": "persistent",
        "lifecycle": "finalized",
        "verdict": "verified",
        "bytes": row.size,
        "saved_at": listed["saved_at"],
        "verified_level": "data",
        "holds": [],
        "metrics": {"loss": 1 / 91},
        "branch": "live",
        "topology": None,
        "save_id": row.save_id,
        "url": str(past.directory(90)),
        "written": None,
        "silent_seconds": None,
        "overdue": False,
        "recorded": True,
    }
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", listed["saved_at"])


def test_metrics_that_are_no_numbers_are_valid_json(ckpt: Ckpt, training: Training, catalog: Catalog) -> None:
    recorder = Recorder(str(catalog))
    with ckptlib.Checkpointer(str(training.root), run=RUN, listeners=[recorder]) as checkpointer:
        checkpointer.save(training.state(), iteration=2, metrics={"loss": float("nan"), "best": float("-inf")})
    recorder.close(20)
    (listed,) = ckpt("ls", RUN, "-o", "json").json
    assert listed["metrics"] == {"loss": "nan", "best": "-inf"}
    assert "best=-inf loss=nan" in ckpt("ls", RUN).out


@pytest.mark.usefixtures("past")
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_on_a_narrow_terminal_whole_columns_go_and_what_stays_is_whole(ckpt: Ckpt, columns: int) -> None:
    ended = ckpt("ls", columns=columns)
    assert max(map(len, ended.lines)) <= columns
    assert [line.removeprefix(RUN).split()[0] for line in ended.lines] == ["RUN", "0", "90", "10000000"]
    assert re.findall("unverified|verified|corrupt", ended.out) == ["unverified", "verified", "corrupt"]
    assert "…" not in ended.out


@pytest.mark.usefixtures("past")
def test_a_very_narrow_terminal_breaks_words_but_loses_none(ckpt: Ckpt) -> None:
    out = ckpt("ls", columns=20).out
    assert "…" not in out
    assert sum(map(len, out.split())) == sum(map(len, ckpt("ls", columns=60).out.split()))


@pytest.mark.usefixtures("past")
def test_without_a_terminal_nothing_is_left_out_or_wrapped(ckpt: Ckpt, past: Training) -> None:
    header, line, *_ = ckpt("ls", "-v").lines
    assert header.endswith("URL")
    assert line.endswith(str(past.directory(0)))


@pytest.mark.usefixtures("past")
def test_verbose_shows_all_columns_however_narrow_the_terminal(ckpt: Ckpt) -> None:
    assert ckpt("ls", "-v", columns=80).lines == ckpt("ls", "-v").lines


@pytest.mark.usefixtures("past")
def test_listing_a_run_leaves_out_what_was_asked_for(ckpt: Ckpt) -> None:
    assert ckpt("ls", RUN).lines[0].startswith("    ITER")
    assert ckpt("ls").lines[0].startswith("RUN")


@pytest.mark.usefixtures("past")
def test_filters_narrow_the_list_and_an_empty_one_says_so(ckpt: Ckpt) -> None:
    def listed(*options: str) -> list[int]:
        return [row["iteration"] for row in ckpt("ls", RUN, *options, "-o", "json").json]

    assert listed("--state", "verified") == [90]
    assert listed("--state", "verified", "--state", "unverified") == [0, 90]
    assert listed("--state", "deleted") == []
    assert listed("--latest", "2") == [90, 10_000_000]
    assert listed("--since", "1h") == [0, 90, 10_000_000]
    assert listed("--since", "2001-01-01", "--kind", "persistent") == [0, 90, 10_000_000]
    assert listed("--kind", "release") == []
    ended = ckpt("ls", RUN, "--state", "suspect")
    assert (ended.code, ended.out) == (0, "")
    assert f"ckpt ls '{RUN}'" in ended.err


@pytest.mark.usefixtures("past")
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--state", "fine"], "unverified"),
        (["--kind", "x"], "release"),
        (["--since", "5m"], "min"),
        (["--latest", "0"], "equal to 1"),
    ],
)
def test_a_wrong_filter_is_a_usage_error_that_says_what_is_possible(ckpt: Ckpt, options: list[str], named: str) -> None:
    ended = ckpt("ls", *options)
    assert (ended.code, ended.out) == (2, "")
    assert named in ended.err


def test_missing_checkpoints_are_listed_and_deleted_ones_only_on_request(
    ckpt: Ckpt, training: Training, catalog: Catalog
) -> None:
    record(training, catalog, 1, 2)
    catalog.mark_missing(catalog.checkpoint(RUN, 1).id, reason="test")
    catalog.change(catalog.checkpoint(RUN, 2).id, lifecycle="deleting", reason="test")
    catalog.change(catalog.checkpoint(RUN, 2).id, lifecycle="deleted", reason="test")
    assert [row["lifecycle"] for row in ckpt("ls", "-o", "json").json] == ["missing"]
    assert [row["lifecycle"] for row in ckpt("ls", "--state", "deleted", "-o", "json").json] == ["deleted"]


def test_runs_show_their_newest_and_their_newest_verified(
    ckpt: Ckpt, past: Training, history: tuple[Catalog, Training]
) -> None:
    (row,) = ckpt("runs", "ls", "-o", "json").json
    expected = {
        "newest_iteration": 10_000_000,
        "newest_verified_iteration": 90,
        "unverified": 1,
        "corrupt": 1,
        "bytes": sum(entry.size for entry in history[0].checkpoints(RUN)),
        "roots": [str(past.root)],
    }
    assert {name: row[name] for name in expected} == expected
    line = ckpt("runs", "ls").lines[1]
    assert line.startswith(RUN)
    assert re.search(r"1 +3 +10000000 +90 +20\d\d-\d\d-\d\d \d\d:\d\d CET +1 +1 +\d+ KiB$", line)


@pytest.mark.usefixtures("past")
def test_an_unknown_run_is_an_error_that_names_similar_ones(ckpt: Ckpt) -> None:
    ended = ckpt("ls", "team/llama 7B")
    assert ended.code == 1
    assert repr(RUN) in ended.err
    assert "runs ls" in ckpt("ls", "zzz").err


# --- show -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("past")
def test_show_names_every_file_with_digest_and_origin(ckpt: Ckpt, history: tuple[Catalog, Training]) -> None:
    catalog = history[0]
    row = catalog.checkpoint(RUN, 90)
    shown = ckpt("show", f"{RUN}@90", "-o", "json").json
    assert {file["path"]: file["sha256"] for file in shown["files"]} == {
        file.path: file.sha256 for file in catalog.files(row.id)
    }
    assert {file["origin"] for file in shown["files"]} == {"writer"}
    assert shown["progress"] == {"consumed_samples": 720, "lr": 0.001}
    assert shown["contents"] == list(row.contents)
    out = ckpt("show", f"{RUN}@90").out
    for file in catalog.files(row.id):
        assert re.search(rf"^{re.escape(file.path)} .*{(file.sha256 or '')[:12]}  writer", out, flags=re.MULTILINE)


@pytest.mark.usefixtures("past")
def test_show_says_how_long_the_save_took(ckpt: Ckpt) -> None:
    keys = ("stall_seconds", "stage_seconds", "write_seconds", "since_parent_seconds")
    shown = ckpt("show", f"{RUN}@90", "-o", "json").json
    stall, stage, write, since = (shown[key] for key in keys)
    assert stall >= write > 0
    assert since >= 0
    assert (stage, len(shown["rank_rates"])) == (None, 2)
    out = ckpt("show", f"{RUN}@90").out
    assert re.search(r"^training stalled +[\d.]+ m?s$", out, flags=re.MULTILINE)
    assert re.search(r"^rates of ranks +[\d.]+ .?B/s to [\d.]+ .?B/s$", out, flags=re.MULTILINE)


def test_show_needs_no_storage(ckpt: Ckpt, training: Training, catalog: Catalog) -> None:
    record(training, catalog, 5)
    shutil.rmtree(training.root)
    shown = ckpt("show", f"{RUN}@5", "-o", "json").json
    assert (shown["stall_seconds"], shown["write_seconds"], shown["rank_rates"]) == (None, None, [])


def test_show_does_not_count_what_whole_state_dicts_hold(ckpt: Ckpt, training: Training, catalog: Catalog) -> None:
    record(training, catalog, 5)
    row = catalog.checkpoint(RUN, 5)
    with Checkpointer(str(training.root), run=RUN, semantic_type="LEGACY", listeners=[Direct(catalog)]) as job:
        job.save({"w": torch.ones(2)}, iteration=6)
    shown = ckpt("show", f"{RUN}@6", "-o", "json").json
    assert (shown["tensors"], shown["objects"], shown["format"]) == (None, None, "torch")
    assert not re.search(r"^(tensors|objects) ", ckpt("show", f"{RUN}@6").out, flags=re.MULTILINE)
    out = ckpt("show", f"{RUN}@5").out
    assert re.search(rf"^tensors +{row.tensors}$", out, flags=re.MULTILINE)


def test_show_lists_verifications_with_the_files_that_failed(ckpt: Ckpt, training: Training, catalog: Catalog) -> None:
    record(training, catalog, 5)
    verify(catalog, 5)
    flip_a_byte(training.data_file(5))
    verify(catalog, 5)
    shown = ckpt("show", f"{RUN}@5", "-o", "json").json
    assert [entry["outcome"] for entry in shown["verifications"]] == ["ok", "corrupt"]
    (failed,) = shown["verifications"][-1]["failed"]
    assert (failed["path"], failed["verdict"]) == (training.data_file(5).name, "digest")
    assert shown["problems"] == [failed]
    out = ckpt("show", f"{RUN}@5", columns=80).out
    assert "problems found by the last verification" in out
    assert training.data_file(5).name in out


def test_show_lists_holds_and_lineage(ckpt: Ckpt, training: Training, catalog: Catalog) -> None:
    record(training, catalog, 5, 10)
    record(training, catalog, 15, at=5)
    row = catalog.checkpoint(RUN, 15)
    catalog.hold(row.id, owner="ann", reason="the paper's figure 3")
    shown = ckpt("show", f"{RUN}@15", "-o", "json").json
    assert [ancestor["iteration"] for ancestor in shown["lineage"]] == [5]
    assert [(hold["owner"], hold["reason"], hold["expires_at"]) for hold in shown["holds"]] == [
        ("ann", "the paper's figure 3", None)
    ]
    assert "the paper's figure 3" in ckpt("show", f"{RUN}@15").out
    assert ckpt("ls", "--latest", "1", "-o", "json").json[0]["holds"] == ["pin"]
    assert "HOLDS" in ckpt("ls").lines[0]


def test_show_finds_each_save_of_an_iteration(ckpt: Ckpt, training: Training, catalog: Catalog) -> None:
    record(training, catalog, 5, 10)
    record(training, catalog, 10, at=5)
    first, second = training.save_ids(10)
    shown = ckpt("show", f"{RUN}@10", "-o", "json").json
    assert shown["save_id"] == second
    assert [other["save_id"] for other in shown["same_iteration"]] == [first]
    assert ckpt("show", f"{RUN}@10", "--save-id", first, "-o", "json").json["save_id"] == first


@pytest.mark.usefixtures("past")
@pytest.mark.parametrize(
    ("name", "code", "words"),
    [(RUN, 2, "RUN@ITER"), (f"{RUN}@6", 1, "nearest are 0, 90"), ("other@5", 1, "no run 'other'")],
)
def test_show_of_what_is_not_there_says_what_is(ckpt: Ckpt, name: str, code: int, words: str) -> None:
    ended = ckpt("show", name)
    assert (ended.code, ended.out) == (code, "")
    assert words in ended.err


def test_a_checkpoint_is_shown_with_what_it_was_verified_by(
    ckpt: Ckpt, training: Training, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V3."""
    record(training, catalog, 10, 20, 30)
    for iteration, level in ((10, "store"), (20, "data")):
        row = catalog.checkpoint(RUN, iteration)
        (lease,) = catalog.lease_unverified(owner="me", ttl=60, checkpoint_id=row.id)
        catalog.finish_verification(lease, Findings("ok", level))
    listed = {line["iteration"]: line["verified_level"] for line in ckpt("ls", RUN, "-o", "json").json}
    assert listed == {10: "store", 20: "data", 30: None}
    monkeypatch.setenv("COLUMNS", "400")
    wide = ckpt("ls", RUN, "-v").out
    assert "store: by the store's digests" in wide
    assert "data: read back" in wide
    assert "verified by" in ckpt("show", f"{RUN}@10").out
    assert "store: by the store's digests" in ckpt("show", f"{RUN}@10").out
    assert ckpt("resume", RUN, "-o", "json").json["iteration"] == 20
    catalog.change(catalog.checkpoint(RUN, 20).id, verdict="suspect", reason="test")
    assert ckpt("resume", RUN, "-o", "json").json["iteration"] == 10
    refused = ckpt("resume", RUN, "--require", "data")
    assert refused.code == 21
    assert f"ckpt verify '{RUN}' --level data" in refused.err
