"""The catalog: what a script, the command line and the flows hold.

Each method is one transaction. What it does is in the modules beside this one; rows come back frozen.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Collection
from datetime import datetime, timedelta
from types import TracebackType

from sqlalchemy import ColumnElement

from catalog import entries, holds, leases, queries, recording, resume
from catalog.changes import change
from catalog.database import BUSY_TIMEOUT, Clock, Database, database_clock, upgrade
from catalog.models import Checkpoint, Event, Hold, Run
from catalog.rows import (
    AttemptRow,
    CheckpointRow,
    EventRow,
    FileRow,
    HoldRow,
    LocationRow,
    RunRow,
    VerificationRow,
    VerifyLease,
)
from catalog.states import Branch, Grant, Lifecycle, Verdict
from ckptlib.errors import CatalogError, StaleWriteError
from ckptlib.events import AttemptEvent, CommitEvent


def default_actor() -> str:
    """Who acts, for the history: ``user@host:pid``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user that no one has named
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}:{os.getpid()}"


class Catalog:
    """A catalog database. Safe to share between threads; close it, or use it as a context manager.

    Args:
        db_url: a path or a database URL; None for ``CKPT_DB``, and then the per-user default.
        create: make it, or bring its schema up to date, if need be.
        timeout: seconds to wait for a locked or unreachable database.
        clock: for tests; see `catalog.database.Database`.

    Raises:
        NoCatalogError: there is none, its schema is another revision's, or it cannot be reached.
    """

    def __init__(
        self,
        db_url: str | None = None,
        *,
        create: bool = False,
        timeout: float = BUSY_TIMEOUT,
        clock: Clock = database_clock,
    ) -> None:
        self.database = Database(db_url, timeout=timeout, clock=clock)
        try:
            if create:
                upgrade(db_url)
            self.database.require_head()
        except BaseException:
            self.database.close()
            raise

    def close(self) -> None:
        """Closes its connections."""
        self.database.close()

    def __enter__(self) -> Catalog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        return str(self.database)

    # ------------------------------------------------------------ recording

    def record(self, event: CommitEvent, *, actor: str | None = None, adopted: bool = False) -> CheckpointRow:
        """Records a committed save. Twice is a no-op; a deleted one that returns gives an event ``reappeared`` (S3).

        Args:
            adopted: found by a scan instead of being reported at its commit.

        Raises:
            CatalogError: the save names no run, or its id is recorded with another manifest.
        """
        return self.record_checkpoint(entries.from_commit(event, adopted=adopted), actor=actor)

    def record_checkpoint(self, new: entries.NewCheckpoint, *, actor: str | None = None) -> CheckpointRow:
        """Records a checkpoint of any origin; see `record`."""
        with self.database.write() as (connection, now):
            return recording.record(connection, new, actor=actor or default_actor(), now=now)

    def record_attempt(self, event: AttemptEvent, *, actor: str | None = None) -> None:
        """Records that a process lifetime of a run began, and fills in what was not known of it before."""
        with self.database.write() as (connection, now):
            recording.record_attempt(connection, event, actor=actor or default_actor(), now=now)

    def register_root(self, run: str, root_url: str, root_id: str | None, *, actor: str | None = None) -> None:
        """Says where a root of a run is now."""
        with self.database.write() as (connection, now):
            run_id = recording.ensure_run(connection, run, now)
            url = root_url.rstrip("/")
            recording.ensure_location(connection, run_id, url, root_id, actor=actor or default_actor(), now=now)

    def mark_missing(
        self, checkpoint_id: int, *, reason: str, actor: str | None = None, version: int | None = None
    ) -> CheckpointRow:
        """Says that a finalized checkpoint is no longer on storage, whose root was there (D4).

        Raises:
            TransitionError: it is not finalized.
            StaleWriteError: as `change`.
        """
        return self.change(checkpoint_id, lifecycle="missing", reason=reason, actor=actor, version=version)

    def change(
        self,
        checkpoint_id: int,
        *,
        lifecycle: Lifecycle | None = None,
        verdict: Verdict | None = None,
        reason: str,
        actor: str | None = None,
        version: int | None = None,
    ) -> CheckpointRow:
        """Changes lifecycle or verdict by hand, as `catalog.states` allows.

        Args:
            version: of the row that this was decided on; None to decide on what it is now.

        Raises:
            TransitionError: not a legal move.
            StaleWriteError: the row has another version.
        """
        with self.database.write() as (connection, now):
            row = recording.require_locked(connection, checkpoint_id)
            if version is not None and version != row.version:
                raise StaleWriteError(
                    f"{row.name} ({row.save_id}): has version {row.version} now, this was decided on {version}; "
                    "nothing was written"
                )
            who = actor or default_actor()
            data = {"reason": reason}
            change(connection, row, lifecycle=lifecycle, verdict=verdict, actor=who, at=now, data=data)
            return recording.require(connection, checkpoint_id)

    # ------------------------------------------------------------ reading

    def runs(self) -> list[RunRow]:
        """All runs by name, with their newest verified checkpoint and their sums."""
        with self.database.read() as connection:
            return queries.select_runs(connection)

    def attempts(self, run: str) -> list[AttemptRow]:
        """The process lifetimes of a run, in order."""
        with self.database.read() as connection:
            run_id = queries.run_id_of(connection, run)
            return [] if run_id is None else queries.select_attempts(connection, run_id)

    def locations(self, run: str | None = None) -> list[LocationRow]:
        """The roots of a run, or of all."""
        with self.database.read() as connection:
            return queries.select_locations(connection, *([] if run is None else [Run.name == run]))

    def checkpoints(
        self,
        run: str | None = None,
        *,
        lifecycle: Lifecycle | Collection[Lifecycle] | None = None,
        verdict: Verdict | Collection[Verdict] | None = None,
        branch: Branch | None = None,
        kind: str | None = None,
        latest: int | None = None,
        since: datetime | timedelta | None = None,
    ) -> list[CheckpointRow]:
        """Checkpoints by run, each run in order, newest last.

        Args:
            lifecycle, verdict: one state, or several; None for all, deleted ones included.
            latest: only so many of each run, the newest in order.
            since: committed at or after this time, or within this long before the database's now.
        """
        where: list[ColumnElement[bool]] = []
        if run is not None:
            where.append(Run.name == run)
        if lifecycle is not None:
            where.append(Checkpoint.lifecycle.in_([lifecycle] if isinstance(lifecycle, str) else list(lifecycle)))
        if verdict is not None:
            where.append(Checkpoint.verdict.in_([verdict] if isinstance(verdict, str) else list(verdict)))
        if branch is not None:
            where.append(Checkpoint.branch == branch)
        if kind is not None:
            where.append(Checkpoint.kind == kind)
        with self.database.read() as connection:
            if since is not None:
                start = since if isinstance(since, datetime) else self.database.now(connection) - since
                where.append(Checkpoint.committed_at >= start)
            return queries.select_checkpoints(connection, *where, latest=latest)

    def checkpoint(self, run: str, iteration: int, save_id: str | None = None) -> CheckpointRow:
        """The checkpoint of an iteration: the one that is usable, else the newest in order; or exactly this save.

        Raises:
            CatalogError: there is none; names the nearest.
        """
        rows = self.checkpoints(run)
        same = [row for row in rows if row.iteration == iteration and save_id in (None, row.save_id)]
        if not same:
            raise CatalogError(_not_there(run, iteration, save_id, rows))
        return max(same, key=lambda row: (row.lifecycle == "finalized", row.branch == "live", row.order))

    def checkpoint_by_id(self, checkpoint_id: int) -> CheckpointRow:
        """A checkpoint by the catalog's id.

        Raises:
            CatalogError: there is none.
        """
        with self.database.read() as connection:
            return recording.require(connection, checkpoint_id)

    def find(self, run: str, save_id: str) -> CheckpointRow | None:
        """A checkpoint by its identity (S3); None when it is not recorded."""
        with self.database.read() as connection:
            run_id = queries.run_id_of(connection, run)
            return None if run_id is None else queries.find_save(connection, run_id, save_id)

    def files(self, checkpoint_id: int) -> tuple[FileRow, ...]:
        """Its files with digests and their origin, by path."""
        with self.database.read() as connection:
            return queries.select_files(connection, checkpoint_id)

    def verifications(self, checkpoint_id: int) -> list[VerificationRow]:
        """Its verifications, oldest first."""
        with self.database.read() as connection:
            return queries.select_verifications(connection, checkpoint_id)

    def events(
        self, run: str | None = None, checkpoint_id: int | None = None, *, limit: int | None = None
    ) -> list[EventRow]:
        """What happened, oldest first; only the newest `limit` where that is given."""
        where: list[ColumnElement[bool]] = []
        if run is not None:
            where.append(Run.name == run)
        if checkpoint_id is not None:
            where.append(Event.checkpoint_id == checkpoint_id)
        with self.database.read() as connection:
            return queries.select_events(connection, *where, limit=limit)

    def resume_point(
        self,
        run: str,
        *,
        at: int | None = None,
        purpose: resume.Purpose = "train",
        allow_unverified: bool = False,
        require: Grant = "store",
        kinds: Collection[str] = resume.DEFAULT_KINDS,
    ) -> resume.Selection:
        """Where the run resumes, or why nowhere; see `catalog.resume`.

        Args:
            at: exactly this iteration.
            purpose: ``train`` needs model and optimizer, ``eval`` the model.
            allow_unverified: take checkpoints that nobody has read back yet. Never corrupt or suspect ones.
            require: what a verification must have been at least: ``store`` accepts the store's own digests,
                ``data`` only what was read back.
            kinds: which kinds may be selected; releases only when named.
        """
        request = resume.Request(
            run, at=at, purpose=purpose, allow_unverified=allow_unverified, require=require, kinds=frozenset(kinds)
        )
        with self.database.read() as connection:
            run_id = queries.run_id_of(connection, run)
            if run_id is None:
                return resume.select((), request)
            with queries.newest_first(connection, run_id) as rows:
                return resume.select(rows, request)

    # ------------------------------------------------------------ verification: the queue (S5)

    def lease_unverified(
        self,
        *,
        owner: str,
        ttl: float,
        limit: int = 1,
        level: str = "data",
        run: str | None = None,
        checkpoint_id: int | None = None,
        force: bool = False,
        exclude: Collection[int] = (),
    ) -> list[VerifyLease]:
        """Takes up to `limit` checkpoints that wait for verification, newest first.

        Args:
            owner: who verifies, for people.
            ttl: seconds until somebody else may take over, unless renewed.
            level: at which they will be verified: what only the store vouched for waits for ``data`` too.
            force: also those with a verdict already, and without waiting out a backoff. Nobody's lease is broken.
            exclude: ids to pass over: what this caller has dealt with.

        Raises:
            LeaseHeldError: `checkpoint_id` is given and somebody else verifies it.
            CatalogError: `checkpoint_id` is given and it cannot be verified: unknown, deleted, missing.
        """
        with self.database.write() as (connection, now):
            return leases.take(
                connection,
                owner=owner,
                ttl=ttl,
                now=now,
                limit=limit,
                level=level,
                run=run,
                checkpoint_id=checkpoint_id,
                force=force,
                exclude=exclude,
            )

    def waiting(self, run: str | None = None, *, level: str = "data") -> list[CheckpointRow]:
        """What waits for a verification at this level, leased or backing off or not; as `checkpoints`."""
        where = [Checkpoint.lifecycle == "finalized", leases.waits(level), *([] if run is None else [Run.name == run])]
        with self.database.read() as connection:
            return queries.select_checkpoints(connection, *where)

    def renew(self, lease: VerifyLease, ttl: float) -> VerifyLease:
        """Keeps a lease for `ttl` more seconds.

        Raises:
            LeaseHeldError: it expired and somebody took over.
            StaleWriteError: it is gone, with what it was for.
        """
        with self.database.write() as (connection, now):
            return leases.renew(connection, lease, ttl=ttl, now=now)

    def release(
        self, lease: VerifyLease, *, reason: str, retry_after: float | None = None, actor: str | None = None
    ) -> None:
        """Gives work back without a verdict: at once, or after a failure in `retry_after` seconds.

        Raises:
            LeaseHeldError, StaleWriteError: as `renew`.
        """
        with self.database.write() as (connection, now):
            who = actor or lease.owner
            leases.release(connection, lease, reason=reason, retry_after=retry_after, now=now, actor=who)

    def finish_verification(
        self,
        lease: VerifyLease,
        report: leases.Report | leases.Findings,
        *,
        level: str = "data",
        worker: str | None = None,
    ) -> CheckpointRow:
        """Records a verification and the verdict that follows from it, if the lease is still held.

        Raises:
            LeaseHeldError, StaleWriteError: as `renew`. Nothing was written.
        """
        findings = report if isinstance(report, leases.Findings) else leases.findings_of(report, level)
        with self.database.write() as (connection, now):
            return leases.finish(connection, lease, findings, worker=worker or lease.owner, now=now)

    # ------------------------------------------------------------ holds (D5)

    def hold(
        self,
        checkpoint_id: int,
        *,
        owner: str,
        reason: str,
        kind: str = "pin",
        expires_at: datetime | None = None,
    ) -> HoldRow:
        """Places a reason not to delete.

        Raises:
            CatalogError: nothing to hold: unknown, being deleted, deleted; or the hold itself makes no sense.
        """
        with self.database.write() as (connection, now):
            return holds.add(
                connection, checkpoint_id, kind=kind, owner=owner, reason=reason, expires_at=expires_at, now=now
            )

    def release_hold(self, hold_id: int, *, actor: str | None = None) -> HoldRow:
        """Ends a hold; twice is a no-op.

        Raises:
            CatalogError: there is no such hold.
        """
        with self.database.write() as (connection, now):
            return holds.release(connection, hold_id, actor=actor or default_actor(), now=now)

    def holds(self, checkpoint_id: int | None = None, *, active: bool = True) -> list[HoldRow]:
        """Holds, oldest first; only those in force unless `active` is false."""
        with self.database.read() as connection:
            where: list[ColumnElement[bool]] = []
            if checkpoint_id is not None:
                where.append(Hold.checkpoint_id == checkpoint_id)
            if active:
                where.append(queries.active_hold(self.database.now(connection)))
            return queries.select_holds(connection, *where)


def _not_there(run: str, iteration: int, save_id: str | None, rows: Collection[CheckpointRow]) -> str:
    """Names what there is instead."""
    if not rows:
        return f"the catalog knows no checkpoint of run {run!r}"
    if save_id is not None:
        return f"run {run!r}: no save {save_id} at iteration {iteration}"
    nearest = sorted({row.iteration for row in rows}, key=lambda other: (abs(other - iteration), other))[:3]
    return (
        f"run {run!r}: no checkpoint at iteration {iteration}; the nearest are {', '.join(map(str, sorted(nearest)))}"
    )
