"""What the next attempt does with what older ones left: undecided saves, exports and deletions cut short (W7, W8)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptlib import commit, exports
from ckptlib import storage as st
from ckptlib.errors import IntegrityError
from ckptlib.manifest import Decision
from ckptlib.removal import remove_save
from ckptlib.roots import Found, scan

log = logging.getLogger("ckptlib")


@dataclass(frozen=True)
class Settled:
    """What `settle` did with one save: committed or aborted it, or finished its deletion."""

    found: Found
    save_id: str
    decision: Decision | None

    def __str__(self) -> str:
        what = "deletion finished" if self.decision is None else self.decision.outcome
        return f"{self.found.name} save {self.save_id}: {what}"


COMPARED_AT_START = 8
"""Newest checkpoints whose exports are compared in full when an attempt begins."""


def settle(storage: st.Storage, root: str, attempt: int, *, wait: float = 0.0) -> list[Settled]:
    """Decides what older attempts left undecided, and rolls forward what they committed (W7, W8).

    A complete save is committed; an incomplete one is given `wait` seconds to become complete, then aborted.
    Saves outside any attempt (number 0) belong to nobody's run and are left alone.

    Returns:
        What was done.
    """
    done = []
    deadline = time.monotonic() + wait
    for found in scan(storage, root).found:
        save = found.save
        if save is None:
            continue
        if found.state == "deleted":  # a deletion that was cut short is finished by whoever comes next (D3)
            if _tidied(found.url, lambda: remove_save(storage, found.path, save.save_id)):  # noqa: B023 - called here
                done.append(Settled(found, save.save_id, None))
            continue
        if save.begin is None or not 0 < save.begin.attempt < attempt:
            continue
        if found.state == "undecided":
            decision = commit.try_commit(storage, found.path, save.begin, decided_by="settle")
            while decision is None and time.monotonic() < deadline:
                time.sleep(min(0.2, max(wait, 0.0)))
                decision = commit.try_commit(storage, found.path, save.begin, decided_by="settle")
            if decision is None:
                missing = commit.read_records(storage, found.path, save.begin).missing
                reason = f"attempt {attempt} began; ranks {_ranges(missing)} had not finished"
                decision = commit.decide_abort(storage, found.path, save.save_id, reason=reason, decided_by="settle")
            done.append(Settled(found, save.save_id, decision))
    committed = sorted((found for found in scan(storage, root).found if found.state == "committed"), key=_newest_first)
    for i, found in enumerate(committed):
        # A roll-forward removes the records of its save last. Only the newest can also have been spoilt by a process
        # that was overtaken; comparing every export of every old checkpoint would cost a start dozens of reads each.
        if i < COMPARED_AT_START or _is_unfinished(storage, found):
            _tidied(found.url, lambda: exports.roll_forward(storage, found.path))  # noqa: B023 - called here
    return done


def _newest_first(found: Found) -> tuple[int, int, str]:
    attempt, iteration, save_id = found.order
    return -attempt, -iteration, save_id


def _is_unfinished(storage: st.Storage, found: Found) -> bool:
    return found.save is not None and exports.has_records(storage, found.path, found.save.save_id)


def _tidied(url: str, work: Callable[[], object]) -> bool:
    """Whether it was done. One damaged checkpoint, however old, must not keep the run from starting again."""
    try:
        work()
    except (OSError, IntegrityError) as error:
        log.warning("%s: not tidied up: %s", url, error)
        return False
    return True


def _ranges(ranks: tuple[int, ...]) -> str:
    """``0-3, 7``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)
