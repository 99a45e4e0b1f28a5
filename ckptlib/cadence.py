"""When to save and when to exit, decided at the end of every step. Pure: clocks, signals and ranks are arguments.

The order is Megatron-LM's (`checkpoint_and_decide_exit` in ``megatron/training/training.py``):

1. an exit signal: save, exit;
2. the save interval, in iterations or in seconds: save;
3. otherwise the non-persistent interval: save a non-persistent checkpoint;
4. the exit duration is over: save unless 2 did, exit;
5. the exit interval, or a phase transition: save unless 2 did, exit.

One thing is different. An exit always leaves a persistent checkpoint: where 3 was due as well, the one save is a
persistent one. Megatron exits with the non-persistent one alone, which may be gone with the memory of the node.

Intervals need no messages: all ranks count the same iterations. Signals reach one rank before another, and clocks
differ, so where a `Schedule` has any of these, the ranks compare what they see (`Sight`, `merge`) and all decide on the
sum: a signal on one rank is a signal, and what one clock says is due is due.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from ckptlib.errors import DisagreementError, StateError
from ckptlib.manifest import Kind

Cause = Literal[
    "signal",
    "save_interval",
    "save_seconds",
    "non_persistent_interval",
    "exit_duration",
    "exit_interval",
    "phase_transition",
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""In the order in which they are looked at."""

_SHOWN_RANKS = 4


@dataclass(frozen=True)
class Schedule:
    """When a run saves and exits. Equal on all ranks. None: never for this reason.

    Attributes:
        save_interval: iterations from one persistent checkpoint to the next: at its multiples.
        save_seconds: seconds after which the next persistent checkpoint is due, whatever led to the last one.
        non_persistent_interval: iterations between non-persistent checkpoints.
        non_persistent_kind: which kind those are.
        exit_duration: seconds after which the job exits.
        exit_interval: the job exits at multiples of so many iterations.
        phase_transitions: iterations at which the job exits, to go on with another configuration.
        exit_signals: names of the signals that mean "save and exit"; `ckptlib.exit_signals` listens to them.
        agree_every: ranks compare signals and clocks at multiples of so many iterations. Rank 0 hears every rank, in
            0.4 to 1 ms each: nothing for a few hundred ranks, seconds for ten thousand. More than 1 makes it cheaper
            and delays the reaction: so many steps must fit into the grace period.

    Raises:
        StateError: a value is out of its range; names it.
    """

    save_interval: int | None = None
    save_seconds: float | None = None
    non_persistent_interval: int | None = None
    non_persistent_kind: Kind = "non_persistent_global"
    exit_duration: float | None = None
    exit_interval: int | None = None
    phase_transitions: frozenset[int] = frozenset()
    exit_signals: tuple[str, ...] = ("SIGTERM",)
    agree_every: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "phase_transitions", frozenset(self.phase_transitions))
        object.__setattr__(self, "exit_signals", tuple(self.exit_signals))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith(("_interval", "agree_every")) and value is not None and not _is_count(value, 1):
                raise StateError(f"schedule: {field.name}={value!r}, expected a positive whole number of iterations")
        for name in ("save_seconds", "exit_duration"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise StateError(f"schedule: {name}={value!r}, expected a positive number of seconds")
        for iteration in self.phase_transitions:
            if not _is_count(iteration, 0):
                raise StateError(f"schedule: phase_transitions has {iteration!r}, expected iterations")
        if self.non_persistent_kind not in ("non_persistent_global", "non_persistent_local"):
            raise StateError(f"schedule: non_persistent_kind={self.non_persistent_kind!r} is not a non-persistent kind")
        for name in self.exit_signals:
            if name not in signal.Signals.__members__:
                raise StateError(f"schedule: exit_signals has {name!r}, expected names such as SIGTERM or SIGUSR1")


@dataclass(frozen=True)
class Sight:
    """What a rank, or all of them together, see besides the iteration.

    Attributes:
        iteration: at the end of which they look.
        signals: exit signals received so far: (name, rank).
        save_due: `Schedule.save_seconds` are over.
        exit_due: `Schedule.exit_duration` is over.
    """

    iteration: int
    signals: tuple[tuple[str, int], ...] = ()
    save_due: bool = False
    exit_due: bool = False


@dataclass(frozen=True)
class Action:
    """What to do now: first save, then exit.

    Attributes:
        iteration: at the end of which this was decided.
        save: the kind of checkpoint to save; None: nothing is saved.
        exit: leave the training loop, after the save.
        causes: why, in order; empty when there is nothing to do.
        reason: the same as a sentence, for logs.
    """

    iteration: int
    save: Kind | None = None
    exit: bool = False
    causes: tuple[Cause, ...] = ()
    reason: str = ""


def needs_agreement(schedule: Schedule, iteration: int) -> bool:
    """Whether the ranks compare what they see at this iteration: the same answer on each of them."""
    involved = bool(schedule.exit_signals) or schedule.save_seconds is not None or schedule.exit_duration is not None
    return involved and iteration % schedule.agree_every == 0


def look(
    schedule: Schedule,
    iteration: int,
    *,
    rank: int,
    now: float,
    started_at: float,
    saved_at: float,
    signals: Sequence[str],
) -> Sight:
    """What this rank sees; nothing at an iteration at which the ranks do not compare.

    Args:
        iteration: number of finished steps, 0 or more.
        now: this rank's clock in seconds. A clock that was set back makes things due later, never at once.
        started_at: the same clock when the job, or this process, began.
        saved_at: the same clock when the last persistent save was decided, or `started_at`.
        signals: names of the signals this rank has received.

    Raises:
        StateError: `iteration` is no count.
    """
    if not _is_count(iteration, 0):
        raise StateError(f"iteration {iteration!r}: expected the number of finished steps")
    if not needs_agreement(schedule, iteration):
        return Sight(iteration)
    return Sight(
        iteration,
        signals=tuple((name, rank) for name in signals if name in schedule.exit_signals),
        save_due=schedule.save_seconds is not None and now - saved_at >= schedule.save_seconds,
        exit_due=schedule.exit_duration is not None and now - started_at >= schedule.exit_duration,
    )


def merge(sights: Sequence[Sight]) -> Sight:
    """What all ranks see together; `sights` in rank order, one or more.

    Raises:
        DisagreementError: ranks look at different iterations; names them.
    """
    iteration = sights[0].iteration
    others = [rank for rank, sight in enumerate(sights) if sight.iteration != iteration]
    if others:
        raise DisagreementError(
            f"rank 0 is at iteration {iteration}, rank {others[0]} at {sights[others[0]].iteration} ({len(others)} of "
            f"{len(sights)} ranks elsewhere): every rank must ask at the end of every step"
        )
    return Sight(
        iteration,
        signals=tuple(received for sight in sights for received in sight.signals),
        save_due=any(sight.save_due for sight in sights),
        exit_due=any(sight.exit_due for sight in sights),
    )


def decide(schedule: Schedule, sight: Sight) -> Action:
    """What to do at the end of this step: a function of what all ranks see together, and so the same on each.

    Iteration 0 is a multiple of every interval.
    """
    iteration = sight.iteration
    if sight.signals:
        return Action(iteration, "persistent", True, ("signal",), _signals(sight.signals))
    leaving = _exit(schedule, sight)
    saving = _persistent_save(schedule, sight)
    kind: Kind | None = "persistent" if saving or leaving else None
    if kind is None and _hits(iteration, schedule.non_persistent_interval):
        kind = schedule.non_persistent_kind
        saving = "non_persistent_interval", f"non-persistent interval of {schedule.non_persistent_interval}"
    why = [each for each in (saving, leaving) if each is not None]
    return Action(
        iteration,
        save=kind,
        exit=leaving is not None,
        causes=tuple(cause for cause, _ in why),
        reason=f"iteration {iteration}: {'; '.join(text for _, text in why)}" if why else "",
    )


def _persistent_save(schedule: Schedule, sight: Sight) -> tuple[Cause, str] | None:
    if _hits(sight.iteration, schedule.save_interval):
        return "save_interval", f"save interval of {schedule.save_interval}"
    if sight.save_due and schedule.save_seconds is not None:
        return "save_seconds", f"{schedule.save_seconds:g} s since the last save"
    return None


def _exit(schedule: Schedule, sight: Sight) -> tuple[Cause, str] | None:
    if sight.exit_due and schedule.exit_duration is not None:
        return "exit_duration", f"exit duration of {schedule.exit_duration:g} s"
    if _hits(sight.iteration, schedule.exit_interval):
        return "exit_interval", f"exit interval of {schedule.exit_interval}"
    if sight.iteration in schedule.phase_transitions:
        return "phase_transition", "phase transition"
    return None


def _hits(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0


def _signals(signals: Sequence[tuple[str, int]]) -> str:
    texts = []
    for name in dict.fromkeys(name for name, _ in signals):
        ranks = [rank for received, rank in signals if received == name]
        shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
        more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
        texts.append(f"{name} on rank {shown}{more}")
    return "; ".join(texts)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
