"""Training text from this machine, and batches that depend on nothing but the number of samples seen so far.

The text is the source code of Python's standard library, read as bytes. A run that resumes after `n` samples
continues with sample `n`, whatever the number of data-parallel ranks before and after.
"""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch

VOCAB = 256


def standard_library(limit: int) -> torch.Tensor:
    """The first `limit` bytes of the top-level modules of the standard library, in the order of their names (uint8).

    Raises:
        FileNotFoundError: this Python carries no source files (a zipped or stripped installation).
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise FileNotFoundError(f"{folder}: no *.py files to train on; use a Python that has its sources installed")
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


class Batches:
    """Batches of windows of a text, shuffled anew in every epoch.

    Sample number `i` of a run is one window of the text, fixed by the seed. A global batch is the next `global_batch`
    samples; data-parallel rank `r` takes the `r`-th equal part of them.
    """

    def __init__(self, text: torch.Tensor, *, context: int, global_batch: int, seed: int) -> None:
        """Args:
            text: tokens (uint8), one dimension.
            context: tokens per sample.
            global_batch: samples per iteration over all ranks.
            seed: fixes the order.

        Raises:
            ValueError: the text is shorter than one sample.
        """
        if len(text) <= context:
            raise ValueError(f"a text of {len(text)} tokens is too short for samples of {context}")
        self.text = text
        self.context = context
        self.global_batch = global_batch
        self.seed = seed
        self.samples_per_epoch = (len(text) - 1) // context
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def indices(self, consumed_samples: int, *, rank: int = 0, ranks: int = 1) -> list[int]:
        """Windows that data-parallel rank `rank` of `ranks` reads next, after `consumed_samples` of the whole run.

        Raises:
            ValueError: the ranks do not divide the global batch.
        """
        if self.global_batch % ranks:
            raise ValueError(f"a global batch of {self.global_batch} samples does not divide among {ranks} ranks")
        part = self.global_batch // ranks
        first = consumed_samples + rank * part
        return [self._window(sample) for sample in range(first, first + part)]

    def at(self, consumed_samples: int, *, rank: int = 0, ranks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of those windows: two int64 tensors (samples, context), the second one token ahead."""
        windows = torch.stack(
            [
                self.text[index * self.context : (index + 1) * self.context + 1]
                for index in self.indices(consumed_samples, rank=rank, ranks=ranks)
            ]
        ).long()
        return windows[:, :-1], windows[:, 1:]

    def _window(self, sample: int) -> int:
        epoch, position = divmod(sample, self.samples_per_epoch)
        return int(self._order(epoch)[position])

    def _shuffled(self, epoch: int) -> torch.Tensor:
        # A generator of its own: the global one belongs to the model, and is part of what a checkpoint restores.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.samples_per_epoch, generator=generator)
