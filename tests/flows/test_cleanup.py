"""The cleanup: plan, apply, command and flow, over the roots of a catalog on a real S3 server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from catalog.cleanup import apply_cleanup, plan_cleanup
from catalog.cli.main import app
from flows.cleanup import cleanup
from tests.flows.workshop import Workshop
from tests.support.s3_server import S3Server
from tests.support.uploads import Uploads

HOUR = 3600.0


@pytest.fixture
def uploads(
    workshop: Workshop, s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Uploads]]:
    """Two runs with roots in a bucket, known to the catalog; clients find the server by the environment."""
    for name, value in {**s3.environment(), "CKPT_DB": workshop.db}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CKPT_FLOWS_STATE_DIR", str(workshop.path / "state"))
    with contextlib.closing(s3.client()) as client:
        runs = {run: Uploads(s3, f"{s3_url}/{run}", client) for run in ("one", "two")}
        for run, root in runs.items():
            workshop.catalog.register_root(run, root.url, None)
        yield runs


def orphan_and_living(root: Uploads) -> tuple[str, str, str]:
    """Uploads of an aborted save, of one that is being written, and of another tool."""
    dead, alive = root.begin(1), root.begin(1, 200)
    root.abort(dead)
    foreign = root.upload(f"{root.root}/iter_0000100/weights.bin")
    return root.upload_of(dead.save_id), root.upload_of(alive.save_id, 200), foreign


def test_a_plan_goes_through_all_roots_and_applying_it_twice_is_no_error(
    workshop: Workshop, uploads: dict[str, Uploads]
) -> None:
    workshop.save(1, run="on disk")
    (dead, alive, foreign), (dead2, alive2, foreign2) = (orphan_and_living(root) for root in uploads.values())
    plan = plan_cleanup(workshop.catalog, older_than=HOUR)
    assert {orphan.upload.path for orphan in plan.discard} == {dead, dead2}
    assert {orphan.upload.path for orphan in plan.keep} == {alive, alive2}
    assert plan.problems == ()
    assert str(plan) == "2 unfinished uploads to discard, 2 of saves that may still be written, 2 of others"
    assert uploads["one"].left() == {dead, alive, foreign}, "a plan changes nothing"
    assert apply_cleanup(plan) == apply_cleanup(plan) == {}
    assert uploads["one"].left() | uploads["two"].left() == {alive, alive2, foreign, foreign2}


def test_a_root_that_cannot_be_looked_at_does_not_keep_the_others_from_being_cleaned(
    workshop: Workshop, uploads: dict[str, Uploads]
) -> None:
    workshop.catalog.register_root("lost", "s3://no-such-bucket-anywhere/run", None)
    dead, _, _ = orphan_and_living(uploads["one"])
    state = cleanup.fn()
    assert (state.is_failed(), state.name) == (True, "Partly")
    assert "no-such-bucket-anywhere" in str(state.message)
    assert dead not in uploads["one"].left()


def test_the_flow_discards_and_a_dry_run_only_says_so(uploads: dict[str, Uploads]) -> None:
    dead, alive, foreign = orphan_and_living(uploads["one"])
    other, _, _ = orphan_and_living(uploads["two"])
    state = cleanup.fn(run="one", dry_run=True)
    assert state.is_completed()
    assert "1 unfinished uploads to discard" in str(state.message)
    assert "dry run" in str(state.message)
    assert dead in uploads["one"].left()
    assert cleanup.fn(run="one").is_completed()
    assert uploads["one"].left() == {alive, foreign}
    assert other in uploads["two"].left()


def test_the_command_shows_what_goes_and_what_stays(
    uploads: dict[str, Uploads], capsys: pytest.CaptureFixture[str]
) -> None:
    dead, alive, foreign = orphan_and_living(uploads["one"])
    for args, left in ((["-n"], {dead, alive, foreign}), ([], {alive, foreign})):
        with pytest.raises(SystemExit) as ended:
            app(["flows", "run", "cleanup", *args, "-o", "json"])
        assert ended.value.code in (0, None)
        shown = {line["path"]: line["action"] for line in json.loads(capsys.readouterr().out)}
        assert shown == {dead: "discard", alive: "keep"}
        assert uploads["one"].left() == left


def test_an_upload_that_could_not_be_discarded_is_shown_as_such(
    uploads: dict[str, Uploads], s3: S3Server, s3_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dead, alive, _ = orphan_and_living(uploads["one"])
    bucket = s3_url.removeprefix("s3://").partition("/")[0]
    with s3.denied(bucket, "s3:AbortMultipartUpload"), pytest.raises(SystemExit) as ended:
        app(["flows", "run", "cleanup", "--run", "one", "-o", "json"])
    out, err = capsys.readouterr()
    assert ended.value.code == 3
    assert {line["path"]: line["action"] for line in json.loads(out)} == {dead: "failed", alive: "keep"}
    assert dead in err
    assert dead in uploads["one"].left()
