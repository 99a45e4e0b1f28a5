"""What a verification shows: keys that Prefect accepts, tables that show what matters first."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from flows.artifacts import MAX_ROWS, PrefectReporter, artifact_key, describe, verdict_table
from flows.drain import Outcome, Summary, drain, judge, next_lease, verify_one
from flows.settings import FlowsSettings
from flows.verify import conclude
from tests.flows.test_drain import Notes
from tests.flows.workshop import Workshop, flip_a_byte


@given(run=st.text(min_size=1, max_size=300), save_id=st.text(min_size=1, max_size=40))
def test_key_is_one_that_prefect_accepts_whatever_the_run_is_called(run: str, save_id: str) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", artifact_key("verify", run, save_id))


def test_saves_whose_run_names_look_alike_have_keys_of_their_own() -> None:
    keys = {artifact_key("verify", run, save) for run in ("a b", "a/b", "A-B") for save in ("1", "2")}
    assert len(keys) == 6


def test_table_has_every_file_with_its_verdict_and_the_bad_ones_first(
    workshop: Workshop, settings: FlowsSettings
) -> None:
    """V1, V2: digests, where they came from, and a verdict per file."""
    (row,) = workshop.save(1)
    bad = workshop.data_file(row)
    flip_a_byte(bad)
    lease = next_lease(workshop.catalog, settings, run=None, handled=())
    assert lease is not None
    notes = Notes()
    outcome = verify_one(workshop.catalog, settings, lease, notes)
    report = notes.reports["run@1"]
    assert report is not None
    table = verdict_table(report)
    assert (table[0]["file"], table[0]["verdict"]) == (bad.name, "digest")
    assert table[0]["expected"] != table[0]["sha256"]
    assert table[0]["origin"] == "writer"
    assert {line["by"] for line in table} == {"its bytes"}
    assert {line["file"] for line in table} == set(report.files)
    json.dumps(table)
    text = describe(outcome, report)
    assert "run@1" in text
    assert "corrupt" in text


def test_table_of_very_many_files_is_cut_and_says_so(workshop: Workshop, settings: FlowsSettings) -> None:
    workshop.save(1)
    notes = Notes()
    drain(workshop.catalog, settings, partial(verify_one, workshop.catalog, settings, reporter=notes))
    report = notes.reports["run@1"]
    assert report is not None
    check = next(iter(report.checks.values()))
    many = type(report)(**{**vars(report), "checks": {f"{n:06}": check for n in range(MAX_ROWS + 7)}})
    table = verdict_table(many)
    assert len(table) == MAX_ROWS + 1
    assert table[-1] == {"file": "(7 more)", "verdict": "7 ok"}


def test_a_good_report_needs_no_explanation(workshop: Workshop, settings: FlowsSettings) -> None:
    workshop.save(1)
    notes = Notes()
    drain(workshop.catalog, settings, partial(verify_one, workshop.catalog, settings, reporter=notes))
    report = notes.reports["run@1"]
    assert report is not None
    assert judge(report, "unverified") == judge(report, "corrupt") == ("verified", "")
    assert judge(report, "suspect") == judge(replace(report, level="store"), "corrupt") == ("checked", "")


def test_reporter_outside_a_run_shows_nothing_and_calls_nobody(workshop: Workshop, settings: FlowsSettings) -> None:
    """No PREFECT_API_URL: a call would start a server, and take a minute."""
    workshop.save(1)
    lease = next_lease(workshop.catalog, settings, run=None, handled=())
    assert lease is not None
    reporter = PrefectReporter()
    reporter.begin(lease)
    reporter.progress(1, 2)
    reporter.end(Outcome(lease.checkpoint_id, lease.name, lease.save_id, "failed"), None)


def test_flow_run_with_a_corrupt_checkpoint_ends_well_and_shows_it_one_with_our_error_fails() -> None:
    corrupt = Outcome(1, "run@1", "a", "corrupt", "x.distcp: digest")
    away = Outcome(2, "run@2", "b", "unreadable", "timeout")
    ours = Outcome(3, "run@3", "c", "failed", "KeyError")
    fine = Outcome(4, "run@4", "d", "verified")
    states = {
        name: conclude(Summary(outcomes))
        for name, outcomes in {
            "nothing": [],
            "fine": [fine],
            "corrupt": [fine, corrupt],
            "away": [away, fine],
            "ours": [ours, fine],
            "both": [ours, corrupt],
        }.items()
    }
    assert {name: (found.type.value, found.name) for name, found in states.items()} == {
        "nothing": ("COMPLETED", "Completed"),
        "fine": ("COMPLETED", "Completed"),
        "corrupt": ("COMPLETED", "Corrupt"),
        "away": ("COMPLETED", "Partly"),
        "ours": ("FAILED", "Partly"),
        "both": ("FAILED", "Corrupt"),
    }
    assert states["corrupt"].message == "1 corrupt, 1 verified; run@1 corrupt: x.distcp: digest"
    assert "run@2 unreadable: timeout" in str(states["away"].message)
