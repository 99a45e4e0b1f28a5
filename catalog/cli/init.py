"""``ckpt init``: create the catalog."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from catalog.cli.columns import column
from catalog.cli.context import Cli


def _created(value: bool) -> str:
    return "yes" if value else "no, it was there"


@dataclass(frozen=True)
class CatalogView:
    """Where the catalog is, and whether it is new."""

    database: str = column("catalog")
    revision: str = column("schema revision")
    created: bool = column("created", _created)


def init(ctx: typer.Context) -> None:
    """Create the catalog database. Safe to repeat.

    Where: --db, else CKPT_DB, else the per-user data directory.
    """
    from catalog import database

    cli = Cli.of(ctx)
    revision = database.current(cli.db)
    created = revision is None
    if revision is None:
        revision = database.upgrade(cli.db)
    else:
        # Says so if its schema is not the current one.
        cli.catalog().close()
    cli.output.document(CatalogView(database=cli.database_name(), revision=revision, created=created))
    cli.output.note("Next: train with catalog.Recorder, or adopt what is on storage: ckpt scan ROOT --adopt")
