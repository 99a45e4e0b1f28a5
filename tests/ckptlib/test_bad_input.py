"""Wrong requests, and places that are no checkpoint: a clear error that names the thing, and nothing changed."""

from __future__ import annotations

import logging
import os
import pathlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib import Checkpointer, ShardedObject, ShardedTensor, commit, records
from ckptlib.errors import (
    CheckpointExistsError,
    DtypeMismatchError,
    ExclusiveCreateError,
    IntegrityError,
    KeyMismatchError,
    LoadIncompleteError,
    NotACheckpointError,
    ShapeMismatchError,
    StateError,
    TilingError,
    UncommittedError,
    UnsupportedError,
    VersionError,
)
from ckptlib.index import ChunkItem, ItemIndex, Location
from ckptlib.load_requests import plan_leaves
from ckptlib.sharding import Box
from ckptlib.source import Source
from ckptlib.state import TensorLeaf
from tests.support.roots import crash_at, files_of
from tests.support.trees import assert_same


def saved_state() -> dict[str, Any]:
    return {"model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}, "step": 5}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A checkpoint of `saved_state`."""
    url = str(tmp_path / "iter_0000005")
    ckptlib.save(saved_state(), url, iteration=5)
    return url


@pytest.fixture
def free(tmp_path: Path) -> str:
    """A place without anything."""
    return str(tmp_path / "free" / "iter_0000001")


def target() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(2, 3), "b": torch.zeros(2)}, "step": 0}


# --- requests that do not fit (R4) ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "error", "match"),
    [
        (torch.zeros(3, 2), ShapeMismatchError, r"'model\.w'.*\(2, 3\).*\(3, 2\)"),
        (torch.zeros(6), ShapeMismatchError, r"'model\.w'.*\(2, 3\).*\(6,\)"),
        (torch.zeros(2, 3, 1), ShapeMismatchError, r"'model\.w'"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), DtypeMismatchError, r"'model\.w'.*float32.*bfloat16"),
        (torch.zeros(2, 3, dtype=torch.int32), DtypeMismatchError, r"'model\.w'.*float32.*int32"),
    ],
    ids=["transposed", "flat", "extra axis", "bfloat16", "int32"],
)
def test_another_shape_or_dtype_is_refused_before_anything_changes(
    url: str, wanted: torch.Tensor, error: type[Exception], match: str
) -> None:
    state = target()
    state["model"]["w"] = wanted
    with pytest.raises(error, match=match):
        ckptlib.load(state, url)
    assert_same(state["model"]["b"], torch.zeros(2))
    assert state["step"] == 0
    assert not wanted.any()


def test_missing_and_unexpected_keys_are_both_named_and_nothing_changes(url: str) -> None:
    """P11."""
    state = {"model": {"w": torch.zeros(2, 3), "new": torch.zeros(1)}, "epoch": 0}
    with pytest.raises(KeyMismatchError) as caught:
        ckptlib.load(state, url)
    assert caught.value.missing == ("epoch", "model.new")
    assert caught.value.unexpected == ("model.b", "step")
    for name in ("epoch", "model.new", "model.b", "step"):
        assert name in str(caught.value)
    assert not state["model"]["w"].any()


def test_missing_and_unexpected_keys_are_reported_when_they_are_allowed(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """P11."""
    for strict in ("warn", "return"):
        state = {"model": {"w": torch.zeros(2, 3), "new": torch.full((1,), 9.0)}, "epoch": 3}
        with caplog.at_level(logging.WARNING, "ckptlib"):
            report = ckptlib.load(state, url, strict=strict)  # type: ignore[arg-type]
        assert (report.missing, report.unexpected) == (["epoch", "model.new"], ["model.b", "step"])
        assert_same(state["model"]["w"], saved_state()["model"]["w"])
        assert (float(state["model"]["new"]), state["epoch"]) == (9.0, 3)
        assert ("model.new" in caplog.text) == (strict == "warn")
        caplog.clear()


def test_a_shard_that_leaves_the_tensor_is_refused(url: str) -> None:
    with pytest.raises(StateError, match=r"'model\.w'.*exceeds"):
        ShardedTensor("model.w", torch.zeros(2, 3), (2, 3), Box((1, 0), (2, 3)))


def test_an_object_in_the_place_of_a_tensor_is_missing(url: str) -> None:
    state = target()
    state["model"]["w"] = None
    with pytest.raises(KeyMismatchError, match=r"model\.w"):
        ckptlib.load(state, url)


def test_an_unknown_way_to_be_strict_is_refused(url: str) -> None:
    with pytest.raises(StateError, match="strict='maybe'"):
        ckptlib.load(target(), url, strict="maybe")  # type: ignore[arg-type]


def test_a_stateful_object_that_refuses_its_state_is_told_with_what_had_changed(url: str) -> None:
    """R4: or says exactly that it could not."""

    class Refusing:
        def state_dict(self) -> dict[str, Any]:
            return target()["model"]

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("not this one")

    with pytest.raises(LoadIncompleteError, match="not this one") as caught:
        ckptlib.load({"model": Refusing(), "step": 0}, url)
    assert {*caught.value.changed} == {"model.w", "model.b"}


def test_a_damaged_tensor_is_named_with_what_had_changed(free: str) -> None:
    """Of a size that the index does not repeat."""
    ckptlib.save({"model": {"w": torch.arange(6.0), "b": torch.ones(32)}}, free, iteration=5)
    name = _damage(free, torch.ones(32).numpy().tobytes())
    state = {"model": {"w": torch.zeros(6), "b": torch.zeros(32)}}
    with pytest.raises(LoadIncompleteError, match=rf"'model\.b': damaged in .*{re.escape(name)}") as caught:
        ckptlib.load(state, free)
    assert caught.value.exit_code == 20
    assert "model.b" in caught.value.changed
    state = {"model": {"w": torch.zeros(6), "b": torch.zeros(32)}}
    with pytest.raises(IntegrityError, match="verification failed, nothing was loaded"):
        ckptlib.load(state, free, verify="data")
    assert_same(state, {"model": {"w": torch.zeros(6), "b": torch.zeros(32)}})


def test_a_damaged_object_is_named_before_anything_changes(free: str) -> None:
    """A rank's own: the index does not repeat it."""
    cells = ShardedObject("cells", "a rank's own", (1,), (0,))
    ckptlib.save({"w": torch.ones(32), "cells": cells}, free, iteration=5)
    name = _damage(free, b"a rank's own")
    state = {"w": torch.zeros(32), "cells": ShardedObject("cells", None, (1,), (0,))}
    with pytest.raises(IntegrityError, match=rf"{re.escape(name)}.*cells"):
        ckptlib.load(state, free)
    assert state["cells"].data is None
    assert state["w"].sum() == 0


def test_chunks_of_others_that_overlap_and_leave_a_hole_are_found_though_they_add_up() -> None:
    """R4: four elements of four, one of them twice."""
    index = ItemIndex.build(
        ChunkItem("t", "float32", (4,), Box((start,), (2,)), Location("f", start, 100)) for start in (0, 1)
    )
    source = Source(ckptlib.storage.PosixStorage(), "/nowhere", "torch_dcp", index, None)
    leaf = TensorLeaf("t", torch.zeros(4), (4,), Box.whole((4,)))
    with pytest.raises(TilingError, match=r"do not fit together: tensor 't': \[0:2\] and \[1:3\] overlap"):
        plan_leaves(source, [leaf], [index.tensor("t")])


def test_small_values_come_with_the_index_whatever_became_of_the_data(url: str) -> None:
    """P09: scalars and small values stand in the index, which has a digest of its own."""
    _damage(url, torch.ones(2).numpy().tobytes())
    state = target()
    assert ckptlib.load(state, url).bytes_read == 32
    assert_same(state, saved_state())
    assert not ckptlib.verify(url).ok


def _damage(url: str, payload: bytes) -> str:
    """Flips a bit of the first place where these bytes are; the name of the data file."""
    (path,) = Path(url).glob("*.distcp")
    data = bytearray(path.read_bytes())
    data[data.index(payload)] ^= 0x10
    path.write_bytes(data)
    return path.name


def _manifest(url: str) -> tuple[Any, str, Any]:
    storage, path = ckptlib.storage.resolve(url)
    save = commit.current_save(storage, path)
    assert save is not None
    return storage, path, commit.read_manifest(storage, path, save)


# --- places that are no checkpoint ------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["nothing", "an empty directory", "other files", "a file", "the run's root"])
def test_what_is_no_checkpoint_is_called_so_with_the_place(tmp_path: Path, what: str) -> None:
    place = tmp_path / "somewhere"
    if what == "an empty directory":
        place.mkdir()
    elif what == "other files":
        place.mkdir()
        (place / "weights.bin").write_bytes(b"x")
        (place / "iter_7").mkdir()
    elif what == "a file":
        place.write_bytes(b"x")
    elif what == "the run's root":
        Checkpointer(str(place), run="run").save(saved_state(), iteration=1)
    for call in (lambda: ckptlib.load(target(), str(place)), lambda: ckptlib.read(str(place))):
        with pytest.raises(NotACheckpointError, match=r"somewhere.*not a checkpoint.*iteration directory") as caught:
            call()
        assert isinstance(caught.value, FileNotFoundError)


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="nosuch"):
        ckptlib.save(saved_state(), "nosuch://bucket/it", iteration=1)


def test_a_save_that_was_never_committed_is_no_checkpoint(free: str) -> None:
    """R1."""
    with crash_at(commit, "try_commit"):
        ckptlib.save(saved_state(), free, iteration=1)
    with pytest.raises(UncommittedError, match=r"no save was committed here \(.*: undecided\).*earlier iteration"):
        ckptlib.load(target(), free)


def test_an_aborted_save_is_no_checkpoint(free: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R1."""
    with monkeypatch.context() as patch:
        patch.setattr(
            commit, "publish_record", lambda *_: (_ for _ in ()).throw(OSError(5, "i/o error", "rank_0.json"))
        )
        with pytest.raises(OSError, match=r"rank_0\.json"):
            ckptlib.save(saved_state(), free, iteration=1)
    with pytest.raises(UncommittedError, match="abort"):
        ckptlib.load(target(), free)
    ckptlib.save(saved_state(), free, iteration=1)  # a new try is free to succeed
    ckptlib.load(target(), free)


def test_a_checkpoint_of_a_newer_major_version_is_a_clear_error(free: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown newer manifest version."""
    for schema, error in (("1.9", None), ("2.0", VersionError)):
        url = f"{free}_{schema}"
        with monkeypatch.context() as patch:
            patch.setattr(records, "SCHEMA", schema)
            patch.setattr(records, "SCHEMA_MAJOR", int(schema[0]))
            ckptlib.save(saved_state(), url, iteration=1)
        if error is None:
            ckptlib.load(target(), url)
            continue
        for call in (lambda u=url: ckptlib.load(target(), u), lambda u=url: ckptlib.read(u)):
            with pytest.raises(error, match=r"schema 2\.0; this ckptlib reads up to 1\.x.*newer ckptlib"):
                call()


# --- states that cannot be saved --------------------------------------------------------------------------------------


class Custom:
    """A class that no other process has."""

    def __init__(self) -> None:
        self.x = 1


UNSAVEABLE = {
    "a lambda": lambda: lambda: None,
    "a function": lambda: os.getpid,
    "an instance of a class of one's own": Custom,
    "a class of one's own": lambda: Custom,
    "an open file": lambda: sys.stdin,
    "a generator": lambda: (i for i in range(3)),
    "a module": lambda: os,
    "a custom value deep inside": lambda: [1, (2, [Custom()])],
    "a custom value in a set": lambda: {("a", Custom)},
}


@pytest.mark.parametrize("what", UNSAVEABLE)
def test_a_value_that_no_reader_would_load_is_refused_by_its_path(free: str, what: str) -> None:
    """R5: what is saved can be loaded; the error is at the save."""
    value = UNSAVEABLE[what]()
    for state, path in (
        ({"model": {"config": value}}, r"model\.config"),
        ({"o": ShardedObject("grid", value)}, r"grid/shard_0_1"),
    ):
        with pytest.raises(StateError, match=path):
            ckptlib.save(state, free, iteration=1)
        assert not list(Path(free).glob("*.distcp"))
        assert not commit.is_committed(*ckptlib.storage.resolve(free))


def test_a_value_that_contains_itself_is_refused_by_its_path(free: str) -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: Any = 0
    for _ in range(100_000):
        deep = (deep,)
    for value in (loop, (loop,), deep):
        with pytest.raises(StateError, match=r"model.*(contains itself|nested too deeply)"):
            ckptlib.save({"model": {"config": value}}, free, iteration=1)


def test_plain_values_of_many_kinds_are_saved(free: str) -> None:
    values = {"path": pathlib.PurePosixPath("/a/b"), "dtype": torch.bfloat16, "size": torch.Size([2]), "complex": 1j}
    ckptlib.save({"values": values}, free, iteration=1)
    state: dict[str, Any] = {"values": dict.fromkeys(values)}
    ckptlib.load(state, free)
    assert state["values"] == values


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's, of its odd layouts
def test_tensors_that_have_no_plain_bytes_are_refused_before_any_byte(free: str) -> None:
    tensors = {
        "sparse": torch.zeros(3).to_sparse(),
        "compressed": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
        "meta": torch.zeros(3, device="meta"),
        "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "sub-byte": torch.empty(3, dtype=torch.uint4),
    }
    for name, tensor in tensors.items():
        with pytest.raises((StateError, UnsupportedError), match=name):
            ckptlib.save({"model": {name: tensor}}, free, iteration=1)
        assert not list(Path(free).glob("*.distcp")), name


def test_wrong_tilings_are_refused_before_any_byte(free: str) -> None:
    """An uncovered or doubly covered tensor (wrong `replica_id`)."""
    left, right = (ShardedTensor("w", torch.zeros(2), (4,), Box((at,), (2,))) for at in (0, 2))
    copy = ShardedTensor("w", torch.zeros(3), (4,), Box((1,), (3,)))
    not_main = ShardedTensor("w", torch.zeros(2), (4,), Box((2,), (2,)), replica_id=1)
    for pieces, match in (
        ([left], "2 of 4 elements"),
        ([left, not_main], "2 of 4 elements"),
        ([left, right, copy], "overlap"),
        ([not_main], "0 of 4 elements"),
    ):
        with pytest.raises(TilingError, match=f"'w': .*{match}"):
            ckptlib.save({"w": pieces}, free, iteration=1)
    assert not os.path.exists(free)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"semantic_type": "PARTIAL"},
        {"semantic_type": "LEGACY", "format": "torch_dist"},
        {"format": "safetensors"},
        {"io_mode": "async"},
        {"kind": "daily"},
        {"on_exists": "overwrite"},
        {"run": 5},
        {"iteration": -1},
        {"iteration": 1.0},
        {"contents": ["modle"]},
        {"metrics": {"loss": "low"}},
    ],
    ids=str,
)
def test_options_that_do_not_exist_are_refused_by_name_before_any_byte(free: str, options: dict[str, Any]) -> None:
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=f"{name}|{value}") as caught:
        ckptlib.save(saved_state(), free, **{"iteration": 1, **options})
    assert isinstance(caught.value, StateError | UnsupportedError)
    assert not os.path.exists(free)


def test_a_second_save_into_a_checkpoint_is_an_error_before_any_byte(url: str) -> None:
    """W9, for a bare save: its own attempt each time."""
    before = files_of(url)
    with pytest.raises(CheckpointExistsError, match="on_exists='replace'") as caught:
        ckptlib.save(saved_state(), url, iteration=5)
    assert isinstance(caught.value, FileExistsError)
    assert files_of(url) == before


def test_a_storage_without_exclusive_creation_needs_the_word_of_a_single_writer(tmp_path: Path) -> None:
    """W4."""
    url = f"local://{tmp_path}/it"
    with pytest.raises(ExclusiveCreateError, match="single_writer=True"):
        ckptlib.save(saved_state(), url, iteration=1)
    with pytest.raises(ExclusiveCreateError, match="single_writer=True"):
        Checkpointer(f"local://{tmp_path}/run", run="run")
    assert not list(tmp_path.iterdir())
    ckptlib.save(saved_state(), url, iteration=1, single_writer=True)
    state = target()
    ckptlib.load(state, str(tmp_path / "it"))
    assert_same(state, saved_state())
    checkpointer = Checkpointer(f"local://{tmp_path}/run", run="run", single_writer=True)
    checkpointer.save(saved_state(), iteration=1)
    assert checkpointer.restore(target()).iteration == 1
