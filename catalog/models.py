"""The catalog's tables. What changes a row lives in `catalog.changes`; nothing else updates lifecycle or verdict (S1).

A checkpoint row is one copy: a save (`run`, `save_id`) at one location. Where it is, is two facts kept apart: the
location (identity of the root, and the URL it has at the moment) and the path below it, so a root that was moved is
one changed row and no checkpoint changes its identity.

Portable SQL only: the same models run on SQLite and PostgreSQL.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from catalog.states import BRANCHES, LIFECYCLES, VERDICTS

# None is SQL NULL, not the JSON word null.
PlainJson = JSON(none_as_null=True)
# SQLite makes a rowid key only of a column that is literally INTEGER.
Id = BigInteger().with_variant(Integer, "sqlite")


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC: aware in Python everywhere, also on SQLite, which stores no zone.

    Raises:
        ValueError: a naive value is written. Which zone it is in would be a guess.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To UTC; SQLite gets it without the zone, so that text order is time order."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"naive time {value}: the catalog stores UTC only")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Aware, in UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    """`column` holds one of these words, whoever writes it."""
    words = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({words})", name=column)


class Base(DeclarativeBase):
    """Names every constraint, so that a later revision can find it on any database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {datetime: UtcDateTime(), dict[str, Any]: PlainJson, list[str]: PlainJson}  # noqa: RUF012


class Run(Base):
    """A training experiment. Its row is the lock that every change of the run's checkpoints takes (D1)."""

    __tablename__ = "runs"

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime]


class Location(Base):
    """A root of a run: who it is (`root_id`, from its `.ckpt/root.json`) and where it was seen last (`url`).

    `root_id` is NULL for a place without identity: the parent of a bare save, or a root only others wrote to.
    """

    __tablename__ = "locations"
    __table_args__ = (UniqueConstraint("run_id", "root_id"), Index(None, "run_id", "url"))

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    root_id: Mapped[str | None]
    url: Mapped[str]
    registered_at: Mapped[datetime]


class Attempt(Base):
    """One process lifetime of a run (W8). Number 0 is a save outside a `Checkpointer`."""

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("run_id", "attempt_id"), Index(None, "run_id", "number"))

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    attempt_id: Mapped[str]
    number: Mapped[int]
    resumed_from: Mapped[str | None]
    host: Mapped[str | None]
    pid: Mapped[int | None] = mapped_column(BigInteger)
    topology: Mapped[dict[str, Any] | None]
    started_at: Mapped[datetime | None]
    recorded_at: Mapped[datetime]


class Checkpoint(Base):
    """A save at a location, with its two facts `lifecycle` and `verdict` (S1) and the lease of its verifier.

    `id` grows with every recorded save: it is the monotonic `seq` of the selection and retention rules.
    `version` grows with every change that somebody may have decided on: lifecycle, verdict, branch, holds.
    """

    __tablename__ = "checkpoints"
    __table_args__ = (
        UniqueConstraint("run_id", "save_id"),
        ForeignKeyConstraint(["run_id", "attempt_id"], ["attempts.run_id", "attempts.attempt_id"]),
        _one_of("lifecycle", LIFECYCLES),
        _one_of("verdict", VERDICTS),
        _one_of("branch", BRANCHES),
        Index(None, "run_id", "attempt", "iteration", "id"),
        Index(None, "run_id", "iteration"),
        Index(None, "verdict", "lifecycle", "id"),
        Index(None, "location_id", "path"),
    )

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    location_id: Mapped[int] = mapped_column(ForeignKey("locations.id"))
    path: Mapped[str]
    save_id: Mapped[str]
    attempt: Mapped[int]
    attempt_id: Mapped[str | None]
    iteration: Mapped[int] = mapped_column(BigInteger)
    kind: Mapped[str]
    semantic_type: Mapped[str]
    format: Mapped[str]
    io_mode: Mapped[str]
    topology: Mapped[dict[str, Any] | None]
    contents: Mapped[list[str]]
    progress: Mapped[dict[str, Any]]
    metrics: Mapped[dict[str, Any]]
    parent: Mapped[str | None]
    replaces: Mapped[list[str]]
    size: Mapped[int] = mapped_column(BigInteger)
    tensors: Mapped[int] = mapped_column(BigInteger)
    objects: Mapped[int] = mapped_column(BigInteger)
    manifest_sha256: Mapped[str]
    adopted: Mapped[bool]
    created_at: Mapped[datetime | None]
    committed_at: Mapped[datetime]
    recorded_at: Mapped[datetime]

    lifecycle: Mapped[str]
    verdict: Mapped[str]
    branch: Mapped[str]
    version: Mapped[int] = mapped_column(BigInteger)

    verified_at: Mapped[datetime | None]
    verified_level: Mapped[str | None]
    lease_owner: Mapped[str | None]
    lease_token: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    verify_failures: Mapped[int]
    retry_at: Mapped[datetime | None]


class File(Base):
    """A file of a checkpoint, with the digest that a verification compares first, and where it came from (V1)."""

    __tablename__ = "files"

    checkpoint_id: Mapped[int] = mapped_column(ForeignKey("checkpoints.id"), primary_key=True)
    path: Mapped[str] = mapped_column(primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str | None]
    role: Mapped[str]
    origin: Mapped[str]
    part_size: Mapped[int | None] = mapped_column(BigInteger)
    part_sha256: Mapped[list[str] | None]


class Verification(Base):
    """One finished verification: what was looked at, and the verdict per file in short."""

    __tablename__ = "verifications"

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    checkpoint_id: Mapped[int] = mapped_column(ForeignKey("checkpoints.id"), index=True)
    level: Mapped[str]
    outcome: Mapped[str]
    verdict: Mapped[str]
    worker: Mapped[str]
    finished_at: Mapped[datetime]
    seconds: Mapped[float]
    bytes_read: Mapped[int] = mapped_column(BigInteger)
    counts: Mapped[dict[str, Any]]
    failed: Mapped[dict[str, Any]]
    problems: Mapped[list[str]]


class Hold(Base):
    """A reason not to delete, with owner and expiry (D5); released holds stay as history."""

    __tablename__ = "holds"

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    checkpoint_id: Mapped[int] = mapped_column(ForeignKey("checkpoints.id"), index=True)
    kind: Mapped[str]
    owner: Mapped[str]
    reason: Mapped[str]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    released_at: Mapped[datetime | None]


class Event(Base):
    """What happened, in order; written in the transaction that made it happen and never changed."""

    __tablename__ = "events"
    __table_args__ = (Index(None, "run_id", "id"), Index(None, "checkpoint_id", "id"))

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    checkpoint_id: Mapped[int | None] = mapped_column(ForeignKey("checkpoints.id"))
    kind: Mapped[str]
    actor: Mapped[str]
    at: Mapped[datetime]
    data: Mapped[dict[str, Any]]
