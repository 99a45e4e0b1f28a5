"""What the next attempt does with what older ones left: undecided saves, exports and deletions cut short (W7, W8)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckptlib import beats, commit, exports, orphans, receipts
from ckptlib import storage as st
from ckptlib.errors import IntegrityError
from ckptlib.manifest import Begin, Decision
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


@dataclass(frozen=True)
class Waiting:
    """Why `settle` has not come back yet.

    Attributes:
        writing: ranks whose part is missing, and where they are written.
        seconds: how long it has waited for this save.
    """

    found: Found
    save_id: str
    writing: Mapping[int, beats.Beat]
    progress: beats.InFlight
    seconds: float

    def __str__(self) -> str:
        who = [f"rank {rank} on {beat.host} (pid {beat.pid})" for rank, beat in sorted(self.writing.items())[:4]]
        more = f" and {len(self.writing) - len(who)} more" if len(self.writing) > len(who) else ""
        return (
            f"{self.found.name} save {self.save_id} of an older attempt is still being written ({self.progress}) by "
            f"{', '.join(who)}{more}; waiting since {self.seconds:.0f} s"
        )


COMPARED_AT_START = 8
"""Newest checkpoints whose exports are compared in full when an attempt begins."""

MAX_PAUSE = 5.0
"""Seconds between two looks for what is missing, at most."""

TOLD_EVERY = 30.0
"""Seconds between two words about one wait."""


def settle(
    storage: st.Storage,
    root: str,
    attempt: int,
    *,
    wait: float = 0.0,
    on_wait: Callable[[Waiting], None] = lambda waiting: None,
    on_standing: Callable[[Found], None] = lambda found: None,
    takes: Callable[[Begin | None], bool] = lambda begin: True,
) -> list[Settled]:
    """Decides what older attempts left undecided, and rolls forward what they committed (W7, W8).

    What they left of uploads goes too, unless the save may still be written.

    A complete save is committed. An incomplete one is aborted, unless every missing part of it is still being written
    (`ckptlib.beats`): that is waited for, up to `wait` seconds for all saves together. A worker of an asynchronous save
    may only just be starting, so its first sign of life is waited for too. A copy is not aborted while whoever leads it
    lives, also when the time is over: it comes before all that this attempt saves.
    Saves outside any attempt (number 0) belong to nobody's run and are left alone.

    Args:
        on_wait: told when it begins to wait, and then every `TOLD_EVERY` seconds.
        on_standing: told, oldest first, what was committed now, and what stands of the newest attempt that committed
            anything, the newest `COMPARED_AT_START` at most: it may have been killed before telling anybody.
        takes: whose saves to look at, by their begin record; None: it has none.

    Returns:
        What was done.
    """
    done = []
    deadline = time.monotonic() + wait
    for found in scan(storage, root).found:
        save = found.save
        if save is None or not takes(save.begin):
            continue
        if found.state == "deleted":  # a deletion that was cut short is finished by whoever comes next (D3)
            # One for good began with the root's tombstone, which stays.
            path, save_id = found.path, save.save_id
            if _tidied(found.url, lambda: remove_save(storage, path, save_id, for_good=False)):  # noqa: B023 - called here
                done.append(Settled(found, save.save_id, None))
            continue
        if save.begin is None or not 0 < save.begin.attempt < attempt:
            continue
        if found.state == "undecided":
            decision = _decide(storage, found, save.begin, attempt, deadline, on_wait)
            if decision is not None:
                done.append(Settled(found, save.save_id, decision))
    standing = (found for found in scan(storage, root).found if found.state == "committed")
    committed = sorted((each for each in standing if each.save is None or takes(each.save.begin)), key=_newest_first)
    for i, found in enumerate(committed):
        # A roll-forward removes the records of its save last. Only the newest can also have been spoilt by a process
        # that was overtaken; comparing every export of every old checkpoint would cost a start dozens of reads each.
        if i < COMPARED_AT_START or _is_unfinished(storage, found):
            _tidied(found.url, lambda: _roll_forward(storage, found.path))  # noqa: B023 - called here
    _tidied(storage.url(root), lambda: orphans.apply(storage, orphans.plan_at_start(storage, root, attempt, takes)))
    now = {each.save_id for each in done if each.decision is not None and each.decision.outcome == "commit"}
    older = [found for found in committed if 0 < found.order[0] < attempt]
    newest = [found for found in older[:COMPARED_AT_START] if found.order[0] == older[0].order[0]]
    for found in reversed(older):
        if found in newest or found.order[2] in now:
            on_standing(found)
    return done


def _decide(
    storage: st.Storage,
    found: Found,
    begin: Begin,
    attempt: int,
    deadline: float,
    on_wait: Callable[[Waiting], None],
) -> Decision | None:
    """None: it is a copy that somebody is making."""
    decision = commit.try_commit(storage, found.path, begin, decided_by="settle")
    if decision is not None:
        return decision
    why: str | None = ""
    is_copy = receipts.is_copy(storage, found.path, begin.save_id)
    in_time = time.monotonic() < deadline or is_copy
    may_be_in_hand = (begin.io_mode == "async" and not is_copy) or beats.read_beats(storage, found.path, begin)
    if in_time and may_be_in_hand:
        why = _wait_for_writers(storage, found, begin, deadline, on_wait, is_copy=is_copy)
        decision = commit.try_commit(storage, found.path, begin, decided_by="settle")
        if decision is not None or why is None:
            return decision
    missing = commit.read_records(storage, found.path, begin).missing
    reason = f"attempt {attempt} began; ranks {_ranges(missing)} had not finished{why}"
    return commit.decide_abort(storage, found.path, begin.save_id, reason=reason, decided_by="settle")


def _wait_for_writers(
    storage: st.Storage,
    found: Found,
    begin: Begin,
    deadline: float,
    on_wait: Callable[[Waiting], None],
    *,
    is_copy: bool,
) -> str | None:
    """Returns when every part is recorded, somebody decided, or a missing part will not come: why, as a clause.

    None: the time is over, and somebody is making the copy.
    """
    watch = beats.Watch(beats.FIRST if begin.io_mode == "async" and not is_copy else 0.0)
    began = time.monotonic()
    told = -1.0
    while True:
        progress = commit.progress(storage, found.path, begin)
        if not progress.missing or commit.read_decision(storage, found.path, begin.save_id) is not None:
            return ""
        if progress.failed and not is_copy:  # who copies may try again
            return "".join(f"; rank {rank}: {reason}" for rank, reason in progress.failed.items())
        seen = beats.read_beats(storage, found.path, begin)
        missing = (0,) if is_copy else progress.missing
        writing = {rank: beat for rank, beat in seen.items() if rank in missing}
        ended = tuple(rank for rank, beat in writing.items() if beats.is_dead(beat))
        if ended:
            return f"; the writer of ranks {_ranges(ended)} has ended"
        now = time.monotonic()
        still = watch.lost(missing, writing, now)
        if still:
            return f"; ranks {_ranges(still)} gave no sign of life"
        if now >= deadline and is_copy:
            return None
        if now >= deadline:
            return "; they are still being written, and the time to wait for that (settle_wait) is over"
        if writing and (now - began) // TOLD_EVERY > told:
            told = (now - began) // TOLD_EVERY
            in_flight = beats.in_flight(begin, progress.missing, seen)
            on_wait(Waiting(found, begin.save_id, writing, in_flight, now - began))
        slowest = max((beat.interval for beat in writing.values()), default=0.0)
        time.sleep(min(max(slowest / 4, 0.05), MAX_PAUSE, max(deadline - now, 0.05)))


def _roll_forward(storage: st.Storage, path: str) -> None:
    """Without reading whole checkpoints where nobody can have spoilt a copy: a start would wait for that."""
    exports.roll_forward(storage, path, suspects_others=False)


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
