"""What is saved is loaded, bit for bit: in one process, on POSIX and in memory, by us and by plain torch."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import ckptlib
from ckptlib import LocalNonpersistentObject, ShardedObject, ShardedTensor
from ckptlib.sharding import Box
from tests.support.tilings import boxes_in, guillotine, shapes, slices
from tests.support.trees import assert_same, blanked

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # of plain torch's own


def bits(dtype: torch.dtype, count: int = 6) -> torch.Tensor:
    raw = torch.randint(
        0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    return raw.view(dtype)


def everything() -> dict[str, Any]:
    """One of each kind of leaf."""
    grid = torch.arange(24.0).reshape(4, 6)
    fp8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    return {
        "model": {
            "plain": grid.clone(),
            "transposed": grid.clone().t(),
            "strided": grid.clone()[::2, 1::2],
            "column": grid.clone()[:, 2:3],
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
            "layers": [{"w": bits(torch.bfloat16)}, {"w": bits(torch.float16)}],
            "größe/ü.ñ 重み": torch.ones(2),
            "odd \n name": torch.zeros(1),
            "dtypes": {name: bits(getattr(torch, name)) for name in (*fp8, "uint16", "uint64", "int8", "complex64")}
            | {"bool": torch.tensor([True, False, True])},
            "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        },
        "sharded": [
            ShardedTensor("decoder.w", grid[0:2].clone(), (3, 4, 6), Box((1, 0, 0), (1, 2, 6))),
            ShardedTensor("decoder.w", grid[2:4].clone(), (3, 4, 6), Box((1, 2, 0), (1, 2, 6))),
            ShardedTensor("decoder.w", grid.clone(), (3, 4, 6), Box((0, 0, 0), (1, 4, 6))),
            ShardedTensor("decoder.w", grid[None].clone(), (3, 4, 6), Box((2, 0, 0), (1, 4, 6))),
        ],
        "grid": ShardedObject("cells", {"a": [1, 2], "t": torch.arange(2)}, (1, 2), (0, 1)),
        "local": LocalNonpersistentObject("mine"),
        "values": {
            "int": 2**60,
            "float": 1e-300,
            "none": None,
            "text": "größe",
            "bytes": b"\0\xff",
            "list": [1, [2.5, None], {"x": True}],
            "tuple": (1, "a"),
            "dict": {},
            "set": {1, 2},
            "array": np.arange(3, dtype=np.int16).tolist(),
        },
        "args": argparse.Namespace(lr=0.1, name="run"),
        "iteration": 7,
    }


@pytest.fixture(params=["posix", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An iteration directory that does not exist yet."""
    return str(tmp_path / "iter_0000007") if request.param == "posix" else f"memory://{uuid.uuid4().hex}/iter_0000007"


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A checkpoint with one of each."""
    url = str(tmp_path / "iter_0000007")
    ckptlib.save(everything(), url, iteration=7, run="one of each")
    return url


def test_every_kind_of_leaf_comes_back_bit_for_bit(url: str) -> None:
    result = ckptlib.save(everything(), url, iteration=7)
    state = blanked(everything())
    report = ckptlib.load(state, url)
    assert_same(state, everything())
    assert (report.missing, report.unexpected) == ([], [])
    assert report.bytes_read == report.bytes_needed > 0
    assert report.save_id == result.save_id
    assert (result.url, result.iteration, result.files) == (url, 7, 1)


def test_noncontiguous_tensors_are_filled_where_they_lie(url: str) -> None:
    ckptlib.save({"w": torch.arange(24.0).reshape(4, 6)}, url, iteration=1)
    for base in (torch.zeros(6, 4).t(), torch.zeros(8, 12)[::2, ::2], torch.zeros(4, 7)[:, 1:]):
        ckptlib.load({"w": base}, url)
        assert torch.equal(base, torch.arange(24.0).reshape(4, 6))


def test_parameters_that_require_gradients_are_filled(url: str) -> None:
    ckptlib.save({"w": torch.arange(4.0)}, url, iteration=1)
    parameter = torch.nn.Parameter(torch.zeros(4))
    ckptlib.load({"w": parameter}, url)
    assert torch.equal(parameter, torch.arange(4.0))
    assert parameter.requires_grad


def test_plain_torch_reads_tensors_and_plain_values(checkpoint: str) -> None:
    """A checkpoint we write loads with plain `torch.distributed.checkpoint.load`, also its plain values."""
    wanted = everything()
    state = {name: blanked(wanted[name]) for name in ("model", "values", "iteration", "args")}
    state["decoder.w"] = torch.zeros(3, 4, 6)
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    assert_same(
        {name: state[name] for name in ("model", "values", "iteration", "args")},
        {name: wanted[name] for name in ("model", "values", "iteration", "args")},
    )
    assert torch.equal(state["decoder.w"], torch.arange(24.0).reshape(4, 6).expand(3, 4, 6))


def test_what_plain_torch_saved_is_loaded(tmp_path: Path) -> None:
    """Names are torch's own, so its checkpoints fill our states, optimizers included."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"optimizer": get_optimizer_state_dict(model, optimizer), "values": everything()["values"]}
    state["values"].pop("dict")  # torch drops empty ones
    dcp.save({"model": model.state_dict(), **state}, checkpoint_id=tmp_path / "torch", no_dist=True)
    other = torch.nn.Linear(2, 2)
    fresh = torch.optim.AdamW([{"params": [other.weight]}, {"params": [other.bias]}], lr=1.0)
    values = blanked(state["values"])
    ckptlib.load({"model": other, "optimizer": fresh, "values": values}, str(tmp_path / "torch"))
    assert_same(values, state["values"])
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert torch.equal(other.weight, model.weight)


def test_plain_torch_fills_an_optimizer_from_ours(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ckptlib.save({"model": model, "optimizer": optimizer}, str(tmp_path / "it"), iteration=1)
    other = torch.nn.Linear(2, 2)
    fresh = torch.optim.AdamW([{"params": [other.weight]}, {"params": [other.bias]}], lr=1.0)
    state = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, fresh)}
    dcp.load(state, checkpoint_id=tmp_path / "it", no_dist=True)
    set_optimizer_state_dict(other, fresh, state["optimizer"])
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_plain_torch_loads_every_item_with_weights_only(checkpoint: str) -> None:
    """Each item is a `torch.save` container of its own at (file, offset, length)."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    assert len(metadata.storage_data) > 20
    for index, info in metadata.storage_data.items():
        with open(os.path.join(checkpoint, info.relative_path), "rb") as file:
            file.seek(info.offset)
            item = torch.load(io.BytesIO(file.read(info.length)), weights_only=index.fqn != "args")
        if index.offset is not None:
            assert isinstance(item, torch.Tensor)


def test_a_copied_iteration_directory_is_a_complete_checkpoint(checkpoint: str, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "any name"
    shutil.copytree(checkpoint, moved)
    shutil.rmtree(checkpoint)
    state = blanked(everything())
    ckptlib.load(state, str(moved), verify="data")
    assert_same(state, everything())
    assert ckptlib.verify(str(moved)).ok
    assert ckptlib.inspect(str(moved)).iteration == 7


def test_a_bare_save_touches_nothing_outside_its_directory(checkpoint: str) -> None:
    assert os.listdir(os.path.dirname(checkpoint)) == [os.path.basename(checkpoint)]


def test_whole_tensors_are_read_without_a_skeleton(checkpoint: str) -> None:
    tensors = ckptlib.read(checkpoint)
    assert torch.equal(tensors["decoder.w"], torch.arange(24.0).reshape(4, 6).expand(3, 4, 6))
    assert {*ckptlib.read(checkpoint, ["model.plain"])} == {"model.plain"}
    with pytest.raises(ckptlib.errors.KeyMismatchError, match=r"no tensor 'model\.plane'"):
        ckptlib.read(checkpoint, ["model.plane"])


def test_a_part_of_a_checkpoint_is_loaded_with_what_is_left_out_reported(checkpoint: str) -> None:
    state = {"model": {"plain": torch.zeros(4, 6)}}
    report = ckptlib.load(state, checkpoint, strict="return")
    assert torch.equal(state["model"]["plain"], everything()["model"]["plain"])
    assert "model.scalar" in report.unexpected
    assert report.bytes_read == report.bytes_needed == 96


def test_contents_choose_which_parts_are_saved(url: str) -> None:
    """`contents=` chooses what is saved."""
    ckptlib.save(
        {"model": {"w": torch.ones(1)}, "optimizer": {"m": torch.ones(1)}}, url, iteration=1, contents=["model"]
    )
    assert {*ckptlib.inspect(url).tensors} == {"model.w"}
    assert ckptlib.inspect(url).manifest.begin.contents == ("model",)


def test_a_model_its_optimizer_and_scheduler_go_on_as_if_uninterrupted(url: str) -> None:
    def job() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    def losses(parts: Any, first: int, last: int) -> list[float]:
        model, optimizer, scheduler = parts
        out = []
        for step in range(first, last):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            out.append(loss.item())
        return out

    whole = losses(job(), 0, 8)
    first, second = job(), job()
    assert losses(first, 0, 5) == whole[:5]
    ckptlib.save(dict(zip(("model", "optimizer", "scheduler"), first, strict=True)), url, iteration=5)
    torch.nn.init.zeros_(second[0][0].weight)
    ckptlib.load(dict(zip(("model", "optimizer", "scheduler"), second, strict=True)), url)
    assert losses(second, 5, 8) == whole[5:]


@given(st.data(), shapes(max_side=5))
def test_any_sharding_is_loaded_into_any_other_reading_only_what_is_needed(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    """R3: any tiling into any boxes; every byte that is read is a byte that is needed."""
    url = f"memory://{uuid.uuid4().hex}/it"
    whole = torch.arange(int(np.prod(shape)), dtype=torch.float64).reshape(shape)
    pieces = data.draw(guillotine(shape))
    saved = [ShardedTensor("w", whole[slices(box)].clone(), shape, box) for box in pieces]
    ckptlib.save({"w": saved}, url, iteration=0)
    wanted = {f"part {i}": data.draw(boxes_in(shape)) for i in range(3)}
    for box in wanted.values():
        target = torch.full(box.shape, -1.0, dtype=torch.float64)
        if data.draw(st.booleans()) and target.dim() > 1:
            target = torch.full(box.shape[::-1], -1.0, dtype=torch.float64).permute(*range(target.dim())[::-1])
        report = ckptlib.load({"w": ShardedTensor("w", target, shape, box)}, url, check_coverage=False)
        assert torch.equal(target, whole[slices(box)])
        assert report.bytes_read == report.bytes_needed == 8 * box.volume
    assert torch.equal(ckptlib.read(url)["w"], whole)


@pytest.mark.parametrize("size", [4096, 4100, 5000])
def test_a_large_chunk_is_read_by_several_threads_and_checked_as_one(
    url: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R3: in slices, whose CRC-32s combine to that of the chunk; before, between and after smaller ones."""
    monkeypatch.setattr("ckptlib.fetch.BATCH_BYTES", 1024)
    large = torch.arange(size, dtype=torch.float64)
    saved = {"0": large + 1, "a": torch.arange(99.0), "large": large, "large too": large + 2, "z": torch.arange(77.0)}
    ckptlib.save(saved, url, iteration=1)
    state = blanked(saved)
    report = ckptlib.load(state, url)
    assert_same(state, saved)
    assert (report.bytes_read, report.requests) == (report.bytes_needed, 5)
    if not url.startswith("memory:"):
        (data,) = Path(url).glob("*.distcp")
        content = bytearray(data.read_bytes())
        content[content.index(large[:2000].numpy().tobytes())] ^= 1
        data.write_bytes(content)
        with pytest.raises(ckptlib.errors.LoadIncompleteError, match="'large': damaged"):
            ckptlib.load(state, url)


def test_columns_of_a_matrix_are_read_exactly_into_any_memory(url: str) -> None:
    """R3: very many short runs, into dense, strided and transposed memory and through a cast, read as a table."""
    whole = torch.arange(300.0 * 40).reshape(300, 40)
    halves = [
        ShardedTensor.from_rank_offsets("w", part.contiguous(), (1, i, 2)) for i, part in enumerate(whole.chunk(2, 1))
    ]
    ckptlib.save({"w": halves}, url, iteration=1)
    for target in (
        torch.zeros(300, 10),
        torch.zeros(300, 17)[:, 3:13],
        torch.zeros(10, 300).t(),
        torch.zeros(300, 10).double(),
    ):
        wanted = ShardedTensor.from_box("w", target, (300, 40), (0, 15))
        report = ckptlib.load({"w": wanted}, url, check_coverage=False, cast=True)
        assert torch.equal(target, whole[:, 15:25].to(target.dtype))
        assert report.bytes_read == report.bytes_needed == 300 * 10 * 4


def test_rows_of_a_padded_vocabulary_are_zero_filled_or_dropped(url: str) -> None:
    """`allow_shape_mismatch`, as Megatron uses it for word embeddings."""
    rows = torch.arange(1.0, 13).reshape(6, 2)
    ckptlib.save({"e": ShardedTensor("e", rows, (6, 2), Box.whole((6, 2)))}, url, iteration=1)
    larger = torch.full((4, 2), -1.0)
    ckptlib.load(
        {"e": ShardedTensor("e", larger, (8, 2), Box((4, 0), (4, 2)), allow_shape_mismatch=True)},
        url,
        check_coverage=False,
    )
    assert torch.equal(larger, torch.cat([rows[4:], torch.zeros(2, 2)]))
    smaller = torch.full((4, 2), -1.0)
    ckptlib.load({"e": ShardedTensor("e", smaller, (4, 2), Box.whole((4, 2)), allow_shape_mismatch=True)}, url)
    assert torch.equal(smaller, rows[:4])
    beyond = torch.full((2, 2), -1.0)
    ckptlib.load(
        {"e": ShardedTensor("e", beyond, (8, 2), Box((6, 0), (2, 2)), allow_shape_mismatch=True)},
        url,
        check_coverage=False,
    )
    assert torch.equal(beyond, torch.zeros(2, 2))


def test_a_state_of_nothing_but_values_is_a_checkpoint(url: str) -> None:
    ckptlib.save({"step": 5}, url, iteration=5)
    state = {"step": 0}
    assert ckptlib.load(state, url).bytes_read == 0
    assert state == {"step": 5}
    assert ckptlib.verify(url).ok


def test_thousands_of_small_tensors_go_into_one_file(tmp_path: Path) -> None:
    """P23: one descriptor per tensor is a limit of others; here the number of files does not grow."""
    state = {"model": {f"w{i}": torch.tensor([i]) for i in range(3000)}}
    result = ckptlib.save(state, str(tmp_path / "it"), iteration=1)
    assert result.files == 1
    assert int(ckptlib.read(str(tmp_path / "it"), ["model.w2999"])["model.w2999"]) == 2999
