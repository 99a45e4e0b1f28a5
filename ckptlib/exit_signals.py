"""Exit signals are noted, not obeyed: the training loop sees them at the end of its step and saves first.

A handler that another library installed goes on being called. A forked child (a data loader's worker) inherits
the handler but not its purpose: there a signal does what it did before, or the child could not be terminated.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Self

from ckptlib.errors import UnsupportedError

_UNCATCHABLE = ("SIGKILL", "SIGSTOP")
_FAULTS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL")


class ExitSignals:
    """Listens to signals from `install` to `close`; a context manager does both.

    What a signal does by default (ending the process, `KeyboardInterrupt`) is replaced. Handlers that were installed
    before are called after the signal was noted; what they raise is theirs to raise.

    Args:
        names: as in `Schedule.exit_signals`.

    Raises:
        UnsupportedError: a name that is no signal here, or one that cannot be handled.
    """

    def __init__(self, names: Sequence[str] = ("SIGTERM",)) -> None:
        for name in names:
            if name not in signal.Signals.__members__:
                raise UnsupportedError(
                    f"{name!r} is no signal on this system; possible are SIGTERM, SIGUSR1, SIGINT, ..."
                )
            if name in _UNCATCHABLE or name in _FAULTS:
                why = "cannot be caught" if name in _UNCATCHABLE else "means a defect of the process, not a request"
                raise UnsupportedError(f"{name} {why}; use SIGTERM, SIGUSR1 or SIGUSR2")
        self.names = tuple(dict.fromkeys(names))
        self._received: dict[str, None] = {}
        self._previous: dict[int, signal._HANDLER] = {}
        self._pid = os.getpid()
        self._listening = False

    @property
    def received(self) -> tuple[str, ...]:
        """Names of the signals that came, each once, in the order in which they first came."""
        return tuple(self._received)

    def install(self) -> Self:
        """Begins to listen. Nothing happens if it listens already.

        Raises:
            UnsupportedError: this is not the main thread, or a handler that is not Python's cannot be called by ours;
                nothing was changed.
        """
        if self._listening:
            return self
        _require_main_thread()
        numbers = [signal.Signals[name] for name in self.names]
        previous: dict[int, signal._HANDLER] = {number: signal.getsignal(number) for number in numbers}
        foreign = [number.name for number in numbers if previous[number] is None]
        if foreign:
            raise UnsupportedError(
                f"{foreign[0]}: its handler was installed by native code; ours could neither call it nor put it back. "
                "Leave this signal out, or install ours first."
            )
        self._pid, self._listening = os.getpid(), True
        self._previous = previous
        for number in numbers:
            signal.signal(number, self._handle)
        return self

    def close(self) -> None:
        """Ends listening and puts back what was there, except where somebody has installed a handler since.

        Raises:
            UnsupportedError: this is not the main thread.
        """
        if not self._listening:
            return
        _require_main_thread()
        self._listening = False
        for number, previous in self._previous.items():
            # A later handler may well call ours; it stays, and ours still hands on to what was before.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)

    def __enter__(self) -> Self:
        return self.install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        if os.getpid() != self._pid:
            _as_before(number, frame, previous)
            return
        if self._listening:
            self._received.setdefault(signal.Signals(number).name)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)


def _as_before(number: int, frame: FrameType | None, previous: signal._HANDLER) -> None:
    """In a forked child: what the signal would have done without us."""
    if callable(previous):
        previous(number, frame)
    elif previous == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _require_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise UnsupportedError(
            f"signal handlers can be changed in the main thread only, not in {threading.current_thread().name!r}: "
            "make ExitSignals where the program starts and hand it over"
        )
