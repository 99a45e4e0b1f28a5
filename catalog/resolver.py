"""The catalog as the one who decides what a trainer resumes from (R2)."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from catalog import resume
from catalog.catalog import Catalog
from catalog.entries import FOREIGN_PREFIX
from catalog.rows import CheckpointRow
from catalog.states import Grant
from ckptlib import commit, formats, roots
from ckptlib import storage as st
from ckptlib.errors import CkptError, NoResumePointError
from ckptlib.events import ResumeChoice

log = logging.getLogger("catalog")


@dataclass(frozen=True)
class ResumeResolver:
    """A `ckptlib.events.Resolver`: the newest verified checkpoint of the run's live branch.

    Asked once, on rank 0. When the catalog cannot be used, its error reaches the `Checkpointer`, which then asks the
    storage instead (S4); when it knows nothing of the run, so does the answer None.

    Attributes:
        db_url: as for `Catalog`.
        allow_unverified: also take what nobody has verified yet.
        require: ``data``: only what was read back, not what a store vouched for.
        timeout: seconds to wait for a locked or unreachable database.
        storage_options: as given to the `Checkpointer`, to look whether a checkpoint is still there.
    """

    db_url: str | None = None
    allow_unverified: bool = False
    require: Grant = "store"
    timeout: float = 10.0
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def resolve(self, *, run: str, root_url: str, at: int | None) -> ResumeChoice | None:
        """The resume point; None when the catalog knows no checkpoint of the run.

        Raises:
            NoResumePointError: there are checkpoints and none is eligible, or none is at iteration `at`; with the
                reason for each.
            CatalogError: the catalog cannot be used.
        """
        with Catalog(self.db_url, timeout=self.timeout) as catalog:
            rows = resume.newest_first(catalog.checkpoints(run))
        if not rows:
            return None
        storage, root = st.resolve(root_url, self.storage_options)
        identity = roots.read_identity(storage, root)
        here = _Here(storage, root, None if identity is None else identity.root_id, self.storage_options)
        request = resume.Request(run, at=at, allow_unverified=self.allow_unverified, require=self.require)
        while True:
            found = resume.select(rows, request)
            if isinstance(found, resume.NoneYet):
                return None
            if isinstance(found, resume.NotEligible):
                level = " --level data" if self.require == "data" else ""
                raise NoResumePointError(
                    f"{found.message}. Verify with `ckpt verify {shlex.quote(run)}{level}`, find unknown ones with "
                    f"`ckpt scan {shlex.quote(root_url)} --adopt`, or resume with allow_unverified=True.",
                    rejected=[(f"{row.name} ({row.save_id})", reason) for row, reason in found.rejected],
                )
            if here.holds(found.row):
                return self._choice(found, here, {row.save_id for row in rows})
            log.warning("%s: recorded at %s, but it is not there; see `ckpt scan`", found.row.name, found.row.url)
            gone = found.row.id
            rows = [replace(row, lifecycle="missing") if row.id == gone else row for row in rows]

    def _choice(self, found: resume.Found, here: _Here, known: set[str]) -> ResumeChoice:
        row = found.row
        reason = f"newest {row.verdict} checkpoint of run {row.run!r}"
        if found.rejected_newer:
            newest, why = found.rejected_newer[0]
            reason += f"; {len(found.rejected_newer)} newer rejected, the newest, iteration {newest.iteration}, {why}"
        unknown = here.newer_unknown(row, known)
        if unknown is not None:
            reason += f"; iteration {unknown.iteration} on storage is newer and not in the catalog"
            log.warning("%s: newer than the resume point and unknown to the catalog: `ckpt scan --adopt`", unknown.url)
        save_id = None if row.save_id.startswith(FOREIGN_PREFIX) else row.save_id
        return ResumeChoice(here.url(row), row.iteration, save_id, reason)


@dataclass(frozen=True)
class _Here:
    """The root that the trainer stands in, which may have been moved since it was recorded."""

    storage: st.Storage
    root: str
    root_id: str | None
    storage_options: Mapping[str, Any] | None = field(repr=False)

    def _is_here(self, row: CheckpointRow) -> bool:
        if self.root_id is not None and row.root_id is not None:
            return row.root_id == self.root_id
        return row.root_url == self.storage.url(self.root)

    def url(self, row: CheckpointRow) -> str:
        """Where the checkpoint is, as seen from here."""
        return self.storage.url(st.join(self.root, row.path)) if self._is_here(row) else row.url

    def holds(self, row: CheckpointRow) -> bool:
        """R1: whether it is (still) a committed checkpoint."""
        storage, path = self.storage, st.join(self.root, row.path)
        if not self._is_here(row):
            storage, path = st.resolve(row.url, self.storage_options)
        if not row.save_id.startswith(FOREIGN_PREFIX):
            return commit.read_recorded_save(storage, path, row.save_id).committed
        return formats.is_foreign_complete(storage, path, row.format)[0]

    def newer_unknown(self, row: CheckpointRow, known: set[str]) -> roots.Found | None:
        """The newest committed save on storage, if it comes after `row` and the catalog does not know it."""
        try:
            newest = roots.newest_committed(self.storage, self.root)
        except (CkptError, OSError) as error:
            log.warning("%s: cannot be listed: %s", self.storage.url(self.root), error)
            return None
        if newest is None or newest.save is None or newest.save.save_id in known:
            return None
        return newest if newest.order[:2] > (row.attempt, row.iteration) else None


CatalogResolver = ResumeResolver
