"""torch's ``.metadata``: what we write, torch reads as its own; what torch writes, we read; same index, same bytes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptlib
from ckptlib import storage as storages
from ckptlib.errors import NotACheckpointError, RecordError, UnsupportedError
from ckptlib.formats import torch_dist
from ckptlib.formats.metadata import to_index
from ckptlib.index import ChunkItem, ItemIndex, Location, ObjectItem
from ckptlib.safe_pickle import load_metadata
from ckptlib.sharding import Box
from tests.support.tilings import guillotine, shapes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
FILES = st.sampled_from(["__0_0.distcp", "__1_0.000001-0123456789ab-cdef0123.distcp"])
PLACES = st.builds(Location, FILES, st.integers(0, 2**62 - 1), st.integers(0, 2**40))


@st.composite
def indexes(draw: st.DrawFn) -> ItemIndex:
    keys = draw(st.lists(NAMES, unique=True, max_size=6))
    chunks: list[ChunkItem] = []
    objects: list[ObjectItem] = []
    for key in keys:
        if draw(st.booleans()):
            objects.append(ObjectItem(key, "/shard_" in key, draw(PLACES)))
            continue
        shape = draw(shapes())
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int64", "bool", "float8_e4m3fn", "complex64"]))
        # Empty pieces may share a place, and then the metadata keeps one of them.
        boxes = {box.offset: box for box in draw(guillotine(shape))}
        chunks += [ChunkItem(key, dtype, shape, box, draw(PLACES)) for box in boxes.values()]
    return ItemIndex.build(chunks, objects)


def as_torch_builds_it(index: ItemIndex) -> metadata.Metadata:
    """The same metadata, from torch's own classes."""
    entries: dict[str, Any] = {}
    places = {}
    for item in index.chunk_items():
        properties = metadata.TensorProperties(dtype=getattr(torch, item.dtype))
        size = torch.Size(item.global_shape)
        entry = entries.setdefault(item.key, metadata.TensorStorageMetadata(properties, size, []))
        chunk = metadata.ChunkStorageMetadata(torch.Size(item.box.offset), torch.Size(item.box.shape))
        place = metadata.MetadataIndex(item.key, chunk.offsets, len(entry.chunks))
        places[place] = filesystem._StorageInfo(item.location.file, item.location.offset, item.location.length)
        entry.chunks.append(chunk)
    for item in index.objects():
        entries[item.key] = metadata.BytesStorageMetadata()
        place = metadata.MetadataIndex(item.key)
        places[place] = filesystem._StorageInfo(item.location.file, item.location.offset, item.location.length)
    return metadata.Metadata(entries, storage_data=places, storage_meta=metadata.StorageMeta())


@given(indexes())
def test_what_is_written_is_what_torch_would_build(index: ItemIndex) -> None:
    found = pickle.loads(torch_dist.encode_metadata(index))
    wanted = as_torch_builds_it(index)
    assert found == wanted
    # The order of entries, and the hints inside keys that `==` ignores.
    assert repr(found) == repr(wanted)


@given(indexes())
def test_metadata_reads_back_as_the_same_index_and_writes_the_same_bytes(index: ItemIndex) -> None:
    """W5: exports are byte-for-byte derivable."""
    data = torch_dist.encode_metadata(index)
    again = to_index(load_metadata(data, "x"), "x")
    assert list(again.chunk_items()) == list(index.chunk_items())
    assert list(again.objects()) == list(index.objects())
    assert torch_dist.encode_metadata(again) == data
    assert torch_dist.encode_metadata(ItemIndex.decode(index.encode(), "x")) == data


@given(indexes())
def test_torch_pickles_of_the_same_metadata_are_read_alike(index: ItemIndex) -> None:
    torchs = to_index(load_metadata(pickle.dumps(as_torch_builds_it(index)), "x"), "x")
    assert list(torchs.chunk_items()) == list(index.chunk_items())


@pytest.fixture
def saved(tmp_path: Path) -> tuple[str, dict[str, Any]]:
    torch.manual_seed(0)
    state = {
        "model": torch.nn.Linear(3, 2).state_dict(),
        "nested": {"deep": {"list": [1, "two"], "none": None}},
        "pieces": [torch.ones(2), torch.zeros(1)],
        "step": 7,
    }
    url = str(tmp_path / "iter_0000007")
    ckptlib.save(state, url, iteration=7)
    return url, state


def test_plain_torch_loads_a_nested_state_dict(saved: tuple[str, dict[str, Any]]) -> None:
    """torch's default planner flattens to dotted paths, which are our keys."""
    url, state = saved
    target = {
        "model": {name: torch.zeros_like(value) for name, value in state["model"].items()},
        "nested": {"deep": {"list": None, "none": 1}},
        "pieces": [torch.zeros(2), torch.ones(1)],
        "step": None,
    }
    dcp.load(target, checkpoint_id=url, no_dist=True)
    assert target["nested"] == state["nested"]
    assert target["step"] == 7
    assert all(torch.equal(target["model"][name], value) for name, value in state["model"].items())
    assert [piece.tolist() for piece in target["pieces"]] == [[1, 1], [0]]


def test_plain_torch_loads_a_flat_state_dict(saved: tuple[str, dict[str, Any]]) -> None:
    url, state = saved
    target = {"model.weight": torch.zeros(2, 3), "step": 0}
    dcp.load(target, checkpoint_id=url, no_dist=True)
    assert torch.equal(target["model.weight"], state["model"]["weight"])
    assert target["step"] == 7


def test_plain_torch_converts_what_we_write(saved: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    url, state = saved
    dcp_to_torch_save(url, tmp_path / "all.pt")
    assert torch.equal(torch.load(tmp_path / "all.pt")["model.bias"], state["model"]["bias"])


def test_keys_are_taken_literally(saved: tuple[str, dict[str, Any]]) -> None:
    """Megatron-Core reads keys as they are, and demands that there is no planner data."""
    found = FileSystemReader(saved[0]).read_metadata()
    assert found.planner_data is None
    assert not hasattr(found, "all_local_plans")


def test_tensors_that_torch_saved_in_other_layouts_are_read_whole(tmp_path: Path) -> None:
    state = {
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "view": torch.arange(10.0)[2:5],
        "expanded": torch.ones(1).expand(4),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
    }
    dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    storage, path = storages.resolve(str(tmp_path))
    report = ckptlib.verify(str(tmp_path))
    assert report.ok, report.problems
    for item in torch_dist.read_index(storage, path).chunk_items():
        wanted = state[item.key]
        assert torch.equal(torch_dist.read_chunk(storage, path, item), wanted)
        if item.key in ("channels_last", "transposed"):
            with pytest.raises(UnsupportedError, match="row-major"):
                torch_dist.locate_payload(storage, path, item)
            continue
        location = torch_dist.locate_payload(storage, path, item)
        raw = bytearray(location.payload_length)
        storage.read_into(storages.join(path, location.file), [(location.payload_offset, memoryview(raw))])
        assert bytes(raw) == wanted.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tampered(saved_at: str, change: Any) -> bytes:
    value = FileSystemReader(saved_at).read_metadata()
    change(value)
    return pickle.dumps(value)


def info_of(value: metadata.Metadata) -> tuple[metadata.MetadataIndex, Any]:
    return next((key, info) for key, info in value.storage_data.items() if key.fqn == "model.weight")


def leave_directory(value: metadata.Metadata) -> None:
    info_of(value)[1].relative_path = "../../../etc/passwd"


def forget_a_place(value: metadata.Metadata) -> None:
    del value.storage_data[info_of(value)[0]]


def leave_the_shape(value: metadata.Metadata) -> None:
    value.state_dict_metadata["model.weight"].chunks[0].offsets = torch.Size([1, 0])
    value.storage_data[metadata.MetadataIndex("model.weight", [1, 0])] = info_of(value)[1]


def go_negative(value: metadata.Metadata) -> None:
    info_of(value)[1].offset = -5


def be_huge(value: metadata.Metadata) -> None:
    info_of(value)[1].length = 2**80


def name_no_storage(value: metadata.Metadata) -> None:
    value.storage_data = None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (leave_directory, "no file of this directory"),
        (forget_a_place, "model.weight.*no file is named"),
        (leave_the_shape, "model.weight.*leaves its shape"),
        (go_negative, "offset"),
        (be_huge, "length"),
        (name_no_storage, "names no files"),
    ],
)
def test_metadata_that_cannot_be_meant_is_damage(saved: tuple[str, dict[str, Any]], change: Any, why: str) -> None:
    with pytest.raises(RecordError, match=why):
        to_index(load_metadata(tampered(saved[0], change), "some/.metadata"), "some/.metadata")


def test_an_item_that_is_not_what_the_metadata_says_is_damage(saved: tuple[str, dict[str, Any]]) -> None:
    url = saved[0]
    storage, path = storages.resolve(url)
    items = {item.key: item for item in torch_dist.read_index(storage, path).chunk_items()}
    weight = items["model.weight"]
    wrong_shape = ChunkItem(weight.key, weight.dtype, (3, 2), Box((0, 0), (3, 2)), weight.location)
    wrong_dtype = ChunkItem(weight.key, "int32", weight.global_shape, weight.box, weight.location)
    for wrong in (wrong_shape, wrong_dtype):
        with pytest.raises(RecordError, match=r"model\.weight.*float32 \(2, 3\)"):
            torch_dist.locate_payload(storage, path, wrong)
    assert torch_dist.locate_payload(storage, path, weight).payload_length == 24


def test_a_directory_without_metadata_is_no_checkpoint(tmp_path: Path) -> None:
    storage, path = storages.resolve(str(tmp_path))
    with pytest.raises(NotACheckpointError, match="metadata is missing"):
        torch_dist.read_index(storage, path)
