"""P11 (pytorch#148252, #126881, Lightning#20274): extra keys silently dropped, unclear strictness."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptlib
from ckptlib.errors import KeyMismatchError


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = str(tmp_path / "it")
    ckptlib.save({"model": {"kept": torch.ones(2), "dropped": torch.ones(2)}, "epoch": 3}, url, iteration=1)
    return url


def test_p11_a_strict_load_raises_on_keys_that_nobody_asked_for(url: str) -> None:
    with pytest.raises(KeyMismatchError) as caught:
        ckptlib.load({"model": {"kept": torch.zeros(2)}, "epoch": 0}, url)
    assert (caught.value.missing, caught.value.unexpected) == ((), ("model.dropped",))


def test_p11_a_strict_load_raises_on_keys_that_are_not_there(url: str) -> None:
    state = {"model": {"kept": torch.zeros(2), "dropped": torch.zeros(2), "new": torch.zeros(1)}, "epoch": 0}
    with pytest.raises(KeyMismatchError) as caught:
        ckptlib.load(state, url)
    assert (caught.value.missing, caught.value.unexpected) == (("model.new",), ())


def test_p11_a_lenient_load_returns_both_lists(url: str) -> None:
    report = ckptlib.load({"model": {"kept": torch.zeros(2)}, "new": 1}, url, strict="return")
    assert (report.missing, report.unexpected) == (["new"], ["epoch", "model.dropped"])


def test_p11_what_a_user_calls_iteration_is_not_mistaken_for_bookkeeping(tmp_path: Path) -> None:
    url = str(tmp_path / "own names")
    ckptlib.save({"model": {"w": torch.ones(1)}, "iteration": 5, "args": {"lr": 1}}, url, iteration=5)
    with pytest.raises(KeyMismatchError) as caught:
        ckptlib.load({"model": {"w": torch.zeros(1)}}, url)
    assert caught.value.unexpected == ("args.lr", "iteration")
