"""The tests' side of the judge: starts its processes, sends requests, returns what Megatron-Core loaded."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

REPOSITORY = Path(__file__).resolve().parents[2]
JUDGE_PYTHON = REPOSITORY / ".venv-megatron" / "bin" / "python"


@dataclass(frozen=True)
class Piece:
    """A rank's piece of a tensor, in the arguments of Megatron's `ShardedTensor.from_rank_offsets`.

    `name` is its place in the state, and in the verdict: a rank may hold several pieces of one key.
    """

    name: str
    key: str
    shape: Sequence[int]
    dtype: str = "float32"
    rank_offsets: Sequence[tuple[int, int, int]] = ()
    replica_id: Sequence[int] = (0, 0, 0)
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell of a grid of objects, in the arguments of Megatron's `ShardedObject`; `name` as for a `Piece`."""

    name: str
    key: str
    global_shape: Sequence[int] = (1,)
    global_offset: Sequence[int] = (0,)
    replica_id: Sequence[int] = (0, 0, 0)


@dataclass(frozen=True)
class Verdict:
    """What one rank of the judge loaded, by name (whole tensors: by key); `error` is empty when it could."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)
    backend: str | None = None
    error: str = ""


class Judge:
    """`world` processes of the judge's environment; they serve any number of loads, as starting one takes seconds."""

    def __init__(self, world: int) -> None:
        if not JUDGE_PYTHON.exists():
            raise FileNotFoundError(f"{JUDGE_PYTHON} is absent: run `make setup`, which builds the judge's environment")
        self._folder = tempfile.TemporaryDirectory(prefix="judge-")
        folder = Path(self._folder.name)
        self._logs = [folder / f"rank_{rank}.log" for rank in range(world)]
        self._answers_to = [folder / f"rank_{rank}.safetensors" for rank in range(world)]
        self._processes = [self._start(rank, world, folder / "rendezvous") for rank in range(world)]

    def _start(self, rank: int, world: int, rendezvous: Path) -> subprocess.Popen[str]:
        environment = {"RANK": str(rank), "WORLD_SIZE": str(world), "JUDGE_RENDEZVOUS": str(rendezvous)}
        with self._logs[rank].open("w") as log:
            return subprocess.Popen(
                [str(JUDGE_PYTHON), "-m", "tests.megatron.judge"],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )

    def load(
        self,
        checkpoint: str | Path,
        *ranks: Sequence[Piece | Cell],
        strict: str = "assume_ok_unexpected",
        verify_integrity: bool = True,
    ) -> list[Verdict]:
        """Loads `checkpoint` on every rank at once, each with the pieces and cells it asks for.

        Args:
            checkpoint: the iteration directory.
            ranks: one sequence per rank of this judge.
            strict: Megatron's `StrictHandling`; its default refuses a key that the checkpoint lacks.
            verify_integrity: re-hash the files listed in `integrity.json` first, which must then exist.
        """
        if len(ranks) != len(self._processes):
            raise ValueError(f"requests for {len(ranks)} ranks, the judge has {len(self._processes)}")
        return self._ask(
            {
                "checkpoint": str(checkpoint),
                "tensors": [asdict(wanted) for wanted in wishes if isinstance(wanted, Piece)],
                "objects": [asdict(wanted) for wanted in wishes if isinstance(wanted, Cell)],
                "strict": strict,
                "verify_integrity": verify_integrity,
            }
            for wishes in ranks
        )

    def load_whole(self, checkpoint: str | Path) -> Verdict:
        """Loads every tensor whole, and the common state."""
        return self._ask({"checkpoint": str(checkpoint), "tensors": None} for _ in self._processes)[0]

    def _ask(self, requests: Any) -> list[Verdict]:
        for process, request, to in zip(self._processes, requests, self._answers_to, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps({**request, "tensors_to": str(to)}) + "\n")
            process.stdin.flush()
        return [self._answer(rank) for rank in range(len(self._processes))]

    def _answer(self, rank: int) -> Verdict:
        stdout = self._processes[rank].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"rank {rank} of the judge died:\n{self._logs[rank].read_text()}")
        answer = json.loads(line)
        if "error" in answer:
            return Verdict(error=answer["error"])
        return Verdict(tensors=load_file(self._answers_to[rank]), **answer)

    def close(self) -> None:
        """Ends the processes: they leave when their input does."""
        for process in self._processes:
            process.communicate()
        self._folder.cleanup()
