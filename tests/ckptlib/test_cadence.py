"""When to save and when to exit: in Megatron's order, the same on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.cadence import CAUSES, Action, Schedule, Sight, decide, look, merge, needs_agreement
from ckptlib.cadence_loop import Cadence
from ckptlib.coordination import SoloGroup, StoreGroup
from ckptlib.errors import DisagreementError, RankTimeoutError, StateError

QUIET = Schedule(exit_signals=())


class Heard:
    """Signals as a test says."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.received: tuple[str, ...] = ()


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


# --- the order --------------------------------------------------------------------------------------------------------


def plain_loop(
    schedule: Schedule, iteration: int, *, signalled: bool, save_due: bool, exit_due: bool
) -> tuple[list[str], bool]:
    """The end of a step as a training loop writes it out: the saves in order, and whether it leaves."""
    saves: list[str] = []
    if signalled:
        saves.append("persistent")
        return saves, True

    if (schedule.save_interval and iteration % schedule.save_interval == 0) or save_due:
        saves.append("persistent")
    elif schedule.non_persistent_interval and iteration % schedule.non_persistent_interval == 0:
        saves.append(schedule.non_persistent_kind)

    if exit_due:
        if not saves:
            saves.append("persistent")
        return saves, True

    if (schedule.exit_interval and iteration % schedule.exit_interval == 0) or iteration in schedule.phase_transitions:
        if not saves:
            saves.append("persistent")
        return saves, True
    return saves, False


intervals = st.none() | st.integers(1, 12)
schedules = st.builds(
    Schedule,
    save_interval=intervals,
    save_seconds=st.none() | st.integers(1, 50),
    non_persistent_interval=intervals,
    non_persistent_kind=st.sampled_from(["non_persistent_global", "non_persistent_local"]),
    exit_duration=st.none() | st.integers(1, 200),
    exit_interval=st.none() | st.integers(1, 40),
    phase_transitions=st.frozensets(st.integers(0, 40), max_size=2),
    exit_signals=st.sampled_from([(), ("SIGTERM",), ("SIGTERM", "SIGUSR1")]),
    agree_every=st.integers(1, 3),
)


@given(
    schedule=schedules,
    iteration=st.integers(0, 60),
    signals=st.lists(st.tuples(st.just("SIGTERM"), st.integers(0, 9)), max_size=2),
    save_due=st.booleans(),
    exit_due=st.booleans(),
)
def test_every_decision_is_that_of_the_plain_loop_but_an_exit_leaves_a_persistent_checkpoint(
    schedule: Schedule, iteration: int, signals: list[tuple[str, int]], save_due: bool, exit_due: bool
) -> None:
    saves, leaves = plain_loop(
        schedule,
        iteration,
        signalled=bool(signals),
        save_due=save_due and schedule.save_seconds is not None,
        exit_due=exit_due and schedule.exit_duration is not None,
    )
    assert len(saves) <= 1
    action = decide(schedule, Sight(iteration, tuple(signals), save_due, exit_due))
    assert action.exit == leaves
    assert action.save == ("persistent" if leaves else saves[0] if saves else None)
    assert bool(action.causes) == bool(action.reason) == (action.save is not None)
    assert list(action.causes) == [cause for cause in CAUSES if cause in action.causes]


@given(
    schedule=schedules,
    steps=st.lists(
        st.tuples(st.integers(0, 20), st.sampled_from([None] * 20 + ["SIGTERM", "SIGUSR1", "SIGHUP"])),
        min_size=1,
        max_size=60,
    ),
)
def test_a_whole_training_saves_and_exits_where_a_plain_loop_does(
    schedule: Schedule, steps: list[tuple[int, str | None]]
) -> None:
    clock, heard = Clock(1000.0), Heard(*schedule.exit_signals)
    cadence = Cadence(schedule, signals=heard, group=SoloGroup(), clock=clock)
    saved_at = 1000.0
    for iteration, (seconds, arrived) in enumerate(steps, start=1):
        clock.now += seconds
        heard.received += () if arrived is None else (arrived,)
        looks = needs_agreement(schedule, iteration)
        saves, leaves = plain_loop(
            schedule,
            iteration,
            signalled=looks and any(name in schedule.exit_signals for name in heard.received),
            save_due=looks and schedule.save_seconds is not None and clock.now - saved_at >= schedule.save_seconds,
            exit_due=looks and schedule.exit_duration is not None and clock.now - 1000.0 >= schedule.exit_duration,
        )
        action = cadence.should_save_now(iteration)
        assert (action.iteration, action.exit) == (iteration, leaves)
        assert action.save == ("persistent" if leaves else saves[0] if saves else None)
        if action.save == "persistent":
            saved_at = clock.now
        if leaves:
            break


def action_at(schedule: Schedule, iteration: int, **sight: Any) -> Action:
    return decide(schedule, Sight(iteration, **sight))


def test_reasons_are_sentences_that_name_iteration_signal_and_rank() -> None:
    schedule = Schedule(save_interval=100, non_persistent_interval=10, exit_duration=3600, exit_interval=500)
    assert action_at(schedule, 7) == Action(7)
    assert action_at(schedule, 30).reason == "iteration 30: non-persistent interval of 10"
    assert action_at(schedule, 500) == Action(
        500,
        "persistent",
        True,
        ("save_interval", "exit_interval"),
        "iteration 500: save interval of 100; exit interval of 500",
    )
    assert action_at(schedule, 31, exit_due=True).reason == "iteration 31: exit duration of 3600 s"
    signals = tuple(("SIGTERM", rank) for rank in range(3, 12))
    assert action_at(schedule, 500, signals=signals).reason == "SIGTERM on rank 3, 4, 5, 6 and 5 more"
    assert action_at(schedule, 500, signals=(("SIGUSR1", 0),)).causes == ("signal",)


def test_an_exit_turns_a_non_persistent_save_into_a_persistent_one() -> None:
    action = action_at(Schedule(non_persistent_interval=10, phase_transitions=frozenset({20})), 20)
    assert (action.save, action.exit, action.causes) == ("persistent", True, ("phase_transition",))


def test_iteration_zero_is_a_multiple_of_everything() -> None:
    assert action_at(Schedule(save_interval=5), 0).save == "persistent"


# --- clocks -----------------------------------------------------------------------------------------------------------


def test_seconds_count_from_the_last_persistent_save_whatever_led_to_it() -> None:
    clock = Clock()
    cadence = Cadence(
        Schedule(save_interval=10, save_seconds=60, non_persistent_interval=3, exit_signals=()),
        group=SoloGroup(),
        clock=clock,
    )
    clock.now = 50.0
    assert cadence.should_save_now(10).causes == ("save_interval",)
    clock.now = 109.0
    assert cadence.should_save_now(12).save == "non_persistent_global"
    clock.now = 110.0
    assert cadence.should_save_now(13).causes == ("save_seconds",)
    clock.now = 169.0
    assert cadence.should_save_now(14) == Action(14)


def test_a_clock_that_jumps_back_makes_nothing_due_at_once() -> None:
    clock = Clock(1e9)
    schedule = Schedule(save_seconds=60, exit_duration=60, exit_signals=())
    cadence = Cadence(schedule, group=SoloGroup(), clock=clock)
    clock.now = 5.0
    assert cadence.should_save_now(1) == Action(1)


def test_the_exit_duration_counts_from_the_beginning_of_the_job_when_that_was_earlier() -> None:
    schedule = Schedule(exit_duration=60, exit_signals=())
    assert Cadence(schedule, group=SoloGroup(), clock=Clock(100.0), started_at=40.0).should_save_now(1).exit
    assert not Cadence(schedule, group=SoloGroup(), clock=Clock(100.0)).should_save_now(1).exit


def test_the_same_step_gets_the_same_answer_twice() -> None:
    heard = Heard("SIGTERM")
    cadence = Cadence(Schedule(save_interval=5), signals=heard, group=SoloGroup())
    first = cadence.should_save_now(5)
    heard.received = ("SIGTERM",)
    assert cadence.should_save_now(5) is first
    assert cadence.should_save_now(6).exit


# --- ranks ------------------------------------------------------------------------------------------------------------


@given(schedule=schedules, iteration=st.integers(0, 100))
def test_only_clocks_and_signals_need_agreement(schedule: Schedule, iteration: int) -> None:
    involved = bool(schedule.exit_signals) or schedule.save_seconds is not None or schedule.exit_duration is not None
    assert needs_agreement(schedule, iteration) == (involved and iteration % schedule.agree_every == 0)
    if not needs_agreement(schedule, iteration):
        sight = look(schedule, iteration, rank=0, now=1e9, started_at=0, saved_at=0, signals=["SIGTERM"])
        assert sight == Sight(iteration)  # or a rank would decide something that the others do not know of


sights = st.builds(
    Sight,
    iteration=st.just(6),
    signals=st.sampled_from([(), (("SIGTERM", 0),)]),
    save_due=st.booleans(),
    exit_due=st.booleans(),
)


@given(st.lists(sights, min_size=1, max_size=5))
def test_what_one_rank_sees_all_see(each: list[Sight]) -> None:
    together = merge(each)
    assert bool(together.signals) == any(sight.signals for sight in each)
    assert together.save_due == any(sight.save_due for sight in each)
    assert together.exit_due == any(sight.exit_due for sight in each)


def test_ranks_at_different_iterations_are_named() -> None:
    with pytest.raises(DisagreementError, match=r"rank 0 is at iteration 7, rank 2 at 8 \(1 of 3 ranks elsewhere\)"):
        merge([Sight(7), Sight(7), Sight(8)])


def on_two_ranks(work: Callable[[StoreGroup], Any], *, timeout: float = 10.0) -> dict[int, Any]:
    """What `work` returned or raised on each of two ranks: threads, each with a client of one TCPStore."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        client = dist.TCPStore("127.0.0.1", store.port, None, is_master=False)
        try:
            results[rank] = work(StoreGroup(client, rank, 2, timeout=timeout, prefix="cadence"))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return results


def test_two_ranks_agree_although_their_clocks_and_signals_differ() -> None:
    """The clock of rank 1 runs twice as fast; the signal reaches rank 1 only, before step 9."""
    schedule = Schedule(save_interval=7, save_seconds=10, exit_signals=("SIGUSR1",))

    def train(group: StoreGroup) -> list[Action]:
        clock, heard = Clock(), Heard("SIGUSR1")
        cadence = Cadence(schedule, signals=heard, group=group, clock=clock)
        actions = []
        for iteration in range(1, 20):
            clock.now += 2.5 * (group.rank + 1)
            if (group.rank, iteration) == (1, 9):
                heard.received = ("SIGUSR1",)
            actions.append(cadence.should_save_now(iteration))
            if actions[-1].exit:
                break
        return actions

    results = on_two_ranks(train)
    assert results[0] == results[1]
    assert [(action.iteration, *action.causes) for action in results[0] if action.save] == [
        (2, "save_seconds"),
        (4, "save_seconds"),
        (6, "save_seconds"),
        (7, "save_interval"),
        (9, "signal"),
    ]
    assert results[0][-1].reason == "SIGUSR1 on rank 1"


def test_signals_are_compared_only_as_often_as_the_schedule_says() -> None:
    def train(group: StoreGroup) -> list[int]:
        heard = Heard("SIGTERM")
        heard.received = ("SIGTERM",) if group.rank == 0 else ()
        cadence = Cadence(Schedule(agree_every=4), signals=heard, group=group)
        return [iteration for iteration in range(1, 5) if cadence.should_save_now(iteration).exit]

    assert on_two_ranks(train) == {0: [4], 1: [4]}


def test_iterations_alone_cost_no_message() -> None:
    def train(group: StoreGroup) -> Action:
        cadence = Cadence(Schedule(save_interval=2, exit_interval=4, exit_signals=()), group=group)
        return cadence.should_save_now(2 if group.rank == 0 else 4)  # neither waits for the other

    results = on_two_ranks(train)
    assert (results[0].exit, results[1].exit) == (False, True)


def test_ranks_that_ask_about_different_steps_both_learn_it() -> None:
    def train(group: StoreGroup) -> Action:
        cadence = Cadence(Schedule(), signals=Heard("SIGTERM"), group=group)
        return cadence.should_save_now(10 + group.rank)

    results = on_two_ranks(train)
    assert all(isinstance(results[rank], DisagreementError) for rank in range(2))
    assert "rank 0 is at iteration 10, rank 1 at 11" in str(results[1])


def test_ranks_with_different_schedules_both_learn_it() -> None:
    def train(group: StoreGroup) -> Action:
        schedule = Schedule(save_interval=10 + group.rank)
        return Cadence(schedule, signals=Heard("SIGTERM"), group=group).should_save_now(1)

    results = on_two_ranks(train)
    for rank in range(2):
        assert isinstance(results[rank], DisagreementError)
        assert "rank 1 has another schedule than rank 0" in str(results[rank])


def test_a_rank_that_never_asks_is_named_in_time() -> None:
    def train(group: StoreGroup) -> Action | None:
        cadence = Cadence(Schedule(), signals=Heard("SIGTERM"), group=group)
        return cadence.should_save_now(1) if group.rank == 0 else None

    error = on_two_ranks(train, timeout=0.5)[0]
    assert isinstance(error, RankTimeoutError)
    assert error.ranks == (1,)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"save_interval": 0}, "save_interval=0, expected a positive whole number"),
        ({"save_interval": True}, "save_interval=True"),
        ({"non_persistent_interval": -1}, "non_persistent_interval=-1"),
        ({"exit_interval": 2.5}, "exit_interval=2.5"),
        ({"agree_every": 0}, "agree_every=0"),
        ({"save_seconds": 0}, "save_seconds=0, expected a positive number of seconds"),
        ({"exit_duration": float("nan")}, "exit_duration=nan"),
        ({"phase_transitions": [5, -1]}, "phase_transitions has -1"),
        ({"non_persistent_kind": "persistent"}, "is not a non-persistent kind"),
        ({"exit_signals": ("SIGTREM",)}, "exit_signals has 'SIGTREM'"),
    ],
)
def test_a_wrong_schedule_is_refused_with_the_name_of_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StateError, match=message):
        Schedule(**changes)


@pytest.mark.parametrize("iteration", [-1, 2.0, True, None])
def test_an_iteration_is_a_count(iteration: Any) -> None:
    with pytest.raises(StateError, match="expected the number of finished steps"):
        Cadence(QUIET, group=SoloGroup()).should_save_now(iteration)


def test_exit_signals_that_nobody_listens_to_are_an_error_and_not_a_job_that_never_saves() -> None:
    with pytest.raises(StateError, match="nobody listens to SIGTERM"):
        Cadence(Schedule(), group=SoloGroup())
    with pytest.raises(StateError, match="nobody listens to SIGUSR2"):
        Cadence(Schedule(exit_signals=("SIGTERM", "SIGUSR2")), signals=Heard("SIGTERM"), group=SoloGroup())
