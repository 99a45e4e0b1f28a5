"""What one rank writes in one save: packed from its state, then written and recorded (W1, W2).

Packing serialises everything but the tensors, and refuses what cannot be saved; writing needs nothing of the training
process but the package, so it may happen elsewhere and later.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from ckptlib import commit
from ckptlib import storage as st
from ckptlib.beats import Pulse
from ckptlib.manifest import Begin, RankRecord
from ckptlib.plan import values_digest
from ckptlib.planning import Share
from ckptlib.safe_pickle import dump_object
from ckptlib.state import FlatState, TensorLeaf
from ckptlib.writer import Blob, RankFiles, leaf_part, serialise_objects, write_rank_files


@dataclass(frozen=True)
class Package:
    """One rank's part of a save.

    Attributes:
        blobs: objects and values, serialised.
        common: the common state, serialised; on rank 0.
        tensors: views of the state, or copies of them.
        values_digest: of the values that every rank has (W3).
    """

    blobs: tuple[Blob, ...]
    common: bytes | None
    tensors: tuple[TensorLeaf, ...]
    values_digest: str

    @property
    def nbytes(self) -> int:
        """Payload bytes of the tensors."""
        return sum(leaf.nbytes for leaf in self.tensors)

    @property
    def other_nbytes(self) -> int:
        """Bytes of everything else."""
        return sum(len(blob.data) for blob in self.blobs) + len(self.common or b"")


def pack(flat: FlatState, share: Share, value_digests: Mapping[str, str], *, leads: bool) -> Package:
    """This rank's part of a save, by its share of the plan.

    Args:
        value_digests: of this rank's values, by name.
        leads: this is rank 0, which also writes the common state.

    Raises:
        StateError: an object is not plain data; names its path.
    """
    mine = share.mine
    return Package(
        blobs=tuple(serialise_objects(flat, mine.objects, mine.values)),
        common=dump_object(flat.common(), "common state") if leads else None,
        tensors=tuple(leaf_part(flat.tensors[part.piece], part) for part in mine.parts),
        values_digest=values_digest(value_digests, share.shared_values),
    )


def write_package(
    storage: st.Storage, path: str, begin: Begin, rank: int, package: Package, pulse: Pulse | None = None
) -> RankFiles:
    """Writes a rank's part of a save, durable, and then records it.

    Args:
        pulse: told of progress, and stopped before the record: what follows the records removes the beats.

    Raises:
        OSError: the storage failed.
    """
    started = time.perf_counter()
    wrote = (lambda nbytes: None) if pulse is None else pulse.wrote
    written = write_rank_files(storage, path, begin.save_id, rank, package.blobs, package.tensors, wrote)
    files = written.files
    if package.common is not None:
        files += (commit.write_common(storage, path, begin.save_id, package.common),)
    record = RankRecord(
        save_id=begin.save_id,
        rank=rank,
        world_size=begin.world_size,
        plan_digest=begin.plan_digest,
        files=files,
        items=written.items(),
        values_digest=package.values_digest,
        seconds=time.perf_counter() - started,
    )
    if pulse is not None:
        pulse.stop()
    commit.publish_record(storage, path, record)
    return written
