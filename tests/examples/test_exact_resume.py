"""A resumed run is the uninterrupted run: bitwise on the same topology, up to rounding on another.

Runs here save at iteration 4 and go on for some more. Starting one again resumes from 4 and computes the rest a second
time: that is compared with what the first, uninterrupted attempt had computed.
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import Ranks
from train import TrainConfig, train

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "train.py"
TINY = {
    "steps": 6,
    "save_interval": 4,
    "global_batch": 4,
    "context": 32,
    "width": 32,
    "layers": 2,
    "heads": 2,
    "warmup": 2,
    "text_bytes": 20_000,
}


def losses_of(journal: Path) -> list[dict[int, float]]:
    """Per attempt: iteration to loss."""
    attempts: dict[int, dict[int, float]] = {}
    for line in journal.read_text().splitlines():
        record = json.loads(line)
        losses = attempts.setdefault(record["attempt"], {})
        if "loss" in record:
            losses[record["iteration"]] = record["loss"]
    return list(attempts.values())


def config(tmp_path: Path, **changes: object) -> TrainConfig:
    paths = {"root": str(tmp_path / "root"), "journal": str(tmp_path / "journal.jsonl")}
    return TrainConfig(**{**paths, "result": str(tmp_path / "result.json"), **TINY, **changes})  # type: ignore[arg-type]


def train_on(ranks: int, config: TrainConfig, log: Path, env: dict[str, str]) -> None:
    """Trains in `ranks` processes of their own."""
    options = {name: value for name, value in vars(config).items() if value is not None}
    command = [sys.executable, str(TRAIN)]
    command += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    job = Ranks(ranks, command, log=log, env=env)
    try:
        job.wait(100)
    finally:
        job.kill()


@pytest.mark.usefixtures("training_in_this_process")
def test_a_resumed_run_repeats_the_losses_bit_by_bit(tmp_path: Path) -> None:
    """Weights, optimizer, schedule, data position and random state (dropout) all come back."""
    settings = config(tmp_path, dropout=0.1)
    uninterrupted = train(settings)
    result = Path(settings.result or "").read_bytes()
    assert len(uninterrupted) == 6

    torch.manual_seed(987)  # a new process would start from another state than the one left here
    random.seed(987)
    np.random.seed(987)
    resumed = train(settings)

    assert resumed == uninterrupted[4:]
    assert Path(settings.result or "").read_bytes() == result


def test_a_resumed_run_of_two_ranks_repeats_the_losses_bit_by_bit(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    """Two data-parallel ranks drop different elements: each gets its own random state back."""
    settings = config(tmp_path, dropout=0.1)
    train_on(2, settings, tmp_path / "log", clean_environment)
    result = Path(settings.result or "").read_bytes()
    train_on(2, settings, tmp_path / "log", clean_environment)

    first, second = losses_of(tmp_path / "journal.jsonl")
    assert sorted(first) == [1, 2, 3, 4, 5, 6]
    assert second == {5: first[5], 6: first[6]}
    assert Path(settings.result or "").read_bytes() == result


@pytest.mark.usefixtures("training_in_this_process")
def test_a_run_goes_on_at_another_tensor_parallel_size_and_back(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    """One rank saves at 4, two (TP=2) go on and save at 6, one goes on to 7: the losses are those of one rank alone."""
    alone = dict(enumerate(train(config(tmp_path, steps=7)), start=1))
    train_on(2, config(tmp_path, steps=7, save_interval=6, tp=2), tmp_path / "log", clean_environment)
    again = train(config(tmp_path, steps=7))

    _, halves, whole = losses_of(tmp_path / "journal.jsonl")
    assert sorted(halves) == [5, 6, 7]
    assert whole == {7: again[0]}
    for losses in (halves, whole):
        assert losses == pytest.approx({iteration: alone[iteration] for iteration in losses}, abs=1e-4)
