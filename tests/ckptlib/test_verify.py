"""Verification finds every change to a checkpoint of ours, and names the file (rules V1 to V4)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptlib
from ckptlib import commit, records
from ckptlib import storage as storages
from ckptlib.errors import NotACheckpointError, UncommittedError, UnsupportedError, VersionError
from ckptlib.manifest import Manifest
from ckptlib.sharding import ShardedObject, ShardedTensor
from ckptlib.storage import PosixStorage
from ckptlib.verification import Batches, VerifyReport, verify


def state() -> dict[str, Any]:
    """Tensors of equal and unequal size, objects, plain values."""
    torch.manual_seed(3)
    return {
        "model": {f"w{i}": torch.randn(8, 8) for i in range(3)},
        "half": torch.randn(5).bfloat16(),
        "rng": ShardedObject("rng_state", {"seed": 1}, (1,), (0,)),
        "sharded": ShardedTensor.from_rank_offsets("sharded", torch.ones(4, 2)),
        "steps": {"done": 3, "names": ["a", "b"]},
    }


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed save; copied, never changed."""
    path = tmp_path_factory.mktemp("pristine") / "iter_0000003"
    ckptlib.save(state(), str(path), iteration=3, run="r")
    return path


@pytest.fixture
def saved(pristine: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage: a copied iteration directory is a complete checkpoint."""
    return Path(shutil.copytree(pristine, tmp_path / pristine.name))


def files_of(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def bad(report: VerifyReport) -> dict[str, str]:
    return {name: verdict for name, verdict in report.files.items() if verdict not in ("ok", "extra")}


def save_id_of(path: Path) -> str:
    (save,) = [p.name for p in (path / ".ckpt").iterdir() if p.name != "tombstones"]
    return save


def test_an_undamaged_save_is_ok_at_every_level(pristine: Path) -> None:
    for level in ("listing", "structure", "data"):
        report = verify(str(pristine), level=level)
        assert report.ok, report.problems
        assert not report.corrupt
        assert not report.unreadable
        assert list(report.files) == files_of(pristine)
        assert set(report.files.values()) == {"ok"}
        assert {check.origin for check in report.checks.values()} == {"writer"}
        assert report.save_id == save_id_of(pristine)
    assert report.level == "data"
    for name, check in report.checks.items():
        assert check.sha256 == hashlib.sha256((pristine / name).read_bytes()).hexdigest()


@given(st.data())
def test_one_flipped_byte_anywhere_in_any_file_is_found(pristine: Path, data: st.DataObject) -> None:
    """The bar: 100 %, with the right verdict and file name."""
    name = data.draw(st.sampled_from(files_of(pristine)))
    content = bytearray((pristine / name).read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    with replaced(pristine, name, bytes(content)):
        report = verify(str(pristine))
    assert bad(report) == {name: "digest"}
    assert report.corrupt
    assert not report.ok
    assert name in report.problems[0]


@given(st.data())
def test_a_file_cut_off_anywhere_is_found(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(files_of(pristine)))
    content = (pristine / name).read_bytes()
    with replaced(pristine, name, content[: data.draw(st.integers(0, len(content) - 1))]):
        report = verify(str(pristine))
        assert bad(report) == {name: "size"}
        if name != f".ckpt/{save_id_of(pristine)}/decision.json":
            assert bad(verify(str(pristine), level="listing")) == {name: "size"}


@given(st.data())
def test_a_file_that_grew_is_found(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(files_of(pristine)))
    content = (pristine / name).read_bytes()
    with replaced(pristine, name, content + data.draw(st.binary(min_size=1, max_size=20))):
        report = verify(str(pristine))
    assert bad(report).keys() == {name}
    assert report.corrupt


def test_every_deleted_file_is_found(saved: Path) -> None:
    """Also the decision itself: its exports prove that there was one (W1)."""
    for name in files_of(saved):
        content = (saved / name).read_bytes()
        (saved / name).unlink()
        for level in ("listing", "data"):
            assert bad(verify(str(saved), level=level)) == {name: "missing"}
        (saved / name).write_bytes(content)
    assert verify(str(saved)).ok


def test_two_swapped_shards_of_equal_size_are_found(tmp_path: Path) -> None:
    from tests.support.ranks import run_ranks

    path = tmp_path / "iter_0000001"
    run_ranks(2, _save_two_shards, str(path))
    one, two = sorted(path.glob("__*.distcp"))
    assert one.stat().st_size == two.stat().st_size
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    report = verify(str(path))
    assert bad(report) == {one.name: "digest", two.name: "digest"}
    assert verify(str(path), level="listing").ok  # sizes alone cannot tell


def _save_two_shards(rank: int, url: str) -> None:
    tensor = ShardedTensor.from_rank_offsets("w", torch.full((16,), float(rank)), (0, rank, 2))
    ckptlib.save({"w": tensor}, url, iteration=1)


class replaced:  # noqa: N801
    """A file with other content, for a while."""

    def __init__(self, path: Path, name: str, content: bytes) -> None:
        self.file, self.content = path / name, content

    def __enter__(self) -> None:
        self.before = self.file.read_bytes()
        self.file.write_bytes(self.content)

    def __exit__(self, *args: object) -> None:
        self.file.write_bytes(self.before)


def test_structure_finds_an_index_that_contradicts_the_containers(saved: Path) -> None:
    """V3: at this level data is not hashed; what the items say of themselves is compared with the index."""
    data = next(saved.glob("__*.distcp"))
    content = bytearray(data.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 16] ^= 1
    data.write_bytes(content)
    report = verify(str(saved), level="structure")
    assert bad(report) == {data.name: "digest"}
    assert verify(str(saved), level="listing").ok


def test_a_manifest_and_its_export_vouch_for_each_other(saved: Path) -> None:
    """With a damaged manifest, every other file is still checked."""
    name = f".ckpt/{save_id_of(saved)}/manifest.json"
    (saved / name).write_bytes(b"{}")
    data = next(saved.glob("__*.distcp"))
    data.write_bytes(bytes(data.stat().st_size))
    assert bad(verify(str(saved))) == {name: "size", data.name: "digest"}


def test_without_any_good_manifest_the_report_says_that_nothing_is_known(saved: Path) -> None:
    name = f".ckpt/{save_id_of(saved)}/manifest.json"
    for copy in (name, "checkpoint.json"):
        (saved / copy).write_bytes(b"{}")
    report = verify(str(saved))
    assert report.corrupt
    assert report.files[name] != "ok"
    assert any("not known" in problem for problem in report.problems)


def test_extra_files_are_listed_and_are_not_corrupt(saved: Path) -> None:
    """V2: tokenizers and sidecars are legitimate."""
    (saved / "tokenizer").mkdir()
    (saved / "tokenizer" / "vocab.json").write_text("{}")
    (saved / "__9_0.distcp").write_bytes(b"left over")
    report = verify(str(saved))
    assert report.ok
    assert {name for name, verdict in report.files.items() if verdict == "extra"} == {
        "tokenizer/vocab.json",
        "__9_0.distcp",
    }


# ------------------------------------------------------------------ the catalog's copy (V1)


def copies(path: Path) -> dict[str, tuple[int, str]]:
    manifest = Manifest.decode((path / "checkpoint.json").read_bytes(), "checkpoint.json")
    return {entry.path: (entry.size, entry.sha256) for entry in manifest.files}


def test_the_catalogs_copy_is_compared_first(saved: Path) -> None:
    """A save whose every record was rewritten, digests included, fits itself and not what the catalog recorded."""
    recorded, before = copies(saved), save_id_of(saved)
    shutil.rmtree(saved)
    other = state()
    other["half"] = other["half"] + 1
    ckptlib.save(other, str(saved), iteration=3, run="r")
    renamed = {name.replace(before, save_id_of(saved)): entry for name, entry in recorded.items()}
    assert verify(str(saved)).ok
    report = verify(str(saved), expected=renamed)
    assert report.corrupt
    assert any("catalog recorded" in problem for problem in report.problems)


def test_an_intact_save_fits_the_catalogs_copy(saved: Path) -> None:
    report = verify(str(saved), save_id=save_id_of(saved), expected=copies(saved))
    assert report.ok, report.problems


def test_with_the_catalogs_copy_a_deleted_decision_is_a_missing_file(saved: Path) -> None:
    expected, save_id = copies(saved), save_id_of(saved)
    decision = f".ckpt/{save_id}/decision.json"
    (saved / decision).unlink()
    (saved / "checkpoint.json").unlink()
    report = verify(str(saved), save_id=save_id, expected=expected)
    assert bad(report)[decision] == "missing"
    with pytest.raises(UncommittedError):
        verify(str(saved), save_id=save_id)


def test_a_directory_that_is_gone_is_missing_only_where_the_root_is_there(saved: Path) -> None:
    """D4: a root without its identity may not be mounted; nothing is said to be missing then."""
    expected, save_id = copies(saved), save_id_of(saved)
    shutil.rmtree(saved)
    report = verify(str(saved), save_id=save_id, expected=expected)
    assert set(report.files.values()) == {"unreadable"}
    assert report.unreadable
    assert not report.corrupt
    assert not report.ok
    (saved.parent / ".ckpt").mkdir()
    identity = records.encode("root", {"root_id": "0", "run": "r"})
    (saved.parent / ".ckpt" / "root.json").write_bytes(identity)
    report = verify(str(saved), save_id=save_id, expected=expected)
    assert report.corrupt
    assert set(report.files.values()) == {"missing"}


# ------------------------------------------------------------------ unreadable is not corrupt (V2)


class FailingStorage(PosixStorage):
    """A disk on which some reads fail."""

    def __init__(self, fails: Callable[[str], OSError | None]) -> None:
        super().__init__()
        self._fails = fails

    def _check(self, path: str) -> None:
        error = self._fails(path)
        if error is not None:
            raise error

    def get(self, path: str) -> bytes:
        self._check(path)
        return super().get(path)

    def read_into(self, path: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._check(path)
        super().read_into(path, ranges)

    def list(self, path: str) -> list[storages.Entry]:
        self._check(path)
        return super().list(path)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[str, OSError]:
    """Name of a file or directory -> the error that reading it gives."""
    errors: dict[str, OSError] = {}
    real = storages.resolve

    def resolve(url: str, options: Mapping[str, Any] | None = None) -> tuple[storages.Storage, str]:
        _, path = real(url, options)
        return FailingStorage(lambda name: errors.get(storages.basename(name))), path

    monkeypatch.setattr(storages, "resolve", resolve)
    return errors


ERRORS = [
    PermissionError(errno.EACCES, "Permission denied"),
    TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: errno.errorcode[error.errno])
def test_a_file_that_cannot_be_read_is_unreadable(saved: Path, failing: dict[str, OSError], error: OSError) -> None:
    data = next(saved.glob("__*.distcp")).name
    failing[data] = error
    report = verify(str(saved))
    assert bad(report) == {data: "unreadable"}
    assert report.unreadable
    assert not report.corrupt
    assert not report.ok
    assert error.strerror in report.problems[0]


@pytest.mark.parametrize("name", ["index", "manifest.json", "decision.json", ".metadata"])
def test_a_record_that_cannot_be_read_is_unreadable(saved: Path, failing: dict[str, OSError], name: str) -> None:
    failing[name] = PermissionError(errno.EACCES, "Permission denied")
    report = verify(str(saved))
    assert report.unreadable
    assert not report.corrupt


def test_a_directory_that_cannot_be_listed_is_unreadable(saved: Path, failing: dict[str, OSError]) -> None:
    failing[saved.name] = PermissionError(errno.EACCES, "Permission denied")
    failing[".ckpt"] = failing[saved.name]
    report = verify(str(saved))
    assert report.files == {".": "unreadable"}
    assert not report.corrupt


def test_a_shard_without_read_permission_is_unreadable(pristine: Path) -> None:
    """The permissions of a real filesystem; root gives up its rights for it, since it may read everything."""
    with tempfile.TemporaryDirectory() as directory:  # not below pytest's own, which others may not enter
        os.chmod(directory, 0o755)
        path = Path(shutil.copytree(pristine, Path(directory, pristine.name)))
        data = next(path.glob("__*.distcp"))
        data.chmod(0)
        me = os.geteuid()
        if me == 0:
            os.seteuid(65534)
        try:
            report = verify(str(path))
        finally:
            os.seteuid(me)
    assert bad(report) == {data.name: "unreadable"}
    assert "Permission denied" in report.problems[0]


def test_corruption_beside_an_unreadable_file_is_still_corruption(saved: Path, failing: dict[str, OSError]) -> None:
    failing[next(saved.glob("__*.distcp")).name] = PermissionError(errno.EACCES, "Permission denied")
    (saved / "common.pt").write_bytes(b"")
    report = verify(str(saved))
    assert report.unreadable
    assert report.corrupt


# ------------------------------------------------------------------ what is not a checkpoint


def test_a_directory_that_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path, tmp_path / "absent"):
        for verb in (ckptlib.inspect, verify):
            with pytest.raises(NotACheckpointError, match="not a checkpoint"):
                verb(str(path))


def test_an_undecided_save_is_not_committed(saved: Path) -> None:
    """R1. Its exports do not exist yet."""
    for name in ("checkpoint.json", "common.pt", "integrity.json", ".metadata", "metadata.json"):
        (saved / name).unlink()
    (saved / ".ckpt" / save_id_of(saved) / "decision.json").unlink()
    with pytest.raises(UncommittedError, match=save_id_of(saved)):
        verify(str(saved))
    info = ckptlib.inspect(str(saved))
    assert not info.committed
    assert (info.iteration, info.run, dict(info.tensors)) == (3, "r", {})
    assert "not been committed" in info.notes[0]


def test_a_deleted_save_is_not_a_checkpoint(saved: Path) -> None:
    """R1: a tombstone outweighs a commit."""
    tombstones = saved / ".ckpt" / "tombstones"
    tombstones.mkdir()
    (tombstones / save_id_of(saved)).write_bytes(b"")
    with pytest.raises(NotACheckpointError, match="deleted"):
        verify(str(saved))
    with pytest.raises(NotACheckpointError, match="deleted"):
        verify(str(saved), save_id=save_id_of(saved))
    with pytest.raises(NotACheckpointError, match="deleted"):
        ckptlib.inspect(str(saved))


def test_an_unknown_save_id_is_an_error(saved: Path) -> None:
    for verb in (ckptlib.inspect, verify):
        with pytest.raises(NotACheckpointError, match="000009-0"):
            verb(str(saved), save_id="000009-000000000000-00000000")


def test_a_record_of_a_newer_version_is_not_corrupt(saved: Path) -> None:
    """A clear error; while a flipped bit that only looks like one is damage."""
    decision = saved / ".ckpt" / save_id_of(saved) / "decision.json"
    value = json.loads(decision.read_bytes())
    value["schema"] = "2.0"
    decision.write_bytes(records.canonical(value) + b"\n")
    assert bad(verify(str(saved))) == {str(decision.relative_to(saved)): "digest"}
    value.pop("digest")
    value["digest"] = hashlib.sha256(records.canonical(value)).hexdigest()
    decision.write_bytes(records.canonical(value) + b"\n")
    with pytest.raises(VersionError, match=r"2\.0"):
        verify(str(saved))


def test_levels_are_checked(saved: Path) -> None:
    with pytest.raises(UnsupportedError, match="listing, store, structure, data, auto"):
        verify(str(saved), level="thorough")


# ------------------------------------------------------------------ several saves, progress, memory


def test_a_replaced_save_is_verified_by_its_own_files(saved: Path) -> None:
    """W9: the exports belong to the newest save; files of an older one are not its business."""
    first = save_id_of(saved)
    ckptlib.save(state(), str(saved), iteration=3, run="r", on_exists="replace")
    report = verify(str(saved))
    assert report.ok, report.problems
    assert report.save_id != first
    with pytest.raises(NotACheckpointError, match="replaced"):
        verify(str(saved), save_id=first)


def test_progress_counts_every_byte_once(pristine: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(str(pristine), threads=3, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == report.bytes_read
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_error_in_progress_stops_the_verification(pristine: Path) -> None:
    """A lost lease must end the work, not only its report."""

    def lost(done: int, total: int) -> None:
        raise UnsupportedError("lease lost")

    with pytest.raises(UnsupportedError, match="lease lost"):
        verify(str(pristine), progress=lost)


def test_a_batch_that_failed_can_be_run_again(pristine: Path) -> None:
    """What stopped the first try must not look like damage in the second."""
    calls: list[int] = []

    def twice(label: str, work: Callable[[], None]) -> None:
        try:
            work()
        except UnsupportedError:
            work()

    def once(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 1:
            raise UnsupportedError("the scheduler was restarted")

    report = verify(str(pristine), progress=once, batches=Batches(files=3, run=twice))
    assert report.ok, report.problems


def test_files_larger_than_a_block_are_hashed_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "iter_0000001"
    ckptlib.save({"w": torch.arange(10_000)}, str(path), iteration=1)
    monkeypatch.setattr("ckptlib.verify_files.BLOCK_BYTES", 1000)
    assert verify(str(path)).ok
    data = next(path.glob("__*.distcp"))
    content = bytearray(data.read_bytes())
    content[-3] ^= 1
    data.write_bytes(content)
    assert bad(verify(str(path))) == {data.name: "digest"}


def test_verification_works_on_any_storage() -> None:
    url = "memory://verify-any-storage/iter_0000001"
    ckptlib.save(state(), url, iteration=1)
    assert verify(url).ok
    storage, path = storages.resolve(url)
    storage.put(storages.join(path, "common.pt"), b"x")
    assert bad(verify(url)) == {"common.pt": "size"}
    assert commit.is_committed(storage, path)
