"""The training loop's question at the end of every step: save now, exit now? With a clock, signals and ranks.

    with ExitSignals(schedule.exit_signals) as signals:
        cadence = Cadence(schedule, signals=signals)
        while not done:
            iteration += 1
            ...                                     # the step
            action = cadence.should_save_now(iteration)
            in_time = not action.exit or checkpointer.drain(grace / 2)      # before a save that would wait for others
            if action.save and in_time:
                checkpointer.save(state, iteration=iteration, kind=action.save)
            if action.exit:
                checkpointer.drain(grace / 2)
                break

Every rank asks at the end of every step. Ranks agree over the job's store (`coordination`), never by a collective, and
only at iterations at which clocks or signals are looked at.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from ckptlib.cadence import Action, Schedule, Sight, decide, look, merge, needs_agreement
from ckptlib.coordination import Group, lead, new_group
from ckptlib.errors import DisagreementError, StateError

log = logging.getLogger("ckptlib")


class Signals(Protocol):
    """What has been received; see `ExitSignals`."""

    names: tuple[str, ...]

    @property
    def received(self) -> tuple[str, ...]:
        """Names of the signals that came."""


class Cadence:
    """Applies a `Schedule` on one rank.

    Args:
        schedule: equal on all ranks.
        signals: who listens to `schedule.exit_signals`.
        group: the ranks that agree, used by nobody else; None: all ranks of the default process group.
        clock: seconds. The monotonic clock: a clock that people set is no measure of time.
        started_at: what the clock said when the job began, for `Schedule.exit_duration`; None: now.
        timeout: seconds that a rank waits for the others' answers: at least the longest step that one of them may be
            behind. Only for the group that is made here.

    Raises:
        StateError: the schedule names exit signals that nobody listens to.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        signals: Signals | None = None,
        group: Group | None = None,
        clock: Callable[[], float] = time.monotonic,
        started_at: float | None = None,
        timeout: float = 600.0,
    ) -> None:
        unheard = [name for name in schedule.exit_signals if signals is None or name not in signals.names]
        if unheard:
            raise StateError(
                f"schedule: nobody listens to {unheard[0]}. Pass signals=ExitSignals(schedule.exit_signals).install(), "
                "or make the schedule with exit_signals=()."
            )
        self._schedule = schedule
        self._signals = signals
        self._group = new_group(timeout=timeout) if group is None else group
        self._clock = clock
        self._saved_at = clock()
        self._started_at = self._saved_at if started_at is None else started_at
        self._last: Action | None = None

    def should_save_now(self, iteration: int) -> Action:
        """What to do at the end of this step, the same on all ranks. Asked again for the same step: the same answer.

        An action that saves a persistent checkpoint counts as a save for `Schedule.save_seconds`.

        Raises:
            DisagreementError: ranks ask about different iterations or have different schedules.
            RankTimeoutError: ranks did not ask in time; names them.
            StateError: `iteration` is no count.
        """
        if self._last is not None and self._last.iteration == iteration:
            return self._last
        now = self._clock()
        sight = look(
            self._schedule,
            iteration,
            rank=self._group.rank,
            now=now,
            started_at=self._started_at,
            saved_at=self._saved_at,
            signals=() if self._signals is None else self._signals.received,
        )
        if needs_agreement(self._schedule, iteration):
            sight = agree_on_sight(self._group, self._schedule, sight)
        action = decide(self._schedule, sight)
        if action.save == "persistent":
            self._saved_at = now
        if action.exit and self._group.rank == 0:
            log.info("save and exit: %s", action.reason)
        self._last = action
        return action


def agree_on_sight(group: Group, schedule: Schedule, sight: Sight) -> Sight:
    """What all ranks see together, on every rank. One round of small messages.

    Raises:
        DisagreementError: ranks look at different iterations, or have different schedules.
        RankTimeoutError: ranks did not answer in time; names them.
    """
    if group.world_size == 1:
        return sight
    group.next_round()
    if group.rank != 0:
        group.gather("cadence", (schedule, sight))
    return lead(group, "cadence/agreed", lambda: _merge_all(group, schedule, sight))


def _merge_all(group: Group, schedule: Schedule, sight: Sight) -> Sight:
    answers = group.gather("cadence", (schedule, sight))
    assert answers is not None
    for rank, (other, _) in enumerate(answers):
        if other != schedule:
            raise DisagreementError(f"rank {rank} has another schedule than rank 0: {other}, expected {schedule}")
    return merge([each for _, each in answers])
