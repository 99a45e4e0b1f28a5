"""``ckpt ls``: checkpoints, newest last."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated

import typer

from catalog.cli import lookup
from catalog.cli.context import Cli
from catalog.cli.durations import parse_since
from catalog.cli.views import CheckpointView
from catalog.rows import HoldRow
from catalog.states import LIFECYCLES, VERDICTS, Lifecycle
from ckptlib.manifest import KINDS

SHOWN: tuple[Lifecycle, ...] = ("writing", "finalized", "missing", "deleting")
"""Lifecycles that are listed unless ``--state`` asks for others: what is, or should be, on storage."""


def ls(
    ctx: typer.Context,
    run: Annotated[str | None, typer.Argument(help="Only this run.", show_default=False)] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(help=f"Only in this state; repeatable: {', '.join((*LIFECYCLES, *VERDICTS))}."),
    ] = None,
    kind: Annotated[str | None, typer.Option(help=f"Only of this kind: {', '.join(KINDS)}.")] = None,
    latest: Annotated[int | None, typer.Option(help="Only so many, the newest.", min=1)] = None,
    since: Annotated[str | None, typer.Option(help="Only saved within 48h, 7d, ..., or since a date.")] = None,
) -> None:
    """List checkpoints, newest last.

    Deleted and aborted ones are listed only when asked for: --state deleted.
    """
    cli = Cli.of(ctx)
    states = state or []
    unknown = set(states) - {*LIFECYCLES, *VERDICTS}
    if unknown:
        raise typer.BadParameter(
            f"{min(unknown)!r}: expected one of {', '.join((*LIFECYCLES, *VERDICTS))}", param_hint="--state"
        )
    if kind is not None and kind not in KINDS:
        raise typer.BadParameter(f"{kind!r}: expected one of {', '.join(KINDS)}", param_hint="--kind")
    try:
        moment = None if since is None else parse_since(since)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--since") from error
    with cli.catalog() as catalog:
        if run is not None:
            lookup.require_run(catalog, run)
        rows = catalog.checkpoints(
            run,
            lifecycle=[name for name in LIFECYCLES if name in states] or SHOWN,
            verdict=[name for name in VERDICTS if name in states] or None,
            kind=kind,
            latest=latest,
            since=moment,
        )
        holds: dict[int, list[HoldRow]] = defaultdict(list)
        for hold in catalog.holds():
            holds[hold.checkpoint_id].append(hold)
    known = () if run is None else ("run",)
    cli.output.rows(CheckpointView, [CheckpointView.of(row, holds[row.id]) for row in rows], known=known)
    if not rows:
        filtered = bool(states or kind or latest or since)
        cli.output.note(_nothing(run, filtered))


def _nothing(run: str | None, filtered: bool) -> str:
    if filtered:
        return f"No checkpoint matches. Without the filters: {lookup.command('ls', *([run] if run else []))}"
    if run is not None:
        return f"Run {run!r} has no checkpoint yet: none was committed, or none was recorded."
    return "The catalog is empty. To add what is on storage: ckpt scan ROOT --adopt"
