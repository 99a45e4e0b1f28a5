"""More ranks than one directory shall hold files of: the others' lie below it, and every reader finds them."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import ckptlib
from ckptlib import commit, data_names, exports, inspection, removal
from ckptlib import storage as storages
from ckptlib.data_names import data_name, is_below
from ckptlib.integrations.dcp import CkptReader
from ckptlib.manifest import Format, SemanticType
from ckptlib.packing import Shards, write_package
from ckptlib.plan import values_digest
from ckptlib.safe_pickle import dump_object
from ckptlib.sharding import Box
from ckptlib.state import TensorLeaf
from tests.ckptlib.test_beats import begin
from tests.support.roots import small_state
from tests.support.trees import assert_same, blanked

RANKS, ROWS = 5, 4
FULL = torch.arange(RANKS * ROWS * 3.0).reshape(RANKS * ROWS, 3)
KINDS: list[tuple[SemanticType, Format]] = [("GLOBAL", "torch_dist"), ("TORCH_DCP", "torch_dcp")]

SAVE_ID = "000001-000000000001-00000001"


@pytest.fixture
def two_to_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_names, "FAN_OUT", 2)


def piece(rank: int) -> TensorLeaf:
    box = Box((rank * ROWS, 0), (ROWS, 3))
    return TensorLeaf("w", FULL[rank * ROWS : (rank + 1) * ROWS], tuple(FULL.shape), box, True)


def save(
    path: str, semantic_type: SemanticType, format_: Format, save_id: str = SAVE_ID, *, decide: bool = True
) -> None:
    """A save of five ranks, one after the other."""
    store = storages.PosixStorage()
    of = replace(begin(RANKS, save_id), semantic_type=semantic_type, format=format_)
    commit.begin_save(store, path, of)
    for rank in range(RANKS):
        common = dump_object({}, "common") if rank == 0 and format_ == "torch_dist" else None
        write_package(store, path, of, rank, Shards([piece(rank)], values_digest({}, ()), common=common))
    if decide:
        decision = commit.try_commit(store, path, of, decided_by="test")
        assert decision is not None
        assert decision.outcome == "commit", decision.reason
        exports.conclude(store, path, of)


def data_files(path: str) -> list[str]:
    found = inspection.list_files(storages.PosixStorage(), path)
    return [name for name in found if name.endswith(".distcp")]


@pytest.mark.parametrize(("semantic_type", "format_"), KINDS)
def test_every_reader_finds_the_files_of_all_ranks(
    tmp_path: Path, two_to_a_directory: None, semantic_type: SemanticType, format_: Format
) -> None:
    path = str(tmp_path / "iter_0000007")
    save(path, semantic_type, format_)
    assert data_files(path) == sorted(
        [f"__{rank}_0.{SAVE_ID}.distcp" for rank in (0, 1)]
        + [f"__{rank // 2}.{SAVE_ID}.ranks/__{rank}_0.{SAVE_ID}.distcp" for rank in (2, 3, 4)]
    )
    ours, torchs, through_torch = ({"w": torch.zeros_like(FULL)} for _ in range(3))
    ckptlib.load(ours, path, verify="data")
    dcp.load(torchs, storage_reader=dcp.FileSystemReader(path))
    dcp.load(through_torch, storage_reader=CkptReader(path))
    for state in (ours, torchs, through_torch):
        assert torch.equal(state["w"], FULL)
    for level in ("listing", "structure", "data"):
        report = ckptlib.verify(path, level=level)
        assert report.ok, report
    digests = json.loads((Path(path) / "integrity.json").read_text())["files"]
    assert set(data_files(path)) <= set(digests)  # Megatron joins each name to the directory and hashes what is there


@pytest.mark.parametrize(("semantic_type", "format_"), KINDS)
def test_a_copy_without_our_records_is_read_and_verified_too(
    tmp_path: Path, two_to_a_directory: None, semantic_type: SemanticType, format_: Format
) -> None:
    """As any foreign checkpoint."""
    path = str(tmp_path / "iter_0000007")
    save(path, semantic_type, format_)
    shutil.rmtree(f"{path}/.ckpt")
    state = {"w": torch.zeros_like(FULL)}
    ckptlib.load(state, path)
    assert torch.equal(state["w"], FULL)
    assert ckptlib.verify(path, level="data").ok
    damaged = f"{path}/{data_files(path)[-1]}"
    assert ".ranks/" in damaged
    with open(damaged, "r+b") as file:
        file.seek(-200, os.SEEK_END)
        file.write(b"\xff")
    assert not ckptlib.verify(path, level="data").ok


def test_a_missing_file_in_a_directory_below_aborts_the_save_and_is_named(
    tmp_path: Path, two_to_a_directory: None
) -> None:
    """W3."""
    path = str(tmp_path / "iter_0000007")
    save(path, "GLOBAL", "torch_dist", decide=False)
    os.unlink(f"{path}/{data_name(3, 0, SAVE_ID, 'distcp')}")
    store = storages.PosixStorage()
    (found,) = commit.list_saves(store, path)
    assert found.begin is not None
    decision = commit.try_commit(store, path, found.begin, decided_by="test")
    assert decision is not None
    assert (decision.outcome, "__3_0" in decision.reason, "is missing" in decision.reason) == ("abort", True, True)


@pytest.mark.parametrize("decide", [True, False])
def test_a_save_goes_with_its_directories_and_leaves_what_is_not_its_own(
    tmp_path: Path, two_to_a_directory: None, decide: bool
) -> None:
    """D2, D3: committed or not; running twice changes nothing."""
    path, other = str(tmp_path / "iter_0000007"), "000001-000000000002-00000002"
    save(path, "GLOBAL", "torch_dist", decide=decide)
    save(path, "GLOBAL", "torch_dist", other)
    mine = Path(path) / f"__1.{SAVE_ID}.ranks" / "mine"
    mine.write_bytes(b"a user's own")
    store = storages.PosixStorage()
    for _ in range(2):
        removal.remove_save(store, path, SAVE_ID)
        assert mine.read_bytes() == b"a user's own"
        assert [name for name in data_files(path) if SAVE_ID in name] == []
        assert ckptlib.verify(path, level="data").ok
    mine.unlink()
    removal.remove_save(store, path, SAVE_ID)
    assert [name for name in os.listdir(path) if SAVE_ID in name] == []
    removal.remove_save(store, path, other)
    assert os.listdir(tmp_path) == []


def test_a_replaced_save_is_buried_with_its_directories(
    tmp_path: Path, two_to_a_directory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W9, and of a whole state dict too."""
    monkeypatch.setattr(data_names, "FAN_OUT", 1)
    url = str(tmp_path / "iter_0000001")
    states: list[dict[str, Any]] = [small_state(1.0), small_state(2.0)]
    for state in states:
        save_id = ckptlib.save(state, url, iteration=1, on_exists="replace").save_id
    assert [name for name in os.listdir(url) if name.startswith("__")] == [f"__0_0.{save_id}.distcp"]
    found = blanked(states[1])
    ckptlib.load(found, url)
    assert_same(found, states[1])


@given(st.integers(0, 10**6), st.integers(0, 9))
def test_no_directory_gets_more_files_than_it_shall(rank: int, number: int) -> None:
    name = data_name(rank, number, SAVE_ID, "distcp")
    assert is_below(name)
    directory, _, base = name.rpartition("/")
    assert base == f"__{rank}_{number}.{SAVE_ID}.distcp"
    assert (directory == "") == (rank < data_names.FAN_OUT)
    assert SAVE_ID in directory or not directory  # W1
    first = rank // data_names.FAN_OUT * data_names.FAN_OUT
    for other in (first, first + data_names.FAN_OUT - 1):
        assert data_name(other, 0, SAVE_ID, "pt").rpartition("/")[0] == directory
    assert data_name(first + data_names.FAN_OUT, 0, SAVE_ID, "pt").rpartition("/")[0] != directory


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", ".hidden", "a/.b", "a\\b", "a\0"])
def test_what_is_no_file_of_a_directory_is_known(name: str) -> None:
    assert not is_below(name)
