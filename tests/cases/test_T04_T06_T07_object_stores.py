"""T04, T06, T07: nothing stale, nothing inherited, nothing added: what other clients of object stores do."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib import roots, storage
from ckptlib.errors import NotACheckpointError
from ckptlib.storage import join
from tests.support.fault_proxy import FaultProxy
from tests.support.roots import small_state
from tests.support.s3_server import S3Server


def test_t04_what_another_client_has_put_is_seen_by_a_storage_that_looked_before(s3: S3Server, s3_url: str) -> None:
    """And what it has removed is not."""
    options = s3.storage_options()
    there, here = f"{s3_url}/there", f"{s3_url}/here"
    ckptlib.save(small_state(1.0), f"{there}/iter_0000001", iteration=1, storage_options=options)
    store, path = storage.resolve(here, options)
    assert roots.newest_committed(store, path) is None
    assert store.list(path) == []
    bucket, _, source = there.removeprefix("s3://").partition("/")
    target = path.partition("/")[2]
    with contextlib.closing(s3.client()) as client:
        keys = [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket, Prefix=source)["Contents"]]
        for key in keys:
            place = {"Bucket": bucket, "Key": key}
            client.copy_object(Bucket=bucket, Key=key.replace(source, target), CopySource=place)
        found = roots.newest_committed(store, path)
        assert found is not None
        assert found.iteration == 1
        assert ckptlib.verify(found.url, storage_options=options).ok
        for key in keys:
            client.delete_object(Bucket=bucket, Key=key.replace(source, target))
    assert roots.newest_committed(store, path) is None
    with pytest.raises(NotACheckpointError):
        ckptlib.verify(found.url, storage_options=options)


def save_in_a_child(url: str, options: dict[str, Any], fill: float) -> None:
    ckptlib.save(small_state(fill), url, iteration=1, storage_options=options)
    os._exit(0)


def test_t06_children_that_are_forked_from_a_process_that_used_s3_save_too(s3: S3Server, s3_url: str) -> None:
    """As a pool of processes does; all at once, while the parent goes on."""
    options = s3.storage_options()
    ckptlib.save(small_state(1.0), f"{s3_url}/parent", iteration=1, storage_options=options)
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(target=save_in_a_child, args=(f"{s3_url}/child{i}", options, float(i)), daemon=True)
        for i in range(2)
    ]
    for child in children:
        child.start()
    ckptlib.save(small_state(2.0), f"{s3_url}/parent again", iteration=1, storage_options=options)
    try:
        for child in children:
            child.join(30)
        assert [child.exitcode for child in children] == [0, 0]
    finally:
        for child in children:
            child.kill()
            child.join()
    for i in range(2):
        assert torch.equal(
            ckptlib.read(f"{s3_url}/child{i}", storage_options=options)["model.w"], torch.full((32,), float(i))
        )


def test_t07_a_store_that_knows_no_new_checksums_holds_exactly_what_was_saved_and_deletes(
    s3: S3Server, s3_url: str
) -> None:
    """It ignores digests that it does not know, and wants Content-MD5 for a deletion of many."""
    with FaultProxy(s3, lacking=["digests"]) as proxy, contextlib.closing(s3.client()) as client:
        options = s3.storage_options(endpoint=proxy.endpoint, part_size=5 << 20)
        state = {"w": torch.randn(1_500_000), "small": torch.ones(3), "n": 7}
        ckptlib.save(state, s3_url, iteration=1, storage_options=options)
        bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
        manifest = json.loads(client.get_object(Bucket=bucket, Key=f"{prefix}/checkpoint.json")["Body"].read())
        for entry in manifest["files"]:
            data = client.get_object(Bucket=bucket, Key=f"{prefix}/{entry['path']}")["Body"].read()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["size"], entry["sha256"])
        assert ckptlib.verify(s3_url, storage_options=options).ok
        store, path = storage.resolve(s3_url, options)
        data_files = [join(path, entry.name) for entry in store.list(path) if not entry.is_dir]
        assert proxy.counts()["UploadPart"] == 2
        store.remove(data_files)
        assert [entry.name for entry in store.list(path) if not entry.is_dir] == []
