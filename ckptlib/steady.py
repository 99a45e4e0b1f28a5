"""What changes only when an optimizer steps or something is loaded: it can be copied beside a forward and backward.

These are parameters and the state of optimizers. Buffers are not: batch statistics change in a forward pass. Nor is a
tensor of which nothing is known. To be sure, torch's count of in-place changes is compared after the copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as TorchShardedTensor
from torch.distributed.tensor import DTensor

from ckptlib.errors import StagingError
from ckptlib.state import TensorLeaf

Part = torch.nn.Module | torch.optim.Optimizer


def steady_parts(parts: Iterable[Any]) -> list[Part]:
    """The modules and optimizers among the parts of a state, and those that others name by ``steady_parts()``."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, torch.nn.Module | torch.optim.Optimizer):
            found.append(part)
        elif hasattr(part, "steady_parts"):
            found += part.steady_parts()
    return found


def divide(leaves: Iterable[TensorLeaf], parts: Iterable[Part]) -> tuple[list[TensorLeaf], list[TensorLeaf]]:
    """The leaves that lie in memory which changes only in an optimizer's step or when it is loaded, and the others."""
    known = [local for part in parts for tensor in _tensors_of(part) for local in _locals(tensor)]
    # Nearly every leaf is such a tensor as a whole, and this is part of the stall; storages take five times as long.
    addresses = {tensor.data_ptr() for tensor in known}
    steady: list[TensorLeaf] = []
    rest: list[TensorLeaf] = []
    for leaf in leaves:
        (steady if leaf.tensor.data_ptr() in addresses and not leaf.tensor.is_inference() else rest).append(leaf)
    if not rest:
        return steady, rest
    storages = {tensor.untyped_storage().data_ptr() for tensor in known}
    others: list[TensorLeaf] = []
    for leaf in rest:
        inside = not leaf.tensor.is_inference() and leaf.tensor.untyped_storage().data_ptr() in storages
        (steady if inside else others).append(leaf)
    return steady, others


class Unchanged:
    """That these leaves are what they were at construction."""

    def __init__(self, leaves: Sequence[TensorLeaf]) -> None:
        self._versions = [(leaf, leaf.tensor._version) for leaf in leaves]

    def check(self) -> None:
        """To be called when they have been copied.

        Raises:
            StagingError: one was changed meanwhile; names it.
        """
        for leaf, version in self._versions:
            if leaf.tensor._version != version:
                raise StagingError(
                    f"tensor {leaf.key!r} was changed in place while it was staged, by something else than an "
                    "optimizer's step. Call Checkpointer.wait_staged() before that, or choose staging='eager'."
                )


def _tensors_of(part: Part) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.nn.Module):
        for module in part.modules():  # three times as fast as parameters(), which makes their names too
            yield from (parameter for parameter in module._parameters.values() if parameter is not None)
        return
    for group in part.param_groups:
        yield from group["params"]
    for slots in part.state.values():
        yield from (value for value in slots.values() if isinstance(value, torch.Tensor))


def _locals(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors of this rank that hold a tensor's elements."""
    if isinstance(tensor, DTensor):
        yield tensor._local_tensor
    elif isinstance(tensor, TorchShardedTensor):
        yield from (shard.tensor for shard in tensor.local_shards())
    else:
        yield tensor
