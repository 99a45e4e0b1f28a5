"""What a store says of files, against what was recorded of them (V3): verification without reading payload."""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import fsspec
import pytest
import torch

import ckptlib
from ckptlib import verify, verify_store
from ckptlib.storage import FsspecStorage, Range, Vouched
from ckptlib.storage.s3_parts import composite
from ckptlib.verify_files import Expected, FileChecker
from ckptlib.verify_store import judge

PARTS = (b"a" * 10, b"b" * 10, b"c" * 5)
WHOLE = b"".join(PARTS)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


DIGESTS = tuple(map(sha256, PARTS))


# ---------------------------------------------------------------- the decision


@pytest.mark.parametrize(
    ("vouched", "outcome"),
    [
        (Vouched(25, sha256=sha256(WHOLE)), "ok"),
        (Vouched(25, sha256=sha256(b"other")), "digest"),
        (Vouched(25, composite=composite(DIGESTS), parts=3), "ok"),
        (Vouched(25, composite=composite(DIGESTS)), "ok"),
        (Vouched(25, composite=composite(DIGESTS[::-1]), parts=3), "digest"),
        (Vouched(25, composite=composite(DIGESTS), parts=2), "unknown"),
        (Vouched(25, composite=composite((sha256(WHOLE),)), parts=1), "unknown"),
        (Vouched(25), "unknown"),
    ],
)
def test_a_stores_word_is_compared_with_the_whole_or_with_the_parts(vouched: Vouched, outcome: str) -> None:
    """V3: never from the size alone; other parts than were written may hold the same bytes."""
    assert judge(vouched, sha256(WHOLE), 10, DIGESTS).outcome == outcome


def test_the_digest_over_parts_is_the_one_that_s3_shows() -> None:
    """As AWS documents it: the SHA-256 of the digests' own bytes, in base64."""
    shown = base64.b64encode(hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in PARTS)).digest())
    assert base64.b64encode(bytes.fromhex(composite(DIGESTS))) == shown


@pytest.mark.parametrize(
    ("size", "part_size", "count"), [(25, 10, 4), (25, 0, 3), (25, -10, 3), (25, None, 3), (30, 10, 4), (1, 10, 2)]
)
def test_part_digests_that_do_not_fit_the_size_prove_nothing(size: int, part_size: int | None, count: int) -> None:
    digests = (DIGESTS * 2)[:count]
    judged = judge(Vouched(size, composite=composite(digests), parts=count), sha256(WHOLE), part_size, digests)
    assert (judged.outcome, judged.detail) == ("unknown", verify_store.BAD_PARTS)


@pytest.mark.parametrize(
    ("size", "part_size", "count"), [(25, 10, 3), (30, 10, 3), (1, 10, 1), (10, 10, 1), (70, 10, 4)]
)
def test_parts_of_that_size_or_more_and_a_shorter_last_one_fit(size: int, part_size: int, count: int) -> None:
    assert verify_store.fits(size, part_size, DIGESTS[:count])


def test_without_recorded_digests_nothing_can_be_compared() -> None:
    assert judge(Vouched(25, sha256=sha256(WHOLE)), None).detail == verify_store.NO_DIGEST_RECORDED
    assert judge(Vouched(25, composite=composite(DIGESTS), parts=3), sha256(WHOLE)).detail == (
        verify_store.NO_PARTS_RECORDED
    )


# ---------------------------------------------------------------- files of a store that vouches


class Vouching(FsspecStorage):
    """A store in memory that keeps the digest of each file, or that of its parts where it has some; counts reads."""

    def __init__(self, root: str) -> None:
        super().__init__(fsspec.filesystem("memory"))
        self.root = root
        self.parts: dict[str, tuple[bytes, ...]] = {}
        self.silent: set[str] = set()
        self.bytes_read = 0

    def vouched(self, path: str) -> Vouched | None:
        name = path.removeprefix(f"{self.root}/")
        size = self.stat(path)
        if size is None or name in self.silent:
            return None
        if name in self.parts:
            digests = [sha256(part) for part in self.parts[name]]
            return Vouched(size, composite=composite(digests), parts=len(digests))
        return Vouched(size, sha256(bytes(self.fs.cat_file(path))))

    def first_part(self, path: str) -> int | None:
        return len(self.parts[path.removeprefix(f"{self.root}/")][0])

    def read_into(self, path: str, ranges: Sequence[Range]) -> None:
        self.bytes_read += sum(len(buffer) for _, buffer in ranges)
        super().read_into(path, ranges)

    def add(self, name: str, *parts: bytes) -> None:
        self.put(f"{self.root}/{name}", b"".join(parts))
        if len(parts) > 1:
            self.parts[name] = parts


@pytest.fixture
def store() -> Iterator[Vouching]:
    root = f"/vouching-{uuid.uuid4().hex}"
    store = Vouching(root)
    store.add("in-parts", *PARTS)
    store.add("whole", WHOLE)
    store.add("index", b"small")
    yield store
    store.fs.rm(root, recursive=True)


WANT = {
    "in-parts": Expected(25, sha256(WHOLE), "writer", part_size=10, part_sha256=DIGESTS),
    "whole": Expected(25, sha256(WHOLE), "writer"),
    "index": Expected(5, sha256(b"small"), "writer", control=True),
}


def test_nothing_is_read_of_what_the_store_vouches_for(store: Vouching) -> None:
    for level in ("store", "auto"):
        checker = FileChecker(store, store.root, level=level)  # type: ignore[arg-type]
        checks = checker.check(WANT)
        assert set(checks) == set(WANT)
        assert {(check.verdict, check.by_store, check.sha256) for check in checks.values()} == {("ok", True, None)}
        assert (checker.level, checker.bytes_read, store.bytes_read) == ("store", 0, 0)


def test_files_that_changed_are_missing_or_wrong_without_being_read(store: Vouching) -> None:
    """A damaged, missing, replaced or cut object is found at level store."""
    store.add("in-parts", b"a" * 10, b"b" * 10, b"X" * 5)
    store.add("whole", WHOLE[:-1])
    store.remove([f"{store.root}/index"])
    checks = FileChecker(store, store.root, level="store").check(WANT)
    assert {name: check.verdict for name, check in checks.items()} == {
        "in-parts": "digest",
        "whole": "size",
        "index": "missing",
    }
    assert store.bytes_read == 0


def test_a_payload_without_a_word_is_unverifiable_and_a_control_file_is_read(store: Vouching) -> None:
    """V3: never verified from its size; the small files of the protocol cost no more than asking."""
    store.silent = {"in-parts", "index"}
    checker = FileChecker(store, store.root, level="store")
    checks = checker.check(WANT)
    assert {name: check.verdict for name, check in checks.items()} == {
        "in-parts": "unverifiable",
        "whole": "ok",
        "index": "ok",
    }
    assert checks["in-parts"].detail == verify_store.no_word("memory")
    assert (checker.bytes_read, store.bytes_read) == (5, 5)


@pytest.mark.parametrize(
    ("first", "size", "part_size", "same"),
    [(10, 25, 10, True), (11, 25, 10, False), (7, 7, 10, True), (None, 25, 10, False), (25, 25, None, False)],
)
def test_parts_are_the_recorded_ones_as_far_as_the_first_tells(
    first: int | None, size: int, part_size: int | None, same: bool
) -> None:
    assert verify_store.same_parts(first, size, part_size) is same


def test_auto_reads_what_the_store_has_no_word_on_and_doubts(store: Vouching) -> None:
    """In other parts of the same number the same bytes have another digest: only reading them tells."""
    store.silent = {"index"}
    store.add("in-parts", b"a" * 10 + b"b", b"b" * 9 + b"c", b"c" * 4)
    check = FileChecker(store, store.root, level="store").check(WANT)["in-parts"]
    assert (check.verdict, check.detail) == ("unverifiable", verify_store.OTHER_PARTS)
    checker = FileChecker(store, store.root, level="auto")
    checks = checker.check(WANT)
    assert {name: (check.verdict, check.by_store) for name, check in checks.items()} == {
        "in-parts": ("ok", False),
        "whole": ("ok", True),
        "index": ("ok", False),
    }
    assert (checker.level, checker.bytes_read) == ("store", 30), "the weakest of all files counts"


def test_auto_on_a_store_that_is_silent_comes_to_data(store: Vouching) -> None:
    store.silent = set(WANT)
    checker = FileChecker(store, store.root, level="auto")
    assert {check.verdict for check in checker.check(WANT).values()} == {"ok"}
    assert (checker.level, checker.bytes_read) == ("data", 55)


# ---------------------------------------------------------------- storages without digests of their own


@pytest.fixture(params=["posix", "memory"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    root = str(tmp_path) if request.param == "posix" else f"memory:///verify-store-{uuid.uuid4().hex}"
    url = f"{root}/iter_0000001"
    ckptlib.save({"w": torch.arange(100.0)}, url, iteration=1)
    yield url
    if request.param == "memory":
        fsspec.filesystem("memory").rm(root.removeprefix("memory://"), recursive=True)


def test_a_storage_without_digests_leaves_a_checkpoint_unverifiable(saved: str) -> None:
    """V3: with how many files, and why."""
    report = verify(saved, level="store")
    assert (report.ok, report.corrupt, report.unreadable, report.unverifiable) == (False, False, False, True)
    (data,) = (name for name in report.checks if name.endswith(".distcp"))
    assert report.files[data] == "unverifiable"
    assert set(report.files.values()) == {"ok", "unverifiable"}
    (problem,) = report.problems
    assert problem.startswith(f"{data}: unverifiable: ")
    assert "keeps no digests of its own" in problem
    assert report.level == "store"


def test_auto_reads_everything_on_such_a_storage(saved: str) -> None:
    report = verify(saved, level="auto")
    assert report.ok
    assert report.level == "data"
    assert report.files == verify(saved, level="data").files


def test_damage_is_found_there_by_auto_as_by_data(tmp_path: Path) -> None:
    url = tmp_path / "iter_0000001"
    ckptlib.save({"w": torch.arange(100.0)}, str(url), iteration=1)
    (data,) = url.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert verify(str(url), level="auto").files[data.name] == "digest"


def test_many_files_that_are_unverifiable_for_one_reason_are_one_sentence(tmp_path: Path) -> None:
    state = {f"w{i}": torch.zeros(4) for i in range(3)}
    ckptlib.save(state, str(tmp_path / "iter_0000001"), iteration=1, semantic_type="LEGACY")
    report = verify(str(tmp_path / "iter_0000001"), level="store")
    count = list(report.files.values()).count("unverifiable")
    assert count == 2
    assert [problem.startswith("2 files (") for problem in report.problems] == [True]
