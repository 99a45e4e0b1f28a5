"""How long a save took, and whom it held: per rank in its record, over all ranks in the manifest. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MEASURABLE = 1e-6
"""Seconds. A shorter write says nothing about a rate."""


@dataclass(frozen=True)
class Times:
    """What a rank knows of its part of a save when it records it. Seconds; None: nobody measured it.

    Attributes:
        stall: that training waited, until the hand-over to a worker; of a synchronous save until its record, the
            commit follows.
        stage: for the copy into host memory, a part of `stall` unless it ran beside training; None: nothing was staged.
            Both are None when the state was staged in slices: the hand-over came before the end of that.
        write: until the data was durable.
    """

    stall: float | None = None
    stage: float | None = None
    write: float = 0.0


@dataclass(frozen=True)
class Figures:
    """The same over all ranks.

    Attributes:
        stall, stage, write: the longest of any rank.
        rank_bytes: written by the rank that wrote least, and by the one that wrote most.
        rank_rates: bytes per second while writing, of the slowest and of the fastest rank that wrote anything; None:
            nobody did, or in no time.
    """

    stall: float | None
    stage: float | None
    write: float
    rank_bytes: tuple[int, int]
    rank_rates: tuple[float, float] | None

    @classmethod
    def of(cls, ranks: Iterable[tuple[int, Times]]) -> Figures | None:
        """From every rank's bytes and times; None of none."""
        known = list(ranks)
        if not known:
            return None
        stalls = [times.stall for _, times in known if times.stall is not None]
        stages = [times.stage for _, times in known if times.stage is not None]
        rates = [nbytes / times.write for nbytes, times in known if nbytes and times.write >= MEASURABLE]
        return cls(
            stall=max(stalls, default=None),
            stage=max(stages, default=None),
            write=max(times.write for _, times in known),
            rank_bytes=(min(nbytes for nbytes, _ in known), max(nbytes for nbytes, _ in known)),
            rank_rates=(min(rates), max(rates)) if rates else None,
        )

    def to_json(self) -> dict[str, Any]:
        """As a record member."""
        return {
            "stall": self.stall,
            "stage": self.stage,
            "write": self.write,
            "rank_bytes": list(self.rank_bytes),
            "rank_rates": None if self.rank_rates is None else list(self.rank_rates),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Figures:
        """Reads `to_json`.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        least, most = value["rank_bytes"]
        rates = value["rank_rates"]
        if rates is not None:
            slowest, fastest = rates
            rates = slowest, fastest
        return cls(value["stall"], value["stage"], value["write"], (least, most), rates)
