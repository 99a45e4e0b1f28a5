"""What the catalog answers: frozen rows, equal on every database. Pure: no SQLAlchemy, no storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from catalog.states import Branch, Lifecycle, State, Verdict
from ckptlib.topology import Topology

Origin = Literal["writer", "imported", "first-read"]


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint at one location, as the catalog knows it.

    Attributes:
        seq: grows with every recorded save; orders saves of one attempt and iteration.
        url: where the copy is now: `root_url` joined with `path`.
        root_id: identity of the root; None for a place without one.
        path: below the root: ``iter_0001000``, ``non_persistent/iter_0001000``.
        contents: what can be restored from it: ``model``, ``optimizer``, ...; sorted.
        parent: save id of the checkpoint that it was trained from: in its own attempt, or the one resumed from.
        replaces: save ids that it superseded in its directory.
        adopted: found on storage by a scan, not recorded at its commit.
        created_at: by the writer's clock, shown only. The other times are by the database's clock, but
            `committed_at` of an adopted row is its manifest's time, kept in the order of its run.
        version: grows with every change of lifecycle, verdict, branch or holds.
        verified_at: when it was verified first; stays when the verdict changes later.
        verified_level: ``data``: it was read back; ``store``: the store vouched for it.
    """

    id: int
    run_id: int
    run: str
    iteration: int
    save_id: str
    attempt: int
    attempt_id: str | None
    seq: int
    kind: str
    semantic_type: str
    format: str
    io_mode: str
    lifecycle: Lifecycle
    verdict: Verdict
    branch: Branch
    version: int
    url: str
    root_url: str
    root_id: str | None
    path: str
    topology: Topology | None
    contents: tuple[str, ...]
    progress: Mapping[str, float]
    metrics: Mapping[str, float]
    parent: str | None
    replaces: tuple[str, ...]
    size: int
    tensors: int
    objects: int
    manifest_sha256: str
    adopted: bool
    created_at: datetime | None
    committed_at: datetime
    recorded_at: datetime
    verified_at: datetime | None
    verified_level: str | None
    lease_owner: str | None
    lease_expires_at: datetime | None
    verify_failures: int
    retry_at: datetime | None

    @property
    def name(self) -> str:
        """``run@iteration``, as the command line takes it."""
        return f"{self.run}@{self.iteration}"

    @property
    def state(self) -> State:
        """Its two facts."""
        return State(self.lifecycle, self.verdict)

    @property
    def order(self) -> tuple[int, int, int]:
        """(attempt, iteration, seq): the one order of a run's checkpoints (W8); never times or names."""
        return (self.attempt, self.iteration, self.seq)


@dataclass(frozen=True)
class FileRow:
    """A file of a checkpoint; `path` is relative to its directory. `sha256` is None until somebody has read it."""

    path: str
    size: int
    sha256: str | None
    role: str
    origin: Origin


@dataclass(frozen=True)
class RunRow:
    """A run, with what `ckpt runs ls` shows.

    Attributes:
        checkpoints: how many are finalized.
        size: bytes of the finalized ones.
        newest: the newest finalized one's iteration.
        newest_verified: the newest verified one's iteration.
        newest_verified_at: when that one was committed.
        unverified: how many wait for verification.
        corrupt: how many are corrupt.
    """

    id: int
    name: str
    created_at: datetime
    attempts: int
    checkpoints: int
    size: int
    newest: int | None
    newest_verified: int | None
    newest_verified_at: datetime | None
    unverified: int
    corrupt: int
    roots: tuple[str, ...]


@dataclass(frozen=True)
class AttemptRow:
    """One process lifetime of a run; `resumed_from` is a save id."""

    number: int
    attempt_id: str
    resumed_from: str | None
    host: str | None
    pid: int | None
    topology: Topology | None
    started_at: datetime | None
    recorded_at: datetime


@dataclass(frozen=True)
class LocationRow:
    """A root of a run."""

    id: int
    run: str
    root_id: str | None
    url: str


@dataclass(frozen=True)
class EventRow:
    """Something that happened; `data` depends on `kind`."""

    id: int
    run: str
    checkpoint_id: int | None
    iteration: int | None
    save_id: str | None
    kind: str
    actor: str
    at: datetime
    data: Mapping[str, Any]


@dataclass(frozen=True)
class VerificationRow:
    """A finished verification.

    Attributes:
        outcome: ``ok``, ``corrupt``, ``unreadable`` or ``incomplete``.
        verdict: the checkpoint's verdict afterwards.
        counts: files per verdict.
        failed: file -> ``{"verdict": ..., "detail": ...}`` for every file that is not ok.
    """

    id: int
    checkpoint_id: int
    level: str
    outcome: str
    verdict: Verdict
    worker: str
    finished_at: datetime
    seconds: float
    bytes_read: int
    counts: Mapping[str, int]
    failed: Mapping[str, Mapping[str, str]]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class HoldRow:
    """A reason not to delete a checkpoint."""

    id: int
    checkpoint_id: int
    kind: str
    owner: str
    reason: str
    created_at: datetime
    expires_at: datetime | None
    released_at: datetime | None


@dataclass(frozen=True)
class VerifyLease:
    """The right to verify one checkpoint until `expires_at`; `token` proves it.

    Attributes:
        verdict, version: of the row when the lease was taken.
        size: bytes of all files.
        manifest_sha256, files: what to compare with (V1).
    """

    checkpoint_id: int
    run: str
    iteration: int
    save_id: str
    url: str
    root_url: str
    root_id: str | None
    format: str
    manifest_sha256: str
    verdict: Verdict
    owner: str
    token: str
    expires_at: datetime
    version: int
    size: int
    files: tuple[FileRow, ...] = field(repr=False, default=())

    @property
    def name(self) -> str:
        """``run@iteration``."""
        return f"{self.run}@{self.iteration}"
