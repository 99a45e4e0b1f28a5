"""Looking at a run's directory the way a person would, and crashing saves at a chosen moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ckptlib import commit, roots, storage


class Crash(BaseException):
    """The process is gone: nothing after it runs, no handler of errors either."""


def files_of(root: str | Path) -> dict[str, bytes]:
    """Every file below a directory with its content."""
    return {str(path.relative_to(root)): path.read_bytes() for path in Path(root).rglob("*") if path.is_file()}


def tracker(root: str | Path) -> str:
    """The tracker's text, exactly."""
    return Path(root, roots.TRACKER).read_text()


def newest(root: str | Path) -> tuple[int, int] | None:
    """(attempt, iteration) of what a resume would take."""
    found = roots.newest_committed(*storage.resolve(str(root)))
    return None if found is None else found.order[:2]


def states(root: str | Path) -> dict[str, list[str]]:
    """State of every save, oldest first, by directory."""
    out: dict[str, list[str]] = {}
    for found in roots.scan(*storage.resolve(str(root))).found:
        out.setdefault(found.name, []).append(found.state)
    return out


@contextlib.contextmanager
def crash_at(target: Any, name: str, *, call: int = 1, before: bool = True) -> Iterator[None]:
    """Ends the process, as far as the code can tell, before or after a call of a function. No abort is recorded."""
    original: Callable[..., Any] = getattr(target, name)
    calls = 0

    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < call:
            return original(*args, **options)
        if not before:
            original(*args, **options)
        raise Crash

    with (
        mock.patch.object(target, name, wrapped),
        mock.patch.object(commit, "decide_abort", side_effect=Crash),
        contextlib.suppress(Crash),
    ):
        yield


def note(path: str | Path, iteration: int) -> None:
    """Writes an iteration down, so that a process may be killed in the middle of it."""
    with open(path, "a") as file:
        file.write(f"{iteration}\n")


def noted(path: str | Path) -> int:
    """The last iteration that was written down whole; 0: none."""
    lines = Path(path).read_text().split("\n")[:-1] if Path(path).exists() else []
    return int(lines[-1]) if lines else 0


def small_state(fill: float = 0.0) -> dict[str, Any]:
    """A state that is saved in a moment."""
    return {"model": {"w": torch.full((32,), fill), "b": torch.full((2, 3), -fill)}}
