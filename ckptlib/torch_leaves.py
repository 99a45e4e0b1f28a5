"""Where torch's own distributed tensors lie in global coordinates, and what torch calls the tensors of a module.

`DTensor` (FSDP2, HSDP, tensor parallel, expert parallel) and the older `ShardedTensor` of
`torch.distributed._shard` (FSDP1 without a device mesh) become pieces: a local tensor and its box. Nothing is
communicated.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as TorchShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptlib.container import template
from ckptlib.errors import StateError, UnsupportedError
from ckptlib.sharding import Box

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Where `torch.compile`, activation checkpointing and FSDP1 keep the module that they wrap."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A local tensor, detached, whose elements fill `box` of a tensor of `global_shape` in order."""

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    box: Box


def place(key: str, tensor: torch.Tensor) -> list[Placed]:
    """The pieces of a tensor that this rank holds: one, or none on a rank outside the tensor's mesh.

    A `ShardedTensor` has one piece for each of its local shards.

    Raises:
        StateError: the tensor has no plain bytes, is a partial sum, or its rows cannot be told apart; names `key`.
    """
    if type(tensor) not in _PLAIN_TYPES:
        if isinstance(tensor, DTensor):
            return _place_dtensor(key, tensor)
        if isinstance(tensor, TorchShardedTensor):
            shape = tuple(tensor.metadata().size)
            return [
                _checked(key, shard.tensor, shape, shard.metadata.shard_offsets, shard.metadata.shard_sizes)
                for shard in tensor.local_shards()
            ]
    check_plain(key, tensor)
    box = _whole(tensor.shape)
    return [Placed(tensor.detach() if tensor.requires_grad else tensor, box.shape, box)]


@functools.lru_cache(maxsize=4096)
def _whole(shape: torch.Size) -> Box:
    return Box.whole(shape)


def check_plain(key: str, tensor: torch.Tensor) -> None:
    """Refuses tensors whose elements are not plain bytes in memory.

    Raises:
        StateError: says what to save instead.
    """
    if tensor.is_nested or tensor.layout != torch.strided:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise StateError(f"tensor {key!r}: layout {layout} cannot be saved; make it dense first")
    if tensor.is_quantized:
        raise StateError(f"tensor {key!r}: {tensor.dtype} is a quantized tensor; save int_repr(), scale and zero point")
    if tensor.is_meta:
        raise StateError(f"tensor {key!r} is on the meta device: it has no data")
    kind: Any = tensor
    if type(kind) not in _PLAIN_TYPES and is_traceable_wrapper_subclass(kind):
        inner = ", ".join(kind.__tensor_flatten__()[0])
        raise StateError(
            f"tensor {key!r}: a {type(kind).__name__} keeps its data in other tensors; save those ({inner})"
        )
    try:
        template(tensor.dtype, ())
    except UnsupportedError as error:
        raise StateError(
            f"tensor {key!r}: {tensor.dtype} cannot be saved, torch itself has no form for it; save its bytes: "
            "tensor.view(torch.uint8)"
        ) from error


def check_fillable(key: str, tensor: torch.Tensor) -> None:
    """Refuses to fill a tensor in which two elements share memory, such as an expanded one.

    Raises:
        StateError: names `key`.
    """
    if tensor.is_contiguous():
        return
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                raise StateError(
                    f"tensor {key!r}: several of its elements share memory (shape {tuple(tensor.shape)}, strides "
                    f"{tensor.stride()}), so it cannot be filled; clone it first"
                )
            reach += (size - 1) * stride


_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def _place_dtensor(key: str, tensor: DTensor) -> list[Placed]:
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise StateError(f"tensor {key!r}: placement {placements} is a partial sum; reduce it first")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    with torch.no_grad():  # without it a node of the graph is made for every tensor
        local = tensor.to_local()
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    cuts: dict[int, list[Cut]] = {}
    for size, index, placement in zip(mesh.shape, coordinate, placements, strict=True):
        if not placement.is_replicate():
            axis: int = placement.dim  # type: ignore[attr-defined]  # a shard of one kind or another
            cuts.setdefault(axis, []).append(Cut(size, index, getattr(placement, "split_factor", 1)))
    offset, shape = [0] * tensor.dim(), list(tensor.shape)
    for axis, along in cuts.items():
        try:
            offset[axis], shape[axis] = shard_range(shape[axis], along)
        except StateError as error:
            raise StateError(f"tensor {key!r}: axis {axis} of {tuple(tensor.shape)}, {placements}: {error}") from error
    return [_checked(key, local, tuple(tensor.shape), offset, shape)]


def _checked(
    key: str, local: torch.Tensor, global_shape: tuple[int, ...], offset: Sequence[int], shape: Sequence[int]
) -> Placed:
    check_plain(key, local)
    box = Box(tuple(offset), tuple(shape))
    if tuple(local.shape) != box.shape:
        raise StateError(
            f"tensor {key!r}: the local shape {tuple(local.shape)} is not that of its place {box} in {global_shape}; "
            "it was not cut as torch.chunk cuts"
        )
    return Placed(local.detach(), global_shape, box)


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh axis that cuts a tensor axis.

    Attributes:
        size: parts.
        index: the part of this rank.
        split_factor: 1: the parts are neighbours. Otherwise torch's `_StridedShard`: the axis was cut before, into
            this many parts, by mesh axes further right, and this axis cuts each of those parts.
    """

    size: int
    index: int
    split_factor: int = 1


def shard_range(length: int, cuts: Sequence[Cut]) -> tuple[int, int]:
    """Where a tensor axis of this length lies after cuts by mesh axes, from left to right: offset and length.

    Every cut is a `torch.chunk`: parts of equal size, the last ones shorter or empty. A strided cut comes last, though
    its mesh axis is the leftmost: that is FSDP2 over tensor or expert parallel.

    Raises:
        StateError: the strided cut is not of that form; or the length is uneven in such a way that FSDP2's rows are
            not those that DTensor's own rule names (torch's `full_tensor` would mix them up too).
    """
    strided = [cut for cut in cuts if cut.split_factor != 1]
    if strided:
        first, *rest = cuts
        if strided != [first] or math.prod(cut.size for cut in rest) != first.split_factor:
            raise StateError("only one strided shard, left of the shards that it interleaves, has a place")
        sizes = tuple(cut.size for cut in rest)
        if length % (first.size * first.split_factor) and not _rules_agree(length, first.size, sizes):
            raise StateError(
                f"a length of {length} over {first.size} x {first.split_factor} ranks is so uneven that FSDP and "
                "DTensor disagree about which rows a rank has; pad it, or shard another axis"
            )
        cuts = [*rest, first]
    offset = 0
    for cut in cuts:
        start, length = _chunk(length, cut.size, cut.index)
        offset += start
    return offset, length


def _chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of a part, as `torch.chunk` cuts. An empty one starts at the end."""
    step = -(-length // parts)
    start = min(index * step, length)
    return start, min(step, length - start)


@functools.lru_cache(maxsize=4096)
def _rules_agree(length: int, strided: int, sizes: tuple[int, ...]) -> bool:
    """Whether two rules give every rank the same rows.

    FSDP2 cuts what tensor parallelism (`sizes`) left of the axis. DTensor takes the parts with one index of the strided
    cut together, one from each of `split_factor` chunks of the axis, and cuts the row of them as `torch.chunk` does.
    """
    factor = math.prod(sizes)
    chunks = [_chunk(length, factor, j) for j in range(factor)]
    for i in range(strided):
        parts = [(start + inner, size) for start, chunk in chunks for inner, size in [_chunk(chunk, strided, i)]]
        together = np.concatenate([np.arange(start, start + size) for start, size in parts])
        for index in itertools.product(*map(range, sizes)):
            start, size = _nested_chunk(length, sizes, index)
            inner, size = _chunk(size, strided, i)
            at, by_rule = _nested_chunk(len(together), sizes, index)
            # Rows only grow within `together`: the same number between the same ends are the same rows.
            if size != by_rule:
                return False
            if size and (together[at], together[at + size - 1]) != (start + inner, start + inner + size - 1):
                return False
    return True


def _nested_chunk(length: int, sizes: Sequence[int], index: Sequence[int]) -> tuple[int, int]:
    offset = 0
    for size, i in zip(sizes, index, strict=True):
        start, length = _chunk(length, size, i)
        offset += start
    return offset, length


# --- names ------------------------------------------------------------------------------------------------------------


def canonical_names(module: torch.nn.Module) -> Callable[[str], str]:
    """The function that turns a name inside `module` into the name without the wrappers around modules.

    As `torch.distributed.checkpoint.state_dict` names them: `DistributedDataParallel`, `torch.compile`, activation
    checkpointing and FSDP1 leave no trace, so a checkpoint does not depend on them. A submodule that a user calls
    ``module`` keeps its name.
    """
    # Longest first: a wrapper inside another is named by the other's prefix.
    replicated = sorted(
        {
            _join([*_unwrapped(path), "module", ""])
            for path, inner in module.named_modules(remove_duplicate=False)
            if isinstance(inner, DistributedDataParallel)
        },
        key=len,
        reverse=True,
    )

    def canonical(name: str) -> str:
        name = _join(_unwrapped(name)) if "_" in name else name
        for prefix in replicated:
            if name.startswith(prefix):
                name = prefix.removesuffix("module.") + name.removeprefix(prefix)
        return name

    return canonical


def named_state(module: torch.nn.Module, where: str) -> dict[str, tuple[str, Any]]:
    """What `module.state_dict()` has: canonical name -> its own name and the value.

    Raises:
        StateError: two of them have one canonical name.
    """
    canonical = canonical_names(module)
    named: dict[str, tuple[str, Any]] = {}
    for name, value in module.state_dict().items():
        if canonical(name) in named:
            raise StateError(f"{where}: {name!r} and {named[canonical(name)][0]!r} are both called {canonical(name)!r}")
        named[canonical(name)] = name, value
    return named


def named_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every parameter under each of its canonical names."""
    canonical = canonical_names(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield canonical(name), parameter


def _unwrapped(name: str) -> list[str]:
    return [part for part in name.split(".") if part not in WRAPPERS] if name else []


def _join(parts: Sequence[str]) -> str:
    return ".".join(parts)
