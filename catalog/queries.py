"""Reading: SELECTs over the tables, answered as the frozen rows of `catalog.rows`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, case, func, select

from catalog.models import Attempt, Checkpoint, Event, File, Hold, Location, Run, Verification
from catalog.rows import (
    AttemptRow,
    CheckpointRow,
    EventRow,
    FileRow,
    HoldRow,
    LocationRow,
    RunRow,
    VerificationRow,
)
from ckptlib.records import number_to_json
from ckptlib.topology import Topology

ORDER = (Checkpoint.attempt, Checkpoint.iteration, Checkpoint.id)


def join_url(root_url: str, path: str) -> str:
    """The URL of something below a root."""
    return f"{root_url.rstrip('/')}/{path}"


def numbers_to_json(numbers: Mapping[str, float]) -> dict[str, Any]:
    """Numbers as a JSON column can hold them: PostgreSQL refuses NaN and infinities."""
    return {name: number_to_json(value) for name, value in numbers.items()}


def _numbers(value: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(number) if isinstance(number, str) else number for name, number in value.items()}


def _topology(value: Mapping[str, Any] | None) -> Topology | None:
    return None if value is None else Topology.from_json(value)


def _checkpoints() -> Select[Any]:
    """All columns of a checkpoint, with its run's name and its root."""
    return (
        select(
            *Checkpoint.__table__.columns,
            Run.name.label("run"),
            Location.url.label("root_url"),
            Location.root_id.label("root_id"),
        )
        .join(Run, Run.id == Checkpoint.run_id)
        .join(Location, Location.id == Checkpoint.location_id)
    )


def _row(row: Row[Any]) -> CheckpointRow:
    return CheckpointRow(
        id=row.id,
        run_id=row.run_id,
        run=row.run,
        iteration=row.iteration,
        save_id=row.save_id,
        attempt=row.attempt,
        attempt_id=row.attempt_id,
        seq=row.id,
        kind=row.kind,
        semantic_type=row.semantic_type,
        format=row.format,
        io_mode=row.io_mode,
        lifecycle=row.lifecycle,
        verdict=row.verdict,
        branch=row.branch,
        version=row.version,
        url=join_url(row.root_url, row.path),
        root_url=row.root_url,
        root_id=row.root_id,
        path=row.path,
        topology=_topology(row.topology),
        contents=tuple(row.contents),
        progress=_numbers(row.progress),
        metrics=_numbers(row.metrics),
        parent=row.parent,
        replaces=tuple(row.replaces),
        size=row.size,
        tensors=row.tensors,
        objects=row.objects,
        manifest_sha256=row.manifest_sha256,
        adopted=row.adopted,
        created_at=row.created_at,
        committed_at=row.committed_at,
        recorded_at=row.recorded_at,
        verified_at=row.verified_at,
        verified_level=row.verified_level,
        lease_owner=row.lease_owner,
        lease_expires_at=row.lease_expires_at,
        verify_failures=row.verify_failures,
        retry_at=row.retry_at,
    )


def run_id_of(connection: Connection, run: str) -> int | None:
    """The id of a run; None when the catalog does not know it."""
    return connection.execute(select(Run.id).where(Run.name == run)).scalar_one_or_none()


def select_checkpoints(
    connection: Connection, *where: ColumnElement[bool], latest: int | None = None
) -> list[CheckpointRow]:
    """Checkpoints by run, each run in order, newest last; only the `latest` newest of each where that is given."""
    statement = _checkpoints().where(*where)
    if latest is not None:
        rank = func.row_number().over(partition_by=Checkpoint.run_id, order_by=[column.desc() for column in ORDER])
        # The same conditions inside: "latest" counts what is asked for.
        ranked = (
            select(Checkpoint.id, rank.label("rank")).join(Run, Run.id == Checkpoint.run_id).where(*where).subquery()
        )
        statement = statement.join(ranked, ranked.c.id == Checkpoint.id).where(ranked.c.rank <= latest)
    return [_row(row) for row in connection.execute(statement.order_by(Run.name, *ORDER))]


def get_checkpoint(connection: Connection, checkpoint_id: int) -> CheckpointRow | None:
    """One checkpoint by its id."""
    row = connection.execute(_checkpoints().where(Checkpoint.id == checkpoint_id)).one_or_none()
    return None if row is None else _row(row)


def find_save(connection: Connection, run_id: int, save_id: str) -> CheckpointRow | None:
    """One checkpoint by what identifies it (S3)."""
    where = and_(Checkpoint.run_id == run_id, Checkpoint.save_id == save_id)
    row = connection.execute(_checkpoints().where(where)).one_or_none()
    return None if row is None else _row(row)


@contextmanager
def newest_first(connection: Connection, run_id: int) -> Iterator[Iterator[CheckpointRow]]:
    """The checkpoints of a run, newest first, fetched as they are consumed: a resume seldom needs more than a few."""
    statement = _checkpoints().where(Checkpoint.run_id == run_id).order_by(*(column.desc() for column in ORDER))
    with connection.execute(statement, execution_options={"yield_per": 64}) as result:
        yield map(_row, result)


def select_files(connection: Connection, checkpoint_id: int) -> tuple[FileRow, ...]:
    """The files of a checkpoint, by path."""
    statement = (
        select(File.path, File.size, File.sha256, File.role, File.origin)
        .where(File.checkpoint_id == checkpoint_id)
        .order_by(File.path)
    )
    return tuple(FileRow(**row._mapping) for row in connection.execute(statement))


def select_runs(connection: Connection) -> list[RunRow]:
    """All runs by name, with their sums."""
    finalized = Checkpoint.lifecycle == "finalized"
    verified = and_(finalized, Checkpoint.verdict == "verified", Checkpoint.branch == "live")
    sums = (
        select(
            Checkpoint.run_id,
            func.count().filter(finalized).label("checkpoints"),
            func.coalesce(func.sum(case((finalized, Checkpoint.size), else_=0)), 0).label("size"),
            func.count().filter(and_(finalized, Checkpoint.verdict == "unverified")).label("unverified"),
            func.count().filter(and_(finalized, Checkpoint.verdict == "corrupt")).label("corrupt"),
        )
        .group_by(Checkpoint.run_id)
        .subquery()
    )
    attempts = select(Attempt.run_id, func.count().label("attempts")).group_by(Attempt.run_id).subquery()

    def newest(*where: ColumnElement[bool]) -> Any:
        """Id of the newest such checkpoint of the run of the outer row."""
        query = select(Checkpoint.id).where(Checkpoint.run_id == Run.id, *where)
        return query.order_by(*(column.desc() for column in ORDER)).limit(1).correlate(Run).scalar_subquery()

    statement = (
        select(
            Run.id,
            Run.name,
            Run.created_at,
            func.coalesce(attempts.c.attempts, 0).label("attempts"),
            func.coalesce(sums.c.checkpoints, 0).label("checkpoints"),
            func.coalesce(sums.c.size, 0).label("size"),
            func.coalesce(sums.c.unverified, 0).label("unverified"),
            func.coalesce(sums.c.corrupt, 0).label("corrupt"),
            newest(finalized).label("newest"),
            newest(verified).label("newest_verified"),
        )
        .outerjoin(sums, sums.c.run_id == Run.id)
        .outerjoin(attempts, attempts.c.run_id == Run.id)
        .order_by(Run.name)
    )
    rows = connection.execute(statement).all()
    ids = {row.newest for row in rows} | {row.newest_verified for row in rows}
    found = {
        row.id: row
        for row in connection.execute(
            select(Checkpoint.id, Checkpoint.iteration, Checkpoint.committed_at).where(Checkpoint.id.in_(ids - {None}))
        )
    }
    roots: dict[int, list[str]] = {}
    for run_id, url in connection.execute(select(Location.run_id, Location.url).order_by(Location.id)):
        roots.setdefault(run_id, []).append(url)
    return [
        RunRow(
            id=row.id,
            name=row.name,
            created_at=row.created_at,
            attempts=row.attempts,
            checkpoints=row.checkpoints,
            size=int(row.size),
            newest=found[row.newest].iteration if row.newest in found else None,
            newest_verified=found[row.newest_verified].iteration if row.newest_verified in found else None,
            newest_verified_at=found[row.newest_verified].committed_at if row.newest_verified in found else None,
            unverified=row.unverified,
            corrupt=row.corrupt,
            roots=tuple(roots.get(row.id, ())),
        )
        for row in rows
    ]


def select_attempts(connection: Connection, run_id: int) -> list[AttemptRow]:
    """The attempts of a run, in order."""
    statement = select(*Attempt.__table__.columns).where(Attempt.run_id == run_id).order_by(Attempt.number, Attempt.id)
    return [
        AttemptRow(
            number=row.number,
            attempt_id=row.attempt_id,
            resumed_from=row.resumed_from,
            host=row.host,
            pid=row.pid,
            topology=_topology(row.topology),
            started_at=row.started_at,
            recorded_at=row.recorded_at,
        )
        for row in connection.execute(statement)
    ]


def select_locations(connection: Connection, *where: ColumnElement[bool]) -> list[LocationRow]:
    """Roots, in the order in which they were registered."""
    statement = (
        select(Location.id, Run.name, Location.root_id, Location.url)
        .join(Run, Run.id == Location.run_id)
        .where(*where)
        .order_by(Location.id)
    )
    return [LocationRow(*row) for row in connection.execute(statement)]


def select_events(connection: Connection, *where: ColumnElement[bool], limit: int | None = None) -> list[EventRow]:
    """Events in the order in which they happened; only the newest `limit` where that is given."""
    statement = (
        select(
            Event.id,
            Run.name,
            Event.checkpoint_id,
            Checkpoint.iteration,
            Checkpoint.save_id,
            Event.kind,
            Event.actor,
            Event.at,
            Event.data,
        )
        .join(Run, Run.id == Event.run_id)
        .outerjoin(Checkpoint, Checkpoint.id == Event.checkpoint_id)
        .where(*where)
        .order_by(Event.id.desc())
        .limit(limit)
    )
    return [EventRow(*row) for row in reversed(connection.execute(statement).all())]


def select_verifications(connection: Connection, checkpoint_id: int) -> list[VerificationRow]:
    """The verifications of a checkpoint, oldest first."""
    statement = select(*Verification.__table__.columns).where(Verification.checkpoint_id == checkpoint_id)
    return [
        VerificationRow(**{**row._mapping, "problems": tuple(row.problems)})
        for row in connection.execute(statement.order_by(Verification.id))
    ]


def select_holds(connection: Connection, *where: ColumnElement[bool]) -> list[HoldRow]:
    """Holds, oldest first."""
    statement = select(*Hold.__table__.columns).where(*where).order_by(Hold.id)
    return [HoldRow(**row._mapping) for row in connection.execute(statement)]


def active_hold(now: datetime) -> ColumnElement[bool]:
    """Which holds are in force."""
    return and_(Hold.released_at.is_(None), (Hold.expires_at.is_(None)) | (Hold.expires_at > now))
