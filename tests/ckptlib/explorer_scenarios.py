"""The small instances that are explored, and how one is run.

Every scenario begins after rank 0 (and 1) of the first attempt have committed and exported iteration 1, so that there
is always something to lose, unless it says otherwise. Weights are filled with a number of the save's own, its tag.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptlib import commit
from ckptlib.errors import CkptError, FencedError, RankTimeoutError, SaveAbortedError
from tests.ckptlib.explorer import MESSAGE, Actor, Explorer, Violation
from tests.ckptlib.explorer_judge import MayFail, ProtocolJudge, check_recovery, saves_on
from tests.ckptlib.explorer_stage import ROOT, Job, Theatre, adopt
from tests.ckptlib.support.recording import EMPTY, Disk

FIRST = f"{ROOT}/iter_0000001"
Program = Callable[[Theatre], None]


def overtaken(error: Exception, disk: Disk) -> bool:
    """How a trainer may end that was overtaken by another attempt, or left alone by its other rank."""
    return isinstance(error, FencedError | SaveAbortedError | RankTimeoutError)


def follower(error: Exception, disk: Disk) -> bool:
    """Ranks other than 0 end as rank 0 tells them."""
    return isinstance(error, CkptError)


def replaced_meanwhile(error: Exception, disk: Disk) -> bool:
    """A reader may fail when what it was reading has been replaced on purpose, and only then."""
    return isinstance(error, CkptError | OSError) and any(save.buried for save in saves_on(disk).values())


@dataclass(frozen=True)
class Scenario:
    """Actors by name.

    Attributes:
        marks: notes up to which actors have come before the exploration begins.
        may_fail: how actors may end other than well.
        recovers: whether a new attempt has to come up on every disk that is left.
    """

    programs: dict[str, Program]
    marks: dict[str, str] = field(default_factory=dict)
    may_fail: dict[str, MayFail] = field(default_factory=dict)
    recovers: bool = True


@dataclass(frozen=True)
class Explored:
    """How much was seen."""

    states: int
    transitions: int
    disks: int
    recoveries: int
    runs: int


def run(scenario: Scenario, *, preemptions: int | None = None) -> Explored:
    """Explores a scenario, then lets a new attempt recover from every disk it came by.

    A disk is also what is left when every process stops at once, and, with its unfinished files gone, when the power
    does. So these recoveries are from a crash of everybody after each operation of each schedule.

    Raises:
        Violation: with the schedule that leads there.
    """
    theatre = Theatre()
    with theatre.open():
        actors = [Actor(name, functools.partial(program, theatre)) for name, program in scenario.programs.items()]
        judge = ProtocolJudge(theatre, [scenario.may_fail.get(actor.name) for actor in actors], list(scenario.programs))
        explorer = Explorer(theatre, actors, judge)
        start = explorer.rehearse(EMPTY, [scenario.marks.get(actor.name) for actor in actors])
        explorer.explore(start, preemptions=preemptions)
        recovery = Actor("recovery", functools.partial(recover, theatre))
        left: set[int] = set()
        for seen, state in explorer.disks if scenario.recovers else ():
            files = {path: content for path, content in seen.files.items() if not path.startswith(MESSAGE)}
            for disk in (Disk.of(files), Disk.of(files).after_power_loss()):
                if disk.key not in left:
                    left.add(disk.key)
                    try:
                        check_recovery(explorer, recovery, explorer.disk(disk))
                    except Violation as violation:
                        raise Violation(str(violation), explorer.trace(state)) from None
        runs = sum(actor.runs for actor in (*actors, recovery))
        return Explored(explorer.states, explorer.transitions, len(explorer.disks), len(left), runs)


# --- programs ---------------------------------------------------------------------------------------------------------


def recover(theatre: Theatre) -> None:
    """A new attempt: opens, settles, resumes."""
    Job(theatre, "recovery").resume()


def first_attempt(rank: int, world_size: int) -> Program:
    """Has saved iteration 1; saves iteration 2."""

    def program(theatre: Theatre) -> None:
        job = Job(theatre, "first", rank, world_size)
        job.save(1, 11.0)
        theatre.note("ready")
        job.save(2, 12.0)

    return program


def second_attempt(at: int | None = None) -> Program:
    """Resumes on one rank, and saves iteration 2: again, or for the first time."""

    def program(theatre: Theatre) -> None:
        job = Job(theatre, "second")
        job.resume(at)
        job.save(2, 22.0)

    return program


def third_attempt(theatre: Theatre) -> None:
    """One more, that only resumes."""
    Job(theatre, "third").resume()


def replacing_attempt(rank: int, world_size: int) -> Program:
    """Has saved iteration 1; saves it again in the place of the first (W9)."""

    def program(theatre: Theatre) -> None:
        job = Job(theatre, "first", rank, world_size)
        job.save(1, 11.0)
        theatre.note("ready")
        job.save(1, 13.0, on_exists="replace")

    return program


def saving_twice(theatre: Theatre) -> None:
    """Saves iteration 2, and at once again in the place of the first."""
    job = Job(theatre, "first")
    job.save(1, 11.0)
    theatre.note("ready")
    job.save(2, 12.0)
    job.save(2, 14.0, on_exists="replace")


def starting_attempt(theatre: Theatre) -> None:
    """Starts from nothing, resumes from what there is, saves iteration 1."""
    job = Job(theatre, "starting")
    job.resume()
    job.save(1, 21.0)


def reader(theatre: Theatre) -> None:
    """Chooses a save of iteration 1, and reads it."""
    save = commit.current_save(theatre.storage(), FIRST)
    theatre.note("chosen", save is not None)
    theatre.note("read", theatre.values(FIRST, None if save is None else save.save_id))


# --- scenarios --------------------------------------------------------------------------------------------------------

_RANKS = {"rank 0": first_attempt(0, 2), "rank 1": first_attempt(1, 2)}
_READY = {"rank 0": "ready", "rank 1": "ready"}
_ENDS: dict[str, MayFail] = {"rank 0": overtaken, "rank 1": follower}

TAKEOVER = Scenario({**_RANKS, "second": second_attempt()}, _READY, _ENDS)
"""Two ranks save iteration 2 while a second attempt starts, settles, resumes, and saves it again with one rank."""

ROLLBACK = Scenario({**_RANKS, "second": second_attempt(at=1)}, _READY, _ENDS)
"""The same, but the second attempt goes back to iteration 1, whatever the first had committed."""

ADOPTION = Scenario({**_RANKS, "adopter": adopt}, _READY, _ENDS)
"""Two ranks save while somebody adopts what is complete (W7)."""

ADOPTED_TAKEOVER = Scenario({**_RANKS, "second": second_attempt(), "adopter": adopt}, _READY, _ENDS)
"""Both at once."""

REPLACEMENT = Scenario(
    {"rank 0": replacing_attempt(0, 2), "rank 1": replacing_attempt(1, 2), "second": second_attempt()}, _READY, _ENDS
)
"""Two ranks replace iteration 1 while a second attempt starts, settles and resumes (W9)."""

_REPLACING = {"rank 0": replacing_attempt(0, 1)}

WATCHED_REPLACEMENT = Scenario({**_REPLACING, "reader": reader}, {"rank 0": "ready"}, {"reader": replaced_meanwhile})
"""One rank replaces iteration 1 while somebody reads it."""

ADOPTED_REPLACEMENT = Scenario({**_REPLACING, "adopter": adopt}, {"rank 0": "ready"})
"""One rank replaces iteration 1 while somebody adopts what is complete."""

REPLACED_WHILE_ADOPTED = Scenario(
    {"rank 0": saving_twice, "adopter": adopt}, {"rank 0": "ready"}, {"adopter": replaced_meanwhile}
)
"""What somebody is about to adopt is committed, replaced and buried by the trainer that it belongs to."""

SIMULTANEOUS_START = Scenario(
    {"starting": starting_attempt, "third": third_attempt}, may_fail={"starting": overtaken, "third": overtaken}
)
"""Two attempts start on nothing at the same time, whichever is the first; one of them saves iteration 1."""

THREE_ATTEMPTS = Scenario(
    {"rank 0": first_attempt(0, 1), "second": second_attempt(), "third": third_attempt},
    {"rank 0": "ready"},
    {"rank 0": overtaken, "second": overtaken},
)
"""A second attempt is itself overtaken by a third."""
