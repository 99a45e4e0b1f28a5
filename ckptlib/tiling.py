"""Whether boxes cover a tensor exactly once (W3, R4). Pure (numpy only)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckptlib.errors import TilingError
from ckptlib.sharding import Box

Int64s = npt.NDArray[np.int64]


def check_tiling(key: str, global_shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Checks that boxes cover a tensor exactly once.

    Boxes inside the tensor whose volumes add up to its volume and that are pairwise disjoint tile it.

    Raises:
        TilingError: names the tensor, and a hole, an overlap, or a box that leaves the tensor.
    """
    for box in boxes:
        if not box.within(global_shape):
            raise TilingError(f"tensor {key!r}: box {box} exceeds the global shape {tuple(global_shape)}")
    full = [box for box in boxes if box.volume]
    if full:
        edges = np.array([[box.offset, box.end] for box in full], np.int64).reshape(len(full), 2, -1)
        clash = _find_overlap(edges[:, 0], edges[:, 1], np.arange(len(full)))
        if clash is not None:
            one, two = (full[i] for i in clash)
            raise TilingError(
                f"tensor {key!r}: {one} and {two} would both be written; one of them is a copy and needs a "
                "replica_id other than 0"
            )
    covered, wanted = sum(box.volume for box in full), math.prod(global_shape)
    if covered != wanted:
        raise TilingError(
            f"tensor {key!r}: {covered} of {wanted} elements would be written; no rank is the main replica "
            f"(replica_id 0) of the rest. Pieces: {', '.join(map(str, full[:8])) or 'none'}"
        )
    if wanted == 0 and not boxes:
        raise TilingError(f"tensor {key!r}: no rank is its main replica (replica_id 0)")


def _find_overlap(starts: Int64s, ends: Int64s, which: Int64s) -> tuple[int, int] | None:
    """Two boxes that overlap, or None. Splits along axes where the boxes fall apart; grids split completely."""
    if len(which) < 2:
        return None
    if starts.shape[1] == 0:  # 0-dimensional: two scalars are one place
        return int(which[0]), int(which[1])
    for axis in range(starts.shape[1]):
        order = np.argsort(starts[which, axis], kind="stable")
        ordered = which[order]
        reach = np.maximum.accumulate(ends[ordered, axis])
        cuts = np.flatnonzero(starts[ordered[1:], axis] >= reach[:-1]) + 1
        if len(cuts):
            for group in np.split(ordered, cuts):
                clash = _find_overlap(starts, ends, group)
                if clash is not None:
                    return clash
            return None
    for i, one in enumerate(which[:-1]):
        rest = which[i + 1 :]
        common = np.all((starts[rest] < ends[one]) & (starts[one] < ends[rest]), axis=1)
        if common.any():
            return int(one), int(rest[np.argmax(common)])
    return None
