"""``ckpt verify``: verdicts per file, leases, exit codes (V1 to V4, S5)."""

from __future__ import annotations

import json

import pytest

from catalog import Catalog
from tests.catalog.training import Training, flip_a_byte
from tests.cli.conftest import RUN, Ckpt, record, verify


def test_a_run_is_verified_as_far_as_it_waits_and_the_next_command_is_named(
    ckpt: Ckpt, training: Training, catalog: Catalog
) -> None:
    record(training, catalog, 10, 20, 30)
    verify(catalog, 20)
    ended = ckpt("verify", RUN)
    assert ended.code == 0
    assert ended.err == f"Next: ckpt resume '{RUN}'\n"
    lines = [line.removeprefix(RUN).split() for line in ended.lines if line.startswith(RUN)]
    assert [(line[0], line[1], line[2]) for line in lines] == [("10", "ok", "verified"), ("30", "ok", "verified")]
    assert {row.verdict for row in catalog.checkpoints(RUN)} == {"verified"}
    again = ckpt("verify", RUN)
    assert again.code == 0
    assert "Nothing waits" in again.err
    assert f"ckpt verify '{RUN}' --force" in again.err
    assert len(ckpt("verify", RUN, "--force", "-o", "json").json["checkpoints"]) == 3


def test_a_flipped_byte_is_exit_20_and_names_the_file(ckpt: Ckpt, training: Training, catalog: Catalog) -> None:
    record(training, catalog, 10)
    flip_a_byte(training.data_file(10))
    ended = ckpt("verify", f"{RUN}@10", "-o", "json")
    assert ended.code == 20
    assert ended.error["code"] == 20
    assert ended.error["error"] == f"1 checkpoint corrupt: {RUN}@10"
    result = ended.json
    (finding,) = result["findings"]
    assert (finding["iteration"], finding["path"], finding["verdict"]) == (10, training.data_file(10).name, "digest")
    assert result["files"]["digest"] == 1
    assert result["files"]["ok"] >= 5
    assert result["checkpoints"][0]["verdict"] == "corrupt"
    assert result["next"] == f"ckpt resume '{RUN}' --explain"
    assert catalog.checkpoint(RUN, 10).verdict == "corrupt"


def test_a_corrupt_copy_that_was_restored_is_read_and_verified(
    ckpt: Ckpt, training: Training, catalog: Catalog
) -> None:
    """V3: `auto` says that it reads it; no other level can clear it."""
    record(training, catalog, 10)
    flip_a_byte(training.data_file(10))
    assert ckpt("verify", RUN).code == 20
    flip_a_byte(training.data_file(10))
    ended = ckpt("verify", f"{RUN}@10", "--level", "structure")
    assert catalog.checkpoint(RUN, 10).verdict == "corrupt"
    assert f"ckpt verify '{RUN}@10' --level data" in ended.err
    ended = ckpt("verify", f"{RUN}@10")
    assert ended.code == 0
    assert f"{RUN}@10 is corrupt: all of it is read" in ended.err
    assert catalog.checkpoint(RUN, 10).verified_level == "data"


def test_a_missing_and_a_short_file_are_told_apart_and_an_extra_one_is_no_defect(
    ckpt: Ckpt, training: Training, catalog: Catalog
) -> None:
    """V2."""
    record(training, catalog, 10, 20)
    (training.directory(10) / "tokenizer.model").write_text("legitimate")
    assert ckpt("verify", f"{RUN}@10").code == 0
    training.data_file(10).unlink()
    data = training.data_file(20)
    data.write_bytes(data.read_bytes()[:-1])
    ended = ckpt("verify", RUN, "--force", "-o", "json")
    assert ended.code == 20
    findings = {(finding["iteration"], finding["verdict"]) for finding in ended.json["findings"]}
    assert {(10, "missing"), (20, "size"), (10, "extra")} <= findings
    assert f"{RUN}@10, {RUN}@20" in ended.error["error"]


def test_what_cannot_be_read_is_partly_done_and_condemns_nothing(
    ckpt: Ckpt, training: Training, catalog: Catalog
) -> None:
    """V2: not mounted, not corrupt."""
    record(training, catalog, 10)
    training.root.rename(training.root.with_name("elsewhere"))
    ended = ckpt("verify", RUN, "-o", "json")
    assert ended.code == 3
    (skipped,) = ended.json["skipped"]
    assert "mounted" in skipped["reason"]
    assert catalog.checkpoint(RUN, 10).verdict == "unverified"
    one = ckpt("verify", f"{RUN}@10")
    assert one.code == 1
    assert "mounted" in one.err
    assert "Traceback" not in one.err


def test_a_checkpoint_that_failed_before_is_listed_with_the_command_that_tries_now(
    ckpt: Ckpt, training: Training, catalog: Catalog
) -> None:
    record(training, catalog, 10)
    away = training.root.with_name("elsewhere")
    training.root.rename(away)
    ckpt("verify", RUN)
    away.rename(training.root)
    ended = ckpt("verify", RUN, "-o", "json")
    assert ended.code == 3
    assert f"ckpt verify '{RUN}@10'" in ended.json["skipped"][0]["reason"]
    assert ckpt("verify", f"{RUN}@10").code == 0


def test_a_lease_of_somebody_else_is_exit_11_with_the_holder(ckpt: Ckpt, training: Training, catalog: Catalog) -> None:
    record(training, catalog, 10, 20)
    row = catalog.checkpoint(RUN, 10)
    catalog.lease_unverified(owner="flows@node7:41", ttl=60, checkpoint_id=row.id)
    one = ckpt("verify", f"{RUN}@10")
    assert (one.code, one.out) == (11, "")
    assert "flows@node7:41" in one.err
    rest = ckpt("verify", "--all", "-o", "json")
    assert rest.code == 3
    assert [done["iteration"] for done in rest.json["checkpoints"]] == [20]
    assert [(skip["iteration"], "flows@node7:41" in skip["reason"]) for skip in rest.json["skipped"]] == [(10, True)]
    assert catalog.checkpoint(RUN, 10).lease_owner == "flows@node7:41"


def test_a_shallow_level_grants_nothing_and_says_what_does(ckpt: Ckpt, training: Training, catalog: Catalog) -> None:
    """V3."""
    record(training, catalog, 10)
    for level in ("listing", "structure"):
        ended = ckpt("verify", f"{RUN}@10", "--level", level)
        assert ended.code == 0
        assert f"ckpt verify '{RUN}@10' --level data" in ended.err
        assert catalog.checkpoint(RUN, 10).verdict == "unverified"


def test_a_storage_without_digests_makes_a_checkpoint_unverifiable_until_it_is_read(
    ckpt: Ckpt, training: Training, catalog: Catalog
) -> None:
    """V3."""
    record(training, catalog, 10)
    ended = ckpt("verify", RUN, "--level", "store", "-o", "json")
    assert ended.code == 3
    assert "posix storage keeps no digests of its own" in ended.error["error"]
    (checked,) = ended.json["checkpoints"]
    assert (checked["outcome"], checked["verdict"], checked["level"]) == ("unverifiable", "unverifiable", "store")
    assert ended.json["files"]["unverifiable"] == 1
    assert ended.json["next"] == f"ckpt verify '{RUN}' --level data"
    again = ckpt("verify", RUN, "-o", "json")
    assert again.code == 0
    (checked,) = again.json["checkpoints"]
    assert (checked["outcome"], checked["verdict"], checked["level"]) == ("ok", "verified", "data")


def test_a_url_is_verified_without_any_catalog(ckpt: Ckpt, training: Training) -> None:
    training.attempt(10)
    ended = ckpt("--db", "/nonexistent/catalog.db", "verify", "--url", str(training.directory(10)), "-o", "json")
    assert ended.code == 0
    (checked,) = ended.json["checkpoints"]
    assert (checked["outcome"], checked["verdict"], checked["run"]) == ("ok", None, None)
    flip_a_byte(training.data_file(10))
    assert ckpt("verify", "--url", str(training.directory(10))).code == 20


def test_a_directory_that_is_no_checkpoint_is_a_plain_error(ckpt: Ckpt, training: Training) -> None:
    training.root.mkdir()
    ended = ckpt("verify", "--url", str(training.root))
    assert (ended.code, ended.out) == (1, "")
    assert str(training.root) in ended.err


@pytest.mark.parametrize(
    "args", [[], ["x", "--all"], ["--all", "--url", "u"], ["x", "--level", "deep"], ["x", "--threads", "0"]]
)
def test_what_to_verify_must_be_said_once(ckpt: Ckpt, catalog: Catalog, args: list[str]) -> None:
    ended = ckpt("verify", *args, "-o", "json")
    assert (ended.code, ended.out) == (2, "")
    assert json.loads(ended.err)["code"] == 2


def test_an_unknown_run_or_checkpoint_is_an_error(ckpt: Ckpt, training: Training, catalog: Catalog) -> None:
    record(training, catalog, 10)
    for name in ("nobody", f"{RUN}@11"):
        ended = ckpt("verify", name)
        assert (ended.code, ended.out) == (1, "")
