"""Ranks that fail, die or hang: everybody else is told who, in time, and the old checkpoint stands."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ckptlib
from ckptlib import ShardedObject, ShardedTensor, writer
from ckptlib.errors import (
    DisagreementError,
    KeyMismatchError,
    LoadIncompleteError,
    RankFailedError,
    RankTimeoutError,
    ShapeMismatchError,
    StateError,
    TilingError,
)
from ckptlib.storage import PosixStorage
from tests.support.ranks import Outcome, run_checks, try_ranks
from tests.support.trees import assert_same

pytestmark = pytest.mark.timeout(300)

TIMEOUT = 3.0
"""Seconds that ranks wait for each other in the tests of dead and hanging ones."""


def state(rank: int, world: int, fill: float = 0.0) -> dict[str, Any]:
    """One sharded and one replicated tensor, an object per rank, a value."""
    return {
        "sharded": ShardedTensor.from_rank_offsets("sharded", torch.full((4,), fill + rank), (0, rank, world)),
        "replicated": torch.full((3,), fill),
        "cell": ShardedObject("cell", {"fill": fill + rank}, (world,), (rank,)),
        "step": fill,
    }


def refused_everywhere(rank: int, culprit: int, error: type[Exception], match: str, call: Callable[[], Any]) -> None:
    """The culprit raises its own error, every other rank one that names it."""
    if rank == culprit:
        with pytest.raises(error, match=match):
            call()
    else:
        with pytest.raises(RankFailedError, match=rf"rank {culprit}: .*({match})"):
            call()


def nothing_there(url: str) -> bool:
    return not any(name.endswith(".distcp") for name in os.listdir(url)) if os.path.isdir(url) else True


# --- refused saves ----------------------------------------------------------------------------------------------------


def check_a_tensor_of_another_shape_on_one_rank_is_named_on_all(rank: int, folder: str) -> None:
    url = f"{folder}/shape"
    with pytest.raises(DisagreementError, match=r"'w': rank 0 has float32 \(4,\), rank 1 has float32 \(5,\)"):
        ckptlib.save({"w": torch.zeros(4 + rank)}, url, iteration=1)
    assert nothing_there(url)


def check_a_value_that_differs_is_named_on_all(rank: int, folder: str) -> None:
    url = f"{folder}/value"
    with pytest.raises(DisagreementError, match=r"'seeds\.data' differs between rank 0 and rank 1.*ShardedObject"):
        ckptlib.save({"seeds": {"data": rank}}, url, iteration=1)
    assert nothing_there(url)


def check_wrong_replica_ids_are_named_on_all(rank: int, folder: str) -> None:
    """An uncovered or doubly covered tensor (wrong `replica_id`)."""
    for replica, match in ((0, r"'w'.*overlap"), (1, r"'w'.*no rank is the main replica")):
        shard = ShardedTensor.from_box("w", torch.zeros(4), (4,), (0,), replica_id=replica)
        with pytest.raises(TilingError, match=match):
            ckptlib.save({"w": shard}, f"{folder}/replica", iteration=1)
    hole = ShardedTensor.from_box("w", torch.zeros(2), (6,), (rank * 2,))
    with pytest.raises(TilingError, match=r"'w': 4 of 6 elements"):
        ckptlib.save({"w": hole}, f"{folder}/replica", iteration=1)
    assert nothing_there(f"{folder}/replica")


def check_an_object_that_cannot_be_saved_on_one_rank_is_named_on_all(rank: int, folder: str) -> None:
    data = (lambda: None) if rank == 1 else [1]
    cells = {"model": {"f": ShardedObject("f", data, (2,), (rank,))}}
    url = f"{folder}/lambda"
    refused_everywhere(rank, 1, StateError, r"f/shard_1_2", lambda: ckptlib.save(cells, url, iteration=1))


def check_a_value_that_cannot_be_saved_is_named_by_its_path(rank: int, folder: str) -> None:
    """The same mistake on all ranks must not look like a disagreement between them."""
    hook = {"model": {"hook": lambda: rank}}
    match = r"model\.hook: a function cannot be saved"
    refused_everywhere(rank, 0, StateError, match, lambda: ckptlib.save(hook, f"{folder}/hook", iteration=1))


def check_a_sparse_tensor_on_one_rank_is_named_on_all(rank: int, folder: str) -> None:
    tensor = torch.zeros(4).to_sparse() if rank == 1 else torch.zeros(4)
    refused_everywhere(
        rank, 1, StateError, r"'w'.*layout", lambda: ckptlib.save({"w": tensor}, f"{folder}/sparse", iteration=1)
    )


def check_a_full_disk_on_one_rank_fails_all_and_leaves_the_old_one(rank: int, folder: str) -> None:
    """A full disk during save; nothing is lost."""
    url = f"{folder}/full"
    ckptlib.save(state(rank, 2, 1.0), url, iteration=1)
    big = state(rank, 2, 2.0) | {"big": ShardedTensor.from_rank_offsets("big", torch.zeros(2**18), (0, rank, 2))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, hard))
    try:
        refused_everywhere(
            rank, 1, OSError, r"__1_0\..*distcp", lambda: ckptlib.save(big, url, iteration=1, on_exists="replace")
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    target = state(rank, 2)
    ckptlib.load(target, url)
    assert_same(target, state(rank, 2, 1.0))
    assert ckptlib.verify(url).ok


# --- refused loads ----------------------------------------------------------------------------------------------------


def check_a_missing_key_on_one_rank_changes_nothing_on_any(rank: int, folder: str) -> None:
    """R4."""
    ckptlib.save(state(rank, 2, 5.0), f"{folder}/loads", iteration=1)
    target = state(rank, 2) | ({"extra": torch.zeros(1)} if rank == 1 else {})
    refused_everywhere(
        rank, 1, KeyMismatchError, "missing in the checkpoint .extra.", lambda: ckptlib.load(target, f"{folder}/loads")
    )
    target.pop("extra", None)
    assert_same(target, state(rank, 2))


def check_another_shape_on_one_rank_changes_nothing_on_any(rank: int, folder: str) -> None:
    """R4."""
    target = state(rank, 2)
    if rank == 1:
        target["replicated"] = torch.zeros(7)
    refused_everywhere(
        rank, 1, ShapeMismatchError, r"'replicated'.*\(3,\).*\(7,\)", lambda: ckptlib.load(target, f"{folder}/loads")
    )
    if rank == 0:
        assert_same(target, state(rank, 2))


def check_a_damaged_chunk_is_told_on_all_ranks_with_what_had_changed(rank: int, folder: str) -> None:
    """R4: a failure while filling says what it could not undo."""
    url = f"{folder}/damaged"
    ckptlib.save(state(rank, 2, 5.0), url, iteration=1)
    name = next(name for name in os.listdir(url) if name.startswith("__1_0"))
    if rank == 0:
        with open(f"{url}/{name}", "r+b") as file:
            data = file.read()
            at = data.index(torch.full((4,), 6.0).numpy().tobytes())  # rank 1's shard
            file.seek(at)
            file.write(b"\xff")
    dist.barrier()
    with pytest.raises(LoadIncompleteError) as caught:
        ckptlib.load(state(rank, 2), url)
    assert caught.value.exit_code == (20 if rank == 1 else caught.value.exit_code)
    assert "sharded" in caught.value.changed
    assert "'sharded': damaged" in str(caught.value)


def check_an_uncommitted_checkpoint_is_refused_on_all(rank: int, folder: str) -> None:
    with pytest.raises(ckptlib.errors.NotACheckpointError, match="not a checkpoint"):
        ckptlib.load(state(rank, 2), f"{folder}/nothing")


CHECKS = [
    check_a_tensor_of_another_shape_on_one_rank_is_named_on_all,
    check_a_value_that_differs_is_named_on_all,
    check_wrong_replica_ids_are_named_on_all,
    check_an_object_that_cannot_be_saved_on_one_rank_is_named_on_all,
    check_a_value_that_cannot_be_saved_is_named_by_its_path,
    check_a_sparse_tensor_on_one_rank_is_named_on_all,
    check_a_full_disk_on_one_rank_fails_all_and_leaves_the_old_one,
    check_a_missing_key_on_one_rank_changes_nothing_on_any,
    check_another_shape_on_one_rank_changes_nothing_on_any,
    check_a_damaged_chunk_is_told_on_all_ranks_with_what_had_changed,
    check_an_uncommitted_checkpoint_is_refused_on_all,
]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(2, CHECKS, str(tmp_path_factory.mktemp("failures")))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_two_ranks(check: Callable[..., None], two: dict[str, str]) -> None:
    assert two[check.__name__] == ""


# --- dead and hanging ranks -------------------------------------------------------------------------------------------


def save_while_others_fall(rank: int, folder: str, fates: dict[int, int]) -> dict[str, Any]:
    """Saves once in peace; then the ranks in `fates` get their signal in the middle of writing."""
    url = f"{folder}/it"
    ckptlib.save(state(rank, 4, 1.0), url, iteration=1, timeout=30.0)
    serialise = writer.serialise_objects

    def fall(*args: Any) -> Any:
        if rank in fates:
            os.kill(os.getpid(), fates[rank])
        return serialise(*args)

    started = time.monotonic()
    try:
        with mock.patch("ckptlib.packing.serialise_objects", fall):
            ckptlib.save(state(rank, 4, 2.0), url, iteration=1, on_exists="replace", timeout=TIMEOUT)
    except Exception as error:
        return {"error": error, "seconds": time.monotonic() - started}
    return {"error": None}


def old_one_stands(folder: Path) -> None:
    url = str(folder / "it")
    assert torch.equal(ckptlib.read(url, ["replicated"])["replicated"], torch.full((3,), 1.0))
    report = ckptlib.verify(url)
    assert report.ok, report.problems


def assert_named(outcomes: list[Outcome], survivors: list[int], fallen: tuple[int, ...]) -> None:
    for rank in survivors:
        assert outcomes[rank].ok, outcomes[rank].text
        error = outcomes[rank].value["error"]
        assert isinstance(error, RankTimeoutError), error
        assert error.ranks == fallen
        assert all(str(one) in str(error) for one in fallen)
        assert outcomes[rank].value["seconds"] < 2 * TIMEOUT + 10.0


def test_a_dead_and_a_hanging_rank_end_the_save_on_all_others_who_are_told_which(tmp_path: Path) -> None:
    """P15, issue: a dead rank ends the save with an error within a set timeout; no hang; nothing lost."""
    fates = {1: signal.SIGKILL, 3: signal.SIGSTOP}
    outcomes = try_ranks(4, save_while_others_fall, str(tmp_path), fates, wait_for=3)
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert_named(outcomes, [0, 2], (1, 3))
    old_one_stands(tmp_path)
    decisions = [save.decision.outcome for save in _saves(tmp_path) if save.decision is not None]
    assert decisions == ["commit", "abort"]


def test_the_death_of_rank_zero_is_told_on_all_others(tmp_path: Path) -> None:
    """The store is the launcher's: it outlives rank 0, and whoever comes next finds an undecided save."""
    outcomes = try_ranks(4, save_while_others_fall, str(tmp_path), {0: signal.SIGKILL})
    assert_named(outcomes, [1, 2, 3], (0,))
    old_one_stands(tmp_path)


def _saves(folder: Path) -> list[Any]:
    return ckptlib.commit.list_saves(PosixStorage(), str(folder / "it"))
