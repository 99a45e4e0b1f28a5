"""Checkpoints that every rank keeps on its own host: on a local SSD or in memory (``kind="non_persistent_local"``).

    <local root>/<root id>/rank_00003/           one rank of one run
        iter_0000100/                            a complete checkpoint of a world of one, as any other
        .ckpt/owner.json                         the attempt that uses this directory
        .ckpt/suspect/<save_id>                  what was found when that piece was read

The pieces that the ranks save together carry one save id. Which sets can be resumed from and which pieces may go is
decided over what all ranks hold (`local_sets`), by messages over the job's store::

    save     all      what I hold, need, and have room for         -> rank 0
             rank 0   what is complete, fence (W8), the save id    -> all
             all      remove what may go, save the own piece       agree, unless it is written in the background
    restore  all      what I hold                                  -> rank 0
             rank 0   the newest complete set                      -> all
             all      read the own piece, compare digests          agree; the next set when one is damaged
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ckptlib import commit, local_sets, records, removal, roots, settling
from ckptlib import storage as st
from ckptlib.coordination import Group, agree, lead
from ckptlib.errors import (
    BackgroundSaveError,
    CheckpointExistsError,
    CkptError,
    DisagreementError,
    FencedError,
    RecordError,
    StateError,
    StorageError,
)
from ckptlib.events import Notice, NoticeHandler, ResumeChoice, emit
from ckptlib.local_sets import Held, Known, SetId, World
from ckptlib.manifest import Piece
from ckptlib.saving import SaveRequest, tell_of_failures

log = logging.getLogger("ckptlib")

OWNER, SUSPECT = "owner.json", "suspect"
_RANK = re.compile(r"rank_(\d{5,})")
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
                f"local root {self.root!r}: expected an absolute path on each host, as /dev/shm/checkpoints"
            )
        if self.keep < 1:
            raise StateError(f"local keep={self.keep}: expected at least 1")


@dataclass(frozen=True)
class Offer:
    """What a rank says before a local save.

    Attributes:
        needed, free: bytes: of its new piece, about; on its disk.
        room: another save may be in flight.
        failed: its earlier saves that failed in the background.
    """

    iteration: int
    held: tuple[Held, ...]
    needed: int
    free: int
    room: bool = True
    failed: tuple[BackgroundSaveError, ...] = ()


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
    """One rank's local checkpoints in one attempt.

    Args:
        root_id: of the run's root.
        attempt: number of this attempt.
        newest_attempt: asked on rank 0 for fencing (W8).
    """

    def __init__(
        self,
        options: LocalOptions,
        world: World,
        rank: int,
        attempt: int,
        newest_attempt: Callable[[], int],
        on_event: NoticeHandler | None,
    ) -> None:
        self.storage = st.PosixStorage()
        self._options = options
        self._world = world
        self._rank = rank
        self._attempt = attempt
        self._newest_attempt = newest_attempt
        self._on_event = on_event
        self._run_directory = st.join(os.path.normpath(options.root), world.root_id)
        self._directory = st.join(self._run_directory, f"rank_{rank:05d}")
        self._swept = False

    @property
    def piece(self) -> Piece:
        """What this rank's pieces say of themselves."""
        return Piece(self._world.root_id, self._rank, self._world.world_size, self._world.topology)

    def path(self, iteration: int) -> str:
        """Directory of this rank's piece."""
        return st.join(self._directory, roots.iteration_name(iteration))

    def open(self, run: str, settle_wait: float) -> None:
        """Takes this rank's directory over from older attempts: what they left unfinished is committed, or goes (W8).

        Raises:
            StorageError: the directory cannot be used.
        """
        owner = {"run": run, "rank": self._rank, "attempt": self._attempt, "world_size": self._world.world_size}
        try:
            self.storage.put(st.join(self._directory, commit.CONTROL, OWNER), records.encode("owner", owner))
        except OSError as error:
            raise StorageError(
                error.errno or errno.EIO,
                f"local root {self._options.root}: rank {self._rank} cannot write there: {error}. Each rank needs a "
                "directory of its host that it may make and write to.",
            ) from error
        settling.settle(self.storage, self._directory, self._attempt, wait=settle_wait)
        for found in roots.scan(self.storage, self._directory).found:
            unfinished = found.state in ("aborted", "undecided") and found.order[0] < self._attempt
            if unfinished and found.save is not None:
                removal.remove_all(self.storage, [(found.path, found.save.save_id)])
                self._tell("local_leftover_removed", f"{found.url}: save {found.save.save_id}: {found.reason}")

    # --- what is here -------------------------------------------------------------------------------------------------

    def held(self) -> tuple[Held, ...]:
        """This rank's pieces, by their records: nothing of their data is read."""
        return tuple(self._held_in(self._directory))

    def _held_in(self, directory: str) -> Iterator[Held]:
        suspect = st.join(directory, commit.CONTROL, SUSPECT)
        suspects = {entry.name for entry in self.storage.list(suspect)}
        for found in roots.scan(self.storage, directory).found:
            begin = None if found.save is None else found.save.begin
            if begin is None or begin.piece is None or begin.piece.root_id != self._world.root_id:
                continue
            pending = found.state == "undecided" and begin.attempt == self._attempt
            damage = ""
            if begin.save_id in suspects:
                damage = self.storage.get(st.join(suspect, begin.save_id)).decode(errors="replace")
            elif found.state not in ("committed", "aborted") and not pending:
                damage = found.reason or found.state
            yield Held(
                SetId(begin.attempt, begin.iteration, begin.save_id, begin.attempt_id),
                begin.piece,
                pending=pending,
                aborted=found.state == "aborted",
                damage=damage,
                nbytes=sum(entry.size for entry in self.storage.list(found.path)),
            )

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
            StorageError: the piece of some rank does not fit on its disk.
        """
        group.next_round()
        request: SaveRequest | None = None

        def offer() -> Offer:
            nonlocal request
            request = prepare()
            held = self.held()
            self._refuse_to_repeat(request, held)
            size = request.content.nbytes + ROOM
            # What is being written has its place already, in part.
            promised = sum(max(0, size - each.nbytes) for each in held if each.pending)
            free = self._free() - promised
            return Offer(request.begin.iteration, held, size, free, has_room(), tuple(request.failed))

        offers = agree(group, "local pieces", offer)
        decided = lead(group, "local set", lambda: self._decide(offers or []))
        if decided is None:
            return None
        save_id, known = decided
        assert request is not None  # else `agree` has raised
        mine = self.held() if group.rank else (offers or [])[0].held
        removes = [
            (self.path(each.set.iteration), each.set.save_id)
            for each in local_sets.removable(mine, known, self._options.keep)
        ]
        self._forget({save_id for _, save_id in removes})
        self._sweep(known)
        return replace(
            request, begin=replace(request.begin, save_id=save_id), failed=(), removes=removes, replaces=False
        )

    def _refuse_to_repeat(self, request: SaveRequest, held: tuple[Held, ...]) -> None:
        """W9. The older save of an iteration stays until the newer is complete everywhere."""
        iteration = request.begin.iteration
        same = [each for each in held if (each.set.attempt, each.set.iteration) == (self._attempt, iteration)]
        if request.on_exists != "replace" and any(each.usable for each in same):
            raise CheckpointExistsError(
                f"{self.path(iteration)}: iteration {iteration} is already committed (save {same[-1].set.save_id}) by "
                "this attempt. Pass on_exists='replace' to supersede it."
            )

    def _decide(self, offers: list[Offer]) -> tuple[str, Known] | None:
        """Rank 0: the save id of the set, and what all ranks know of the older ones; None: some rank has no room."""
        tell_of_failures([offer.failed for offer in offers])
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
        for rank, offer in enumerate(offers):
            going = local_sets.removable(offer.held, known, self._options.keep)
            released = sum(each.nbytes for each in going)
            if offer.free + released < offer.needed:
                raise StorageError(
                    errno.ENOSPC,
                    f"local root {self._options.root}: too small on rank {rank}: its piece of iteration "
                    f"{offer.iteration} needs {_size(offer.needed)}; available are {_size(max(0, offer.free))}, and "
                    f"{_size(released)} of older pieces go. Nothing was written.",
                )
        ids = [each.set.save_id for held in holdings for each in held]
        return commit.new_save_id(self._attempt, after=ids), known

    def _free(self) -> int:
        status = os.statvfs(self._directory)
        return status.f_bavail * status.f_frsize

    def _forget(self, save_ids: set[str]) -> None:
        suspect = st.join(self._directory, commit.CONTROL, SUSPECT)
        self.storage.remove([st.join(suspect, save_id) for save_id in save_ids])

    def _sweep(self, known: Known) -> None:
        """Once an attempt has a complete set: what ranks that are not on this host any more left on it.

        Each rank looks after its own directory; one of those on a host looks after the others.
        """
        if self._swept or not known.complete or known.complete[0].attempt != self._attempt:
            return
        self._swept = True
        newest = known.complete[0].order
        try:
            with _alone(self._run_directory) as alone:
                for entry in self.storage.list(self._run_directory) if alone else ():
                    directory = st.join(self._run_directory, entry.name)
                    if not _RANK.fullmatch(entry.name) or self._owner(directory) >= self._attempt:
                        continue
                    old = [each for each in self._held_in(directory) if each.set.order < newest]
                    saves = [(st.join(directory, roots.iteration_name(e.set.iteration)), e.set.save_id) for e in old]
                    removal.remove_all(self.storage, saves)
        except (OSError, CkptError) as error:
            log.warning("%s: not tidied up: %s", self._run_directory, error)

    def _owner(self, directory: str) -> int:
        """The attempt that uses a rank's directory; 0: none that can be told."""
        where = st.join(directory, commit.CONTROL, OWNER)
        data = commit.get_or_none(self.storage, where)
        try:
            return 0 if data is None else int(records.decode("owner", data, where)["attempt"])
        except (RecordError, KeyError):
            return 0

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
        holdings = agree(group, "local pieces", self.held) or []
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
        found = agree(group, f"local read {step}", lambda: self._read(wanted)) or []
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

    def _read(self, wanted: SetId) -> str:
        """What is wrong with this rank's piece; it is remembered, so that no restart tries it again (C16)."""
        from ckptlib.verification import verify

        try:
            report = verify(self.path(wanted.iteration), save_id=wanted.save_id)
        except OSError as error:  # V2: nothing is known about it
            return f"{type(error).__name__}: {error}"
        except CkptError as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            problem = "; ".join(report.problems)
            if not report.corrupt:
                return problem
        self.suspect(wanted, problem)
        return problem

    def suspect(self, wanted: SetId, problem: str) -> None:
        """Remembers that this rank's piece of a set must not be used."""
        where = st.join(self._directory, commit.CONTROL, SUSPECT, wanted.save_id)
        try:
            self.storage.put(where, problem.encode())
        except OSError as error:
            log.warning("%s: %s", where, error)
        self._tell("local_checkpoint_rejected", f"{self.path(wanted.iteration)}: {problem}")

    def choice(self, chosen: SetId, reason: str) -> ResumeChoice:
        """This rank's piece as what to read."""
        return ResumeChoice(self.path(chosen.iteration), chosen.iteration, chosen.save_id, reason)

    def parent_of(self, chosen: SetId) -> str | None:
        """The save on the run's storage that a set descends from."""
        begin = commit.read_save(self.storage, self.path(chosen.iteration), chosen.save_id).begin
        return None if begin is None else begin.parent

    def _tell(self, name: str, text: str) -> None:
        emit(self._on_event, Notice(name, text, {"rank": self._rank}))


@contextlib.contextmanager
def _alone(directory: str) -> Iterator[bool]:
    """Whether no other process of this host is in here now."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
