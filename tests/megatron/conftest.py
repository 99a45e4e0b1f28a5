"""Fixtures of the group that the real Megatron-Core judges."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.megatron.judging import Judge


@pytest.fixture(scope="session")
def judge() -> Iterator[Judge]:
    """One process: the TP=1 view."""
    judge = Judge(world=1)
    yield judge
    judge.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Judge]:
    """Two processes: the TP=2 view."""
    judge = Judge(world=2)
    yield judge
    judge.close()
