"""Reads parts of stored chunks straight into tensors (R3): exact bytes, coalesced, no copy where memory allows.

A destination is any strided CPU tensor whose last axis is dense, a DTensor's local part or a narrowed view: each run
of elements that is contiguous on both sides is read to its place. Runs that are neighbours in the file travel in one
request, whatever the gaps between their places. Anything else (another device) goes through one scratch tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from isal import isal_zlib

from ckptlib import storage as st
from ckptlib.errors import IntegrityError, UnsupportedError
from ckptlib.index import UNKNOWN, ChunkItem, Location
from ckptlib.read_plan import contiguous_runs
from ckptlib.sharding import Box
from ckptlib.source import Source
from ckptlib.state import memory_of

READERS = 4
"""Batches that are read side by side: enough to keep a disk and some cores busy, few enough for 16 ranks on a host."""

BATCH_BYTES = 32 * 1024 * 1024
"""Neighbours in a file that one reader takes together."""


@dataclass(frozen=True)
class Fetch:
    """One box of one stored chunk, and where its elements go.

    Attributes:
        box: relative to the chunk.
        target: a view with the shape of `box`.
        begin: called before `target` is changed.
    """

    item: ChunkItem
    box: Box
    target: torch.Tensor
    begin: Callable[[], None] = lambda: None


@dataclass
class Traffic:
    """Payload bytes and contiguous ranges that were read."""

    bytes: int = 0
    requests: int = 0

    def __iadd__(self, other: Traffic) -> Traffic:
        self.bytes += other.bytes
        self.requests += other.requests
        return self


def fetch_all(source: Source, fetches: Sequence[Fetch]) -> Traffic:
    """Reads everything in file order, in batches side by side.

    Raises:
        OSError: the storage failed.
        IntegrityError: a whole chunk does not have its recorded CRC-32.
        Whatever happened first; reads that were under way have ended by then.
    """
    batches = _batches(sorted(fetches, key=lambda fetch: (fetch.item.location.file, fetch.item.location.offset)))
    total = Traffic()
    if len(batches) < 2:
        for batch in batches:
            total += _fetch_batch(source, batch)
        return total
    with ThreadPoolExecutor(min(READERS, len(batches)), thread_name_prefix="ckptlib-read") as pool:
        futures = [pool.submit(_fetch_batch, source, batch) for batch in batches]
        try:
            for future in futures:
                total += future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    return total


def _batches(fetches: Sequence[Fetch]) -> list[list[Fetch]]:
    """Cuts an ordered list where the file changes and where a batch is large enough."""
    batches: list[list[Fetch]] = []
    size = 0
    for fetch in fetches:
        if not batches or size >= BATCH_BYTES or fetch.item.location.file != batches[-1][0].item.location.file:
            batches.append([])
            size = 0
        batches[-1].append(fetch)
        size += fetch.box.volume * fetch.target.element_size()
    return batches


def _fetch_batch(source: Source, fetches: Sequence[Fetch]) -> Traffic:
    traffic = Traffic()
    for fetch in fetches:
        traffic += fetch_one(source, fetch)
    return traffic


def fetch_one(source: Source, fetch: Fetch) -> Traffic:
    """Reads one box; see `fetch_all`."""
    if fetch.box.volume == 0:
        return Traffic()
    try:
        location = source.locate(fetch.item)
    except UnsupportedError:  # its elements do not lie in order: torch reads it whole, as it reads everything
        return _fetch_whole(source, fetch)
    direct = _is_direct(fetch.target)
    landing = fetch.target if direct else torch.empty(fetch.box.shape, dtype=fetch.target.dtype)
    itemsize = landing.element_size()
    from_, to, length = contiguous_runs(fetch.box, fetch.item.box.shape, landing.stride())
    nbytes = length * itemsize
    # Places are counted in the whole storage: strides of a view mean nothing to its own memory.
    memory = _storage_memory(landing)
    base = int(landing.storage_offset()) * itemsize
    starts: list[int] = (from_ * itemsize + location.payload_offset).tolist()
    places: list[int] = (to * itemsize + base).tolist()
    ranges = [(at, memory[place : place + nbytes]) for at, place in zip(starts, places, strict=True)]
    if direct:
        fetch.begin()
    source.storage.read_into(st.join(source.path, location.file), ranges)
    if location.crc32 != UNKNOWN and fetch.box.shape == fetch.item.box.shape:
        _check_crc(source, fetch.item.key, location, [view for _, view in ranges])
    if not direct:
        fetch.begin()
        fetch.target.copy_(landing)
    return Traffic(nbytes * len(ranges), st.count_requests(ranges))


def _fetch_whole(source: Source, fetch: Fetch) -> Traffic:
    chunk = source.read_chunk(fetch.item)
    where = tuple(slice(o, e) for o, e in zip(fetch.box.offset, fetch.box.end, strict=True))
    fetch.begin()
    fetch.target.copy_(chunk[where])
    return Traffic(chunk.nbytes, 1)


def _is_direct(target: torch.Tensor) -> bool:
    """Whether runs of the target are runs of memory that this process can read into."""
    if target.device.type != "cpu" or target.is_conj() or target.is_neg():
        return False
    dense = [stride for size, stride in zip(target.shape, target.stride(), strict=True) if size != 1]
    return not dense or (dense[-1] == 1 and 0 not in dense)


def _storage_memory(tensor: torch.Tensor) -> memoryview:
    return memory_of(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))


def _check_crc(source: Source, key: str, location: Location, views: Sequence[memoryview]) -> None:
    found = 0
    for view in views:
        found = isal_zlib.crc32(view, found)
    if found != location.crc32:
        raise IntegrityError(
            f"tensor {key!r}: damaged in {source.url}/{location.file} at byte {location.payload_offset}: CRC-32 "
            f"{found:08x}, written {location.crc32:08x}"
        )
