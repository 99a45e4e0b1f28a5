"""A small training run on disk: real checkpoints, and ways to break them."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib import commit
from ckptlib.events import CommitListener, Resolver


class Training:
    """A run whose attempts save a linear layer with its optimizer."""

    def __init__(self, root: Path, run: str = "run", **options: Any) -> None:
        self.root = root
        self.run = run
        self.options = options

    def state(self, seed: int = 0) -> dict[str, Any]:
        """A fresh model and optimizer with state, a function of the seed."""
        generator = torch.Generator().manual_seed(seed)
        model = torch.nn.Linear(8, 4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    def attempt(
        self,
        *iterations: int,
        resume: bool = False,
        at: int | None = None,
        resolver: Resolver | None = None,
        listeners: Sequence[CommitListener] = (),
        **options: Any,
    ) -> ckptlib.Restored | None:
        """One process lifetime: resumes where asked to, then saves these iterations."""
        restored = None
        with ckptlib.Checkpointer(
            str(self.root), run=self.run, resolver=resolver, listeners=listeners, **self.options
        ) as checkpointer:
            if resume or at is not None:
                restored = checkpointer.restore(self.state(), at=at)
            for iteration in iterations:
                checkpointer.save(
                    self.state(iteration),
                    iteration=iteration,
                    progress={"consumed_samples": iteration * 8},
                    metrics={"loss": 1.0 / (iteration + 1)},
                    **options,
                )
        return restored

    def directory(self, iteration: int) -> Path:
        """Where an iteration is."""
        return self.root / f"iter_{iteration:07d}"

    def data_file(self, iteration: int) -> Path:
        """The newest save's data file."""
        return max(self.directory(iteration).glob("__*.distcp"))

    def save_ids(self, iteration: int) -> list[str]:
        """The saves in its directory, oldest first."""
        return sorted(path.name for path in (self.directory(iteration) / ".ckpt").iterdir() if "-" in path.name)

    def die_before_the_decision(
        self, iteration: int, monkeypatch: pytest.MonkeyPatch, listeners: Sequence[CommitListener] = ()
    ) -> None:
        """Saves with a coordinator that dies when every record exists and nothing is decided."""

        def die(*_: object) -> None:
            raise OSError(errno.EIO, "the coordinator is gone")

        with monkeypatch.context() as patched:
            patched.setattr(commit, "_decide", die)
            with pytest.raises(OSError, match="coordinator"):
                self.attempt(iteration, listeners=listeners)


def flip_a_byte(path: Path, at: int = -100) -> None:
    """Changes one byte, as a disk does: same size, same time."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x01
    path.write_bytes(data)
