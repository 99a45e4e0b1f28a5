"""The records of a save survive storage byte for byte, so that whoever decides writes the same bytes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib import records
from ckptlib.errors import IntegrityError, RecordError, StateError, VersionError
from ckptlib.figures import Figures, Times
from ckptlib.index import ItemIndex
from ckptlib.manifest import KINDS, Begin, Decision, FileEntry, Manifest, RankRecord
from ckptlib.topology import Topology

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
PATHS = NAMES.map(lambda name: f".ckpt/x{name.replace('/', '_')}")
NUMBERS = st.dictionaries(NAMES, st.integers(-(2**70), 2**70) | st.floats(), max_size=3)
DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)
SIZES = st.integers(0, 2**60)
TIMES = st.floats(0, 4e9)

FILES = st.builds(
    FileEntry,
    path=PATHS,
    size=SIZES,
    sha256=DIGESTS,
    role=st.sampled_from(["data", "common", "index", "metadata", "begin"]),
) | st.builds(
    FileEntry, path=PATHS, size=SIZES, sha256=DIGESTS, part_size=SIZES, part_sha256=st.lists(DIGESTS).map(tuple)
)
BEGINS = st.builds(
    Begin,
    save_id=NAMES,
    run=st.none() | NAMES,
    attempt=st.integers(0, 10**6),
    attempt_id=NAMES,
    iteration=st.integers(0, 10**9),
    world_size=st.integers(1, 16384),
    plan_digest=DIGESTS,
    kind=st.sampled_from(KINDS),
    topology=st.none() | st.builds(Topology, tp=st.integers(1, 8), dp=st.integers(1, 8)),
    contents=st.lists(NAMES, max_size=3).map(tuple),
    progress=NUMBERS,
    metrics=NUMBERS,
    parent=st.none() | NAMES,
    replaces=st.lists(NAMES, max_size=2).map(tuple),
    created_at=TIMES,
)
RANK_TIMES = st.builds(Times, stall=st.none() | TIMES, stage=st.none() | TIMES, write=TIMES)
RECORDS = st.builds(
    RankRecord,
    save_id=NAMES,
    rank=st.integers(0, 16383),
    world_size=st.integers(1, 16384),
    plan_digest=DIGESTS,
    files=st.lists(FILES, max_size=2).map(tuple),
    items=st.just(ItemIndex.build([]).to_record()),
    values_digest=DIGESTS,
    times=RANK_TIMES,
)
MANIFESTS = st.builds(
    Manifest,
    begin=BEGINS,
    files=st.lists(FILES, max_size=3).map(tuple),
    exports=st.dictionaries(NAMES, st.tuples(SIZES, DIGESTS), max_size=2),
    tensors=st.integers(0, 10**6),
    objects=st.integers(0, 10**6),
    figures=st.lists(st.tuples(SIZES, RANK_TIMES), max_size=3).map(Figures.of),
)
DECISIONS = st.builds(
    Decision,
    save_id=NAMES,
    outcome=st.sampled_from(["commit", "abort"]),
    decider=NAMES,
    decided_by=NAMES,
    decided_at=TIMES,
    manifest_sha256=st.none() | DIGESTS,
    reason=st.none() | NAMES,
)
BEGIN = Begin("000001-0-0", "run", 1, "a", 10, 2, "0" * 64, progress={"consumed_samples": 640, "lr": 1e-5})


@given(BEGINS | RECORDS | MANIFESTS | DECISIONS)
def test_a_record_that_was_read_is_written_again_as_the_same_bytes(record: Any) -> None:
    """W4, W5: an adopter reads and re-encodes; other bytes would be another manifest and other export digests."""
    data = record.encode()
    again = type(record).decode(data, "record.json")
    assert again.encode() == data


@given(BEGINS)
def test_a_begin_record_means_the_same_after_reading(begin: Begin) -> None:
    again = Begin.decode(begin.encode(), "begin.json")
    for field in dataclasses.fields(Begin):
        before, after = getattr(begin, field.name), getattr(again, field.name)
        if isinstance(before, dict):
            assert {k: repr(v) for k, v in after.items()} == {k: repr(v) for k, v in before.items()}
        else:
            assert after == before


def test_metrics_may_be_nan_and_infinite() -> None:
    """NaN in metrics."""
    begin = dataclasses.replace(BEGIN, metrics={"loss": math.nan, "best": math.inf, "worst": -math.inf})
    metrics = Begin.decode(begin.encode(), "begin.json").metrics
    assert math.isnan(metrics["loss"])
    assert (metrics["best"], metrics["worst"]) == (math.inf, -math.inf)


def test_counts_come_back_as_whole_numbers() -> None:
    samples = Begin.decode(BEGIN.encode(), "begin.json").progress["consumed_samples"]
    assert (samples, type(samples)) == (640, int)


@given(MANIFESTS, st.integers(0), st.integers(1, 255))
def test_one_changed_byte_of_a_manifest_is_detected(manifest: Manifest, position: int, mask: int) -> None:
    data = bytearray(manifest.encode())
    data[position % len(data)] ^= mask
    with pytest.raises(IntegrityError, match=r"checkpoint\.json"):
        Manifest.decode(bytes(data), "checkpoint.json")


@pytest.mark.parametrize("kind", ["begin", "rank", "manifest", "decision"])
def test_members_of_the_future_are_ignored_and_missing_ones_are_named(kind: str) -> None:
    record: Any = {
        "begin": BEGIN,
        "rank": RankRecord("s", 0, 1, "p", (FileEntry("f", 1, "0" * 64),), {}, "v"),
        "manifest": Manifest(BEGIN, (FileEntry("f", 1, "0" * 64),), {".metadata": (1, "0" * 64)}),
        "decision": Decision("s", "abort", "d", "settle", 0.0),
    }[kind]
    body = records.decode(kind, record.encode(), "r.json")
    kept = {name: value for name, value in body.items() if name not in ("record", "schema")}
    assert type(record).decode(records.encode(kind, {**kept, "of_the_future": [1]}), "r.json") == record
    for name in kept:
        lacking = {other: value for other, value in kept.items() if other != name}
        with pytest.raises(RecordError, match=rf"r\.json.*{name}"):
            type(record).decode(records.encode(kind, lacking), "r.json")


def test_a_manifest_of_a_newer_major_version_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown newer manifest version."""
    monkeypatch.setattr(records, "SCHEMA", "2.0")
    data = Manifest(BEGIN, (), {}).encode()
    with pytest.raises(VersionError, match=r"checkpoint\.json: written with schema 2\.0.*reads up to 1\.x"):
        Manifest.decode(data, "checkpoint.json")


@pytest.mark.parametrize("iteration", [-1, 1.5, "7", True, None])
def test_an_iteration_that_is_no_whole_number_from_zero_up_is_refused(iteration: Any) -> None:
    with pytest.raises(StateError, match="iteration"):
        dataclasses.replace(BEGIN, iteration=iteration)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(StateError, match=r"kind 'daily'.*persistent"):
        dataclasses.replace(BEGIN, kind="daily")  # type: ignore[arg-type]


def test_the_size_of_a_save_is_that_of_its_own_files() -> None:
    files = (FileEntry("a", 10, "0" * 64), FileEntry("b", 5, "1" * 64, "index"))
    manifest = Manifest(BEGIN, files, {".metadata": (99, "0" * 64)})
    assert manifest.size == 15
    assert manifest.files_of("index") == (files[1],)


def own_files_of(*ranks: int) -> tuple[FileEntry, ...]:
    return tuple(FileEntry(f"__{rank}_0.{BEGIN.save_id}.pt", 1, "0" * 64) for rank in ranks)


WHOLE = dataclasses.replace(BEGIN, semantic_type="LOCAL", format="torch", world_size=2, topology=None)
PLACES = dataclasses.replace(WHOLE, semantic_type="LEGACY", world_size=4, topology=Topology(tp=2, dp=2))


@pytest.mark.parametrize(
    ("begin", "ranks"),
    [(WHOLE, (0, 1)), (PLACES, (0, 1)), (dataclasses.replace(WHOLE, semantic_type="LEGACY"), (0,))],
    ids=["LOCAL", "LEGACY", "LEGACY without topology"],
)
def test_a_manifest_of_whole_state_dicts_names_the_file_of_each_rank_that_wrote(
    begin: Begin, ranks: tuple[int, ...]
) -> None:
    manifest = Manifest(begin, own_files_of(*ranks), {})
    assert Manifest.decode(manifest.encode(), "m") == manifest
    for wrong in (ranks[1:], (*ranks, 3), (*ranks[1:], 3)):
        with pytest.raises(RecordError, match=r"m: .*(is not named|are expected, and)"):
            Manifest.decode(dataclasses.replace(manifest, files=own_files_of(*wrong)).encode(), "m")


@pytest.mark.parametrize(
    ("semantic_type", "topology"),
    [
        ("LOCAL", None),
        ("LEGACY", Topology(tp=10**7)),
        ("LEGACY", Topology(etp=10**7, dp=10**7)),
        ("LEGACY", Topology()),
    ],
)
def test_a_manifest_that_speaks_of_ten_million_ranks_is_refused_at_once(
    semantic_type: Any, topology: Topology | None
) -> None:
    begin = dataclasses.replace(WHOLE, semantic_type=semantic_type, world_size=10**7, topology=topology)
    with pytest.raises(RecordError, match=r"m: .* of 10000000 ranks"):
        Manifest.decode(Manifest(begin, own_files_of(0), {}).encode(), "m")
    plain = dataclasses.replace(begin, semantic_type="LEGACY", topology=Topology(dp=10**7))  # one file is right then
    assert Manifest.decode(Manifest(plain, own_files_of(0), {}).encode(), "m").begin == plain


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", ".", 3])
def test_a_file_outside_the_iteration_directory_is_refused(path: Any) -> None:
    """A manifest must not lead a reader, or one day a deletion, anywhere else."""
    entry = {**FileEntry("a", 1, "0" * 64).to_json(), "path": path}
    with pytest.raises(RecordError, match="not below the iteration directory"):
        FileEntry.from_json(entry, "manifest.json")
