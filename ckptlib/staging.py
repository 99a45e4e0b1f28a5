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
from dataclasses import dataclass

import torch

from ckptlib import memory
from ckptlib.errors import StagingError
from ckptlib.sharding import Box
from ckptlib.state import TensorLeaf, dtype_of

USABLE = 0.9
"""Of the memory that is free: the rest is for whoever did not ask first."""

REUSABLE = 0.75
"""Of the size that a new arena could have: below that an old one makes way for it."""

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
        self._made = fd is None
        try:
            self.fd = os.memfd_create("ckptlib-staging") if fd is None else fd
            try:
                if self._made:
                    os.ftruncate(self.fd, self.size)
                flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if self._made else 0)
                self._map = mmap.mmap(self.fd, self.size, flags=flags)
            except BaseException:
                os.close(self.fd)
                raise
        except (OSError, ValueError) as error:
            raise StagingError(f"no {self.size / 2**20:.0f} MiB of memory for staging: {error}") from error
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned: torch.device | None = None
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

    def pin(self, device: torch.device) -> None:
        """Locks the pages for copies from a GPU, which then run beside everything else; again: does nothing.

        Args:
            device: of this process: on another one the driver would take memory for nothing.

        Raises:
            StagingError: the driver refuses.
        """
        if self._pinned is None:
            with torch.cuda.device(device):
                refused = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self.size, 0)
            if int(refused) != 0:
                raise StagingError(f"{self.size / 2**20:.0f} MiB for staging could not be page-locked: {refused}")
            self._pinned = device

    def close(self) -> None:
        """Gives the memory back, when nobody reads from it any more. The mapping itself ends with its last view.

        Whoever made it takes the pages from all who map them: a worker learns only with its next save that an arena is
        not used any more, and until then a larger one would stand beside it.
        """
        self.closed = True
        if self._pinned is not None:
            with torch.cuda.device(self._pinned):
                torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        if self._made:
            os.ftruncate(self.fd, 0)
        os.close(self.fd)
        del self._bytes, self._map


def aligned(nbytes: int) -> int:
    """Bytes that a tensor of `nbytes` takes in an arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def layout(tensors: Sequence[TensorLeaf], at: int = 0) -> tuple[list[StagedTensor], int]:
    """Places for tensors, one after the other from `at` on, and where they end."""
    staged = []
    for leaf in tensors:
        staged.append(StagedTensor(leaf.key, leaf.dtype, leaf.global_shape, leaf.box.shape, leaf.box.offset, at))
        at += aligned(leaf.nbytes)
    return staged, at


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
    def has_room(self) -> bool:
        """Whether a further save may be staged."""
        with self._lock:
            return len(self._used) < self._generations

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas."""
        with self._lock:
            return sum(arena.size for arena in (*self._free, *self._used))

    def take(self, nbytes: int, least: int | None = None) -> Arena:
        """An arena that nobody reads from; `give_back` it.

        Args:
            nbytes: of the arena.
            least: where there is not so much, one of the size that there is will do, from `least` bytes on.

        Raises:
            StagingError: all generations are in use, or the budget or the memory does not suffice.
        """
        with self._lock:
            if len(self._used) >= self._generations:
                raise StagingError(
                    f"all {self._generations} staging arenas are still being written from; raise max_in_flight, or wait"
                )
            fitting = sorted((arena for arena in self._free if arena.size >= nbytes), key=lambda arena: arena.size)
            if not fitting:
                fitting = [self._make(nbytes, least)]
            arena = fitting[0]
            if arena in self._free:
                self._free.remove(arena)
            self._used.append(arena)
            return arena

    def _make(self, nbytes: int, least: int | None) -> Arena:
        """A new arena, or a free one that is as large as one can be. What is too small now will be too small again: its
        memory goes to the larger one."""
        free, used = (sum(arena.size for arena in arenas) for arenas in (self._free, self._used))
        left = memory.available_bytes()
        if left is not None:  # the other ranks of the node look at the same memory, at the same moment
            left = int(left * USABLE) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        room = math.inf if left is None else free + left
        if self._budget is not None:
            room = min(room, self._budget - used)
        size = nbytes
        if size > room:
            if least is None or room < least:
                limit = "free memory" if self._budget is None or room != self._budget - used else "the staging_budget"
                raise StagingError(
                    f"a save of {nbytes / 2**20:.0f} MiB does not fit into {limit}: {max(0, room) / 2**20:.0f} MiB are "
                    f"left, beside {used / 2**20:.0f} MiB of saves in flight. Give staging more memory, or save less."
                )
            # The saves after it want some too.
            if self._budget is not None:
                room = min(room, max(self._budget // self._generations, least))
            elif left is not None:
                room = max(free + left // (self._generations - len(self._used)), least)
            size = int(room) // mmap.PAGESIZE * mmap.PAGESIZE
            large = [arena for arena in self._free if arena.size >= size * REUSABLE]
            if large:
                return large[0]
        while self._free and (len(self._free) + len(self._used) >= self._generations or free + size > room):
            free -= self._free[-1].size
            self._free.pop().close()
        return Arena(size)

    def give_back(self, arena: Arena) -> None:
        """Says that nobody reads from an arena any more."""
        with self._lock:
            self._used.remove(arena)
            if self._closed:
                arena.close()
            else:
                self._free.append(arena)

    def prepare(self, nbytes: int, least: int | None = None) -> None:
        """Makes all arenas, so that the first saves find warm memory too.

        Args:
            nbytes, least: of each; see `take`.

        Raises:
            StagingError: as `take`.
        """
        taken: list[Arena] = []
        try:
            for _ in range(self._generations - len(self._used)):
                taken.append(self.take(nbytes, least))  # noqa: PERF401 - what there is until one fails
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
