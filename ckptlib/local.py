"""Checkpoints that every rank keeps on its own host: on a local SSD or in memory (``kind="non_persistent_local"``).

The pieces that the ranks save together carry one save id. Which sets can be resumed from and which pieces may go is
decided over what all ranks hold (`local_sets`), by messages over the job's store; each rank's own are in its hands
alone (`local_pieces`)::

    save     all      what I hold, need, and have room for         -> rank 0
             rank 0   what is complete, fence (W8), the save id    -> all
             all      remove what may go, save the own piece       agree, unless it is written in the background
    restore  all      what I hold                                  -> rank 0
             rank 0   the newest complete set                      -> all
             all      read the own piece, compare digests          agree; the next set when one is damaged
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ckptlib import commit, local_sets
from ckptlib.coordination import Group, agree, lead
from ckptlib.errors import (
    BackgroundSaveError,
    CheckpointExistsError,
    DisagreementError,
    FencedError,
    StateError,
    StorageError,
)
from ckptlib.events import ResumeChoice
from ckptlib.local_pieces import Pieces
from ckptlib.local_sets import Held, Known, SetId, World
from ckptlib.saving import SaveRequest, all_failures

ROOM = 1024 * 1024
"""Bytes beside its tensors that a piece needs at most, about: records, index, small files."""


@dataclass(frozen=True)
class LocalOptions:
    """Where ranks keep checkpoints of their own.

    Attributes:
        root: a directory on this host, the same path on all: a mounted SSD, or ``/dev/shm``. It is made if need be.
        keep: how many complete sets are kept. While a newer one is being written there is one piece more.

    Raises:
        StateError: a value is out of its range.
    """

    root: str
    keep: int = 1

    def __post_init__(self) -> None:
        if "://" in self.root or not os.path.isabs(self.root):
            raise StateError(
                f"local root {self.root!r}: expected an absolute path that every host has, as /dev/shm/checkpoints"
            )
        if self.keep < 1:
            raise StateError(f"local keep={self.keep}: expected at least 1")


@dataclass(frozen=True)
class Offer:
    """What a rank says before a local save.

    Attributes:
        disk: where it saves; see `Pieces.disk`.
        needed: bytes that it has yet to write, about: its new piece, and what is in flight.
        free: bytes of the disk.
        room: another save may be in flight.
        failed: its earlier saves that failed in the background.
        may_repeat: an iteration that this attempt has saved already may be saved again.
    """

    iteration: int
    held: tuple[Held, ...]
    disk: str
    needed: int
    free: int
    room: bool = True
    failed: tuple[BackgroundSaveError, ...] = ()
    may_repeat: bool = False


@dataclass(frozen=True)
class Chosen:
    """A set that all ranks have read and found whole, or why there is none."""

    set: SetId | None
    reason: str = ""

    @property
    def beside(self) -> str:
        """The end of a sentence about what was chosen instead; empty: no local checkpoint was to be expected."""
        return f"; local checkpoints are not used: {self.reason}" if self.set is None and self.reason else ""


class LocalTier:
    """The local checkpoints of all ranks, in one attempt.

    Args:
        pieces: this rank's.
        attempt: number of this attempt.
        newest_attempt: asked on rank 0 for fencing (W8).
    """

    def __init__(
        self,
        options: LocalOptions,
        world: World,
        pieces: Pieces,
        attempt: int,
        newest_attempt: Callable[[], int],
    ) -> None:
        self.pieces = pieces
        self._options = options
        self._world = world
        self._attempt = attempt
        self._newest_attempt = newest_attempt

    # --- saving -------------------------------------------------------------------------------------------------------

    def plan(
        self, group: Group, prepare: Callable[[], SaveRequest], has_room: Callable[[], bool]
    ) -> SaveRequest | None:
        """Agrees on a save of all ranks' pieces, and on what may go for it. Collective.

        Args:
            prepare: makes this rank's request; what it raises is known on all ranks.
            has_room: whether another save of this rank may be in flight.

        Returns:
            This rank's request, with the save id of the set; None: some rank has no room.

        Raises:
            BackgroundSaveError, CheckpointExistsError, DisagreementError, FencedError, RankFailedError: as any save.
            StorageError: the pieces of some ranks do not fit on their disk.
        """
        group.next_round()
        request: SaveRequest | None = None
        held: tuple[Held, ...] = ()

        def offer() -> Offer:
            nonlocal request, held
            request, held = prepare(), self.pieces.held()
            size = request.content.nbytes + ROOM
            in_flight = sum(max(0, size - each.nbytes) for each in held if each.pending)
            return Offer(
                request.begin.iteration,
                held,
                self.pieces.disk,
                size + in_flight,
                self.pieces.free,
                has_room(),
                tuple(request.failed),
                request.on_exists == "replace",
            )

        offers = agree(group, "local pieces", offer)
        decided = lead(group, "local set", lambda: self._decide(offers or []))
        if decided is None:
            return None
        save_id, known = decided
        assert request is not None  # else `agree` has raised
        going = [each.set for each in local_sets.removable(held, known, self._options.keep)]
        self.pieces.forget([each.save_id for each in going])
        self.pieces.sweep(known)
        return replace(
            request,
            begin=replace(request.begin, save_id=save_id),
            failed=(),
            removes=[(self.pieces.path(each.iteration), each.save_id) for each in going],
            replaces=False,
            on_exists="replace",  # what may not be repeated has been refused; what is left of a dead set goes
        )

    def _decide(self, offers: Sequence[Offer]) -> tuple[str, Known] | None:
        """Rank 0: the save id of the set, and what all ranks know of the older ones; None: some rank has no room."""
        failed = all_failures([offer.failed for offer in offers])
        if failed is not None:
            raise failed
        for rank, offer in enumerate(offers):
            if offer.iteration != offers[0].iteration:
                raise DisagreementError(
                    f"rank 0 saves iteration {offers[0].iteration} locally, rank {rank} iteration {offer.iteration}"
                )
        if not all(offer.room for offer in offers):
            return None
        newest = self._newest_attempt()
        if newest > self._attempt:
            raise FencedError(
                f"attempt {newest} of this run has started, this process is attempt {self._attempt}. It must stop."
            )
        holdings = [offer.held for offer in offers]
        known = local_sets.known(self._world, holdings, self._attempt)
        if not all(offer.may_repeat for offer in offers):
            self._refuse_to_repeat(offers[0].iteration, holdings, known)
        self._check_room(offers, known)
        ids = [each.set.save_id for held in holdings for each in held]
        return commit.new_save_id(self._attempt, after=ids), known

    def _refuse_to_repeat(self, iteration: int, holdings: local_sets.Holdings, known: Known) -> None:
        """W9. The older set of an iteration stays until the newer is complete; a save that failed may be repeated."""
        for each in local_sets.repeated(iteration, self._attempt, holdings, known):
            raise CheckpointExistsError(
                f"{self.pieces.path(iteration)}: iteration {iteration} is already committed (save {each.save_id}) by "
                "this attempt. Pass on_exists='replace' to supersede it."
            )

    def _check_room(self, offers: Sequence[Offer], known: Known) -> None:
        """Ranks of one host share its disk."""
        by_disk: dict[str, list[int]] = {}
        for rank, offer in enumerate(offers):
            by_disk.setdefault(offer.disk, []).append(rank)
        for ranks in by_disk.values():
            needed = sum(offers[rank].needed for rank in ranks)
            free = min(offers[rank].free for rank in ranks)
            going = [
                each for rank in ranks for each in local_sets.removable(offers[rank].held, known, self._options.keep)
            ]
            released = sum(each.nbytes for each in going)
            if free + released < needed:
                whose = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} of one host"
                raise StorageError(
                    errno.ENOSPC,
                    f"local root {self._options.root}: too small on {whose}: iteration {offers[0].iteration} needs "
                    f"{_size(needed)}; available are {_size(free)}, and {_size(released)} of older pieces go. Nothing "
                    "was written.",
                )

    # --- resuming -----------------------------------------------------------------------------------------------------

    def choose(
        self, group: Group, at: int | None, newer_than: tuple[int, int] | None, *, parts_only: bool = False
    ) -> Chosen:
        """The newest set that every rank has and has read back now. Collective.

        Args:
            at: exactly this iteration (R6).
            newer_than: (attempt, iteration) of the checkpoint that the run would resume from otherwise.
            parts_only: not all of a checkpoint is wanted, or not as it is: then it is none of these.
        """
        holdings = agree(group, "local pieces", self.pieces.held) or []
        if parts_only:
            best = lead(group, "local choice", lambda: self._pick(holdings, at, newer_than, {})).set
            what = f"of iteration {best.iteration} is loaded as it is, not tensor by tensor" if best else ""
            return Chosen(None, f"the local checkpoint {what}" if best else "")
        rejected: dict[str, str] = {}
        while True:
            step = len(rejected)
            chosen = lead(group, f"local choice {step}", lambda: self._pick(holdings, at, newer_than, rejected))
            if chosen.set is None:
                return chosen
            problems = self._read_together(group, chosen.set, step)
            if not problems:
                return chosen
            rank, text = next(iter(problems.items()))
            rejected[chosen.set.save_id] = (
                f"rank {rank} has a damaged local checkpoint of iteration {chosen.set.iteration}: {text}"
            )

    def _read_together(self, group: Group, wanted: SetId, step: int) -> dict[int, str]:
        """What is wrong with the pieces of a set, by rank."""
        found = agree(group, f"local read {step}", lambda: self.pieces.read(wanted)) or []
        return lead(group, f"local verdict {step}", lambda: {rank: text for rank, text in enumerate(found) if text})

    def _pick(
        self,
        holdings: list[tuple[Held, ...]],
        at: int | None,
        newer_than: tuple[int, int] | None,
        rejected: dict[str, str],
    ) -> Chosen:
        best = local_sets.candidates(self._world, holdings, at=at, newer_than=newer_than, rejected=rejected)
        passed = newer_than if not best else best[0].order[:2]
        why = local_sets.explain(self._world, holdings, at=at, newer_than=passed, rejected=rejected)
        if not best:
            return Chosen(None, why)
        reason = f"newest local checkpoint, complete on all {self._world.world_size} ranks and read back now"
        return Chosen(best[0], f"{reason}; {why}" if why else reason)

    def choice(self, chosen: SetId, reason: str) -> ResumeChoice:
        """This rank's piece as what to read."""
        return ResumeChoice(self.pieces.path(chosen.iteration), chosen.iteration, chosen.save_id, reason)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
