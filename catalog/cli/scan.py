"""``ckpt scan``: compare a root on storage with the catalog, and take into the catalog what is there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from catalog.cli import lookup, text
from catalog.cli.columns import column, state
from catalog.cli.context import Cli
from catalog.cli.exits import Ended, ExitCode

if TYPE_CHECKING:
    from catalog.rows import CheckpointRow
    from catalog.scan import Item, ScanPlan, ScanResult


@dataclass(frozen=True)
class ItemView:
    """Something below the root. `action`: what is to be done with it, or was done."""

    name: str = column("NAME")
    action: str = column("ACTION", state)
    iteration: int | None = column("ITER", justify="right", drop=4, optional=True)
    bytes: int | None = column("SIZE", text.size, justify="right", drop=3, optional=True)
    format: str | None = column("FORMAT", drop=5, optional=True)
    reason: str = column("REASON", prose=True, optional=True)
    save_id: str | None = column("SAVE ID", wide=True, drop=6)
    url: str = column("URL", wide=True, drop=7)


@dataclass(frozen=True)
class ScanView:
    """What a root holds, compared with the catalog.

    Attributes:
        known: checkpoints that are here as the catalog says.
        new_attempts: process lifetimes of the run that the catalog does not know.
        applied: whether `items` says what was done, or what would be.
    """

    applied: bool
    root: str = column("root")
    run: str | None = column("run")
    root_id: str | None = column("root id", wide=True)
    unavailable: str = column("unavailable")
    moved_from: str | None = column("the catalog knows it at")
    known: int = column("known and unchanged")
    new_attempts: int = column("new attempts")
    items: tuple[ItemView, ...] = column("found", limit=60)


def scan(
    ctx: typer.Context,
    root: Annotated[str, typer.Argument(help="A run's directory: a path or a URL.")],
    adopt: Annotated[bool, typer.Option("--adopt", help="Bring the catalog in line with what is there.")] = False,
    run: Annotated[
        str | None, typer.Option(help="Whose root it is, if it does not say so itself.", show_default=False)
    ] = None,
) -> None:
    """Compare a root with the catalog; --adopt takes it in.

    Lists what is unknown, incomplete, unmanaged, or missing. Nothing is ever deleted.
    With --adopt, what is committed and unknown is recorded, and what is complete but was never decided is committed.
    """
    from catalog.scan import apply, plan_scan

    cli = Cli.of(ctx)
    words = [root, *(["--run", run] if run else [])]
    with cli.catalog() as catalog:
        with cli.output.busy(f"scanning {root}"):
            plan = plan_scan(root, catalog, run=run)
        planned = _planned(plan)
        if plan.unavailable:
            cli.output.document(planned)
            raise Ended(ExitCode.ERROR, plan.unavailable)
        if not (adopt and plan.pending):
            cli.output.document(planned)
            cli.output.note(_advice(plan, words))
            return
        if cli.asks:
            cli.output.preview(planned)
            if not typer.confirm("Bring the catalog in line?", err=True):
                raise typer.Abort
        with cli.output.busy(f"adopting {root}"):
            result = apply(plan, catalog)
    cli.output.document(_done(plan, result))
    if plan.run is not None:
        cli.output.note(f"Next: {lookup.command('verify', plan.run)}")
    if result.skipped:
        names = ", ".join(f"{item.name} {item.reason}" for item in result.skipped)
        raise Ended(ExitCode.PARTLY_DONE, f"not everything could be adopted: {names}")


def _advice(plan: ScanPlan, words: list[str]) -> str:
    if plan.pending:
        return f"Nothing was changed. To apply this: {lookup.command('scan', *words, '--adopt')}"
    if plan.known or plan.incomplete:
        return "Nothing to do."
    return "Nothing to adopt: a run's directory holds iter_… directories."


def _planned(plan: ScanPlan) -> ScanView:
    """What is to be done; what matters most comes last."""
    items = [
        *_items("unmanaged", plan.unmanaged),
        *_items("incomplete", plan.incomplete),
        *_items("mark missing", plan.missing),
        *_items("reappeared", plan.reappeared),
        *_items("take back", plan.returned),
        *_items("commit and adopt", plan.decide),
        *_items("adopt", plan.adopt),
    ]
    return _view(plan, items, applied=False)


def _done(plan: ScanPlan, result: ScanResult) -> ScanView:
    """What was done, and what was left alone."""
    items = [
        *_items("unmanaged", plan.unmanaged),
        *_items("incomplete", plan.incomplete),
        *_items("skipped", result.skipped),
        *_rows("marked missing", result.missing),
        *_rows("reappeared", result.reappeared),
        *_rows("taken back", result.returned),
        *_items("decided", result.decided),
        *_rows("adopted", result.adopted),
    ]
    return _view(plan, items, applied=True)


def _view(plan: ScanPlan, items: list[ItemView], *, applied: bool) -> ScanView:
    return ScanView(
        root=plan.root_url,
        run=plan.run,
        root_id=plan.root_id,
        unavailable=plan.unavailable,
        moved_from=plan.moved_from,
        known=plan.known,
        new_attempts=len(plan.attempts),
        applied=applied,
        items=tuple(items),
    )


def _items(action: str, items: Iterable[Item]) -> list[ItemView]:
    return [
        ItemView(item.name, action, item.iteration, item.size, item.format, item.reason, item.save_id, item.url)
        for item in items
    ]


def _rows(action: str, rows: Iterable[CheckpointRow]) -> list[ItemView]:
    return [ItemView(row.path, action, row.iteration, row.size, row.format, "", row.save_id, row.url) for row in rows]
