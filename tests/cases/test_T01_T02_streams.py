"""T01, T02: what a save calls written can be read by others, on filesystems with and without file descriptors."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile

import ckptlib
from tests.support.s3_server import S3Server

HASH = """
import hashlib, json, pathlib, sys
manifest = json.loads(pathlib.Path(sys.argv[1], "checkpoint.json").read_text())
for entry in manifest["files"]:
    data = pathlib.Path(sys.argv[1], entry["path"]).read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["size"], entry["sha256"]), entry["path"]
print(len(manifest["files"]))
"""


def test_t01_another_process_reads_every_byte_as_soon_as_save_returns(tmp_path: Path) -> None:
    """The digests are of what was in memory, so a buffer that was never flushed would be found."""
    url = str(tmp_path / "iter_0000001")
    ckptlib.save({"w": torch.randn(1000, 100), "small": torch.ones(3), "n": 7}, url, iteration=1)
    read = subprocess.run([sys.executable, "-c", HASH, url], capture_output=True, text=True, check=False, timeout=60)
    assert read.returncode == 0, read.stderr
    listed = json.loads(Path(url, "checkpoint.json").read_text())["files"]
    assert int(read.stdout) == len(listed) == 5


HASH_S3 = """
import hashlib, json, sys, boto3
client = boto3.client("s3")
bucket, _, prefix = sys.argv[1].removeprefix("s3://").partition("/")
def read(name):
    return client.get_object(Bucket=bucket, Key=f"{prefix}/{name}")["Body"].read()
manifest = json.loads(read("checkpoint.json"))
for entry in manifest["files"]:
    data = read(entry["path"])
    assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["size"], entry["sha256"]), entry["path"]
print(len(manifest["files"]))
"""


def test_t01_another_process_reads_every_byte_from_s3_with_a_client_of_its_own(s3: S3Server, s3_url: str) -> None:
    """One file in parts, one in a single request."""
    url = f"{s3_url}/iter_0000001"
    options = s3.storage_options(part_size=5 << 20)
    ckptlib.save({"w": torch.randn(1_500_000), "n": 7}, url, iteration=1, storage_options=options)
    environment = {**os.environ, **s3.environment()}
    command = [sys.executable, "-c", HASH_S3, url]
    read = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert read.returncode == 0, read.stderr
    assert int(read.stdout) == 5


def test_t02_s3_is_saved_to_without_any_file_descriptor(
    s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_sync(*args: object) -> None:
        raise AssertionError("a filesystem of this host was synced")

    for name in ("sync", "fsync", "fdatasync"):
        monkeypatch.setattr(os, name, no_sync)
    url, options = f"{s3_url}/iter_0000001", s3.storage_options()
    weights = torch.randn(50, 20)
    ckptlib.save({"w": weights}, url, iteration=1, storage_options=options)
    assert ckptlib.verify(url, storage_options=options).ok
    assert torch.equal(ckptlib.read(url, storage_options=options)["w"], weights)


@pytest.fixture
def memory_url() -> str:
    return f"memory://{uuid.uuid4().hex}/iter_0000001"


def test_t02_a_filesystem_without_file_descriptors_is_saved_to(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T01 too: nothing falls back to a sync() of the whole machine."""

    def no_descriptor(self: MemoryFile) -> int:
        raise io.UnsupportedOperation("fileno")

    def no_sync() -> None:
        raise AssertionError("os.sync() was called")

    monkeypatch.setattr(MemoryFile, "fileno", no_descriptor, raising=False)
    monkeypatch.setattr("os.sync", no_sync)
    weights = torch.randn(50, 20)
    ckptlib.save({"w": weights}, memory_url, iteration=1)
    assert ckptlib.verify(memory_url).ok
    assert torch.equal(ckptlib.read(memory_url)["w"], weights)
    fsspec.filesystem("memory").rm(memory_url.removeprefix("memory://").partition("/")[0], recursive=True)
