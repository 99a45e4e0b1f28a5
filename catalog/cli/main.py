"""The ``ckpt`` program: its global options and its verbs. One verb, or one noun, per module.

Nothing heavy is imported here: each verb imports the catalog, the migrations or torch when it runs.
"""

from __future__ import annotations

from enum import StrEnum
from importlib.metadata import version
from typing import Annotated

import typer

from catalog.cli import db, doctor, estimate, init, ls, resume, runs, scan, show, verify
from catalog.cli.context import Cli
from catalog.cli.group import Program
from catalog.cli.logs import log_to_stderr
from catalog.cli.output import JsonOutput, TableOutput

app = typer.Typer(
    name="ckpt",
    cls=Program,
    help="Checkpoints of training runs: what there is, what is intact, where to resume.",
    epilog="Global options may also follow the verb: ckpt ls -o json. Exit codes: docs/cli.md.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Format(StrEnum):
    """How results are written."""

    TABLE = "table"
    JSON = "json"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ckpt {version('ckptlib')}")
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    db: Annotated[
        str | None,
        typer.Option(envvar="CKPT_DB", help="Catalog database: a path or an SQLAlchemy URL.", show_default=False),
    ] = None,
    output: Annotated[
        Format, typer.Option("--output", "-o", envvar="CKPT_OUTPUT", help="Tables for people, JSON for programs.")
    ] = Format.TABLE,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", envvar="CKPT_QUIET", help="Results and errors only.")] = False,
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose", "-v", count=True, envvar="CKPT_VERBOSE", help="More columns; twice: log messages.", max=2
        ),
    ] = 0,
    yes: Annotated[bool, typer.Option("--yes", "-y", envvar="CKPT_YES", help="Do not ask.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Global options."""
    as_json = output is Format.JSON
    log_to_stderr("DEBUG" if verbose > 1 else "WARNING", as_json=as_json)
    ctx.obj = Cli(
        db=db,
        output=JsonOutput() if as_json else TableOutput(wide=verbose > 0, quiet=quiet),
        verbosity=-1 if quiet else verbose,
        yes=yes,
    )


app.command("init")(init.init)
app.add_typer(db.app, name="db")
app.add_typer(runs.app, name="runs")
app.add_typer(doctor.app, name="doctor")
app.command("ls")(ls.ls)
app.command("show")(show.show)
app.command("verify")(verify.verify)
app.command("resume")(resume.resume)
app.command("scan")(scan.scan)
app.command("estimate")(estimate.estimate)


def main() -> None:
    """Entry point of the console script."""
    app()
