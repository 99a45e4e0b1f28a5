"""What a finished save tells a person's log and a program's metrics (W6: none of it can fail a save)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

from ckptlib.events import CommitEvent

log = logging.getLogger("ckptlib")


class Sample(NamedTuple):
    """One value of a metric, as Prometheus has it; seconds and bytes."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class SaveMetrics:
    """A committed save in numbers, over all ranks. Seconds; None: not known.

    Attributes:
        stall: that training waited. Synchronously rank 0's, with the commit; else the longest of any rank.
        stage, write: the longest of any rank.
        commit: rank 0's, from its own record to the exports; it waits for the others' records.
        lag: from the begin of the save to its commit, by the clocks of those who wrote that down.
        bytes: of all files.
        slowest_rate, fastest_rate: bytes per second of a rank while it wrote.
        since_last: since the save that this one continues from; see `Begin.since_parent`.
    """

    run: str | None
    iteration: int
    save_id: str
    kind: str
    io_mode: str
    stall: float | None
    stage: float | None
    write: float | None
    commit: float | None
    lag: float
    bytes: int
    slowest_rate: float | None
    fastest_rate: float | None
    since_last: float | None

    @classmethod
    def of(cls, event: CommitEvent, *, commit: float | None, stall: float | None = None) -> SaveMetrics:
        """From what was committed.

        Args:
            commit: see above.
            stall: of a synchronous save; None: what the ranks recorded.
        """
        begin, figures = event.manifest.begin, event.manifest.figures
        rates = None if figures is None else figures.rank_rates
        return cls(
            run=begin.run,
            iteration=begin.iteration,
            save_id=begin.save_id,
            kind=begin.kind,
            io_mode=begin.io_mode,
            stall=stall if stall is not None or figures is None else figures.stall,
            stage=None if figures is None else figures.stage,
            write=None if figures is None else figures.write,
            commit=commit,
            lag=max(0.0, event.decision.decided_at - begin.created_at),
            bytes=event.manifest.size,
            slowest_rate=None if rates is None else rates[0],
            fastest_rate=None if rates is None else rates[1],
            since_last=begin.since_parent,
        )

    def samples(self) -> list[Sample]:
        """As metrics; what is not known is left out. ``_total`` ones are to be added up by whoever collects them."""
        run = {"run": self.run or ""}
        phases = {"stage": self.stage, "write": self.write, "commit": self.commit}
        found = [
            Sample("ckpt_save_seconds", {**run, "phase": phase}, seconds)
            for phase, seconds in phases.items()
            if seconds is not None
        ]
        if self.stall is not None:
            found.append(Sample("ckpt_blocked_seconds", run, self.stall))
        found.append(Sample("ckpt_bytes_written_total", run, self.bytes))
        found.append(Sample("ckpt_commit_lag_seconds", run, self.lag))
        return found

    def line(self) -> str:
        """``iteration=7 save_id=... stall_s=0.012 ... bytes=1073741824 rank_GBps=0.55..0.61``."""
        seconds = {
            "stall_s": self.stall,
            "stage_s": self.stage,
            "write_s": self.write,
            "commit_s": self.commit,
            "lag_s": self.lag,
            "since_last_s": self.since_last,
        }
        words = [f"iteration={self.iteration}", f"save_id={self.save_id}", f"io_mode={self.io_mode}"]
        words += [f"{name}={value:.3f}" for name, value in seconds.items() if value is not None]
        words.append(f"bytes={self.bytes}")
        if self.slowest_rate is not None and self.fastest_rate is not None:
            words.append(f"rank_GBps={self.slowest_rate / 1e9:.3f}..{self.fastest_rate / 1e9:.3f}")
        return " ".join(words)


MetricsHandler = Callable[[SaveMetrics], None]


def report(handler: MetricsHandler | None, metrics: SaveMetrics) -> None:
    """One line in the log, with the numbers in ``record.ckpt``; then the handler, whose failure fails nothing."""
    log.info("saved %s", metrics.line(), extra={"ckpt": asdict(metrics)})
    if handler is None:
        return
    try:
        handler(metrics)
    except Exception:
        log.exception("metrics handler failed for the save of iteration %d", metrics.iteration)
