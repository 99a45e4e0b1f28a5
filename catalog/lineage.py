"""Which checkpoints of a run are on the live branch, and which a rollback left behind. Pure.

A run that resumes from an older checkpoint forks its history. The fork is decided when the new attempt's first
checkpoint is verified (until then the old branch may still be needed): from then on, only what that attempt descends
from is live, and the rest of the older attempts is abandoned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from catalog.states import Branch


@dataclass(frozen=True)
class Node:
    """A checkpoint, as far as lineage goes.

    Attributes:
        verified: it was verified once, whatever happened to it since.
        branch: what the catalog says now.
    """

    id: int
    attempt: int
    iteration: int
    save_id: str
    verified: bool
    branch: Branch = "live"


def branches(nodes: Sequence[Node], resumed_from: Mapping[int, str]) -> dict[int, Branch]:
    """The branch of every checkpoint of one run.

    The newest attempt with a verified checkpoint is the tip. Live are its checkpoints, those of its parent attempt up
    to the one it resumed from, and so on upwards; the others of attempts up to the tip are abandoned. Attempts after
    the tip have proved nothing yet, so theirs stay what they are.

    Where an attempt's parent is not known (a foreign checkpoint, a lost record), only what cannot be an ancestor
    counts as left behind: what older attempts saved beyond its first checkpoint.

    Args:
        nodes: all checkpoints of the run; releases, which belong to no branch, left out.
        resumed_from: attempt number -> save id that it resumed from, where known.

    Returns:
        id -> branch, for every node.
    """
    result: dict[int, Branch] = {node.id: node.branch for node in nodes}
    proven = [node.attempt for node in nodes if node.verified]
    if not proven:
        return result
    by_save = {node.save_id: node for node in nodes}
    tip = max(proven)
    first = {node.attempt: node.iteration for node in sorted(nodes, key=lambda node: -node.iteration)}

    # Per attempt on the path from the tip upwards: the last iteration that the next one descends from.
    limits: dict[int, int | None] = {tip: None}
    oldest = tip
    while True:
        parent = by_save.get(resumed_from.get(oldest, ""))
        if parent is None or parent.attempt >= oldest:
            break
        oldest = parent.attempt
        limits[oldest] = parent.iteration

    for node in nodes:
        if node.attempt > tip:
            continue
        if node.attempt in limits:
            limit = limits[node.attempt]
            live = limit is None or node.iteration <= limit
        elif node.attempt > oldest:
            live = False
        else:
            live = node.iteration <= _least(first.get(oldest), limits[oldest])
        result[node.id] = "live" if live else "abandoned"
    return result


def _least(first: int | None, limit: int | None) -> int:
    """The first iteration that the oldest known ancestor attempt contributes; nothing beyond it is an ancestor."""
    known = [value for value in (first, limit) if value is not None]
    return min(known, default=0)
