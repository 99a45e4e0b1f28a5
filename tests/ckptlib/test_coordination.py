"""Ranks agree through the job's store: deadlines that name who is missing, failures that reach everybody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from ckptlib.coordination import SoloGroup, StoreGroup, agree, hand_out, lead, new_group
from ckptlib.errors import CoordinationError, RankFailedError, RankTimeoutError, StateError

WORLD = 3


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


def on_ranks(
    store: dist.Store, work: Callable[[StoreGroup], Any], *, absent: tuple[int, ...] = (), timeout: float = 10.0
) -> dict[int, Any]:
    """What `work` returned or raised on each rank that is present; one thread and one client each."""
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        client = dist.TCPStore("127.0.0.1", store.port, None, is_master=False)
        group = StoreGroup(client, rank, WORLD, timeout=timeout, prefix="test")
        try:
            results[rank] = work(group)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return results


def test_gather_collects_in_rank_order_and_broadcast_gives_everybody_the_same(store: dist.Store) -> None:
    def work(group: StoreGroup) -> Any:
        group.next_round()
        gathered = group.gather("who", {"rank": group.rank})
        return gathered, group.broadcast("all", None if gathered is None else len(gathered))

    results = on_ranks(store, work)
    assert results[0] == ([{"rank": 0}, {"rank": 1}, {"rank": 2}], WORLD)
    assert results[1] == results[2] == (None, WORLD)


def test_each_rank_gets_its_own_part_and_the_error_when_there_is_none(store: dist.Store) -> None:
    def work(group: StoreGroup) -> Any:
        group.next_round()
        mine = hand_out(group, "parts", lambda: [f"part {rank}" for rank in range(WORLD)])
        try:
            hand_out(group, "nothing", lambda: [][group.rank])  # type: ignore[misc]
        except Exception as error:
            return mine, type(error)

    results = on_ranks(store, work)
    assert [results[rank][0] for rank in range(WORLD)] == ["part 0", "part 1", "part 2"]
    assert [results[rank][1] for rank in range(WORLD)] == [IndexError] * WORLD
    assert hand_out(SoloGroup(), "parts", lambda: ["only"]) == "only"


def test_names_may_repeat_from_round_to_round_and_old_messages_are_dropped(store: dist.Store) -> None:
    def work(group: StoreGroup) -> list[Any]:
        seen = []
        for i in range(20):
            group.next_round()
            group.gather("x", (i, group.rank))
            seen.append(group.broadcast("y", i if group.rank == 0 else None))
        return seen

    results = on_ranks(store, work)
    assert all(results[rank] == list(range(20)) for rank in range(WORLD))
    assert store.num_keys() < 5 * WORLD  # those of the last two rounds, not of twenty


def test_what_rank_zero_said_waits_for_ranks_that_come_late(store: dist.Store) -> None:
    """A job's first operations: an attempt begins, there is nothing to resume from, the initial state is saved."""
    ahead = threading.Event()

    def work(group: StoreGroup) -> Any:
        if group.rank == 1:
            assert ahead.wait(10)
        seen = []
        for i in range(4):
            group.next_round()
            seen.append(lead(group, "said", lambda i=i: i))  # type: ignore[misc]
        group.next_round()
        if group.rank == 0:
            ahead.set()
        return seen, agree(group, "done", lambda: None) is not None

    results = on_ranks(store, work, timeout=1.0)
    assert results == {rank: ([0, 1, 2, 3], rank == 0) for rank in range(WORLD)}


def test_a_rank_that_does_not_answer_is_named_within_the_timeout(store: dist.Store) -> None:
    def work(group: StoreGroup) -> Any:
        group.next_round()
        return group.gather("write", group.rank)

    started = time.monotonic()
    results = on_ranks(store, work, absent=(1,), timeout=1.0)
    assert 0.9 < time.monotonic() - started < 5.0
    assert isinstance(results[0], RankTimeoutError)
    assert isinstance(results[0], TimeoutError)
    assert results[0].ranks == (1,)
    assert "write: no answer from rank 1 within 1 s" in str(results[0])


def test_a_silent_rank_zero_is_named_too(store: dist.Store) -> None:
    def work(group: StoreGroup) -> Any:
        group.next_round()
        return group.broadcast("plan")

    results = on_ranks(store, work, absent=(0,), timeout=0.5)
    for rank in (1, 2):
        assert isinstance(results[rank], RankTimeoutError)
        assert results[rank].ranks == (0,)


def test_a_failure_on_one_rank_reaches_all_and_names_it_and_its_cause(store: dist.Store) -> None:
    def work(group: StoreGroup) -> Any:
        group.next_round()

        def part() -> int:
            if group.rank == 1:
                raise OSError(28, "No space left on device", "__1_0.distcp")
            return group.rank

        return agree(group, "write", part)

    results = on_ranks(store, work)
    assert isinstance(results[1], OSError)  # its own error, as it was
    for rank in (0, 2):
        assert isinstance(results[rank], RankFailedError)
        assert {*results[rank].causes} == {1}
        assert "rank 1: OSError" in str(results[rank])
        assert "__1_0.distcp" in str(results[rank])


def test_every_failed_rank_is_named_also_rank_zero(store: dist.Store) -> None:
    def work(group: StoreGroup) -> Any:
        group.next_round()

        def part() -> None:
            if group.rank != 1:
                raise StateError(f"broken on {group.rank}")

        return agree(group, "write", part)

    results = on_ranks(store, work)
    assert isinstance(results[0], StateError)
    assert isinstance(results[1], RankFailedError)
    assert results[1].causes == {0: "StateError: broken on 0", 2: "StateError: broken on 2"}


def test_agreement_gives_rank_zero_all_results(store: dist.Store) -> None:
    def work(group: StoreGroup) -> Any:
        group.next_round()
        return agree(group, "count", lambda: group.rank * 10)

    assert on_ranks(store, work) == {0: [0, 10, 20], 1: None, 2: None}


def test_a_hanging_rank_ends_an_agreement_on_every_other_rank(store: dist.Store) -> None:
    """P15: nobody waits for ever, and all know for whom they waited."""

    def work(group: StoreGroup) -> Any:
        group.next_round()
        return agree(group, "write", lambda: group.rank)

    results = on_ranks(store, work, absent=(2,), timeout=1.0)
    for rank in (0, 1):
        assert isinstance(results[rank], RankTimeoutError)
        assert results[rank].ranks == (2,)


def test_the_leaders_result_or_error_is_everybodys(store: dist.Store) -> None:
    def work(group: StoreGroup) -> Any:
        group.next_round()
        assert lead(group, "first", lambda: {"save": group.rank}) == {"save": 0}

        def fail() -> None:
            raise StateError("no such plan")

        lead(group, "second", fail)

    results = on_ranks(store, work)
    assert all(isinstance(results[rank], StateError) and "no such plan" in str(results[rank]) for rank in range(WORLD))


def test_an_error_that_cannot_travel_is_told_by_its_text(store: dist.Store) -> None:
    class LocalError(Exception):
        pass

    def work(group: StoreGroup) -> Any:
        group.next_round()

        def fail() -> None:
            raise LocalError("only here")

        return lead(group, "choose", fail)

    results = on_ranks(store, work)
    assert isinstance(results[0], LocalError)
    for rank in (1, 2):
        assert isinstance(results[rank], RankFailedError)
        assert "LocalError: only here" in str(results[rank])


def test_a_lost_store_is_said_to_be_lost(store: dist.Store) -> None:
    own = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", own.port, None, is_master=False)
    group = StoreGroup(client, 1, 2, timeout=5.0, prefix="test")
    group.next_round()
    del own
    with pytest.raises(CoordinationError, match="the job's store is gone"):
        group.broadcast("plan")


def test_one_process_needs_no_store() -> None:
    group = new_group(timeout=1.0)
    assert isinstance(group, SoloGroup)
    assert group.gather("x", 1) == [1]
    assert group.broadcast("x", 2) == 2
    assert agree(group, "x", lambda: 3) == [3]
    assert lead(group, "x", lambda: 4) == 4
    with pytest.raises(StateError, match="own"):
        agree(group, "x", lambda: (_ for _ in ()).throw(StateError("own")))
