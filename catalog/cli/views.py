"""The rows that verbs print: one dataclass per table. Their field names are the keys of the JSON form (docs/cli.md)."""

# `column` declares a field, as dataclasses.field does.
# ruff: noqa: RUF009

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Self

from rich.text import Text

from catalog.cli import text
from catalog.cli.columns import column, plain, state
from catalog.rows import CheckpointRow, FileRow, HoldRow, RunRow, VerificationRow
from ckptlib.topology import Topology

if TYPE_CHECKING:
    from catalog.in_flight import Unrecorded, Writing

FILE_CLASSES = ("ok", "missing", "extra", "size", "digest", "unreadable", "unverifiable")
"""Verdicts of a file, in the order in which they are counted (V2)."""


def names(values: Sequence[str]) -> str:
    """A list of names on one line."""
    return ", ".join(plain(value) for value in values)


def alarm(value: int) -> Text:
    """A count that should be zero."""
    return Text(str(value), style="bold red" if value else "")


def file_classes(counts: Mapping[str, int]) -> str:
    """Files per verdict: ``13 ok, 1 digest``."""
    return ", ".join(f"{counts[name]} {name}" for name in FILE_CLASSES if counts.get(name))


def digest(value: str) -> Text:
    """The first digits of a digest: enough to compare by eye."""
    return Text(value[:12])


def topology(value: Mapping[str, int]) -> str:
    """Axes in short form: ``tp2-dp2``."""
    return str(Topology.from_json(value))


def attempt(row: CheckpointRow) -> int | None:
    """The attempt that saved it; None for a checkpoint that others wrote."""
    return row.attempt if row.attempt >= 0 else None


def axes(value: Topology | None) -> dict[str, int] | None:
    """All axes of a topology, for programs."""
    return None if value is None else value.to_json()


def method(level: str) -> str:
    """How a checkpoint was verified at a level."""
    return {"data": "data: read back", "store": "store: by the store's digests"}.get(level, plain(level))


@dataclass(frozen=True)
class RunView:
    """A line of ``ckpt runs ls``."""

    run: str = column("RUN")
    attempts: int = column("ATTEMPTS", justify="right", drop=5)
    checkpoints: int = column("CHECKPOINTS", justify="right", drop=2)
    newest_iteration: int | None = column("NEWEST", justify="right")
    newest_verified_iteration: int | None = column("VERIFIED", justify="right")
    newest_verified_at: datetime | None = column("VERIFIED SAVED", text.local_minute, drop=4)
    unverified: int = column("UNVERIFIED", justify="right", drop=3)
    corrupt: int = column("CORRUPT", alarm, justify="right")
    bytes: int = column("SIZE", text.size, justify="right", drop=1)
    roots: tuple[str, ...] = column("ROOTS", names, wide=True, prose=True)
    created_at: datetime = column("CREATED", text.local_minute, wide=True, drop=6)

    @classmethod
    def of(cls, row: RunRow) -> Self:
        """The view of a row."""
        return cls(
            run=row.name,
            attempts=row.attempts,
            checkpoints=row.checkpoints,
            newest_iteration=row.newest,
            newest_verified_iteration=row.newest_verified,
            newest_verified_at=row.newest_verified_at,
            unverified=row.unverified,
            corrupt=row.corrupt,
            bytes=row.size,
            roots=row.roots,
            created_at=row.created_at,
        )


@dataclass(frozen=True)
class CheckpointView:
    """A line of ``ckpt ls``, and a candidate of ``ckpt resume``."""

    run: str = column("RUN")
    iteration: int = column("ITER", justify="right")
    attempt: int | None = column("ATTEMPT", justify="right", drop=3)
    kind: str = column("KIND", drop=4)
    lifecycle: str = column("LIFECYCLE", state, beside="progress")
    verdict: str = column("VERDICT", state)
    bytes: int | None = column("SIZE", text.size, justify="right", drop=1)
    saved_at: datetime | None = column("SAVED", text.local_minute, drop=2)
    holds: tuple[str, ...] = column("HOLDS", names, drop=5, optional=True)
    metrics: Mapping[str, float] = column("METRICS", text.numbers, drop=6, optional=True)
    verified_level: str | None = column("VERIFIED BY", method, wide=True, drop=7, optional=True)
    branch: str = column("BRANCH", wide=True, drop=7)
    topology: Mapping[str, int] | None = column("TOPOLOGY", topology, wide=True, drop=8)
    save_id: str = column("SAVE ID", wide=True, drop=9)
    url: str = column("URL", wide=True, drop=10)
    written: float | None = None
    silent_seconds: float | None = None
    overdue: bool = False
    recorded: bool = True

    @property
    def progress(self) -> str:
        """Of a save in flight: ``63 %``, and how long it has been silent where that is too long."""
        if not self.recorded and self.lifecycle == "finalized":
            return "(not recorded)"
        if self.lifecycle != "writing":
            return ""
        if self.written is None or self.silent_seconds is None:
            return "(no sign of life)"
        share = f"{math.floor(100 * self.written)} %"
        return f"{share} (last sign of life {text.duration(self.silent_seconds)} ago)" if self.overdue else share

    @classmethod
    def of(cls, row: CheckpointRow, holds: Sequence[HoldRow] = ()) -> Self:
        """The view of a row, with the holds in force."""
        return cls(
            run=row.run,
            iteration=row.iteration,
            attempt=attempt(row),
            kind=row.kind,
            lifecycle=row.lifecycle,
            verdict=row.verdict,
            bytes=row.size,
            saved_at=row.committed_at,
            holds=tuple(hold.kind for hold in holds),
            metrics=row.metrics,
            verified_level=row.verified_level if row.verdict == "verified" else None,
            branch=row.branch,
            topology=axes(row.topology),
            save_id=row.save_id,
            url=row.url,
        )

    @classmethod
    def writing(cls, save: Writing) -> Self:
        """The view of a save in flight: `bytes` is what it will be, as far as its ranks have said."""
        begin, progress = save.begin, save.progress
        return cls(
            run=save.run,
            iteration=begin.iteration,
            attempt=begin.attempt,
            kind=begin.kind,
            lifecycle="writing",
            verdict="unverified",
            bytes=progress.total,
            saved_at=None,
            holds=(),
            metrics=begin.metrics,
            verified_level=None,
            branch="live",
            topology=axes(begin.topology),
            save_id=begin.save_id,
            url=save.url,
            written=None if save.silent is None else progress.fraction,
            silent_seconds=save.silent,
            overdue=save.overdue,
            recorded=False,
        )

    @classmethod
    def unrecorded(cls, save: Unrecorded) -> Self:
        """The view of a checkpoint that the catalog does not know: its size is in its manifest, which is not read."""
        begin = save.begin
        return cls(
            run=save.run,
            iteration=begin.iteration,
            attempt=begin.attempt,
            kind=begin.kind,
            lifecycle="finalized",
            verdict="unverified",
            bytes=None,
            saved_at=save.committed_at,
            holds=(),
            metrics=begin.metrics,
            verified_level=None,
            branch="live",
            topology=axes(begin.topology),
            save_id=begin.save_id,
            url=save.url,
            recorded=False,
        )


@dataclass(frozen=True)
class FileView:
    """A file of a checkpoint: what was recorded for it, and where its digest comes from (V1)."""

    path: str = column("PATH")
    role: str = column("ROLE", drop=2)
    bytes: int = column("SIZE", text.size, justify="right")
    sha256: str | None = column("SHA-256", digest)
    origin: str = column("ORIGIN", drop=1)

    @classmethod
    def of(cls, row: FileRow) -> Self:
        """The view of a row."""
        return cls(path=row.path, role=row.role, bytes=row.size, sha256=row.sha256, origin=row.origin)


@dataclass(frozen=True)
class ProblemView:
    """A file that is not as it was recorded."""

    path: str = column("PATH")
    verdict: str = column("VERDICT", state)
    detail: str = column("DETAIL", prose=True)


@dataclass(frozen=True)
class VerificationView:
    """A finished verification."""

    finished_at: datetime = column("VERIFIED AT", text.local_second)
    level: str = column("LEVEL")
    outcome: str = column("OUTCOME", state)
    files: Mapping[str, int] = column("FILES", file_classes)
    bytes_read: int = column("READ", text.size, justify="right", drop=2)
    seconds: float = column("SECONDS", text.seconds, justify="right", drop=3)
    worker: str = column("WORKER", drop=4)
    failed: tuple[ProblemView, ...] = ()
    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, row: VerificationRow) -> Self:
        """The view of a row."""
        return cls(
            finished_at=row.finished_at,
            level=row.level,
            outcome=row.outcome,
            files=row.counts,
            bytes_read=row.bytes_read,
            seconds=row.seconds,
            worker=row.worker,
            failed=tuple(
                ProblemView(path, entry.get("verdict", ""), entry.get("detail", ""))
                for path, entry in row.failed.items()
            ),
            problems=row.problems,
        )


@dataclass(frozen=True)
class HoldView:
    """A reason not to delete a checkpoint."""

    kind: str = column("KIND")
    owner: str = column("OWNER")
    reason: str = column("REASON", prose=True)
    created_at: datetime = column("SINCE", text.local_minute, drop=1)
    expires_at: datetime | None = column("UNTIL", text.local_minute)

    @classmethod
    def of(cls, row: HoldRow) -> Self:
        """The view of a row."""
        return cls(row.kind, row.owner, row.reason, row.created_at, row.expires_at)


@dataclass(frozen=True)
class AncestorView:
    """A step of a checkpoint's lineage: the save that the one above resumed from."""

    iteration: int | None = column("ITER", justify="right")
    attempt: int | None = column("ATTEMPT", justify="right")
    verdict: str | None = column("VERDICT", state)
    save_id: str = column("SAVE ID")
