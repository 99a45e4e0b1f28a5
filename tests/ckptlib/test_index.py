"""The item index: what goes in comes out, by key and by position, and damage is called damage."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.errors import RecordError, StateError, VersionError
from ckptlib.index import ChunkItem, ItemIndex, Location, ObjectItem, TensorInfo
from ckptlib.index_columns import MAGIC, encode
from ckptlib.sharding import Box
from tests.support.tilings import guillotine, shapes

KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
NUMBERS = st.integers(-1, 2**62)
FILES = KEYS.map(lambda name: f"__{name.replace('/', '_')}.distcp")
LOCATIONS = st.builds(Location, FILES, *[NUMBERS] * 5)


@st.composite
def items(draw: st.DrawFn) -> tuple[list[ChunkItem], list[ObjectItem]]:
    """Chunks of some tensors, in any order, and objects."""
    chunks = []
    for key in draw(st.lists(KEYS, max_size=4, unique=True)):
        shape, dtype = draw(shapes(max_dims=3)), draw(st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]))
        for box in draw(guillotine(shape, max_cuts=3)):
            place = replace(draw(LOCATIONS), offset=len(chunks))  # no two items lie at one place
            chunks.append(ChunkItem(key, dtype, shape, box, place))
    objects = [
        ObjectItem(key, draw(st.booleans()), draw(LOCATIONS)) for key in draw(st.lists(KEYS, max_size=3, unique=True))
    ]
    return draw(st.permutations(chunks)), objects


def ordered(chunks: Any) -> list[ChunkItem]:
    return sorted(chunks, key=repr)


@given(items())
def test_an_index_holds_exactly_the_items_it_was_built_from(
    given_items: tuple[list[ChunkItem], list[ObjectItem]],
) -> None:
    chunks, objects = given_items
    index = ItemIndex.build(chunks, objects)
    for read in (index, ItemIndex.decode(index.encode(), "index")):
        assert ordered(read.chunk_items()) == ordered(chunks)
        assert list(read.objects()) == sorted(objects, key=lambda item: item.key)
        for chunk in chunks:
            of_key = [c for c in chunks if c.key == chunk.key]
            info = read.tensor(chunk.key)
            assert info == TensorInfo(chunk.key, chunk.dtype, chunk.global_shape, len(of_key))
            columns = read.chunks(chunk.key)
            assert {read.chunk_item(info, columns, i) for i in range(len(columns))} == set(of_key)
        for item in objects:
            assert read.object(item.key) == item


@given(items(), KEYS)
def test_keys_are_found_by_prefix_and_absent_ones_are_absent(
    given_items: tuple[list[ChunkItem], list[ObjectItem]], key: str
) -> None:
    chunks, objects = given_items
    index = ItemIndex.build(chunks, objects)
    names = {chunk.key for chunk in chunks}
    for prefix in {key, *(name[:2] for name in names)}:
        assert index.keys_below(prefix) == sorted(name for name in names if name.startswith(prefix))
    assert (key in index) == (key in names)
    assert index.has_object(key) == (key in {item.key for item in objects})
    if key not in names:
        with pytest.raises(KeyError):
            index.chunks(key)


@given(items())
def test_the_same_items_give_the_same_bytes_in_any_order(
    given_items: tuple[list[ChunkItem], list[ObjectItem]],
) -> None:
    """W5: whoever decides writes the same index."""
    chunks, objects = given_items
    assert ItemIndex.build(chunks, objects).encode() == ItemIndex.build(chunks[::-1], objects[::-1]).encode()


@given(items())
def test_an_index_survives_a_rank_record(given_items: tuple[list[ChunkItem], list[ObjectItem]]) -> None:
    index = ItemIndex.build(*given_items)
    there = json.loads(json.dumps(index.to_record()))
    assert ItemIndex.from_record(there, "rank_0.json").encode() == index.encode()


@given(items(), st.data())
def test_the_merged_indexes_of_ranks_are_the_index_of_all_items(
    given_items: tuple[list[ChunkItem], list[ObjectItem]], data: st.DataObject
) -> None:
    """W5: whoever decides, from records in whatever order, writes the same index."""
    chunks, objects = given_items
    ranks = data.draw(st.integers(0 if not chunks and not objects else 1, 3))
    of_chunk = [data.draw(st.integers(0, ranks - 1)) for _ in chunks]
    of_object = [data.draw(st.integers(0, ranks - 1)) for _ in objects]
    parts = [
        ItemIndex.build(
            [c for c, owner in zip(chunks, of_chunk, strict=True) if owner == rank],
            [o for o, owner in zip(objects, of_object, strict=True) if owner == rank],
        )
        for rank in range(ranks)
    ]
    merged = ItemIndex.merge(data.draw(st.permutations(parts)))
    assert merged.encode() == ItemIndex.build(chunks, objects).encode()
    merged.check_tilings()


def test_small_payloads_that_everybody_reads_travel_with_the_index() -> None:
    one = ItemIndex.build([chunk("step", ())], [], {"step": b"\0\1\2\3"})
    two = ItemIndex.build([], [ObjectItem("lr", False, Location("g", 0, 3))], {"lr": b"PK\3"})
    merged = ItemIndex.merge([ItemIndex.from_record(part.to_record(), "rank") for part in (two, one)])
    read = ItemIndex.decode(merged.encode(), "index")
    assert read.repeated == merged.repeated == {"step": b"\0\1\2\3", "lr": b"PK\3"}


def chunk(key: str, shape: tuple[int, ...], dtype: str = "float32", file: str = "f") -> ChunkItem:
    return ChunkItem(key, dtype, shape, Box.whole(shape), Location(file, 0, 10, 2, 4, 7))


def test_chunks_that_disagree_about_their_tensor_are_refused_by_name() -> None:
    for other in (chunk("w", (3,)), chunk("w", (2,), "bfloat16")):
        with pytest.raises(StateError, match=r"'w'.*one rank says float32 \(2,\), another"):
            ItemIndex.build([chunk("w", (2,)), other])


def test_an_object_that_is_stored_twice_is_refused_with_both_files() -> None:
    twice = [ObjectItem("rng/shard_0_1", True, Location(file, 0, 1)) for file in ("__0_0", "__1_0")]
    with pytest.raises(StateError, match=r"'rng/shard_0_1' is stored twice.*__0_0.*__1_0"):
        ItemIndex.build([], twice)


def test_a_truncated_index_is_damaged_at_every_length() -> None:
    data = ItemIndex.build([chunk("w", (2, 3)), chunk("v", ())], [ObjectItem("o", False, Location("f", 1, 2))]).encode()
    last = data.rstrip(b"\0")
    for length in range(len(last)):
        with pytest.raises(RecordError, match="somewhere/index"):
            ItemIndex.decode(data[:length], "somewhere/index")


@pytest.mark.parametrize(
    "data", [b"", b"PK\x03\x04", MAGIC, MAGIC + b"\xff" * 40, MAGIC + struct.pack("<I", 2) + b"[]"]
)
def test_what_is_no_index_is_called_damaged(data: bytes) -> None:
    with pytest.raises(RecordError, match="somewhere/index"):
        ItemIndex.decode(data, "somewhere/index")


def test_an_index_of_another_version_is_a_clear_error() -> None:
    data = ItemIndex.build([]).encode()
    with pytest.raises(VersionError, match="use the ckptlib of its time"):
        ItemIndex.decode(data.replace(MAGIC, MAGIC[:7] + b"9"), "index")


def test_damaged_item_tables_of_a_record_are_refused() -> None:
    good = ItemIndex.build([chunk("w", (2,))]).to_record()
    for bad in ("", "not base64!", good[:-8], good[8:], {}, None):
        with pytest.raises(RecordError, match=r"rank_3\.json"):
            ItemIndex.from_record(bad, "rank_3.json")  # type: ignore[arg-type]


def test_columns_that_do_not_fit_each_other_are_damage() -> None:
    """A record is sealed by its digest, but a foreign hand may seal nonsense."""
    columns = ItemIndex.build([chunk("w", (2,)), chunk("v", (3,))], [ObjectItem("o", True, Location("f", 0, 1))])
    for name, value in (
        ("files", [0]), ("files", [0, 7]), ("chunk_ends", [0, 2, 1]), ("chunk_ends", [1, 1, 2]), ("dtypes", [0, -1]),
        ("ndims", [1, 2]), ("object_files", [3]), ("object_locations", []),
    ):  # fmt: skip
        bad = replace(columns._columns, **{name: np.array(value, np.int64)})
        with pytest.raises(RecordError, match="damaged item index \\(column"):
            ItemIndex.decode(encode(columns._names, bad, {}), "index")


def test_a_chunk_takes_less_than_256_bytes() -> None:
    shape = (4, 4, 4, 4)
    boxes = [Box((i, j, k, 0), (1, 1, 1, 4)) for i in range(4) for j in range(4) for k in range(4)]
    index = ItemIndex.build([ChunkItem("w", "float32", shape, box, Location("f", 2**40, 10, 5, 4, 7)) for box in boxes])
    assert index.nbytes <= 256 * len(boxes)
