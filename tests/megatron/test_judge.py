"""The judge itself: it reads what Megatron-Core wrote, exactly, and it can say no.

Only then does its word on our own checkpoints (test_megatron_reads_ours.py) mean anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.megatron.judging import Judge, Piece
from tests.support.foreign import SUBSET, Fixture, copy_of, fingerprint

pytestmark = pytest.mark.megatron

NAME = "td0192_tp1pp1dp2_fr"
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


def iteration_of(name: str) -> Path:
    """Its one checkpoint."""
    (path,) = Fixture(SUBSET / name).iterations()
    return path


def model_of(name: str) -> dict[str, tuple[str, list[int], str]]:
    """Fingerprints of the model tensors, by their key in the checkpoint."""
    expected = Fixture(SUBSET / name).expected()
    return {key.removeprefix("model."): value for key, value in expected.items() if key.startswith("model.")}


def differing(loaded: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[str, list[int], str]]) -> list[str]:
    """Keys of `expected` that `loaded` lacks or holds with other bits."""
    return [key for key, value in expected.items() if key not in loaded or fingerprint(loaded[key]) != value]


@pytest.mark.parametrize("name", ["td0140_tp1pp1_w", "td0161_tp2pp2_w", "td0192_tp1pp2_tied", NAME])
def test_the_judge_reads_every_model_tensor_of_a_real_checkpoint(judge: Judge, name: str) -> None:
    verdict = judge.load_whole(iteration_of(name))
    assert verdict.error == ""
    assert verdict.backend == "torch_dist"
    assert verdict.common["iteration"] == 10
    assert len(model_of(name)) > 5
    assert differing(verdict.tensors, model_of(name)) == []


def test_two_ranks_of_the_judge_each_read_their_half(two_ranks: Judge) -> None:
    rows, columns = model_of(NAME)[WORD_EMBEDDINGS][1]
    halves = [
        [Piece("half", WORD_EMBEDDINGS, (rows // 2, columns), "bfloat16", [(0, rank, 2)], allow_shape_mismatch=True)]
        for rank in range(2)
    ]
    verdicts = two_ranks.load(iteration_of(NAME), *halves)
    assert [verdict.error for verdict in verdicts] == ["", ""]
    whole = torch.cat([verdict.tensors["half"] for verdict in verdicts])
    assert fingerprint(whole) == model_of(NAME)[WORD_EMBEDDINGS]


def test_the_judge_refuses_a_flipped_byte(judge: Judge, tmp_path: Path) -> None:
    copy = copy_of(NAME, tmp_path)
    data = bytearray((copy / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "__0_0.distcp").write_bytes(data)
    (verdict,) = judge.load(copy, [])
    assert "__0_0.distcp" in verdict.error


def test_the_judge_refuses_a_wrong_shape_and_an_unknown_key(judge: Judge) -> None:
    checkpoint = iteration_of(NAME)
    (wrong,) = judge.load(checkpoint, [Piece("norm", "decoder.final_layernorm.weight", (63,), "bfloat16")])
    assert "Global shape mismatch" in wrong.error
    (unknown,) = judge.load(checkpoint, [Piece("none", "no.such.tensor", (4,))])
    assert "no.such.tensor" in unknown.error
