"""P19 (Megatron-LM#4378): a cached structure drops a key that appears later, and keeps a dtype that has changed.

There is no cache of plans; these hold for whatever is saved, and will have to when there is one.
"""

from __future__ import annotations

from pathlib import Path

import torch

import ckptlib
from ckptlib import Checkpointer


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
