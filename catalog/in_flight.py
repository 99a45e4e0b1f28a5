"""Saves that are being written now. The catalog learns of a save at its commit; until then storage alone knows (W7)."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime

from catalog.catalog import Catalog
from catalog.entries import moment
from catalog.rows import LocationRow
from ckptlib import beats, commit, roots
from ckptlib import storage as st
from ckptlib.errors import CkptError
from ckptlib.manifest import Begin

log = logging.getLogger("catalog")


@dataclass(frozen=True)
class Writing:
    """A save that has begun, and of which nobody knows yet what becomes of it.

    Attributes:
        begun_at: by the writer's clock.
        silent: seconds since its last sign of life, by our clock and the writer's; None: it gave none (yet).
    """

    run: str
    url: str
    begin: Begin
    begun_at: datetime | None
    progress: beats.InFlight
    silent: float | None

    def __str__(self) -> str:
        """``writing 63 %``."""
        return f"writing {self.progress}"

    @property
    def alive(self) -> bool:
        """Whether it gives signs of life; clocks that differ may hide them."""
        return self.silent is not None and not self.overdue

    @property
    def overdue(self) -> bool:
        """Whether the next sign of life should have come; clocks that differ may say so too."""
        return self.silent is not None and self.silent > beats.STILL * self.progress.interval


def look(storage: st.Storage, path: str, run: str, begin: Begin) -> Writing:
    """How far an undecided save is."""
    progress = beats.look(storage, path, begin)
    silent = None if progress.seen_at is None else max(0.0, time.time() - progress.seen_at)
    return Writing(run, storage.url(path), begin, moment(begin.created_at), progress, silent)


def saves_in_flight(catalog: Catalog, run: str | None = None) -> tuple[list[Writing], list[str]]:
    """The saves in flight below the roots that the catalog knows, in their order; and what could not be looked at.

    One listing for each iteration directory; records are read only of saves that the catalog does not know.

    Args:
        run: only of this run.
    """
    found: list[Writing] = []
    problems: list[str] = []
    for place in catalog.locations(run):
        known = {row.save_id for row in catalog.checkpoints(place.run)}
        try:
            found += _below(place, known)
        except (OSError, ValueError, CkptError) as error:
            problems.append(f"{place.url}: {error}")
    return sorted(found, key=lambda one: (one.run, one.begin.attempt, one.begin.iteration, one.begin.save_id)), problems


def _below(place: LocationRow, known: Collection[str]) -> Iterator[Writing]:
    storage, root = st.resolve(place.url)
    for name, directory in roots.list_root(storage, root):
        path = st.join(root, name)
        if directory is None or all(save_id in known for save_id in commit.save_ids(storage, path)):
            continue
        for save in commit.list_saves(storage, path):
            if save.undecided and save.begin is not None and save.begin.run in (None, place.run):
                yield look(storage, path, place.run, save.begin)
