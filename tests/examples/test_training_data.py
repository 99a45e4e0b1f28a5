"""The order of the training data depends on the samples seen so far, and on nothing else."""

import pytest
import torch
from data import Batches, standard_library
from hypothesis import given
from hypothesis import strategies as st

TEXT = torch.arange(1000, dtype=torch.int64).remainder(251).to(torch.uint8)


def batches(global_batch: int = 12, seed: int = 3) -> Batches:
    return Batches(TEXT, context=7, global_batch=global_batch, seed=seed)


def test_the_text_is_python_source_of_the_asked_length() -> None:
    text = standard_library(50_000)
    assert text.shape == (50_000,)
    assert text.dtype == torch.uint8
    assert b"import" in bytes(text.tolist())
    assert torch.equal(text, standard_library(50_000))


def test_targets_are_the_inputs_one_token_ahead() -> None:
    inputs, targets = batches().at(0)
    assert inputs.shape == targets.shape == (12, 7)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@given(consumed=st.integers(0, 2000), ranks=st.sampled_from([1, 2, 3, 4, 6]))
def test_data_parallel_ranks_share_out_the_same_global_batch(consumed: int, ranks: int) -> None:
    data = batches()
    parts = [index for rank in range(ranks) for index in data.indices(consumed, rank=rank, ranks=ranks)]
    assert parts == data.indices(consumed)


@given(consumed=st.integers(0, 2000))
def test_a_new_object_goes_on_where_another_one_was(consumed: int) -> None:
    assert torch.equal(batches().at(consumed)[0], batches().at(consumed)[0])


def test_every_epoch_has_every_sample_once_and_in_another_order() -> None:
    data = batches(global_batch=1)
    size = data.samples_per_epoch
    first, second = ([data.indices(sample)[0] for sample in range(start, start + size)] for start in (0, size))
    assert sorted(first) == sorted(second) == list(range(size))
    assert first != second


def test_the_global_random_state_neither_matters_nor_changes() -> None:
    before = torch.get_rng_state()
    drawn = batches().indices(5)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        assert batches().indices(5) == drawn
    assert batches(seed=4).indices(5) != drawn


def test_ranks_that_do_not_divide_the_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="12 samples does not divide among 5 ranks"):
        batches().indices(0, ranks=5)


def test_a_text_shorter_than_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        Batches(TEXT[:7], context=7, global_batch=1, seed=0)
