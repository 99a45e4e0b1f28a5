"""Recorded arguments are compared by name, whatever holds them; the padded vocabulary knows of tensor parallelism."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import pytest

from ckptlib.errors import ArgsMismatchError
from ckptlib.recorded_args import check_args, differences


@dataclass
class Config:
    num_layers: int = 4
    hidden_size: int = 64
    num_attention_heads: int = 8
    ffn_hidden_size: int | None = None


BASE = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "lr": 0.1}


@pytest.mark.parametrize("stored", [BASE, Namespace(**BASE), Config()], ids=["mapping", "namespace", "dataclass"])
@pytest.mark.parametrize("given", [BASE, Namespace(**BASE), Config()], ids=["mapping", "namespace", "dataclass"])
def test_equal_arguments_pass_whatever_holds_them(stored: Any, given: Any) -> None:
    check_args(stored, given, "it")


def test_every_difference_is_named_with_both_values() -> None:
    with pytest.raises(ArgsMismatchError) as caught:
        check_args(Namespace(**BASE), Config(num_layers=6, num_attention_heads=4), "run/it")
    assert str(caught.value) == (
        "run/it: num_layers is 4 in the checkpoint and 6 here; num_attention_heads is 8 in the checkpoint and 4 here. "
        "Nothing was loaded."
    )


def test_what_one_side_does_not_know_is_not_compared() -> None:
    assert not differences({"num_layers": 4}, {"num_layers": 4, "hidden_size": 64, "num_query_groups": None})
    assert not differences(None, BASE)
    assert differences({"num_query_groups": 2}, {"num_query_groups": 4}) == [("num_query_groups", 2, 4)]


def test_parallel_sizes_count_only_in_the_legacy_format() -> None:
    one, two = ({"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 1} for tp in (1, 2))
    assert not differences(one, two)
    assert differences(one, two, legacy=True) == [("tensor_model_parallel_size", 1, 2)]


@pytest.mark.parametrize(
    ("stored", "given", "differ"),
    [
        ({"vocab_size": 1000, "padded_vocab_size": 1024}, {"vocab_size": 1000, "padded_vocab_size": 1280}, False),
        ({"vocab_size": 1000, "padded_vocab_size": 1024}, {"vocab_size": 1001, "padded_vocab_size": 1024}, True),
        ({"padded_vocab_size": 1024}, {"padded_vocab_size": 1280}, True),
        # 1000 words: 1024 = 8 x 128 with one tensor-parallel rank, 1536 = 3 x 512 with four.
        ({"padded_vocab_size": 1024, "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 1},
         {"padded_vocab_size": 1536, "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 4}, True),
        ({"padded_vocab_size": 1152, "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 1},
         {"padded_vocab_size": 1536, "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 4}, False),
    ],
)  # fmt: skip
def test_padded_vocabularies_differ_when_no_vocabulary_is_padded_to_both(
    stored: dict[str, int], given: dict[str, int], differ: bool
) -> None:
    assert bool(differences(stored, given)) is differ
    assert bool(differences(given, stored)) is differ
