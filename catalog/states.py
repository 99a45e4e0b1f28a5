"""The two facts about a checkpoint and how they may change (S1). Pure.

::

    lifecycle   writing ──> finalized <──> missing            verdict   unverified ──> verified <──> corrupt
                   │            │                                            │             │
                   └──> aborted ┴──> deleting ──> deleted                    └──> unverifiable, suspect

Lifecycle says what there is on storage; verdict says what is known about its bytes. A verdict changes only while the
checkpoint is finalized: nothing is learnt about bytes that are not there, or are being removed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from ckptlib.errors import TransitionError

Lifecycle = Literal["writing", "finalized", "aborted", "missing", "deleting", "deleted"]
Verdict = Literal["unverified", "verified", "corrupt", "unverifiable", "suspect"]
Branch = Literal["live", "abandoned"]
Grant = Literal["store", "data"]

LIFECYCLES: tuple[Lifecycle, ...] = get_args(Lifecycle)
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
BRANCHES: tuple[Branch, ...] = get_args(Branch)
GRANTS: tuple[Grant, ...] = get_args(Grant)
"""Levels of a verification that grant the verdict *verified*, the weaker one first (V3)."""

LIFECYCLE_MOVES: dict[Lifecycle, frozenset[Lifecycle]] = {
    "writing": frozenset({"finalized", "aborted", "deleting"}),
    "finalized": frozenset({"missing", "deleting"}),
    "aborted": frozenset({"deleting"}),
    "missing": frozenset({"finalized"}),
    "deleting": frozenset({"deleted"}),
    "deleted": frozenset(),
}

# `corrupt -> verified` is a copy that was restored and read again; `verified -> unverified` one that was away and
# came back. `suspect` (a resume from it failed) is not cleared by good digests: its bytes were never in doubt.
VERDICT_MOVES: dict[Verdict, frozenset[Verdict]] = {
    "unverified": frozenset({"verified", "corrupt", "unverifiable", "suspect"}),
    "verified": frozenset({"unverified", "corrupt", "suspect"}),
    "corrupt": frozenset({"verified"}),
    "unverifiable": frozenset({"verified", "corrupt", "suspect"}),
    "suspect": frozenset({"unverified", "corrupt"}),
}


@dataclass(frozen=True)
class State:
    """The two facts of one checkpoint."""

    lifecycle: Lifecycle = "finalized"
    verdict: Verdict = "unverified"

    def __str__(self) -> str:
        return f"{self.lifecycle}/{self.verdict}"


def transition(state: State, *, lifecycle: Lifecycle | None = None, verdict: Verdict | None = None) -> State:
    """The state after a change of either fact, or both.

    Asking for what already holds changes nothing and is no error, so whoever repeats a step after a crash succeeds.
    A verified checkpoint that returns from `missing` is unverified again: nobody watched it meanwhile.

    Raises:
        TransitionError: the change is not a legal move.
    """
    new = state
    if lifecycle is not None and lifecycle != state.lifecycle:
        if lifecycle not in LIFECYCLE_MOVES[state.lifecycle]:
            raise TransitionError(_refusal("lifecycle", state.lifecycle, lifecycle, LIFECYCLE_MOVES[state.lifecycle]))
        new = replace(new, lifecycle=lifecycle)
        if state.lifecycle == "missing" and state.verdict == "verified":
            new = replace(new, verdict="unverified")
    if verdict is not None and verdict != new.verdict:
        if new.lifecycle != "finalized":
            raise TransitionError(f"verdict {verdict}: the checkpoint is {new.lifecycle}, expected finalized")
        if verdict not in VERDICT_MOVES[new.verdict]:
            raise TransitionError(_refusal("verdict", new.verdict, verdict, VERDICT_MOVES[new.verdict]))
        new = replace(new, verdict=verdict)
    return new


def grants(level: str, verdict: Verdict) -> bool:
    """Whether a verification at this level that finds all well makes a checkpoint with this verdict *verified*.

    A corrupt copy has to be read: the digests that a store keeps are of what it was given, not of what it has now (V3).
    A suspect one failed a resume although its bytes were right: that they still are proves nothing.
    """
    return level == "data" if verdict == "corrupt" else level in GRANTS and verdict != "suspect"


def level_for(level: str, verdict: Verdict) -> str:
    """The level at which a checkpoint with this verdict is verified: ``auto`` reads all of a corrupt one."""
    return "data" if (level, verdict) == ("auto", "corrupt") else level


def _refusal(fact: str, old: str, new: str, moves: frozenset[Lifecycle] | frozenset[Verdict]) -> str:
    """Says what was asked and what would have been possible."""
    possible = ", ".join(sorted(moves)) or "nothing: it is final"
    return f"{fact} {old} -> {new} is not a legal move; from {old} it can become {possible}"
