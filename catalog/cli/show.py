"""``ckpt show``: everything that the catalog knows of one checkpoint."""

# `column` declares a field, as dataclasses.field does.
# ruff: noqa: RUF009

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from catalog.cli import lookup, text
from catalog.cli.columns import column, state
from catalog.cli.context import Cli
from catalog.cli.views import (
    AncestorView,
    CheckpointView,
    FileView,
    HoldView,
    ProblemView,
    VerificationView,
    attempt,
    axes,
    method,
    names,
    topology,
)
from catalog.rows import CheckpointRow

if TYPE_CHECKING:
    from catalog.catalog import Catalog
    from ckptlib.manifest import Manifest

MAX_ANCESTORS = 1000
"""A lineage longer than this is cut: nobody reads it, and a damaged one must not loop."""


def _adopted(value: bool) -> str:
    return "yes, by a scan" if value else "no, recorded at its commit"


def _rates(values: Sequence[float]) -> str:
    """From the slowest to the fastest: ``410 MB/s to 532 MB/s``."""
    return " to ".join(f"{text.decimal_size(round(value))}/s" for value in values)


@dataclass(frozen=True)
class DetailView:
    """A checkpoint in full."""

    run: str = column("run")
    iteration: int = column("iteration")
    lifecycle: str = column("lifecycle", state)
    verdict: str = column("verdict", state)
    kind: str = column("kind")
    branch: str = column("branch")
    attempt: int | None = column("attempt")
    save_id: str = column("save id")
    url: str = column("checkpoint")
    format: str = column("format")
    semantic_type: str = column("semantic type")
    io_mode: str = column("io mode", wide=True)
    topology: Mapping[str, int] | None = column("topology", topology)
    contents: tuple[str, ...] = column("contents", names)
    bytes: int = column("size", text.size)
    tensors: int | None = column("tensors")
    objects: int | None = column("objects")
    progress: Mapping[str, float] = column("progress", text.numbers)
    metrics: Mapping[str, float] = column("metrics", text.numbers)
    stall_seconds: float | None = column("training stalled", text.duration)
    stage_seconds: float | None = column("staged in", text.duration)
    write_seconds: float | None = column("written in", text.duration)
    rank_rates: tuple[float, ...] = column("rates of ranks", _rates)
    since_parent_seconds: float | None = column("since the parent save", text.duration)
    saved_at: datetime = column("saved", text.local_second)
    recorded_at: datetime = column("recorded", text.local_second)
    adopted: bool = column("adopted", _adopted, wide=True)
    verified_at: datetime | None = column("first verified", text.local_second)
    verified_level: str | None = column("verified by", method)
    verifying: str | None = column("being verified by")
    next_try_at: datetime | None = column("next verification", text.local_second)
    parent: str | None = column("parent save")
    replaces: tuple[str, ...] = column("replaces", names)
    manifest_sha256: str = column("manifest SHA-256", wide=True)
    files: tuple[FileView, ...] = column("files", limit=40)
    verifications: tuple[VerificationView, ...] = column("verifications, newest last", limit=10)
    problems: tuple[ProblemView, ...] = column("problems found by the last verification", limit=40)
    holds: tuple[HoldView, ...] = column("holds")
    lineage: tuple[AncestorView, ...] = column("lineage, oldest first", limit=10)
    same_iteration: tuple[CheckpointView, ...] = column("other saves of this iteration", limit=10)


def show(
    ctx: typer.Context,
    checkpoint: Annotated[str, typer.Argument(metavar="RUN@ITER", help="The checkpoint.")],
    save_id: Annotated[str | None, typer.Option(help="This save of the iteration, if it has several.")] = None,
) -> None:
    """Show one checkpoint: files, digests, verifications, lineage."""
    cli = Cli.of(ctx)
    with cli.catalog() as catalog:
        row = lookup.checkpoint(catalog, checkpoint, save_id)
        view = _detail(catalog, row)
    cli.output.document(view)


def _detail(catalog: Catalog, row: CheckpointRow) -> DetailView:
    verifications = tuple(VerificationView.of(entry) for entry in catalog.verifications(row.id))
    saves = {other.save_id: other for other in catalog.checkpoints(row.run)}
    others = [other for other in saves.values() if other.iteration == row.iteration and other.id != row.id]
    manifest = _manifest(row)
    figures = None if manifest is None else manifest.figures
    has_items = row.format != "torch"  # whole state dicts: what is in them is not counted
    return DetailView(
        run=row.run,
        iteration=row.iteration,
        lifecycle=row.lifecycle,
        verdict=row.verdict,
        kind=row.kind,
        branch=row.branch,
        attempt=attempt(row),
        save_id=row.save_id,
        url=row.url,
        format=row.format,
        semantic_type=row.semantic_type,
        io_mode=row.io_mode,
        topology=axes(row.topology),
        contents=row.contents,
        bytes=row.size,
        tensors=row.tensors if has_items else None,
        objects=row.objects if has_items else None,
        progress=row.progress,
        metrics=row.metrics,
        stall_seconds=None if figures is None else figures.stall,
        stage_seconds=None if figures is None else figures.stage,
        write_seconds=None if figures is None else figures.write,
        rank_rates=() if figures is None or figures.rank_rates is None else figures.rank_rates,
        since_parent_seconds=None if manifest is None else manifest.begin.since_parent,
        saved_at=row.committed_at,
        recorded_at=row.recorded_at,
        adopted=row.adopted,
        verified_at=row.verified_at,
        verified_level=row.verified_level,
        verifying=row.lease_owner,
        next_try_at=row.retry_at,
        parent=row.parent,
        replaces=row.replaces,
        manifest_sha256=row.manifest_sha256,
        files=tuple(FileView.of(file) for file in catalog.files(row.id)),
        verifications=verifications,
        problems=verifications[-1].failed if verifications else (),
        holds=tuple(HoldView.of(hold) for hold in catalog.holds(row.id)),
        lineage=tuple(_lineage(row, saves)),
        same_iteration=tuple(CheckpointView.of(other) for other in others),
    )


def _manifest(row: CheckpointRow) -> Manifest | None:
    """The manifest, whose figures the catalog does not keep; None where storage does not show it."""
    from ckptlib import commit
    from ckptlib import storage as st
    from ckptlib.errors import CkptError

    try:
        storage, path = st.resolve(row.url)
        return commit.read_manifest(storage, path, commit.read_save(storage, path, row.save_id))
    except (OSError, ValueError, CkptError):  # a foreign checkpoint, one that went, a storage that is not there
        return None


def _lineage(row: CheckpointRow, saves: Mapping[str, CheckpointRow]) -> list[AncestorView]:
    """The saves that led here, oldest first; a save that the catalog does not know ends the line.

    Args:
        saves: all of the run, by save id.
    """
    ancestors: list[AncestorView] = []
    parent = row.parent
    while parent is not None and len(ancestors) < MAX_ANCESTORS:
        found = saves.get(parent)
        if found is None:
            ancestors.append(AncestorView(iteration=None, attempt=None, verdict=None, save_id=parent))
            break
        ancestors.append(AncestorView(found.iteration, attempt(found), found.verdict, found.save_id))
        parent = found.parent
    return ancestors[::-1]
