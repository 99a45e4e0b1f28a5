"""The examples are scripts: their folder is on the path when they run, and so it is here."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture
def training_in_this_process() -> Iterator[None]:
    """Gives back what a training in the test's own process changes: threads and the global random state."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def clean_environment() -> dict[str, str]:
    """The environment of trainers: without a job around them, one thread each."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("CKPT_", "PREFECT_"))}
    return ours | {"OMP_NUM_THREADS": "1"}
