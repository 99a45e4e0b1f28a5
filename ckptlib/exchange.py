"""`load_parallelism="dp"`: ranks tell each other what they need, each byte is read once, and sent where it is needed.

The only place where a load uses collectives, and only on the process group that the caller names. Readers read into
their own tensors, which are then the source of what they send, so that nothing is kept twice; messages are packed into
buffers of `BUCKET_BYTES` a rank at most, in rounds that every rank computes alike.
"""

from __future__ import annotations

import datetime
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ckptlib import sharing
from ckptlib.errors import StateError
from ckptlib.fetch import Target
from ckptlib.index import ItemIndex
from ckptlib.read_plan import ReadPlan
from ckptlib.sharing import Int64s, Units, Wishes

BUCKET_BYTES = 32 * 1024 * 1024
"""What a rank sends, and what it receives, in one round."""

PIECE_BYTES = 4 * 1024 * 1024
"""What travels is cut into pieces of about this size, so that several readers share a bucket."""

ALIGNMENT = 16
"""Pieces start at multiples of this in a message: any dtype may lie there."""


class _Piece(NamedTuple):
    """Rows [start, stop) along `axis` of a unit, or all of a unit that has no axis longer than 1."""

    unit: int
    axis: int
    start: int
    stop: int
    nbytes: int


class _Message(NamedTuple):
    """What one rank sends to some others in one round."""

    reader: int
    receivers: tuple[int, ...]
    pieces: list[_Piece]

    @property
    def nbytes(self) -> int:
        return sum(-(-piece.nbytes // ALIGNMENT) * ALIGNMENT for piece in self.pieces)


@dataclass
class Exchange:
    """One rank's part in a shared load: `open` and `run` are collective, `assign` is not.

    Attributes:
        plan, targets: what this rank needs.
        wishes: what all ranks need.
        units: who reads what; after `assign`.
    """

    rank: int
    world_size: int
    plan: ReadPlan
    targets: Sequence[Target]
    wishes: Wishes
    group: dist.ProcessGroup | None
    timeout: float
    units: Units | None = None

    @classmethod
    def open(
        cls,
        group: dist.ProcessGroup | None,
        needs: Int64s,
        plan: ReadPlan,
        targets: Sequence[Target],
        timeout: float,
    ) -> Exchange:
        """Tells all ranks of a process group what each of them needs. Collective.

        Args:
            group: None: the default one.
            needs: see `needs_of`.
            plan: what this rank needs; its requests are the rows of `targets`.
            timeout: seconds that `run` waits for a message.
        """
        tables = _gather(needs, group)
        return cls(dist.get_rank(group), len(tables), plan, targets, _wishes(tables), group, timeout)

    def assign(self) -> None:
        """Who reads what."""
        self.units = sharing.share(self.wishes, self.world_size)

    def share(self) -> ReadPlan:
        """What this rank reads, as a plan for its own targets."""
        units = self._units()
        mine = np.flatnonzero(units.rank == self.rank)
        _, first = np.unique(units.unit[mine], return_index=True)
        mine = mine[first]
        return self._rows(mine[units.reader[units.unit[mine]] == self.rank])

    def run(self, begin: Callable[[str], object]) -> int:
        """Sends what this rank read to those that need it, and receives what they read. Collective.

        A failure here does not keep the others waiting: it is raised when all rounds are over.

        Args:
            begin: called with a target's key before the target is changed.

        Returns:
            Payload bytes received.

        Raises:
            RuntimeError: a rank is gone, or did not answer in time.
        """
        failure: Exception | None = None
        received = 0
        try:
            self._copy_own(begin)
        except Exception as error:  # noqa: BLE001 - raised below
            failure = error
        for messages in self._rounds():
            outgoing = [message for message in messages if message.reader == self.rank]
            incoming = [message for message in messages if self.rank in message.receivers]
            buffers = [torch.empty(message.nbytes, dtype=torch.uint8, device=self._device()) for message in outgoing]
            landings = [torch.empty(message.nbytes, dtype=torch.uint8, device=self._device()) for message in incoming]
            if failure is None:
                try:
                    for message, buffer in zip(outgoing, buffers, strict=True):
                        self._pack(message, buffer)
                except Exception as error:  # noqa: BLE001 - raised below
                    failure = error
            self._transfer(messages, buffers, landings)
            if failure is None:
                try:
                    for message, landing in zip(incoming, landings, strict=True):
                        received += self._unpack(message, landing, begin)
                except Exception as error:  # noqa: BLE001 - raised below
                    failure = error
        if failure is not None:
            raise failure
        return received

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _rounds(self) -> Iterator[list[_Message]]:
        """Messages of all ranks, alike on all: as many at once as no rank's buckets overflow of."""
        out, into = [0] * self.world_size, [0] * self.world_size
        messages: dict[tuple[int, tuple[int, ...]], _Message] = {}
        for reader, receivers, piece in self._pieces():
            size = -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
            full = out[reader] + size > BUCKET_BYTES or any(into[rank] + size > BUCKET_BYTES for rank in receivers)
            if messages and full:
                yield list(messages.values())
                out, into = [0] * self.world_size, [0] * self.world_size
                messages = {}
            out[reader] += size
            for rank in receivers:
                into[rank] += size
            messages.setdefault((reader, receivers), _Message(reader, receivers, [])).pieces.append(piece)
        if messages:
            yield list(messages.values())

    def _pieces(self) -> Iterator[tuple[int, tuple[int, ...], _Piece]]:
        """Everything that travels, the readers in turn, so that all of them send in every round."""
        units = self._units()
        begins = np.searchsorted(units.unit, np.arange(len(units.reader) + 1)).tolist()
        ranks: list[int] = units.rank.tolist()
        queues: list[list[tuple[int, tuple[int, ...], _Piece]]] = [[] for _ in range(self.world_size)]
        for unit, reader in enumerate(units.reader.tolist()):
            receivers = tuple(sorted({*ranks[begins[unit] : begins[unit + 1]]} - {reader}))
            if receivers:
                queues[reader] += [(reader, receivers, piece) for piece in self._cut(unit)]
        for together in itertools.zip_longest(*queues):
            yield from (entry for entry in together if entry is not None)

    def _cut(self, unit: int) -> Iterator[_Piece]:
        units = self._units()
        sizes: list[int] = units.sizes[unit].tolist()
        nbytes = int(units.nbytes[unit])
        axis = next((axis for axis, size in enumerate(sizes) if size != 1), 0)
        length = sizes[axis]
        step = max(1, PIECE_BYTES * length // nbytes)
        for start in range(0, length, step):
            stop = min(start + step, length)
            yield _Piece(unit, axis, start, stop, nbytes // length * (stop - start))

    def _transfer(
        self, messages: Sequence[_Message], buffers: Sequence[torch.Tensor], landings: Sequence[torch.Tensor]
    ) -> None:
        waiting_buffers, waiting_landings = iter(buffers), iter(landings)
        operations = []
        for tag, message in enumerate(messages):
            if message.reader == self.rank:
                buffer = next(waiting_buffers)
                operations += [
                    dist.P2POp(dist.isend, buffer, self._peer(rank), self.group, tag) for rank in message.receivers
                ]
            elif self.rank in message.receivers:
                landing = next(waiting_landings)
                operations.append(dist.P2POp(dist.irecv, landing, self._peer(message.reader), self.group, tag))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait(datetime.timedelta(seconds=self.timeout))

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _pack(self, message: _Message, buffer: torch.Tensor) -> None:
        for piece, part in _parts(message, buffer):
            view = self._view(self._entries(piece.unit)[0], piece)
            _as(part, view).copy_(_bits(view))

    def _unpack(self, message: _Message, landing: torch.Tensor, begin: Callable[[str], object]) -> int:
        for piece, part in _parts(message, landing):
            for entry in self._entries(piece.unit):
                view = self._view(entry, piece)
                begin(self._key(entry))
                _bits(view).copy_(_as(part, view))
        return sum(piece.nbytes for piece in message.pieces)

    def _copy_own(self, begin: Callable[[str], object]) -> None:
        """What this rank read and wants in several places."""
        units = self._units()
        mine = np.flatnonzero(units.rank == self.rank)
        again = mine[1:][units.unit[mine[1:]] == units.unit[mine[:-1]]]
        for entry in again[units.reader[units.unit[again]] == self.rank].tolist():
            unit = int(units.unit[entry])
            for piece in self._cut(unit):
                begin(self._key(entry))
                self._view(entry, piece).copy_(self._view(self._entries(unit)[0], piece))

    def _entries(self, unit: int) -> list[int]:
        """This rank's places for a unit."""
        units = self._units()
        low, high = np.searchsorted(units.unit, [unit, unit + 1])
        entries: list[int] = (low + np.flatnonzero(units.rank[low:high] == self.rank)).tolist()
        return entries

    def _view(self, entry: int, piece: _Piece) -> torch.Tensor:
        """The elements of this rank's target that a piece fills."""
        row = self._rows(np.array([entry]))
        tensor = self.targets[int(row.request[0])].tensor
        target, sizes = row.target[0].tolist(), row.sizes[0].tolist()
        where = [slice(target[axis], target[axis] + sizes[axis]) for axis in range(tensor.dim())]
        if where:
            first = target[piece.axis]
            where[piece.axis] = slice(first + piece.start, first + piece.stop)
        return tensor[tuple(where)]

    def _key(self, entry: int) -> str:
        return self.targets[int(self.plan.request[self._units().row[entry]])].key

    def _rows(self, entries: Int64s) -> ReadPlan:
        """This rank's plan, of the units of these entries alone."""
        units = self._units()
        plan = self.plan.take(units.row[entries])
        axes = plan.source.shape[1]
        source, sizes = units.source[units.unit[entries], :axes], units.sizes[units.unit[entries], :axes]
        return replace(plan, source=source, sizes=sizes, target=plan.target + source - plan.source)

    def _units(self) -> Units:
        assert self.units is not None  # `assign` comes first
        return self.units

    def _peer(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _device(self) -> torch.device:
        return device_of(self.group)


def check_member(group: dist.ProcessGroup | None) -> None:
    """Refuses a process group that this rank is not in, before a collective could wait for it.

    Raises:
        StateError: it is not.
    """
    if dist.is_initialized() and dist.get_rank(group) < 0:
        raise StateError("process_group: this rank is not in it; every rank names one that it is in")


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where the tensors lie that a process group can send: NCCL alone moves GPU memory only."""
    backend = dist.get_backend_config(group)
    if "gloo" in backend or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def needs_of(index: ItemIndex, plan: ReadPlan, targets: Sequence[Target]) -> Int64s:
    """What this rank needs, as a table for the others: tensor, chunk, dtype, itemsize, box."""
    numbers = {key: number for number, key in enumerate(index.keys)}
    tensor = np.array([numbers[target.key] for target in targets], np.int64)[plan.request]
    dtype = np.array([zlib.crc32(str(target.tensor.dtype).encode()) for target in targets], np.int64)[plan.request]
    itemsize = np.array([target.tensor.element_size() for target in targets], np.int64)[plan.request]
    columns = np.stack([tensor, plan.chunk.astype(np.int64), dtype, itemsize], axis=1)
    return np.concatenate([columns, plan.source, plan.sizes], axis=1)


def _gather(table: Int64s, group: dist.ProcessGroup | None) -> list[Int64s]:
    """One table, (n, columns), from each rank, whatever their sizes."""
    device = device_of(group)
    world_size = dist.get_world_size(group)
    shapes = [torch.empty(2, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(shapes, torch.tensor(table.shape, device=device), group=group)
    counts = [int(shape.prod()) for shape in shapes]
    own = torch.zeros(max(1, *counts), dtype=torch.int64, device=device)
    own[: table.size] = torch.from_numpy(np.ascontiguousarray(table).reshape(-1)).to(device)
    tables = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(tables, own, group=group)
    return [
        numbers[:count].cpu().numpy().reshape(shape.tolist())
        for numbers, count, shape in zip(tables, counts, shapes, strict=True)
    ]


def _wishes(tables: Sequence[Int64s]) -> Wishes:
    axes = max((table.shape[1] - 4) // 2 for table in tables)
    source, sizes = [], []
    for table in tables:
        own = (table.shape[1] - 4) // 2
        source.append(np.pad(table[:, 4 : 4 + own], ((0, 0), (0, axes - own))))
        sizes.append(np.pad(table[:, 4 + own :], ((0, 0), (0, axes - own)), constant_values=1))
    return Wishes(
        rank=np.repeat(np.arange(len(tables)), [len(table) for table in tables]),
        row=np.concatenate([np.arange(len(table)) for table in tables]),
        chunk=np.concatenate([table[:, :3] for table in tables]),
        source=np.concatenate(source),
        sizes=np.concatenate(sizes),
        itemsize=np.concatenate([table[:, 3] for table in tables]),
    )


def _parts(message: _Message, buffer: torch.Tensor) -> Iterator[tuple[_Piece, torch.Tensor]]:
    at = 0
    for piece in message.pieces:
        yield piece, buffer[at : at + piece.nbytes]
        at += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """One-byte dtypes as bytes: torch cannot copy all of them."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _as(part: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    bits: Any = _bits(view)
    return part.view(bits.dtype).view(bits.shape)
