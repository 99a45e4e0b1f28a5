"""`torch.distributed.checkpoint` with our commit, digests and exact reads: change one line.

    dcp.save(state, storage_writer=CkptWriter(url))
    dcp.load(state, storage_reader=CkptReader(url))

torch plans (its planners, its collectives); files, records, commit and reads are ours. What is written is a
``torch_dcp`` checkpoint that any `FileSystemReader` reads, and that appears only when it is committed.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ckptlib import commit, exported, exports
from ckptlib import storage as st
from ckptlib.errors import (
    CheckpointExistsError,
    CkptError,
    DtypeMismatchError,
    IntegrityError,
    SaveAbortedError,
    StateError,
    UnsupportedError,
)
from ckptlib.fetch import Target, fetch_all
from ckptlib.manifest import Begin, RankRecord
from ckptlib.overlap import wait_for_copies
from ckptlib.plan import values_digest
from ckptlib.read_plan import plan_boxes
from ckptlib.safe_pickle import load_metadata, load_object
from ckptlib.sharding import Box, names_cell
from ckptlib.source import Source, open_source
from ckptlib.state import TensorLeaf, dtype_of
from ckptlib.writer import Blob, write_rank_files

_NUMBER = re.compile(r"(\d+)$")


@dataclass(frozen=True)
class _Ticket:
    """What the coordinator tells each rank, inside torch's plan.

    A planner that keeps plans between saves (``enable_plan_caching=True``) hands a kept one to the writer, with the
    ticket of an earlier save, and drops the one that has just come. So a ticket leaves itself in `_arrived` when it is
    unpickled.
    """

    begin: Begin
    rank: int
    place: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.begin, self.rank, self.place)


_arrived: dict[str, _Ticket] = {}
"""By checkpoint directory: the newest ticket that reached this process and is not used yet."""

_names_of_ranks: dict[int, frozenset[str]] = {}
"""On the coordinator, by rank: the parts in the last whole plan. A planner that keeps plans sends none that it kept."""


def _arrive(begin: Begin, rank: int, place: str) -> _Ticket:
    ticket = _arrived[place] = _Ticket(begin, rank, place)
    return ticket


class CkptWriter(StorageWriter):
    """A torch `StorageWriter` that commits.

    Args:
        url: the checkpoint's directory; `dcp.save(checkpoint_id=...)` replaces it.
        iteration: recorded in the manifest; None: the number at the end of the directory's name, else 0.
        run: name of the run, for the manifest.
        on_exists: ``error`` or ``replace``, when a checkpoint is already committed there (W9).
        single_writer: see `ckptlib.save`.
        storage_options: see `ckptlib.storage.resolve`.

    Raises:
        CheckpointExistsError, SaveAbortedError, OSError: inside torch's `CheckpointException`, on the coordinator.
        DtypeMismatchError: likewise, when torch kept a plan (``enable_plan_caching=True``) and a tensor has another
            dtype now: torch does not compare them, and its metadata would be wrong.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        iteration: int | None = None,
        run: str | None = None,
        on_exists: str = "error",
        single_writer: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._options = (single_writer, storage_options)
        self._iteration = iteration
        self._run = run
        self._on_exists = on_exists
        self._rank = 0
        self._begin: Begin | None = None
        self._open(url)

    def _open(self, url: str | os.PathLike[str]) -> None:
        single_writer, options = self._options
        self._storage, self._path = st.resolve(os.fspath(url), options, single_writer=single_writer)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whatever has a path or an fsspec URL."""
        return _is_place(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins, elsewhere when `checkpoint_id` is given."""
        if checkpoint_id is not None:
            self._open(checkpoint_id)
        self._begin = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare on storage: directories come with the first file."""
        self._rank = kwargs.get("rank") or 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begins the save (W2, W9), on the coordinator."""
        saves = commit.list_saves(self._storage, self._path)
        committed = [save.save_id for save in saves if save.committed]
        if self._on_exists != "replace" and commit.is_committed(self._storage, self._path):
            raise CheckpointExistsError(
                f"{self._storage.url(self._path)}: Checkpoint already exists, and is committed. Save elsewhere, or use "
                "CkptWriter(..., on_exists='replace') to supersede it."
            )
        number = _NUMBER.search(st.basename(self._path))
        iteration = self._iteration if self._iteration is not None else int(number.group(1)) if number else 0
        self._begin = Begin(
            save_id=commit.new_save_id(0, after=[save.save_id for save in saves]),
            run=self._run,
            attempt=0,
            attempt_id=uuid.uuid4().hex,
            iteration=iteration,
            world_size=len(plans),
            plan_digest=_plan_digest(plans),
            semantic_type="TORCH_DCP",
            format="torch_dcp",
            contents=_contents(plans),
            replaces=tuple(committed),
        )
        self._storage.prepare(self._path, size=_planned_nbytes(plans), files=len(plans))
        commit.begin_save(self._storage, self._path, self._begin)
        tickets = [_Ticket(self._begin, rank, self._place) for rank in range(len(plans))]
        _arrived[self._place] = tickets[self._rank]  # the coordinator's own does not travel
        return [replace(plan, storage_data=ticket) for plan, ticket in zip(plans, tickets, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items and its record; durable when it returns."""
        ticket = _arrived.pop(self._place, None)
        if ticket is None:
            raise UnsupportedError(
                f"{self._place}: CkptWriter was given a plan that its coordinator did not see. Its methods are called "
                "by torch's `save`, once each, in every process that saves."
            )
        begin = ticket.begin
        blobs = [
            Blob(item.index.fqn, _object_bytes(item, planner), wrapped=names_cell(item.index.fqn))
            for item in plan.items
            if item.type == WriteItemType.BYTE_IO
        ]
        tensors = [_leaf(item, planner) for item in plan.items if item.type != WriteItemType.BYTE_IO]
        written = write_rank_files(self._storage, self._path, begin.save_id, ticket.rank, blobs, tensors)
        record = RankRecord(
            save_id=begin.save_id,
            rank=ticket.rank,
            world_size=begin.world_size,
            plan_digest=begin.plan_digest,
            files=written.files,
            items=written.items(),
            values_digest=values_digest({}, ()),
        )
        commit.publish_record(self._storage, self._path, record)
        results = [
            WriteResult(
                index=MetadataIndex(chunk.key, torch.Size(chunk.box.offset)),
                size_in_bytes=chunk.location.length,
                storage_data=_StorageInfo(chunk.location.file, chunk.location.offset, chunk.location.length),
            )
            for chunk in written.chunks
        ]
        results += [
            WriteResult(
                index=MetadataIndex(item.key),
                size_in_bytes=item.location.length,
                storage_data=_StorageInfo(item.location.file, item.location.offset, item.location.length),
            )
            for item in written.objects
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @property
    def _place(self) -> str:
        return self._storage.url(self._path)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits (W3, W4), on the coordinator; torch's own metadata, with its planner data, becomes the export."""
        begin = self._begin
        if begin is None:
            raise StateError("CkptWriter.finish: no save was begun")
        metadata.storage_data = {result.index: result.storage_data for ranks in results for result in ranks}
        metadata.storage_meta = self.storage_meta()
        commit.write_metadata(self._storage, self._path, begin.save_id, pickle.dumps(metadata))
        decision = commit.try_commit(self._storage, self._path, begin, decided_by="coordinator")
        if decision is None or decision.outcome == "abort":
            reason = "a rank's record is missing" if decision is None else decision.reason
            raise SaveAbortedError(f"{self._storage.url(self._path)}: save {begin.save_id} was aborted: {reason}")
        exports.roll_forward(self._storage, self._path)
        for save_id in begin.replaces:
            exports.bury(self._storage, self._path, save_id)
        if begin.replaces:  # one of a run's attempt was the current save until now
            exports.roll_forward(self._storage, self._path)


class CkptReader(StorageReader):
    """A torch `StorageReader` that reads exactly the bytes that are needed, of our own and of foreign checkpoints.

    Args:
        url: the checkpoint's directory; `dcp.load(checkpoint_id=...)` replaces it.
        cast: convert when stored and wanted dtype differ; otherwise that is an error.
        save_id: which save of the directory; None: the newest committed.
        storage_options: see `ckptlib.storage.resolve`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        cast: bool = False,
        save_id: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._url = os.fspath(url)
        self._cast = cast
        self._save_id = save_id
        self._storage_options = storage_options
        self._source: Source | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whatever has a path or an fsspec URL."""
        return _is_place(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, from elsewhere when `checkpoint_id` is given."""
        if checkpoint_id is not None:
            self._url = os.fspath(checkpoint_id)
        self._source = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """torch's metadata, unpickled as plain data (R5).

        Raises:
            CkptError: nothing to load, uncommitted, or damaged.
        """
        source = self._opened()
        entries = () if source.manifest is None else source.manifest.files_of("metadata")
        name = entries[0].path if entries else exported.METADATA
        data = source.storage.get(st.join(source.path, name))
        if entries and hashlib.sha256(data).hexdigest() != entries[0].sha256:
            raise IntegrityError(f"{source.url}/{name}: damaged: its SHA-256 is not the manifest's {entries[0].sha256}")
        return load_metadata(data, f"{source.url}/{name}")

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Objects first, then all tensors in one go, straight into torch's targets where they allow it."""
        wait_for_copies()
        source = self._opened()
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                key = item.storage_index.fqn
                data = source.read_object_bytes(key)
                load_object(data, f"{source.url} ({key})")  # torch's planner trusts its pickles: look first (R5)
                planner.load_bytes(item, io.BytesIO(data))
        wanted = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        targets = [planner.resolve_tensor(item).detach() for item in wanted]
        landings = [self._landing(source, item, target) for item, target in zip(wanted, targets, strict=True)]
        keys = [item.storage_index.fqn for item in wanted]
        finder = _ChunkFinder(source)
        boxes = [Box(tuple(item.storage_offsets), tuple(item.lengths)) for item in wanted]
        reads = plan_boxes(source.index, keys, [finder.row(item) for item in wanted], boxes)
        fetch_all(source, reads, [Target(key, it, it.dtype) for key, it in zip(keys, landings, strict=True)])
        for item, target, landing in zip(wanted, targets, landings, strict=True):
            if landing is not target:
                target.copy_(landing)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _opened(self) -> Source:
        if self._source is None:
            self._source = open_source(self._url, save_id=self._save_id, storage_options=self._storage_options)
        return self._source

    def _landing(self, source: Source, item: ReadItem, target: torch.Tensor) -> torch.Tensor:
        """The target itself, or a tensor of the stored dtype when a cast was asked for."""
        key = item.storage_index.fqn
        stored = dtype_of(source.index.tensor(key).dtype)
        if stored == target.dtype:
            return target
        if not self._cast:
            raise DtypeMismatchError(
                f"tensor {key!r}: {source.url} holds {stored}, the state wants {target.dtype}. "
                "CkptReader(..., cast=True) converts."
            )
        return torch.empty(target.shape, dtype=stored)


class _ChunkFinder:
    """torch names a chunk by its offset; the index has it by row."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._rows: dict[str, dict[tuple[int, ...], int]] = {}

    def row(self, item: ReadItem) -> int:
        """Row of the chunk in the tensor's `Chunks`."""
        key, offset = item.storage_index.fqn, item.storage_index.offset
        if key not in self._rows:
            offsets = self._source.index.chunks(key).offsets.tolist()
            self._rows[key] = {tuple(offset): row for row, offset in enumerate(offsets)}
        rows = self._rows[key]
        return rows[tuple(offset)] if offset is not None else rows[(0,) * len(next(iter(rows)))]


def _leaf(item: WriteItem, planner: SavePlanner) -> TensorLeaf:
    tensor = planner.resolve_data(item)
    described = item.tensor_data
    if not isinstance(tensor, torch.Tensor) or described is None:
        raise StateError(f"tensor {item.index.fqn!r}: the planner resolved it to {type(tensor).__name__}")
    if tensor.dtype != described.properties.dtype:
        raise DtypeMismatchError(
            f"tensor {item.index.fqn!r} is {tensor.dtype}, and torch kept the plan of an earlier save, when it was "
            f"{described.properties.dtype}. Save with a planner of its own: enable_plan_caching=False."
        )
    box = Box(tuple(described.chunk.offsets), tuple(described.chunk.sizes))
    return TensorLeaf(item.index.fqn, tensor.detach(), tuple(described.size), box, True)


def _object_bytes(item: WriteItem, planner: SavePlanner) -> bytes:
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise StateError(f"object {item.index.fqn!r}: the planner resolved it to {type(data).__name__}")
    return data.getvalue()


def _planned_nbytes(plans: Sequence[SavePlan]) -> int:
    """Bytes of the tensors that are planned. A planner that keeps plans between saves sends none that it kept."""
    described = [item.tensor_data for plan in plans for item in plan.items if item.tensor_data is not None]
    return sum(math.prod(one.chunk.sizes) * one.properties.dtype.itemsize for one in described)


def _plan_digest(plans: Sequence[SavePlan]) -> str:
    digest = hashlib.sha256()
    for plan in plans:
        for item in plan.items:
            digest.update(repr((item.index.fqn, item.index.offset, item.type, item.tensor_data)).encode())
        digest.update(b"rank")
    return digest.hexdigest()


def _contents(plans: Sequence[SavePlan]) -> tuple[str, ...]:
    for rank, plan in enumerate(plans):
        if plan.usable:
            _names_of_ranks[rank] = frozenset(item.index.fqn.partition(".")[0] for item in plan.items)
    return tuple(sorted(frozenset().union(*(_names_of_ranks.get(rank, ()) for rank in range(len(plans))))))


def _is_place(checkpoint_id: str | os.PathLike[str]) -> bool:
    try:
        st.resolve(os.fspath(checkpoint_id))
    except (CkptError, ValueError, ImportError):  # no such protocol, or its package is not installed
        return False
    return bool(os.fspath(checkpoint_id))
