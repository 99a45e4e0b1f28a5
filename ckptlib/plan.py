"""Who writes what. Pure (numpy only).

Every rank describes its leaves; the plan gives each piece exactly one writer, checks that the pieces of every tensor
tile it (W3), and has a digest that binds the records of this save together (W2). What a load reads: `read_plan`.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptlib.errors import DisagreementError, TilingError
from ckptlib.sharding import Box
from ckptlib.tiling import check_tiling


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A rank's piece of a tensor. `main`: True: it writes; False: another copy does; None: the plan chooses."""

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    nbytes: int
    main: bool | None


@dataclass(frozen=True)
class LocalPlan:
    """What one rank has: metadata only.

    Attributes:
        tensors: its pieces, in the order of its leaves.
        objects: name of each grid cell -> whether this copy is the main one.
        values: name of each plain value -> its digest.
    """

    tensors: tuple[TensorPiece, ...]
    objects: Mapping[str, bool]
    values: Mapping[str, str]


@dataclass(frozen=True)
class RankPlan:
    """What one rank writes: indices into its `LocalPlan.tensors`, and names."""

    tensors: tuple[int, ...] = ()
    objects: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class WritePlan:
    """One `RankPlan` per rank.

    Attributes:
        shared_values: values that every rank has: their common digest goes into every record (W3).
        digest: SHA-256 over everything that must not change between planning and commit.
    """

    ranks: tuple[RankPlan, ...]
    shared_values: tuple[str, ...]
    digest: str


@dataclass
class _Assignment:
    tensors: list[int] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    nbytes: int = 0


def make_write_plan(local_plans: Sequence[LocalPlan]) -> WritePlan:
    """Chooses one writer for each piece. Deterministic: every rank could compute it alone.

    Pieces that several ranks hold alike go to the one with the fewest bytes so far, big pieces first.

    Raises:
        DisagreementError: ranks disagree about a tensor's dtype or shape, about a plain value, or about what a name is.
        TilingError: the pieces that would be written do not cover a tensor exactly once.
    """
    _check_names(local_plans)
    ranks = [_Assignment() for _ in local_plans]
    shared: dict[tuple[str, Box], list[tuple[int, int]]] = defaultdict(list)
    written: dict[str, list[Box]] = defaultdict(list)
    described: dict[str, tuple[TensorPiece, int]] = {}
    for rank, local in enumerate(local_plans):
        for i, piece in enumerate(local.tensors):
            first, first_rank = described.setdefault(piece.key, (piece, rank))
            if (first.dtype, first.global_shape) != (piece.dtype, piece.global_shape):
                raise DisagreementError(
                    f"tensor {piece.key!r}: rank {first_rank} has {first.dtype} {first.global_shape}, "
                    f"rank {rank} has {piece.dtype} {piece.global_shape}"
                )
            if piece.box.volume == 0 and 0 not in piece.global_shape:
                continue  # an empty shard of a tensor that has elements: nothing to write
            if piece.main is None:
                shared[piece.key, piece.box].append((rank, i))
            elif piece.main:
                written[piece.key].append(piece.box)
                ranks[rank].tensors.append(i)
                ranks[rank].nbytes += piece.nbytes
    _assign_shared(local_plans, ranks, shared, written)
    for key, (piece, _) in described.items():
        check_tiling(key, piece.global_shape, written.get(key, []))
    _assign_objects(local_plans, ranks)
    shared_values = _assign_values(local_plans, ranks)
    plans = tuple(RankPlan(tuple(sorted(r.tensors)), tuple(sorted(r.objects)), tuple(sorted(r.values))) for r in ranks)
    return WritePlan(plans, shared_values, _plan_digest(local_plans, plans, shared_values))


def _check_names(local_plans: Sequence[LocalPlan]) -> None:
    """A name is a tensor, an object or a value: all of them share one namespace on storage."""
    kinds: dict[str, tuple[str, int]] = {}
    for rank, local in enumerate(local_plans):
        tensors = {piece.key: True for piece in local.tensors}
        for kind, names in (("tensor", tensors), ("sharded object", local.objects), ("plain value", local.values)):
            for name in names:
                first, first_rank = kinds.setdefault(name, (kind, rank))
                if first != kind:
                    raise DisagreementError(
                        f"{name!r}: rank {first_rank} has a {first} of this name, rank {rank} a {kind}; "
                        "one name can hold one of them. Rename one."
                    )


def _assign_shared(
    local_plans: Sequence[LocalPlan],
    ranks: list[_Assignment],
    shared: Mapping[tuple[str, Box], list[tuple[int, int]]],
    written: dict[str, list[Box]],
) -> None:
    def weight(item: tuple[tuple[str, Box], list[tuple[int, int]]]) -> tuple[int, str, tuple[int, ...]]:
        (key, box), holders = item
        rank, i = holders[0]
        return (-local_plans[rank].tensors[i].nbytes, key, box.offset)

    for (key, box), holders in sorted(shared.items(), key=weight):
        if box.volume == 0 and 0 not in local_plans[holders[0][0]].tensors[holders[0][1]].global_shape:
            continue  # an empty shard of a tensor that has elements: nothing to write
        rank, i = min(holders, key=lambda holder: (ranks[holder[0]].nbytes, holder[0]))
        ranks[rank].tensors.append(i)
        ranks[rank].nbytes += local_plans[rank].tensors[i].nbytes
        written[key].append(box)


def _assign_objects(local_plans: Sequence[LocalPlan], ranks: list[_Assignment]) -> None:
    writer: dict[str, int] = {}
    for rank, local in enumerate(local_plans):
        for key, main in local.objects.items():
            if not main:
                continue
            if key in writer:
                raise TilingError(f"object {key!r}: ranks {writer[key]} and {rank} both call theirs the main replica")
            writer[key] = rank
            ranks[rank].objects.append(key)
    for rank, local in enumerate(local_plans):
        for key in local.objects:
            if key not in writer:
                raise TilingError(f"object {key!r}: rank {rank} has a copy, no rank calls its copy the main replica")


def _assign_values(local_plans: Sequence[LocalPlan], ranks: list[_Assignment]) -> tuple[str, ...]:
    first: dict[str, int] = {}
    for rank, local in enumerate(local_plans):
        for key, digest in local.values.items():
            owner = first.setdefault(key, rank)
            if local_plans[owner].values[key] != digest:
                raise DisagreementError(
                    f"value {key!r} differs between rank {owner} and rank {rank}. A value that belongs to one rank "
                    "goes into a ShardedObject (one cell per rank) or a LocalNonpersistentObject (not saved)."
                )
    for key, rank in first.items():
        ranks[rank].values.append(key)
    return tuple(sorted(key for key in first if all(key in local.values for local in local_plans)))


def _plan_digest(local_plans: Sequence[LocalPlan], plans: Sequence[RankPlan], shared_values: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for local, plan in zip(local_plans, plans, strict=True):
        pieces = [
            [p.key, p.dtype, p.global_shape, p.box.offset, p.box.shape]
            for p in map(local.tensors.__getitem__, plan.tensors)
        ]
        digest.update(json.dumps([pieces, plan.objects, plan.values]).encode())
    digest.update(json.dumps(list(shared_values)).encode())
    return digest.hexdigest()


def values_digest(values: Mapping[str, str], shared_values: Sequence[str]) -> str:
    """One digest over the shared values of a rank (W3)."""
    return hashlib.sha256(json.dumps([[key, values[key]] for key in shared_values]).encode()).hexdigest()
