"""Checkpoints that real Megatron-Core wrote: where they are, what is in them, and copies that a test may damage."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

REPOSITORY = Path(__file__).parents[2]
SUBSET = REPOSITORY / "tests" / "data" / "megatron"
COLLECTION = Path(os.environ.get("CKPT_FIXTURES", REPOSITORY.parent / "shared" / "fixtures")) / "megatron"


@dataclass(frozen=True)
class Fixture:
    """One checkpoint and its logical tensors."""

    path: Path

    @property
    def name(self) -> str:
        """Directory name: format, version, parallel layout, optimizer."""
        return self.path.name

    @property
    def format(self) -> str:
        """What `inspect` must call it."""
        return (
            "torch_dcp" if self.name.startswith("dcp") else "torch" if self.name.startswith("legacy") else "torch_dist"
        )

    def iterations(self) -> list[Path]:
        """Its iteration directories."""
        return sorted((self.path / "ckpt").glob("iter_*"))

    def expected(self) -> dict[str, tuple[str, list[int], str]]:
        """Logical name -> dtype, shape, SHA-256 of the row-major bytes."""
        if (self.path / "expected.json").exists():
            return {name: tuple(entry) for name, entry in json.loads((self.path / "expected.json").read_text()).items()}
        return {name: fingerprint(tensor) for name, tensor in load_file(self.path / "expected.safetensors").items()}


def fingerprint(tensor: torch.Tensor) -> tuple[str, list[int], str]:
    """dtype, shape, SHA-256 of the row-major bytes."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), hashlib.sha256(raw).hexdigest()


def subset() -> list[Fixture]:
    """The fixtures that every clone has."""
    return [Fixture(path) for path in sorted(SUBSET.iterdir()) if path.is_dir()]


def collection() -> list[Fixture]:
    """All fixtures, where they are at hand."""
    return [Fixture(path) for path in sorted(COLLECTION.iterdir()) if path.is_dir()] if COLLECTION.is_dir() else []


def copy_of(name: str, target: Path) -> Path:
    """A writable copy of a fixture's iteration directory, in a root of its own."""
    (source,) = Fixture(SUBSET / name).iterations()
    return Path(shutil.copytree(source, target / source.name))
