"""Draining the catalog's unverified checkpoints. No Prefect in here.

Order: the catalog leases the newest checkpoint first, because that is the one a restart wants to resume from. A
checkpoint is leased only when its turn has come, so that no lease runs out while its holder is busy with another one,
and a killed drain keeps one checkpoint waiting, for one lease time.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, Protocol

from catalog.catalog import Catalog, default_actor
from catalog.rows import VerifyLease
from catalog.states import Verdict, grants
from catalog.verification import verify_leased
from ckptlib.errors import LeaseHeldError, StaleWriteError, StorageError
from ckptlib.verification import Batches, VerifyReport
from flows.settings import FlowsSettings

log = logging.getLogger(__name__)

Result = Literal["verified", "corrupt", "unreadable", "unverifiable", "checked", "lost", "failed"]
"""`unverifiable`: the store has no word on all files, and they were not to be read. `checked`: no defect, at a level
that grants nothing (V3), or less than it needs. `lost`: somebody else took the lease over, the verdict is theirs.
`failed`: an error of ours; nothing is known about the bytes."""

CORRUPT, PARTLY = "Corrupt", "Partly"
"""How a run ends that found something corrupt, or could not do all of its work: names of its state, and exit codes."""

_POLL = 1.0
"""Seconds between two looks at an empty queue while lingering."""


@dataclass(frozen=True)
class Outcome:
    """What became of one leased checkpoint; `detail` says why, unless all is well."""

    checkpoint_id: int
    name: str
    save_id: str
    result: Result
    detail: str = ""
    bytes_read: int = 0
    seconds: float = 0.0


@dataclass
class Summary:
    """What a drain did."""

    outcomes: list[Outcome] = field(default_factory=list)

    def of(self, *results: Result) -> list[Outcome]:
        """The outcomes with one of these results."""
        return [outcome for outcome in self.outcomes if outcome.result in results]

    @property
    def ending(self) -> str:
        """`CORRUPT`, `PARTLY`, or empty where all that waited was judged and is well."""
        if self.of("corrupt"):
            return CORRUPT
        return PARTLY if self.of("unreadable", "unverifiable", "failed", "lost") else ""

    def __str__(self) -> str:
        """For people: counts, and the name of everything that is not well."""
        if not self.outcomes:
            return "nothing was pending"
        counts = Counter(outcome.result for outcome in self.outcomes)
        text = ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))
        named = [f"{o.name} {o.result}: {o.detail}" for o in self.of("corrupt", "unreadable", "unverifiable", "failed")]
        return "; ".join([text, *named])


class Reporter(Protocol):
    """Shows what happens. Never raises: showing must not fail the work."""

    def begin(self, lease: VerifyLease) -> None:
        """A checkpoint's turn has come."""

    def progress(self, done: int, total: int) -> None:
        """Bytes of it that are read; called often, from any thread."""

    def end(self, outcome: Outcome, report: VerifyReport | None) -> None:
        """It is done; `report` is None when there is none to show."""


Work = Callable[[VerifyLease], Outcome]
"""Verifies one leased checkpoint; see `verify_one`."""


def drain(catalog: Catalog, settings: FlowsSettings, work: Work, *, run: str | None = None) -> Summary:
    """Verifies what waits, and what is committed within the next `settings.linger` seconds.

    Each checkpoint is tried at most once: what was unreadable or failed is the next drain's.

    Args:
        run: only this run's checkpoints; None: all.
    """
    summary = Summary()
    ends = time.monotonic() + settings.linger
    while True:
        handled = [outcome.checkpoint_id for outcome in summary.outcomes]
        lease = next_lease(catalog, settings, run=run, handled=handled)
        if lease is not None:
            summary.outcomes.append(work(lease))
        elif time.monotonic() >= ends:
            return summary
        else:
            time.sleep(_POLL)


def next_lease(
    catalog: Catalog, settings: FlowsSettings, *, run: str | None, handled: Collection[int]
) -> VerifyLease | None:
    """Leases the newest checkpoint that waits; None when none does."""
    leases = catalog.lease_unverified(
        owner=default_actor(), ttl=settings.lease_ttl, level=settings.level, run=run, exclude=handled
    )
    return leases[0] if leases else None


def verify_one(
    catalog: Catalog,
    settings: FlowsSettings,
    lease: VerifyLease,
    reporter: Reporter,
    *,
    level: str | None = None,
    batches: Batches | None = None,
) -> Outcome:
    """Verifies one leased checkpoint and writes its verdict; an error concerns this one only and is logged.

    Args:
        level: another one than the settings'.
        batches: how reading it is shared out; None: all at once.
    """
    reporter.begin(lease)
    report: VerifyReport | None = None
    result: Result
    try:
        report = verify_leased(
            catalog,
            lease,
            level=level or settings.level,
            threads=settings.threads,
            progress=reporter.progress,
            ttl=settings.lease_ttl,
            batches=batches,
        )
    except (LeaseHeldError, StaleWriteError) as error:
        log.warning("%s", error)
        result, detail = "lost", str(error)
    except (StorageError, PermissionError) as error:
        # The storage is away, or keeps us out: nothing is known about the bytes (V2).
        log.warning("%s (%s): %s", lease.name, lease.save_id, error)
        result, detail = "unreadable", str(error)
    except Exception as error:
        # One checkpoint that we cannot handle must not keep the others from being verified.
        log.exception("%s (%s): verification failed", lease.name, lease.save_id)
        result, detail = "failed", f"{type(error).__name__}: {error}"
    else:
        result, detail = judge(report, lease.verdict)
        log.log(
            logging.ERROR if result == "corrupt" else logging.INFO,
            "%s (%s): %s%s",
            lease.name,
            lease.save_id,
            result,
            f": {detail}" if detail else "",
        )
    outcome = Outcome(
        checkpoint_id=lease.checkpoint_id,
        name=lease.name,
        save_id=lease.save_id,
        result=result,
        detail=detail,
        bytes_read=0 if report is None else report.bytes_read,
        seconds=0.0 if report is None else report.seconds,
    )
    reporter.end(outcome, report)
    return outcome


def judge(report: VerifyReport, verdict: Verdict) -> tuple[Result, str]:
    """What a report comes to, and why unless all is well; the same rule by which the catalog gives its verdict.

    Args:
        verdict: the one before.
    """
    if report.ok:
        return ("verified" if grants(report.level, verdict) else "checked"), ""
    result: Result = "failed"
    if report.corrupt:
        result = "corrupt"
    elif report.unreadable:
        result = "unreadable"
    elif report.unverifiable:
        result = "unverifiable"
    more = f"; and {len(report.problems) - 3} more" if len(report.problems) > 3 else ""
    return result, "; ".join(report.problems[:3]) + more
