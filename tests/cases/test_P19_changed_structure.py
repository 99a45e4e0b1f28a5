"""P19 (Megatron-LM#4378): a cached structure drops a key that appears later, and keeps a dtype that has changed.

A checkpointer keeps its plans (`ckptlib.planning`): each save of one
below meets what the one before has left there.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch

import ckptlib
from ckptlib import Checkpointer, ShardedTensor, planning
from ckptlib.sharding import Box
from tests.support.ranks import run_ranks


def test_p19_a_key_that_appears_at_the_second_save_is_there_at_the_load(tmp_path: Path) -> None:
    checkpointer = Checkpointer(str(tmp_path / "run"), run="run")
    model = {"w": torch.ones(2)}
    first = checkpointer.save({"model": model}, iteration=1)
    model["late"] = torch.full((3,), 5.0)
    second = checkpointer.save({"model": model, "ema": {"w": torch.zeros(2)}}, iteration=2)
    assert {*ckptlib.inspect(first.url).tensors} == {"model.w"}
    assert {*ckptlib.inspect(second.url).tensors} == {"model.w", "model.late", "ema.w"}
    target = {"model": {"w": torch.zeros(2), "late": torch.zeros(3)}, "ema": {"w": torch.ones(2)}}
    Checkpointer(str(tmp_path / "run"), run="run").restore(target)
    assert torch.equal(target["model"]["late"], torch.full((3,), 5.0))


def test_p19_a_dtype_and_a_shape_that_change_are_recorded(tmp_path: Path) -> None:
    checkpointer = Checkpointer(str(tmp_path / "run"), run="run")
    seen = []
    for iteration, tensor in enumerate([torch.ones(4), torch.ones(4, dtype=torch.bfloat16), torch.ones(6)]):
        url = checkpointer.save({"model": {"w": tensor}}, iteration=iteration).url
        entry = ckptlib.inspect(url).tensors["model.w"]
        seen.append((entry.dtype, tuple(entry.shape)))
        assert torch.equal(ckptlib.read(url)["model.w"], tensor)
    assert seen == [("float32", (4,)), ("bfloat16", (4,)), ("float32", (6,))]


def test_p18_p19_new_memory_of_the_same_structure_is_what_is_saved(tmp_path: Path) -> None:
    """P18 (NeMo-RL#3312), its synchronous part: later checkpoints were copies of the first."""
    checkpointer = Checkpointer(str(tmp_path / "run"), run="run")
    for iteration in range(3):
        fresh = {"model": {"w": torch.full((1000,), float(iteration))}}
        url = checkpointer.save(fresh, iteration=iteration).url
        assert torch.equal(ckptlib.read(url)["model.w"], torch.full((1000,), float(iteration)))


def two_ranks(rank: int, root: str) -> list[tuple[int, bool]]:
    """Saves the same structure twice, then with a key more on rank 1 only; returns what was kept at each."""
    checkpointer = Checkpointer(root, run="run")
    seen = []
    for iteration in range(4):
        model = {"w": ShardedTensor.from_rank_offsets("w", torch.full((2,), 10.0 * iteration + rank), (0, rank, 2))}
        if iteration == 3 and rank == 1:
            model["late"] = ShardedTensor("late", torch.full((3,), 5.0), (3,), Box.whole((3,)))
        with mock.patch.object(planning, "make_write_plan", wraps=planning.make_write_plan) as planned:
            checkpointer.save({"model": model}, iteration=iteration)
        seen.append((iteration, bool(planned.call_count)))
    return seen


def test_p18_p19_two_ranks_plan_once_and_again_when_one_of_them_changes(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    outcomes = run_ranks(2, two_ranks, root)
    assert outcomes[0] == [(0, True), (1, False), (2, False), (3, True)]
    assert outcomes[1] == [(iteration, False) for iteration in range(4)]
    for iteration in range(4):
        stored = ckptlib.read(f"{root}/iter_{iteration:07d}")
        assert stored["w"].tolist() == [10.0 * iteration] * 2 + [10.0 * iteration + 1] * 2
        assert ("late" in stored) == (iteration == 3)
