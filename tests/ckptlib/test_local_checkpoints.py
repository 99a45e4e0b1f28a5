"""Checkpoints that every rank keeps on its own host: saved, agreed on, verified, and given up for the global one."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

import ckptlib
from ckptlib import Checkpointer, LocalOptions, ShardedTensor, Topology, commit, roots
from ckptlib.async_options import AsyncOptions
from ckptlib.errors import (
    BackgroundSaveError,
    CheckpointExistsError,
    FencedError,
    NoResumePointError,
    RankFailedError,
    StateError,
    StorageError,
    UnsupportedError,
)
from ckptlib.events import Notice
from ckptlib.local_pieces import Pieces, run_directory
from ckptlib.storage import PosixStorage
from tests.support.ranks import run_ranks, try_ranks
from tests.support.roots import Crash, crash_at, files_of, note, noted
from tests.support.workers import marked_workers

pytestmark = pytest.mark.timeout(300)

LOCAL = "non_persistent_local"
THREAD = AsyncOptions(worker="thread")


@pytest.fixture
def shm() -> Iterator[str]:
    """A directory in memory, as jobs would use it."""
    path = tempfile.mkdtemp(prefix="ckptlib-test-", dir="/dev/shm")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def job(root: str, shm: str, *, keep: int = 1, **options: Any) -> Checkpointer:
    """The next attempt of the run."""
    return Checkpointer(root, **{"run": "run", "timeout": 30.0, "local": LocalOptions(shm, keep), **options})


def state(rank: int = 0, iteration: int = 0) -> dict[str, Any]:
    """What differs between ranks, shards of a tensor, and something that lies transposed in memory."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    shard = ShardedTensor.from_rank_offsets("shard", torch.full((2,), float(iteration)), (0, rank, world))
    return {
        "model": {
            "w": torch.full((64,), iteration + rank / 16),
            "t": torch.arange(6.0).reshape(2, 3).T + rank,
            "shard": shard,
        },
        "optimizer": {"step": iteration, "name": f"rank {rank}"},
    }


def assert_is(found: dict[str, Any], rank: int, iteration: int) -> None:
    want = state(rank, iteration)
    assert torch.equal(found["model"]["w"], want["model"]["w"])
    assert torch.equal(found["model"]["t"], want["model"]["t"])
    assert torch.equal(found["model"]["shard"].data, want["model"]["shard"].data)
    assert found["optimizer"] == want["optimizer"]


def save(checkpointer: Checkpointer, *iterations: int, rank: int = 0, kind: Any = LOCAL, **options: Any) -> None:
    for iteration in iterations:
        checkpointer.save(state(rank, iteration), iteration=iteration, kind=kind, **options)


def rank_directory(root: str, shm: str, rank: int = 0) -> Path:
    identity = roots.read_identity(PosixStorage(), root)
    assert identity is not None
    return Path(run_directory(shm, identity.root_id, root), f"rank_{rank:05d}")


def copy_run(trained: tuple[str, str, Any], root: str, shm: str) -> None:
    """The run elsewhere, with its pieces, as if it had always been there."""
    shutil.copytree(trained[0], root)
    shutil.copytree(trained[1], shm)
    here = rank_directory(root, shm).parent
    os.rename(Path(shm, rank_directory(*trained[:2]).parent.name), here)


def pieces(root: str, shm: str, rank: int = 0) -> list[int]:
    """Iterations that a rank has on its host."""
    return [int(path.name[5:]) for path in sorted(rank_directory(root, shm, rank).glob("iter_*"))]


def flip_a_byte(directory: Path) -> None:
    path = max(directory.glob("__*"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# --- on real ranks ----------------------------------------------------------------------------------------------------


def streams() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


def train(rank: int, root: str, shm: str, world: int, keep: int, io_mode: Any) -> list[float]:
    """A persistent checkpoint at 200, local ones after it; what the RNG would draw next."""
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    checkpointer = job(root, shm, keep=keep, topology=Topology(dp=world), io_mode=io_mode)
    shared = {"model": {"w": torch.full((64,), 200.0)}, "optimizer": {"step": 200, "name": "all"}}
    checkpointer.save(shared, iteration=200, kind="persistent", io_mode="sync")
    for iteration in (210, 220, 230, 240, 250):
        checkpointer.save(
            state(rank, iteration),
            iteration=iteration,
            kind=LOCAL,
            progress={"consumed_samples": 8 * iteration},
            rerun_state={"rank": rank},
        )
    drawn = streams()
    checkpointer.close()
    return drawn


def resume(rank: int, root: str, shm: str, world: int, at: int | None = None) -> dict[str, Any]:
    notices: list[Notice] = []
    checkpointer = job(root, shm, topology=Topology(dp=world), on_event=notices.append)
    target = state(rank)
    if at in (None, 210, 220, 230, 240, 250):
        target["model"]["w"].fill_(-1)
    try:
        restored = checkpointer.restore(target, at=at, strict="warn")
    except NoResumePointError as error:
        return {"iteration": -1, "attempt": 1, "reason": str(error), "notices": [notice.name for notice in notices]}
    if restored.iteration > 200:
        assert_is(target, rank, restored.iteration)
    else:
        assert torch.equal(target["model"]["w"], torch.full((64,), 200.0))
    return {
        "iteration": restored.iteration,
        "attempt": int((restored.save_id or "0").split("-")[0]),
        "reason": restored.reason,
        "progress": dict(restored.progress),
        "rerun": restored.rerun_state,
        "notices": [notice.name for notice in notices],
        "next": streams(),
        "parent": checkpointer._ledger.parent,
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, list[list[float]]]:
    """A run of three ranks, local 230 to 250 kept: its root, where the local ones are, what the RNG would draw."""
    base = tmp_path_factory.mktemp("trained")
    root, kept = str(base / "run"), str(base / "local")
    drawn = run_ranks(3, train, root, kept, 3, 2, "sync")
    return root, kept, drawn


def lose_all(root: str, shm: str) -> None:
    """The node of rank 2 was replaced."""
    shutil.rmtree(rank_directory(root, shm, 2))


def lose_one(root: str, shm: str) -> None:
    shutil.rmtree(rank_directory(root, shm, 2) / "iter_0000250")


def flip_one(root: str, shm: str) -> None:
    flip_a_byte(rank_directory(root, shm, 1) / "iter_0000250")


def flip_two(root: str, shm: str) -> None:
    flip_one(root, shm)
    flip_a_byte(rank_directory(root, shm, 0) / "iter_0000240")


def flip_three(root: str, shm: str) -> None:
    flip_two(root, shm)
    flip_a_byte(rank_directory(root, shm, 2) / "iter_0000230")


def damage_a_record(root: str, shm: str) -> None:
    (path,) = (rank_directory(root, shm, 1) / "iter_0000250" / ".ckpt").glob("0*/manifest.json")
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))


def undo_a_commit(root: str, shm: str) -> None:
    """Rank 1 died before its decision."""
    (path,) = (rank_directory(root, shm, 1) / "iter_0000250" / ".ckpt").glob("0*/decision.json")
    path.unlink()
    (rank_directory(root, shm, 1) / "iter_0000250" / "checkpoint.json").unlink()


def train_again(rank: int, root: str, shm: str) -> None:
    """A second attempt goes back to 240, and comes to 250 once more."""
    checkpointer = job(root, shm, keep=2, topology=Topology(dp=3))
    checkpointer.restore(state(rank), at=240)
    save(checkpointer, 250, rank=rank)


def mix_attempts(root: str, shm: str) -> None:
    """Of iteration 250 rank 1 has the first attempt's piece alone."""
    run_ranks(3, train_again, root, shm)
    own = rank_directory(root, shm, 1) / "iter_0000250"
    for path in [*own.glob("__*.000002-*"), *(own / ".ckpt").glob("000002-*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@dataclass(frozen=True)
class Case:
    """What happened to the local checkpoints, and what a resume must do then.

    Attributes:
        notices: of rank 1.
    """

    spoil: Callable[[str, str], None] = lambda root, shm: None
    iteration: int = 200
    reason: str = ""
    notices: tuple[str, ...] = ()
    at: int | None = None
    ranks: int = 3
    attempt: int = 1


UNUSED = "; local checkpoints are not used: "
DAMAGED = "rank 1 has a damaged local checkpoint of iteration 250: "
REJECTED = ("local_checkpoint_rejected",)
CASES = {
    "nothing": Case(iteration=250, reason="newest local checkpoint, complete on all 3 ranks and read back now"),
    "node replaced": Case(lose_all, 200, f"{UNUSED}rank 2 has no local checkpoint of iteration 250"),
    "piece missing": Case(lose_one, 240, "; rank 2 has no local checkpoint of iteration 250, but of 230, 240"),
    "piece flipped": Case(flip_one, 240, f"; {DAMAGED}", REJECTED),
    "two flipped": Case(flip_two, 230, f"; {DAMAGED}", REJECTED),
    "all flipped": Case(flip_three, 200, UNUSED + DAMAGED, REJECTED),
    "record damaged": Case(damage_a_record, 240, f"; {DAMAGED}", REJECTED),
    "not committed": Case(undo_a_commit, 240, "; rank 1 has no local", ("local_leftover_removed",)),
    "another attempt": Case(
        mix_attempts, 250, "; rank 1 has a local checkpoint of iteration 250, but of another save", attempt=1
    ),
    "c10 at 200": Case(iteration=200, at=200),
    "c10 at 240": Case(iteration=240, at=240),
    "c10 at 250, damaged": Case(flip_one, -1, DAMAGED, REJECTED, at=250),
    "c10 at 0": Case(iteration=-1, reason="no committed checkpoint of iteration 0", at=0),
    "fewer ranks": Case(
        iteration=200, reason="of iteration 250 is of 3 ranks, this job has 2", notices=("rng_reseeded",), ranks=2
    ),
}


def resume_each(rank: int, base: str, cases: dict[str, int | None], world: int) -> dict[str, dict[str, Any]]:
    """One restart after the other, in one process each: it finds again what it had."""
    return {name: resume(rank, f"{base}/{name}/run", f"{base}/{name}/local", world, at) for name, at in cases.items()}


@pytest.fixture(scope="module")
def resumed(
    trained: tuple[str, str, list[list[float]]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, list[dict[str, Any]]]]]:
    """What the ranks found, by case; and where it was found."""
    base = tempfile.mkdtemp(prefix="ckptlib-test-", dir="/dev/shm")
    try:
        for name, case in CASES.items():
            copy_run(trained, f"{base}/{name}/run", f"{base}/{name}/local")
            case.spoil(f"{base}/{name}/run", f"{base}/{name}/local")
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
        for world in (3, 2):
            cases = {name: case.at for name, case in CASES.items() if case.ranks == world}
            for by_name in run_ranks(world, resume_each, base, cases, world):
                for name, each in by_name.items():
                    found[name].append(each)
        yield base, found
    finally:
        shutil.rmtree(base)


@pytest.mark.parametrize("name", CASES)
def test_the_newest_set_that_is_whole_on_every_rank_is_taken_and_the_reason_is_told(
    resumed: tuple[str, dict[str, list[dict[str, Any]]]], name: str
) -> None:
    """C10: persistent {200}, local {230, 240, 250}. C16: one flipped byte."""
    case, found = CASES[name], resumed[1][name]
    assert [(each["iteration"], each["attempt"]) for each in found] == [(case.iteration, case.attempt)] * case.ranks
    assert all(case.reason in each["reason"] for each in found), found[0]["reason"]
    assert tuple(found[1]["notices"]) == case.notices
    unused = (case.iteration == 200 and case.at is None) or (case.iteration, case.at) == (-1, 250)
    assert ("local_checkpoints_unused" in found[0]["notices"]) == unused


def test_c16_a_damaged_piece_is_remembered_and_not_read_at_the_next_restart(
    resumed: tuple[str, dict[str, list[dict[str, Any]]]],
) -> None:
    again = run_ranks(3, resume_each, resumed[0], {"piece flipped": None, "all flipped": None}, 3)
    for name in ("piece flipped", "all flipped"):
        assert {each[name]["iteration"] for each in again} == {CASES[name].iteration}
        assert again[1][name]["notices"] == []
        assert CASES[name].reason[:40] in again[0][name]["reason"]


def test_every_rank_gets_its_own_piece_back_with_all_that_was_saved_beside_it(
    trained: tuple[str, str, list[list[float]]], resumed: tuple[str, dict[str, list[dict[str, Any]]]]
) -> None:
    root, _, drawn = trained
    assert roots.read_tracker(PosixStorage(), root) == "200"  # of what all can read
    for rank, each in enumerate(resumed[1]["nothing"]):
        assert each["progress"]["consumed_samples"] == 2000
        assert each["rerun"] == {"rank": rank}
        assert each["next"] == drawn[rank]
    (persistent,) = commit.list_saves(PosixStorage(), f"{root}/iter_0000200")
    assert {each["parent"] for each in resumed[1]["nothing"]} == {persistent.save_id}


def test_r4_what_one_rank_refuses_changes_nothing_on_any(
    trained: tuple[str, str, list[list[float]]], tmp_path: Path
) -> None:
    copy_run(trained, str(tmp_path / "run"), str(tmp_path / "local"))
    for text in run_ranks(3, restore_where_one_does_not_fit, str(tmp_path / "run"), str(tmp_path / "local")):
        assert "model.w" in text


def restore_where_one_does_not_fit(rank: int, root: str, shm: str) -> str:
    checkpointer = job(root, shm, topology=Topology(dp=3))
    target = state(rank)
    target["model"]["w"] = torch.full((63 if rank == 1 else 64,), -1.0)
    with pytest.raises(RankFailedError if rank != 1 else StateError) as raised:
        checkpointer.restore(target)
    assert torch.equal(target["model"]["w"], torch.full_like(target["model"]["w"], -1.0))
    return str(raised.value)


def save_with_a_failing_rank(rank: int, root: str, shm: str) -> list[str]:
    checkpointer = job(root, shm)
    save(checkpointer, 10, rank=rank)
    said = []
    broken = mock.patch.object(ckptlib.saving, "write_package", side_effect=OSError(28, "disk full"))
    with broken if rank == 1 else contextlib.nullcontext():
        try:
            save(checkpointer, 20, rank=rank)
        except (OSError, RankFailedError) as error:
            said.append(f"{type(error).__name__}: {error}")
    save(checkpointer, 30, rank=rank)
    with broken if rank == 1 else contextlib.nullcontext(), pytest.raises((OSError, RankFailedError)):
        save(checkpointer, 40, rank=rank)
    save(checkpointer, 40, rank=rank)  # once more: ranks 0 and 2 have pieces of the set that failed
    assert checkpointer.restore(state(rank)).iteration == 40
    with pytest.raises(CheckpointExistsError, match="iteration 40 is already committed"):
        save(checkpointer, 40, rank=rank)
    return said


def test_a_piece_that_cannot_be_written_fails_the_save_on_every_rank_and_spoils_no_other(root: str, shm: str) -> None:
    said = run_ranks(3, save_with_a_failing_rank, root, shm)
    assert said[1] == ["OSError: [Errno 28] disk full"]
    assert "rank 1: OSError" in said[0][0]
    assert {tuple(pieces(root, shm, rank)) for rank in range(3)} == {(30, 40)}


def save_where_disks_are_full(rank: int, root: str, shm: str) -> list[str]:
    """Room for one piece and a half: on rank 1, then on the one disk of both."""
    checkpointer = job(root, shm)
    said = []
    for shared, nbytes in ((False, 2**20), (True, 2**19)):
        free = mock.PropertyMock(return_value=2**20 * 3 // 2 if shared or rank == 1 else 2**40)
        disk = mock.PropertyMock(return_value="one" if shared else f"of rank {rank}")
        big = {"model": {"w": torch.zeros(nbytes, dtype=torch.uint8)}}
        full = mock.patch.multiple(Pieces, free=free, disk=disk)
        with full, pytest.raises(StorageError) as raised:
            checkpointer.save(big, iteration=10, kind=LOCAL)
        said.append(str(raised.value))
    save(checkpointer, 20, rank=rank)
    return said


def test_a_disk_that_is_too_small_is_told_on_every_rank_before_anything_is_written(root: str, shm: str) -> None:
    for own, shared in run_ranks(2, save_where_disks_are_full, root, shm):
        assert "too small on rank 1: iteration 10 needs 2.0 MiB; available are 1.5 MiB" in own
        assert "too small on ranks 0, 1 of one host: iteration 10 needs 3.0 MiB; available are 1.5 MiB" in shared
    assert pieces(root, shm) == pieces(root, shm, 1) == [20]


def die_while_saving(rank: int, root: str, shm: str) -> None:
    checkpointer = job(root, shm)
    save(checkpointer, 10, 20, rank=rank)
    if rank == 1:
        with mock.patch.object(ckptlib.saving, "write_package", side_effect=lambda *args: os._exit(9)):
            save(checkpointer, 30, rank=rank)
    save(checkpointer, 30, rank=rank)


@pytest.mark.deep
def test_what_a_dead_attempt_did_not_finish_is_removed_at_the_next_start(root: str, shm: str) -> None:
    outcomes = try_ranks(2, die_while_saving, root, shm, wait_for=1, timeout=5)
    assert not any(outcome.ok for outcome in outcomes)
    assert pieces(root, shm, 1) == [20, 30] or pieces(root, shm, 1) == [10, 20, 30]
    (each, *_) = run_ranks(2, resume_simply, root, shm)
    assert each == 20
    assert 30 not in pieces(root, shm, 1)


def resume_simply(rank: int, root: str, shm: str) -> int:
    target = state(rank)
    restored = job(root, shm).restore(target)
    assert_is(target, rank, restored.iteration)
    return restored.iteration


def shrink(rank: int, root: str, shm: str) -> None:
    checkpointer = job(root, shm)
    save(checkpointer, 300, rank=rank)
    assert pieces(root, shm, 2)  # not before a newer set is complete
    save(checkpointer, 310, rank=rank)


def test_what_ranks_that_are_not_here_any_more_left_goes_when_a_newer_set_is_complete(
    trained: tuple[str, str, list[list[float]]], tmp_path: Path
) -> None:
    """The ramdisk of a host is not lost to ranks that have moved, or that there are no more of."""
    root, kept = str(tmp_path / "run"), str(tmp_path / "local")
    copy_run(trained, root, kept)
    Path(kept, "somebody else").mkdir()
    Path(kept, "somebody else", "rank_00002").write_text("theirs")
    run_ranks(2, shrink, root, kept)
    assert pieces(root, kept, 2) == []
    assert pieces(root, kept, 0) == [300, 310]
    assert Path(kept, "somebody else", "rank_00002").exists()


def fail_in_the_background(rank: int, root: str, shm: str) -> list[str]:
    """Rank 1 cannot write its piece of 20, and not even begin that of 40."""
    checkpointer = job(root, shm, io_mode="async", background=THREAD)
    said: list[str] = []
    save(checkpointer, 10, rank=rank)
    full = OSError(28, "disk full")
    for iteration, target, name in ((20, ckptlib.background, "write_package"), (40, commit, "begin_save")):
        checkpointer.drain()
        with mock.patch.object(target, name, side_effect=full) if rank == 1 else contextlib.nullcontext():
            save(checkpointer, iteration, rank=rank)
            checkpointer.drain()
        try:
            save(checkpointer, iteration + 10, rank=rank)
        except BackgroundSaveError as error:
            said.append(str(error))
    save(checkpointer, 60, rank=rank)
    checkpointer.close()
    return said


def test_a_piece_that_fails_in_the_background_is_told_on_every_rank_at_the_next_save(root: str, shm: str) -> None:
    for said in run_ranks(3, fail_in_the_background, root, shm):
        for text, iteration in zip(said, (20, 40), strict=True):
            assert f"rank 1: the save of iteration {iteration}" in text
            assert "disk full" in text
    assert {tuple(pieces(root, shm, rank)) for rank in range(3)} == {(10, 60)}


def train_until_killed(rank: int, root: str, shm: str, io_mode: Any, victim: int, delay: float) -> None:
    """Goes on from what is there, which must not be older than what every rank had saved before."""
    os.environ["CKPT_TEST_RUN"] = root  # by which its workers are found
    checkpointer = job(root, shm, io_mode=io_mode, settle_wait=20.0)
    saved = [Path(f"{root}-saved-{each}") for each in range(3)]
    common = min(map(noted, saved))
    target = state(rank)
    restored = checkpointer.restore(target, missing="start")
    assert restored.iteration >= common, f"{restored.iteration} after {common}: {restored.reason}"
    if restored.found:
        assert_is(target, rank, restored.iteration)
    if rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for iteration in range(restored.iteration + 10, restored.iteration + 10_000, 10):
        save(checkpointer, iteration, rank=rank)
        note(saved[rank], iteration)


@pytest.mark.deep
@pytest.mark.parametrize("io_mode", ["sync", "async"])
def test_p21_ranks_that_are_killed_at_any_moment_lose_nothing_that_all_had_saved(
    root: str, shm: str, io_mode: str
) -> None:
    """One rank is killed while all save without a pause, the others a moment later; the workers live on."""
    rng = random.Random(4)
    for attempt in range(12):
        outcomes = try_ranks(
            3, train_until_killed, root, shm, io_mode, attempt % 3, 0.2 + rng.random(), wait_for=1, timeout=60
        )
        assert [outcome.text for outcome in outcomes if outcome.error is not None] == []
    assert Path(f"{root}-saved-0").exists()
    _, alive = psutil.wait_procs(marked_workers("CKPT_TEST_RUN", root), timeout=60)
    assert not alive  # else they would write to what is tidied up now


# --- in one process ---------------------------------------------------------------------------------------------------


def test_pieces_are_complete_checkpoints_of_their_own(root: str, shm: str) -> None:
    save(job(root, shm), 10)
    url = str(rank_directory(root, shm) / "iter_0000010")
    assert ckptlib.verify(url).ok
    manifest = ckptlib.inspect(url).manifest
    assert manifest is not None
    assert (manifest.begin.kind, manifest.begin.semantic_type, manifest.begin.format) == (LOCAL, "LOCAL", "torch")
    assert manifest.begin.piece is not None
    assert (manifest.begin.piece.rank, manifest.begin.piece.world_size) == (0, 1)


@pytest.mark.parametrize("worker", ["process", "thread"])
def test_a_job_that_restarts_in_the_same_process_finds_its_pieces_again(root: str, shm: str, worker: Any) -> None:
    first = job(root, shm, io_mode="async", background=AsyncOptions(worker=worker))
    save(first, 10, 20)
    first.close()
    target = state()
    second = job(root, shm)
    assert second.restore(target).iteration == 20
    assert_is(target, 0, 20)
    save(second, 30)
    assert pieces(root, shm) == [20, 30]


def test_the_newer_of_local_and_global_wins(root: str, shm: str) -> None:
    checkpointer = job(root, shm)
    save(checkpointer, 10)
    save(checkpointer, 20, kind="persistent")
    assert job(root, shm).restore(state()).reason == "newest committed on storage"
    save(job(root, shm), 30)
    assert job(root, shm).restore(state()).iteration == 30
    later = job(root, shm)
    later.restore(state(), at=20)
    save(later, 25, kind="persistent")  # a rollback: the order is (attempt, iteration)
    assert job(root, shm).restore(state()).iteration == 25


def test_a_job_whose_global_checkpoints_are_all_damaged_goes_on_from_its_local_ones(root: str, shm: str) -> None:
    checkpointer = job(root, shm)
    save(checkpointer, 10, kind="persistent")
    save(checkpointer, 20)
    (path,) = (Path(root) / "iter_0000010" / ".ckpt").glob("0*/decision.json")
    path.write_bytes(b"{}\n")
    assert job(root, shm).restore(state()).iteration == 20
    shutil.rmtree(rank_directory(root, shm))
    with pytest.raises(NoResumePointError, match="iter_0000010"):
        job(root, shm).restore(state())


def test_without_any_checkpoint_the_run_starts_and_says_what_was_missing(root: str, shm: str) -> None:
    restored = job(root, shm).restore(state(), missing="start")
    assert (restored.found, restored.reason) == (False, "the run has no checkpoint")


@pytest.mark.parametrize(("keep", "left"), [(1, [40, 50]), (2, [30, 40, 50]), (9, [10, 20, 30, 40, 50])])
def test_the_newest_complete_ones_are_kept_and_one_more_until_the_last_is_known_to_be_complete(
    root: str, shm: str, keep: int, left: list[int]
) -> None:
    save(job(root, shm, keep=keep), 10, 20, 30, 40, 50)
    assert pieces(root, shm) == left


def test_older_pieces_go_when_the_next_save_begins_and_not_before_the_last_is_committed(root: str, shm: str) -> None:
    checkpointer = job(root, shm)
    save(checkpointer, 10, 20)
    with mock.patch.object(ckptlib.saving, "write_package", side_effect=Crash), pytest.raises(Crash):
        save(checkpointer, 30)
    assert job(root, shm).restore(state()).iteration == 20


def test_w9_saving_an_iteration_twice_needs_leave_and_the_older_piece_stays_until_the_newer_is_complete(
    root: str, shm: str
) -> None:
    checkpointer = job(root, shm)
    save(checkpointer, 10)
    with pytest.raises(CheckpointExistsError, match="already committed"):
        save(checkpointer, 10)
    save(checkpointer, 10, on_exists="replace")
    saves = commit.list_saves(PosixStorage(), str(rank_directory(root, shm) / "iter_0000010"))
    assert [each.committed for each in saves] == [True, True]
    save(checkpointer, 20)
    left = commit.list_saves(PosixStorage(), str(rank_directory(root, shm) / "iter_0000010"))
    assert [each.save_id for each in left if each.committed] == [saves[1].save_id]
    assert job(root, shm).restore(state(), at=10).save_id == saves[1].save_id


def test_a_copy_of_a_run_does_not_resume_from_the_pieces_of_the_original(root: str, shm: str) -> None:
    save(job(root, shm), 100, kind="persistent")
    shutil.copytree(root, f"{root}-copy")
    original = job(root, shm)
    original.restore(state())
    save(original, 200)
    before = files_of(str(rank_directory(root, shm)))
    copied = job(f"{root}-copy", shm)
    assert copied.restore(state()).iteration == 100
    save(copied, 110, 120)
    assert files_of(str(rank_directory(root, shm))) == before
    assert job(root, shm).restore(state()).iteration == 200


@pytest.mark.parametrize("unfinished", [False, True])
def test_pieces_of_attempts_that_the_root_does_not_know_are_neither_used_nor_touched(
    root: str, shm: str, unfinished: bool
) -> None:
    """Two roots of one URL, one copied from the other: containers on a host that share its memory."""
    save(job(root, shm), 100, kind="persistent")
    shutil.copytree(root, f"{root}-copy")
    original = job(root, shm)
    save(original, 200)
    with crash_at(commit, "try_commit") if unfinished else contextlib.nullcontext():
        save(original, 300)
    there = rank_directory(root, shm)
    before = {path: files_of(str(there / path)) for path in os.listdir(there) if path.startswith("iter_")}
    assert set(before) == {"iter_0000200", "iter_0000300"}
    shutil.rmtree(root)
    shutil.copytree(f"{root}-copy", root)
    for _ in range(2):
        copied = job(root, shm)
        assert copied.restore(state()).iteration in (100, 330)
        save(copied, 310, 320, 330)
    assert {path: files_of(str(there / path)) for path in before} == before
    assert 310 not in pieces(root, shm)


def test_w8_an_older_attempt_saves_no_more_pieces(root: str, shm: str) -> None:
    first = job(root, shm)
    save(first, 10)
    job(root, shm)
    with pytest.raises(FencedError, match="attempt 2"):
        save(first, 20)
    assert pieces(root, shm) == [10]


def test_what_asks_for_single_tensors_is_read_from_what_all_can_read(root: str, shm: str) -> None:
    checkpointer = job(root, shm)
    save(checkpointer, 10, kind="persistent")
    save(checkpointer, 20)
    restored = job(root, shm).restore(state(), keys=["model.w"])
    assert restored.iteration == 10
    assert "local checkpoint of iteration 20 is loaded as it is, not tensor by tensor" in restored.reason
    with pytest.raises(NoResumePointError, match=r"iteration 20.*not tensor by tensor"):
        job(root, shm).restore(state(), keys=["model.w"], at=20)


def test_a_local_checkpoint_has_one_meaning(root: str, shm: str) -> None:
    with pytest.raises(UnsupportedError, match="every rank's own state"):
        save(job(root, shm), 10, semantic_type="GLOBAL")


def test_local_saves_move_no_tracker_and_are_told_to_no_catalog(root: str, shm: str) -> None:
    heard: list[int] = []
    listener = mock.Mock()
    listener.committed.side_effect = lambda event: heard.append(event.manifest.begin.iteration)
    for options in ({}, {"io_mode": "async", "background": THREAD}):
        with job(root, shm, listeners=[listener], **options) as checkpointer:
            before = files_of(root)
            save(checkpointer, 10)
            checkpointer.drain()
            assert files_of(root) == before
    assert heard == []


def test_a_persistent_checkpoint_descends_from_the_last_that_all_can_read(root: str, shm: str) -> None:
    checkpointer = job(root, shm)
    parent = checkpointer.save(state(), iteration=10).save_id
    save(checkpointer, 20)
    second = job(root, shm)
    second.restore(state())
    url = second.save(state(), iteration=30).url
    assert ckptlib.inspect(url).manifest.begin.parent == parent  # type: ignore[union-attr]


@pytest.mark.parametrize("at_limit", ["skip", "error", "wait"])
def test_what_happens_at_the_limit_is_what_happens_to_all_saves(root: str, shm: str, at_limit: Any) -> None:
    options = AsyncOptions(worker="thread", at_limit=at_limit)
    notices: list[Notice] = []
    with job(root, shm, io_mode="async", background=options, on_event=notices.append) as checkpointer:
        save(checkpointer, 10)
        if at_limit == "wait":
            save(checkpointer, 20)
            assert pieces(root, shm) in ([10], [10, 20])
            return
        with mock.patch.object(checkpointer._background, "has_room", return_value=False):
            if at_limit == "error":
                with pytest.raises(ckptlib.errors.SaveLimitError):
                    save(checkpointer, 20)
            else:
                save(checkpointer, 20)
                assert [notice.name for notice in notices] == ["save_skipped"]


def test_w4_at_the_end_of_a_grace_period_each_rank_gives_up_its_own_piece(root: str, shm: str) -> None:
    notices: list[Notice] = []
    checkpointer = job(root, shm, io_mode="async", background=THREAD, on_event=notices.append)
    save(checkpointer, 10)
    assert checkpointer.drain(60)
    may_write, before = threading.Event(), files_of(root)
    original = ckptlib.background.write_package

    def write(*args: Any, **options: Any) -> Any:
        assert may_write.wait(60)
        return original(*args, **options)

    with mock.patch.object(ckptlib.background, "write_package", write):
        save(checkpointer, 20)
        assert not checkpointer.drain(0.2)
        may_write.set()
        checkpointer.close()
    assert [notice.data["outcome"] for notice in notices if notice.name == "save_drained"] == ["abort"]
    assert files_of(root) == before  # nothing of it is on the run's storage
    assert job(root, shm).restore(state()).iteration == 10


def test_a_local_save_needs_a_place(root: str) -> None:
    with pytest.raises(UnsupportedError, match=r"non_persistent_local.*LocalOptions"):
        Checkpointer(root, run="run").save(state(), iteration=1, kind=LOCAL)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"root": "s3://bucket/x"}, "s3://bucket/x.*absolute path"),
        ({"root": "relative"}, "relative.*absolute path"),
        ({"root": "/dev/shm/x", "keep": 0}, "keep=0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(StateError, match=text):
        LocalOptions(**options)


def test_a_local_root_that_cannot_be_used_is_told_at_the_start(root: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"local root .*file: rank 0 cannot write there"):
        job(root, str(tmp_path / "file"))


def test_the_cadence_yields_local_saves(root: str, shm: str) -> None:
    schedule = ckptlib.Schedule(save_interval=4, non_persistent_interval=2, non_persistent_kind=LOCAL, exit_signals=())
    cadence = ckptlib.Cadence(schedule)
    checkpointer = job(root, shm)
    for iteration in range(1, 9):
        action = cadence.should_save_now(iteration)
        if action.save:
            save(checkpointer, iteration, kind=action.save)
    assert pieces(root, shm) == [2, 6]
    assert job(root, shm).restore(state()).iteration == 8
