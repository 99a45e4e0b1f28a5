"""P20 (Megatron-LM#1154): 123 of 128 shards were written. A commit needs every one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ckptlib
from ckptlib import Checkpointer, ShardedTensor, commit
from ckptlib.errors import SaveAbortedError, UncommittedError
from ckptlib.storage import PosixStorage
from tests.support.ranks import try_ranks
from tests.support.roots import small_state, states


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
