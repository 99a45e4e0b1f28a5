"""Verification of checkpoints on a real S3 server, by what the server says and by what comes over the wire (V3)."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib import resume, storage, verify
from ckptlib.verify_store import NO_DIGEST_KEPT, OTHER_PARTS, no_word
from tests.support.fault_proxy import FaultProxy
from tests.support.faults import Fault
from tests.support.s3_server import S3Server

MIB = 1024 * 1024
PART = 5 * MIB


@dataclass
class Saved:
    """A checkpoint in a bucket: one data file in three parts, and the small ones."""

    server: S3Server
    proxy: FaultProxy
    url: str

    @property
    def options(self) -> dict[str, Any]:
        return self.server.storage_options(endpoint=self.proxy.endpoint, part_size=PART)

    def verify(self, level: str, **more: Any) -> ckptlib.VerifyReport:
        self.proxy.forget()
        return verify(self.url, level=level, storage_options=self.options, **more)

    @property
    def data(self) -> str:
        """Name of the data file."""
        (name,) = (name for name in self.verify("listing").files if name.endswith(".distcp"))
        return name

    def place(self, name: str) -> dict[str, str]:
        bucket, _, key = self.url.removeprefix("s3://").partition("/")
        return {"Bucket": bucket, "Key": f"{key}/{name}"}

    def payload_read(self) -> int:
        """Bytes of data files that came over the wire."""
        names = ("*.distcp", "*.pt")
        of_data = (p for p in self.proxy.passed if any(fnmatch.fnmatch(p.key, name) for name in names))
        return sum(passed.downloaded for passed in of_data if passed.operation == "GetObject")


@pytest.fixture(scope="module")
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3) as proxy:
        yield proxy


@pytest.fixture
def saved(s3: S3Server, proxy: FaultProxy, s3_url: str) -> Iterator[Saved]:
    made = Saved(s3, proxy, f"{s3_url}/iter_0000001")
    state = {"w": torch.rand(3 * MIB, generator=torch.Generator().manual_seed(1)), "lr": 0.1}
    ckptlib.save(state, made.url, iteration=1, storage_options=made.options)
    yield made
    proxy.faults = []


@pytest.fixture(scope="module")
def client(s3: S3Server) -> Iterator[Any]:
    with contextlib.closing(s3.client()) as client:
        yield client


def content(client: Any, place: dict[str, str]) -> bytes:
    data: bytes = client.get_object(**place)["Body"].read()
    return data


def put_in_parts(client: Any, place: dict[str, str], data: bytes, part_size: int) -> None:
    upload = {**place, "UploadId": client.create_multipart_upload(**place, ChecksumAlgorithm="SHA256")["UploadId"]}
    parts = []
    for number, start in enumerate(range(0, len(data), part_size), 1):
        body = data[start : start + part_size]
        answer = client.upload_part(**upload, PartNumber=number, Body=body, ChecksumAlgorithm="SHA256")
        parts.append({"PartNumber": number, "ETag": answer["ETag"], "ChecksumSHA256": answer["ChecksumSHA256"]})
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})


def test_the_store_vouches_for_a_checkpoint_and_no_payload_is_downloaded(saved: Saved) -> None:
    report = saved.verify("store")
    assert report.ok, report.problems
    assert report.level == "store"
    assert saved.payload_read() == 0
    asked = [p.key for p in saved.proxy.passed if p.operation == "HeadObject" and p.key.endswith(".distcp")]
    assert len(asked) == 1, "one request for each file"
    by_store = {name for name, check in report.checks.items() if check.by_store}
    assert saved.data in by_store
    assert report.bytes_read == 0


def test_auto_takes_the_stores_word_and_data_reads_every_byte(saved: Saved) -> None:
    auto = saved.verify("auto")
    assert (auto.ok, auto.level, saved.payload_read()) == (True, "store", 0)
    data = saved.verify("data")
    assert (data.ok, data.level) == (True, "data")
    assert saved.payload_read() > 12 * MIB
    assert data.checks[saved.data].sha256 is not None


def test_a_missing_a_cut_and_a_replaced_object_are_found(saved: Saved, client: Any) -> None:
    name = saved.data
    place = saved.place(name)
    data = content(client, place)

    def verdicts() -> set[tuple[bool, str]]:
        reports = [saved.verify(level) for level in ("store", "auto")]
        return {(report.corrupt, report.files[name]) for report in reports}

    replaced = bytearray(data)
    replaced[len(data) // 2] ^= 1
    put_in_parts(client, place, bytes(replaced), PART)
    assert verdicts() == {(True, "digest")}
    put_in_parts(client, place, data[:-1], PART)
    assert verdicts() == {(True, "size")}
    client.delete_object(**place)
    assert verdicts() == {(True, "missing")}
    put_in_parts(client, place, data, PART)
    assert verdicts() == {(False, "ok")}


def test_exports_that_the_store_copied_are_vouched_for_too(s3: S3Server, proxy: FaultProxy, s3_url: str) -> None:
    """W5: of a LEGACY checkpoint they are as large as the data."""
    made = Saved(s3, proxy, f"{s3_url}/iter_0000001")
    state = {"w": torch.rand(3 * MIB)}
    ckptlib.save(state, made.url, iteration=1, semantic_type="LEGACY", storage_options=made.options)
    report = made.verify("store")
    assert (report.ok, report.bytes_read, made.payload_read()) == (True, 0, 0)
    assert report.checks["mp_rank_00/model_optim_rng.pt"].by_store


def test_a_resume_without_a_catalog_takes_the_stores_word_unless_that_is_not_to_count(saved: Saved) -> None:
    """S4."""
    store, root = storage.resolve(saved.url.rpartition("/")[0], saved.options)
    for level, reads in (("auto", False), ("data", True)):
        saved.proxy.forget()
        choice = resume.newest_verifying(store, root, None, None, saved.options, level)
        assert choice is not None
        assert choice.iteration == 1
        assert (saved.payload_read() > 0) is reads


@pytest.mark.parametrize("part_size", [7 * MIB, PART + 512 * 1024], ids=["fewer", "as many, longer"])
def test_an_object_that_was_copied_in_other_parts_is_unverifiable_until_it_is_read(
    saved: Saved, client: Any, part_size: int
) -> None:
    place = saved.place(saved.data)
    put_in_parts(client, place, content(client, place), part_size)
    report = saved.verify("store")
    assert (report.unverifiable, report.corrupt) == (True, False)
    assert report.problems == (f"{saved.data}: unverifiable: {OTHER_PARTS}",)
    report = saved.verify("auto")
    assert (report.ok, report.checks[saved.data].by_store) == (True, False)


def test_an_object_without_a_digest_of_the_stores_own_is_unverifiable(saved: Saved, client: Any) -> None:
    """V3: not by its size and its ETag, whatever it holds; reading tells."""
    place = saved.place(saved.data)
    data = bytearray(content(client, place))
    client.put_object(**place, Body=bytes(data), ChecksumAlgorithm="CRC32")
    report = saved.verify("store")
    assert report.files[saved.data] == "unverifiable"
    assert report.checks[saved.data].detail in (NO_DIGEST_KEPT, no_word("s3"))
    assert saved.verify("auto").files[saved.data] == "ok"
    data[100] ^= 1
    client.put_object(**place, Body=bytes(data), ChecksumAlgorithm="CRC32")
    assert saved.verify("auto").files[saved.data] == "digest"


def test_a_foreign_file_without_any_digest_is_compared_with_its_own_crc_by_auto(saved: Saved, client: Any) -> None:
    """V1: also where the store vouches for all the others, so that the whole comes to level store."""
    store, path = storage.resolve(saved.url, saved.options)
    foreign = Saved(saved.server, saved.proxy, f"{saved.url.rpartition('/')[0]}/theirs/iter_0000002")
    _, there = storage.resolve(foreign.url, foreign.options)
    data = saved.data
    content_of = {
        entry.name: store.get(storage.join(path, entry.name)) for entry in store.list(path) if not entry.is_dir
    }
    digests = json.loads(content_of["integrity.json"])
    del digests["files"][data]
    content_of["integrity.json"] = json.dumps(digests, indent=2).encode()
    for name in content_of.keys() - {data}:
        store.put(storage.join(there, name), content_of[name])
    for good in (True, False):
        replaced = bytearray(content_of[data])
        replaced[len(replaced) // 2] ^= not good
        put_in_parts(client, foreign.place(data), bytes(replaced), PART)
        for level, comes_to in (("auto", "store"), ("data", "data")):
            report = foreign.verify(level)
            assert (report.save_id, report.ok, report.level) == (None, good, comes_to), report.problems
            assert report.files[data] == ("ok" if good else "digest")
            assert good or "CRC-32" in report.checks[data].detail


def test_a_store_that_accepts_wrong_digests_vouches_for_nothing(s3: S3Server, s3_url: str) -> None:
    """V3: what it shows may only be what a client told it. How many files, and why."""
    with FaultProxy(s3, lacking=["digests"]) as proxy:
        made = Saved(s3, proxy, f"{s3_url}/iter_0000001")
        ckptlib.save({"w": torch.rand(10)}, made.url, iteration=1, storage_options=made.options)
        report = made.verify("store")
        assert report.unverifiable
        assert not report.corrupt
        assert re.search("seen to reject a wrong one", report.problems[0])
        assert (made.verify("auto").level, made.verify("auto").ok) == ("data", True)


def test_a_file_that_the_store_cannot_be_asked_about_is_unreadable_and_condemns_nothing(saved: Saved) -> None:
    """V2."""
    data = saved.data
    saved.proxy.faults = [Fault("forbidden", "HeadObject", f"*{data}", times=None)]
    report = saved.verify("store")
    assert (report.files[data], report.corrupt, report.unreadable) == ("unreadable", False, True)


def test_flipped_bytes_on_the_wire_are_found_by_level_data(saved: Saved) -> None:
    data = saved.data
    saved.proxy.faults = [Fault("flip_download", "GetObject", f"*{data}", skip=1)]
    assert saved.verify("data").files[data] == "digest"
