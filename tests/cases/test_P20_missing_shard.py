"""P20 (Megatron-LM#1154): 123 of 128 shards were written. A commit needs every one."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ckptlib
from ckptlib import AsyncOptions, Checkpointer, ShardedTensor, commit
from ckptlib.errors import BackgroundSaveError, SaveAbortedError, UncommittedError
from ckptlib.storage import PosixStorage
from tests.support.ranks import run_ranks, try_ranks
from tests.support.roots import small_state, states
from tests.support.workers import workers_stopped


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    url = str(tmp_path / "iter_0000001")
    yield url
    with pytest.raises(UncommittedError):
        ckptlib.load(small_state(), url)
    assert not Path(url, "metadata.json").exists()


def spoil(what: str) -> Any:
    """Something happens to the data between the write and the commit."""
    original = commit.try_commit

    def spoiled(storage: Any, path: str, begin: Any, **options: Any) -> Any:
        (data,) = Path(path).glob("*.distcp")
        if what == "gone":
            data.unlink()
        else:
            data.write_bytes(data.read_bytes()[:-1])
        return original(storage, path, begin, **options)

    return mock.patch.object(commit, "try_commit", spoiled)


@pytest.mark.parametrize(("what", "found"), [("gone", "is missing"), ("short", r"has \d+ bytes")])
def test_p20_a_shard_that_is_gone_or_short_at_the_commit_aborts_by_name(url: str, what: str, found: str) -> None:
    """W3."""
    with spoil(what), pytest.raises(SaveAbortedError, match=rf"rank 0: __0_0\..*distcp {found}, its record says \d+"):
        ckptlib.save(small_state(), url, iteration=1)


def test_p20_a_record_that_is_gone_at_the_commit_aborts_with_the_rank(url: str) -> None:
    """W3."""
    with (
        mock.patch.object(commit, "publish_record"),
        pytest.raises(SaveAbortedError, match="no valid record of rank 0"),
    ):
        ckptlib.save(small_state(), url, iteration=1)


@pytest.mark.parametrize("change", [{"plan_digest": "0" * 64}, {"world_size": 9}, {"save_id": "000009-0-0"}], ids=str)
def test_p20_a_record_of_another_plan_world_or_save_never_counts(url: str, change: dict[str, Any]) -> None:
    """W2."""

    def other(storage: Any, path: str, record: Any) -> None:
        changed = dataclasses.replace(record, **change)
        storage.create(f"{commit.save_dir(path, record.save_id)}/rank_0.json", changed.encode())

    with (
        mock.patch.object(commit, "publish_record", other),
        pytest.raises(SaveAbortedError, match="no valid record of rank 0"),
    ):
        ckptlib.save(small_state(), url, iteration=1)


def save_and_lose_a_rank(rank: int, root: str) -> None:
    checkpointer = Checkpointer(root, run="run", timeout=30.0)
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, 4))
    with mock.patch.object(commit, "publish_record") if rank == 2 else contextlib.nullcontext():
        checkpointer.save({"model": {"w": shard}}, iteration=1)


@pytest.mark.timeout(300)
def test_p20_three_of_four_shards_are_no_checkpoint_and_the_fourth_is_named(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    outcomes = try_ranks(4, save_and_lose_a_rank, root)
    for outcome in outcomes:
        assert isinstance(outcome.error, SaveAbortedError), outcome.text
        assert "no valid record of rank 2" in str(outcome.error)
    assert states(root) == {"iter_0000001": ["aborted"]}
    assert not commit.is_committed(PosixStorage(), f"{root}/iter_0000001")


def save_with_a_worker_that_writes_nothing(rank: int, root: str) -> tuple[str, str]:
    """Rank 1's worker stands still for as long as a commit is waited for; what the rank is told of it, at two saves."""
    options = AsyncOptions(max_in_flight=2, commit_timeout=2.0)
    told = ["", ""]
    with Checkpointer(root, run="run", io_mode="async", background=options, timeout=60.0) as checkpointer:
        checkpointer.prepare(1 << 16)
        for iteration in (1, 2, 3):
            shard = ShardedTensor.from_rank_offsets("w", torch.full((2,), float(iteration)), (0, rank, 2))
            try:
                with workers_stopped() if (rank, iteration) == (1, 1) else contextlib.nullcontext():
                    pending = checkpointer.save({"model": {"w": shard}}, iteration=iteration)
                    if iteration == 1:  # longer than rank 0 waits
                        wait_until_decided(f"{root}/iter_0000001")
                pending.wait(60)
            except BackgroundSaveError as error:
                told[0 if iteration == 1 else 1] += str(error)
    return told[0], told[1]


def wait_until_decided(url: str) -> None:
    deadline = time.monotonic() + 60
    while not list(Path(url).glob(".ckpt/*/decision.json")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.timeout(300)
def test_p20_a_worker_that_writes_nothing_is_named_and_does_not_hold_up_the_next_save(tmp_path: Path) -> None:
    """As many workers as ranks; the commit has a deadline of its own, and nobody is asked."""
    root = str(tmp_path / "run")
    first, second = run_ranks(2, save_with_a_worker_that_writes_nothing, root)
    reason = "no record of rank 1 within 2 s"
    assert reason in first[0]
    for told in (first, second):
        assert "iteration 1" in told[1]
        assert reason in told[1]
    assert states(root) == {"iter_0000001": ["aborted"], "iter_0000003": ["committed"]}
