"""One rank's local checkpoints on its own host: what is there, taking it over, reading it back, giving it up.

    <local root>/<root id>-<digest>/rank_00003/  one rank of one run; digest of the root's URL: a copy has another
        iter_0000100/                            a complete checkpoint of a world of one, as any other
        .ckpt/owner.json                         the attempt that uses this directory
        .ckpt/suspect/<save_id>                  what was found when that piece was read

How the ranks agree on them is in `local`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import socket
from collections.abc import Collection, Iterator, Mapping

from ckptlib import commit, records, removal, roots, settling
from ckptlib import storage as st
from ckptlib.beats import this_machine
from ckptlib.errors import CkptError, RecordError, StorageError
from ckptlib.events import Notice, NoticeHandler, emit
from ckptlib.local_sets import Held, Known, SetId, World
from ckptlib.manifest import Begin, Piece

log = logging.getLogger("ckptlib")

OWNER, SUSPECT = "owner.json", "suspect"
_RANK = re.compile(r"rank_(\d{5,})")


def run_directory(root: str, root_id: str, run_url: str) -> str:
    """Where a run's pieces are on a host. A copy of a run has its root id too, but not its URL."""
    return st.join(os.path.normpath(root), f"{root_id}-{hashlib.sha256(run_url.encode()).hexdigest()[:8]}")


class Pieces:
    """A rank's directory, in one attempt.

    Args:
        root: the local root on this host.
        run_url: the run's root.
        attempt: number of this attempt.
        attempts: the attempts that the run's root knows, number to id. Pieces of any other are of another job, whose
            root this one was copied from or that has the same URL elsewhere: they are neither used nor touched.
    """

    def __init__(
        self,
        root: str,
        run_url: str,
        world: World,
        rank: int,
        attempt: int,
        attempts: Mapping[int, str],
        on_event: NoticeHandler | None,
    ) -> None:
        self.storage = st.PosixStorage()
        self._root = root
        self._world = world
        self._rank = rank
        self._attempt = attempt
        self._attempts = attempts
        self._on_event = on_event
        self._run_directory = run_directory(root, world.root_id, run_url)
        self._directory = st.join(self._run_directory, f"rank_{rank:05d}")
        self._swept = False

    @property
    def piece(self) -> Piece:
        """What this rank's pieces say of themselves."""
        return Piece(self._world.root_id, self._rank, self._world.world_size, self._world.topology)

    @property
    def disk(self) -> str:
        """Tells disks of all hosts apart: ranks that say the same share the room on it."""
        return f"{this_machine() or socket.gethostname()}:{os.stat(self._directory).st_dev}"

    @property
    def free(self) -> int:
        """Bytes that can be written on the disk."""
        status = os.statvfs(self._directory)
        return status.f_bavail * status.f_frsize

    def path(self, iteration: int) -> str:
        """Directory of this rank's piece."""
        return st.join(self._directory, roots.iteration_name(iteration))

    def take_over(self, run: str, settle_wait: float) -> None:
        """Takes the directory over from older attempts: what they left unfinished is committed, or goes (W8).

        Raises:
            StorageError: the directory cannot be used.
        """
        owner = {"run": run, "rank": self._rank, "attempt": self._attempt, "world_size": self._world.world_size}
        try:
            self.storage.put(st.join(self._directory, commit.CONTROL, OWNER), records.encode("owner", owner))
        except OSError as error:
            raise StorageError(
                error.errno or errno.EIO,
                f"local root {self._root}: rank {self._rank} cannot write there: {error}. Each rank needs a directory "
                "of its host that it may make and write to.",
            ) from error
        settling.settle(self.storage, self._directory, self._attempt, wait=settle_wait, takes=self._is_ours)
        for found in roots.scan(self.storage, self._directory).found:
            unfinished = found.state in ("aborted", "undecided") and found.order[0] < self._attempt
            if unfinished and found.save is not None and self._is_ours(found.save.begin):
                removal.remove_all(self.storage, [(found.path, found.save.save_id)])
                self._tell("local_leftover_removed", f"{found.url}: save {found.save.save_id}: {found.reason}")

    def _is_ours(self, begin: Begin | None) -> bool:
        """Whether a piece is of this job, as far as its records say."""
        return begin is None or self._attempts.get(begin.attempt) == begin.attempt_id

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
            if not self._is_ours(begin):
                continue
            pending = found.state == "undecided" and begin.attempt == self._attempt
            damage = ""
            if begin.save_id in suspects:
                damage = self.storage.get(st.join(suspect, begin.save_id)).decode(errors="replace")
            elif found.state not in ("committed", "aborted") and not pending:
                damage = found.reason or found.state
            own = f".{begin.save_id}."
            yield Held(
                SetId(begin.attempt, begin.iteration, begin.save_id, begin.attempt_id),
                begin.piece,
                pending=pending,
                aborted=found.state == "aborted",
                damage=damage,
                nbytes=sum(entry.size for entry in self.storage.list(found.path) if own in entry.name),
            )

    def parent_of(self, piece: SetId) -> str | None:
        """The save on the run's storage that a piece descends from."""
        begin = commit.read_save(self.storage, self.path(piece.iteration), piece.save_id).begin
        return None if begin is None else begin.parent

    # --- reading back -------------------------------------------------------------------------------------------------

    def read(self, wanted: SetId) -> str:
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

    def forget(self, save_ids: Collection[str]) -> None:
        """These pieces go, and what was said against them with them."""
        suspect = st.join(self._directory, commit.CONTROL, SUSPECT)
        self.storage.remove([st.join(suspect, save_id) for save_id in save_ids])

    # --- what others left on this host --------------------------------------------------------------------------------

    def sweep(self, known: Known) -> None:
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
        data = st.get_or_none(self.storage, where)
        try:
            return 0 if data is None else int(records.decode("owner", data, where)["attempt"])
        except (RecordError, KeyError):
            return 0

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
