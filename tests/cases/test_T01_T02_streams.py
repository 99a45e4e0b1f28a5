"""T01, T02: what a save calls written can be read by others, on filesystems with and without file descriptors."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import uuid
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile

import ckptlib

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
