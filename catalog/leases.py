"""The queue of verifications (S5): taken by lease, given back when the lease expires, finished by compare-and-set.

A lease is a random token in the row with an expiry by the database's clock. Whoever finishes must name the token, so
of a worker that was presumed dead and the one that took over, exactly one can write the verdict. Leases move no
version: they are nobody's reason to decide differently about the checkpoint.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol

from sqlalchemy import ColumnElement, Connection, and_, insert, or_, select, update

from catalog import queries
from catalog.changes import NO_LEASE, add_event, change
from catalog.models import Checkpoint, File, Run, Verification
from catalog.recording import refresh_branches, require, require_locked
from catalog.rows import CheckpointRow, VerifyLease
from catalog.states import GRANTS, Verdict, grants
from ckptlib.errors import CatalogError, LeaseHeldError, StaleWriteError

Outcome = Literal["ok", "corrupt", "unreadable", "unverifiable", "incomplete"]

BACKOFF = 60.0
BACKOFF_LIMIT = 6 * 3600.0


@dataclass(frozen=True)
class FileFinding:
    """What a verification says about one file."""

    verdict: str
    sha256: str | None = None
    detail: str = ""


@dataclass(frozen=True)
class Findings:
    """What a verification found, as far as the catalog records it.

    Attributes:
        outcome: ``ok``; ``corrupt``: bytes are not what was recorded; ``unreadable``: nobody can say, try again
            later (V2); ``unverifiable``: the store has no word on all files, reading them would tell; ``incomplete``:
            not ok, without proof that the bytes are wrong.
    """

    outcome: Outcome
    level: str
    files: Mapping[str, FileFinding] = field(default_factory=dict)
    problems: Sequence[str] = ()
    bytes_read: int = 0
    seconds: float = 0.0


class _FileCheck(Protocol):
    @property
    def verdict(self) -> str: ...
    @property
    def sha256(self) -> str | None: ...
    @property
    def detail(self) -> str: ...


class Report(Protocol):
    """The part of `ckptlib.VerifyReport` that is recorded."""

    @property
    def ok(self) -> bool: ...
    @property
    def corrupt(self) -> bool: ...
    @property
    def unreadable(self) -> bool: ...
    @property
    def unverifiable(self) -> bool: ...
    @property
    def checks(self) -> Mapping[str, _FileCheck]: ...
    @property
    def problems(self) -> Sequence[str]: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def seconds(self) -> float: ...


def findings_of(report: Report, level: str) -> Findings:
    """A report as it is recorded."""
    outcome: Outcome = "incomplete"
    if report.ok:
        outcome = "ok"
    elif report.corrupt:
        outcome = "corrupt"
    elif report.unreadable:
        outcome = "unreadable"
    elif report.unverifiable:
        outcome = "unverifiable"
    return Findings(
        outcome=outcome,
        level=level,
        files={name: FileFinding(c.verdict, c.sha256, c.detail or "") for name, c in report.checks.items()},
        problems=tuple(report.problems),
        bytes_read=report.bytes_read,
        seconds=report.seconds,
    )


def backoff(failures: int) -> float:
    """Seconds to wait after this many unreadable verifications in a row: doubling, up to six hours."""
    return float(min(BACKOFF * 2 ** min(failures - 1, 20), BACKOFF_LIMIT))


def take(
    connection: Connection,
    *,
    owner: str,
    ttl: float,
    now: datetime,
    limit: int,
    level: str = "data",
    run: str | None = None,
    checkpoint_id: int | None = None,
    force: bool = False,
    exclude: Collection[int] = (),
) -> list[VerifyLease]:
    """Leases up to `limit` checkpoints that wait for verification, newest first: they are the next resume points.

    Args:
        level: at which they will be verified; see `waits`.

    Raises:
        LeaseHeldError: `checkpoint_id` is given and somebody else is at it.
        CatalogError: `checkpoint_id` is given and there is nothing to verify: not finalized, or unknown.
    """
    free = or_(Checkpoint.lease_token.is_(None), Checkpoint.lease_expires_at <= now)
    where: list[ColumnElement[bool]] = [Checkpoint.lifecycle == "finalized"]
    if not force:
        where += [
            waits(level),
            or_(Checkpoint.retry_at.is_(None), Checkpoint.retry_at <= now),
        ]
    if run is not None:
        where.append(Checkpoint.run_id.in_(select(Run.id).where(Run.name == run)))
    if checkpoint_id is not None:
        where.append(Checkpoint.id == checkpoint_id)
    if exclude:
        where.append(Checkpoint.id.not_in(sorted(exclude)))
    # Several that take at once must not all try the same row: on PostgreSQL each skips what another has locked.
    candidates = (
        select(Checkpoint.id)
        .where(free, *where)
        .order_by(Checkpoint.id.desc())
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    leases = []
    expires_at = now + timedelta(seconds=ttl)
    for taken_id in connection.execute(candidates).scalars().all():
        token = uuid.uuid4().hex
        statement = update(Checkpoint).where(Checkpoint.id == taken_id, free, *where)
        values = {"lease_owner": owner, "lease_token": token, "lease_expires_at": expires_at}
        if connection.execute(statement.values(values)).rowcount == 1:
            leases.append(_lease(connection, taken_id, owner, token, expires_at))
    if checkpoint_id is not None and not leases:
        _explain_refusal(connection, checkpoint_id, now, force=force)
    return leases


def waits(level: str) -> ColumnElement[bool]:
    """What a verification at this level can add to: it has no verdict, or one that a closer look may change."""
    if level == "data":
        by_store = and_(Checkpoint.verdict == "verified", Checkpoint.verified_level != "data")
        return or_(Checkpoint.verdict.in_(("unverified", "unverifiable")), by_store)
    return Checkpoint.verdict.in_(("unverified", "unverifiable") if level == "auto" else ("unverified",))


def _lease(connection: Connection, checkpoint_id: int, owner: str, token: str, expires_at: datetime) -> VerifyLease:
    row = require(connection, checkpoint_id)
    files = queries.select_files(connection, checkpoint_id)
    return VerifyLease(
        checkpoint_id=row.id,
        run=row.run,
        iteration=row.iteration,
        save_id=row.save_id,
        url=row.url,
        root_url=row.root_url,
        root_id=row.root_id,
        format=row.format,
        manifest_sha256=row.manifest_sha256,
        verdict=row.verdict,
        owner=owner,
        token=token,
        expires_at=expires_at,
        version=row.version,
        size=row.size,
        files=files,
    )


def _explain_refusal(connection: Connection, checkpoint_id: int, now: datetime, *, force: bool) -> None:
    """Why one checkpoint was not leased; silent where that is normal (already verified, backing off)."""
    row = require(connection, checkpoint_id)
    if row.lease_expires_at is not None and row.lease_expires_at > now:
        raise LeaseHeldError(
            f"{row.name} ({row.save_id}): {row.lease_owner} verifies it; its lease ends at "
            f"{row.lease_expires_at:%Y-%m-%d %H:%M:%S} UTC unless renewed"
        )
    if row.lifecycle != "finalized":
        raise CatalogError(f"{row.name} ({row.save_id}): is {row.lifecycle}; only a finalized one can be verified")
    if force:
        raise StaleWriteError(f"{row.name} ({row.save_id}): changed while it was being leased; try again")


def renew(connection: Connection, lease: VerifyLease, *, ttl: float, now: datetime) -> VerifyLease:
    """Moves the expiry. A lease that expired and that nobody took over is still its owner's.

    Raises:
        LeaseHeldError: somebody took over.
        StaleWriteError: the lease is gone: the checkpoint is being deleted or was replaced.
    """
    expires_at = now + timedelta(seconds=ttl)
    _update_leased(connection, lease, {"lease_expires_at": expires_at})
    return replace(lease, expires_at=expires_at)


def release(
    connection: Connection, lease: VerifyLease, *, reason: str, retry_after: float | None, now: datetime, actor: str
) -> None:
    """Gives the work back without a verdict.

    Args:
        retry_after: seconds until it may be taken again, counted as a failure; None: at once, nothing failed.

    Raises:
        LeaseHeldError, StaleWriteError: as `renew`.
    """
    row = require(connection, lease.checkpoint_id)
    values: dict[str, Any] = dict(NO_LEASE)
    if retry_after is not None:
        values |= {"verify_failures": row.verify_failures + 1, "retry_at": now + timedelta(seconds=retry_after)}
    _update_leased(connection, lease, values)
    add_event(
        connection,
        run_id=row.run_id,
        checkpoint_id=row.id,
        kind="verify-deferred" if retry_after is not None else "verify-released",
        actor=actor,
        at=now,
        data={"reason": reason, "retry_after": retry_after},
    )


def finish(
    connection: Connection, lease: VerifyLease, findings: Findings, *, worker: str, now: datetime
) -> CheckpointRow:
    """Records a verification, and the verdict that follows from it, if the lease is still held (S1).

    ``ok`` at a level that `grants` it verifies, ``corrupt`` condemns this copy (V4), ``unverifiable`` says so where
    nothing was known; anything else keeps the verdict, and what was unreadable waits longer each time (V2).

    Raises:
        LeaseHeldError, StaleWriteError: as `renew`. Nothing was written.
    """
    row = require_locked(connection, lease.checkpoint_id)
    if connection.execute(select(Checkpoint.id).where(_held(lease))).first() is None:
        raise _lost(connection, lease)
    if findings.outcome == "ok":
        _fill_in_digests(connection, lease, findings)
    verdict = _verdict(row, findings)
    values: dict[str, Any] = dict(NO_LEASE)
    if findings.outcome == "unreadable":
        failures = row.verify_failures + 1
        values |= {"verify_failures": failures, "retry_at": now + timedelta(seconds=backoff(failures))}
    else:
        values |= {"verify_failures": 0, "retry_at": None}
    if verdict == "verified":
        values |= {"verified_at": row.verified_at or now, "verified_level": _level(row, findings)}
    data = {"level": findings.level, "outcome": findings.outcome, "worker": worker, "problems": findings.problems[:5]}
    if not change(connection, row, verdict=verdict, actor=worker, at=now, data=data, token=lease.token, values=values):
        _update_leased(connection, lease, values)
        if findings.outcome != "ok":
            data |= {"retry_at": values["retry_at"] and values["retry_at"].isoformat()}
        kind = "verify-deferred" if findings.outcome == "unreadable" else "checked"
        add_event(connection, run_id=row.run_id, checkpoint_id=row.id, kind=kind, actor=worker, at=now, data=data)
    _record_verification(connection, row, verdict, findings, worker=worker, now=now)
    if verdict == "verified" and row.verified_at is None:
        refresh_branches(connection, row.run_id, actor=worker, now=now)
    return require(connection, row.id)


def _verdict(row: CheckpointRow, findings: Findings) -> Verdict:
    """The verdict after these findings."""
    if findings.outcome == "corrupt":
        return "corrupt"
    if findings.outcome == "ok" and grants(findings.level, row.verdict):
        return "verified"
    if findings.outcome == "unverifiable" and row.verdict == "unverified":
        return "unverifiable"
    return row.verdict


def _level(row: CheckpointRow, findings: Findings) -> str | None:
    """By what a checkpoint is verified: a glance at the store's digests takes nothing from one that was read back."""
    granted = findings.outcome == "ok" and findings.level in GRANTS
    stays = row.verdict == "verified" and (not granted or row.verified_level == "data")
    return row.verified_level if stays else findings.level


def _fill_in_digests(connection: Connection, lease: VerifyLease, findings: Findings) -> None:
    """The first reading of an adopted file gives it the digest that later ones are compared with (V1)."""
    for file in lease.files:
        finding = findings.files.get(file.path)
        if file.sha256 is None and finding is not None and finding.verdict == "ok" and finding.sha256:
            statement = update(File).where(
                File.checkpoint_id == lease.checkpoint_id, File.path == file.path, File.sha256.is_(None)
            )
            connection.execute(statement.values(sha256=finding.sha256))


def _record_verification(
    connection: Connection,
    row: CheckpointRow,
    verdict: Verdict,
    findings: Findings,
    *,
    worker: str,
    now: datetime,
) -> None:
    counts: dict[str, int] = {}
    for finding in findings.files.values():
        counts[finding.verdict] = counts.get(finding.verdict, 0) + 1
    failed = {
        name: {"verdict": finding.verdict, "detail": finding.detail}
        for name, finding in sorted(findings.files.items())
        if finding.verdict not in ("ok", "extra", "unverifiable")  # of these `problems` says how many, and why
    }
    connection.execute(
        insert(Verification).values(
            checkpoint_id=row.id,
            level=findings.level,
            outcome=findings.outcome,
            verdict=verdict,
            worker=worker,
            finished_at=now,
            seconds=findings.seconds,
            bytes_read=findings.bytes_read,
            counts=counts,
            failed=failed,
            problems=list(findings.problems),
        )
    )


def _held(lease: VerifyLease) -> ColumnElement[bool]:
    """The row, as long as this lease is the one on it."""
    return and_(
        Checkpoint.id == lease.checkpoint_id,
        Checkpoint.save_id == lease.save_id,
        Checkpoint.lease_token == lease.token,
    )


def _update_leased(connection: Connection, lease: VerifyLease, values: Mapping[str, Any]) -> None:
    """Updates the row if, and only if, the lease is still the one on it."""
    if connection.execute(update(Checkpoint).where(_held(lease)).values(dict(values))).rowcount != 1:
        raise _lost(connection, lease)


def _lost(connection: Connection, lease: VerifyLease) -> LeaseHeldError | StaleWriteError:
    """What became of a lease."""
    row = require(connection, lease.checkpoint_id)
    if row.lease_owner is not None:
        return LeaseHeldError(
            f"{row.name} ({row.save_id}): the lease of {lease.owner} expired and {row.lease_owner} took over; "
            "nothing was written"
        )
    return StaleWriteError(
        f"{row.name} ({row.save_id}): the lease of {lease.owner} is gone (it is {row.state} now); nothing was written"
    )
