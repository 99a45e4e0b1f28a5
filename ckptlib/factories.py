"""The usual `ShardedTensorFactory`s, and what is done with any of them.

A factory takes a local tensor apart into the pieces that are stored. Where these are views of the tensor, a save
writes and a load fills its own memory, and a flat range of it (what a distributed optimizer owns) has a place in the
stored tensors; `flat_range` finds it from the views' strides, for factories that it has never seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ckptlib.errors import StateError
from ckptlib.sharding import Box, ReplicaId, ShardedObject, ShardedTensor, ShardedTensorFactory, flat_range_boxes

Offset = tuple[int, int, int]
"""(axis, index, count), as `ShardedTensor.from_rank_offsets` takes it: axes count prepended ones first."""


def swiglu(
    key: str,
    data: torch.Tensor,
    tp_rank: int,
    tp_size: int,
    *rank_offsets: Offset,
    axis: int = 0,
    interleaved: bool = False,
    replica_id: ReplicaId = 0,
    prepend_axis_num: int = 0,
) -> ShardedTensorFactory:
    """The first layer of a gated MLP: a rank holds ``[gate_t; up_t]``, stored is ``[gate; up]`` of all ranks.

    Megatron-Core stores it so (`megatron.core.transformer.mlp.apply_swiglu_sharded_factory`): of the global
    ``[2 * ffn, hidden]``, rank t of TP has two pieces, at ``t * ffn / TP`` and at ``ffn + t * ffn / TP``.

    Args:
        data: (2 * ffn / TP, ...) the local tensor, its bias too; gated along `axis`.
        rank_offsets: how other axes are cut: layers, experts.
        axis: of `data`, prepended axes not counted.
        interleaved: the rank holds gate and up element by element, ``[gate_0, up_0, gate_1, ...]``; stored in halves
            nevertheless.

    Raises:
        StateError: `axis` has an odd size.
    """
    if data.shape[axis] % 2:
        raise StateError(f"tensor {key!r}: axis {axis} of {tuple(data.shape)} has no two halves")
    axis %= data.dim()

    def build(key: str, data: torch.Tensor, replica_id: ReplicaId) -> list[ShardedTensor]:
        pairs = torch.unflatten(data, axis, (-1, 2) if interleaved else (2, -1))
        return [
            ShardedTensor.from_rank_offsets(
                key,
                pairs.select(axis + interleaved, half),
                *rank_offsets,
                (axis + prepend_axis_num, half * tp_size + tp_rank, 2 * tp_size),
                replica_id=replica_id,
                prepend_axis_num=prepend_axis_num,
            )
            for half in range(2)
        ]

    def merge(halves: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([*halves], axis + interleaved).flatten(axis, axis + 1)

    return ShardedTensorFactory(key, data, build, merge, replica_id)


def fused_qkv(
    key: str,
    data: torch.Tensor,
    tp_rank: int,
    tp_size: int,
    *rank_offsets: Offset,
    q_rows: int,
    kv_rows: int,
    names: tuple[str, str, str] = ("q", "k", "v"),
    replica_id: ReplicaId = 0,
    prepend_axis_num: int = 0,
) -> ShardedTensorFactory:
    """An attention's fused projection, stored as three tensors ``<key>.q``, ``<key>.k`` and ``<key>.v``.

    Rows are grouped by query group, as in Megatron-Core: the group's queries, its key, its value. Tensor parallelism
    cuts between groups, so the fused tensor itself, stored as one, needs no factory: it is a plain row-wise
    ``ShardedTensor.from_rank_offsets(key, data, (0, tp_rank, tp_size))``.

    Args:
        data: (groups / TP * (q_rows + 2 * kv_rows), ...) the local tensor, or its bias.
        q_rows: rows of the queries of one group: query heads per group * head size.
        kv_rows: rows of the key, and of the value, of one group: the head size.
        names: what is appended to the key.

    Raises:
        StateError: the rows are not a whole number of groups.
    """
    sizes = [q_rows, kv_rows, kv_rows]
    groups, rest = divmod(data.shape[0], sum(sizes))
    if rest:
        raise StateError(f"tensor {key!r}: {data.shape[0]} rows are no whole number of query groups of {sum(sizes)}")

    def build(key: str, data: torch.Tensor, replica_id: ReplicaId) -> dict[str, list[ShardedTensor]]:
        parts = [torch.split(group, sizes) for group in torch.split(data, sum(sizes))]
        return {
            name: [
                ShardedTensor.from_rank_offsets(
                    f"{key}.{name}",
                    part[which],
                    *rank_offsets,
                    (prepend_axis_num, tp_rank * groups + group, tp_size * groups),
                    replica_id=replica_id,
                    prepend_axis_num=prepend_axis_num,
                )
                for group, part in enumerate(parts)
            ]
            for which, name in enumerate(names)
        }

    def merge(parts: Mapping[str, Sequence[torch.Tensor]]) -> torch.Tensor:
        return torch.cat([part for group in zip(*(parts[name] for name in names), strict=True) for part in group])

    return ShardedTensorFactory(key, data, build, merge, replica_id)


def transposed(
    key: str,
    data: torch.Tensor,
    *rank_offsets: Offset,
    replica_id: ReplicaId = 0,
    prepend_axis_num: int = 0,
) -> ShardedTensorFactory:
    """A matrix that is stored with its last two axes exchanged; `rank_offsets` count the axes as they are stored."""

    def build(key: str, data: torch.Tensor, replica_id: ReplicaId) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(
            key, data.mT, *rank_offsets, replica_id=replica_id, prepend_axis_num=prepend_axis_num
        )

    return ShardedTensorFactory(key, data, build, lambda loaded: loaded.mT, replica_id)


# --- any factory ------------------------------------------------------------------------------------------------------


def build(factory: ShardedTensorFactory) -> Any:
    """What a factory builds.

    Raises:
        StateError: there is anything in it but dicts, lists, `ShardedTensor` and `ShardedObject`.
    """
    with torch.no_grad():
        built = factory.build()
    for leaf in _leaves(built):
        if not isinstance(leaf, ShardedTensor | ShardedObject):
            raise StateError(
                f"factory {factory.key!r}: it built a {type(leaf).__name__}, expected ShardedTensor or ShardedObject"
            )
    return built


def merge(factory: ShardedTensorFactory, built: Any) -> None:
    """Puts what was loaded into the built pieces into the factory's tensor.

    Raises:
        StateError: what the factory merges is no tensor like its own.
    """
    data = factory.data
    if are_its_memory(data, [leaf.data for leaf in _leaves(built) if isinstance(leaf, ShardedTensor)]):
        return
    with torch.no_grad():
        merged = factory.merge(_loaded(built))
        if merged.shape != data.shape or merged.dtype != data.dtype:
            raise StateError(
                f"factory {factory.key!r}: it merged {merged.dtype} {tuple(merged.shape)}, its tensor is {data.dtype} "
                f"{tuple(data.shape)}"
            )
        if not (_share_storage(merged, data) and _layout(merged) == _layout(data)):
            data.copy_(merged)


def flat_range(
    factory: ShardedTensorFactory,
    start: int,
    stop: int,
    data: torch.Tensor,
    *,
    key: str | None = None,
    replica_id: ReplicaId | None = None,
) -> list[ShardedTensor]:
    """Where a range of a factory's flattened local tensor lies in what the factory stores.

    As `ShardedTensor.from_flat_range`, for a tensor that is taken apart: at most ``2 * ndim - 1`` boxes for each piece
    (with one axis more where pieces alternate in memory).
    The factory is asked to take apart a tensor that has no content; the strides of its pieces tell the rest.

    Args:
        start, stop: the range, in elements of the flattened local tensor.
        data: (stop - start,) the elements; the pieces are views of it.
        key: name handed to the factory; None: its own.
        replica_id: of the pieces; None: the factory's.

    Raises:
        StateError: the range leaves the tensor, or the pieces are no views of it or views with exchanged axes: then a
            range of it is no range of anything that is stored.
    """
    key = factory.key if key is None else key
    total = factory.data.numel()
    if not 0 <= start <= stop <= total:
        raise StateError(f"tensor {key!r}: range {start}:{stop} leaves its local tensor of {total} elements")
    if data.numel() != stop - start:
        raise StateError(f"tensor {key!r}: {tuple(data.shape)} elements for the range {start}:{stop}")
    flat = data.reshape(-1)
    probe = torch.empty(factory.data.shape, dtype=data.dtype)  # its pages are never touched: nothing is in memory
    with torch.no_grad():
        built = factory.build_fn(key, probe, factory.replica_id if replica_id is None else replica_id)
    shards = []
    for shard in _leaves(built):
        if not isinstance(shard, ShardedTensor):
            raise StateError(f"tensor {key!r}: its factory builds a {type(shard).__name__}, which has no elements")
        view = _as_box_of(probe, shard.data)
        if view is None or shard.data.dtype != data.dtype:
            raise StateError(
                f"tensor {key!r}: its factory transposes or copies, so elements {start}:{stop} of the flattened local "
                f"tensor are no boxes of {shard.key!r}. Store the whole tensor, not a flat range of it."
            )
        for part in flat_range_boxes(view.memory, start, stop):
            common = part.box.intersect(view.box)
            if common is not None:
                at = part.start - start
                local = flat[at : at + part.box.volume].reshape(part.box.shape)[_slices(common, part.box)]
                shards.append(_placed(shard, view, common, local))
    return shards


def are_its_memory(tensor: torch.Tensor, views: Sequence[torch.Tensor]) -> bool:
    """Whether `views` are together exactly the memory of a dense `tensor`: filling them fills it."""
    whole = _memory_runs(tensor)
    if whole is None or len(whole[0]) != 1:
        return False
    starts, ends = [], []
    for view in views:
        runs = _memory_runs(view)
        if runs is None or not _share_storage(tensor, view):
            return False
        starts.append(runs[0])
        ends.append(runs[0] + runs[1])
    if not starts:
        return False
    start, end = np.sort(np.concatenate(starts)), np.sort(np.concatenate(ends))
    begin, length = int(whole[0][0]), whole[1]
    return bool(start[0] == begin and end[-1] == begin + length and np.array_equal(start[1:], end[:-1]))


def _memory_runs(tensor: torch.Tensor) -> tuple[npt.NDArray[np.int64], int] | None:
    """Bytes of its storage that a tensor uses: starts of its contiguous runs and their length; None: there is none."""
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.numel() == 0:
        return None
    axes = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)
    length = 1
    while axes and axes[0][0] == length:
        length *= axes.pop(0)[1]
    starts = np.array([tensor.storage_offset()], np.int64)
    for stride, size in axes:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts * tensor.element_size(), length * tensor.element_size()


def _share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return one.device == other.device and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    except RuntimeError:  # a subclass that has other tensors, and no memory of its own
        return False


def _layout(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return int(tensor.storage_offset()), tensor.stride()


@dataclass(frozen=True)
class _View:
    """A view as a box of the tensor's memory, when that is seen with the view's own strides.

    Attributes:
        memory: shape in which the whole memory is seen.
        box: the view in it.
        axes: for each axis of `memory`, the axis of the view, or None for an inner one that the view has not.
    """

    memory: tuple[int, ...]
    box: Box
    axes: tuple[int | None, ...]


def _as_box_of(tensor: torch.Tensor, view: torch.Tensor) -> _View | None:
    """A view of a contiguous tensor as a box of its memory; None: it is no view, or its axes are exchanged."""
    if tensor.numel() == 0 or view.numel() == 0 or not _share_storage(tensor, view):
        return None
    axes: list[int | None] = [axis for axis in range(view.dim()) if view.shape[axis] != 1]
    sizes = [view.shape[axis] for axis in axes if axis is not None]
    strides = [view.stride(axis) for axis in axes if axis is not None]
    if not strides or strides[-1] != 1:  # a column of a matrix: the columns beside it are an axis of their own
        axes.append(None)
        sizes.append(1)
        strides.append(1)
    outer = [tensor.numel(), *strides[:-1]]
    if any(stride == 0 or above % stride or above < stride for above, stride in zip(outer, strides, strict=True)):
        return None
    memory = tuple(above // stride for above, stride in zip(outer, strides, strict=True))
    offset, rest = [], int(view.storage_offset())
    for stride in strides:
        quotient, rest = divmod(rest, stride)
        offset.append(quotient)
    box = Box(tuple(offset), tuple(sizes))
    return _View(memory, box, tuple(axes)) if box.within(memory) else None


def _placed(shard: ShardedTensor, view: _View, common: Box, local: torch.Tensor) -> ShardedTensor:
    """The part `common` of a view, as a piece of the tensor that the whole view is a piece of."""
    offset, shape = list(shard.box.offset), [1] * len(shard.box.shape)
    prepended = len(shape) - shard.data.dim()
    for axis, begin, whole, size in zip(view.axes, common.offset, view.box.offset, common.shape, strict=True):
        if axis is not None:
            offset[prepended + axis] += begin - whole
            shape[prepended + axis] = size
    return ShardedTensor(
        shard.key,
        local.reshape(shape),
        shard.global_shape,
        Box(tuple(offset), tuple(shape)),
        shard.replica_id,
        shard.allow_shape_mismatch,
    )


def _slices(box: Box, within: Box) -> tuple[slice, ...]:
    inner = box.relative_to(within.offset)
    return tuple(slice(begin, end) for begin, end in zip(inner.offset, inner.end, strict=True))


def _leaves(built: Any) -> Iterator[Any]:
    match built:
        case Mapping():
            for part in built.values():
                yield from _leaves(part)
        case list() | tuple():
            for part in built:
                yield from _leaves(part)
        case _:
            yield built


def _loaded(built: Any) -> Any:
    """The nesting that was built, with what was loaded in place of the wrappers."""
    match built:
        case Mapping():
            return {name: _loaded(part) for name, part in built.items()}
        case list() | tuple():
            return [_loaded(part) for part in built]
        case _:
            return built.data
