"""P24, P28: uploads that stall, and files of more parts than a store takes."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib import ShardedTensor, storage
from ckptlib.errors import StorageError
from ckptlib.storage import join, s3_parts
from tests.support.fault_proxy import FaultProxy
from tests.support.faults import Fault
from tests.support.ranks import try_ranks
from tests.support.s3_server import S3Server

PART = 5 << 20


def save_a_half(rank: int, url: str, options: dict[str, Any]) -> None:
    half = torch.full((2_000_000,), float(rank))
    tensor = ShardedTensor.from_rank_offsets("w", half, (0, rank, 2))
    ckptlib.save({"w": tensor}, url, iteration=1, timeout=30.0, storage_options=options)


def test_p24_a_store_that_takes_a_part_and_never_answers_ends_the_save_and_is_named_on_all_ranks(
    s3: S3Server, s3_url: str
) -> None:
    """Rank, object, upload and part, and how long it was waited for; in bounded time."""
    with FaultProxy(s3, [Fault("hang", "UploadPart", key="*__1_0*", times=None)]) as proxy:
        options = s3.storage_options(endpoint=proxy.endpoint, part_size=PART, timeout=0.5, attempts=2)
        outcomes = try_ranks(2, save_a_half, s3_url, options, timeout=30.0)
    pattern = r"s3://.*/__1_0\..*\.distcp: upload \w+ part \d+: no answer within 0\.5 s, 2 attempts"
    for outcome in outcomes:
        assert outcome.error is not None, outcome
        assert re.search(pattern, str(outcome.error)), outcome.error
    assert "rank 1: " in str(outcomes[0].error)
    store, path = storage.resolve(s3_url, s3.storage_options())
    assert list(store.unfinished(path)) == []


@pytest.mark.parametrize(
    ("size", "known"), [(5 << 40, True), (5 << 40, False), (50 * 10**12, True), (160 * 10**9, False)]
)
def test_p28_a_file_of_any_size_that_s3_takes_fits_into_ten_thousand_parts(size: int, known: bool) -> None:
    """5 TiB, or 50 TB where its size is known from the beginning."""
    first = s3_parts.first_part_size(size if known else None)
    parts = [stop - start for start, stop in s3_parts.bounds(size, first)]
    assert sum(parts) == size
    assert len(parts) <= s3_parts.MAX_PARTS
    assert max(parts) <= s3_parts.MAX_PART_BYTES
    assert min(parts[:-1]) >= s3_parts.MIN_PART_BYTES


@pytest.mark.parametrize("known", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_p28_a_store_that_takes_ten_parts_gets_no_eleventh(s3: S3Server, s3_url: str, known: bool) -> None:
    content = os.urandom(PART) * 12 + b"end"
    with FaultProxy(s3) as proxy:
        proxy.most_parts = 10
        store, path = storage.resolve(
            s3_url, s3.storage_options(endpoint=proxy.endpoint, part_size=PART, max_parts=10, concurrency=2)
        )
        stream = store.open_write(join(path, "file"), size=len(content) if known else None)
        stream.write(content)
        assert len(stream.finish().part_sha256) <= 10
        assert store.get(join(path, "file")) == content


def test_p28_one_part_too_many_is_an_error_that_says_what_to_do(s3: S3Server, s3_url: str) -> None:
    """A store that takes fewer than it was said to."""
    with FaultProxy(s3) as proxy:
        proxy.most_parts = 2
        store, path = storage.resolve(s3_url, s3.storage_options(endpoint=proxy.endpoint, part_size=PART))
        stream = store.open_write(join(path, "file"))
        stream.write(bytes(4 * PART))
        with pytest.raises(StorageError, match=r"/file: .*part \d+.*between 1 and 2"):
            stream.finish()
        stream.abort()
        assert store.stat(join(path, "file")) is None
        assert list(store.unfinished(path)) == []
