"""What a trainer tells others, and what it asks: the seams to a catalog, without importing one.

A `CommitListener` hears of attempts and commits (W6, S4); a `Resolver` decides what to resume from (R2).
`Notice` carries things a person should know that are no errors: a re-seeded RNG, a skipped save, a fallback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckptlib.manifest import Decision, Manifest
from ckptlib.topology import Topology

log = logging.getLogger("ckptlib")


@dataclass(frozen=True)
class AttemptEvent:
    """A process lifetime of a run began. `started_at` is in seconds since the epoch, by the trainer's clock."""

    run: str
    root_url: str
    root_id: str
    attempt: int
    attempt_id: str
    topology: Topology | None
    resumed_from: str | None
    host: str
    pid: int
    started_at: float


@dataclass(frozen=True)
class CommitEvent:
    """A save was committed and read back (W6). `root_url`/`root_id` are None for a save outside a root."""

    url: str
    root_url: str | None
    root_id: str | None
    manifest: Manifest
    manifest_sha256: str
    decision: Decision


@dataclass(frozen=True)
class Notice:
    """Something worth telling; `name` is stable (``rng_reseeded``, ``rerun_state_dropped``, ...)."""

    name: str
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ResumeChoice:
    """What to resume from: the iteration directory, and which save in it (None: a foreign checkpoint)."""

    url: str
    iteration: int
    save_id: str | None
    reason: str


class CommitListener(Protocol):
    """Hears of attempts and commits. Every method returns at once and never raises (S4)."""

    def attempt_started(self, event: AttemptEvent) -> None:
        """A new attempt of a run exists."""

    def committed(self, event: CommitEvent) -> None:
        """A checkpoint exists."""

    def close(self, timeout: float) -> None:
        """Hands over what is pending within `timeout` seconds, then gives up."""


class Resolver(Protocol):
    """Decides what a run resumes from (R2).

    One whose attribute ``require`` is ``"data"`` wants bytes that were read back: where storage is asked in its place,
    no store's word is taken either.
    """

    def resolve(self, *, run: str, root_url: str, at: int | None) -> ResumeChoice | None:
        """The resume point; None when the run has no checkpoint at all.

        Raises:
            NoResumePointError: there are candidates and none is eligible, or `at` names none.
        """


NoticeHandler = Callable[[Notice], None]


def emit(handler: NoticeHandler | None, notice: Notice) -> None:
    """Logs a notice and hands it on; a failing handler must not fail the save or load it reports on."""
    log.warning("%s: %s", notice.name, notice.message)
    if handler is None:
        return
    try:
        handler(notice)
    except Exception:
        log.exception("notice handler failed for %s", notice.name)
