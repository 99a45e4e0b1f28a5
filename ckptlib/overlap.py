"""Copies of a state that are made while training goes on, and what has to wait for them.

Until a copy has been made, an optimizer must not step and nothing may be loaded. Torch calls the hooks that are put up
here before each of these, so no training loop has to think of it: one hook for every optimizer of the process, one for
each module and optimizer in a state that was saved. Our own loads ask too.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Copy:
    """A copy that is being made; begins with its construction.

    Args:
        clock: entered while somebody waits.

    Attributes:
        cancelled: nobody wants it any more: the save is not begun, or aborted.
    """

    def __init__(self, clock: AbstractContextManager[object] | None = None) -> None:
        self.cancelled = False
        self._clock = nullcontext() if clock is None else clock
        self._ended = threading.Event()
        _running.add(self)

    def end(self) -> None:
        """The state may change."""
        _running.discard(self)
        self._ended.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has ended, within `timeout` seconds."""
        with self._clock:
            return self._ended.wait(timeout)


_running: set[Copy] = set()
_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_watches_steps = False


def wait_for_copies() -> None:
    """Returns when no copy is being made in this process: before anything that changes a state."""
    for copy in list(_running):
        copy.wait()


def watch(parts: Iterable[torch.nn.Module | torch.optim.Optimizer]) -> None:
    """Puts up the hooks. Again: does nothing."""
    global _watches_steps
    if not _watches_steps:
        _watches_steps = True
        register_optimizer_step_pre_hook(_wait)
    for part in parts:
        if part in _watched:
            continue
        if isinstance(part, torch.nn.Module):
            for module in part.modules():  # a module inside can be given its state alone
                module.register_load_state_dict_pre_hook(_wait)
        else:
            part.register_load_state_dict_pre_hook(_wait)
        _watched.add(part)


def _wait(*_: Any) -> None:
    wait_for_copies()


# A forked child has no thread that makes the copies of its parent.
os.register_at_fork(after_in_child=_running.clear)
