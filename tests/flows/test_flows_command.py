"""`ckpt flows …` without a Prefect server: listing, and work done in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from catalog.cli.main import app
from flows import state, submit
from flows.catalogue import DEPLOYMENTS
from flows.submit import Submitted
from tests.flows.workshop import Workshop, flip_a_byte


@dataclass
class Ended:
    code: int
    out: str
    err: str


Ckpt = Callable[..., Ended]


@pytest.fixture
def ckpt(workshop: Workshop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ckpt:
    """Runs one command line on the workshop's catalog."""
    monkeypatch.setenv("CKPT_DB", workshop.db)
    monkeypatch.setenv("CKPT_FLOWS_STATE_DIR", str(workshop.path / "state"))

    def run(*args: str) -> Ended:
        with pytest.raises(SystemExit) as ended:
            app(list(args))
        out, err = capsys.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    return run


def test_deployments_are_listed_with_what_starts_them(ckpt: Ckpt) -> None:
    ended = ckpt("flows", "ls", "-o", "json")
    assert ended.code == 0
    listed = {line["deployment"]: line for line in json.loads(ended.out)}
    assert set(listed) == {spec.name for spec in DEPLOYMENTS}
    assert listed["verify-pending/ckpt"]["schedule_seconds"] == 300.0
    assert listed["verify-pending/ckpt"]["wakes_on_commit"] is True
    assert listed["verify/ckpt"]["schedule_seconds"] is None


def test_listing_says_where_the_flows_are_served(ckpt: Ckpt, workshop: Workshop) -> None:
    assert "ckpt flows serve" in ckpt("flows", "ls").err
    with state.exclusive(workshop.path / "state"):
        state.ServeState(1, "http://127.0.0.1:4200/api", "db", 0.0).write(workshop.path / "state")
        assert "PREFECT_API_URL=http://127.0.0.1:4200/api" in ckpt("flows", "ls").err


def test_pending_ones_are_verified_in_this_process_when_nothing_serves(ckpt: Ckpt, workshop: Workshop) -> None:
    rows = workshop.save(1, 2)
    ended = ckpt("flows", "run", "verify-pending", "-o", "json")
    assert ended.code == 0
    assert [line["checkpoint"] for line in json.loads(ended.out)] == ["run@2", "run@1"]
    assert {workshop.verdict(row) for row in rows} == {"verified"}
    assert "Nothing is pending" in ckpt("flows", "run", "verify-pending").err


def test_corruption_is_exit_code_20_and_names_the_file(ckpt: Ckpt, workshop: Workshop) -> None:
    (row,) = workshop.save(1)
    flip_a_byte(workshop.data_file(row))
    ended = ckpt("flows", "run", "verify-pending")
    assert ended.code == 20
    assert workshop.data_file(row).name in ended.err
    assert "corrupt" in ended.out


def test_storage_that_is_away_is_partly_done(ckpt: Ckpt, workshop: Workshop) -> None:
    workshop.save(1, run="here")
    workshop.save(1, run="away")
    workshop.root("away").rename(workshop.path / "elsewhere")
    ended = ckpt("flows", "run", "verify-pending", "-o", "json")
    assert ended.code == 3
    assert {line["checkpoint"]: line["result"] for line in json.loads(ended.out)} == {
        "away@1": "unreadable",
        "here@1": "verified",
    }


@pytest.mark.parametrize("by_id", [False, True])
def test_one_checkpoint_is_verified_again_by_name_or_by_id(ckpt: Ckpt, workshop: Workshop, by_id: bool) -> None:
    old, new = workshop.save(1, 2, run="team/a run @ home")
    named = str(old.id) if by_id else "team/a run @ home@1"
    for times in (1, 2):
        ended = ckpt("flows", "run", "verify", named, "-o", "json")
        assert ended.code == 0, ended.err
        assert [line["result"] for line in json.loads(ended.out)] == ["verified"]
        assert len(workshop.catalog.verifications(old.id)) == times
    assert workshop.verdict(new) == "unverified"


def test_a_level_that_grants_nothing_leaves_the_verdict(ckpt: Ckpt, workshop: Workshop) -> None:
    """V3."""
    (row,) = workshop.save(1)
    ended = ckpt("flows", "run", "verify", "run@1", "--level", "listing", "-o", "json")
    assert ended.code == 0
    assert [line["result"] for line in json.loads(ended.out)] == ["checked"]
    assert workshop.verdict(row) == "unverified"


@pytest.mark.parametrize(
    ("args", "code", "named"),
    [
        (("verify", "run"), 2, "iteration"),
        (("verify", "run@1", "--level", "deep"), 2, "level"),
        (("verify", "run@7"), 1, "iteration 7"),
        (("verify", "nobody@1"), 1, "nobody"),
        (("verify-pending", "--run", "nobody"), 1, "no run 'nobody'"),
        (("cleanup", "--run", "nobody"), 1, "no run 'nobody'"),
        (("cleanup", "-n", "--run", "rum"), 1, "Did you mean 'run'"),
    ],
)
def test_what_names_nothing_in_the_catalog_is_an_error_that_says_so(
    ckpt: Ckpt, workshop: Workshop, args: tuple[str, ...], code: int, named: str
) -> None:
    workshop.save(1)
    ended = ckpt("flows", "run", *args)
    assert (ended.code, named in ended.err) == (code, True), ended.err


def test_a_wrong_setting_is_a_usage_error_that_names_it(ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_FLOWS_LEASE_TTL", "soon")
    ended = ckpt("flows", "ls")
    assert ended.code == 2
    assert "lease_ttl" in ended.err


def test_serving_without_a_catalog_ends_at_once_with_exit_code_10(
    ckpt: Ckpt, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_DB", str(workshop.path / "no such.db"))
    ended = ckpt("flows", "serve")
    assert ended.code == 10
    assert "ckpt init" in ended.err


@pytest.mark.parametrize(
    ("state_name", "code"), [("Completed", 0), ("Partly", 3), ("Corrupt", 20), ("Failed", 1), ("Crashed", 1)]
)
def test_a_run_through_the_api_ends_with_the_exit_code_that_it_would_have_here(
    ckpt: Ckpt, workshop: Workshop, monkeypatch: pytest.MonkeyPatch, state_name: str, code: int
) -> None:
    def submitted(*args: object, **options: object) -> Submitted:
        return Submitted("id", "run-1", state_name, "what became of it", "http://127.0.0.1/runs/id")

    monkeypatch.setattr(submit, "submit", submitted)
    with state.exclusive(workshop.path / "state"):
        state.ServeState(1, "http://127.0.0.1:4200/api", "db", 0.0).write(workshop.path / "state")
        ended = ckpt("flows", "run", "cleanup", "-o", "json")
    assert (ended.code, json.loads(ended.out)["state"]) == (code, state_name)
    assert code == 0 or "what became of it" in ended.err
