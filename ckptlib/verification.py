"""Whether the bytes on storage are those that were written (rules V1 to V4). Only reads; unpickles plain data alone.

Levels: ``listing`` compares names and sizes; ``structure`` also that every tensor is tiled exactly once and every item
parses; ``data`` also re-reads and hashes every byte. ``store`` (digests that the store computed itself) needs a store
that computes them. Only ``store`` and ``data`` justify the verdict *verified* (V3).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ckptlib import commit, roots
from ckptlib import storage as st
from ckptlib.errors import NotACheckpointError, SupersededError, UnsupportedError
from ckptlib.verify_files import BAD, Batches, FileCheck, FileChecker, Findings, Origin, Progress, Verdict, describe
from ckptlib.verify_foreign import verify_foreign
from ckptlib.verify_save import find_subject, verify_save

__all__ = ["Batches", "FileCheck", "Level", "Origin", "Verdict", "VerifyReport", "verify"]

Level = Literal["listing", "store", "structure", "data"]


@dataclass(frozen=True)
class VerifyReport:
    """What a verification found.

    Attributes:
        url: the checkpoint's directory.
        level: how deep it looked.
        save_id: None for a foreign checkpoint.
        checks: one per file, by path relative to the directory.
        defects: what is wrong beyond single files: a tensor with a hole, a manifest that the catalog contradicts.
        bytes_read: of file content.
        seconds: wall time.
    """

    url: str
    level: Level
    save_id: str | None
    checks: Mapping[str, FileCheck]
    defects: tuple[str, ...] = ()
    bytes_read: int = 0
    seconds: float = 0.0

    @property
    def files(self) -> dict[str, str]:
        """Verdict of each file (V2)."""
        return {name: check.verdict for name, check in self.checks.items()}

    @property
    def corrupt(self) -> bool:
        """Something is not what was written."""
        return bool(self.defects) or any(check.verdict in BAD for check in self.checks.values())

    @property
    def unreadable(self) -> bool:
        """Something could not be read, so nothing is known about it."""
        return any(check.verdict == "unreadable" for check in self.checks.values())

    @property
    def ok(self) -> bool:
        """Everything that this level looks at is as it was written."""
        return not (self.corrupt or self.unreadable)

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, one sentence each."""
        bad = [(name, check) for name, check in self.checks.items() if check.verdict not in ("ok", "extra")]
        return (*(f"{name}: {check.verdict}: {check.detail}" for name, check in bad), *self.defects)


def verify(
    url: str,
    *,
    level: str = "data",
    save_id: str | None = None,
    expected: Mapping[str, tuple[int, str]] | None = None,
    threads: int = 2,
    progress: Progress | None = None,
    batches: Batches | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Compares a checkpoint with its digests: the catalog's copy first, then its manifest's (V1).

    A damaged, hostile or missing file is a verdict, not an error; a file that cannot be read is neither (V2).

    Args:
        url: the iteration directory.
        level: ``listing``, ``structure`` or ``data``.
        save_id: which save; None: the newest committed one.
        expected: the catalog's copy: path -> (size, SHA-256). With it the checkpoint counts as one that was
            committed, so that a deleted commit decision is a missing file.
        threads: files that are read at the same time; each takes 8 MiB.
        progress: called with (bytes done, bytes in all).
        batches: shares the reading out, for whoever schedules or shows it; None: all at once.

    Raises:
        NotACheckpointError: nothing here is a checkpoint, or it was deleted.
        UncommittedError: a save began here and was never committed.
        UnsupportedError: a format that cannot be verified, an unknown level, or one that this storage cannot serve.
    """
    started = time.perf_counter()
    storage, path = st.resolve(url, storage_options)
    checked_level = _check_level(level, storage)
    checker = FileChecker(storage, path, read=level == "data", threads=threads, progress=progress, batches=batches)
    try:
        save_id, found = _verify(storage, path, save_id, checker, level != "listing", expected or {})
    except NotACheckpointError:  # a FileNotFoundError too
        raise
    except OSError as error:
        found = Findings({".": FileCheck("unreadable", detail=describe(error))})
    return VerifyReport(
        url=storage.url(path),
        level=checked_level,
        save_id=save_id,
        checks=dict(sorted(found.checks.items())),
        defects=tuple(found.defects),
        bytes_read=checker.bytes_read,
        seconds=time.perf_counter() - started,
    )


def _verify(
    storage: st.Storage,
    path: str,
    save_id: str | None,
    checker: FileChecker,
    deep: bool,
    expected: Mapping[str, tuple[int, str]],
) -> tuple[str | None, Findings]:
    if expected and not storage.list(path) and roots.read_identity(storage, commit.root_of(path)) is None:
        # D4: without the root's identity nothing can be said to be missing.
        detail = "neither the directory nor its root's identity is there; is the storage mounted?"
        checks = {name: FileCheck("unreadable", None, None, sha, None, detail) for name, (_, sha) in expected.items()}
        return save_id, Findings(checks)
    _require_not_superseded(storage, path)
    subject = find_subject(storage, path, save_id, expected)
    if subject is None:
        return None, verify_foreign(storage, path, checker, deep=deep, expected=expected)
    found = verify_save(storage, path, subject, checker, deep=deep, expected=expected)
    if any(check.verdict == "missing" for check in found.checks.values()):
        _require_not_superseded(storage, path)  # removed meanwhile: that is no damage
        find_subject(storage, path, subject, expected)
    return subject, found


def _require_not_superseded(storage: st.Storage, path: str) -> None:
    """A non-persistent checkpoint goes, with its directory, when a newer one is committed."""
    if st.basename(st.parent(path)) == roots.NON_PERSISTENT and not storage.list(path):
        raise SupersededError(f"{storage.url(path)}: gone: a newer non-persistent checkpoint has taken its place")


def _check_level(level: str, storage: st.Storage) -> Level:
    if level not in get_args(Level):
        raise UnsupportedError(f"level {level!r}: expected one of {', '.join(get_args(Level))}")
    if level == "store":
        raise UnsupportedError(
            f"level 'store': {storage.capabilities.name} storage computes no digests of its own, so nothing can be "
            "verified without reading it; use level 'data'"
        )
    return level  # type: ignore[return-value]
