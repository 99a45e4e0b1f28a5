"""Where a run is: at one location, or on a fast first tier and at the durable location that it is uploaded to.

The durable location is the run's home: attempts are numbered there, exclusively, so it fences (W8) also when a first
tier was lost; listeners hear of what is durable; a restore takes the newest checkpoint of both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from ckptlib import commit, roots, settling
from ckptlib import storage as st
from ckptlib.errors import IntegrityError, StorageUnavailableError, UnsupportedError
from ckptlib.events import Notice, NoticeHandler, emit
from ckptlib.manifest import Begin
from ckptlib.topology import Topology
from ckptlib.upload_options import UploadOptions


@dataclass(frozen=True)
class Tier:
    """A root on a storage, and how to get there."""

    storage: st.Storage
    root: str
    options: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """Of the root."""
        return self.storage.url(self.root)

    def newest_attempt(self) -> int:
        """Number of the newest attempt that is known here."""
        return roots.newest_attempt(self.storage, self.root)


@dataclass(frozen=True)
class Opened:
    """Both locations of a run at the start of an attempt."""

    first: roots.RootIdentity
    durable: roots.RootIdentity
    attempt: roots.AttemptRecord


def durable_tier(options: UploadOptions) -> Tier:
    """The durable location.

    Raises:
        ExclusiveCreateError: W4.
    """
    storage, root = st.resolve(options.root, options.storage_options, single_writer=options.single_writer)
    st.require_exclusive(storage, options.root, single_writer=options.single_writer)
    return Tier(storage, root, options.storage_options)


def check_reach(first: Tier, durable: Tier, worker: str) -> None:
    """Whether whoever uploads can get at both locations.

    Raises:
        UnsupportedError: one is in the memory of this process.
    """
    for tier in (first, durable):
        if worker == "process" and tier.storage.capabilities.name == "memory":
            raise UnsupportedError(
                f"{tier.url}: lies in the memory of this process, where a worker process cannot upload; choose "
                "background=AsyncOptions(worker='thread')"
            )


class Fence:
    """Asks for the newest attempt, without a save waiting long for a storage that takes requests and does not answer.

    Attributes:
        patience: seconds that an answer is waited for.
    """

    def __init__(self, patience: float = 10.0) -> None:
        self.patience = patience
        self._late: Future[int] | None = None

    def ask(self, question: Callable[[], int]) -> int:
        """The answer. While one that came too late has not come yet, nothing is asked.

        Raises:
            TimeoutError: there is none in time.
            Exception: what the question raises.
        """
        if self._late is not None and not self._late.done():
            raise TimeoutError("an earlier question has not been answered yet")
        answer: Future[int] = Future()
        threading.Thread(target=_answer, args=(question, answer), name="ckptlib-fence", daemon=True).start()
        wait([answer], self.patience)
        if not answer.done():
            self._late = answer
            raise TimeoutError(f"no answer within {self.patience:g} s")
        return answer.result()


def _answer(question: Callable[[], int], answer: Future[int]) -> None:
    try:
        answer.set_result(question())
    except BaseException as error:  # noqa: BLE001 - raised where it was asked
        answer.set_exception(error)


@dataclass(frozen=True)
class Locations:
    """The locations of a run.

    Attributes:
        first: where it saves.
        durable: where that is uploaded to; None: nowhere.
    """

    first: Tier
    durable: Tier | None
    on_event: NoticeHandler | None
    fence: Fence = field(default_factory=Fence)

    @property
    def home(self) -> Tier:
        """Where attempts are numbered and listeners look."""
        return self.durable or self.first

    def newest_attempt(self) -> int:
        """Of both locations. A durable one that does not answer fences nobody just then, and fails no save."""
        newest = self.first.newest_attempt()
        if self.durable is None:
            return newest
        try:
            return max(newest, self.fence.ask(self.durable.newest_attempt))
        except OSError as error:
            emit(self.on_event, Notice("fence_unanswered", f"{self.durable.url}: {error}"))
            return newest

    def open(self, run: str, topology: Topology | None, tracker: str) -> Opened:
        """Opens the roots and begins an attempt: numbered at home, and known on the first tier too (W8).

        Raises:
            StorageUnavailableError: a root belongs to another run, the two to different ones, or the first tier is
                trained on by itself.
        """
        first, home = self.first, self.home
        if self.durable is None:
            identity = roots.open_root(first.storage, first.root, run)
            attempt = roots.start_attempt(first.storage, first.root, run, topology, tracker)
            return Opened(identity, identity, attempt)
        known = roots.read_identity(first.storage, first.root)
        lineage = None if known is None else known.lineage
        durable = roots.open_root(home.storage, home.root, run, copy_of=lineage)
        near = roots.open_root(first.storage, first.root, run, copy_of=durable.lineage)
        if near.lineage != durable.lineage:
            raise StorageUnavailableError(
                f"{first.url}: not the first tier of {home.url}: both have run {run!r}, and began by themselves. Give "
                "the run an empty first tier, or upload to a root of its own."
            )
        if near.root_id == durable.root_id:
            raise StorageUnavailableError(
                f"{first.url}: is {home.url} itself, or a plain copy of it, so nobody could tell what is durable. Give "
                "the run an empty first tier."
            )
        self._check_attempts()
        after = first.newest_attempt() or roots.newest_saving_attempt(first.storage, first.root)
        attempt = roots.start_attempt(home.storage, home.root, run, topology, tracker, after=after)
        roots.copy_attempt(home.storage, home.root, first.storage, first.root, attempt.number)
        there = {each.number: each.attempt_id for each in roots.read_attempts(first.storage, first.root)}
        if there.get(attempt.number) != attempt.attempt_id:
            raise StorageUnavailableError(
                f"{first.url}: attempt {attempt.number} has begun here by itself at the same moment. Uploads need a "
                "first tier that nobody trains on without them."
            )
        return Opened(near, durable, attempt)

    def _check_attempts(self) -> None:
        near, far = (
            {each.number: each for each in roots.read_attempts(tier.storage, tier.root)}
            for tier in (self.first, self.home)
        )
        for number in near.keys() & far.keys():
            if near[number].attempt_id != far[number].attempt_id:
                raise StorageUnavailableError(
                    f"{self.first.url}: attempt {number} is another process than attempt {number} at {self.home.url}: "
                    "both have been trained from since they parted. Give the run an empty first tier."
                )

    def settle(
        self, opened: Opened, wait: float, options: UploadOptions | None
    ) -> tuple[list[Begin], list[roots.Found]]:
        """Settles what older attempts left (W7, W8).

        Args:
            wait: see `settling.settle`.
            options: of uploads.

        Returns:
            The saves that have to be uploaded, and what stands at home, of which listeners may not have heard.
        """
        standing = self._settle(self.first, opened.attempt, wait)
        if self.durable is None or options is None:
            return [], standing
        waiting = self._waiting(self.durable)
        # Those are uploaded now, or by an attempt that uploads their kind: nothing of them is undecided.
        standing = self._settle(self.durable, opened.attempt, wait, {begin.save_id for begin in waiting})
        return [begin for begin in waiting if begin.kind in options.kinds], standing

    def check_first(self, opened: Opened, rank: int) -> None:
        """Files of all ranks make one checkpoint, so all ranks write to one place.

        Raises:
            StorageUnavailableError: this rank sees another first tier than rank 0.
        """
        try:
            identity = roots.read_identity(self.first.storage, self.first.root)
        except IntegrityError:
            identity = None
        if identity is None or identity.root_id != opened.first.root_id:
            raise StorageUnavailableError(
                f"{self.first.url}: rank {rank} does not see what rank 0 has made there. A first tier is a directory "
                "that all ranks share: for disks of single hosts there are local checkpoints (LocalOptions)"
            )

    def _settle(
        self, tier: Tier, attempt: roots.AttemptRecord, wait: float, mine: Collection[str] = ()
    ) -> list[roots.Found]:
        def tell(waiting: settling.Waiting) -> None:
            data = {"ranks": sorted(waiting.writing), "fraction": waiting.progress.fraction}
            emit(self.on_event, Notice("settle_waiting", str(waiting), data))

        standing: list[roots.Found] = []  # nobody else may be left to tell of it: its own attempt is gone
        for settled in settling.settle(
            tier.storage,
            tier.root,
            attempt.number,
            wait=wait,
            on_wait=tell,
            on_standing=standing.append,
            takes=lambda begin: begin is None or begin.save_id not in mine,
        ):
            emit(self.on_event, Notice("settled", str(settled)))
        if attempt.tracker == "committed":
            roots.write_tracker(tier.storage, tier.root)
        return standing

    def _waiting(self, durable: Tier) -> list[Begin]:
        """The checkpoints of the first tier that may be uploaded and are not durable yet, the newest first."""
        found = [
            each
            for each in roots.scan(self.first.storage, self.first.root).found
            if each.state == "committed" and each.order[0] > 0
        ]
        lacking = []
        for each in sorted(found, key=lambda each: each.order, reverse=True):
            assert each.save is not None  # committed, and no foreign one
            there = commit.read_save(durable.storage, st.join(durable.root, each.name), each.save.save_id)
            if there.decision is None and not there.tombstoned and there.damage is None and each.save.begin is not None:
                lacking.append(each.save.begin)
        return lacking
