"""Copies tensors into staging memory: each byte once, and the state may change when it returns.

On the CPU one thread does not use the memory's bandwidth; while training stands still the other cores are idle, so
several threads take pieces in turn (a copy releases the interpreter's lock). From a GPU the copies are queued on a
stream of their own into page-locked memory, and waited for once.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch

PIECE_BYTES = 4 * 2**20
"""A thread takes so much at a time: small beside any state worth several threads, large beside the cost of a call."""

DEVICE_BYTES = 64 * 2**20
"""What staging may take on a device: a tensor that is not contiguous there is gathered into that much at a time."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""Target and source, of one shape and dtype."""


def default_threads() -> int:
    """Cores of this rank: those the process may use, shared with the other ranks of the node; at most 4."""
    if torch.get_num_threads() > 1:
        return 1  # one copy uses torch's own threads
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(4, len(os.sched_getaffinity(0)) // ranks))


class Copier:
    """Copies with `threads` threads, the caller's among them."""

    def __init__(self, threads: int) -> None:
        self._helpers = ThreadPoolExecutor(threads - 1, "ckptlib-staging") if threads > 1 else None
        self._threads = threads
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, pairs: Sequence[Pair], *, alone: bool = False, ready: Sequence[torch.cuda.Event] = ()) -> None:
        """Copies each source to its target.

        Args:
            alone: with the calling thread only: training goes on beside it.
            ready: what a device must have done before its tensors are read; none: what its current stream has queued.
        """
        with torch.no_grad():
            on_device = [pair for pair in pairs if pair[1].is_cuda]
            pieces = [piece for pair in pairs if not pair[1].is_cuda for piece in _cut(pair)]
            try:
                self._queue(on_device, ready)
                self._share_out(pieces, 1 if alone else self._threads)
            finally:  # nothing writes to a target any more when this returns, however it does
                for device in {source.device for _, source in on_device} & set(self._streams):
                    self._streams[device].synchronize()

    def close(self) -> None:
        """Ends the threads."""
        if self._helpers is not None:
            self._helpers.shutdown()

    def _share_out(self, pieces: Sequence[Pair], threads: int) -> None:
        number = itertools.count()
        stopped = threading.Event()

        def work() -> None:
            with torch.no_grad():  # a setting of each thread
                while not stopped.is_set() and (i := next(number)) < len(pieces):
                    target, source = pieces[i]
                    target.copy_(source)

        others = []
        if self._helpers is not None:
            others = [self._helpers.submit(work) for _ in range(min(threads, len(pieces)) - 1)]
        try:
            work()
        finally:
            stopped.set()  # there is nothing left, or nothing to be gained
            wait(others)
        for other in others:
            other.result()

    def _queue(self, pairs: Sequence[Pair], ready: Sequence[torch.cuda.Event]) -> None:
        """Starts the copies from GPUs."""
        begun = set()
        for target, source in pairs:
            if source.device not in self._streams:
                self._streams[source.device] = torch.cuda.Stream(source.device)
            stream = self._streams[source.device]
            if source.device not in begun:
                begun.add(source.device)
                if not ready:
                    stream.wait_stream(torch.cuda.current_stream(source.device))
                for event in ready:
                    stream.wait_event(event)
            with torch.cuda.stream(stream):
                if source.is_contiguous():
                    target.copy_(source, non_blocking=True)
                else:
                    _gather(target, source, stream)


def _cut(pair: Pair) -> list[Pair]:
    """Pieces of a copy; along rows where there are any."""
    target, source = pair
    if target.nbytes <= PIECE_BYTES or not source.is_contiguous():
        return [pair]
    count = PIECE_BYTES // target.element_size()
    return list(zip(target.reshape(-1).split(count), source.reshape(-1).split(count), strict=True))


def _gather(target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """A part at a time: the device makes a contiguous copy of it first."""
    if target.nbytes > DEVICE_BYTES:
        axis = next(
            axis for axis in range(source.dim()) if source.size(axis) > 1
        )  # so that the target stays contiguous
        half = -(-source.size(axis) // 2)
        for part, of in zip(target.split(half, axis), source.split(half, axis), strict=True):
            _gather(part, of, stream)
        return
    target.copy_(source, non_blocking=True)
    stream.synchronize()  # what was taken for this part can be taken for the next
