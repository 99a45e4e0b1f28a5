"""The one place where lifecycle, verdict and branch of a checkpoint change (S1).

Every change is one UPDATE that names the row's version (and the save id, and where a lease decided, its token), and
one row in `events`, in the same transaction. A change that finds another version changes nothing and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert, select, update

from catalog.models import Checkpoint, Event, Run
from catalog.rows import CheckpointRow
from catalog.states import Branch, Lifecycle, Verdict, transition
from ckptlib.errors import StaleWriteError, TransitionError

NO_LEASE: Mapping[str, Any] = {"lease_owner": None, "lease_token": None, "lease_expires_at": None}


def lock_run(connection: Connection, run_id: int) -> None:
    """Takes the run's lock until the transaction ends (D1). SQLite's write transactions hold it already."""
    connection.execute(select(Run.id).where(Run.id == run_id).with_for_update())


def add_event(
    connection: Connection,
    *,
    run_id: int,
    checkpoint_id: int | None,
    kind: str,
    actor: str,
    at: datetime,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Appends to the history."""
    connection.execute(
        insert(Event).values(
            run_id=run_id, checkpoint_id=checkpoint_id, kind=kind, actor=actor, at=at, data=dict(data or {})
        )
    )


def change(
    connection: Connection,
    row: CheckpointRow,
    *,
    actor: str,
    at: datetime,
    lifecycle: Lifecycle | None = None,
    verdict: Verdict | None = None,
    branch: Branch | None = None,
    kind: str | None = None,
    data: Mapping[str, Any] | None = None,
    token: str | None = None,
    values: Mapping[str, Any] | None = None,
) -> bool:
    """Changes facts of a checkpoint, as they were decided on `row`.

    Args:
        row: what the decision was made on; its version must still be the current one.
        kind: of the event; by default the new word of the fact that changed.
        data: goes into the event, beside the old and new facts.
        token: the lease that decided; must still be the row's.
        values: further columns of the same UPDATE.

    Returns:
        Whether anything changed; False when the row already says so (then there is no event either).

    Raises:
        TransitionError: the change is not a legal move.
        StaleWriteError: the row, or its lease, changed since `row` was read. Nothing was written.
    """
    try:
        state = transition(row.state, lifecycle=lifecycle, verdict=verdict)
    except TransitionError as error:
        raise TransitionError(f"{row.name} ({row.save_id}): {error}") from error
    facts = {
        "lifecycle": (row.lifecycle, state.lifecycle),
        "verdict": (row.verdict, state.verdict),
        "branch": (row.branch, branch or row.branch),
    }
    changed = {fact: new for fact, (old, new) in facts.items() if old != new}
    if not changed:
        return False
    columns: dict[str, Any] = {**changed, "version": row.version + 1, **(values or {})}
    if state.lifecycle != "finalized":
        columns |= NO_LEASE
    statement = update(Checkpoint).where(
        Checkpoint.id == row.id, Checkpoint.version == row.version, Checkpoint.save_id == row.save_id
    )
    if token is not None:
        statement = statement.where(Checkpoint.lease_token == token)
    if connection.execute(statement.values(columns)).rowcount != 1:
        raise StaleWriteError(
            f"{row.name} ({row.save_id}): changed by somebody else since version {row.version}"
            f"{'' if token is None else ', or the lease was lost'}; nothing was written. Read it again and decide anew."
        )
    add_event(
        connection,
        run_id=row.run_id,
        checkpoint_id=row.id,
        kind=kind or next(iter(changed.values())),
        actor=actor,
        at=at,
        data={
            **{fact: [old, new] for fact, (old, new) in facts.items() if old != new},
            "version": row.version + 1,
            **(data or {}),
        },
    )
    return True


def touch(
    connection: Connection, row: CheckpointRow, *, kind: str, actor: str, at: datetime, data: Mapping[str, Any]
) -> None:
    """Raises the row's version with an event: something beside its facts changed that a plan may depend on (holds).

    Raises:
        StaleWriteError: the row changed since it was read.
    """
    statement = update(Checkpoint).where(Checkpoint.id == row.id, Checkpoint.version == row.version)
    if connection.execute(statement.values(version=row.version + 1)).rowcount != 1:
        raise StaleWriteError(f"{row.name} ({row.save_id}): changed by somebody else since version {row.version}")
    add_event(connection, run_id=row.run_id, checkpoint_id=row.id, kind=kind, actor=actor, at=at, data=data)
