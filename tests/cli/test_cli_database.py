"""``ckpt init`` and ``ckpt db``: the catalog's database."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

import migrations
from catalog import Catalog, database
from catalog.cli.context import Cli
from tests.cli.conftest import RUN, Ckpt


@pytest.mark.parametrize(
    "verb", [["ls"], ["runs", "ls"], ["resume", "r"], ["show", "r@1"], ["verify", "r"], ["scan", "/"]]
)
def test_without_a_catalog_every_verb_is_exit_10_and_says_how_to_make_one(ckpt: Ckpt, verb: list[str]) -> None:
    ended = ckpt(*verb)
    assert (ended.code, ended.out) == (10, "")
    assert "ckpt init" in ended.err
    ended = ckpt(*verb, "-o", "json")
    assert (ended.code, ended.out, ended.error["code"]) == (10, "", 10)


def test_init_makes_a_catalog_and_again_changes_nothing(ckpt: Ckpt, tmp_path: Path) -> None:
    first, second = ckpt("init", "-o", "json"), ckpt("init", "-o", "json")
    path = str(tmp_path / "catalog.db")
    assert (first.code, first.json) == (0, {"database": path, "revision": migrations.HEAD, "created": True})
    assert (second.code, second.json) == (0, {"database": path, "revision": migrations.HEAD, "created": False})
    assert ckpt("ls").code == 0


def test_the_database_is_the_option_then_the_environment_then_the_users_own(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ckpt("init", "--db", str(tmp_path / "a b" / "c.db"), "-o", "json").json["database"].endswith("a b/c.db")
    assert ckpt("init", "-o", "json").json["database"] == str(tmp_path / "catalog.db")
    monkeypatch.delenv("CKPT_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert ckpt("init", "-o", "json").json["database"] == str(tmp_path / "data" / "ckptlib" / "catalog.db")
    assert ckpt("init", "--db", f"sqlite:///{tmp_path}/u.db", "-o", "json").json["created"] is True


def test_a_place_that_cannot_hold_a_database_is_a_plain_error(ckpt: Ckpt, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("this is no database " * 100)
    for db in (tmp_path / "file" / "catalog.db", tmp_path / "file", "nosuch://host/db"):
        ended = ckpt("init", "--db", str(db))
        assert (ended.code, ended.out) in ((10, ""), (1, ""))
        assert ended.err.startswith(f"error: catalog {db}: ")
        assert "Traceback" not in ended.err


def test_the_schema_is_shown_upgraded_and_checked(ckpt: Ckpt, tmp_path: Path) -> None:
    assert ckpt("db", "current").code == 10
    assert ckpt("db", "check").code == 10
    assert ckpt("db", "upgrade", "-o", "json").json["revision"] == migrations.HEAD
    assert ckpt("db", "current", "-o", "json").json == {
        "database": str(tmp_path / "catalog.db"),
        "revision": migrations.HEAD,
        "head": migrations.HEAD,
    }
    revisions = ckpt("db", "history", "-o", "json").json
    assert [entry["revision"] for entry in revisions if entry["current"] and entry["head"]] == [migrations.HEAD]
    checked = ckpt("db", "check", "-o", "json")
    assert (checked.code, checked.json["ok"], checked.json["differences"]) == (0, True, [])


def test_a_schema_that_differs_is_work_pending(ckpt: Ckpt, catalog: Catalog) -> None:
    with catalog.database.write() as (connection, _):
        connection.exec_driver_sql("ALTER TABLE runs ADD COLUMN surprise TEXT")
    ended = ckpt("db", "check", "-o", "json")
    assert (ended.code, ended.json["ok"]) == (4, False)
    assert "surprise" in str(ended.json["differences"])


def test_an_older_schema_is_refused_until_it_is_upgraded(ckpt: Ckpt, catalog: Catalog) -> None:
    with catalog.database.write() as (connection, _):
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0000'")
    for verb in (["ls"], ["init"]):
        ended = ckpt(*verb)
        assert ended.code == 10
        assert "ckpt db upgrade" in ended.err


def test_an_unknown_revision_is_an_error(ckpt: Ckpt, catalog: Catalog) -> None:
    ended = ckpt("db", "upgrade", "nonsense")
    assert ended.code == 1
    assert "nonsense" in ended.err
    assert database.current(str(catalog)) == migrations.HEAD


def test_a_locked_database_is_exit_11(ckpt: Ckpt, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog.register_root(RUN, "/root", None)
    monkeypatch.setattr(Cli, "catalog", lambda self: Catalog(self.db, timeout=0.05))
    with contextlib.closing(sqlite3.connect(str(catalog), isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        ended = ckpt("verify", RUN)
    assert ended.code == 11
    assert "locked" in ended.err
