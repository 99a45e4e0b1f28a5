"""Tied tensors: several names of one memory, as an embedding and the head that uses it again.

Both names are saved, and both are read into the same memory. That is right only where they hold the same values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
    first: dict[tuple[object, ...], TensorLeaf] = {}
    for leaf in leaves:
        if leaf.box.volume == 0:
            continue
        tensor = leaf.tensor
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        other = first.setdefault(place, leaf)
        if other.key != leaf.key and _differ(index.chunks(other.key), index.chunks(leaf.key)):
            raise StateError(
                f"tensors {other.key!r} and {leaf.key!r} are one memory here, but {url} holds different values for "
                "them. Nothing was loaded. Untie them, or leave one of them out with keys=[...]"
            )


def _differ(one: Chunks, other: Chunks) -> bool:
    if not (np.array_equal(one.offsets, other.offsets) and np.array_equal(one.shapes, other.shapes)):
        return False
    crcs, others = one.locations[:, _CRC32], other.locations[:, _CRC32]
    return bool(((crcs != others) & (crcs != UNKNOWN) & (others != UNKNOWN)).any())
