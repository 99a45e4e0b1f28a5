"""Below the roots that the catalog knows: what dead processes left of uploads, discarded by age. No Prefect in here.

A new attempt of a run does this for its own root (W8); a run that never starts again has nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass

from catalog.catalog import Catalog
from ckptlib import orphans
from ckptlib import storage as st
from ckptlib.errors import CkptError


@dataclass(frozen=True)
class CleanupPlan:
    """What would be discarded.

    Attributes:
        roots: one plan for each root.
        problems: roots that could not be looked at, and why.
    """

    roots: tuple[orphans.OrphanPlan, ...]
    problems: tuple[str, ...] = ()

    @property
    def discard(self) -> tuple[orphans.Orphan, ...]:
        """Of all roots."""
        return tuple(orphan for root in self.roots for orphan in root.discard)

    @property
    def keep(self) -> tuple[orphans.Orphan, ...]:
        """Of all roots."""
        return tuple(orphan for root in self.roots for orphan in root.keep)

    def __str__(self) -> str:
        """For people."""
        foreign = sum(root.foreign for root in self.roots)
        return (
            f"{len(self.discard)} unfinished uploads to discard, {len(self.keep)} of saves that may still be written, "
            f"{foreign} of others"
        )


def plan_cleanup(catalog: Catalog, *, older_than: float, run: str | None = None) -> CleanupPlan:
    """Looks at every root once; changes nothing.

    Args:
        older_than: seconds; see `ckptlib.orphans.by_age`.
        run: only this run's roots.
    """
    plans: list[orphans.OrphanPlan] = []
    problems: list[str] = []
    for url in dict.fromkeys(place.url for place in catalog.locations(run)):
        try:
            plans.append(orphans.plan_by_age(*st.resolve(url), older_than=older_than))
        except (OSError, ValueError, CkptError) as error:
            problems.append(f"{url}: {error}")
    return CleanupPlan(tuple(plans), tuple(problems))


def apply_cleanup(plan: CleanupPlan) -> dict[str, str]:
    """Discards what the plan says. Twice is no error.

    Returns:
        What could not be discarded, by path, and why; one sentence each.
    """
    left: dict[str, str] = {}
    for root in plan.roots:
        if root.discard:
            storage, _ = st.resolve(root.url)
            left |= {path: f"{storage.url(path)}: {error}" for path, error in orphans.apply(storage, root).items()}
    return left
