"""What storage alone knows: the catalog learns of a save at its commit (W7), and of that when somebody tells it."""

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


@dataclass(frozen=True)
class Unrecorded:
    """A checkpoint that the catalog does not know: whoever committed it has not told (yet)."""

    run: str
    url: str
    begin: Begin
    committed_at: datetime | None


def look(storage: st.Storage, path: str, run: str, begin: Begin) -> Writing:
    """How far an undecided save is."""
    progress = beats.look(storage, path, begin)
    silent = None if progress.seen_at is None else max(0.0, time.time() - progress.seen_at)
    return Writing(run, storage.url(path), begin, moment(begin.created_at), progress, silent)


def beyond_the_catalog(catalog: Catalog, run: str | None = None) -> tuple[list[Writing], list[Unrecorded], list[str]]:
    """What lies below the roots that the catalog knows, and is not in it; and what could not be looked at.

    Saves in flight, in their order, and what was committed and not recorded.

    One listing for each iteration directory; records are read only of saves that the catalog does not know.

    Args:
        run: only of this run.
    """
    found: list[Writing | Unrecorded] = []
    problems: list[str] = []
    for place in catalog.locations(run):
        known = {row.save_id for row in catalog.checkpoints(place.run)}
        try:
            found += _below(place, known)
        except (OSError, ValueError, CkptError) as error:
            problems.append(f"{place.url}: {error}")
    found.sort(key=lambda one: (one.run, one.begin.attempt, one.begin.iteration, one.begin.save_id))
    writing = [one for one in found if isinstance(one, Writing)]
    return writing, [one for one in found if isinstance(one, Unrecorded)], problems


def _below(place: LocationRow, known: Collection[str]) -> Iterator[Writing | Unrecorded]:
    storage, root = st.resolve(place.url)
    for name, directory in roots.list_root(storage, root):
        path = st.join(root, name)
        if directory is None or all(save_id in known for save_id in commit.save_ids(storage, path)):
            continue
        for save in commit.list_saves(storage, path):
            if save.save_id in known or save.begin is None or save.begin.run not in (None, place.run):
                continue
            if save.undecided:
                yield look(storage, path, place.run, save.begin)
            elif save.committed and save.decision is not None:
                yield Unrecorded(place.run, storage.url(path), save.begin, moment(save.decision.decided_at))
