"""docs/cli.md says what is so: verbs, options, exit codes and the keys of every JSON form."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from catalog.cli import db, doctor, estimate, init, resume, scan, show, verify_views, views
from catalog.cli.exits import ExitCode
from catalog.cli.main import app
from catalog.cli.verify import Level
from catalog.states import LIFECYCLES, VERDICTS
from ckptlib import errors
from tests.cli.conftest import Ckpt

TEXT = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
WORDS = " ".join(TEXT.split())

VIEWS: list[type[Any]] = [
    init.CatalogView,
    db.SchemaView,
    db.RevisionView,
    db.CheckView,
    views.RunView,
    views.CheckpointView,
    views.FileView,
    views.ProblemView,
    views.VerificationView,
    views.HoldView,
    views.AncestorView,
    show.DetailView,
    verify_views.VerifyView,
    verify_views.CheckedView,
    verify_views.FindingView,
    verify_views.SkippedView,
    resume.ResumePointView,
    resume.CandidateView,
    scan.ScanView,
    scan.ItemView,
    doctor.StorageView,
    doctor.FindingView,
    estimate.EstimateView,
    estimate.StallView,
    estimate.AssumptionView,
]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_the_keys_of_a_json_form_are_documented_in_order(view: type[Any]) -> None:
    # Lists of objects are marked in the text: ``files[]``.
    assert f"{{{', '.join(field.name for field in fields(view))}}}" in WORDS.replace("[]", "")


def test_every_exit_code_is_documented() -> None:
    table = TEXT.split("## Exit codes")[1].split("## ")[0]
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", table, flags=re.MULTILINE)}
    raised = {kind.exit_code for kind in vars(errors).values() if hasattr(kind, "exit_code")}
    assert documented == {*map(int, ExitCode), 2, *raised}


def test_the_states_and_levels_are_documented() -> None:
    assert f"`{' '.join(LIFECYCLES)}`" in WORDS
    assert f"`{' '.join(VERDICTS)}`" in WORDS
    for level in Level:
        assert f"`{level}`" in TEXT


def test_every_documented_verb_and_option_exists(ckpt: Ckpt) -> None:
    tree = TEXT.split("\n\n")[2]
    verbs = re.findall(r"^    ckpt (\w+(?: \w+)?)", tree, flags=re.MULTILINE)
    assert {verb.split()[0] for verb in verbs} == {
        "init",
        "db",
        "runs",
        "ls",
        "show",
        "verify",
        "resume",
        "scan",
        "doctor",
        "estimate",
        "flows",
    }
    for line in tree.splitlines():
        verb = line.split()[1:3] if line.split()[1] in ("runs", "doctor") else line.split()[1:2]
        help_text = ckpt(*verb, "--help").out
        for option in re.findall(r"--[a-z-]+", line):
            assert option in help_text
    helped = ckpt("--help").out
    for option, variable in re.findall(r"`(--\w+)[^|]*\| `(CKPT_\w+)`", TEXT):
        assert option in helped
        assert variable in helped


def test_every_option_of_a_verb_is_documented() -> None:
    from typer.main import get_command

    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--") and option != "--help":
                    assert f"`{option}" in TEXT or f"{option}]" in TEXT or f"{option} " in TEXT, (name, option)
