"""What a rank has, as columns: the input of plans. Pure (numpy only).

There is no object per piece once a table is built, so that a plan over a million pieces is numpy work, and what
ranks exchange is a few arrays.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptlib.sharding import Box
from ckptlib.tiling import padded

Int64s = npt.NDArray[np.int64]

CHOOSE, COPY, MAIN = -1, 0, 1
"""In the column `main`: every holder has the same and the plan chooses; another holder is the main replica; this is."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A rank's piece of a tensor. `main`: True: the main replica; False: a copy; None: the plan chooses."""

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    nbytes: int
    main: bool | None


@dataclass(frozen=True)
class PieceTable:
    """The pieces of one rank as columns of equal length n, in the order of its leaves.

    Axes beyond a tensor's own number of them have size 1 and offset 0, so that all pieces have D axes.

    Attributes:
        keys: (n,) names of the global tensors.
        dtypes: the different dtypes, sorted.
        dtype: (n,) int16, index into `dtypes`.
        ndim: (n,) int16, a tensor's own number of axes.
        shapes, offsets, sizes: (n, D) int64: global shapes and boxes.
        nbytes: (n,) int64, payload bytes.
        main: (n,) int8: `MAIN`, `COPY` or `CHOOSE`.
    """

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    dtype: npt.NDArray[np.int16]
    ndim: npt.NDArray[np.int16]
    shapes: Int64s
    offsets: Int64s
    sizes: Int64s
    nbytes: Int64s
    main: npt.NDArray[np.int8]

    @classmethod
    def build(cls, pieces: Sequence[TensorPiece]) -> PieceTable:
        """The table of these pieces, in their order."""
        axes = max((len(piece.global_shape) for piece in pieces), default=0) or 1
        dtypes = tuple(sorted({piece.dtype for piece in pieces}))
        codes = {name: code for code, name in enumerate(dtypes)}
        return cls(
            keys=tuple(piece.key for piece in pieces),
            dtypes=dtypes,
            dtype=np.array([codes[piece.dtype] for piece in pieces], np.int16),
            ndim=np.array([len(piece.global_shape) for piece in pieces], np.int16),
            shapes=padded([piece.global_shape for piece in pieces], axes, 1),
            offsets=padded([piece.box.offset for piece in pieces], axes, 0),
            sizes=padded([piece.box.shape for piece in pieces], axes, 1),
            nbytes=np.array([piece.nbytes for piece in pieces], np.int64),
            main=np.array([CHOOSE if piece.main is None else int(piece.main) for piece in pieces], np.int8),
        )

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, i: int) -> TensorPiece:
        ndim = int(self.ndim[i])
        shape, offset, size = (tuple(column[i, :ndim].tolist()) for column in (self.shapes, self.offsets, self.sizes))
        main = None if self.main[i] == CHOOSE else bool(self.main[i])
        return TensorPiece(
            self.keys[i], self.dtypes[self.dtype[i]], shape, Box(offset, size), int(self.nbytes[i]), main
        )

    def __iter__(self) -> Iterator[TensorPiece]:
        return map(self.__getitem__, range(len(self)))

    def update(self, digest: hashlib._Hash) -> None:
        """Feeds everything that the table says into a digest."""
        digest.update(json.dumps([self.keys, self.dtypes, self.shapes.shape]).encode())
        for column in (self.dtype, self.ndim, self.shapes, self.offsets, self.sizes, self.nbytes, self.main):
            digest.update(np.ascontiguousarray(column).tobytes())


@dataclass(frozen=True)
class LocalPlan:
    """What one rank has: metadata only.

    Attributes:
        tensors: its pieces, in the order of its leaves.
        objects: name of each grid cell -> whether this copy is the main one.
        values: name of each plain value -> its digest.
    """

    tensors: PieceTable
    objects: Mapping[str, bool]
    values: Mapping[str, str]

    @functools.cached_property
    def structure(self) -> str:
        """SHA-256 of all that is planned: everything but the contents of the values."""
        digest = hashlib.sha256()
        self.tensors.update(digest)
        digest.update(json.dumps([sorted(self.objects.items()), sorted(self.values)]).encode())
        return digest.hexdigest()
