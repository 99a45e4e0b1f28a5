"""``ckpt resume``: where a run resumes, or why nowhere."""

# `column` declares a field, as dataclasses.field does.
# ruff: noqa: RUF009

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from catalog.cli import lookup, text
from catalog.cli.columns import column, plain, state
from catalog.cli.context import Cli
from catalog.cli.exits import Ended, ExitCode
from catalog.cli.views import attempt, axes, names, topology
from catalog.rows import CheckpointRow

if TYPE_CHECKING:
    from catalog.resume import Found, NoneYet, NotEligible, Rejected


CHOSEN = "resume point"


class Purpose(StrEnum):
    """What the checkpoint is loaded for: training needs the optimizer too."""

    TRAIN = "train"
    EVAL = "eval"


class Require(StrEnum):
    """The least that counts as verified."""

    STORE = "store"
    DATA = "data"


def _decision(value: str) -> Text:
    return Text(plain(value), style="bold green" if value == CHOSEN else "")


@dataclass(frozen=True)
class CandidateView:
    """A candidate, and why it is the resume point or is not."""

    chosen: bool
    iteration: int = column("ITER", justify="right")
    attempt: int | None = column("ATTEMPT", justify="right", drop=3)
    kind: str = column("KIND", drop=4)
    lifecycle: str = column("LIFECYCLE", state, wide=True, drop=4)
    verdict: str = column("VERDICT", state)
    saved_at: datetime = column("SAVED", text.local_minute, drop=1)
    reason: str = column("DECISION", _decision, prose=True)
    save_id: str = column("SAVE ID", wide=True, drop=5)
    url: str = column("URL", wide=True, drop=6)


@dataclass(frozen=True)
class ResumePointView:
    """The resume point; `iteration` and what describes it are None when there is none."""

    run: str = column("run")
    reason: str = column("decision")
    iteration: int | None = column("resume at", default=None)
    url: str | None = column("checkpoint", default=None)
    verdict: str | None = column("verdict", state, default=None)
    saved_at: datetime | None = column("saved", text.local_second, default=None)
    attempt: int | None = column("attempt", default=None)
    kind: str | None = column("kind", wide=True, default=None)
    save_id: str | None = column("save id", wide=True, default=None)
    bytes: int | None = column("size", text.size, default=None)
    topology: Mapping[str, int] | None = column("saved with", topology, default=None)
    contents: tuple[str, ...] = column("contents", names, default=())
    progress: Mapping[str, float] | None = column("progress", text.numbers, default=None)
    rejected_newer: int = 0
    candidates: tuple[CandidateView, ...] = column("candidates, newest last", limit=30, default=())


def resume(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(help="The run.")],
    at: Annotated[int | None, typer.Option(help="Exactly this iteration, or none.", min=0)] = None,
    purpose: Annotated[
        Purpose, typer.Option("--for", help="Training needs the optimizer too, evaluation only the model.")
    ] = Purpose.TRAIN,
    allow_unverified: Annotated[
        bool, typer.Option("--allow-unverified", help="Also one that nobody has read back yet.")
    ] = False,
    require: Annotated[
        Require, typer.Option(help="What a verification must have been: the store's digests will do, or read back.")
    ] = Require.STORE,
    explain: Annotated[
        bool, typer.Option("--explain", help="List the newer candidates and why each is not it.")
    ] = False,
    path_only: Annotated[
        bool, typer.Option("--path-only", help="Print the checkpoint's URL and nothing else.")
    ] = False,
) -> None:
    """Where a run resumes, or why nowhere (exit code 21).

    The newest checkpoint that is verified, on the live branch, and holds what the purpose needs.
    """
    from catalog.resume import Found

    cli = Cli.of(ctx)
    with cli.catalog() as catalog:
        selection = catalog.resume_point(
            run, at=at, purpose=purpose.value, allow_unverified=allow_unverified, require=require.value
        )
        unknown = "" if isinstance(selection, Found) else lookup.unknown_run(catalog, run)
    if isinstance(selection, Found):
        if path_only:
            sys.stdout.write(f"{selection.row.url}\n")
            return
        cli.output.document(_point(selection, at=at, explain=explain))
        if selection.rejected_newer and not explain:
            count = text.count(len(selection.rejected_newer), "newer checkpoint")
            cli.output.note(f"{count} rejected. Why: {lookup.command('resume', run, '--explain')}")
        return
    reason = unknown or _why_none(selection)
    if path_only:
        raise Ended(ExitCode.NO_RESUME_POINT, reason)
    cli.output.document(_no_point(selection, reason))
    raise Ended(ExitCode.NO_RESUME_POINT, f"run {run!r}: no resume point", _advice(selection, run, require.value))


def _advice(selection: NoneYet | NotEligible, run: str, require: str) -> str:
    """What would give the run a resume point, where something would."""
    verdicts = {row.verdict for row, _ in getattr(selection, "rejected", ()) if row.lifecycle == "finalized"}
    if require == "data" and verdicts & {"unverified", "unverifiable", "verified"}:
        verify = lookup.command("verify", run, "--level", "data")
        return f"Next: {verify}, or accept less: --require store, --allow-unverified"
    if verdicts & {"unverified", "unverifiable"}:
        return f"Next: {lookup.command('verify', run)}, or accept it unread: --allow-unverified"
    return ""


def _point(found: Found, *, at: int | None, explain: bool) -> ResumePointView:
    row = found.row
    newer = len(found.rejected_newer)
    reason = "the newest one"
    if at is not None:
        reason = "the one that was asked for"
    elif newer:
        reason = f"the newest eligible one; {text.count(newer, 'newer candidate')} rejected"
    candidates = [_candidate(row, CHOSEN, chosen=True), *_rejected(found.rejected_newer)]
    return ResumePointView(
        run=row.run,
        reason=reason,
        iteration=row.iteration,
        url=row.url,
        verdict=row.verdict,
        saved_at=row.committed_at,
        attempt=attempt(row),
        kind=row.kind,
        save_id=row.save_id,
        bytes=row.size,
        topology=axes(row.topology),
        contents=row.contents,
        progress=row.progress,
        rejected_newer=newer,
        candidates=tuple(candidates) if explain else (),
    )


def _no_point(selection: NoneYet | NotEligible, reason: str) -> ResumePointView:
    rejected = getattr(selection, "rejected", ())
    return ResumePointView(
        run=selection.run, reason=reason, rejected_newer=len(rejected), candidates=tuple(_rejected(rejected))
    )


def _why_none(selection: NoneYet | NotEligible) -> str:
    from catalog.resume import NotEligible

    if isinstance(selection, NotEligible):
        return selection.message
    return f"run {selection.run!r} has no checkpoint yet."


def _rejected(rejected: Rejected) -> list[CandidateView]:
    return [_candidate(row, f"rejected: {reason}", chosen=False) for row, reason in reversed(rejected)]


def _candidate(row: CheckpointRow, reason: str, *, chosen: bool) -> CandidateView:
    return CandidateView(
        iteration=row.iteration,
        attempt=attempt(row),
        kind=row.kind,
        lifecycle=row.lifecycle,
        verdict=row.verdict,
        saved_at=row.committed_at,
        chosen=chosen,
        reason=reason,
        save_id=row.save_id,
        url=row.url,
    )
