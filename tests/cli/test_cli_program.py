"""The program around the verbs: plug-ins, errors, exit codes, global options; and real processes."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import pty
import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer

from catalog import Catalog, verification
from catalog.cli import group, runs
from catalog.cli.exits import ExitCode, explain
from catalog.rows import RunRow
from ckptlib import errors
from tests.catalog.training import Training
from tests.cli.conftest import RUN, Ckpt, record

CKPT = Path(sys.executable).with_name("ckpt")
"""The installed console script."""

# --- errors -----------------------------------------------------------------------------------------------------------


def test_every_error_of_the_library_has_its_exit_code() -> None:
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.CkptError)]
    assert {kind.exit_code for kind in classes} == {1, 10, 11, 20, 21, 22}
    for kind in classes:
        assert explain(kind("what happened")) == (kind.exit_code, "what happened")


def test_other_expected_errors_have_a_code_and_defects_have_none() -> None:
    denied = errors.StorageError("cannot list /x")
    denied.__cause__ = PermissionError(errno.EACCES, "Permission denied")
    assert explain(denied) == (ExitCode.ACCESS_DENIED, "cannot list /x")
    code, message = explain(PermissionError(errno.EACCES, "Permission denied", "/x")) or (0, "")
    assert code == ExitCode.ACCESS_DENIED
    assert "/x" in message
    assert explain(OSError(errno.ENOSPC, "No space left on device")) is not None
    assert explain(KeyboardInterrupt()) == (130, "cancelled")
    assert explain(typer.Abort()) == (130, "cancelled")
    assert explain(TypeError("a defect")) is None


def test_an_integrity_error_keeps_its_code_when_access_was_denied_below() -> None:
    error = errors.IntegrityError("damaged")
    error.__cause__ = PermissionError(errno.EACCES, "Permission denied")
    assert explain(error) == (20, "damaged")


def test_a_defect_shows_where_it_is_and_asks_for_a_report(ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("catalog.cli.context.Cli.catalog", broken)
    ended = ckpt("ls", "-o", "json")
    assert (ended.code, ended.out) == (1, "")
    assert "Traceback" in ended.err
    assert "report" in json.loads(ended.err.splitlines()[-1])["error"]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["lss"], "'ls'"),
        (["ls", "--nonsense"], "--nonsense"),
        (["-o", "xml", "ls"], "xml"),
        (["ls", "-o"], "-o"),
        (["show"], "RUN@ITER"),
        (["ls", "a", "b"], "b"),
    ],
)
def test_usage_errors_are_exit_2_on_standard_error_in_the_asked_format(ckpt: Ckpt, args: list[str], named: str) -> None:
    ended = ckpt(*args)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert named in ended.err
    ended = ckpt(*args, env={"CKPT_OUTPUT": "json"})
    if "xml" not in args:
        assert (ended.error["message_type"], ended.error["code"]) == ("exit_error", 2)


def test_without_a_verb_the_help_is_printed(ckpt: Ckpt) -> None:
    ended = ckpt()
    assert ended.code == 2
    assert "Usage: ckpt" in ended.out + ended.err
    for verb in ("init", "ls", "show", "verify", "resume", "scan", "db", "runs", "flows"):
        assert f" {verb} " in ended.out + ended.err


@pytest.mark.parametrize(
    "verb", ["init", "ls", "show", "verify", "resume", "scan", "db", "db upgrade", "db check", "runs", "runs ls"]
)
def test_every_verb_has_help(ckpt: Ckpt, verb: str) -> None:
    ended = ckpt(*verb.split(), "--help")
    assert (ended.code, ended.err) == (0, "")
    assert f"ckpt {verb}" in ended.out


# --- global options ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("catalog")
def test_each_global_option_has_a_variable_and_may_stand_anywhere(ckpt: Ckpt, tmp_path: Path) -> None:
    assert ckpt("-o", "json", "ls").json == ckpt("ls", "-o", "json").json == ckpt("ls", "--output=json").json == []
    assert ckpt("ls", env={"CKPT_OUTPUT": "json"}).json == []
    assert ckpt("ls", "-q").err == ckpt("ls", env={"CKPT_QUIET": "1"}).err == ""
    assert ckpt("ls", env={"CKPT_DB": str(tmp_path / "none.db")}).code == 10
    assert ckpt("ls", "--db", str(tmp_path / "catalog.db"), env={"CKPT_DB": "/none.db"}).code == 0


def test_a_run_whose_name_looks_like_an_option_is_named_after_a_double_dash(
    ckpt: Ckpt, catalog: Catalog, tmp_path: Path
) -> None:
    record(Training(tmp_path / "odd", "-o"), catalog, 1)
    assert ckpt("-o", "json", "show", "--", "-o@1").json["run"] == "-o"


# --- plug-ins ---------------------------------------------------------------------------------------------------------


def _plug_in(monkeypatch: pytest.MonkeyPatch, **plugins: str) -> None:
    entries = [EntryPoint(name, value, group.PLUGINS) for name, value in plugins.items()]
    monkeypatch.setattr(group, "entry_points", lambda group: entries)


def test_verbs_of_other_layers_plug_in_and_get_the_global_options(
    ckpt: Ckpt, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    _plug_in(monkeypatch, extra=f"{runs.__name__}:app")
    assert ckpt("extra", "ls", "-o", "json").json == []
    assert " extra " in ckpt("--help").out


def test_a_plug_in_cannot_replace_an_own_verb(ckpt: Ckpt, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    _plug_in(monkeypatch, ls="nosuch:app")
    assert ckpt("ls", "-o", "json").json == []


def test_a_plug_in_that_cannot_be_imported_breaks_nothing_else(
    ckpt: Ckpt, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    _plug_in(monkeypatch, broken="nosuch.module:app")
    assert ckpt("ls", "-o", "json").json == []
    assert "Not available" in ckpt("--help").out
    ended = ckpt("broken", "anything", "--at", "all")
    assert (ended.code, ended.out) == (1, "")
    assert "nosuch" in ended.err
    assert "Traceback" not in ended.err


# --- real processes ---------------------------------------------------------------------------------------------------


def _run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CKPT, *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.usefixtures("catalog")
@pytest.mark.parametrize(
    ("args", "unwanted"), [(["--help"], {"torch", "prefect", "sqlalchemy", "alembic"}), (["ls"], {"torch", "prefect"})]
)
def test_a_quick_verb_waits_for_no_heavy_import(args: list[str], unwanted: set[str]) -> None:
    script = (
        "import atexit, sys; from catalog.cli.main import main; sys.argv = ['ckpt', *sys.argv[1:]]; "
        "atexit.register(lambda: print('imported', *sys.modules, file=sys.stderr)); main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=100, check=True
    )
    assert unwanted & set(done.stderr.split("imported ")[1].split()) == set()


def test_a_pipe_gets_results_on_standard_output_and_the_reason_on_standard_error(
    ckpt: Ckpt, training: Training, catalog: Catalog
) -> None:
    record(training, catalog, 10)
    done = _run("verify", f"{RUN}@10", "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["checkpoints"][0]["verdict"] == "verified"
    training.data_file(10).unlink()
    done = _run("verify", f"{RUN}@10", CKPT_OUTPUT="json")
    assert done.returncode == 20
    assert json.loads(done.stdout)["findings"][0]["verdict"] == "missing"
    assert [json.loads(line) for line in done.stderr.splitlines()][-1] == {
        "message_type": "exit_error",
        "code": 20,
        "error": f"1 checkpoint corrupt: {RUN}@10",
    }


def test_somebody_at_a_terminal_gets_colours_and_is_asked(ckpt: Ckpt, training: Training, catalog: Catalog) -> None:
    training.attempt(10)
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [CKPT, "scan", str(training.root), "--adopt"],
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""
    answered = False
    with contextlib.suppress(OSError):  # how the end of the other side of a pseudo-terminal shows
        while chunk := os.read(terminal, 4096):
            seen += chunk
            if b"in line?" in seen and not answered:
                os.write(terminal, b"y\n")
                answered = True
    os.close(terminal)
    assert process.wait(timeout=60) == 0, seen.decode()
    assert answered
    assert b"\x1b[32madopt" in seen
    assert [row.iteration for row in catalog.checkpoints()] == [10]


def test_an_interrupted_verification_is_exit_130_and_gives_its_lease_back(
    ckpt: Ckpt, training: Training, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(training, catalog, 10)

    def interrupted(*args: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)

    monkeypatch.setattr(verification, "verify", interrupted)
    ended = ckpt("verify", f"{RUN}@10")
    assert (ended.code, ended.out) == (130, "")
    assert "cancelled" in ended.err
    assert catalog.checkpoint(RUN, 10).lease_owner is None
    assert catalog.checkpoint(RUN, 10).verdict == "unverified"


@pytest.mark.usefixtures("catalog")
def test_log_messages_are_text_for_people_and_json_lines_for_programs(
    ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Catalog.runs

    def warns(self: Catalog) -> list[RunRow]:
        logging.getLogger("catalog").warning("a\x1b[2Jb")
        return real(self)

    monkeypatch.setattr(Catalog, "runs", warns)
    assert r"warning: catalog: a\x1b[2Jb" in ckpt("runs", "ls").err.splitlines()
    assert {
        "message_type": "log",
        "level": "warning",
        "logger": "catalog",
        "message": "a\x1b[2Jb",
    } in map(json.loads, ckpt("runs", "ls", "-o", "json").err.splitlines())
