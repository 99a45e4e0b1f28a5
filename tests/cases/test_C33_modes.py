"""C33: files that an atomic write made must not be private to the writer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SAVE = """
import os, sys, torch
os.umask(0o022)
from ckptlib import Checkpointer
Checkpointer(sys.argv[1], run="r").save({"model": {"w": torch.ones(4)}}, iteration=5)
"""


def test_c33_every_file_and_directory_has_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    root = tmp_path / "run"
    subprocess.run([sys.executable, "-c", SAVE, str(root)], check=True, timeout=100)
    files = {path for path in root.rglob("*") if path.is_file()}
    names = {path.name for path in files}
    assert {"manifest.json", "decision.json", "metadata.json", "latest_checkpointed_iteration.txt"} <= names
    assert {os.stat(path).st_mode & 0o777 for path in files} == {0o644}
    assert {os.stat(path).st_mode & 0o777 for path in root.rglob("*") if path.is_dir()} == {0o755}
