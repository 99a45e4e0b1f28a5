"""What there is to record of a checkpoint, ours or foreign, in one shape. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from catalog.rows import Origin
from ckptlib.errors import CatalogError
from ckptlib.events import CommitEvent
from ckptlib.manifest import Manifest
from ckptlib.topology import Topology

FOREIGN_ATTEMPT = -1
"""Checkpoints that others wrote come before all attempts, as `ckptlib.roots` orders them."""

FOREIGN_PREFIX = "foreign-"
"""Begins the save id of a checkpoint that others wrote; the rest is the digest of its metadata (S3)."""

_SAVE_ID = re.compile(r"(\d{6,})-[0-9a-f]{12}-[0-9a-f]{8}")


@dataclass(frozen=True)
class NewFile:
    """A file to record; `sha256` is None when nobody has computed it (origin ``first-read``)."""

    path: str
    size: int
    sha256: str | None
    role: str
    origin: Origin = "writer"
    part_size: int | None = None
    part_sha256: tuple[str, ...] = ()


@dataclass(frozen=True)
class NewCheckpoint:
    """A checkpoint to record, ours or foreign.

    Attributes:
        manifest_sha256: what tells two saves with one id apart; for foreign ones the digest of their metadata.
        parent: save id of the checkpoint that it was trained from: in its own attempt, or the one resumed from.
        adopted: found by a scan, not reported at its commit.
        decided_at: seconds since the epoch by the decider's clock; None when nobody knows.
    """

    run: str
    root_url: str
    root_id: str | None
    path: str
    save_id: str
    iteration: int
    manifest_sha256: str
    files: tuple[NewFile, ...]
    size: int
    attempt: int = FOREIGN_ATTEMPT
    attempt_id: str | None = None
    kind: str = "persistent"
    semantic_type: str = "GLOBAL"
    format: str = "torch_dist"
    io_mode: str = "sync"
    topology: Topology | None = None
    contents: tuple[str, ...] = ()
    progress: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    parent: str | None = None
    replaces: tuple[str, ...] = ()
    tensors: int = 0
    objects: int = 0
    adopted: bool = False
    created_at: float | None = None
    decided_at: float | None = None


def moment(seconds: float | None) -> datetime | None:
    """Seconds since the epoch as a time in UTC; None for none, and for what no calendar can say."""
    if seconds is None or seconds <= 0:
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None


def attempt_of(save_id: str | None) -> int | None:
    """The attempt that a save of ours belongs to, from its id; None for others."""
    match = _SAVE_ID.fullmatch(save_id or "")
    return None if match is None else int(match[1])


def from_commit(event: CommitEvent, *, run: str | None = None, adopted: bool = False) -> NewCheckpoint:
    """What to record for a commit.

    Args:
        run: whose root it lies in, for a save that does not say.

    Raises:
        CatalogError: the save names no run, or lies outside the root it claims.
    """
    manifest = event.manifest
    begin = manifest.begin
    run = begin.run or run
    if not run:
        raise CatalogError(
            f"{event.url}: the save names no run, and the catalog files checkpoints by run. "
            "Save with run=..., or through a Checkpointer."
        )
    url = event.url.rstrip("/")
    root_url = (event.root_url or url.rpartition("/")[0]).rstrip("/")
    path = url.removeprefix(f"{root_url}/")
    if path == url:
        raise CatalogError(f"{event.url}: not below its root {event.root_url}")
    return NewCheckpoint(
        run=run,
        root_url=root_url,
        root_id=event.root_id,
        path=path,
        save_id=begin.save_id,
        iteration=begin.iteration,
        manifest_sha256=event.manifest_sha256,
        files=files_of(manifest, event.manifest_sha256),
        size=manifest.size,
        attempt=begin.attempt,
        attempt_id=begin.attempt_id,
        kind=begin.kind,
        semantic_type=begin.semantic_type,
        format=begin.format,
        io_mode=begin.io_mode,
        topology=begin.topology,
        contents=begin.contents,
        progress=begin.progress,
        metrics=begin.metrics,
        parent=begin.parent,
        replaces=begin.replaces,
        tensors=manifest.tensors,
        objects=manifest.objects,
        adopted=adopted,
        created_at=begin.created_at,
        decided_at=event.decision.decided_at,
    )


def files_of(manifest: Manifest, manifest_sha256: str) -> tuple[NewFile, ...]:
    """Every file of a save of ours with its digest: its own files, the manifest itself, the exports derived from it."""
    size = len(manifest.encode())
    own = [
        NewFile(e.path, e.size, e.sha256, e.role, part_size=e.part_size, part_sha256=e.part_sha256)
        for e in manifest.files
    ]
    own.append(NewFile(f".ckpt/{manifest.begin.save_id}/manifest.json", size, manifest_sha256, "manifest"))
    exports = [NewFile(name, length, digest, "export") for name, (length, digest) in manifest.exports.items()]
    exports.append(NewFile("checkpoint.json", size, manifest_sha256, "export"))
    return (*own, *exports)
