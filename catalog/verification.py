"""Verifying a leased checkpoint: read it back, compare with the catalog's digests, write the verdict (S5, V1 to V4).

The same function serves `ckpt verify` and the flows. It may be killed at any moment: the lease then expires, and
somebody else starts over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from catalog import tracker
from catalog.catalog import Catalog
from catalog.entries import FOREIGN_PREFIX
from catalog.leases import backoff
from catalog.rows import VerifyLease
from catalog.states import level_for
from ckptlib import roots
from ckptlib import storage as st
from ckptlib.errors import (
    CkptError,
    DatabaseLockedError,
    LeaseHeldError,
    NoCatalogError,
    StaleWriteError,
    StorageUnavailableError,
    SupersededError,
)
from ckptlib.verification import Batches, VerifyReport, verify

log = logging.getLogger("catalog")

Progress = Callable[[int, int], None]

LEASE_SECONDS = 300.0


def verify_leased(
    catalog: Catalog,
    lease: VerifyLease,
    *,
    level: str = "data",
    threads: int = 2,
    progress: Progress | None = None,
    ttl: float = LEASE_SECONDS,
    batches: Batches | None = None,
    worker: str | None = None,
) -> VerifyReport:
    """Verifies a checkpoint and records the verdict. The lease is renewed while there is progress.

    Args:
        level: how deep to look; ``data``, ``store`` and ``auto`` can grant the verdict *verified*, to a corrupt one
            only ``data``: ``auto`` reads all of it.
        threads: files that are read at the same time.
        progress: called with (bytes done, bytes in all), from any thread.
        ttl: seconds for which the lease is renewed.
        batches: shares the reading out, for whoever schedules or shows it; None: all at once.
        worker: for the history; by default the lease's owner.

    Returns:
        The report whose verdict was recorded.

    Raises:
        LeaseHeldError, StaleWriteError: the lease was lost; the work stopped and nothing was written.
        StorageUnavailableError: the root is not there, or is another: nothing is known about the checkpoint (V2).
        CkptError, OSError: it cannot be verified at all. The work was given back, to be tried again later.
    """
    keeper = _Keeper(catalog, lease, ttl, progress)
    foreign = lease.save_id.startswith(FOREIGN_PREFIX)
    asked, level = level, level_for(level, lease.verdict)
    if level != asked:
        log.info("%s: is corrupt: all of it is read, whatever the store says of it", lease.name)
    try:
        _require_root(lease)
        report = verify(
            lease.url,
            level=level,
            save_id=None if foreign else lease.save_id,
            expected=expected_digests(lease),
            manifest_sha256=None if foreign else lease.manifest_sha256,
            threads=threads,
            progress=keeper,
            batches=batches,
        )
        if report.corrupt:
            # A storage that went away meanwhile makes files missing that are all there (D4).
            _require_root(lease)
    except (LeaseHeldError, StaleWriteError):
        raise
    except BaseException as error:
        _give_back(catalog, lease, error)
        if isinstance(error, SupersededError):
            _mark_gone(catalog, lease, error)
        raise
    before = catalog.checkpoint_by_id(lease.checkpoint_id)
    after = catalog.finish_verification(lease, report, level=report.level, worker=worker)
    if after.verdict != before.verdict:
        try:
            tracker.follow(catalog, after)
        except (OSError, CkptError) as error:
            log.warning("%s: the tracker file could not be looked after: %s", after.root_url, error)
    return report


def expected_digests(lease: VerifyLease) -> dict[str, tuple[int, str]]:
    """The catalog's copy of sizes and digests: path -> (size, SHA-256).

    Exports are left out: they belong to whichever save of the directory is the current one, and follow from its own
    files (W5).
    """
    return {
        file.path: (file.size, file.sha256) for file in lease.files if file.sha256 is not None and file.role != "export"
    }


def _require_root(lease: VerifyLease) -> None:
    """Checks that the root of the checkpoint is the one that was recorded (D4).

    Raises:
        StorageUnavailableError: it is absent, or another.
    """
    if lease.root_id is None:
        return
    storage, root = st.resolve(lease.root_url)
    found = roots.read_identity(storage, root)
    if found is None or found.root_id != lease.root_id:
        there = (
            "no .ckpt/root.json is there" if found is None else f"root {found.root_id} of run {found.run!r} is there"
        )
        raise StorageUnavailableError(
            f"{lease.root_url}: expected root {lease.root_id}, but {there}. Nothing was judged. "
            "Is the storage mounted? If the root was moved, run `ckpt scan NEW_ROOT --adopt`."
        )


def _give_back(catalog: Catalog, lease: VerifyLease, error: BaseException) -> None:
    """Releases the lease: at once when somebody stopped the work, later when it failed."""
    retry_after = None
    if isinstance(error, Exception):
        try:
            retry_after = backoff(catalog.checkpoint_by_id(lease.checkpoint_id).verify_failures + 1)
        except CkptError:
            log.debug("%s: its failures could not be counted", lease.name, exc_info=True)
            retry_after = backoff(1)
    try:
        catalog.release(lease, reason=f"{type(error).__name__}: {error}", retry_after=retry_after)
    except CkptError as other:
        log.warning("%s: the lease was not given back (%s); it expires by itself", lease.name, other)


def _mark_gone(catalog: Catalog, lease: VerifyLease, error: SupersededError) -> None:
    """A checkpoint whose place another has taken waits for nothing any more: it is missing, if its root is there."""
    try:
        _require_root(lease)
        catalog.mark_missing(lease.checkpoint_id, reason=str(error), actor=lease.owner, version=lease.version)
    except (OSError, CkptError) as other:
        log.warning("%s: is gone and could not be marked missing: %s", lease.name, other)


class _Keeper:
    """Passes progress on, and renews the lease when a third of it has gone. Called from any thread."""

    def __init__(self, catalog: Catalog, lease: VerifyLease, ttl: float, progress: Progress | None) -> None:
        self._catalog = catalog
        self._lease = lease
        self._ttl = ttl
        self._progress = progress
        self._lock = threading.Lock()
        self._renewed = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Raises LeaseHeldError or StaleWriteError when the lease was lost: that stops the verification."""
        with self._lock:
            due = time.monotonic() - self._renewed > self._ttl / 3
            if due:
                self._renewed = time.monotonic()
        if due:
            try:
                self._catalog.renew(self._lease, self._ttl)
            except (NoCatalogError, DatabaseLockedError) as error:
                # Whether the lease still counts is decided when the verdict is written.
                log.warning("%s: the lease could not be renewed: %s", self._lease.name, error)
        if self._progress is not None:
            self._progress(done, total)
