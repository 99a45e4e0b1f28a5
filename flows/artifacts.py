"""What a verification shows in Prefect: a progress bar while it reads, then a table with the verdict of every file."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import UUID

from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.context import FlowRunContext, TaskRunContext

from catalog.rows import VerifyLease
from ckptlib.verification import VerifyReport
from flows.drain import Outcome

log = logging.getLogger(__name__)

MAX_ROWS = 1000
"""Rows of a table: it is one JSON value in Prefect's database. Files that are not ok come first."""

_UPDATE_EVERY = 2.0


def artifact_key(kind: str, run: str, save_id: str) -> str:
    """A key as Prefect takes it (lower case, digits, dashes): readable, and one per save whatever its run is called."""
    slug = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:40].strip("-")
    digest = hashlib.sha256(f"{run}\0{save_id}".encode()).hexdigest()[:12]
    return "-".join(filter(None, ("ckpt", kind, slug, digest)))


def verdict_table(report: VerifyReport) -> list[dict[str, Any]]:
    """One row per file, the ones that are not ok first (V2); a last row says how many were left out, if any."""
    checks = sorted(report.checks.items(), key=lambda item: (item[1].verdict == "ok", item[0]))
    rows: list[dict[str, Any]] = [
        {
            "file": name,
            "verdict": check.verdict,
            "by": "the store's digest" if check.by_store else "its bytes" if check.sha256 is not None else None,
            "bytes": check.size,
            "sha256": check.sha256,
            "expected": check.expected_sha256,
            "origin": check.origin,
            "detail": check.detail,
        }
        for name, check in checks[:MAX_ROWS]
    ]
    if len(checks) > MAX_ROWS:
        rest = [check.verdict for _, check in checks[MAX_ROWS:]]
        verdicts = ", ".join(f"{rest.count(verdict)} {verdict}" for verdict in sorted(set(rest)))
        rows.append({"file": f"({len(rest)} more)", "verdict": verdicts})
    return rows


def describe(outcome: Outcome, report: VerifyReport) -> str:
    """The text above the table, in Markdown."""
    bad = sum(check.verdict not in ("ok", "extra") for check in report.checks.values())
    head = (
        f"**{outcome.name}** (save `{outcome.save_id}`): **{outcome.result}** at level {report.level}; "
        f"{bad} of {len(report.checks)} files are not ok; {report.bytes_read / 2**30:.2f} GiB read in "
        f"{report.seconds:.1f} s."
    )
    return "\n".join([head, "", *(f"- {problem}" for problem in report.problems[:20])])


class PrefectReporter:
    """Artifacts of the run that it is used in; without a run (a flow called as a plain function) it shows nothing.

    The progress bar is moved by a thread of its own: an API that is slow or gone delays neither the hashing nor the
    renewal of the lease.
    """

    def __init__(self) -> None:
        self._active = FlowRunContext.get() is not None or TaskRunContext.get() is not None
        self._lease: VerifyLease | None = None
        self._bar: _Bar | None = None

    def begin(self, lease: VerifyLease) -> None:
        """Makes the progress bar."""
        if not self._active:
            return
        self._lease = lease
        key = artifact_key("progress", lease.run, lease.save_id)
        text = f"{lease.name} (save `{lease.save_id}`): reading {lease.size / 2**30:.2f} GiB"
        made = _shown(lambda: create_progress_artifact(0.0, key=key, description=text))
        if isinstance(made, UUID):
            self._bar = _Bar(made)

    def progress(self, done: int, total: int) -> None:
        """Remembers where it is."""
        if self._bar is not None and total > 0:
            self._bar.percent = min(100.0, 100.0 * done / total)

    def end(self, outcome: Outcome, report: VerifyReport | None) -> None:
        """Ends the progress bar, full if every byte was judged; adds the table of verdicts."""
        if self._bar is not None:
            self._bar.close(f"{outcome.name} (save `{outcome.save_id}`): {outcome.result}", full=report is not None)
            self._bar = None
        lease = self._lease
        if lease is None or report is None:
            return
        key = artifact_key("verify", lease.run, lease.save_id)
        table, text = verdict_table(report), describe(outcome, report)
        _shown(lambda: create_table_artifact(table, key=key, description=text))


class _Bar:
    """A progress artifact that follows `percent` until it is closed."""

    def __init__(self, artifact: UUID) -> None:
        self.percent = 0.0
        self._artifact = artifact
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ckpt-progress", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        shown = 0.0
        while not self._closed.wait(_UPDATE_EVERY):
            if self.percent != shown:
                shown = self.percent
                _shown(partial(update_progress_artifact, self._artifact, shown))

    def close(self, text: str, *, full: bool) -> None:
        self._closed.set()
        self._thread.join()
        percent = 100.0 if full else self.percent
        _shown(lambda: update_progress_artifact(self._artifact, percent, description=text))


def _shown(call: Callable[[], object]) -> object:
    """Calls Prefect's API; what goes wrong there is logged and not our work's problem (S5)."""
    try:
        return call()
    except Exception:
        log.exception("an artifact could not be shown")
        return None
