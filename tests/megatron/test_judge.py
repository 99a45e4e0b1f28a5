"""The judge itself: it reads what Megatron-Core wrote, exactly, and it can say no.

Only then does its word on our own checkpoints (test_megatron_reads_ours.py) mean anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.megatron.judging import Judge, Piece

pytestmark = pytest.mark.megatron

FIXTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "megatron"
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


def fixture(name: str) -> Path:
    """A checkpoint that real Megatron code wrote."""
    if not FIXTURES.is_dir():
        pytest.skip(f"{FIXTURES} is absent: the full set of Megatron checkpoints is not part of the repository")
    return FIXTURES / name / "ckpt" / "iter_0000010"


def expected_model(name: str) -> dict[str, torch.Tensor]:
    """Its model tensors, by their key in the checkpoint."""
    stored = load_file(FIXTURES / name / "expected.safetensors")
    return {key.removeprefix("model."): value for key, value in stored.items() if key.startswith("model.")}


def differing(loaded: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Keys of `expected` that `loaded` lacks or holds with other bits."""
    return [key for key, value in expected.items() if key not in loaded or not torch.equal(loaded[key], value)]


@pytest.mark.parametrize("name", ["td0192_tp1pp1_w", "td0161_tp2pp2_w", "interop_min_commonpt"])
def test_the_judge_reads_every_model_tensor_of_a_real_checkpoint(judge: Judge, name: str) -> None:
    checkpoint = fixture(name)
    verdict = judge.load_whole(checkpoint)
    assert verdict.error == ""
    assert verdict.backend == "torch_dist"
    assert verdict.common["iteration"] == 10
    assert differing(verdict.tensors, expected_model(name)) == []


def test_two_ranks_of_the_judge_each_read_their_half(two_ranks: Judge) -> None:
    checkpoint = fixture("td0192_tp1pp1_w")
    whole = expected_model("td0192_tp1pp1_w")[WORD_EMBEDDINGS]
    halves = [
        [Piece("half", WORD_EMBEDDINGS, (64, 64), "bfloat16", [(0, rank, 2)], allow_shape_mismatch=True)]
        for rank in range(2)
    ]
    verdicts = two_ranks.load(checkpoint, *halves)
    assert [verdict.error for verdict in verdicts] == ["", ""]
    assert torch.equal(torch.cat([verdict.tensors["half"] for verdict in verdicts]), whole)


def test_the_judge_refuses_a_flipped_byte(judge: Judge, tmp_path: Path) -> None:
    copy = tmp_path / "iter_0000010"
    shutil.copytree(fixture("td0192_tp1pp1_w"), copy, copy_function=shutil.copyfile)
    data = bytearray((copy / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "__0_0.distcp").write_bytes(data)
    (verdict,) = judge.load(copy, [])
    assert "__0_0.distcp" in verdict.error


def test_the_judge_refuses_a_wrong_shape_and_an_unknown_key(judge: Judge) -> None:
    checkpoint = fixture("td0192_tp1pp1_w")
    (wrong,) = judge.load(checkpoint, [Piece("norm", "decoder.final_layernorm.weight", (63,), "bfloat16")])
    assert "shape" in wrong.error.lower()
    (unknown,) = judge.load(checkpoint, [Piece("none", "no.such.tensor", (4,))])
    assert "no.such.tensor" in unknown.error
