"""``RUN@ITER``: how a checkpoint is named on the command line. Pure.

The iteration is read from the right, so that a run may be called anything: ``team/llama 7B``, ``me@host``, even
``sweep@3``. When a name could be both, ``RUN@ITER`` is meant if such a run exists, else the run of the whole name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Selector:
    """A run, and one iteration of it or (None) all of them."""

    run: str
    iteration: int | None = None

    def __str__(self) -> str:
        return self.run if self.iteration is None else f"{self.run}@{self.iteration}"


def parse(text: str, runs: Collection[str]) -> Selector:
    """What `text` names, given the names of the known runs.

    An unknown run is not an error here: the selector then follows the form of the text.

    >>> parse("me@host@300", ["me@host"])
    Selector(run='me@host', iteration=300)
    """
    run, at, digits = text.rpartition("@")
    if not (at and run and digits.isascii() and digits.isdigit()):
        return Selector(text)
    if run not in runs and text in runs:
        return Selector(text)
    return Selector(run, int(digits))
