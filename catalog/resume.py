"""Where does a run resume? Selection over the catalog's rows (R2, R6, V4). Pure.

One predicate decides: a checkpoint is eligible when it is finalized, on the live branch, verified (or, where asked
for, not yet verified), of a kind that is selected, and holds what the purpose needs. Of the eligible ones the newest
in the order (attempt, iteration, seq) wins; names and times never decide. An explicit iteration is exact or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from catalog.rows import CheckpointRow
from catalog.states import GRANTS, Grant
from ckptlib.errors import UnsupportedError

Purpose = Literal["train", "eval"]

NEEDS: dict[str, frozenset[str]] = {"train": frozenset({"model", "optimizer"}), "eval": frozenset({"model"})}
DEFAULT_KINDS: frozenset[str] = frozenset({"persistent", "non_persistent_global"})
"""Releases only on request; copies on a host's own disk cannot be judged from here."""

REASONS: dict[str, str] = {
    "unverified": "is not verified yet",
    "unverifiable": "is unverifiable: its store keeps no digests to compare with, and nobody has read it back",
}
"""Why a checkpoint is not taken unless that is allowed, by its verdict."""

Rejected = tuple[tuple[CheckpointRow, str], ...]


@dataclass(frozen=True)
class Found:
    """The resume point, and why each newer candidate is not it (newest first)."""

    row: CheckpointRow
    rejected_newer: Rejected = ()


@dataclass(frozen=True)
class NoneYet:
    """The run has no checkpoint at all: it starts from the beginning."""

    run: str


@dataclass(frozen=True)
class NotEligible:
    """There are checkpoints, and none can be resumed from (or none is at the iteration asked for).

    Attributes:
        rejected: every candidate with the reason, newest first.
        message: one sentence for people.
    """

    run: str
    rejected: Rejected
    message: str


Selection = Found | NoneYet | NotEligible


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        at: exactly this iteration; 0 is one (R6).
        require: level of the verification, at least; not asked for with `allow_unverified`.
        kinds: which kinds may be selected.

    Raises:
        UnsupportedError: the purpose, or what is required, does not exist.
    """

    run: str
    at: int | None = None
    purpose: Purpose = "train"
    allow_unverified: bool = False
    require: Grant = "store"
    kinds: frozenset[str] = DEFAULT_KINDS

    def __post_init__(self) -> None:
        if self.purpose not in NEEDS:
            raise UnsupportedError(f"purpose {self.purpose!r}: expected one of {', '.join(sorted(NEEDS))}")
        if self.require not in GRANTS:
            raise UnsupportedError(f"require {self.require!r}: expected one of {', '.join(GRANTS)}")


def why_not(row: CheckpointRow, request: Request) -> str | None:
    """Why this checkpoint cannot be resumed from; None when it can. The one predicate."""
    if row.lifecycle != "finalized":
        return f"is {row.lifecycle}"
    if row.verdict == "corrupt":
        return "is corrupt: its bytes are not what was written"
    if row.verdict == "suspect":
        return "is suspect: a resume from it failed"
    if row.verdict != "verified" and not request.allow_unverified:
        return REASONS.get(row.verdict, f"is {row.verdict}")
    if row.verdict == "verified" and request.require == "data" != row.verified_level and not request.allow_unverified:
        return "is verified by the store's digests only, and was to be read back"
    if row.kind not in request.kinds:
        return f"is of kind {row.kind}, which is only used on request"
    if row.semantic_type == "LOCAL" and request.at is None:
        return "is every rank's own state (LOCAL), which is only used when its iteration is named"
    if row.branch != "live":
        return "is on a branch that a rollback abandoned; load it by its URL if it is meant"
    missing = NEEDS[request.purpose] - set(row.contents)
    if missing:
        return f"holds no {' and no '.join(sorted(missing))}, needed to {request.purpose}"
    return None


def is_candidate(row: CheckpointRow) -> bool:
    """Whether the row ever was a checkpoint: a save that was not committed never was one."""
    return row.lifecycle not in ("writing", "aborted")


def newest_first(rows: Iterable[CheckpointRow]) -> list[CheckpointRow]:
    """The order of selection."""
    return sorted(rows, key=lambda row: row.order, reverse=True)


def select(rows: Iterable[CheckpointRow], request: Request) -> Selection:
    """Chooses among the checkpoints of one run.

    Args:
        rows: newest first (see `newest_first`); read only as far as needed.
    """
    rejected: list[tuple[CheckpointRow, str]] = []
    others: list[int] = []
    for row in rows:
        if not is_candidate(row):
            continue
        if request.at is not None and row.iteration != request.at:
            others.append(row.iteration)
            continue
        reason = why_not(row, request)
        if reason is None:
            return Found(row, tuple(rejected))
        rejected.append((row, reason))
    if request.at is not None:
        return NotEligible(request.run, tuple(rejected), _no_such_iteration(request, rejected, others))
    if not rejected:
        return NoneYet(request.run)
    newest, reason = rejected[0]
    return NotEligible(
        request.run,
        tuple(rejected),
        f"run {request.run!r}: none of its {len(rejected)} checkpoints can be resumed from; "
        f"the newest, iteration {newest.iteration}, {reason}",
    )


def _no_such_iteration(request: Request, rejected: list[tuple[CheckpointRow, str]], others: list[int]) -> str:
    """Says what there is instead; nothing else is chosen silently."""
    if rejected:
        return f"run {request.run!r}: iteration {request.at} {rejected[0][1]}"
    at = request.at or 0
    nearest = sorted(set(others), key=lambda iteration: (abs(iteration - at), iteration))[:3]
    hint = f"the nearest are {', '.join(map(str, sorted(nearest)))}" if nearest else "it has no checkpoint at all"
    return f"run {request.run!r}: there is no checkpoint at iteration {at}; {hint}"
