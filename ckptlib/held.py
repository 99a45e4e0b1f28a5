"""For how long checkpoints have held the training loop: what a throughput is measured without."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ckptlib.saving import SaveResult

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="_Holding")


class HeldClock:
    """Adds up the time of the blocks that it is entered for. A block inside another, of one thread, counts once."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._lock = threading.Lock()
        self._inside = threading.local()

    @property
    def seconds(self) -> float:
        """All of it so far; blocks count when they end."""
        return self._seconds

    def __enter__(self) -> HeldClock:
        depth = getattr(self._inside, "depth", 0)
        if depth == 0:
            self._inside.began = time.perf_counter()
        self._inside.depth = depth + 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.depth -= 1
        if self._inside.depth == 0:
            with self._lock:
                self._seconds += time.perf_counter() - self._inside.began

    def result(self, result: SaveResult) -> SaveResult:
        """The same save, whose `wait` counts."""
        shown = {entry.name: getattr(result, entry.name) for entry in fields(SaveResult)}
        return _Waited(**shown, inner=result, clock=self)


@dataclass(frozen=True)
class _Waited(SaveResult):
    inner: SaveResult | None = field(default=None, repr=False, compare=False)
    clock: HeldClock | None = field(default=None, repr=False, compare=False)

    def wait(self, timeout: float | None = None) -> SaveResult:
        """See `SaveResult.wait`."""
        assert self.inner is not None
        assert self.clock is not None
        with self.clock:
            return self.inner.wait(timeout)


class _Holding(Protocol):
    _held: HeldClock


def holds(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method whose time counts on its object's ``_held``."""

    @functools.wraps(method)
    def timed(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._held:
            return method(self, *args, **kwargs)

    return timed
