"""Verification of what others wrote: their digests, or else the CRC-32s that nobody else compares (V1)."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptlib
from ckptlib import storage as storages
from ckptlib.errors import NotACheckpointError, UncommittedError
from ckptlib.formats import is_foreign_complete, sniff
from ckptlib.verification import VerifyReport, verify
from tests.support.foreign import copy_of

WITH_DIGESTS = "td0192_tp1pp1dp2_fr"
WITH_COMMON = "td0140_tp1pp1_w"
SHARDED = "td0161_tp2pp2_w"
PLAIN = "dcp0192_dp2_fsdp2_w"


def bad(report: VerifyReport) -> dict[str, str]:
    return {name: verdict for name, verdict in report.files.items() if verdict not in ("ok", "extra")}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies of fixtures; each test that changes one puts it back."""
    return {name: copy_of(name, tmp_path_factory.mktemp(name)) for name in (WITH_DIGESTS, WITH_COMMON, SHARDED, PLAIN)}


class changed:  # noqa: N801
    """A file with other content (or none), for a while."""

    def __init__(self, file: Path, content: bytes | None) -> None:
        self.file, self.content = file, content

    def __enter__(self) -> None:
        self.before = self.file.read_bytes()
        if self.content is None:
            self.file.unlink()
        else:
            self.file.write_bytes(self.content)

    def __exit__(self, *args: object) -> None:
        self.file.write_bytes(self.before)


def flipped(file: Path, position: int, mask: int) -> bytes:
    content = bytearray(file.read_bytes())
    content[position % len(content)] ^= mask
    return bytes(content)


@settings(max_examples=30)
@given(st.sampled_from([".metadata", "__0_0.distcp", "metadata.json"]), st.integers(0, 2**40), st.integers(1, 255))
def test_one_flipped_byte_is_found_by_the_digests_of_the_writer(
    pristine: dict[str, Path], name: str, position: int, mask: int
) -> None:
    path = pristine[WITH_DIGESTS]
    with changed(path / name, flipped(path / name, position, mask)):
        report = verify(str(path))
    assert bad(report) == {name: "digest"}
    assert report.checks[name].origin == "imported"


@settings(max_examples=30)
@given(st.integers(0, 2**40), st.integers(1, 255))
def test_a_flipped_byte_of_the_digests_themselves_is_found(pristine: dict[str, Path], position: int, mask: int) -> None:
    path = pristine[WITH_DIGESTS]
    with changed(path / "integrity.json", flipped(path / "integrity.json", position, mask)):
        report = verify(str(path))
    assert report.corrupt
    # Which of two is damaged cannot be known where a digit became another digit.
    if bad(report) != {"integrity.json": "digest"}:
        assert len(bad(report)) <= 2


@given(st.sampled_from(["__0_0.distcp", "__0_1.distcp", "common.pt"]), st.integers(0, 2**40), st.integers(1, 255))
def test_without_digests_the_crc_of_every_record_is_compared(
    pristine: dict[str, Path], name: str, position: int, mask: int
) -> None:
    """torch and Megatron load such a checkpoint without a word, with wrong values."""
    path = pristine[WITH_COMMON]
    content = (path / name).read_bytes()
    with changed(path / name, flipped(path / name, position, mask)):
        report = verify(str(path))
    end = content[position % len(content) - 16 :][:20]
    if not report.corrupt:  # words of a zip's end record that say which program wrote it
        assert b"PK\x06\x06" in end
        return
    assert bad(report) == {name: "digest"}
    assert report.checks[name].origin == "first-read"


def test_a_flipped_payload_names_the_tensor(pristine: dict[str, Path]) -> None:
    path = pristine[WITH_COMMON]
    storage, at = storages.resolve(str(path))
    from ckptlib.formats import torch_dist

    item = next(iter(torch_dist.read_index(storage, at).chunk_items()))
    location = torch_dist.locate_payload(storage, at, item)
    with changed(path / location.file, flipped(path / location.file, location.payload_offset + 1, 4)):
        report = verify(str(path))
        assert verify(str(path), level="structure").ok  # payloads are not read at this level
    assert item.key in report.problems[0]
    assert "CRC-32" in report.problems[0]


@pytest.mark.parametrize(
    ("fixture", "name"),
    [
        (WITH_DIGESTS, ".metadata"), (WITH_DIGESTS, "__0_0.distcp"), (WITH_DIGESTS, "metadata.json"),
        (WITH_DIGESTS, "integrity.json"), (WITH_COMMON, ".metadata"), (WITH_COMMON, "__0_1.distcp"),
        (WITH_COMMON, "common.pt"), (WITH_COMMON, "metadata.json"), (PLAIN, ".metadata"), (PLAIN, "__1_0.distcp"),
    ],
)  # fmt: skip
def test_a_file_cut_off_is_found(pristine: dict[str, Path], fixture: str, name: str) -> None:
    file = pristine[fixture] / name
    content = file.read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 30, len(content) - 1):
        with changed(file, content[: max(length, 0)]):
            assert bad(verify(str(pristine[fixture]))) == {name: "size"}, length


@pytest.mark.parametrize(
    ("fixture", "name"),
    [
        (WITH_DIGESTS, ".metadata"),
        (WITH_DIGESTS, "__0_0.distcp"),
        (WITH_DIGESTS, "metadata.json"),
        (WITH_COMMON, ".metadata"),
        (WITH_COMMON, "__0_1.distcp"),
        (WITH_COMMON, "common.pt"),
        (PLAIN, "__1_0.distcp"),
    ],
)
def test_a_deleted_file_is_found(pristine: dict[str, Path], fixture: str, name: str) -> None:
    with changed(pristine[fixture] / name, None):
        for level in ("listing", "data"):
            assert bad(verify(str(pristine[fixture]), level=level)) == {name: "missing"}


def test_two_swapped_shards_of_equal_size_are_found(tmp_path: Path) -> None:
    path = copy_of(SHARDED, tmp_path)
    digests = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.iterdir())}
    (path / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": digests}, indent=2))
    assert verify(str(path)).ok
    one, two = path / "__1_0.distcp", path / "__3_0.distcp"
    first, second = one.read_bytes(), two.read_bytes()
    assert len(first) == len(second)
    with changed(one, second), changed(two, first):
        assert bad(verify(str(path))) == {one.name: "digest", two.name: "digest"}


def test_the_catalogs_copy_finds_what_no_crc_can(pristine: dict[str, Path]) -> None:
    """A first verification gives digests; with them, equal-size shards that were swapped are found."""
    path = pristine[SHARDED]
    report = verify(str(path))
    recorded = {name: (check.size or 0, check.sha256 or "") for name, check in report.checks.items()}
    assert verify(str(path), expected=recorded).ok
    one, two = path / "__1_0.distcp", path / "__3_0.distcp"
    first, second = one.read_bytes(), two.read_bytes()
    with changed(one, second), changed(two, first):
        assert bad(verify(str(path), expected=recorded)) == {one.name: "digest", two.name: "digest"}
    with changed(path / "metadata.json", flipped(path / "metadata.json", 40, 1)):
        assert bad(verify(str(path), expected=recorded)) == {"metadata.json": "digest"}


# ------------------------------------------------------------------ complete or not (R1)


def test_metadata_with_sharded_objects_and_no_marker_is_an_unfinished_torch_dist(pristine: dict[str, Path]) -> None:
    """Megatron itself takes it for a torch_dcp, and fails on its keys."""
    path = pristine[WITH_COMMON]
    storage, at = storages.resolve(str(path))
    with changed(path / "metadata.json", None):
        assert sniff(storage, at) == "torch_dist"
        assert is_foreign_complete(storage, at, "torch_dist") == (
            False, f"{path}: metadata.json is missing: the save was not finished"
        )  # fmt: skip
        with pytest.raises(UncommittedError, match=r"metadata\.json is missing"):
            verify(str(path))
        with pytest.raises(UncommittedError, match=r"metadata\.json is missing"):
            ckptlib.load({}, str(path))
        info = ckptlib.inspect(str(path))
        assert not info.committed
        assert "metadata.json is missing" in info.notes[0]


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b'{"sharded_backend": "zarr"}'])
def test_a_marker_that_says_something_else_is_no_marker(pristine: dict[str, Path], content: bytes) -> None:
    path = pristine[WITH_COMMON]
    storage, at = storages.resolve(str(path))
    with changed(path / "metadata.json", content):
        complete, reason = is_foreign_complete(storage, at, "torch_dist")
        assert not complete
        assert "metadata.json" in reason
        assert "metadata.json" in bad(verify(str(path)))


@pytest.mark.parametrize("content", [None, b"short"], ids=["deleted", "cut off"])
def test_a_shard_that_is_not_whole_makes_it_incomplete(pristine: dict[str, Path], content: bytes | None) -> None:
    path = pristine[SHARDED]
    storage, at = storages.resolve(str(path))
    with changed(path / "__2_1.distcp", content):
        complete, reason = is_foreign_complete(storage, at, "torch_dist")
        assert not complete
        assert "__2_1.distcp" in reason
        with pytest.raises(UncommittedError, match="__2_1"):
            ckptlib.read(str(path))


def test_a_checkpoint_without_common_state_is_incomplete(pristine: dict[str, Path]) -> None:
    path = pristine[WITH_COMMON]
    storage, at = storages.resolve(str(path))
    with changed(path / "common.pt", None):
        complete, reason = is_foreign_complete(storage, at, "torch_dist")
        assert not complete
        assert "common" in reason


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_torch_checkpoints_are_sniffed_by_their_metadata(tmp_path: Path) -> None:
    storage, at = storages.resolve(str(tmp_path / "plain"))
    assert sniff(storage, at) is None
    dcp.save({"w": torch.ones(2), "step": 3, "a/shard_of_it": 4}, checkpoint_id=at, no_dist=True)
    assert sniff(storage, at) == "torch_dcp"  # a name with /shard_ in it is no cell of a grid
    assert is_foreign_complete(storage, at, "torch_dcp") == (True, "")
    info = ckptlib.inspect(at)
    assert (info.format, info.semantic_type, info.iteration) == ("torch_dcp", "TORCH_DCP", None)
    assert verify(at).ok
    (tmp_path / "legacy" / "mp_rank_00").mkdir(parents=True)
    assert sniff(storage, str(tmp_path / "legacy")) == "torch"
    dcp.save({"optimizer": {"param_to_group_meta": {"w": 1}}}, checkpoint_id=str(tmp_path / "fsdp"), no_dist=True)
    assert sniff(storage, str(tmp_path / "fsdp")) == "fsdp_dtensor"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_the_catalog_recorded_and_is_gone_altogether_is_missing(tmp_path: Path) -> None:
    at = str(tmp_path / "plain")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=at, no_dist=True)
    recorded = {name: (check.size or 0, check.sha256 or "") for name, check in verify(at).checks.items()}
    Path(at, ".metadata").unlink()
    with pytest.raises(NotACheckpointError):
        verify(at)
    assert bad(verify(at, expected=recorded)) == {".metadata": "missing"}


def test_a_manifest_of_digests_with_nonsense_is_damaged(pristine: dict[str, Path]) -> None:
    path = pristine[WITH_DIGESTS]
    digests = json.loads((path / "integrity.json").read_bytes())
    good = hashlib.sha256((path / "metadata.json").read_bytes()).hexdigest()
    assert digests["files"]["metadata.json"] == good
    for files in ({"metadata.json": "xyz"}, {"../outside": good}, {"metadata.json": 3}, ["metadata.json"], 7):
        content = json.dumps({"algorithm": "sha256", "files": files}, indent=2).encode()
        with changed(path / "integrity.json", content):
            report = verify(str(path))
        assert report.files["integrity.json"] == "digest"
        assert set(bad(report)) == {"integrity.json"}


def test_items_that_overlap_are_blamed_on_the_metadata(pristine: dict[str, Path]) -> None:
    path = pristine[WITH_COMMON]

    def overlap(data: bytes) -> bytes:
        from ckptlib.safe_pickle import load_metadata

        value = load_metadata(data, "x")
        infos = [info for info in value.storage_data.values() if info.relative_path == "__0_0.distcp"]
        first, second = sorted(infos, key=lambda info: info.offset)[:2]
        second.offset = first.offset
        out = io.BytesIO()
        pickle.dump(value, out)
        return out.getvalue()

    with changed(path / ".metadata", overlap((path / ".metadata").read_bytes())):
        report = verify(str(path))
    assert bad(report)[".metadata"] == "digest"
    assert "both said to be" in report.problems[0]
