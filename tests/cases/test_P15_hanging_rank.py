"""P15 (torchtitan#3065): a load or save that waits for ever, without an error, for a rank that hangs."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ckptlib
from ckptlib import ShardedTensor, packing, reader
from ckptlib.errors import RankTimeoutError
from tests.support.ranks import try_ranks

TIMEOUT = 3.0
HANGING = 1


def hang(rank: int, url: str, operation: str) -> float:
    """Seconds until the others knew."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.full((2,), float(rank)), (0, rank, 3))}
    if operation == "load":
        ckptlib.save(state, url, iteration=1)
        module, name = reader, "open_source"
        call = functools.partial(ckptlib.load, state, url, timeout=TIMEOUT)
    else:
        module, name = packing, "write_rank_files"
        call = functools.partial(ckptlib.save, state, url, iteration=1, timeout=TIMEOUT)
    original = getattr(module, name)

    def stop(*args: Any, **options: Any) -> Any:
        if rank == HANGING:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*args, **options)

    started = time.monotonic()
    with mock.patch.object(module, name, stop), pytest.raises(RankTimeoutError, match=f"rank {HANGING}") as caught:
        call()
    assert caught.value.ranks == (HANGING,)
    return time.monotonic() - started


@pytest.mark.timeout(300)
@pytest.mark.parametrize("operation", ["save", "load"])
def test_p15_a_stopped_rank_is_named_on_all_others_within_the_timeout(tmp_path: Path, operation: str) -> None:
    outcomes = try_ranks(3, hang, str(tmp_path / "it"), operation, wait_for=2)
    for outcome in outcomes:
        if outcome.rank == HANGING:
            assert outcome.exitcode == -signal.SIGKILL  # by the test: it never came back
        else:
            assert outcome.ok, outcome.text
            assert TIMEOUT < outcome.value < 2 * TIMEOUT + 10.0
