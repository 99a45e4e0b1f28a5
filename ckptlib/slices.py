"""A state in slices, for staging memory that is smaller than the state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptlib.errors import StagingError
from ckptlib.plan import Part
from ckptlib.staging import ALIGNMENT, aligned
from ckptlib.state import TensorLeaf
from ckptlib.writer import leaf_part


def slices(tensors: Sequence[TensorLeaf], capacity: int) -> list[list[TensorLeaf]]:
    """Tensors in their order, in groups of at most `capacity` bytes; what is larger is cut, along the first axis that
    lets the pieces fit. At least one group.

    Raises:
        StagingError: not even one element fits.
    """
    if capacity < ALIGNMENT:
        raise StagingError(f"{capacity} bytes of memory for staging: expected at least {ALIGNMENT}")
    groups: list[list[TensorLeaf]] = [[]]
    used = 0
    for leaf in tensors:
        for piece in cut(leaf, capacity):
            nbytes = aligned(piece.nbytes)
            if used + nbytes > capacity:
                groups.append([])
                used = 0
            groups[-1].append(piece)
            used += nbytes
    return groups


def cut(leaf: TensorLeaf, capacity: int) -> Iterator[TensorLeaf]:
    """Views of a leaf, each of at most `capacity` bytes, that together are the leaf."""
    if aligned(leaf.nbytes) <= capacity:
        yield leaf
        return
    shape = leaf.box.shape
    axis = next(axis for axis, size in enumerate(shape) if size > 1)  # more than one element: it is larger than one
    row = leaf.nbytes // shape[axis]
    count = max(1, capacity // ALIGNMENT * ALIGNMENT // row)
    for start in range(0, shape[axis], count):
        part = Part(0, axis, start, min(start + count, shape[axis]))
        yield from cut(leaf_part(leaf, part), capacity)
