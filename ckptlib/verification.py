"""Whether the bytes on storage are those that were written (rules V1 to V4). Only reads; unpickles plain data alone.

Levels: ``listing`` compares names and sizes; ``store`` also the digests that a store computed over what it keeps,
without reading any payload; ``structure`` that every tensor is tiled exactly once and every item parses; ``data`` also
re-reads and hashes every byte. Only ``store`` and ``data`` justify the verdict *verified* (V3). ``auto`` takes the
store's word where it has one and reads the rest: it comes to ``store``, or to ``data``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ckptlib import commit, roots
from ckptlib import storage as st
from ckptlib.errors import NotACheckpointError, SupersededError, UnsupportedError
from ckptlib.verify_files import (
    BAD,
    Asked,
    Batches,
    FileCheck,
    FileChecker,
    Findings,
    Level,
    Origin,
    Progress,
    Verdict,
    describe,
)
from ckptlib.verify_foreign import verify_foreign
from ckptlib.verify_save import Copies, find_subject, verify_save

__all__ = ["Asked", "Batches", "FileCheck", "Level", "Origin", "Verdict", "VerifyReport", "verify"]


@dataclass(frozen=True)
class VerifyReport:
    """What a verification found.

    Attributes:
        url: the checkpoint's directory.
        level: how deep it looked; never ``auto``: what that came to.
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
    def unverifiable(self) -> bool:
        """Of something the store keeps no digest that could be compared, so only reading it would tell."""
        return any(check.verdict == "unverifiable" for check in self.checks.values())

    @property
    def ok(self) -> bool:
        """Everything that this level looks at is as it was written."""
        return not (self.corrupt or self.unreadable or self.unverifiable)

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, one sentence each; files that are unverifiable for one reason are one sentence."""
        bad: list[str] = []
        unverifiable: dict[str, list[str]] = defaultdict(list)
        for name, check in self.checks.items():
            if check.verdict == "unverifiable":
                unverifiable[check.detail].append(name)
            elif check.verdict not in ("ok", "extra"):
                bad.append(f"{name}: {check.verdict}: {check.detail}")
        bad += [f"{_named(names)}: unverifiable: {detail}" for detail, names in unverifiable.items()]
        return (*bad, *self.defects)


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} files ({names[0]} is the first)"


def verify(
    url: str,
    *,
    level: str = "data",
    save_id: str | None = None,
    expected: Mapping[str, tuple[int, str]] | None = None,
    manifest_sha256: str | None = None,
    threads: int = 2,
    progress: Progress | None = None,
    batches: Batches | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Compares a checkpoint with its digests: the catalog's copy first, then its manifest's (V1).

    A damaged, hostile or missing file is a verdict, not an error; a file that cannot be read is neither (V2).

    Args:
        url: the iteration directory.
        level: ``listing``, ``store``, ``structure``, ``data`` or ``auto``.
        save_id: which save; None: the newest committed one.
        expected: the catalog's copy: path -> (size, SHA-256). With it the checkpoint counts as one that was
            committed, so that a deleted commit decision is a missing file.
        manifest_sha256: the catalog's copy of the manifest's digest: what a store says is compared with digests of
            parts, which are in the manifest alone.
        threads: files that are read at the same time; each takes 12 MiB at most, 36 MiB from S3.
        progress: called with (bytes done, bytes in all).
        batches: shares the reading out, for whoever schedules or shows it; None: all at once.

    Raises:
        NotACheckpointError: nothing here is a checkpoint, or it was deleted.
        UncommittedError: a save began here and was never committed.
        UnsupportedError: a format that cannot be verified, or an unknown level.
    """
    started = time.perf_counter()
    storage, path = st.resolve(url, storage_options)
    checker = FileChecker(storage, path, level=_check_level(level), threads=threads, progress=progress, batches=batches)
    copies = Copies(expected or {}, manifest_sha256)
    try:
        save_id, found = _verify(storage, path, save_id, checker, copies)
    except NotACheckpointError:  # a FileNotFoundError too
        raise
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        found = Findings({".": FileCheck("unreadable", detail=f"{where}{describe(error)}")})
    return VerifyReport(
        url=storage.url(path),
        level=checker.level,
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
    copies: Copies,
) -> tuple[str | None, Findings]:
    expected = copies.files
    if expected and not storage.list(path) and roots.read_identity(storage, commit.root_of(path)) is None:
        # D4: without the root's identity nothing can be said to be missing.
        detail = "neither the directory nor its root's identity is there; is the storage mounted?"
        checks = {name: FileCheck("unreadable", None, None, sha, None, detail) for name, (_, sha) in expected.items()}
        return save_id, Findings(checks)
    _require_not_superseded(storage, path)
    subject = find_subject(storage, path, save_id, expected)
    if subject is None:
        return None, verify_foreign(storage, path, checker, expected=expected)
    found = verify_save(storage, path, subject, checker, copies)
    if any(check.verdict == "missing" for check in found.checks.values()):
        _require_not_superseded(storage, path)  # removed meanwhile: that is no damage
        find_subject(storage, path, subject, expected)
    return subject, found


def _require_not_superseded(storage: st.Storage, path: str) -> None:
    """A non-persistent checkpoint goes, with its directory, when a newer one is committed."""
    if st.basename(st.parent(path)) == roots.NON_PERSISTENT and not storage.list(path):
        raise SupersededError(f"{storage.url(path)}: gone: a newer non-persistent checkpoint has taken its place")


def _check_level(level: str) -> Asked:
    levels = (*get_args(Level), "auto")
    if level not in levels:
        raise UnsupportedError(f"level {level!r}: expected one of {', '.join(levels)}")
    return level  # type: ignore[return-value]
