"""Reads parts of stored chunks straight into tensors (R3): exact bytes, coalesced, no copy where memory allows.

A target is any strided CPU tensor whose last axis is dense, a DTensor's local part or a narrowed view: each run of
elements that is contiguous on both sides is read to its place. Runs that are neighbours in the file travel in one
request, whatever the gaps between their places; very many short runs, columns of a matrix, travel as one table.
Anything else (another device, another dtype) goes through a scratch tensor of about `SCRATCH_BYTES`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from isal import isal_zlib

from ckptlib import storage as st
from ckptlib.errors import IntegrityError
from ckptlib.index import UNKNOWN, ChunkItem
from ckptlib.read_plan import Int64s, ReadPlan, as_rows, contiguous_runs, first_runs, slabs
from ckptlib.source import Source
from ckptlib.state import memory_of
from ckptlib.tiling import padded

READERS = 4
"""Batches that are read side by side: enough to keep a disk and some cores busy, few enough for 16 ranks on a host."""

BATCH_BYTES = 32 * 1024 * 1024
"""Neighbours in a file that one reader takes together. Longer runs are cut, for several readers."""

SCRATCH_BYTES = 32 * 1024 * 1024
"""What does not land in place is read in slabs of about this size."""


@dataclass(frozen=True)
class Target:
    """Where the elements of one request go.

    Attributes:
        tensor: a view with the axes of the requested box.
        dtype: as stored; values are converted when the tensor has another.
    """

    key: str
    tensor: torch.Tensor
    dtype: torch.dtype


@dataclass
class Traffic:
    """Payload bytes that were read, with the index those that it repeats, and contiguous ranges of files."""

    bytes: int = 0
    requests: int = 0

    def __iadd__(self, other: Traffic) -> Traffic:
        self.bytes += other.bytes
        self.requests += other.requests
        return self


def fetch_all(
    source: Source, plan: ReadPlan, targets: Sequence[Target], begin: Callable[[str], object] = lambda key: None
) -> Traffic:
    """Reads everything in file order, in batches side by side.

    Args:
        plan: its requests are the rows of `targets`.
        begin: called with a target's key before the target is changed; by several threads.

    Raises:
        OSError: the storage failed.
        IntegrityError: a whole chunk does not have its recorded CRC-32.
        Whatever happened first; reads that were under way have ended by then.
    """
    in_index = np.array([target.key in source.index.repeated for target in targets], bool)[plan.request]
    total = _take_from_index(source, plan.take(np.flatnonzero(in_index)), targets, begin)
    fetcher = _Fetcher(source, plan.take(np.flatnonzero(~in_index)).in_file_order(), targets, begin)
    batches = list(fetcher.batches())
    if len(batches) < 2:
        for batch in batches:
            total += fetcher.fetch(batch)
        return total
    with ThreadPoolExecutor(min(READERS, len(batches)), thread_name_prefix="ckptlib-read") as pool:
        futures = [pool.submit(fetcher.fetch, batch) for batch in batches]
        try:
            for future in futures:
                total += future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    return total


def _take_from_index(
    source: Source, plan: ReadPlan, targets: Sequence[Target], begin: Callable[[str], object]
) -> Traffic:
    """Small whole tensors that the index repeats: their payloads have come with it."""
    total = Traffic()
    for row in range(len(plan)):
        target = targets[plan.request[row]]
        data = torch.frombuffer(bytearray(source.index.repeated[target.key]), dtype=target.dtype)
        chunk = data.view(plan.chunk_sizes[row].tolist())
        for axis, (first, size) in enumerate(zip(plan.source[row].tolist(), plan.sizes[row].tolist(), strict=True)):
            chunk = chunk.narrow(axis, first, size)
        view = _view(plan, row, target.tensor)
        begin(target.key)
        view.copy_(chunk.reshape(view.shape))
        total += Traffic(chunk.nbytes)
    return total


@dataclass(frozen=True, slots=True)
class _Slice:
    """One of `count` slices of `BATCH_BYTES`, the last one shorter, of a part that is one large run."""

    row: int
    number: int
    count: int


class _Fetcher:
    """One load: the plan in file order, and for each of its rows where it begins on both sides."""

    def __init__(
        self, source: Source, plan: ReadPlan, targets: Sequence[Target], begin: Callable[[str], object]
    ) -> None:
        self._source = source
        self._plan = plan
        self._targets = targets
        self._begin = begin
        self._memories: list[memoryview | None] = [_memory(target) for target in targets]
        self._itemsizes = np.array([target.dtype.itemsize for target in targets], np.int64)[plan.request]
        bases = np.array([target.tensor.storage_offset() for target in targets], np.int64)[plan.request]
        self._strides = padded([target.tensor.stride() for target in targets], plan.sizes.shape[1], 0)
        from_, to, length = first_runs(plan, self._strides[plan.request])
        volumes = plan.volumes
        self._from = from_ * self._itemsizes
        self._places = (to + bases) * self._itemsizes
        self._nbytes = volumes * self._itemsizes
        self._is_one_run = length == volumes
        self._whole = plan.whole
        self._lock = threading.Lock()
        self._slices: dict[int, dict[int, int]] = {}

    def batches(self) -> Iterator[slice | _Slice]:
        """Cuts the plan where the file changes and where a batch is large enough; and runs that are very large."""
        if not len(self._plan):
            return
        filled = np.cumsum(self._nbytes)
        direct = np.array([memory is not None for memory in self._memories], bool)[self._plan.request]
        large = np.flatnonzero(
            direct & self._is_one_run & (self._nbytes >= 2 * BATCH_BYTES) & (self._plan.locations[:, 2] != UNKNOWN)
        )
        new_file = np.flatnonzero(np.diff(self._plan.file)) + 1
        alone = {*large.tolist()}
        start = 0
        for stop in sorted({*new_file.tolist(), *alone, *(row + 1 for row in alone), len(self._plan)}):
            if start in alone and start < stop:
                count = -(-int(self._nbytes[start]) // BATCH_BYTES)
                yield from (_Slice(start, number, count) for number in range(count))
                start = stop
            while start < stop:
                before = int(filled[start - 1]) if start else 0
                end = min(stop, int(np.searchsorted(filled, before + BATCH_BYTES)) + 1)
                yield slice(start, end)
                start = end

    def fetch(self, batch: slice | _Slice) -> Traffic:
        """Reads rows that lie in one file, or a slice of one of them."""
        return self._fetch_slice(batch) if isinstance(batch, _Slice) else self._fetch_rows(batch)

    def _fetch_slice(self, part: _Slice) -> Traffic:
        row, first = part.row, part.number * BATCH_BYTES
        memory = self._memories[self._plan.request[row]]
        assert memory is not None  # else it is not cut
        length = min(BATCH_BYTES, int(self._nbytes[row]) - first)
        place = int(self._places[row]) + first
        view = memory[place : place + length]
        self._begin(self._targets[self._plan.request[row]].key)
        start = int(self._plan.locations[row, 2] + self._from[row]) + first
        self._source.storage.read_into(self._path(row), [(start, view)])
        crc = int(self._plan.locations[row, 4])
        if self._whole[row] and crc != UNKNOWN:
            found = isal_zlib.crc32(view)
            with self._lock:
                found_of = self._slices.setdefault(row, {})
                found_of[part.number] = found
                complete = len(found_of) == part.count
            if complete:
                total = 0
                for number in range(part.count):
                    size = min(BATCH_BYTES, int(self._nbytes[row]) - number * BATCH_BYTES)
                    total = isal_zlib.crc32_combine(total, found_of[number], size)
                self._compare(row, total, crc)
        return Traffic(length, int(part.number == 0))

    def _fetch_rows(self, rows: slice) -> Traffic:
        plan = self._plan
        path = self._path(rows.start)
        locations, unordered = self._locate(rows)
        traffic = Traffic()
        starts: list[int] = []
        views: list[memoryview] = []
        checks: list[tuple[int, int, slice]] = []
        tables: list[tuple[int, int, npt.NDArray[np.uint8]]] = []
        elsewhere: list[tuple[int, int, int]] = []
        crcs = np.where(self._whole[rows], locations[:, 4], UNKNOWN).tolist()
        columns = (
            range(rows.start, rows.stop),
            plan.request[rows].tolist(),
            (locations[:, 2] + self._from[rows]).tolist(),
            self._places[rows].tolist(),
            self._nbytes[rows].tolist(),
            self._is_one_run[rows].tolist(),
            crcs,
        )
        for row, request, start, place, nbytes, is_one_run, crc in zip(*columns, strict=True):
            if row in unordered:
                continue
            memory = self._memories[request]
            if memory is None:
                elsewhere.append((row, start, crc))
                continue
            first = len(views)
            if is_one_run:
                starts.append(start)
                views.append(memory[place : place + nbytes])
            else:
                from_, to, length = self._runs(row)
                if (strides := as_rows(from_, to, length)) is not None:
                    tables.append((start, strides[0], _rows(memory, place, strides[1], len(to), length)))
                    continue
                starts += (from_ + start).tolist()
                views += [memory[at : at + length] for at in (to + place).tolist()]
            if crc != UNKNOWN:
                checks.append((row, crc, slice(first, len(views))))
        for request in np.unique(plan.request[rows]).tolist():
            if self._memories[request] is not None:
                self._begin(self._targets[request].key)
        if views:
            self._source.storage.read_into(path, list(zip(starts, views, strict=True)))
            traffic += _traffic(starts, views)
        for start, stride, table in tables:
            self._source.storage.read_rows(path, start, stride, table)
            traffic += Traffic(table.size, len(table))
        for row, crc, which in checks:
            found = 0
            for view in views[which]:
                found = isal_zlib.crc32(view, found)
            self._compare(row, found, crc)
        for row, start, crc in elsewhere:
            traffic += self._fetch_by_slabs(path, row, start, crc)
        for row in sorted(unordered):
            traffic += self._fetch_whole(row)
        return traffic

    def _path(self, row: int) -> str:
        return st.join(self._source.path, self._source.index.files[int(self._plan.file[row])])

    def _locate(self, rows: slice) -> tuple[Int64s, frozenset[int]]:
        """Locations with payload offsets, and the rows whose elements do not lie in order."""
        locations = self._plan.locations[rows]
        unknown = (np.flatnonzero(locations[:, 2] == UNKNOWN) + rows.start).tolist()
        if not unknown:
            return locations, frozenset()
        locations = locations.copy()
        found, unordered = self._source.locate([self._item(row) for row in unknown])
        for row, location in zip(unknown, found, strict=True):
            if location is not None:
                locations[row - rows.start] = (
                    location.offset,
                    location.length,
                    location.payload_offset,
                    location.payload_length,
                    location.crc32,
                )
        return locations, frozenset(unknown[i] for i in unordered)

    def _runs(self, row: int) -> tuple[Int64s, Int64s, int]:
        """A part that is several runs: where they begin in the chunk and in the target, from the first on; bytes."""
        target_strides = self._strides[self._plan.request[row]].tolist()
        from_, to, length = contiguous_runs(self._shape(row), self._source_strides(row), target_strides)
        itemsize = int(self._itemsizes[row])
        return from_ * itemsize, to * itemsize, length * itemsize

    def _fetch_by_slabs(self, path: str, row: int, start: int, crc: int) -> Traffic:
        """A part that does not land in place, slab by slab."""
        target = self._targets[self._plan.request[row]]
        view = _view(self._plan, row, target.tensor)
        shape, strides, itemsize = self._shape(row), self._source_strides(row), int(self._itemsizes[row])
        traffic, found, done = Traffic(), 0, 0
        for offset, slab in slabs(shape, max(1, SCRATCH_BYTES // itemsize)):
            landing = torch.empty(slab, dtype=target.dtype)
            memory = memory_of(landing)
            at = start + sum(o * s for o, s in zip(offset, strides, strict=True)) * itemsize
            from_, to, length = contiguous_runs(slab, strides, _row_major(slab))
            nbytes = length * itemsize
            if (steps := as_rows(from_ * itemsize, to * itemsize, nbytes)) is not None:
                table = _rows(memory, 0, steps[1], len(to), nbytes)
                self._source.storage.read_rows(path, at, steps[0], table)
                traffic += Traffic(table.size, len(table))
            else:
                starts = (from_ * itemsize + at).tolist()
                views = [memory[two : two + nbytes] for two in (to * itemsize).tolist()]
                self._source.storage.read_into(path, list(zip(starts, views, strict=True)))
                traffic += _traffic(starts, views)
            if crc != UNKNOWN:
                found = isal_zlib.crc32(memory, found)
                done += len(memory)
                if done == self._nbytes[row]:
                    self._compare(row, found, crc)
            self._begin(target.key)
            part = view[tuple(slice(o, o + n) for o, n in zip(offset[: view.dim()], slab, strict=False))]
            part.copy_(landing.reshape(part.shape))
        return traffic

    def _fetch_whole(self, row: int) -> Traffic:
        """A part of a chunk whose elements do not lie in order: torch reads it whole, as it reads everything."""
        chunk = self._source.read_chunk(self._item(row))
        ndim = chunk.dim()
        where = tuple(
            slice(first, first + size)
            for first, size in zip(self._plan.source[row, :ndim].tolist(), self._shape(row)[:ndim], strict=True)
        )
        target = self._targets[self._plan.request[row]]
        self._begin(target.key)
        view = _view(self._plan, row, target.tensor)
        view.copy_(chunk[where].reshape(view.shape))
        return Traffic(chunk.nbytes, 1)

    def _compare(self, row: int, found: int, crc: int) -> None:
        if found != crc:
            item = self._item(row)
            raise IntegrityError(
                f"tensor {item.key!r}: damaged in {self._source.url}/{item.location.file}, chunk {item.box}: CRC-32 "
                f"{found:08x}, written {crc:08x}"
            )

    def _shape(self, row: int) -> list[int]:
        shape: list[int] = self._plan.sizes[row].tolist()
        return shape

    def _source_strides(self, row: int) -> list[int]:
        return _row_major(self._plan.chunk_sizes[row].tolist())

    def _item(self, row: int) -> ChunkItem:
        index = self._source.index
        info = index.tensor(self._targets[self._plan.request[row]].key)
        return index.chunk_item(info, index.chunks(info.key), int(self._plan.chunk[row]))


def _view(plan: ReadPlan, row: int, tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a target that a part fills."""
    offset, shape = plan.target[row].tolist(), plan.sizes[row].tolist()
    view: torch.Tensor = tensor[tuple(slice(offset[axis], offset[axis] + shape[axis]) for axis in range(tensor.dim()))]
    return view


def _rows(memory: memoryview, place: int, stride: int, count: int, length: int) -> npt.NDArray[np.uint8]:
    """Rows of equal length in a memory, as one table."""
    flat = np.frombuffer(memory, np.uint8)[place : place + (count - 1) * stride + length]
    return np.lib.stride_tricks.as_strided(flat, (count, length), (stride, 1))


def _traffic(starts: Sequence[int], views: Sequence[memoryview]) -> Traffic:
    """What was read; ranges that touch are one request."""
    begin, length = np.array(starts, np.int64), np.fromiter(map(len, views), np.int64, len(views))
    return Traffic(int(length.sum()), 1 + int(np.count_nonzero(begin[1:] != begin[:-1] + length[:-1])))


def _row_major(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides


def _memory(target: Target) -> memoryview | None:
    """The whole storage behind a target, if runs of it are runs of memory that this process can read into.

    Places are counted in the storage: strides of a view mean nothing to its own memory.
    """
    tensor = target.tensor
    if tensor.dtype != target.dtype or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return None
    dense = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    if dense and (dense[-1] != 1 or 0 in dense):
        return None
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return memoryview(whole.numpy())  # type: ignore[arg-type]  # ndarray is a buffer
