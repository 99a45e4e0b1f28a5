"""Sets of local checkpoints: which can be resumed from, and which may go. Pure.

Every rank keeps its own piece of a set on its own host. A set is worth something only while every rank of the same
world has its piece, so two decisions are made over what *all* ranks say they hold, on rank 0:

* resume: the newest set of which nothing is missing (`candidates`), or why there is none (`explain`);
* removal: only what is older than the newest set that was committed on every rank (`removable`). A rank that has
  committed a newer piece does not know whether the others have; what all of them can agree on stays until they do.

Where the pieces of a set lie is decided in one place (`placement`): today, a rank's piece is of use to that rank alone,
on the host that it runs on. Pieces that peers keep for each other would be found there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckptlib.manifest import Piece
from ckptlib.topology import Topology


@dataclass(frozen=True)
class World:
    """Who resumes: pieces of another run, of more or fewer ranks, or of other places are of no use to it."""

    root_id: str
    world_size: int
    topology: Topology | None = None

    def takes(self, piece: Piece) -> bool:
        """Whether a piece was saved by such a world."""
        return (piece.root_id, piece.world_size, _places(piece.topology, piece.world_size)) == (
            self.root_id,
            self.world_size,
            _places(self.topology, self.world_size),
        )


def _places(topology: Topology | None, world_size: int) -> Topology:
    return topology or Topology(dp=world_size)


@dataclass(frozen=True)
class SetId:
    """Which set. The save id alone tells sets apart; the rest guards against records that contradict each other."""

    attempt: int
    iteration: int
    save_id: str
    attempt_id: str

    @property
    def order(self) -> tuple[int, int, str]:
        """(attempt, iteration, save id): the order of checkpoints."""
        return self.attempt, self.iteration, self.save_id


@dataclass(frozen=True)
class Held:
    """A piece that a rank has found on its host.

    Attributes:
        pending: its save may still be committed.
        aborted: its save failed: it will never be committed.
        damage: why it must not be used; empty: nothing is known against it.
        nbytes: that it takes on the disk.
    """

    set: SetId
    piece: Piece
    pending: bool = False
    aborted: bool = False
    damage: str = ""
    nbytes: int = 0

    @property
    def usable(self) -> bool:
        """Committed, and nothing is known against it."""
        return not (self.pending or self.aborted or self.damage)


Holdings = Sequence[Sequence[Held]]
"""What each rank holds, by rank."""


def placement(set_id: SetId, world: World, holdings: Holdings) -> Mapping[int, int]:
    """Which rank's host has the piece of each rank: piece -> holder. Incomplete where a piece is nowhere."""

    def is_it(held: Held, rank: int) -> bool:
        return held.usable and held.set == set_id and held.piece.rank == rank and world.takes(held.piece)

    return {rank: rank for rank, held in enumerate(holdings) if any(is_it(each, rank) for each in held)}


def complete(world: World, holdings: Holdings) -> list[SetId]:
    """The sets of which every rank has its piece, newest first."""
    known = {each.set for each in (holdings[0] if holdings else ())}  # what rank 0 lacks is not complete
    found = [each for each in known if len(placement(each, world, holdings)) == world.world_size]
    return sorted(found, key=lambda each: each.order, reverse=True)


def candidates(
    world: World, holdings: Holdings, *, at: int | None, newer_than: tuple[int, int] | None, rejected: Collection[str]
) -> list[SetId]:
    """What may be resumed from, the best first.

    Args:
        at: exactly this iteration; 0 is one (R6).
        newer_than: (attempt, iteration) of the checkpoint on the run's storage, which is as good; None: there is none.
        rejected: save ids that turned out to be damaged.
    """
    return [
        each
        for each in complete(world, holdings)
        if at in (None, each.iteration)
        and (newer_than is None or (each.attempt, each.iteration) > newer_than)
        and each.save_id not in rejected
    ]


def explain(
    world: World, holdings: Holdings, *, at: int | None, newer_than: tuple[int, int] | None, rejected: Mapping[str, str]
) -> str:
    """Why the newest set that anybody has a piece of is not resumed from; empty: no set was to be expected.

    Args:
        rejected: save id -> what was found when it was read.
    """
    wanted = [
        each
        for held in holdings
        for each in held
        if at in (None, each.set.iteration)
        and (newer_than is None or (each.set.attempt, each.set.iteration) > newer_than)
    ]
    if not wanted:
        return ""
    newest = max(wanted, key=lambda each: each.set.order)
    iteration = newest.set.iteration
    if newest.set.save_id in rejected:
        return rejected[newest.set.save_id]
    if newest.piece.root_id == world.root_id and newest.piece.world_size != world.world_size:
        return (
            f"the local checkpoint of iteration {iteration} is of {newest.piece.world_size} ranks, "
            f"this job has {world.world_size}"
        )
    if not world.takes(newest.piece):
        saved, now = (_places(of.topology, of.world_size) for of in (newest.piece, world))
        return f"the local checkpoint of iteration {iteration} is of topology {saved}, this job is {now}"
    lacking = sorted({*range(world.world_size)} - {*placement(newest.set, world, holdings)})
    if not lacking:
        return ""
    rank = lacking[0]
    more = f" (and {len(lacking) - 1} more of {world.world_size} ranks)" if len(lacking) > 1 else ""
    return f"rank {rank} {_state(holdings[rank], newest.set)}{more}"


def _state(held: Sequence[Held], wanted: SetId) -> str:
    """What a rank has instead of its piece of a set."""
    own = next((each for each in held if each.set.save_id == wanted.save_id), None)
    if own is not None and own.damage:
        return f"has a damaged local checkpoint of iteration {wanted.iteration}: {own.damage}"
    if own is not None and (own.pending or own.aborted):
        return f"did not finish its local checkpoint of iteration {wanted.iteration}"
    if any(each.set.iteration == wanted.iteration for each in held):
        return f"has a local checkpoint of iteration {wanted.iteration}, but of another save"
    others = sorted({each.set.iteration for each in held if each.usable})
    has = f", but of {', '.join(map(str, others))}" if others else ""
    return f"has no local checkpoint of iteration {wanted.iteration}{has}"


# --- removal ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """What all ranks learn before a save: what is complete on all of them, newest first, and what never will be."""

    complete: tuple[SetId, ...] = ()
    dead: frozenset[str] = frozenset()


def known(world: World, holdings: Holdings, attempt: int) -> Known:
    """What the ranks of `attempt` know together.

    Dead are sets of this very attempt that some rank neither has nor is still writing: it failed there. Nothing is
    said against sets of older attempts: a rank that finds none of its pieces may be looking in the wrong place.
    """
    everywhere = frozenset.intersection(
        *(frozenset(each.set.save_id for each in held if not each.aborted) for held in holdings)
    )
    mine = {each.set.save_id for held in holdings for each in held if each.set.attempt == attempt}
    return Known(tuple(complete(world, holdings)), frozenset(mine - everywhere))


def repeated(iteration: int, attempt: int, holdings: Holdings, known: Known) -> list[SetId]:
    """Sets of this attempt that a save of this iteration would repeat: complete ones, and what may yet be complete.

    What rank 0 has of a set that failed elsewhere is none.
    """
    pending = {held.set for one in holdings for held in one if held.pending and held.set.save_id not in known.dead}
    found = {*known.complete, *pending}
    return sorted(
        (each for each in found if (each.attempt, each.iteration) == (attempt, iteration)), key=lambda each: each.order
    )


def removable(held: Sequence[Held], known: Known, keep: int) -> list[Held]:
    """What one rank may remove before it writes its next piece.

    The newest `keep` complete sets stay, and everything that is newer than the newest of them and may yet become
    complete.

    Args:
        keep: 1 or more.
    """
    kept = {each.save_id for each in known.complete[:keep]}
    newest = known.complete[0].order if known.complete else None
    return [
        each
        for each in held
        if not each.pending
        and each.set.save_id not in kept
        and (each.set.save_id in known.dead or (newest is not None and each.set.order < newest))
    ]
