"""What the tests of faults rely on: the proxy changes nothing by itself, counts, and does what it is told."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from tests.support.fault_proxy import FaultProxy
from tests.support.faults import ERRORS, Fault, Kind, Lacking
from tests.support.s3_server import S3Server

CONTENT = os.urandom(400_000)
PART = os.urandom(5 << 20)  # the smallest that S3 takes
END = os.urandom(1000)


def digest_of(content: bytes) -> str:
    return base64.b64encode(hashlib.sha256(content).digest()).decode()


class Store:
    """Plain S3 through a proxy, each request once."""

    def __init__(self, proxy: FaultProxy, client: Any, bucket: str, prefix: str) -> None:
        self.proxy = proxy
        self.client = client
        self.bucket = bucket
        self.prefix = prefix

    def put(self, name: str, content: bytes, **options: Any) -> Any:
        return self.client.put_object(Bucket=self.bucket, Key=self.prefix + name, Body=content, **options)

    def get(self, name: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.bucket, Key=self.prefix + name)["Body"].read())

    def head(self, name: str) -> Any:
        return self.client.head_object(Bucket=self.bucket, Key=self.prefix + name, ChecksumMode="ENABLED")

    def names(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix).get("Contents", [])
        return [entry["Key"].removeprefix(self.prefix) for entry in found]

    def put_in_parts(self, name: str, parts: list[bytes], **options: Any) -> Any:
        place = {"Bucket": self.bucket, "Key": self.prefix + name}
        place["UploadId"] = self.client.create_multipart_upload(**place, ChecksumAlgorithm="SHA256")["UploadId"]
        done = []
        for number, part in enumerate(parts, 1):
            digest = digest_of(part)
            sent = self.client.upload_part(**place, PartNumber=number, Body=part, ChecksumSHA256=digest)
            done.append({"PartNumber": number, "ETag": sent["ETag"], "ChecksumSHA256": digest})
        return self.client.complete_multipart_upload(**place, MultipartUpload={"Parts": done}, **options)


@pytest.fixture
def store(s3: S3Server, s3_url: str) -> Iterator[Store]:
    bucket, prefix = s3_url.removeprefix("s3://").split("/")
    options: dict[str, Any] = {"read_timeout": 1, "response_checksum_validation": "when_required"}
    with FaultProxy(s3) as proxy, contextlib.closing(s3.client(endpoint=proxy.endpoint, **options)) as client:
        yield Store(proxy, client, bucket, f"{prefix}/")


def test_what_passes_is_as_it_was_and_counted(store: Store) -> None:
    """Names with everything in them, bodies of every size, bodies that the server asks for, and its errors."""
    contents = {"a b": b"", "ünï#?%+&=/x": b"x", "large": CONTENT}
    for name, content in contents.items():
        store.put(name, content)
        assert store.get(name) == content
    assert sorted(store.names()) == sorted(contents)
    store.put_in_parts("parts", [PART, END])
    assert store.get("parts") == PART + END
    with pytest.raises(ClientError, match="NoSuchKey"):
        store.get("absent")
    counts = store.proxy.counts()
    assert (counts["PutObject"], counts["GetObject"], counts["ListObjectsV2"]) == (3, 5, 1)
    assert (counts["CreateMultipartUpload"], counts["UploadPart"], counts["CompleteMultipartUpload"]) == (1, 2, 1)
    assert store.proxy.bytes_uploaded() >= 1 + len(CONTENT) + len(PART) + len(END)
    assert store.proxy.bytes_downloaded("GetObject") >= 1 + len(CONTENT) + len(PART) + len(END)
    store.proxy.forget()
    assert store.head("large")["ContentLength"] == len(CONTENT)
    assert store.proxy.bytes_downloaded() == 0
    assert [(passed.operation, passed.key) for passed in store.proxy.passed] == [("HeadObject", f"{store.prefix}large")]


def put(store: Store) -> Any:
    return store.put("a", CONTENT)


def get(store: Store) -> bytes:
    return store.get("old")


LOST = (ConnectionClosedError, ClientError, ReadTimeoutError, ResponseStreamingError, IncompleteReadError)


@pytest.mark.parametrize(
    ("kind", "act", "expected", "is_stored"),
    [
        ("cut_before", put, ConnectionClosedError, False),
        ("cut_upload", put, ConnectionClosedError, False),
        ("cut_after", put, ConnectionClosedError, True),
        ("error_after", put, ClientError, True),
        ("hang", put, ReadTimeoutError, False),
        ("hang_after", put, ReadTimeoutError, True),
        ("cut_download", get, (ResponseStreamingError, IncompleteReadError), False),
        *((kind, put, ClientError, False) for kind in ERRORS if kind != "moved"),  # boto3 follows it, once
    ],
)
def test_a_fault_happens_as_often_as_it_should(
    store: Store, kind: Kind, act: Callable[[Store], Any], expected: type[Exception], is_stored: bool
) -> None:
    store.put("old", CONTENT)
    fault = Fault(kind, operation="PutObject" if act is put else "GetObject")
    store.proxy.faults = [fault]
    with pytest.raises(expected):
        act(store)
    assert fault.struck == 1
    assert ("a" in store.names()) == is_stored
    act(store)
    assert fault.struck == 1


def test_a_byte_is_flipped_on_the_way_up_and_the_server_finds_out(store: Store) -> None:
    store.proxy.faults = [Fault("flip_upload", "PutObject")]
    with pytest.raises(ClientError, match="BadDigest"):
        store.put("a", CONTENT, ChecksumSHA256=digest_of(CONTENT))
    store.proxy.faults = [Fault("flip_upload", "UploadPart")]
    with pytest.raises(ClientError, match="BadDigest"):
        store.put_in_parts("b", [PART, END])
    assert store.names() == []


def test_a_response_is_changed_or_shortened(store: Store) -> None:
    store.put("a", CONTENT)
    store.proxy.faults = [Fault("flip_download", "GetObject"), Fault("short_download", "GetObject")]
    found = store.get("a")
    assert [at for at, byte in enumerate(found) if byte != CONTENT[at]] == [len(CONTENT) // 2]
    assert store.get("a") == CONTENT[: len(CONTENT) // 2]
    assert store.get("a") == CONTENT


def test_a_completion_that_took_place_is_answered_with_an_error(store: Store) -> None:
    for kind in ("error_after", "error_in_200", "cut_after"):
        store.proxy.faults = [Fault(kind, "CompleteMultipartUpload")]
        with pytest.raises((ClientError, BotoCoreError)):
            store.put_in_parts(kind, [PART, END])
        assert store.get(kind) == PART + END


def test_only_what_is_named_is_struck_and_only_its_turn(store: Store) -> None:
    store.proxy.faults = [Fault("forbidden", "Put*", key="*/b", skip=1, times=None), Fault("delay", seconds=0.5)]
    start = time.monotonic()
    store.put("a", b"x")
    assert time.monotonic() - start >= 0.5
    store.put("b", b"x")
    for _ in range(2):
        with pytest.raises(ClientError, match="AccessDenied"):
            store.put("b", b"y")
    assert store.get("b") == b"x"


@pytest.mark.parametrize(
    ("lacking", "keeps_digests", "put_is_conditional", "completion_is_conditional"),
    [
        ((), True, True, True),
        (("digests",), False, True, True),
        (("conditions_of_completion",), True, True, False),
        (("digests", "conditions"), False, False, False),
    ],
)
def test_a_store_that_ignores_what_it_does_not_know(
    store: Store,
    lacking: tuple[Lacking, ...],
    keeps_digests: bool,
    put_is_conditional: bool,
    completion_is_conditional: bool,
) -> None:
    store.proxy.lacking = frozenset(lacking)

    def happens(act: Callable[[], Any]) -> bool:
        try:
            act()
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("BadDigest", "PreconditionFailed"):
                raise
            return False
        return True

    assert happens(lambda: store.put("wrong", b"x", ChecksumSHA256=digest_of(b"y"))) == (not keeps_digests)
    store.put("a", b"old", IfNoneMatch="*", ChecksumSHA256=digest_of(b"old"))
    assert ("ChecksumSHA256" in store.head("a")) == keeps_digests
    assert happens(lambda: store.put("a", b"new", IfNoneMatch="*")) == (not put_is_conditional)
    assert happens(lambda: store.put_in_parts("a", [PART, END], IfNoneMatch="*")) == (not completion_is_conditional)
    assert store.get("a") == (b"old" if completion_is_conditional else PART + END)
    assert ("ChecksumSHA256" in store.head("a")) == keeps_digests


def test_a_store_that_takes_few_parts_and_one_that_demands_the_old_digest(store: Store) -> None:
    store.proxy.most_parts = 1
    with pytest.raises(ClientError, match="between 1 and 1"):
        store.put_in_parts("a", [PART, END])
    store.put("b", b"x")
    store.proxy.lacking = frozenset({"digests"})
    with pytest.raises(ClientError, match="MissingContentMD5"):
        store.client.delete_objects(Bucket=store.bucket, Delete={"Objects": [{"Key": f"{store.prefix}b"}]})
    assert store.names() == ["b"]
