"""Input that is unusual and right is saved and loaded exactly; what only looks right is refused by its name."""

from __future__ import annotations

import pickle
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata

import ckptlib
from ckptlib import ShardedTensor
from ckptlib.errors import KeyMismatchError, RankFailedError, ShapeMismatchError, StateError, TilingError
from ckptlib.sharding import Box
from tests.support.ranks import run_checks
from tests.support.trees import assert_same, blanked

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support:UserWarning", "ignore:torch.distributed is disabled:UserWarning"
)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A place without anything."""
    return str(tmp_path / "iter_0000001")


# --- dtypes -----------------------------------------------------------------------------------------------------------

PLAIN = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bits8", "bits4x2", "bits16"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)


def any_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every byte another, NaNs and all; only 0 and 1 for bool."""
    out = torch.empty(shape, dtype=dtype)
    raw = torch.arange(out.nbytes, dtype=torch.int64)
    out.view(torch.uint8).reshape(-1).copy_(raw % 2 if dtype == torch.bool else raw * 37 % 256)
    return out


def test_every_dtype_with_whole_bytes_is_resharded_bit_for_bit(url: str) -> None:
    """Complex, bool, float8, int4 and float4 by two in a byte: rows saved in two parts, loaded in three."""
    whole = {name: any_bits(dtype, 6, 4) for name in PLAIN if (dtype := getattr(torch, name, None)) is not None}

    def cut(parts: int, source: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        rows = 6 // parts
        return {
            name: [
                ShardedTensor.from_box(name, source(tensor)[i * rows : (i + 1) * rows].clone(), (6, 4), (i * rows, 0))
                for i in range(parts)
            ]
            for name, tensor in whole.items()
        }

    ckptlib.save(cut(2, lambda t: t), url, iteration=1)
    target = cut(3, torch.empty_like)
    ckptlib.load(target, url)
    assert_same(target, cut(3, lambda t: t))
    assert ckptlib.verify(url).ok


@pytest.mark.parametrize("name", ["int4", "uint4", "int1", "uint7"])
def test_numbers_of_less_than_a_byte_are_refused_with_the_way_around(url: str, name: str) -> None:
    tensor = torch.empty(4, dtype=getattr(torch, name))
    with pytest.raises(StateError, match=rf"'model\.w': torch\.{name} cannot be saved.*view\(torch\.uint8\)"):
        ckptlib.save({"model": {"w": tensor}}, url, iteration=1)
    packed = tensor.view(torch.uint8).fill_(0x5A)
    ckptlib.save({"model": {"w": packed}}, url, iteration=1)
    assert_same(ckptlib.read(url)["model.w"], packed)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_tensors_that_lie_in_any_order_are_saved_and_filled_where_they_lie(url: str) -> None:
    base = torch.arange(48.0).reshape(6, 8)
    views = {
        "transposed": lambda x: x.t(),
        "every other": lambda x: x[::2, ::3],
        "columns": lambda x: x[:, 2:5],
        "channels last": lambda x: x.reshape(1, 2, 6, 4).to(memory_format=torch.channels_last),
        "one column": lambda x: x[:, :1],
        "an element": lambda x: x[3, 4],
    }
    ckptlib.save({"expanded": base[0].expand(3, 8), **{n: view(base) for n, view in views.items()}}, url, iteration=1)
    assert_same(ckptlib.read(url)["expanded"], base[0].repeat(3, 1))
    for name, view in views.items():
        memory = torch.full_like(base, -1.0)
        target = view(memory)
        ckptlib.load({name: target}, url, strict="return")
        assert_same(target, view(base), name)
        if target.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
            assert int((memory == -1.0).sum()) == memory.numel() - target.numel()  # and nothing beside it


@pytest.mark.parametrize("strides", [(0, 1), (1, 0), (1, 1), (2, 1)])
def test_a_tensor_whose_elements_share_memory_is_not_filled(url: str, strides: tuple[int, int]) -> None:
    ckptlib.save({"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(1)}, url, iteration=1)
    memory, other = torch.zeros(32), torch.zeros(1)
    with pytest.raises(StateError, match=r"'w': several of its elements share memory.*clone it"):
        ckptlib.load({"w": memory.as_strided((3, 4), strides), "b": other}, url)
    assert not memory.any()
    assert not other.any()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_saved_under_both_names_and_stay_tied(url: str) -> None:
    model = Tied()
    shared = torch.arange(4.0)
    ckptlib.save({"model": model, "plain": {"one": shared, "other": shared}}, url, iteration=1)
    found = ckptlib.read(url)
    assert {*found} == {"model.embedding.weight", "model.head.weight", "plain.one", "plain.other"}
    assert_same(found["model.head.weight"], model.embedding.weight.detach())
    fresh, again = Tied(), torch.zeros(4)
    ckptlib.load({"model": fresh, "plain": {"one": again, "other": again}}, url)
    assert fresh.head.weight is fresh.embedding.weight
    assert_same(fresh.head.weight.detach(), model.head.weight.detach())
    assert_same(again, shared)
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(5, 3))
    ckptlib.load({"model": untied}, url, strict="return")
    assert_same(untied.head.weight.detach(), untied.embedding.weight.detach())


def test_tied_weights_are_not_filled_from_two_tensors_that_differ(url: str) -> None:
    """Which of them won would be chance."""
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(5, 3))
    ckptlib.save({"model": untied}, url, iteration=1)
    model = Tied()
    before = model.head.weight.detach().clone()
    with pytest.raises(
        StateError, match=r"'model\.embedding\.weight' and 'model\.head\.weight' are one memory here.*keys"
    ):
        ckptlib.load({"model": model}, url)
    assert_same(model.head.weight.detach(), before)
    ckptlib.load({"model": model}, url, keys=["model.embedding.*"])
    assert_same(model.head.weight.detach(), untied.embedding.weight.detach())


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_nothing_and_single_elements_are_tensors_too(url: str) -> None:
    """0-d tensors, tensors without elements, and shards without elements of tensors that have some."""

    def make(fill: float) -> dict[str, Any]:
        return {
            "scalar": torch.tensor(fill),
            "no rows": torch.empty(0, 3),
            "no columns": torch.empty(3, 0, dtype=torch.int8),
            "rows": [
                ShardedTensor.from_box("rows", torch.full((size, 2), fill), (3, 2), (at, 0))
                for at, size in ((0, 2), (2, 0), (2, 1), (3, 0))
            ],
            "cells": [ShardedTensor("cells", torch.full((), fill), (4,), Box((i,), (1,))) for i in range(4)],
        }

    ckptlib.save(make(2.5), url, iteration=1)
    target = make(0.0)
    ckptlib.load(target, url)
    assert_same(target, make(2.5))
    assert ckptlib.verify(url).ok


EMPTY: list[dict[str, Any]] = [{}, {"model": {}}, {"model": nn.Identity()}, {"model": {"a": {}, "b": []}}]


@pytest.mark.parametrize("state", EMPTY, ids=repr)
def test_a_state_without_any_tensor_is_a_checkpoint(url: str, state: dict[str, Any]) -> None:
    ckptlib.save(state, url, iteration=1)
    report = ckptlib.load(state, url)
    assert (report.missing, report.unexpected, report.bytes_read) == ([], [], 0)
    assert ckptlib.read(url) == {}
    assert ckptlib.verify(url).ok
    with pytest.raises(KeyMismatchError, match="w"):
        ckptlib.load({**state, "w": torch.zeros(1)}, url)


def test_a_tensor_whose_global_shape_changed_is_refused_also_where_the_box_would_fit(url: str) -> None:
    ckptlib.save({"w": torch.ones(8, 2)}, url, iteration=1)
    piece = ShardedTensor.from_box("w", torch.zeros(2, 2), (6, 2), (0, 0))
    with pytest.raises(ShapeMismatchError, match=r"'w'.*\(8, 2\).*\(6, 2\)"):
        ckptlib.load({"w": piece}, url, check_coverage=False)
    assert not piece.data.any()


# --- names ------------------------------------------------------------------------------------------------------------

NAMES = [
    "a.b",
    "..",
    "../../escaped",
    "/absolute/path",
    "a/shard_0_1",
    "back\\slash",
    "größe 重み 🙂",
    "e\u0301 is not \u00e9",
    "\u00e9",
    " leading and trailing ",
    "new\nline\ttab\x00nul",
    '"quoted" %s {0}',
    "n" * 5000,
]


def test_any_name_is_a_name(url: str, tmp_path: Path) -> None:
    """Names never become paths: dots, slashes, unicode, control characters, and very long ones."""
    state = {"model": {name: torch.full((2,), float(i)) for i, name in enumerate(NAMES)}}
    ckptlib.save(state, url, iteration=1)
    assert [path.name for path in tmp_path.iterdir()] == [Path(url).name]
    assert_same(ckptlib.read(url), {f"model.{name}": tensor for name, tensor in state["model"].items()})
    target = blanked(state)
    ckptlib.load(target, url)
    assert_same(target, state)
    by_torch = blanked(state)
    dcp.load(by_torch, checkpoint_id=url, no_dist=True)
    assert_same(by_torch, state)
    assert ckptlib.verify(url).ok


def test_a_name_that_is_no_text_is_refused(url: str) -> None:
    for value in (torch.zeros(1), 5):
        with pytest.raises(StateError, match=r"'model\.\\ud800' is no text"):
            ckptlib.save({"model": {"\ud800": value}}, url, iteration=1)
    assert not Path(url).exists()


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_ten_thousand_tiny_tensors_cost_less_than_with_torch(tmp_path: Path) -> None:
    """CPU seconds per tensor of save and load, beside torch DCP's (of fewer) in the same run: measured at a quarter."""

    def make(count: int) -> dict[str, Any]:
        return {"model": {f"layers.{i // 10}.w{i % 10}": torch.full((4,), float(i)) for i in range(count)}}

    def seconds(*calls: Callable[[], Any]) -> float:
        started = time.process_time()
        for call in calls:
            call()
        return time.process_time() - started

    state = make(10_000)
    target, few = blanked(state), make(1000)
    url, other = str(tmp_path / "ours"), tmp_path / "theirs"
    ours = seconds(lambda: ckptlib.save(state, url, iteration=1), lambda: ckptlib.load(target, url))
    theirs = seconds(
        lambda: dcp.save(few, checkpoint_id=other, no_dist=True),
        lambda: dcp.load(few, checkpoint_id=other, no_dist=True),
    )
    assert_same(target, state)
    assert ours / 10_000 < theirs / 1000, f"{ours * 100:.0f} µs per tensor, torch {theirs * 1000:.0f} µs"


def sparse_checkpoint(folder: Path, shape: tuple[int, int], values: dict[int, torch.Tensor]) -> None:
    """A checkpoint as torch writes it, of one float32 tensor in one file with a hole, except for some rows."""
    folder.mkdir()
    name, size = "__0_0.distcp", torch.Size(shape)
    # The memory of the tensor is a hole in a file too: nothing of this size has to fit anywhere.
    whole = torch.from_file(str(folder / "memory"), shared=True, size=shape[0] * shape[1]).view(shape)
    with open(folder / name, "w+b") as data, torch.serialization.skip_data():
        torch.save(whole, cast(IO[bytes], data))
    (folder / "memory").unlink()
    chunk = metadata.ChunkStorageMetadata(torch.Size([0, 0]), size)
    tensor = metadata.TensorStorageMetadata(metadata.TensorProperties(dtype=torch.float32), size, [chunk])
    length = (folder / name).stat().st_size
    where = {metadata.MetadataIndex("w", chunk.offsets, 0): filesystem._StorageInfo(name, 0, length)}
    blob = pickle.dumps(metadata.Metadata({"w": tensor}, storage_data=where, storage_meta=metadata.StorageMeta()))
    (folder / ".metadata").write_bytes(blob)
    begin = first_byte_of_payload(folder / name)
    with open(folder / name, "r+b") as data:
        for row, content in values.items():
            data.seek(begin + row * shape[1] * 4)
            data.write(content.numpy().tobytes())


def first_byte_of_payload(path: Path) -> int:
    """Where record ``data/0`` of a container begins: behind its local header, which names it."""
    with path.open("rb") as data:
        head = data.read(1 << 16)
    header = head.rindex(b"PK\x03\x04", 0, head.index(b"/data/0"))
    name, extra = (int.from_bytes(head[header + at : header + at + 2], "little") for at in (26, 28))
    return header + 30 + name + extra


def test_a_box_of_a_20_gb_tensor_costs_its_own_bytes(tmp_path: Path) -> None:
    """R3: a sparse file of 20 GB, of which a rank needs some rows and columns. Time and memory stay small."""
    shape, row = (5_000_000, 1024), 3_999_999
    rows = {row + i: torch.arange(1024.0) + i for i in range(3)}
    folder = tmp_path / "it"
    sparse_checkpoint(folder, shape, rows)
    assert (folder / "__0_0.distcp").stat().st_size > 20_000_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    target = torch.full((4, 100), -1.0)
    report = ckptlib.load(
        {"w": ShardedTensor.from_box("w", target, shape, (row - 1, 200))}, str(folder), check_coverage=False
    )
    assert_same(target[0], torch.zeros(100))  # the hole
    for i in range(3):
        assert_same(target[1 + i], rows[row + i][200:300])
    assert report.bytes_read == report.bytes_needed == target.nbytes
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 * 1024, f"{grown} KiB"


# --- two ranks --------------------------------------------------------------------------------------------------------


def check_ranks_may_have_keys_of_their_own(rank: int, folder: str) -> None:
    """A checkpoint is the union of what ranks have; each asks for its own, and strictness counts all of them."""

    def state(fill: float) -> dict[str, Any]:
        mine = {f"only {rank}": torch.full((2,), fill + rank), f"value {rank}": fill + rank}
        return {"both": torch.full((3,), fill), **mine}

    url = ckptlib.save(state(5.0), f"{folder}/keys", iteration=1).url
    target = state(0.0)
    report = ckptlib.load(target, url)
    assert (report.missing, report.unexpected) == ([], [])
    assert_same(target, state(5.0))
    assert {*ckptlib.read(url)} == {"both", "only 0", "only 1"}
    less = {"both": torch.zeros(3)} | ({"only 0": torch.zeros(2)} if rank == 0 else {})
    assert ckptlib.load(less, url, strict="return").unexpected == ["only 1", "value 0", "value 1"]


def refused(rank: int, pieces: list[ShardedTensor], match: str, folder: str) -> None:
    with pytest.raises((TilingError, RankFailedError), match=match):
        ckptlib.save({"w": pieces}, f"{folder}/refused", iteration=1)


def check_pieces_of_two_ranks_that_overlap_or_leave_a_hole_are_refused_on_both(rank: int, folder: str) -> None:
    """W3: before any byte."""
    for mine, match in (
        (((0, 3), (2, 2)), "'w': .* overlap"),
        (((0, 1), (2, 2)), "'w': 3 of 4 elements"),
        (((0, 4), (0, 4)), "'w': .* overlap"),
        (((0, 0), (0, 3)), "'w': 3 of 4 elements"),
    ):
        at, size = mine[rank]
        refused(rank, [ShardedTensor.from_box("w", torch.zeros(size), (4,), (at,))], match, folder)
    assert not Path(folder, "refused").exists()


ON_TWO = [
    check_ranks_may_have_keys_of_their_own,
    check_pieces_of_two_ranks_that_overlap_or_leave_a_hole_are_refused_on_both,
]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(2, ON_TWO, str(tmp_path_factory.mktemp("two")))


@pytest.mark.parametrize("check", ON_TWO, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_two_ranks(check: Callable[..., None], two: dict[str, str]) -> None:
    assert two[check.__name__] == ""
