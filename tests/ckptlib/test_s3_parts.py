"""Sizes of parts, bodies and requests of S3: pure, whatever the store."""

from __future__ import annotations

import hashlib
import io
import itertools
import os

import fsspec.config
import numpy as np
import pytest
from botocore import exceptions as boto
from hypothesis import given
from hypothesis import strategies as st

from ckptlib import storage
from ckptlib.storage import s3_errors, s3_parts
from ckptlib.storage.s3 import S3Storage
from ckptlib.storage.s3_client import is_aws
from ckptlib.storage.s3_options import S3Options
from ckptlib.storage.s3_parts import (
    MAX_PART_BYTES,
    MAX_PARTS,
    MIB,
    PART_BYTES,
    Body,
    bounds,
    first_part_size,
    part_size,
)
from ckptlib.storage.s3_read import cut_rows, plan_requests

TIB = 1024**4


@given(size=st.integers(0, 48 * TIB), more=st.floats(1.0, 1.2))
def test_a_file_of_known_size_never_has_more_parts_than_the_store_takes(size: int, more: float) -> None:
    """P28: also when it becomes larger than was said. Parts that a store takes, all but the last of them full."""
    first = first_part_size(size)
    parts = list(itertools.islice(bounds(int(size * more), first), MAX_PARTS + 1))
    assert len(parts) <= MAX_PARTS
    assert all(PART_BYTES <= stop - start <= MAX_PART_BYTES for start, stop in parts[:-1])
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])][: len(parts)]
    assert not parts or parts[-1][1] == int(size * more)


def test_a_stream_of_unknown_size_can_grow_beyond_the_largest_objects() -> None:
    """P28: other tools fail at part 10,001."""
    sizes = [part_size(number, first_part_size(None)) for number in range(MAX_PARTS)]
    assert sum(sizes) > 5 * TIB
    assert sizes == sorted(sizes)
    assert sum(sizes[:64]) == 1024 * MIB


@pytest.mark.parametrize(
    ("size", "expected"), [(None, 16), (0, 16), (117 * 1024 * MIB, 16), (TIB, 140), (5 * TIB, 700)]
)
def test_parts_are_as_large_as_they_must_be_and_no_larger(size: int | None, expected: int) -> None:
    assert first_part_size(size) == expected * MIB


def test_a_store_that_takes_few_parts_gets_few() -> None:
    """P28: the same arithmetic at a limit of 10."""
    assert len(list(bounds(90 * MIB, first_part_size(90 * MIB, MIB, 10), 10))) == 7
    assert [part_size(n, MIB, 10) // MIB for n in range(10)] == [1] * 8 + [2, 4]


@given(st.lists(st.binary(max_size=50), max_size=8))
def test_a_body_gives_its_bytes_as_often_as_it_is_asked(pieces: list[bytes]) -> None:
    content = b"".join(pieces)
    body = Body(map(memoryview, pieces))
    assert len(body) == len(content)
    assert body.sha256() == hashlib.sha256(content).hexdigest()
    for _ in range(2):
        assert b"".join(iter(lambda: bytes(body.read(7)), b"")) == content
        assert body.tell() == len(content)
        body.seek(0)
    assert body.read() == content
    assert body.seek(0, io.SEEK_END) == len(content)


def test_a_body_is_sent_in_large_pieces_of_the_memory_itself() -> None:
    memory = bytearray(os.urandom(3 * MIB + 5))
    body = Body([memoryview(memory)])
    pieces = list(iter(lambda: body.read(16384), b""))
    assert [len(piece) for piece in pieces] == [MIB, MIB, MIB, 5]
    memory[0] ^= 1
    assert pieces[0][0] == memory[0]


def test_a_composite_is_the_digest_of_the_digests() -> None:
    digests = [hashlib.sha256(bytes([i])) for i in range(3)]
    expected = hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()
    assert s3_parts.composite([digest.hexdigest() for digest in digests]) == expected


ranges = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 120)), max_size=12)


@given(ranges, st.integers(0, 60), st.integers(1, 200))
def test_requests_read_every_range_once_and_no_large_gap(pairs: list[tuple[int, int]], gap: int, most: int) -> None:
    """R3: what is read beside the ranges is in gaps that are no larger than allowed."""
    content = bytes(i % 251 for i in range(1000))
    buffers = [bytearray(length) for _, length in pairs]
    requests = plan_requests([(at, memoryview(b)) for (at, _), b in zip(pairs, buffers, strict=True)], gap, most)
    for request in requests:
        assert request.start == request.pieces[0][0]
        assert request.stop - request.start <= most
        at = request.start
        for offset, view in request.pieces:
            assert 0 <= offset - at <= gap
            view[:] = content[offset : offset + len(view)]
            at = offset + len(view)
        assert at == request.stop
    assert [bytes(b) for b in buffers] == [content[at : at + length] for at, length in pairs]


def test_neighbours_share_requests_and_large_ranges_are_cut() -> None:
    buffers = [memoryview(bytearray(length)) for length in (10, 20, 30)]
    requests = plan_requests([(0, buffers[0]), (10, buffers[1]), (40, buffers[2])], gap=10, most=100)
    assert [(request.start, request.stop) for request in requests] == [(0, 70)]
    requests = plan_requests([(5, memoryview(bytearray(250)))], gap=10, most=100)
    assert [(request.start, request.stop) for request in requests] == [(5, 105), (105, 205), (205, 255)]


def test_rows_share_requests_unless_they_are_far_apart() -> None:
    rows = np.zeros((10, 4), np.uint8)
    assert cut_rows(100, 1000, rows, gap=500) is None
    parts = cut_rows(100, 1000, rows, gap=996, most=3999)
    assert parts is not None
    assert [(start, len(part)) for start, part in parts] == [(100, 3), (3100, 3), (6100, 3), (9100, 1)]
    assert all(np.shares_memory(part, rows) for _, part in parts)


@given(size=st.integers(0, 5 * TIB))
def test_parts_of_a_file_of_known_size_are_equal(size: int) -> None:
    """Some stores refuse others at the completion, when everything was sent."""
    first = first_part_size(size)
    assert {stop - start for start, stop in itertools.islice(bounds(size, first), MAX_PARTS)} <= {first, size % first}


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("s3.amazonaws.com", True),
        ("s3.eu-central-1.amazonaws.com", True),
        ("bucket.s3.dualstack.us-west-2.amazonaws.com", True),
        ("s3-fips.us-gov-west-1.amazonaws.com", True),
        ("s3.cn-north-1.amazonaws.com.cn", True),
        ("bucket.vpce-1a2b.s3.us-east-1.vpce.amazonaws.com", True),
        ("s3-proxy-1.us-east-1.elb.amazonaws.com", False),
        ("ec2-1-2-3-4.compute-1.amazonaws.com", False),
        ("s3.us-east-1.amazonaws.com.example.org", False),
        ("s3-outposts.us-east-1.amazonaws.com", False),
        ("127.0.0.1", False),
    ],
)
def test_what_runs_on_amazons_hosts_is_not_yet_amazon_s3(host: str, own: bool) -> None:
    """W4: or a gateway behind a load balancer would be believed without a probe."""
    assert is_aws(f"https://{host}:443/path") == own


def a_client_error(status: int, code: str) -> Exception:
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return boto.ClientError(response, "PutObject")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (boto.EndpointConnectionError(endpoint_url="http://x"), True),
        (boto.ConnectTimeoutError(endpoint_url="http://x"), True),
        (boto.ReadTimeoutError(endpoint_url="http://x"), True),
        (boto.ProxyConnectionError(proxy_url="http://x"), True),
        (boto.SSLError(endpoint_url="http://x", error="EOF occurred in violation of protocol"), True),
        (boto.SSLError(endpoint_url="http://x", error="certificate verify failed"), False),
        (boto.NoCredentialsError(), False),
        (a_client_error(429, "TooManyRequests"), True),
        (a_client_error(503, "SlowDown"), True),
        (a_client_error(409, "ConditionalRequestConflict"), True),
        (a_client_error(403, "AccessDenied"), False),
        (a_client_error(412, "PreconditionFailed"), False),
    ],
)
def test_what_may_pass_is_tried_again(error: Exception, passing: bool) -> None:
    assert s3_errors.is_passing(error) == passing


def test_options_are_those_of_boto3_and_of_s3fs() -> None:
    options = S3Options.parse(
        {"key": "k", "secret": "s", "region": "eu-west-1", "use_listings_cache": False, "client_kwargs": None}
    )
    same = S3Options.parse({"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "eu-west-1"})
    assert options == same
    assert options.identity == same.identity
    assert options.identity != S3Options.parse({"key": "k", "secret": "other"}).identity


def test_what_is_not_given_comes_from_the_configuration_of_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then one place holds it for trainers, flows and the command line."""
    configured = {"key": "k", "endpoint_url": "http://there", "default_block_size": 5}
    monkeypatch.setitem(fsspec.config.conf, "s3", configured)
    store, _ = storage.resolve("s3://bucket/run", {"endpoint_url": "http://here"})
    assert isinstance(store, S3Storage)
    assert store.options == S3Options(aws_access_key_id="k", endpoint_url="http://here")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"endpoint": "x"}, "'endpoint'.*endpoint_url"),
        ({"key": "a", "aws_access_key_id": "b"}, "same option"),
        ({"part_size": MIB}, "part_size"),
        ({"endpoint_url": "http://user:hidden@host"}, "key and secret"),
        ({"attempts": 1.5}, "attempts"),
        ({"timeout": float("nan")}, "timeout"),
        ({"s3_additional_kwargs": {"Storage": "x"}}, "Storage.*StorageClass"),
    ],
)
def test_an_option_that_cannot_be_meant_is_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        S3Options.parse(options)


def test_secrets_are_not_shown() -> None:
    options = S3Options.parse({"key": "k", "secret": "hidden", "token": "hidden", "client_kwargs": {"aws": "hidden"}})
    assert "hidden" not in repr(options)
    with pytest.raises(ValueError, match="known") as caught:
        S3Options.parse({"secrets": "hidden"})
    assert "hidden" not in str(caught.value)
