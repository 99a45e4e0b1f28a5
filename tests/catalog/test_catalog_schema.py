"""The database: where it is, how it is opened, and its schema revisions."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import func, inspect, select

import migrations
from catalog import Catalog, database
from catalog.database import Database
from catalog.models import Base, Run
from ckptlib.errors import CatalogError, DatabaseLockedError, NoCatalogError
from ckptlib.storage import filesystems
from tests.catalog.samples import empty_catalog


def insert(opened: Database, table: str, *rows: dict[str, object]) -> None:
    """Rows into a table, in one transaction."""
    with opened.write() as (connection, _):
        for row in rows:
            connection.execute(Base.metadata.tables[table].insert().values(row))


REVISIONS = [entry.revision for entry in database.history(None)]


def test_every_revision_goes_up_and_down_and_the_models_match_the_schema(database_url: str) -> None:
    for revision in REVISIONS:
        assert database.upgrade(database_url, revision) == revision
        below = database.downgrade(database_url, "-1")
        assert below == ("base" if revision == REVISIONS[0] else REVISIONS[REVISIONS.index(revision) - 1])
        assert database.upgrade(database_url, revision) == revision
    assert database.check(database_url) == []
    assert database.downgrade(database_url, "base") == "base"
    with closing(Database(database_url)) as opened, opened.read() as connection:
        assert inspect(connection).get_table_names() == ["alembic_version"], "going down leaves nothing behind"


def test_the_stated_head_is_the_newest_revision() -> None:
    assert ScriptDirectory.from_config(database._config()).get_heads() == [migrations.HEAD]


def test_check_finds_what_differs_from_the_models(database_url: str) -> None:
    database.upgrade(database_url)
    with closing(Database(database_url)) as opened, opened.write() as (connection, _):
        connection.exec_driver_sql("ALTER TABLE runs ADD COLUMN surprise INTEGER")
    (difference,) = database.check(database_url)
    assert "surprise" in difference


def test_history_marks_where_the_database_stands(database_url: str) -> None:
    assert [entry.is_current for entry in database.history(database_url)] == [False] * len(REVISIONS)
    database.upgrade(database_url)
    assert [entry.revision for entry in database.history(database_url) if entry.is_current] == [migrations.HEAD]
    assert database.current(database_url) == migrations.HEAD


def test_an_absent_catalog_is_an_error_that_says_how_to_make_one(tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    with pytest.raises(NoCatalogError, match="ckpt init") as raised:
        Catalog(str(path))
    assert raised.value.exit_code == 10
    assert not path.exists(), "looking for a catalog does not make one"
    with pytest.raises(NoCatalogError, match="ckpt init"):
        database.check(str(path))


def test_a_catalog_of_another_revision_is_an_error_that_says_what_to_run(database_url: str) -> None:
    database.upgrade(database_url)
    with closing(Database(database_url)) as opened, opened.write() as (connection, _):
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(NoCatalogError, match=r"revision 9999.*ckpt db upgrade"):
        Catalog(database_url)
    with pytest.raises(CatalogError, match="9999"):
        database.upgrade(database_url)


def test_a_file_that_is_no_database_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    path.write_text("these are my notes, not a database, and they are long enough to look like one " * 20)
    with pytest.raises(CatalogError, match=r"notes\.db"):
        Catalog(str(path))


def test_several_that_create_at_once_make_one_catalog(tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "catalog.db")
    failures: list[Exception] = []

    def create() -> None:
        try:
            Catalog(path, create=True).close()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert database.check(path) == []


def test_where_the_catalog_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert database.database_url().database == str(tmp_path / "data/ckptlib/catalog.db")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert database.database_url().database == str(tmp_path / ".local/share/ckptlib/catalog.db")
    monkeypatch.setenv("CKPT_DB", str(tmp_path / "mine.db"))
    assert database.database_url().database == str(tmp_path / "mine.db")
    monkeypatch.setenv("CKPT_DB", "postgresql://user@host/catalog")
    assert database.database_url().drivername == "postgresql+psycopg"
    assert database.database_url(str(tmp_path / "other%20 name.db")).database == str(tmp_path / "other%20 name.db")
    with pytest.raises(NoCatalogError, match="postgresql"):
        database.database_url("this is :// no URL")


def test_sqlite_is_opened_with_wal_foreign_keys_and_a_busy_timeout(tmp_path: Path) -> None:
    with closing(Database(str(tmp_path / "catalog.db"), timeout=3)) as opened, opened.read() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "foreign_keys", "busy_timeout")
        }
    assert pragmas == {"journal_mode": "wal", "foreign_keys": 1, "busy_timeout": 3000}


def test_a_write_transaction_holds_the_lock_from_its_beginning(tmp_path: Path) -> None:
    """D1: what is read in it stays true until it writes. And readers are never in the way, nor blocked."""
    path = empty_catalog(tmp_path)
    count = select(func.count()).select_from(Run)
    with closing(Database(path)) as first, closing(Database(path, timeout=0.05)) as second:
        with first.write() as (connection, now):
            assert connection.execute(count).scalar_one() == 0
            with pytest.raises(DatabaseLockedError, match="locked by another process") as raised, second.write():
                pass
            with second.read() as reader:
                assert reader.execute(count).scalar_one() == 0
            connection.execute(Base.metadata.tables["runs"].insert().values(name="r", created_at=now))
        assert raised.value.exit_code == 11
        with second.read() as reader:
            assert reader.execute(count).scalar_one() == 1


def test_a_failed_write_transaction_leaves_nothing(catalog: Catalog) -> None:
    row = {"name": "twice", "created_at": datetime.now(UTC)}
    with pytest.raises(CatalogError, match=r"(?i)unique"):
        insert(catalog.database, "runs", row, row)
    assert catalog.runs() == []


def test_the_clock_is_the_databases_and_in_utc(catalog_url: str) -> None:
    """S2."""
    with closing(Database(catalog_url)) as opened, opened.write() as (_, now):
        assert now.tzinfo is UTC
        assert abs(now - datetime.now(UTC)) < timedelta(seconds=5)


def test_a_naive_time_is_never_stored(catalog: Catalog) -> None:
    row = {"name": "r", "created_at": datetime(2026, 1, 1)}  # noqa: DTZ001
    with pytest.raises(CatalogError, match="naive"):
        insert(catalog.database, "runs", row)


def test_a_foreign_key_that_points_nowhere_is_refused(catalog: Catalog) -> None:
    row = {"checkpoint_id": 7, "kind": "pin", "owner": "me", "reason": "x", "created_at": datetime.now(UTC)}
    with pytest.raises(CatalogError, match=r"(?i)foreign key"):
        insert(catalog.database, "holds", row)


MOUNTS = """\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:44 / /home rw - nfs4 server:/home rw
31 30 8:2 / /home/local rw - xfs /dev/sdb rw
32 22 0:45 / /mnt/with\\040space rw - lustre mds:/fs rw
33 22 0:46 / /mnt/s3 rw - fuse.s3fs s3fs rw
34 22 0:47 / /mnt/over rw - fuse.fuse-overlayfs fuse rw
35 22 0:48 / /twice rw - ext4 /dev/sdc rw
36 22 0:49 / /twice rw - nfs server:/x rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/var/lib/x.db", "ext4", False),
        ("/home/me/x.db", "nfs4", True),
        ("/home/local/x.db", "xfs", False),
        ("/homes/x.db", "ext4", False),
        ("/mnt/with space/x.db", "lustre", True),
        ("/mnt/s3/x.db", "fuse.s3fs", True),
        ("/mnt/over/x.db", "fuse.fuse-overlayfs", False),
        ("/twice/x.db", "nfs", True),
    ],
)
def test_the_filesystem_of_a_path_is_that_of_its_innermost_mount(path: str, kind: str, network: bool) -> None:
    assert filesystems.filesystem_type(path, MOUNTS) == kind
    assert filesystems.is_network(kind) is network


def test_sqlite_on_a_network_filesystem_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S2."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 0:44 / {tmp_path} rw - nfs4 server:/x rw\n")
    monkeypatch.setattr(filesystems, "MOUNTS", str(mounts))
    with pytest.raises(NoCatalogError, match=r"network filesystem \(nfs4\).*PostgreSQL"):
        Database(str(tmp_path / "catalog.db"))


def test_a_read_only_directory_is_a_clear_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(NoCatalogError, match="cannot make its directory"):
        database.upgrade(str(blocked / "catalog.db"))


def test_an_unreachable_server_is_no_catalog(unused_port: int) -> None:
    with pytest.raises(NoCatalogError, match=r"cannot be used"):
        Catalog(f"postgresql://nobody:secret@127.0.0.1:{unused_port}/none", timeout=1)


def test_the_password_of_a_database_is_never_shown() -> None:
    with closing(Database("postgresql://user:secret@host/catalog")) as opened:
        assert "secret" not in str(opened)


def test_plain_sqlite_can_read_the_file_beside_us(tmp_path: Path) -> None:
    path = empty_catalog(tmp_path)
    with Catalog(path), closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM checkpoints").fetchone() == (0,)
