"""Host memory that a save is copied into, so that training goes on while it is written.

The limit of the stall is one copy. Fresh memory costs several times that (page faults), so the pool keeps warm,
pre-faulted arenas and reuses them; there is one for each save that may be in flight, and a save never touches an
arena that another one is still written from.

An arena is an anonymous memory file (`memfd_create`, Linux): a worker process maps the same pages through its file
descriptor, they live as long as any process has them, and when the last one ends they are gone. Nothing has a name in
``/dev/shm`` that a crash could leave behind.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ckptlib.errors import StagingError
from ckptlib.packing import Package
from ckptlib.sharding import Box
from ckptlib.state import TensorLeaf, dtype_of

ALIGNMENT = 64
"""Bytes. Every tensor begins at a multiple: any dtype may be viewed there, and no two share a cache line."""


@dataclass(frozen=True)
class StagedTensor:
    """A tensor in an arena: what a `TensorLeaf` says, and where its bytes begin."""

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    at: int


class Arena:
    """A mapped memory file.

    Args:
        size: bytes, rounded up to whole pages.
        fd: of an arena that another process has made; None: makes one, with all its pages in memory.

    Raises:
        StagingError: there is no such memory.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        made = fd is None
        try:
            self.fd = os.memfd_create("ckptlib-staging") if fd is None else fd
            if made:
                os.ftruncate(self.fd, self.size)
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if made else 0)
            self._map = mmap.mmap(self.fd, self.size, flags=flags)
        except (OSError, ValueError) as error:
            raise StagingError(f"no {self.size / 2**20:.0f} MiB of memory for staging: {error}") from error
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.closed = False

    def view(self, staged: StagedTensor) -> torch.Tensor:
        """The memory of a staged tensor, contiguous."""
        dtype = dtype_of(staged.dtype)
        end = staged.at + math.prod(staged.shape) * dtype.itemsize
        return self._bytes[staged.at : end].view(dtype).reshape(staged.shape)

    def leaf(self, staged: StagedTensor) -> TensorLeaf:
        """A staged tensor as a leaf, to be written."""
        return TensorLeaf(
            staged.key, self.view(staged), staged.global_shape, Box(staged.offset, staged.shape), main=True
        )

    def close(self) -> None:
        """Gives this process's hold on the memory back; the mapping itself ends with its last view."""
        self.closed = True
        os.close(self.fd)
        del self._bytes, self._map


def layout(tensors: Sequence[TensorLeaf]) -> tuple[list[StagedTensor], int]:
    """Places for tensors, one after the other, and the bytes they take."""
    staged, at = [], 0
    for leaf in tensors:
        staged.append(StagedTensor(leaf.key, leaf.dtype, leaf.global_shape, leaf.box.shape, leaf.box.offset, at))
        at += -(-leaf.nbytes // ALIGNMENT) * ALIGNMENT
    return staged, at


def copy_in(arena: Arena, tensors: Sequence[TensorLeaf], staged: Sequence[StagedTensor]) -> None:
    """Copies tensors to their places: each byte once. Returns when the state may change."""
    devices = set()
    for leaf, place in zip(tensors, staged, strict=True):
        target = arena.view(place)
        source = leaf.tensor.reshape(place.shape)
        target.copy_(source, non_blocking=source.is_cuda)
        if source.is_cuda:
            devices.add(source.device)
    for device in devices:
        torch.cuda.synchronize(device)


class Pool:
    """The arenas of one rank.

    Args:
        generations: how many saves may be staged at once.
        budget: bytes of all arenas together; None: no limit.
    """

    def __init__(self, generations: int = 2, budget: int | None = None) -> None:
        self._generations = generations
        self._budget = budget
        self._free: list[Arena] = []
        self._used: list[Arena] = []
        self._closed = False
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas."""
        with self._lock:
            return sum(arena.size for arena in (*self._free, *self._used))

    def take(self, nbytes: int) -> Arena:
        """An arena of at least `nbytes` that nobody reads from; `give_back` it.

        Raises:
            StagingError: all generations are in use, or the budget or the memory does not suffice.
        """
        with self._lock:
            if len(self._used) >= self._generations:
                raise StagingError(f"all {self._generations} staging arenas are still being written from")
            fitting = sorted((arena for arena in self._free if arena.size >= nbytes), key=lambda arena: arena.size)
            if fitting:
                self._free.remove(fitting[0])
                self._used.append(fitting[0])
                return fitting[0]
            # What is too small now will be too small again: its memory goes to the larger one.
            held = sum(arena.size for arena in (*self._free, *self._used))
            limit = math.inf if self._budget is None else self._budget
            while self._free and (len(self._free) + len(self._used) >= self._generations or held + nbytes > limit):
                held -= self._free[-1].size
                self._free.pop().close()
            if self._budget is not None and held + nbytes > self._budget:
                raise StagingError(
                    f"a save of {nbytes / 2**20:.0f} MiB does not fit into the staging budget of "
                    f"{self._budget / 2**20:.0f} MiB, {held / 2**20:.0f} of which are in use"
                )
            arena = Arena(nbytes)
            self._used.append(arena)
            return arena

    def give_back(self, arena: Arena) -> None:
        """Says that nobody reads from an arena any more."""
        with self._lock:
            self._used.remove(arena)
            if self._closed:
                arena.close()
            else:
                self._free.append(arena)

    def prepare(self, nbytes: int) -> None:
        """Makes all arenas, so that the first saves find warm memory too.

        Raises:
            StagingError: as `take`.
        """
        taken: list[Arena] = []
        try:
            for _ in range(self._generations - len(self._used)):
                taken.append(self.take(nbytes))  # noqa: PERF401 - what there is until one fails
        finally:
            for arena in taken:
                self.give_back(arena)

    def close(self) -> None:
        """Gives all memory back; saves that are still written keep theirs until they give it back."""
        with self._lock:
            self._closed = True
            for arena in self._free:
                arena.close()
            self._free = []


def unstage(package: Package, arena: Arena, staged: Sequence[StagedTensor]) -> Package:
    """The package with its tensors in the arena."""
    return replace(package, tensors=tuple(arena.leaf(place) for place in staged))
