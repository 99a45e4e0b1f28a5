"""``ckpt ls``: checkpoints, newest last."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from catalog.cli import lookup
from catalog.cli.context import Cli
from catalog.cli.durations import parse_since
from catalog.cli.views import CheckpointView
from catalog.rows import HoldRow
from catalog.states import LIFECYCLES, VERDICTS, Lifecycle
from ckptlib.manifest import KINDS

if TYPE_CHECKING:
    from catalog.catalog import Catalog
    from catalog.in_flight import Unrecorded, Writing

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
    catalog_only: Annotated[
        bool, typer.Option("--catalog-only", help="Do not look on storage for what is not recorded.")
    ] = False,
) -> None:
    """List checkpoints, newest last, and saves in flight with how far they are.

    A checkpoint that nobody has recorded is listed too.

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
        beyond: list[CheckpointView] = []
        if not catalog_only and (not states or {"writing", "finalized"} & {*states}):
            beyond = _beyond(cli, catalog, run, kind, moment)
    beyond = [view for view in beyond if not states or view.lifecycle in states]
    views = _merged([*(CheckpointView.of(row, holds[row.id]) for row in rows), *beyond], latest)
    known = () if run is None else ("run",)
    cli.output.rows(CheckpointView, views, known=known)
    if not views:
        filtered = bool(states or kind or latest or since)
        cli.output.note(_nothing(run, filtered))


def _beyond(
    cli: Cli, catalog: Catalog, run: str | None, kind: str | None, since: datetime | timedelta | None
) -> list[CheckpointView]:
    """What storage says beyond the catalog; a storage that cannot be reached costs a note, not the list."""
    from catalog.in_flight import beyond_the_catalog

    writing, unrecorded, problems = beyond_the_catalog(catalog, run)
    if problems:
        cli.output.note(
            f"Saves in flight, or not recorded, are not listed where storage cannot be read: {'; '.join(problems)}"
        )
    first = datetime.now(UTC) - since if isinstance(since, timedelta) else since

    def is_asked_for(save: Writing | Unrecorded, at: datetime | None) -> bool:
        return kind in (None, save.begin.kind) and (first is None or (at is not None and at >= first))

    if any(is_asked_for(save, save.committed_at) for save in unrecorded):
        cli.output.note(f"Not recorded yet; to record it now: {lookup.adoption(unrecorded[-1].url)}")
    return [
        *(CheckpointView.writing(save) for save in writing if is_asked_for(save, save.begun_at)),
        *(CheckpointView.unrecorded(save) for save in unrecorded if is_asked_for(save, save.committed_at)),
    ]


def _merged(views: list[CheckpointView], latest: int | None) -> list[CheckpointView]:
    """By run, each run in its order, and again only the newest of each where that is asked for."""
    by_run: dict[str, list[CheckpointView]] = defaultdict(list)
    for view in views:
        by_run[view.run].append(view)
    merged = []
    for of_run in by_run.values():
        of_run.sort(key=lambda view: (-1 if view.attempt is None else view.attempt, view.iteration))
        merged += of_run if latest is None else of_run[-latest:]
    return merged


def _nothing(run: str | None, filtered: bool) -> str:
    if filtered:
        return f"No checkpoint matches. Without the filters: {lookup.command('ls', *([run] if run else []))}"
    if run is not None:
        return f"Run {run!r} has no checkpoint yet: none was committed, or none was recorded."
    return "The catalog is empty. To add what is on storage: ckpt scan ROOT --adopt"
