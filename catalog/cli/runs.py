"""``ckpt runs``: the runs that the catalog knows."""

from __future__ import annotations

import typer

from catalog.cli.context import Cli
from catalog.cli.views import RunView

app = typer.Typer(help="Runs: newest checkpoint, newest verified one, sizes.", no_args_is_help=True)


@app.callback()
def runs() -> None:
    """Runs: newest checkpoint, newest verified one, sizes."""


@app.command("ls")
def ls(ctx: typer.Context) -> None:
    """List all runs by name."""
    cli = Cli.of(ctx)
    with cli.catalog() as catalog:
        rows = catalog.runs()
    cli.output.rows(RunView, [RunView.of(row) for row in rows])
    if not rows:
        cli.output.note("The catalog has no run yet. To add what is on storage: ckpt scan ROOT --adopt")
