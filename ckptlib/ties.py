"""Tied tensors: several names of one memory, as an embedding and the head that uses it again.

Both names are saved, and both are read into the same memory. That is right only where they hold the same values.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch

from ckptlib.errors import StateError
from ckptlib.index import UNKNOWN, Chunks, ItemIndex
from ckptlib.state import TensorLeaf

_CRC32 = 4
"""Column of `Chunks.locations`."""


def check_ties(index: ItemIndex, leaves: Sequence[TensorLeaf], url: str) -> None:
    """Refuses to fill one memory from two tensors whose stored values differ; which of them won would be chance.

    They are compared by the CRC-32 of their chunks, so nothing is read. Tensors that are cut otherwise, or of which a
    checkpoint of another tool knows no CRC-32, cannot be compared and pass.

    Args:
        leaves: tensors to fill, all of them stored.

    Raises:
        StateError: names both tensors.
    """
    first: dict[Hashable, TensorLeaf] = {}
    for leaf in leaves:
        if leaf.box.volume == 0:
            continue
        other = first.setdefault(_place(leaf.tensor), leaf)
        if other.key != leaf.key and _differ(index.chunks(other.key), index.chunks(leaf.key)):
            raise StateError(
                f"{_conflict(other.key, leaf.key, url)}. Untie them, or leave one of them out with keys=[...]"
            )


def check_read_ties(tensors: Sequence[tuple[str, torch.Tensor, torch.Tensor]], where: str) -> None:
    """The same for tensors that have been read and not yet copied: (name, memory to fill, what was read).

    They are compared bit by bit. Names that were one memory when they were saved are one in the file too, and pass
    without a look at it.

    Raises:
        StateError: names both tensors.
    """
    first: dict[Hashable, tuple[str, torch.Tensor]] = {}
    for key, target, source in tensors:
        if target.numel() == 0:
            continue
        name, other = first.setdefault(_place(target), (key, source))
        if _place(other) != _place(source) and not torch.equal(_bits(other), _bits(source)):
            raise StateError(f"{_conflict(name, key, where)}. Untie them, or choose parts of the state with `contents`")


def _place(tensor: torch.Tensor) -> Hashable:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _conflict(one: str, other: str, where: str) -> str:
    return (
        f"tensors {one!r} and {other!r} are one memory here, but {where} holds different values for them. "
        "Nothing was loaded"
    )


def _differ(one: Chunks, other: Chunks) -> bool:
    if not (np.array_equal(one.offsets, other.offsets) and np.array_equal(one.shapes, other.shapes)):
        return False
    crcs, others = one.locations[:, _CRC32], other.locations[:, _CRC32]
    return bool(((crcs != others) & (crcs != UNKNOWN) & (others != UNKNOWN)).any())
