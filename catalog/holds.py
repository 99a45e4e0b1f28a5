"""Holds: reasons not to delete a checkpoint (D5). A pin is a hold by a person."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, insert, select, update

from catalog import queries
from catalog.changes import touch
from catalog.models import Hold
from catalog.recording import require_locked
from catalog.rows import HoldRow
from ckptlib.errors import CatalogError

KINDS = ("pin", "resume-scheduled", "reading", "converting", "lineage-parent")


def add(
    connection: Connection,
    checkpoint_id: int,
    *,
    kind: str,
    owner: str,
    reason: str,
    expires_at: datetime | None,
    now: datetime,
) -> HoldRow:
    """Places a hold, under the lock that a deletion takes (D1).

    Raises:
        CatalogError: unknown kind, no checkpoint with this id, an expiry that has passed, or there is nothing left
            to hold: it is being deleted, or was.
    """
    if kind not in KINDS:
        raise CatalogError(f"hold of kind {kind!r}: expected one of {', '.join(KINDS)}")
    if expires_at is not None and expires_at <= now:
        raise CatalogError(f"hold until {expires_at:%Y-%m-%d %H:%M:%S %Z}: that is in the past")
    row = require_locked(connection, checkpoint_id)
    if row.lifecycle in ("deleting", "deleted"):
        raise CatalogError(f"{row.name} ({row.save_id}): is {row.lifecycle}, a hold can no longer save it")
    hold_id = connection.execute(
        insert(Hold)
        .values(checkpoint_id=row.id, kind=kind, owner=owner, reason=reason, created_at=now, expires_at=expires_at)
        .returning(Hold.id)
    ).scalar_one()
    until = None if expires_at is None else expires_at.isoformat()
    data = {"hold": hold_id, "kind": kind, "reason": reason, "until": until}
    touch(connection, row, kind="held", actor=owner, at=now, data=data)
    return get(connection, hold_id)


def release(connection: Connection, hold_id: int, *, actor: str, now: datetime) -> HoldRow:
    """Ends a hold; one that has ended already stays as it is.

    Raises:
        CatalogError: there is no such hold.
    """
    hold = get(connection, hold_id)
    row = require_locked(connection, hold.checkpoint_id)
    statement = update(Hold).where(Hold.id == hold_id, Hold.released_at.is_(None)).values(released_at=now)
    if connection.execute(statement).rowcount == 1:
        touch(connection, row, kind="hold-released", actor=actor, at=now, data={"hold": hold_id, "kind": hold.kind})
    return get(connection, hold_id)


def get(connection: Connection, hold_id: int) -> HoldRow:
    """One hold.

    Raises:
        CatalogError: there is no such hold.
    """
    if connection.execute(select(Hold.id).where(Hold.id == hold_id)).first() is None:
        raise CatalogError(f"there is no hold with id {hold_id}")
    return queries.select_holds(connection, Hold.id == hold_id)[0]
