"""Commits, attempts, rows and reports that the catalog's tests are made of."""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from catalog.database import database_clock, upgrade
from catalog.leases import FileFinding
from catalog.rows import CheckpointRow
from ckptlib.events import AttemptEvent, CommitEvent
from ckptlib.manifest import Begin, Decision, FileEntry, Manifest
from ckptlib.topology import Topology

ROOT = "/data/run"
ROOT_ID = "root-1"
T0 = datetime(2026, 11, 1, tzinfo=UTC)


class Clock:
    """The database's clock, moved forward by hand: no test waits for a lease to expire."""

    def __init__(self) -> None:
        self.offset = timedelta()

    def __call__(self, connection: Connection) -> datetime:
        return database_clock(connection) + self.offset

    def advance(self, seconds: float) -> None:
        self.offset += timedelta(seconds=seconds)


@cache
def _template() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="catalog-empty-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    upgrade(str(directory / "catalog.db"))
    return directory / "catalog.db"


def empty_catalog(directory: Path) -> str:
    """An SQLite catalog without rows in a directory: a copy, because making the schema takes longer than most tests."""
    return str(shutil.copy(_template(), directory / "catalog.db"))


def save_id(iteration: int, attempt: int = 1, number: int = 0) -> str:
    """A save id as `ckptlib.commit` makes them."""
    return f"{attempt:06d}-{iteration:012x}-{number:08x}"


def commit(
    iteration: int,
    *,
    run: str | None = "run",
    attempt: int = 1,
    number: int = 0,
    root_url: str | None = ROOT,
    root_id: str | None = ROOT_ID,
    directory: str | None = None,
    decided_at: float = 1_700_000_000.0,
    **begin: Any,
) -> CommitEvent:
    """The event of a committed save with one data file of 100 bytes."""
    this = save_id(iteration, attempt, number)
    facts: dict[str, Any] = {"contents": ("model", "optimizer"), "topology": Topology(tp=2, dp=2), "created_at": 1.7e9}
    start = Begin(
        save_id=this,
        run=run,
        attempt=attempt,
        attempt_id=f"attempt-{attempt}",
        iteration=iteration,
        world_size=4,
        plan_digest="0" * 64,
        **{**facts, **begin},
    )
    name = directory or f"iter_{iteration:07d}"
    manifest = Manifest(
        start,
        (
            FileEntry(f"__0_0.{this}.distcp", 100, hashlib.sha256(this.encode()).hexdigest()),
            FileEntry(f".ckpt/{this}/common.pt", 7, "c" * 64, "common"),
        ),
        {".metadata": (3, "e" * 64)},
        tensors=2,
        objects=1,
    )
    digest = hashlib.sha256(manifest.encode()).hexdigest()
    decision = Decision(this, "commit", "decider", "coordinator", decided_at, digest)
    return CommitEvent(f"{root_url or '/data/loose'}/{name}", root_url, root_id, manifest, digest, decision)


def attempt(number: int = 1, *, run: str = "run", resumed_from: str | None = None) -> AttemptEvent:
    """The event of a process lifetime."""
    return AttemptEvent(
        run, ROOT, ROOT_ID, number, f"attempt-{number}", Topology(tp=2, dp=2), resumed_from, "node7", 4242, 1.7e9
    )


@dataclass(frozen=True)
class Report:
    """A verification's report, as far as the catalog looks at it."""

    ok: bool = True
    corrupt: bool = False
    unreadable: bool = False
    unverifiable: bool = False
    checks: Mapping[str, FileFinding] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    bytes_read: int = 107
    seconds: float = 0.5


GOOD = Report()
CORRUPT = Report(
    ok=False, corrupt=True, checks={"x.distcp": FileFinding("digest", "f" * 64, "one byte")}, problems=("x.distcp",)
)
UNVERIFIABLE = Report(
    ok=False,
    unverifiable=True,
    checks={"x.distcp": FileFinding("unverifiable", None, "no word")},
    problems=("x.distcp: unverifiable: no word",),
)
UNREADABLE = Report(ok=False, unreadable=True, checks={"x.distcp": FileFinding("unreadable", None, "EACCES")})


def row(id: int = 1, iteration: int = 100, **facts: Any) -> CheckpointRow:
    """A verified row of attempt 1, unless `facts` say otherwise."""
    base: dict[str, Any] = {
        "id": id,
        "run_id": 1,
        "run": "run",
        "iteration": iteration,
        "save_id": save_id(iteration, facts.get("attempt", 1), id),
        "attempt": 1,
        "attempt_id": "attempt-1",
        "seq": id,
        "kind": "persistent",
        "semantic_type": "GLOBAL",
        "format": "torch_dist",
        "io_mode": "sync",
        "lifecycle": "finalized",
        "verdict": "verified",
        "branch": "live",
        "version": 1,
        "url": f"{ROOT}/iter_{iteration:07d}",
        "root_url": ROOT,
        "root_id": ROOT_ID,
        "path": f"iter_{iteration:07d}",
        "topology": None,
        "contents": ("model", "optimizer"),
        "progress": {},
        "metrics": {},
        "parent": None,
        "replaces": (),
        "size": 107,
        "tensors": 2,
        "objects": 1,
        "manifest_sha256": "0" * 64,
        "adopted": False,
        "created_at": T0,
        "committed_at": T0,
        "recorded_at": T0,
        "verified_at": None,
        "verified_level": None,
        "lease_owner": None,
        "lease_expires_at": None,
        "verify_failures": 0,
        "retry_at": None,
    }
    return CheckpointRow(**{**base, **facts})
