"""What every verb gets from the global options: where the catalog is, how to answer, whether to ask."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from catalog.cli.output import Output

if TYPE_CHECKING:
    from catalog.catalog import Catalog


@dataclass(frozen=True)
class Cli:
    """The global options of one invocation. Verbs of other layers get it too: ``Cli.of(ctx)``.

    Attributes:
        db: catalog database as given (``--db`` or ``CKPT_DB``), or None for the default one.
        output: where results, notes and progress go.
        verbosity: -1 with ``-q``, else the number of ``-v``.
        yes: do not ask.
    """

    db: str | None
    output: Output
    verbosity: int = 0
    yes: bool = False

    @classmethod
    def of(cls, ctx: typer.Context) -> Cli:
        """The options of the running command."""
        found = ctx.find_object(cls)
        if found is None:
            raise RuntimeError("a ckpt verb was started without the ckpt program around it")
        return found

    def catalog(self) -> Catalog:
        """Opens the catalog.

        Raises:
            NoCatalogError: there is none, or its schema is not the current one.
        """
        from catalog.catalog import Catalog

        return Catalog(self.db)

    def database_name(self) -> str:
        """The place of the catalog, for people; without a password."""
        from catalog.database import Database

        database = Database(self.db)
        try:
            return str(database)
        finally:
            database.close()

    @property
    def asks(self) -> bool:
        """Whether a question makes sense: somebody is there to answer, and has not answered yet (``--yes``)."""
        return not self.yes and sys.stdin.isatty() and sys.stderr.isatty()
