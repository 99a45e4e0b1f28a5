"""Loads: exactly the bytes that are needed, straight into the tensors where the layout allows (R3, R4).

Everything that can be refused is refused before a tensor is touched: shapes, dtypes, coverage, missing keys, objects
that do not unpickle. What can still fail then is the reading itself; the error says which tensors had changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from ckptlib.coordination import Group, agree, lead, new_group
from ckptlib.errors import (
    CkptError,
    DtypeMismatchError,
    IntegrityError,
    KeyMismatchError,
    LoadIncompleteError,
    ShapeMismatchError,
    StateError,
    TilingError,
)
from ckptlib.fetch import Fetch, fetch_all
from ckptlib.formats import torch_dist
from ckptlib.index import ChunkItem, ItemIndex
from ckptlib.read_plan import ReadPiece, intersect_chunks, missing_elements
from ckptlib.resume import is_bookkeeping
from ckptlib.sharding import Box
from ckptlib.source import Source, open_source
from ckptlib.state import FlatState, TensorLeaf, dtype_of, flatten

log = logging.getLogger("ckptlib")

Strict = Literal["error", "warn", "return"]


@dataclass
class LoadReport:
    """What a load did.

    Attributes:
        missing: requested by this rank, not in the checkpoint: left as they were.
        unexpected: in the checkpoint, requested by no rank.
        bytes_needed: payload bytes of the requested boxes that are stored.
        bytes_read: payload bytes read from storage.
        requests: contiguous ranges that were read for tensors.
        seconds: wall time.
    """

    url: str
    save_id: str | None
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    bytes_needed: int = 0
    bytes_read: int = 0
    requests: int = 0
    seconds: float = 0.0


def load(
    state: dict[str, Any],
    url: str,
    *,
    strict: Strict = "error",
    verify: str | None = None,
    save_id: str | None = None,
    timeout: float = 600.0,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Fills `state` in place from the checkpoint at `url`.

    Collective under `torch.distributed`: rank 0 decides which save is read (R2).

    Args:
        state: the tree to fill, as for `save`; tensors say what is wanted by their place, shape and dtype.
        url: the iteration directory.
        strict: what missing and unexpected keys do: ``error`` raises on either; ``warn`` logs; ``return`` only reports.
        verify: ``"data"`` checks the digest of every file before anything is read.
        save_id: which save of the directory; None: the newest committed.
        timeout: seconds that a rank waits for rank 0.

    Raises:
        NotACheckpointError, UncommittedError: nothing to load.
        KeyMismatchError, ShapeMismatchError, DtypeMismatchError, TilingError: R4; nothing was changed.
        IntegrityError: bytes are not what was recorded; nothing was changed.
        LoadIncompleteError: reading failed after tensors had changed; names them.
    """
    group = new_group(timeout=timeout, name="bare")
    group.next_round()
    pinned = lead(group, "pin", lambda: open_source(url, save_id=save_id, storage_options=storage_options).save_id)

    def prepare() -> PreparedLoad:
        source = open_source(url, save_id=pinned, storage_options=storage_options)
        beside = source.manifest is None or source.manifest.begin.attempt > 0
        return prepare_load(state, source, is_bookkeeping if beside else lambda key: False)

    return load_together(group, prepare, strict, verify)


@dataclass
class PreparedLoad:
    """One rank's load, in steps; nothing is changed before `execute` (R4).

    Attributes:
        ignore: names stored keys that are not unexpected.
        padded: tensors whose stored shape is another one: what is not stored of them becomes zero.
    """

    source: Source
    flat: FlatState
    ignore: Callable[[str], bool]
    report: LoadReport
    padded: list[TensorLeaf] = field(default_factory=list)
    reads: list[_Read] = field(default_factory=list)
    objects: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def requested(self) -> bytes:
        """One bit per stored key: whether this rank requests it."""
        wanted = {leaf.key for leaf in self.flat.tensors} | self.flat.object_keys()
        return np.packbits([key in wanted for key in self._stored_keys()]).tobytes()

    def unexpected(self, requests: Sequence[bytes]) -> list[str]:
        """The stored keys that none of these ranks requests: a pipeline stage has no use for another's layers."""
        keys = self._stored_keys()
        bits = np.zeros(-(-len(keys) // 8), np.uint8)
        for request in requests:
            bits |= np.frombuffer(request, np.uint8)
        taken = np.unpackbits(bits, count=len(keys))
        return sorted(key for key, is_taken in zip(keys, taken, strict=True) if not is_taken and not self.ignore(key))

    def check(self, unexpected: list[str], strict: Strict, verify: str | None) -> None:
        """Refuses what can be refused, and reads the objects."""
        started = time.perf_counter()
        source, flat = self.source, self.flat
        self.report.unexpected = unexpected
        _compare_keys(source, self.report, strict)
        absent = set(self.report.missing)
        present = [leaf for leaf in flat.tensors if leaf.key not in absent]
        self.reads = [read for leaf in present for read in _plan_leaf(source.index, leaf, source.url)]
        self.padded = [leaf for leaf in present if source.index.tensor(leaf.key).shape != leaf.global_shape]
        if verify is not None:
            _verify_first(source, verify)
        self.objects = {leaf.key: source.read_object(leaf.key) for leaf in flat.objects if leaf.key not in absent}
        self.values = {leaf.key: source.read_object(leaf.key) for leaf in flat.values if leaf.key not in absent}
        self.report.seconds += time.perf_counter() - started

    def execute(self) -> LoadReport:
        """Fills the state.

        Raises:
            LoadIncompleteError: it failed after tensors had changed; names them.
            CkptError, OSError: it failed before.
        """
        started = time.perf_counter()
        _execute(self.source, self.padded, self.reads, self.report)
        try:
            for leaf in self.flat.objects:
                if leaf.key in self.objects:
                    leaf.assign(self.objects[leaf.key])
            for value_leaf in self.flat.values:
                if value_leaf.key in self.values:
                    value_leaf.assign(self.values[value_leaf.key])
            for finish in self.flat.finishers:
                finish()
        except Exception as error:
            raise self.incomplete(error) from error
        self.report.seconds += time.perf_counter() - started
        return self.report

    def incomplete(self, error: Exception) -> LoadIncompleteError:
        """What to raise when the tensors are filled and something failed nevertheless."""
        return _incomplete(self.source.url, list(dict.fromkeys(read.leaf.key for read in self.reads)), error)

    def _stored_keys(self) -> list[str]:
        return [*self.source.index.keys, *self.source.index.object_keys]


def load_together(
    group: Group, prepare: Callable[[], PreparedLoad], strict: Strict = "error", verify: str | None = None
) -> LoadReport:
    """Prepares and checks on all ranks, then loads on all ranks: what one rank refuses changes nothing on any (R4).

    Raises:
        RankFailedError: another rank refused; nothing was changed.
        LoadIncompleteError: another rank failed after this one had been filled.
    """
    if strict not in ("error", "warn", "return"):
        raise StateError(f"strict={strict!r}: expected 'error', 'warn' or 'return'")
    prepared: PreparedLoad | None = None

    def begin() -> bytes:
        nonlocal prepared
        prepared = prepare()
        return prepared.requested()

    requests = agree(group, "keys", begin)
    assert prepared is not None  # else `agree` has raised
    ready: PreparedLoad = prepared
    unexpected = lead(group, "unexpected", lambda: ready.unexpected(requests or []))
    agree(group, "check", lambda: ready.check(unexpected, strict, verify))
    loaded = False

    def fill() -> None:
        nonlocal loaded
        ready.execute()
        loaded = True

    try:
        agree(group, "load", fill)
    except CkptError as error:
        if loaded:
            raise ready.incomplete(error) from error
        raise
    return ready.report


def prepare_load(
    state: dict[str, Any], source: Source, ignore: Callable[[str], bool] = lambda key: False
) -> PreparedLoad:
    """This rank's load from an opened checkpoint. `ignore` names stored keys that are not unexpected."""
    flat = flatten(state, stored=source)
    report = LoadReport(source.url, source.save_id)
    report.missing = sorted(
        {leaf.key for leaf in flat.tensors if leaf.key not in source.index}
        | {key for key in flat.object_keys() if not source.index.has_object(key)}
    )
    _check_optimizer(source, flat)
    return PreparedLoad(source, flat, ignore, report)


def read(
    url: str,
    keys: Collection[str] | None = None,
    *,
    save_id: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Whole global tensors, without a skeleton to fill.

    Args:
        keys: which; None: all tensors of the checkpoint.

    Raises:
        KeyMismatchError: a key is not in the checkpoint.
        StateError: `keys` is one string.
    """
    if isinstance(keys, str):
        raise StateError(f"keys={keys!r}: expected a collection of names, got one string")
    source = open_source(url, save_id=save_id, storage_options=storage_options)
    unknown = [key for key in keys or () if key not in source.index]
    if unknown:
        raise KeyMismatchError(f"{source.url}: no tensor {', '.join(map(repr, unknown[:8]))}", missing=unknown)
    out = {}
    reads = []
    for key in source.index.keys if keys is None else keys:
        info = source.index.tensor(key)
        out[key] = torch.empty(info.shape, dtype=dtype_of(info.dtype))
        reads += list(
            _plan_leaf(source.index, TensorLeaf(key, out[key], info.shape, Box.whole(info.shape)), source.url)
        )
    _execute(source, [], reads, LoadReport(source.url, source.save_id))
    return out


def _compare_keys(source: Source, report: LoadReport, strict: Strict) -> None:
    if not (report.missing or report.unexpected):
        return
    text = f"{source.url}: " + "; ".join(
        f"{len(keys)} {what} ({_some(keys)})"
        for what, keys in (("missing in the checkpoint", report.missing), ("not requested", report.unexpected))
        if keys
    )
    note = _unmerged_optimizer(source, report.missing)
    if strict == "error":
        raise KeyMismatchError(
            f'{text}. {note or "Nothing was loaded."} strict="warn" or "return" loads what both sides have.',
            missing=report.missing,
            unexpected=report.unexpected,
        )
    if strict == "warn":
        log.warning("%s %s", text, note)


def _check_optimizer(source: Source, flat: FlatState) -> None:
    """Optimizer tensors that are stored under their own names, in another shape: old Megatron's flattened form."""
    if source.manifest is not None:
        return
    reshaped = [
        leaf.key
        for leaf in flat.tensors
        if leaf.key.startswith("optimizer.state.")
        and leaf.key in source.index
        and source.index.tensor(leaf.key).shape != leaf.global_shape
    ]
    if reshaped:
        torch_dist.check_optimizer_request(source.index, source.read_common(), reshaped, source.url)


def _unmerged_optimizer(source: Source, missing: Collection[str]) -> str:
    """Why optimizer state in model space cannot be had from a checkpoint that keeps it in flat buffers."""
    if source.manifest is not None or not any(key.startswith("optimizer.") for key in missing):
        return ""
    form = torch_dist.optimizer_form(source.index, source.read_common())
    return f"Its optimizer state is stored as {form}: convert the checkpoint first." if form else ""


@dataclass(frozen=True)
class _Read:
    """One stored chunk's part of one leaf."""

    leaf: TensorLeaf
    piece: ReadPiece
    item: ChunkItem

    def fetch(self, changed: dict[str, None]) -> Fetch:
        """As the fetcher takes it; notes the tensor in `changed` before it is touched."""
        where = tuple(slice(o, e) for o, e in zip(self.piece.target.offset, self.piece.target.end, strict=True))
        key = self.leaf.key
        return Fetch(self.item, self.piece.source, _as_box(self.leaf)[where], lambda: changed.setdefault(key))


def _plan_leaf(index: ItemIndex, leaf: TensorLeaf, url: str) -> Iterator[_Read]:
    """The reads that fill one leaf; checks R4 for it."""
    info = index.tensor(leaf.key)
    same_rank = len(info.shape) == len(leaf.global_shape)
    if info.shape != leaf.global_shape and not (leaf.allow_shape_mismatch and same_rank):
        raise ShapeMismatchError(
            f"tensor {leaf.key!r}: {url} holds the global shape {info.shape}, the state wants {leaf.global_shape}"
        )
    if info.dtype != leaf.dtype:
        raise DtypeMismatchError(
            f"tensor {leaf.key!r}: {url} holds {info.dtype}, the state wants {leaf.dtype}. Nothing was converted."
        )
    chunks = index.chunks(leaf.key)
    pieces = list(intersect_chunks(leaf.box, chunks.offsets, chunks.shapes))
    stored = leaf.box.intersect(Box.whole(info.shape)) if info.shape != leaf.global_shape else leaf.box
    lacking = 0 if stored is None else missing_elements(stored, pieces)
    if lacking:
        raise TilingError(f"tensor {leaf.key!r}: {url} has no chunk for {lacking} elements of {leaf.box}")
    for piece in pieces:
        yield _Read(leaf, piece, index.chunk_item(info, chunks, piece.chunk))


def _verify_first(source: Source, level: str) -> None:
    from ckptlib.verification import verify as verify_checkpoint

    result = verify_checkpoint(source.url, level=level, save_id=source.save_id, storage_options=source.storage_options)
    if not result.ok:
        raise IntegrityError(f"{source.url}: verification failed, nothing was loaded: {'; '.join(result.problems)}")


def _execute(source: Source, padded: Sequence[TensorLeaf], reads: list[_Read], report: LoadReport) -> None:
    """Zeroes the tensors that the stored ones do not fill, then reads file by file, in file order."""
    changed: dict[str, None] = {}
    for leaf in padded:
        changed[leaf.key] = None
        leaf.tensor.zero_()
    try:
        traffic = fetch_all(source, [read.fetch(changed) for read in reads])
    except (OSError, CkptError) as error:
        if not changed:
            raise
        raise _incomplete(source.url, list(changed), error) from error
    report.requests = traffic.requests
    report.bytes_read = traffic.bytes
    report.bytes_needed = sum(read.piece.source.volume * read.leaf.tensor.element_size() for read in reads)


def _incomplete(url: str, keys: Sequence[str], error: Exception) -> LoadIncompleteError:
    failure = LoadIncompleteError(
        f"{url}: the load failed after {len(keys)} tensors had been changed ({_some(keys)}): {type(error).__name__}: "
        f"{error}. Load again, or from elsewhere.",
        changed=keys,
    )
    failure.exit_code = error.exit_code if isinstance(error, CkptError) else 1
    return failure


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _as_box(leaf: TensorLeaf) -> torch.Tensor:
    """The leaf's tensor with its box's axes: prepended axes have size 1."""
    tensor = leaf.tensor
    for _ in range(len(leaf.box.shape) - tensor.dim()):
        tensor = tensor.unsqueeze(0)
    if tuple(tensor.shape) != leaf.box.shape:
        raise StateError(f"tensor {leaf.key!r}: local shape {tuple(tensor.shape)} is not its box {leaf.box}")
    return tensor
