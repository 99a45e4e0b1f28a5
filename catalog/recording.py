"""Writing down what exists: runs, roots, attempts, checkpoints; and the branches that follow from them.

Everything here runs inside one write transaction of `catalog.database` and takes the run's lock first.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, and_, func, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from catalog import queries
from catalog.changes import add_event, change, lock_run
from catalog.entries import FOREIGN_ATTEMPT, NewCheckpoint, attempt_of, moment
from catalog.lineage import Node, branches
from catalog.models import Attempt, Checkpoint, Event, File, Location, Run
from catalog.rows import CheckpointRow
from ckptlib.errors import CatalogError
from ckptlib.events import AttemptEvent

# ---------------------------------------------------------------- runs, roots, attempts


def ensure_run(connection: Connection, name: str, now: datetime) -> int:
    """The run's id; makes the run when it is new. Holds its lock from here on."""
    run_id = queries.run_id_of(connection, name)
    if run_id is None:
        dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
        connection.execute(dialect.insert(Run).values(name=name, created_at=now).on_conflict_do_nothing())
        run_id = connection.execute(select(Run.id).where(Run.name == name)).scalar_one()
    lock_run(connection, run_id)
    return run_id


def ensure_location(
    connection: Connection, run_id: int, root_url: str, root_id: str | None, *, actor: str, now: datetime
) -> int:
    """The location's id. A known root seen under another URL was moved: its row follows, no checkpoint changes."""
    columns = select(Location.id, Location.root_id, Location.url).where(Location.run_id == run_id)
    known = None
    if root_id is not None:
        known = connection.execute(columns.where(Location.root_id == root_id)).one_or_none()
    if known is None:
        # A place recorded before it had an identity (or by a bare save) is the same place.
        nameless = columns.where(Location.url == root_url, Location.root_id.is_(None)).order_by(Location.id).limit(1)
        known = connection.execute(nameless).one_or_none()
    if known is None:
        values = {"run_id": run_id, "root_id": root_id, "url": root_url, "registered_at": now}
        return int(connection.execute(insert(Location).values(values).returning(Location.id)).scalar_one())
    if (known.root_id, known.url) != (root_id, root_url):
        statement = update(Location).where(Location.id == known.id)
        connection.execute(statement.values(root_id=root_id, url=root_url))
        if known.url != root_url:
            data = {"from": known.url, "to": root_url, "root_id": root_id}
            add_event(connection, run_id=run_id, checkpoint_id=None, kind="moved", actor=actor, at=now, data=data)
    return int(known.id)


def ensure_attempt(
    connection: Connection,
    run_id: int,
    attempt_id: str,
    number: int,
    *,
    actor: str,
    now: datetime,
    **facts: Any,
) -> None:
    """Records an attempt, or fills in what was not known of it. What is known already never changes.

    Args:
        facts: columns ``resumed_from``, ``host``, ``pid``, ``topology``, ``started_at``.
    """
    known = connection.execute(
        select(*Attempt.__table__.columns).where(Attempt.run_id == run_id, Attempt.attempt_id == attempt_id)
    ).one_or_none()
    if known is None:
        values = {"run_id": run_id, "attempt_id": attempt_id, "number": number, "recorded_at": now, **facts}
        connection.execute(insert(Attempt).values(values))
        if number > 0:
            data = {"attempt": number, "host": facts.get("host"), "resumed_from": facts.get("resumed_from")}
            add_event(connection, run_id=run_id, checkpoint_id=None, kind="attempt", actor=actor, at=now, data=data)
        return
    news = {name: value for name, value in facts.items() if value is not None and getattr(known, name) is None}
    if news:
        connection.execute(update(Attempt).where(Attempt.id == known.id).values(news))


def record_attempt(connection: Connection, event: AttemptEvent, *, actor: str, now: datetime) -> None:
    """Records that a process lifetime of a run began, and its root."""
    run_id = ensure_run(connection, event.run, now)
    ensure_location(connection, run_id, event.root_url.rstrip("/"), event.root_id, actor=actor, now=now)
    ensure_attempt(
        connection,
        run_id,
        event.attempt_id,
        event.attempt,
        actor=actor,
        now=now,
        resumed_from=event.resumed_from,
        host=event.host,
        pid=event.pid,
        topology=None if event.topology is None else event.topology.to_json(),
        started_at=moment(event.started_at),
    )


# ---------------------------------------------------------------- checkpoints


def record(connection: Connection, new: NewCheckpoint, *, actor: str, now: datetime) -> CheckpointRow:
    """Records a checkpoint; a second time it is a no-op (S3).

    One that the catalog says is deleted stays deleted, with one event ``reappeared``. One that was missing is
    finalized again. What it replaces in its directory is finished as deleted.

    Raises:
        CatalogError: another checkpoint with the same save id is recorded already.
    """
    run_id = ensure_run(connection, new.run, now)
    row = queries.find_save(connection, run_id, new.save_id)
    if row is not None:
        return _recorded_again(connection, row, new, actor=actor, now=now)
    location_id = ensure_location(connection, run_id, new.root_url, new.root_id, actor=actor, now=now)
    if new.attempt_id is not None:
        topology = None if new.topology is None else new.topology.to_json()
        ensure_attempt(
            connection,
            run_id,
            new.attempt_id,
            new.attempt,
            actor=actor,
            now=now,
            # The first checkpoint of an attempt descends from what it resumed from, later ones from each other.
            resumed_from=new.parent if attempt_of(new.parent) != new.attempt else None,
            topology=topology,
        )
    row = _insert(connection, run_id, location_id, new, actor=actor, now=now)
    _supersede(connection, row, new.replaces, actor=actor, now=now)
    for other in queries.select_checkpoints(
        connection, Checkpoint.location_id == location_id, Checkpoint.path == new.path, Checkpoint.id != row.id
    ):
        # Recorded late, after the save that replaced it.
        if new.save_id in other.replaces:
            _supersede(connection, other, (new.save_id,), actor=actor, now=now)
    if _proven_tip(connection, run_id) > new.attempt:
        refresh_branches(connection, run_id, actor=actor, now=now)
    return require(connection, row.id)


def _insert(
    connection: Connection, run_id: int, location_id: int, new: NewCheckpoint, *, actor: str, now: datetime
) -> CheckpointRow:
    """The checkpoint, its files and its event."""
    committed_at = now
    if new.adopted:
        committed_at = _in_order(connection, run_id, new, moment(new.decided_at), now)
    checkpoint_id = connection.execute(
        insert(Checkpoint)
        .values(
            run_id=run_id,
            location_id=location_id,
            path=new.path,
            save_id=new.save_id,
            attempt=new.attempt,
            attempt_id=new.attempt_id,
            iteration=new.iteration,
            kind=new.kind,
            semantic_type=new.semantic_type,
            format=new.format,
            io_mode=new.io_mode,
            topology=None if new.topology is None else new.topology.to_json(),
            contents=list(new.contents),
            progress=queries.numbers_to_json(new.progress),
            metrics=queries.numbers_to_json(new.metrics),
            parent=new.parent,
            replaces=list(new.replaces),
            size=new.size,
            tensors=new.tensors,
            objects=new.objects,
            manifest_sha256=new.manifest_sha256,
            adopted=new.adopted,
            created_at=moment(new.created_at),
            committed_at=committed_at,
            recorded_at=now,
            lifecycle="finalized",
            verdict="unverified",
            branch="live",
            version=1,
            verify_failures=0,
        )
        .returning(Checkpoint.id)
    ).scalar_one()
    if new.files:
        connection.execute(
            insert(File),
            [
                {
                    "checkpoint_id": checkpoint_id,
                    "path": file.path,
                    "size": file.size,
                    "sha256": file.sha256,
                    "role": file.role,
                    "origin": file.origin,
                    "part_size": file.part_size,
                    "part_sha256": list(file.part_sha256) or None,
                }
                for file in new.files
            ],
        )
    data = {"size": new.size, "files": len(new.files), "lifecycle": [None, "finalized"], "version": 1}
    kind = "adopted" if new.adopted else "saved"
    add_event(connection, run_id=run_id, checkpoint_id=checkpoint_id, kind=kind, actor=actor, at=now, data=data)
    return require(connection, checkpoint_id)


def _recorded_again(
    connection: Connection, row: CheckpointRow, new: NewCheckpoint, *, actor: str, now: datetime
) -> CheckpointRow:
    if row.manifest_sha256 != new.manifest_sha256:
        raise CatalogError(
            f"{row.name}: save {row.save_id} is recorded at {row.url} with manifest {row.manifest_sha256}, but "
            f"{queries.join_url(new.root_url, new.path)} has {new.manifest_sha256}. One of them is damaged or forged: "
            "compare both with `ckpt verify`."
        )
    if row.lifecycle in ("deleting", "deleted"):
        seen = select(func.count()).where(Event.checkpoint_id == row.id, Event.kind == "reappeared")
        if not connection.execute(seen).scalar_one():
            add_event(
                connection,
                run_id=row.run_id,
                checkpoint_id=row.id,
                kind="reappeared",
                actor=actor,
                at=now,
                data={"url": queries.join_url(new.root_url, new.path), "lifecycle": row.lifecycle},
            )
    elif row.lifecycle == "missing":
        change(connection, row, lifecycle="finalized", kind="returned", actor=actor, at=now)
        return require(connection, row.id)
    return row


def _supersede(
    connection: Connection, by: CheckpointRow, save_ids: Sequence[str], *, actor: str, now: datetime
) -> None:
    """Finishes what `by` replaced in its own directory as deleted: its commit removed it from storage (W9)."""
    for save_id in save_ids:
        row = queries.find_save(connection, by.run_id, save_id)
        # A record can only speak for its own directory.
        if row is None or (row.root_url, row.path) != (by.root_url, by.path) or row.id == by.id:
            continue
        data = {"reason": f"replaced by save {by.save_id}"}
        if row.lifecycle in ("writing", "finalized", "aborted"):
            change(connection, row, lifecycle="deleting", actor=actor, at=now, data=data)
            row = require(connection, row.id)
        if row.lifecycle == "deleting":
            change(connection, row, lifecycle="deleted", actor=actor, at=now, data=data)


def _in_order(
    connection: Connection, run_id: int, new: NewCheckpoint, claimed: datetime | None, now: datetime
) -> datetime:
    """The time of an adopted checkpoint: what its manifest claims, but not against the order of its run, nor later
    than now. Without a claim it counts as new as the order allows, so that no rule about age hits it first."""
    mine = Checkpoint.run_id == run_id
    before = or_(
        Checkpoint.attempt < new.attempt,
        and_(Checkpoint.attempt == new.attempt, Checkpoint.iteration < new.iteration),
    )
    after = or_(
        Checkpoint.attempt > new.attempt,
        and_(Checkpoint.attempt == new.attempt, Checkpoint.iteration > new.iteration),
    )
    # An aggregate over no row is NULL.
    earliest: datetime | None = connection.scalar(select(func.max(Checkpoint.committed_at)).where(mine, before))
    next_one: datetime | None = connection.scalar(select(func.min(Checkpoint.committed_at)).where(mine, after))
    latest = now if next_one is None else min(next_one, now)
    if claimed is None:
        return latest
    return min(claimed if earliest is None else max(claimed, earliest), latest)


def require(connection: Connection, checkpoint_id: int) -> CheckpointRow:
    """One checkpoint by its id.

    Raises:
        CatalogError: there is none.
    """
    row = queries.get_checkpoint(connection, checkpoint_id)
    if row is None:
        raise CatalogError(f"the catalog has no checkpoint with id {checkpoint_id}")
    return row


def require_locked(connection: Connection, checkpoint_id: int) -> CheckpointRow:
    """The same, with its run locked: what it says stays true until the transaction ends.

    Raises:
        CatalogError: there is none.
    """
    lock_run(connection, require(connection, checkpoint_id).run_id)
    return require(connection, checkpoint_id)


# ---------------------------------------------------------------- branches


def _proven_tip(connection: Connection, run_id: int) -> int:
    """The newest attempt of which a checkpoint was verified; below every attempt when there is none."""
    statement = select(func.max(Checkpoint.attempt)).where(
        Checkpoint.run_id == run_id, Checkpoint.verified_at.is_not(None), Checkpoint.kind != "release"
    )
    tip: int | None = connection.execute(statement).scalar_one()
    return FOREIGN_ATTEMPT - 1 if tip is None else tip


def refresh_branches(connection: Connection, run_id: int, *, actor: str, now: datetime) -> None:
    """Brings the branch of every checkpoint of the run in line with `catalog.lineage`; idempotent.

    Needed when an attempt's first checkpoint is verified, and when a checkpoint of an attempt before the newest
    proven one is recorded late.
    """
    columns = select(
        Checkpoint.id,
        Checkpoint.attempt,
        Checkpoint.iteration,
        Checkpoint.save_id,
        Checkpoint.verified_at.is_not(None).label("verified"),
        Checkpoint.branch,
    )
    rows = connection.execute(columns.where(Checkpoint.run_id == run_id, Checkpoint.kind != "release"))
    nodes = [Node(**row._mapping) for row in rows]
    parents = connection.execute(
        select(Attempt.number, Attempt.resumed_from).where(
            Attempt.run_id == run_id, Attempt.number > 0, Attempt.resumed_from.is_not(None)
        )
    )
    decided = branches(nodes, {row.number: str(row.resumed_from) for row in parents})
    for node in nodes:
        if decided[node.id] != node.branch:
            row = require(connection, node.id)
            data = {"reason": "the run went on from another checkpoint"}
            change(connection, row, branch=decided[node.id], actor=actor, at=now, data=data)
