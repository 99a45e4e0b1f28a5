"""What a save asks of a filesystem's metadata server: a few operations for each rank, whatever is in the state."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib import commit, storage
from ckptlib.packing import Shards, write_package
from ckptlib.plan import values_digest
from ckptlib.sharding import Box
from ckptlib.state import TensorLeaf
from tests.ckptlib.test_beats import begin

CALLS = ("open", "stat", "lstat", "scandir", "listdir", "mkdir", "link", "replace", "unlink", "remove", "rmdir")


@contextmanager
def counted(below: Path) -> Iterator[collections.Counter[str]]:
    """Operations on names below a directory."""
    counter: collections.Counter[str] = collections.Counter()

    def counting(name: str, original: Any) -> Any:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if isinstance(path, str) and path.startswith(str(below)):
                counter[name] += 1
            return original(path, *args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counting(name, getattr(os, name)))
        patch.setattr("builtins.open", counting("open", open))
        yield counter


def leaf(i: int) -> TensorLeaf:
    return TensorLeaf(f"layers.{i}.weight", torch.zeros(8), (8,), Box.whole((8,)), True)


@pytest.mark.parametrize("tensors", [1, 500])
def test_a_rank_makes_two_files_and_lists_nothing(tmp_path: Path, tensors: int) -> None:
    """Its data and its record; rank 0 alone looks at what is there."""
    store, path, save = storage.PosixStorage(), str(tmp_path / "iter_0000001"), begin(8)
    commit.begin_save(store, path, save)
    package = Shards([leaf(i) for i in range(tensors)], values_digest({}, ()))
    with counted(tmp_path) as operations:
        write_package(store, path, save, 5, package)
    names = [name for name in os.listdir(path) if name != ".ckpt"] + os.listdir(f"{path}/.ckpt/{save.save_id}")
    assert sorted(names) == sorted([f"__5_0.{save.save_id}.distcp", "begin.json", "rank_5.json"])
    assert operations["scandir"] + operations["listdir"] == 0
    assert operations["stat"] <= 2  # are the two directories there?
    assert operations["mkdir"] == 0
    assert sum(operations.values()) <= 10, operations


def test_what_a_save_costs_does_not_depend_on_what_is_in_it(tmp_path: Path) -> None:
    costs = []
    for name, tensors in (("a", 3), ("b", 300)):
        state = {f"w{i}": torch.zeros(100) for i in range(tensors)}
        with counted(tmp_path) as operations:
            ckptlib.save(state, str(tmp_path / name), iteration=1)
        costs.append(operations)
    assert costs[0] == costs[1]
    assert sum(costs[0].values()) <= 160, costs[0]
