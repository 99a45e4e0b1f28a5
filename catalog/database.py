"""The catalog's database: where it is, how it is opened, its clock, its schema revisions.

SQLite by default (WAL, foreign keys, busy timeout, `BEGIN IMMEDIATE` for everything that writes); PostgreSQL by URL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError, SQLAlchemyError

import migrations
from catalog.models import Base
from ckptlib.errors import CatalogError, DatabaseLockedError, NoCatalogError
from ckptlib.storage import filesystems

if TYPE_CHECKING:
    from alembic.config import Config

ENVIRONMENT = "CKPT_DB"
BUSY_TIMEOUT = 10.0
_WRITE = "catalog_write"

Clock = Callable[[Connection], datetime]


def default_path() -> Path:
    """The per-user database file: ``$XDG_DATA_HOME/ckptlib/catalog.db``, ``~/.local/share`` when that is unset."""
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "ckptlib" / "catalog.db"


def database_url(db: str | None = None) -> URL:
    """The database that `db` means: a URL, a path, or None for `CKPT_DB` and then the per-user default.

    Raises:
        NoCatalogError: it is a URL that SQLAlchemy cannot read.
    """
    db = db or os.environ.get(ENVIRONMENT) or str(default_path())
    if "://" not in db:
        return URL.create("sqlite", database=str(Path(db).expanduser().absolute()))
    try:
        url = make_url(db)
    except ArgumentError as error:
        raise NoCatalogError(
            f"catalog {db!r}: {error}. Give a path, or sqlite:///PATH, or postgresql+psycopg://…"
        ) from error
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    return url


def database_clock(connection: Connection) -> datetime:
    """Now, by the database's clock: the only clock that decides anything (S2)."""
    if connection.dialect.name == "sqlite":
        now = connection.exec_driver_sql("SELECT strftime('%Y-%m-%d %H:%M:%f', 'now')").scalar_one()
        return datetime.fromisoformat(now).replace(tzinfo=UTC)
    # Not now(): that is when the transaction began, perhaps long before it got its lock.
    moment: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
    return moment.astimezone(UTC)


class Database:
    """An open database. Closing it closes its connections.

    Args:
        db: see `database_url`.
        timeout: seconds to wait for a locked or unreachable database.
        clock: replaced by tests that must not wait for a lease to expire.

    Raises:
        NoCatalogError: an SQLite file on a network filesystem (S2), or no driver for the URL.
    """

    def __init__(self, db: str | None = None, *, timeout: float = BUSY_TIMEOUT, clock: Clock = database_clock) -> None:
        self.url = database_url(db)
        self._clock = clock
        self._timeout = timeout
        if self.path is not None:
            kind = filesystems.kind(str(self.path))
            if kind is not None and filesystems.is_network(kind):
                raise NoCatalogError(
                    f"catalog {self.path}: is on a network filesystem ({kind}), where SQLite's locks do not hold. "
                    f"Put it on a local disk ({ENVIRONMENT}=/local/path), or use PostgreSQL."
                )
        try:
            self.engine = _engine(self.url, timeout)
        except (NoSuchModuleError, ImportError, ArgumentError) as error:
            raise NoCatalogError(
                f"catalog {self}: no driver ({error}). SQLite and PostgreSQL are supported."
            ) from error

    @property
    def path(self) -> Path | None:
        """The file, for SQLite on disk."""
        is_file = self.url.get_backend_name() == "sqlite" and self.url.database not in (None, "", ":memory:")
        return Path(str(self.url.database)) if is_file else None

    def __str__(self) -> str:
        """Its place, without the password."""
        return str(self.path) if self.path is not None else self.url.render_as_string(hide_password=True)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection for reading: one snapshot from the first statement on.

        Raises:
            NoCatalogError: the database cannot be reached.
            DatabaseLockedError: somebody else kept it locked for longer than the timeout.
            CatalogError: it failed while in use.
        """
        with self._translated(), self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[tuple[Connection, datetime]]:
        """A write transaction and its time. Commits at the end, or rolls back when the block raises.

        SQLite: `BEGIN IMMEDIATE`, so whoever reads here and then writes has read the truth (a deferred transaction
        would fail with "database is locked" at its first write instead of waiting its turn).
        """
        options = {_WRITE: True}
        with self._translated(), self.engine.connect().execution_options(**options) as connection, connection.begin():
            yield connection, self._clock(connection)

    def now(self, connection: Connection) -> datetime:
        """The database's time, on a connection of `read` or `write`."""
        return self._clock(connection)

    def revision(self) -> str | None:
        """The schema's revision; None for a database without one."""
        if self.path is not None and not self.path.exists():
            return None
        with self.read() as connection:
            return _revision(connection)

    def require_head(self) -> None:
        """Checks that the schema is the one this code works with.

        Raises:
            NoCatalogError: there is no database, or its schema is older or newer.
        """
        if self.path is not None and not self.path.exists():
            raise NoCatalogError(f"no catalog at {self}. Create one with `ckpt init`, or name another with --db.")
        found = self.revision()
        if found is None:
            raise NoCatalogError(f"{self} holds no catalog. Create it with `ckpt init`, or name another with --db.")
        if found != migrations.HEAD:
            raise NoCatalogError(
                f"catalog {self}: schema revision {found}, this ckpt works with {migrations.HEAD}. "
                "Run `ckpt db upgrade`; if the catalog is the newer one, use a newer ckptlib."
            )

    def close(self) -> None:
        """Closes all connections; the object opens new ones when it is used again."""
        self.engine.dispose()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Our errors instead of the driver's, saying which database and what to do."""
        try:
            yield
        except OperationalError as error:
            cause = str(error.orig)
            if "locked" in cause or "lock timeout" in cause:
                raise DatabaseLockedError(
                    f"catalog {self}: locked by another process for more than {self._timeout:g} s ({cause}). Try again."
                ) from error
            raise NoCatalogError(f"catalog {self}: cannot be used: {cause}") from error
        except DBAPIError as error:
            raise CatalogError(f"catalog {self}: {error.orig}") from error
        except SQLAlchemyError as error:
            raise CatalogError(f"catalog {self}: {error}") from error


def _engine(url: URL, timeout: float) -> Engine:
    """An engine with the settings that the module's docstring names."""
    if url.get_backend_name() != "sqlite":
        connect = {"connect_timeout": max(1, round(timeout))} if url.get_driver_name() == "psycopg" else {}
        return create_engine(url, connect_args=connect, pool_pre_ping=True)
    engine = create_engine(url, connect_args={"timeout": timeout})

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        # The driver must not begin transactions by itself: it would begin deferred ones, and late.
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys = ON")
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            connection.execute("PRAGMA journal_mode = WAL")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        write = connection.get_execution_options().get(_WRITE)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _revision(connection: Connection) -> str | None:
    """What Alembic's table says; None without the table or its row."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one_or_none()
    return revision


# ---------------------------------------------------------------- schema revisions: `ckpt db …`
# Alembic is imported where it is used: it costs more than everything else here, and a trainer needs none of it.


@dataclass(frozen=True)
class Revision:
    """One schema revision, for `ckpt db history`."""

    revision: str
    down_revision: str | None
    message: str
    is_current: bool
    is_head: bool


def _config() -> Config:
    """Alembic's configuration, found from the installed package: no ini file, no working directory."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    return config


def upgrade(db: str | None = None, revision: str = "head") -> str:
    """Brings the schema to `revision`, creating an SQLite file (and its directories) if need be.

    Returns:
        The revision it has now.

    Raises:
        NoCatalogError: the database cannot be reached.
        CatalogError: `revision` does not exist, or the database was written by a newer ckptlib.
    """
    from alembic import command

    return _move(db, lambda config: command.upgrade(config, revision))


def downgrade(db: str | None, revision: str) -> str:
    """Takes the schema back to `revision` (``base`` empties the database). Errors as `upgrade`."""
    from alembic import command

    return _move(db, lambda config: command.downgrade(config, revision))


def _move(db: str | None, run: Callable[[Config], None]) -> str:
    from alembic.util import CommandError

    database = Database(db)
    try:
        if database.path is not None:
            try:
                database.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise NoCatalogError(f"catalog {database}: cannot make its directory: {error}") from error
        config = _config()
        with database.write() as (connection, _):
            config.attributes |= {"connection": connection, "target_metadata": Base.metadata}
            try:
                run(config)
            except CommandError as error:
                raise CatalogError(f"catalog {database}: {error}") from error
            return _revision(connection) or "base"
    finally:
        database.close()


def current(db: str | None = None) -> str | None:
    """The schema's revision; None when there is no catalog there."""
    database = Database(db)
    try:
        return database.revision()
    finally:
        database.close()


def history(db: str | None = None) -> list[Revision]:
    """All revisions, oldest first, marked with where the database stands."""
    from alembic.script import ScriptDirectory

    here = current(db)
    script = ScriptDirectory.from_config(_config())
    heads = set(script.get_heads())
    return [
        Revision(
            revision=entry.revision,
            down_revision=str(entry.down_revision) if entry.down_revision else None,
            message=(entry.doc or "").rstrip("."),
            is_current=entry.revision == here,
            is_head=entry.revision in heads,
        )
        for entry in reversed(list(script.walk_revisions()))
    ]


def check(db: str | None = None) -> list[str]:
    """What differs between the database's schema and the models; empty when nothing does. For CI.

    Raises:
        NoCatalogError: there is no catalog, or it cannot be reached.
    """
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext

    database = Database(db)
    try:
        found = database.revision()
        if found is None:
            database.require_head()
        if found != migrations.HEAD:
            return [f"schema revision {found}, expected {migrations.HEAD}: run `ckpt db upgrade`"]
        with database.read() as connection:
            context = MigrationContext.configure(
                connection,
                opts={"compare_type": True, "compare_server_default": True, "target_metadata": Base.metadata},
            )
            return [str(difference) for difference in compare_metadata(context, Base.metadata)]
    finally:
        database.close()
