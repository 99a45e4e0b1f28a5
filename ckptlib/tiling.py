"""Whether boxes cover tensors exactly once (W3, R4), for one tensor or for a million at a time. Pure (numpy only)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptlib.errors import TilingError
from ckptlib.sharding import Box

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Boxes:
    """Boxes of many tensors as columns of equal length n. All tensors have D axes here: see `padded`.

    Attributes:
        tensors: (n,) number of the tensor that a box lies in, ascending.
        offsets, sizes: (n, D) the boxes.
    """

    tensors: Int64s
    offsets: Int64s
    sizes: Int64s

    def box(self, row: int, ndim: int) -> Box:
        """One box, of a tensor with `ndim` axes."""
        return Box(tuple(self.offsets[row, :ndim].tolist()), tuple(self.sizes[row, :ndim].tolist()))


def padded(rows: Sequence[Sequence[int]], axes: int, fill: int) -> Int64s:
    """Rows of different lengths as one (n, axes) array. Shapes and sizes are filled with 1, offsets with 0."""
    out = np.full((len(rows), axes), fill, np.int64)
    by_length: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        by_length.setdefault(len(row), []).append(i)
    for length, which in by_length.items():
        if length:
            out[which, :length] = [rows[i] for i in which]
    return out


def stacked(tables: Sequence[Int64s], axes: int, fill: int) -> Int64s:
    """(n_i, D_i) tables below each other, as one (sum of n_i, axes) table; see `padded`."""
    if tables and all(table.shape[1] == axes for table in tables):
        return np.concatenate(tables)
    out = np.full((sum(map(len, tables)), axes), fill, np.int64)
    at = 0
    for table in tables:
        out[at : at + len(table), : table.shape[1]] = table
        at += len(table)
    return out


def sorted_rows(*columns: Int64s) -> Int64s:
    """Row numbers in lexical order, the first column most significant. A column of one value costs no sort."""
    varying = [column for column in columns if len(column) and column.min() != column.max()]
    return np.lexsort(varying[::-1]) if varying else np.arange(len(columns[0]))


def check_tiling(key: str, global_shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Checks that boxes cover a tensor exactly once. See `check_tilings`."""
    ndim = len(global_shape)
    for box in boxes:
        if len(box.shape) != ndim:
            raise TilingError(f"tensor {key!r}: box {box} has not the axes of the global shape {tuple(global_shape)}")
    axes = max(ndim, 1)
    columns = Boxes(
        np.zeros(len(boxes), np.int64),
        padded([box.offset for box in boxes], axes, 0),
        padded([box.shape for box in boxes], axes, 1),
    )
    check_tilings([key], padded([global_shape], axes, 1), np.array([ndim]), columns)


def check_tilings(keys: Sequence[str], shapes: Int64s, ndims: npt.NDArray[np.integer], boxes: Boxes) -> None:
    """Checks that every tensor is covered exactly once.

    Boxes inside a tensor whose volumes add up to its volume and that are pairwise disjoint tile it. Tensors that are
    cut along one axis only, which are nearly all, are checked together; the others one by one.

    Args:
        keys: names of the tensors.
        shapes: (len(keys), D) global shapes, filled with 1.
        ndims: (len(keys),) their numbers of axes.
        boxes: of their main replicas.

    Raises:
        TilingError: names a tensor, and a hole, an overlap, or a box that leaves the tensor.
    """
    outside = (boxes.offsets + boxes.sizes > shapes[boxes.tensors]).any(axis=1)
    if outside.any():
        row = int(np.argmax(outside))
        at = int(boxes.tensors[row])
        raise TilingError(
            f"tensor {keys[at]!r}: box {boxes.box(row, int(ndims[at]))} exceeds the global shape "
            f"{_shape(shapes, ndims, at)}"
        )
    volumes = boxes.sizes.prod(axis=1)
    covered = np.zeros(len(keys), np.int64)
    np.add.at(covered, boxes.tensors, volumes)
    wanted = shapes.prod(axis=1)
    full = np.flatnonzero(volumes)
    _check_disjoint(keys, shapes, ndims, Boxes(boxes.tensors[full], boxes.offsets[full], boxes.sizes[full]))
    lacking = np.flatnonzero(covered != wanted)
    if len(lacking):
        at = int(lacking[0])
        rows = np.flatnonzero((boxes.tensors == at) & (volumes > 0))[:8]
        pieces = ", ".join(str(boxes.box(int(row), int(ndims[at]))) for row in rows)
        raise TilingError(
            f"tensor {keys[at]!r}: {covered[at]} of {wanted[at]} elements are covered; no rank is the main "
            f"replica (replica_id 0) of the rest. Pieces: {pieces or 'none'}"
        )
    absent = np.flatnonzero(np.bincount(boxes.tensors, minlength=len(keys)) == 0)
    if len(absent):
        raise TilingError(f"tensor {keys[int(absent[0])]!r}: no rank is its main replica (replica_id 0)")


def _check_disjoint(keys: Sequence[str], shapes: Int64s, ndims: npt.NDArray[np.integer], boxes: Boxes) -> None:
    if not len(boxes.tensors):
        return
    cut = (boxes.offsets != 0) | (boxes.sizes != shapes[boxes.tensors])
    starts = np.flatnonzero(np.diff(boxes.tensors, prepend=-1))
    cut_axes = np.logical_or.reduceat(cut, starts, axis=0)
    slabs = cut_axes.sum(axis=1) <= 1
    axis = np.argmax(cut_axes, axis=1)  # 0 for a tensor that is not cut: its boxes are all the whole tensor
    tensor_rows = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(boxes.tensors))))
    row_axis = axis[tensor_rows][:, None]
    begin = np.take_along_axis(boxes.offsets, row_axis, axis=1)[:, 0]
    end = begin + np.take_along_axis(boxes.sizes, row_axis, axis=1)[:, 0]
    order = np.lexsort((begin, tensor_rows))
    same = (tensor_rows[order][1:] == tensor_rows[order][:-1]) & slabs[tensor_rows[order][1:]]
    clashes = np.flatnonzero(same & (begin[order][1:] < end[order][:-1]))
    if len(clashes):
        _raise_overlap(keys, ndims, boxes, int(order[clashes[0]]), int(order[clashes[0] + 1]))
    ends = boxes.offsets + boxes.sizes
    stops = np.append(starts[1:], len(boxes.tensors))
    for i in np.flatnonzero(~slabs):
        clash = _find_overlap(boxes.offsets, ends, np.arange(starts[i], stops[i]))
        if clash is not None:
            _raise_overlap(keys, ndims, boxes, *clash)


def _raise_overlap(keys: Sequence[str], ndims: npt.NDArray[np.integer], boxes: Boxes, one: int, two: int) -> None:
    at = int(boxes.tensors[one])
    first, second = sorted((one, two))
    raise TilingError(
        f"tensor {keys[at]!r}: {boxes.box(first, int(ndims[at]))} and {boxes.box(second, int(ndims[at]))} overlap; "
        "one of them is a copy and needs a replica_id other than 0"
    )


def _find_overlap(starts: Int64s, ends: Int64s, which: Int64s) -> tuple[int, int] | None:
    """Two boxes that overlap, or None. Splits along axes where the boxes fall apart; grids split completely."""
    if len(which) < 2:
        return None
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


def _shape(shapes: Int64s, ndims: npt.NDArray[np.integer], at: int) -> tuple[int, ...]:
    return tuple(shapes[at, : int(ndims[at])].tolist())
