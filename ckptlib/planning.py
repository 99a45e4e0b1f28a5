"""How ranks agree on a write plan, and how they keep it. Pure: what is sent is the caller's business.

A trainer's state has the same structure at every save. So a rank keeps the plans of its last structures, and offers
the digests of those it has for this structure instead of the structure itself. When all ranks offer one plan, rank 0
has nothing to compute and nothing to hand out. What is compared is everything a plan depends on (names, dtypes,
shapes, boxes, replicas), and never an address of memory: a new key or another dtype is another structure, and what is
written is read from the state that is given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ckptlib.paused_gc import paused_gc
from ckptlib.pieces import LocalPlan
from ckptlib.plan import RankPlan, WritePlan, make_write_plan, values_digest

K = TypeVar("K")
T = TypeVar("T")

KEPT = 8
"""Structures that are kept: with and without optimizer, of persistent saves and others."""


@dataclass(frozen=True)
class Share:
    """What one rank has to know of a plan.

    Attributes:
        digest: of the plan.
        mine: what this rank writes.
        shared_values: see `WritePlan`.
    """

    digest: str
    mine: RankPlan
    shared_values: tuple[str, ...]

    @classmethod
    def of(cls, plan: WritePlan, rank: int) -> Share:
        """The share of a rank."""
        return cls(plan.digest, plan.of(rank), plan.shared_values)


@dataclass(frozen=True)
class Values:
    """Digests of a rank's plain values: of those that all ranks have together, and of each of the others."""

    shared: str
    others: Mapping[str, str]

    @classmethod
    def of(cls, local: LocalPlan, shared_values: Sequence[str]) -> Values:
        """The digests of what a rank has."""
        shared = set(shared_values)
        others = {key: digest for key, digest in local.values.items() if key not in shared}
        return cls(values_digest(local.values, shared_values), others)


@dataclass(frozen=True)
class Offer:
    """What a rank says before a save.

    Attributes:
        local: its structure; None when it has plans for it.
        known: digest of each plan that it has for its structure -> its values, as that plan divides them.
    """

    local: LocalPlan | None
    known: Mapping[str, Values] = field(default_factory=dict)


class PlanCache:
    """The plans of one rank's last structures; rank 0 also keeps them whole."""

    def __init__(self) -> None:
        self._shares: OrderedDict[tuple[str, str], Share] = OrderedDict()
        self._whole: OrderedDict[str, WritePlan] = OrderedDict()

    def offer(self, local: LocalPlan) -> Offer:
        """What to say for this structure. Other ranks may have changed while this one did not: it offers all."""
        known = {
            plan: Values.of(local, share.shared_values)
            for (structure, plan), share in self._shares.items()
            if structure == local.structure
        }
        return Offer(None if known else local, known)

    def share(self, local: LocalPlan, plan: str) -> Share | None:
        """This rank's share of a plan that it has for this structure."""
        return self._shares.get((local.structure, plan))

    def keep(self, local: LocalPlan, share: Share) -> None:
        """Remembers a share, instead of the one that was not used for longest."""
        _put(self._shares, (local.structure, share.digest), share)

    def settle(self, offers: Sequence[Offer]) -> tuple[WritePlan, bool] | None:
        """The plan of a save, on rank 0, and whether all ranks have it; None: every rank has to send its structure.

        Raises:
            DisagreementError, TilingError: as `make_write_plan`.
        """
        for digest in reversed(self._whole):
            if all(digest in offer.known for offer in offers):
                if not _values_agree([offer.known[digest] for offer in offers]):
                    return None
                plan = self._whole[digest]
                _put(self._whole, digest, plan)
                return plan, True
        structures = [offer.local for offer in offers if offer.local is not None]
        if len(structures) < len(offers):
            return None
        with paused_gc():
            plan = make_write_plan(structures)
        _put(self._whole, plan.digest, plan)
        return plan, False


def _put(kept: OrderedDict[K, T], key: K, value: T) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > KEPT:
        kept.popitem(last=False)


def _values_agree(values: Sequence[Values]) -> bool:
    """W3: what several ranks call by one name has one value. Who disagrees with whom, the whole structures tell."""
    seen: dict[str, str] = {}
    return all(
        one.shared == values[0].shared
        and all(seen.setdefault(key, digest) == digest for key, digest in one.others.items())
        for one in values
    )
