"""Which sets of local checkpoints can be resumed from and which pieces may go: decided over what all ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.local_sets import (
    Held,
    Known,
    SetId,
    World,
    candidates,
    complete,
    explain,
    known,
    placement,
    removable,
    repeated,
)
from ckptlib.manifest import Begin, Piece
from ckptlib.topology import Topology

FOUR = World("root", 4)
TWO = World("root", 2)


def set_id(iteration: int, attempt: int = 1, number: int = 0) -> SetId:
    return SetId(attempt, iteration, f"{attempt:06d}-{number:012x}-{iteration:08x}", f"process {attempt}")


def piece(of: SetId, rank: int, world: World, **options: Any) -> Held:
    return Held(of, Piece(world.root_id, rank, world.world_size, world.topology), **options)


def holdings(world: World, *by_rank: Sequence[SetId]) -> list[list[Held]]:
    return [[piece(each, rank, world) for each in held] for rank, held in enumerate(by_rank)]


def reason(world: World, held: list[list[Held]], **options: Any) -> str:
    return explain(world, held, **{"at": None, "newer_than": None, "rejected": {}, **options})


def best(world: World, held: list[list[Held]], **options: Any) -> int | None:
    found = candidates(world, held, **{"at": None, "newer_than": None, "rejected": (), **options})
    return found[0].iteration if found else None


A, B, C = set_id(100), set_id(200), set_id(250)


def test_the_newest_set_of_which_every_rank_has_its_piece_is_chosen() -> None:
    held = holdings(FOUR, [A, B, C], [A, B, C], [A, B], [A, B, C])
    assert best(FOUR, held) == 200
    assert reason(FOUR, held, newer_than=B.order[:2]) == (
        "rank 2 has no local checkpoint of iteration 250, but of 100, 200"
    )


def test_one_rank_without_any_leaves_nothing_to_choose_and_is_named() -> None:
    held = holdings(FOUR, [C], [C], [C], [])
    assert best(FOUR, held) is None
    assert reason(FOUR, held) == "rank 3 has no local checkpoint of iteration 250"
    assert reason(FOUR, holdings(FOUR, [C], [], [], [])).endswith("(and 2 more of 4 ranks)")


def test_nothing_is_said_where_nothing_was_to_be_expected() -> None:
    assert reason(FOUR, holdings(FOUR, [], [], [], [])) == ""
    assert reason(TWO, holdings(TWO, [A], []), newer_than=(1, 100)) == ""


def test_pieces_of_two_saves_of_one_iteration_are_never_combined() -> None:
    """The same iteration: of another attempt, or saved twice by one."""
    for other in (set_id(250, attempt=2), set_id(250, number=7)):
        held = holdings(TWO, [C], [other])
        assert best(TWO, held) is None
        assert reason(TWO, held).endswith("has a local checkpoint of iteration 250, but of another save")


def test_records_that_contradict_each_other_are_never_combined() -> None:
    held = holdings(TWO, [C], [replace(C, attempt_id="another process")])
    assert best(TWO, held) is None


def test_a_set_of_another_world_is_of_no_use() -> None:
    held = holdings(FOUR, [C], [C], [C], [C])
    assert best(TWO, held[:2]) is None
    assert reason(TWO, held[:2]) == "the local checkpoint of iteration 250 is of 4 ranks, this job has 2"
    tensor_parallel = World("root", 4, Topology(tp=4))
    assert best(tensor_parallel, held) is None
    assert "is of topology" in reason(tensor_parallel, held)
    assert best(World("root", 4, Topology(dp=4)), held) == 250  # what no topology means
    assert best(World("another root", 4), held) is None


def test_a_piece_of_another_rank_serves_nobody() -> None:
    """Ranks that changed hosts: rank 0 finds what was rank 1's."""
    held = [[piece(C, 1, TWO)], [piece(C, 0, TWO)]]
    assert placement(C, TWO, held) == {}
    assert best(TWO, held) is None


@pytest.mark.parametrize("at", [0, 100, 150])
def test_r6_an_explicit_iteration_is_exact_and_0_is_one(at: int) -> None:
    zero = set_id(0)
    held = holdings(TWO, [zero, A, B], [zero, A, B])
    assert best(TWO, held, at=at) == (None if at == 150 else at)


def test_the_order_is_attempt_then_iteration() -> None:
    """W8: a rolled-back attempt's 110 is newer than the older attempt's 200."""
    later = set_id(110, attempt=2)
    held = holdings(TWO, [B, later], [B, later])
    assert best(TWO, held) == 110
    assert best(TWO, held, newer_than=(1, 250)) == 110
    assert best(TWO, held, newer_than=(2, 110)) is None  # as good on the run's storage: that one is read


def test_c16_a_piece_that_was_found_damaged_is_passed_over_and_the_reason_is_kept() -> None:
    held = holdings(TWO, [B, C], [B, C])
    text = "rank 1 has a damaged local checkpoint of iteration 250: x"
    assert best(TWO, held, rejected={C.save_id: text}) == 200
    assert reason(TWO, held, newer_than=B.order[:2], rejected={C.save_id: text}) == text
    held[1][1] = replace(held[1][1], damage="bad digest")
    assert best(TWO, held) == 200
    assert reason(TWO, held, newer_than=B.order[:2]).endswith("iteration 250: bad digest")


def test_a_piece_says_what_it_is_in_its_begin_record() -> None:
    own = Piece("root", 3, 4, Topology(dp=2, tp=2))
    begin = Begin("id", "run", 1, "a", 5, 1, "digest", piece=own)
    assert Begin.decode(begin.encode(), "begin.json").piece == own
    plain = Begin("id", "run", 1, "a", 5, 1, "digest")
    assert b"piece" not in plain.encode()
    assert Begin.decode(plain.encode(), "begin.json").piece is None


# --- removal ----------------------------------------------------------------------------------------------------------


def removed(held: Sequence[Held], keep: int, *complete: SetId, dead: Sequence[SetId] = ()) -> list[int]:
    facts = Known(complete, frozenset(each.save_id for each in dead))
    return [each.set.iteration for each in removable(held, facts, keep)]


def test_what_all_may_still_agree_on_stays_whatever_this_rank_has_newer() -> None:
    mine = [piece(each, 0, TWO) for each in (A, B, C)]
    assert removed(mine, 1) == []
    assert removed(mine, 1, A) == []
    assert removed(mine, 1, B, A) == [100]
    assert removed(mine, 1, C, B, A) == [100, 200]
    assert removed(mine, 2, C, B, A) == [100]


def test_a_set_that_will_never_be_complete_takes_no_slot() -> None:
    """C04."""
    mine = [piece(each, 0, TWO) for each in (A, B, C)]
    assert removed(mine, 2, C, A) == [200]
    assert removed(mine, 2, A, dead=[B]) == [200]


def test_what_is_being_written_is_left_alone() -> None:
    assert removed([piece(A, 0, TWO, pending=True)], 1, B) == []


def test_w9_a_complete_set_or_one_that_is_being_written_would_be_repeated_and_one_that_failed_would_not() -> None:
    def would(iteration: int, held: list[list[Held]]) -> list[int]:
        return [each.iteration for each in repeated(iteration, 1, held, known(TWO, held, 1))]

    assert would(200, holdings(TWO, [A, B], [A, B])) == [200]
    assert would(200, holdings(TWO, [A, B], [A])) == [], "rank 1 has failed"
    assert would(200, holdings(TWO, [A], [A, B])) == [], "rank 0 has failed"
    assert would(250, holdings(TWO, [A, B], [A, B])) == []
    writing = [[piece(B, rank, TWO, pending=rank == 1)] for rank in range(2)]
    assert would(200, writing) == [200], "rank 0 is done, rank 1 is not"
    other = set_id(200, attempt=2)
    assert would(200, holdings(TWO, [other], [other])) == [], "of another attempt"


def test_only_a_set_of_this_attempt_is_given_up_as_dead() -> None:
    """A rank that finds none of its older pieces may look in the wrong place: the others keep theirs."""
    own, older = set_id(300, attempt=2), set_id(250, attempt=1)
    facts = known(TWO, holdings(TWO, [older, own], []), attempt=2)
    assert facts.dead == {own.save_id}
    pending = [[piece(own, 0, TWO)], [piece(own, 1, TWO, pending=True)]]
    assert known(TWO, pending, attempt=2).dead == frozenset()


class Job:
    """Ranks that save and die, as `local.LocalTier` does it: exchange, removal, write, each of which may not happen."""

    def __init__(self, world: World, keep: int) -> None:
        self.world, self.keep, self.attempt, self.iteration = world, keep, 1, 0
        self.disks: list[dict[SetId, Held]] = [{} for _ in range(world.world_size)]

    def holdings(self) -> list[list[Held]]:
        return [list(disk.values()) for disk in self.disks]

    def save(self, done: Sequence[int]) -> None:
        """Each rank comes so far: 0 nothing, 1 removed one, 2 removed all, 3 begun, 4 committed."""
        self.iteration += 10
        new = set_id(self.iteration, self.attempt)
        facts = known(self.world, self.holdings(), self.attempt)
        for rank, (disk, far) in enumerate(zip(self.disks, done, strict=True)):
            going = removable(list(disk.values()), facts, self.keep)
            for each in going if far >= 2 else going[:far]:
                del disk[each.set]
            if far >= 3:
                disk[new] = piece(new, rank, self.world, pending=far == 3)
        if min(done) < 4:  # somebody died: all start again, and what was left unfinished goes
            self.restart()

    def fail(self, rank: int) -> None:
        """A save that fails on one rank; the job goes on."""
        self.iteration += 10
        new = set_id(self.iteration, self.attempt)
        facts = known(self.world, self.holdings(), self.attempt)
        for other, disk in enumerate(self.disks):
            for each in removable(list(disk.values()), facts, self.keep):
                del disk[each.set]
            if other != rank:
                disk[new] = piece(new, other, self.world)

    def restart(self) -> None:
        self.attempt += 1
        for disk in self.disks:
            for each in [each for each in disk.values() if each.pending]:
                del disk[each.set]


@settings(max_examples=300)
@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_no_crash_of_any_rank_at_any_point_takes_away_what_all_could_agree_on(
    data: st.DataObject, ranks: int, keep: int
) -> None:
    """The newest common set never gets older, no set is chosen that some rank lacks, and memory is bounded."""
    job = Job(World("root", ranks), keep)
    newest: tuple[int, int, str] | None = None
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["save", "crash", "restart", "fail"])):
            case "save":
                job.save([4] * ranks)
            case "crash":
                job.save([data.draw(st.integers(0, 4)) for _ in range(ranks)])
            case "restart":
                job.restart()
            case "fail":
                job.fail(data.draw(st.integers(0, ranks - 1)))
        whole = complete(job.world, job.holdings())
        for each in whole:
            assert all(each in disk for disk in job.disks)
        if newest is not None:
            assert whole
            assert whole[0].order >= newest
        newest = whole[0].order if whole else None
    for _ in range(2):  # what crashes left is gone when a later set is known to be complete
        job.save([4] * ranks)
    assert {len(disk) for disk in job.disks} <= {*range(2, keep + 2)}


@given(st.data())
def test_what_one_rank_lost_is_never_chosen(data: st.DataObject) -> None:
    job = Job(World("root", 3), 3)
    for _ in range(3):
        job.save([4] * 3)
    for disk in job.disks:
        for lost in data.draw(st.sets(st.sampled_from(sorted(disk, key=lambda each: each.order)))):
            del disk[lost]
    found = candidates(job.world, job.holdings(), at=None, newer_than=None, rejected=())
    common = set.intersection(*(set(disk) for disk in job.disks))
    assert found == sorted(common, key=lambda each: each.order, reverse=True)
    if not found and any(job.disks):
        assert "has no local checkpoint" in explain(job.world, job.holdings(), at=None, newer_than=None, rejected={})
