"""How pieces of state lie in global coordinates. Pure: torch appears in annotations only.

The wrappers mean the same as Megatron-Core's (`megatron.core.dist_checkpointing.mapping`): a `ShardedTensor` says
which box of which global tensor its data is, a `ShardedTensorFactory` makes such pieces of a tensor that is stored in
another form, a `ShardedObject` says which cell of a grid it is, and a `LocalNonpersistentObject` is dropped on save
and kept as it is on load.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptlib.errors import StateError

if TYPE_CHECKING:
    import torch

ReplicaId = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A box in global coordinates: `offset[i] <= x_i < offset[i] + shape[i]`. Zero-size axes are allowed."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise StateError(f"box: offset {self.offset} and shape {self.shape} have different lengths")
        if any(x < 0 for x in self.offset) or any(x < 0 for x in self.shape):
            raise StateError(f"box: negative coordinate in offset {self.offset} or shape {self.shape}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a 0-dimensional box."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """First coordinates past the box."""
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None when there is no common element."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        end = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        if any(e <= o for o, e in zip(offset, end, strict=True)):
            return None
        return Box(offset, tuple(e - o for o, e in zip(offset, end, strict=True)))

    def within(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of this shape."""
        return len(shape) == len(self.shape) and all(e <= s for e, s in zip(self.end, shape, strict=True))

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same box in coordinates whose zero is `origin`."""
        return Box(tuple(o - z for o, z in zip(self.offset, origin, strict=True)), self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{e}" for o, e in zip(self.offset, self.end, strict=True)) + "]"


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Whether this copy is the one that is written: all components zero (Megatron's `is_main_replica`)."""
    return replica_id == 0 if isinstance(replica_id, int) else all(part == 0 for part in replica_id)


@dataclass
class ShardedTensor:
    """This rank's piece of a global tensor.

    Attributes:
        key: name of the global tensor, unique in a checkpoint.
        data: the local tensor; reshaped to `box.shape` when axes were prepended.
        global_shape: shape of the global tensor, prepended axes included.
        box: where `data` lies in it.
        replica_id: which copy this is; only the all-zero one is written.
        allow_shape_mismatch: on load, a stored tensor of another global shape is allowed: elements beyond it become
            zero, its surplus is dropped (padded vocabularies).
    """

    key: str
    data: torch.Tensor
    global_shape: tuple[int, ...]
    box: Box
    replica_id: ReplicaId = 0
    allow_shape_mismatch: bool = False

    def __post_init__(self) -> None:
        self.global_shape = tuple(self.global_shape)
        if not isinstance(self.box, Box):
            raise StateError(
                f"tensor {self.key!r}: box {self.box!r} is a {type(self.box).__name__}, expected a Box; "
                "ShardedTensor.from_box takes an offset"
            )
        if not self.box.within(self.global_shape):
            raise StateError(f"tensor {self.key!r}: box {self.box} exceeds the global shape {self.global_shape}")
        if math.prod(self.data.shape) != self.box.volume:
            raise StateError(
                f"tensor {self.key!r}: local shape {tuple(self.data.shape)} does not fill its box {self.box}"
            )

    @classmethod
    def from_box(
        cls,
        key: str,
        data: torch.Tensor,
        global_shape: Sequence[int],
        offset: Sequence[int],
        *,
        replica_id: ReplicaId = 0,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """The shard that starts at `offset`; leading axes that `data` lacks have size 1 in the box."""
        shape = (1,) * (len(global_shape) - data.dim()) + tuple(data.shape)
        return cls(key, data, tuple(global_shape), Box(tuple(offset), shape), replica_id, allow_shape_mismatch)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """A regular shard: each `(axis, index, count)` says that `axis` is cut into `count` equal parts.

        Same meaning as Megatron-Core's `ShardedTensor.from_rank_offsets`: axes count prepended ones first, and a
        prepended axis of `count` parts has global size `count`.
        """
        local = (1,) * prepend_axis_num + tuple(data.shape)
        offset = [0] * len(local)
        shape = list(local)
        seen: set[int] = set()
        for axis, index, count in rank_offsets:
            if not 0 <= axis < len(local) or axis in seen:
                raise StateError(f"tensor {key!r}: rank offset for axis {axis}, which is absent or given twice")
            if not 0 <= index < count:
                raise StateError(f"tensor {key!r}: axis {axis} has part {index} of {count}")
            seen.add(axis)
            offset[axis] = index * local[axis]
            shape[axis] = count * local[axis]
        return cls(key, data, tuple(shape), Box(tuple(offset), local), replica_id, allow_shape_mismatch)

    @classmethod
    def from_flat_range(
        cls,
        key: str,
        global_shape: Sequence[int],
        box: Box | Sequence[Box],
        start: int,
        stop: int,
        data: torch.Tensor,
        *,
        replica_id: ReplicaId = 0,
        allow_shape_mismatch: bool = False,
    ) -> list[ShardedTensor]:
        """A contiguous range of a flattened local shard, as boxes in global coordinates; no communication.

        A distributed optimizer (ZeRO, Megatron's DistributedOptimizer) and FSDP1's flat parameters give each rank a
        range of elements that knows nothing of rows. Cut at row boundaries such a range is a partial row, full rows and
        a partial row, and so on inwards: at most ``2 * ndim - 1`` boxes for each rectangular piece.
        ByteCheckpoint (arXiv 2407.20143) describes FSDP's flat shards in the same spirit.

        Args:
            global_shape: shape of the parameter's global tensor.
            box: where the local shard lies in it; several boxes when the local shard is their concatenation along the
                first axis (the gate and up halves of a gated MLP). For a tensor that a `ShardedTensorFactory` takes
                apart, see `ckptlib.factories.flat_range`.
            start, stop: the range, in elements of the flattened local shard.
            data: (stop - start,) the elements; the pieces are views of it.

        Raises:
            StateError: the range leaves the shard, or `data` has another number of elements.
        """
        pieces = [box] if isinstance(box, Box) else list(box)
        total = sum(piece.volume for piece in pieces)
        if not 0 <= start <= stop <= total:
            raise StateError(f"tensor {key!r}: range {start}:{stop} leaves its local shard of {total} elements")
        if math.prod(data.shape) != stop - start:
            raise StateError(f"tensor {key!r}: {tuple(data.shape)} elements for the range {start}:{stop}")
        flat = data.reshape(-1)
        shards, begin = [], 0
        for piece in pieces:
            end = begin + piece.volume
            low, high = max(start, begin), min(stop, end)
            if low < high:
                for part in flat_range_boxes(piece.shape, low - begin, high - begin):
                    at = low - start + part.start - (low - begin)
                    placed = Box(
                        tuple(o + p for o, p in zip(part.box.offset, piece.offset, strict=True)), part.box.shape
                    )
                    local = flat[at : at + placed.volume].reshape(placed.shape)
                    shards.append(cls(key, local, tuple(global_shape), placed, replica_id, allow_shape_mismatch))
            begin = end
        return shards


@dataclass(frozen=True, slots=True)
class FlatBox:
    """A box of a tensor that is contiguous in it, and where its elements begin in the flattened tensor."""

    box: Box
    start: int


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[FlatBox]:
    """The boxes that make up elements [start, stop) of a flattened tensor, in order; at most ``2 * ndim - 1``."""
    if start >= stop:
        return []
    if not shape:
        return [FlatBox(Box((), ()), 0)]
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last or (last == first + 1 and tail == 0 and head):
        return _within_row(shape, first, head, stop - first * inner)
    boxes = []
    if head:
        boxes += _within_row(shape, first, head, inner)
        first += 1
    if first < last:
        rest = tuple(shape[1:])
        boxes.append(FlatBox(Box((first, *(0,) * len(rest)), (last - first, *rest)), first * inner))
    if tail:
        boxes += _within_row(shape, last, 0, tail)
    return boxes


def _within_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[FlatBox]:
    inner = math.prod(shape[1:])
    return [
        FlatBox(Box((row, *part.box.offset), (1, *part.box.shape)), row * inner + part.start)
        for part in flat_range_boxes(shape[1:], start, stop)
    ]


_CELL = re.compile(r"/shard_[\d.]*_[\d.]*$")


def names_cell(key: str) -> bool:
    """Whether a stored key is a `ShardedObject.unique_key`. Other names may have ``/shard_`` in them too."""
    return _CELL.search(key) is not None


@dataclass
class ShardedObject:
    """One cell of a grid of Python objects, such as a rank's RNG state. Its grid cannot be resharded.

    Attributes:
        key: name of the grid.
        data: plain data (R5); what the restricted unpickler accepts.
        global_shape: shape of the grid.
        global_offset: this cell.
        replica_id: only the all-zero copy is written.
    """

    key: str
    data: Any
    global_shape: tuple[int, ...] = (1,)
    global_offset: tuple[int, ...] = (0,)
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.global_shape, self.global_offset = tuple(self.global_shape), tuple(self.global_offset)
        if not Box(self.global_offset, (1,) * len(self.global_offset)).within(self.global_shape):
            raise StateError(f"object {self.key!r}: cell {self.global_offset} is outside the grid {self.global_shape}")

    @property
    def unique_key(self) -> str:
        """Name on storage, as Megatron-Core writes it: ``<key>/shard_<offset>_<shape>``."""
        offset, shape = (".".join(map(str, axes)) for axes in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"


@dataclass
class ShardedTensorFactory:
    """A local tensor that is stored in another form: built before a save, merged after a load.

    Same meaning as Megatron-Core's `ShardedTensorFactory`: the halves of a gated MLP that are stored apart, an FP8
    tensor that is stored in high precision. `ckptlib.factories` makes the usual ones.

    On load, built pieces that are views of `data` are filled where they are; anything else is merged and copied into
    `data`.

    Attributes:
        key: name of what is stored, handed to `build_fn`.
        data: the local tensor, as the model holds it.
        build_fn: (key, data, replica_id) -> nested dicts and lists of `ShardedTensor` and `ShardedObject`. What it
            returns depends on its arguments only, so that an optimizer's state is stored like its parameter.
        merge_fn: its inverse: the same nesting with the loaded tensors and objects -> a tensor like `data`.
        replica_id: which copy this is, handed to `build_fn`.
    """

    key: str
    data: torch.Tensor
    build_fn: Callable[[str, torch.Tensor, ReplicaId], Any]
    merge_fn: Callable[[Any], torch.Tensor]
    replica_id: ReplicaId = 0

    def build(self) -> Any:
        """The pieces to store, or to fill."""
        return self.build_fn(self.key, self.data, self.replica_id)

    def merge(self, loaded: Any) -> torch.Tensor:
        """The local tensor that the loaded pieces make."""
        return self.merge_fn(loaded)


@dataclass
class WholeValue:
    """One plain value under its path, whatever it holds: a dict or a list that is not taken apart into leaves."""

    obj: Any


@dataclass
class LocalNonpersistentObject:
    """A value that belongs to this process: dropped on save, left as it is on load."""

    obj: Any = field(default=None)
