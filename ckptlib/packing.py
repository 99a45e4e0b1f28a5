"""What one rank writes in one save: packed from its state, then written and recorded (W1, W2).

Packing serialises everything but the tensors, and refuses what cannot be saved; writing needs nothing of the training
process but the package, so it may happen elsewhere and later. What a package is made of depends on the format: here
are the shards of GLOBAL and TORCH_DCP, in `ckptlib.layouts` the whole state dicts of LOCAL and LEGACY.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from ckptlib import commit
from ckptlib import storage as st
from ckptlib.beats import Pulse
from ckptlib.figures import Times
from ckptlib.manifest import Begin, RankRecord
from ckptlib.pieces import LocalPlan, PieceTable
from ckptlib.plan import values_digest
from ckptlib.planning import Share
from ckptlib.safe_pickle import dump_object
from ckptlib.state import FlatState, TensorLeaf
from ckptlib.value_digest import value_digest
from ckptlib.writer import (
    Blob,
    RankFiles,
    data_file_name,
    leaf_part,
    payload_nbytes,
    serialise_objects,
    write_rank_files,
)


@dataclass(frozen=True)
class Package(ABC):
    """One rank's part of a save.

    Attributes:
        tensors: views of the state, or copies of them, in the order in which they are written.
        values_digest: of the values that every rank has (W3).
        is_sliceable: tensors may be cut along an axis, and are gone through once, in order.
    """

    tensors: Sequence[TensorLeaf]
    values_digest: str

    is_sliceable: ClassVar[bool] = False

    @property
    def nbytes(self) -> int:
        """Payload bytes of the tensors."""
        return payload_nbytes(self.tensors)

    @property
    @abstractmethod
    def other_nbytes(self) -> int:
        """Bytes of everything else."""

    @abstractmethod
    def names(self, save_id: str, rank: int) -> list[str]:
        """The files that `write` makes, relative to the iteration directory."""

    @abstractmethod
    def write(self, storage: st.Storage, path: str, save_id: str, rank: int, wrote: Callable[[int], None]) -> RankFiles:
        """Writes the rank's files, durable, under names that carry the save id (W1).

        Args:
            wrote: told of bytes as they are handed to the storage.

        Raises:
            OSError: the storage failed.
        """


class Content(Protocol):
    """What one rank brings to a save: for the plan, and then for the files."""

    @property
    def nbytes(self) -> int:
        """Payload bytes of its tensors; of those that several ranks have, only one writes them."""

    @property
    def unplanned_nbytes(self) -> int:
        """Bytes that it will write and that no plan counts, as far as they are known already."""

    @property
    def tensors(self) -> Sequence[TensorLeaf]:
        """Its tensors. Whoever sets that of a leaf to a copy has the copy saved."""

    @property
    def parts(self) -> Sequence[Any]:
        """The modules, optimizers and other objects with a state that it was made of."""

    def keep_values(self) -> None:
        """Makes it independent of everything in the state but the tensors."""

    def describe(self) -> LocalPlan:
        """What the plan has to know of it."""

    def pack(self, share: Share, value_digests: Mapping[str, str], *, leads: bool) -> Package:
        """This rank's part of the save, by its share of the plan.

        Args:
            value_digests: of this rank's values, by name.
            leads: this is rank 0.

        Raises:
            StateError: an object is not plain data; names its path.
        """


@dataclass(frozen=True)
class Shards(Package):
    """Chunks and objects, in a data file of this rank.

    Attributes:
        blobs: objects and values, serialised.
        common: the common state, serialised; on rank 0.
    """

    blobs: tuple[Blob, ...] = ()
    common: bytes | None = None

    is_sliceable: ClassVar[bool] = True

    @property
    def other_nbytes(self) -> int:
        """Bytes of everything but the tensors."""
        return sum(len(blob.data) for blob in self.blobs) + len(self.common or b"")

    def names(self, save_id: str, rank: int) -> list[str]:
        """See `Package.names`."""
        common = [] if self.common is None else [f"{commit.CONTROL}/{save_id}/{commit.COMMON}"]
        return [data_file_name(rank, 0, save_id), *common]

    def write(self, storage: st.Storage, path: str, save_id: str, rank: int, wrote: Callable[[int], None]) -> RankFiles:
        """See `Package.write`."""
        written = write_rank_files(storage, path, save_id, rank, self.blobs, self.tensors, wrote)
        if self.common is None:
            return written
        return written.with_file(commit.write_common(storage, path, save_id, self.common))


@dataclass(frozen=True)
class ShardedContent:
    """Leaves with places in global tensors.

    Attributes:
        with_common: the format keeps the plain values a second time, nested in one common state.
    """

    flat: FlatState
    with_common: bool = True

    @property
    def nbytes(self) -> int:
        """See `Content.nbytes`."""
        return sum(leaf.nbytes for leaf in self.flat.tensors)

    @property
    def unplanned_nbytes(self) -> int:
        """Its objects are small, and serialised later."""
        return 0

    @property
    def tensors(self) -> Sequence[TensorLeaf]:
        """See `Content.tensors`."""
        return self.flat.tensors

    @property
    def parts(self) -> Sequence[Any]:
        """See `Content.parts`."""
        return self.flat.parts

    def keep_values(self) -> None:
        """See `Content.keep_values`."""
        for cell in self.flat.objects:
            cell.data = copy.deepcopy(cell.data)
        for value in self.flat.values:
            value.value = copy.deepcopy(value.value)

    def describe(self) -> LocalPlan:
        """Metadata of this rank's leaves."""
        flat = self.flat
        return LocalPlan(
            tensors=PieceTable.build([leaf.piece() for leaf in flat.tensors]),
            objects={leaf.key: leaf.main for leaf in flat.objects},
            values={leaf.key: "" if leaf.of_rank else value_digest(leaf.value, leaf.key) for leaf in flat.values},
        )

    def pack(self, share: Share, value_digests: Mapping[str, str], *, leads: bool) -> Package:
        """See `Content.pack`; rank 0 also writes the common state."""
        flat, mine = self.flat, share.mine
        return Shards(
            blobs=tuple(serialise_objects(flat, mine.objects, mine.values)),
            common=dump_object(flat.common(), "common state") if leads and self.with_common else None,
            tensors=tuple(leaf_part(flat.tensors[part.piece], part) for part in mine.parts),
            values_digest=values_digest(value_digests, share.shared_values),
        )


def write_package(
    storage: st.Storage,
    path: str,
    begin: Begin,
    rank: int,
    package: Package,
    pulse: Pulse | None = None,
    times: Times | None = None,
    *,
    held_since: float | None = None,
) -> RankFiles:
    """Writes a rank's part of a save, durable, and then records it.

    Args:
        pulse: told of progress, and stopped before the record: what follows the records removes the beats.
        times: what is known before the write.
        held_since: nothing is; training waits for this write, since then, by `time.perf_counter`.

    Raises:
        OSError: the storage failed.
    """
    started = time.perf_counter()
    wrote = (lambda nbytes: None) if pulse is None else pulse.wrote
    written = package.write(storage, path, begin.save_id, rank, wrote)
    ended = time.perf_counter()
    times = times or Times(stall=None if held_since is None else ended - held_since)
    record = RankRecord(
        save_id=begin.save_id,
        rank=rank,
        world_size=begin.world_size,
        plan_digest=begin.plan_digest,
        files=written.files,
        items=written.items(),
        values_digest=package.values_digest,
        times=replace(times, write=ended - started),
    )
    if pulse is not None:
        pulse.stop()
    commit.publish_record(storage, path, record)
    return written


def unwrite(storage: st.Storage, path: str, save_id: str, rank: int, package: Package) -> None:
    """Removes what `write_package` left that did not come to its record, so that it can be called again."""
    storage.remove([st.join(path, name) for name in package.names(save_id, rank)])
