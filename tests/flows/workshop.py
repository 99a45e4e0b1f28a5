"""Real checkpoints in a real catalog for the flows to work on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

import ckptlib
from catalog.catalog import Catalog
from catalog.rows import CheckpointRow
from ckptlib.events import AttemptEvent, CommitEvent


@dataclass
class Workshop:
    """Trains nothing, saves a lot: runs under one directory, recorded in one catalog."""

    path: Path
    catalog: Catalog
    events: list[CommitEvent] = field(default_factory=list)

    @property
    def db(self) -> str:
        return str(self.catalog)

    def attempt_started(self, event: AttemptEvent) -> None:
        self.catalog.record_attempt(event)

    def committed(self, event: CommitEvent) -> None:
        self.events.append(event)

    def close(self, timeout: float) -> None:
        pass

    def save(self, *iterations: int, run: str = "run", floats: int = 1000) -> list[CheckpointRow]:
        """Saves and records one checkpoint per iteration, all by one attempt."""
        checkpointer = ckptlib.Checkpointer(str(self.root(run)), run=run, listeners=[self])
        rows = []
        for iteration in iterations:
            weight = torch.arange(float(floats)) + iteration
            checkpointer.save({"model": {"weight": weight}}, iteration=iteration)
            rows.append(self.catalog.record(self.events[-1]))
        checkpointer.close()
        return rows

    def root(self, run: str = "run") -> Path:
        return self.path / run

    def data_file(self, row: CheckpointRow) -> Path:
        """The file that holds the weights."""
        return max(Path(row.url).glob("*.distcp"), key=lambda path: path.stat().st_size)

    def verdict(self, row: CheckpointRow) -> str:
        return self.catalog.checkpoint(row.run, row.iteration, row.save_id).verdict


def flip_a_byte(path: Path) -> None:
    """One bit, in the middle of the file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
