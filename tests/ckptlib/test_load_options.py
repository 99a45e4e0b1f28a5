"""Loads of a part, under other names, in another dtype: what is asked for is done, what cannot be is refused first."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib import ShardedObject, ShardedTensor
from ckptlib.errors import DtypeMismatchError, KeyMismatchError, StateError
from ckptlib.load_options import LoadOptions, Renames


def saved() -> dict[str, Any]:
    return {
        "model": {"a.w": torch.arange(6.0).reshape(2, 3), "a.b": torch.arange(3.0), "head": torch.arange(4.0)},
        "optimizer": {"state": {"a.w": {"exp_avg": torch.ones(2, 3)}}},
        "cells": ShardedObject("cells", {"x": 1}, (1,), (0,)),
        "epoch": 3,
    }


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = str(tmp_path / "it")
    ckptlib.save(saved(), url, iteration=1)
    return url


def zeros(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: zeros(inner) for name, inner in tree.items()}
    return torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else tree


# --- keys -------------------------------------------------------------------------------------------------------------


def test_keys_choose_what_is_loaded_and_the_rest_is_neither_missing_nor_unexpected(url: str) -> None:
    state = zeros(saved()) | {"new": {"w": torch.full((1,), 7.0)}, "epoch": 0}
    report = ckptlib.load(state, url, keys=["model.*", "epoch"])
    assert torch.equal(state["model"]["a.w"], saved()["model"]["a.w"])
    assert state["epoch"] == 3
    assert state["optimizer"]["state"]["a.w"]["exp_avg"].sum() == 0
    assert state["new"]["w"] == 7.0
    assert (report.missing, report.unexpected) == ([], [])
    assert report.bytes_read == report.bytes_needed == 4 * 13


def test_keys_that_are_chosen_can_be_missing_and_unexpected(url: str) -> None:
    """P11: strict counts for what was chosen."""
    state = {"model": {"a.w": torch.zeros(2, 3), "c": torch.zeros(1)}}
    with pytest.raises(KeyMismatchError) as caught:
        ckptlib.load(state, url, keys=["model.*"])
    assert (caught.value.missing, caught.value.unexpected) == (("model.c",), ("model.a.b", "model.head"))
    report = ckptlib.load(state, url, keys=["model.*"], strict="return")
    assert (report.missing, report.unexpected) == (["model.c"], ["model.a.b", "model.head"])
    assert torch.equal(state["model"]["a.w"], saved()["model"]["a.w"])


def test_a_pattern_that_matches_no_key_is_named(url: str) -> None:
    with pytest.raises(KeyMismatchError, match=r"keys: the pattern 'modle\.\*' matches no key"):
        ckptlib.load(zeros(saved()), url, keys=["model.*", "modle.*"], strict="return")
    with pytest.raises(StateError, match="got one string"):
        ckptlib.load(zeros(saved()), url, keys="model.*")


def test_a_grid_of_objects_is_chosen_by_its_name(url: str) -> None:
    state = saved() | {"cells": ShardedObject("cells", None, (1,), (0,))}
    ckptlib.load(state, url, keys=["cells"])
    assert state["cells"].data == {"x": 1}


def test_an_optimizer_that_is_not_chosen_keeps_its_state(tmp_path: Path) -> None:
    def job() -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved_job, trained = job(), job()
    fresh = {"model": torch.nn.Linear(2, 2)}
    fresh["optimizer"] = torch.optim.AdamW(fresh["model"].parameters(), lr=0.5)
    ckptlib.save(saved_job, str(tmp_path / "it"), iteration=1)
    moments = {name: value.clone() for name, value in trained["optimizer"].state[trained["model"].weight].items()}
    for state in (trained, fresh):
        ckptlib.load(state, str(tmp_path / "it"), keys=["model.*"])
        assert torch.equal(state["model"].weight, saved_job["model"].weight)
    assert trained["optimizer"].state[trained["model"].weight].keys() == moments.keys()
    for name, value in moments.items():
        assert torch.equal(trained["optimizer"].state[trained["model"].weight][name], value)
    assert not fresh["optimizer"].state
    assert fresh["optimizer"].param_groups[0]["lr"] == 0.5


class Watched:
    """A part with a state of its own."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.taken.append(state_dict)


def test_a_part_of_which_nothing_is_chosen_is_not_touched(tmp_path: Path) -> None:
    state = {"model": torch.ones(2), "loader": Watched(), "sampler": Watched()}
    ckptlib.save(state, str(tmp_path / "it"), iteration=1)
    ckptlib.load(state, str(tmp_path / "it"), keys=["model", "sampler.*"])
    assert (state["loader"].taken, state["sampler"].taken) == ([], [{"count": 1}])


# --- rename -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rename",
    [
        {"net": "model.a", "top": "model.head"},
        {"net.w": "model.a.w", "net.b": "model.a.b", "top": "model.head"},
        lambda key: {"net.w": "model.a.w", "net.b": "model.a.b", "top": "model.head"}[key],
    ],
    ids=["prefixes", "whole keys", "function"],
)
def test_keys_are_renamed(url: str, rename: Any) -> None:
    state = {"net": {"w": torch.zeros(2, 3), "b": torch.zeros(3)}, "top": torch.zeros(4)}
    report = ckptlib.load(state, url, rename=rename, keys=["model.*"])
    assert torch.equal(state["net"]["w"], saved()["model"]["a.w"])
    assert torch.equal(state["net"]["b"], saved()["model"]["a.b"])
    assert torch.equal(state["top"], saved()["model"]["head"])
    assert (report.missing, report.unexpected) == ([], [])


def test_a_fresh_optimizer_finds_its_moments_under_other_names(tmp_path: Path) -> None:
    def job(lr: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=lr)

    model, optimizer = job(0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ckptlib.save({"model": model, "adam": optimizer}, str(tmp_path / "it"), iteration=1)
    other, fresh = job(0.5)
    names = {"optimizer": "adam", "network": "model", "optimizer.state.1.bias.exp_avg": "adam.state.1.bias.exp_avg"}
    ckptlib.load({"network": other, "optimizer": fresh}, str(tmp_path / "it"), rename=names)
    assert fresh.param_groups[0]["lr"] == 0.1
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(fresh.state[ours]["exp_avg"], optimizer.state[theirs]["exp_avg"])


def test_pieces_and_cells_keep_their_places_when_renamed(url: str) -> None:
    halves = [ShardedTensor.from_rank_offsets("x", torch.zeros(1, 3), (0, i, 2)) for i in range(2)]
    state = {"halves": halves, "mine": ShardedObject("mine", None, (1,), (0,))}
    ckptlib.load(state, url, rename={"x": "model.a.w", "mine": "cells"}, keys=["model.a.w", "cells"])
    assert torch.equal(torch.cat([half.data for half in halves]), saved()["model"]["a.w"])
    assert state["mine"].data == {"x": 1}


def test_two_names_that_become_one_are_refused(url: str) -> None:
    with pytest.raises(StateError, match=r"'one' and 'two' of the state would both be 'model\.head'"):
        ckptlib.load(
            {"one": torch.zeros(4), "two": torch.zeros(4)}, url, rename={"one": "model.head", "two": "model.head"}
        )


def test_entries_of_a_rename_that_fit_nothing_are_named(url: str) -> None:
    with pytest.raises(KeyMismatchError, match="rename: the state has no key 'nett'"):
        ckptlib.load({"net": torch.zeros(4)}, url, rename={"net": "model.head", "nett": "x"}, strict="return")


def test_a_missing_key_is_named_as_both_sides_know_it(url: str) -> None:
    with pytest.raises(KeyMismatchError, match=r"model\.gone, in the state net") as caught:
        ckptlib.load({"net": torch.zeros(4)}, url, rename={"net": "model.gone"})
    assert caught.value.missing == ("model.gone",)


def test_the_longest_entry_wins_and_the_empty_one_stands_before_all() -> None:
    renames = Renames({"": "model", "a": "x", "a.b": "y.z", "gone": ""})
    assert [renames(key) for key in ("w", "a", "a.c", "ab", "a.b", "a.b.c", "a.b/shard_0_1", "gone.w")] == [
        "model.w",
        "x",
        "x.c",
        "model.ab",
        "y.z",
        "y.z.c",
        "y.z/shard_0_1",
        "w",
    ]
    with pytest.raises(StateError, match="'gone' would be ''"):
        renames("gone")
    with pytest.raises(StateError, match="would be None"):
        Renames(lambda key: None)("w")  # type: ignore[arg-type,return-value]


# --- cast -------------------------------------------------------------------------------------------------------------


def test_another_dtype_is_an_error_unless_a_cast_is_asked_for(url: str) -> None:
    state = {"model": {name: value.bfloat16() * 0 for name, value in saved()["model"].items()}}
    with pytest.raises(DtypeMismatchError, match="cast=True"):
        ckptlib.load(state, url, keys=["model.*"])
    assert all(value.sum() == 0 for value in state["model"].values())
    report = ckptlib.load(state, url, keys=["model.*"], cast=True)
    for name, value in saved()["model"].items():
        assert torch.equal(state["model"][name], value.bfloat16())
    assert report.cast == ["model.a.b", "model.a.w", "model.head"]
    assert report.bytes_read == report.bytes_needed == 4 * 13, "the bytes are read as they are stored"


def test_a_cast_reads_only_what_is_needed(url: str) -> None:
    column = ShardedTensor.from_box("model.a.w", torch.zeros(2, 1, dtype=torch.float64), (2, 3), (0, 1))
    report = ckptlib.load({"w": column}, url, keys=["model.a.w"], cast=True, check_coverage=False)
    assert column.data.tolist() == [[1.0], [4.0]]
    assert report.bytes_read == 8


def test_casts_are_allowed_by_pattern(url: str) -> None:
    state = {"model": {"a.b": torch.zeros(3).half(), "head": torch.zeros(4).half()}}
    with pytest.raises(DtypeMismatchError, match=r"model\.head"):
        ckptlib.load(state, url, keys=["model.a.b", "model.head"], cast=["*.b"])
    ckptlib.load(state, url, keys=["model.a.b"], cast=["*.b"])
    assert torch.equal(state["model"]["a.b"], torch.arange(3.0).half())
    with pytest.raises(KeyMismatchError, match=r"cast: the pattern 'x\.\*' matches no key"):
        ckptlib.load(saved(), url, cast=["x.*"])


FINE = ("float32 float64", "float32 bfloat16", "int32 int64", "bool float32", "int64 float16", "float32 complex64",
        "uint8 int16", "float32 float8_e5m2", "bool int8")  # fmt: skip
LOSSY = ("float32 int64", "complex64 float32", "int64 int32", "int32 uint32", "int8 bool", "float32 bool",
         "uint64 int64")  # fmt: skip


@pytest.mark.parametrize("pair", FINE)
def test_casts_that_keep_what_a_number_is_are_done(tmp_path: Path, pair: str) -> None:
    stored, wanted = (getattr(torch, name) for name in pair.split())
    value = torch.tensor([0, 1, 1, 0]).to(stored)
    ckptlib.save({"w": value}, str(tmp_path / "it"), iteration=1)
    state = {"w": torch.zeros(4).to(wanted)}
    ckptlib.load(state, str(tmp_path / "it"), cast=True)
    assert torch.equal(state["w"].to(torch.complex64), value.to(torch.complex64))


@pytest.mark.parametrize("pair", LOSSY)
def test_casts_that_lose_values_are_refused(tmp_path: Path, pair: str) -> None:
    stored, wanted = (getattr(torch, name) for name in pair.split())
    ckptlib.save({"w": torch.zeros(4).to(stored)}, str(tmp_path / "it"), iteration=1)
    with pytest.raises(DtypeMismatchError, match="values would be lost"):
        ckptlib.load({"w": torch.ones(4).to(wanted)}, str(tmp_path / "it"), cast=True)


# --- strictness, and options as such ----------------------------------------------------------------------------------


def test_warnings_name_what_is_left_after_all_options(url: str, caplog: pytest.LogCaptureFixture) -> None:
    state = {"net": {"w": torch.zeros(2, 3).half(), "c": torch.zeros(1)}}
    with caplog.at_level(logging.WARNING, "ckptlib"):
        report = ckptlib.load(state, url, strict="warn", keys=["model.a.*"], rename={"net": "model.a"}, cast=True)
    assert (report.missing, report.unexpected) == (["model.a.c"], ["model.a.b"])
    assert "model.a.c, in the state net.c" in caplog.text
    assert torch.equal(state["net"]["w"], saved()["model"]["a.w"].half())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strict": "yes"}, "strict='yes'"),
        ({"load_parallelism": "tp"}, "load_parallelism='tp'"),
        ({"cast": "model.*"}, "got one string"),
        ({"rename": [("a", "b")]}, "expected a mapping or a function"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StateError, match=message):
        LoadOptions(**options)
