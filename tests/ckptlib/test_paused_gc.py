"""The cycle collector pauses, and comes back exactly as the program had it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ckptlib.paused_gc import paused_gc


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    was = gc.isenabled()
    yield
    (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_off_in_a_pause_and_afterwards_as_before(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with paused_gc():
        assert not gc.isenabled()
        with paused_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == enabled


def test_an_error_ends_the_pause() -> None:
    gc.enable()
    with pytest.raises(ValueError, match="inside"), paused_gc():
        raise ValueError("inside")
    assert gc.isenabled()
