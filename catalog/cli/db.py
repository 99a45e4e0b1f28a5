"""``ckpt db``: the catalog's schema, in the verbs of alembic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from catalog.cli.columns import column, lines, tick
from catalog.cli.context import Cli
from catalog.cli.exits import Ended, ExitCode


def _matches(value: bool) -> str:
    return "matches this ckpt" if value else "differs from what this ckpt expects"


app = typer.Typer(help="The catalog's schema: upgrade, current, history, check.", no_args_is_help=True)


@dataclass(frozen=True)
class RevisionView:
    """A line of ``ckpt db history``."""

    revision: str = column("REVISION")
    message: str = column("MESSAGE")
    current: bool = column("CURRENT", tick)
    head: bool = column("HEAD", tick)
    down_revision: str | None = column("AFTER", wide=True)


@dataclass(frozen=True)
class SchemaView:
    """What ``ckpt db current`` and ``upgrade`` say."""

    database: str = column("catalog")
    revision: str = column("schema revision")
    head: str = column("newest revision")


@dataclass(frozen=True)
class CheckView:
    """What ``ckpt db check`` says."""

    database: str = column("catalog")
    ok: bool = column("schema", _matches)
    differences: tuple[str, ...] = column("differences", lines)


@app.command()
def upgrade(
    ctx: typer.Context, revision: Annotated[str, typer.Argument(help="A revision, or 'head' for the newest.")] = "head"
) -> None:
    """Bring the schema to a revision; creates the catalog if there is none."""
    import migrations
    from catalog import database

    cli = Cli.of(ctx)
    reached = database.upgrade(cli.db, revision)
    cli.output.document(SchemaView(cli.database_name(), reached, migrations.HEAD))


@app.command()
def current(ctx: typer.Context) -> None:
    """Print the schema's revision. Exit code 10 without a catalog."""
    import migrations
    from catalog import database
    from ckptlib.errors import NoCatalogError

    cli = Cli.of(ctx)
    revision = database.current(cli.db)
    if revision is None:
        raise NoCatalogError(f"no catalog at {cli.database_name()}. Create one: ckpt init")
    cli.output.document(SchemaView(cli.database_name(), revision, migrations.HEAD))
    if revision != migrations.HEAD:
        cli.output.note("The schema is not the newest one. Next: ckpt db upgrade")


@app.command()
def history(ctx: typer.Context) -> None:
    """List all schema revisions, newest last, and where the catalog stands."""
    from catalog import database

    cli = Cli.of(ctx)
    revisions = [
        RevisionView(entry.revision, entry.message, entry.is_current, entry.is_head, entry.down_revision)
        for entry in database.history(cli.db)
    ]
    cli.output.rows(RevisionView, revisions)


@app.command()
def check(ctx: typer.Context) -> None:
    """For CI: exit code 4 if the schema is not what this version of ckpt works with."""
    from catalog import database

    cli = Cli.of(ctx)
    differences = tuple(database.check(cli.db))
    cli.output.document(CheckView(cli.database_name(), not differences, differences))
    if differences:
        raise Ended(ExitCode.WORK_PENDING, f"catalog {cli.database_name()}: the schema differs. Run: ckpt db upgrade")
