"""What a worker does to make one checkpoint durable: it copies the checkpoint from the first tier (`transfer`).

Every rank's worker sends the files that its rank has written; rank 0's begins the copy, and commits it when all files
are there. Nothing is sent between ranks: receipts and signs of life at the durable location say how far the others
are, and what a rank does not send rank 0's worker sends in its place. It needs both storages and nothing of the
training process, so it goes on when that one dies.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptlib import beats, commit, receipts, removal, roots, trimming
from ckptlib import storage as st
from ckptlib.announcing import Announcer
from ckptlib.errors import CkptError, CopyRefusedError, IntegrityError, SaveAbortedError, StorageUnavailableError
from ckptlib.manifest import Begin, Decision, FileEntry
from ckptlib.sending import Pace, Place
from ckptlib.transfer import Transfer

log = logging.getLogger("ckptlib")

MAX_PAUSE = 5.0
"""Seconds between two looks for what others have done, at most."""

MAX_RETRY_PAUSE = 60.0
"""Seconds between two tries, at most."""

_OF_RANK = re.compile(r"__(\d+)_")


@dataclass(frozen=True)
class UploadJob:
    """One rank's part in an upload, as it is sent to a worker.

    Attributes:
        number: counts the jobs of a trainer.
        begin: of the save.
        attempt_id: who uploads.
        rank, world_size: of this job; it may have more or fewer ranks than the one that has saved.
        url, root, storage_options: its iteration directory on the first tier, the root there.
        target, target_options, single_writer: the root at the durable location.
        moves_tracker: rank 0 moves the tracker at the durable location.
        commit_timeout: seconds for which a commit on the first tier is waited for.
        keep, limit, give_up_after: see `UploadOptions`.
        heartbeat: see `background.Job`.
    """

    number: int
    begin: Begin
    attempt_id: str
    rank: int
    world_size: int
    url: str
    root: str
    storage_options: Mapping[str, Any] | None = field(repr=False)
    target: str
    target_options: Mapping[str, Any] | None = field(repr=False)
    single_writer: bool
    moves_tracker: bool
    commit_timeout: float
    keep: int | None
    limit: float | None
    give_up_after: float
    heartbeat: float = beats.HEARTBEAT


@dataclass(frozen=True)
class UploadReport:
    """What a worker says of an upload.

    Attributes:
        decision: that of the durable location; None: there is none.
        manifest: what it commits, from rank 0: nobody who tells of it has to read it back.
        error: what went wrong.
        again_in: seconds after which it is tried again; None: this is the last word.
        skipped: there is nothing to upload: the checkpoint was aborted, deleted, or replaced.
        lost: the first tier does not have the checkpoint any more, and nobody has said why.
        sent: bytes that this rank has sent.
        seconds: since the upload began.
    """

    number: int
    decision: Decision | None = None
    manifest: bytes | None = field(default=None, repr=False)
    error: str | None = None
    again_in: float | None = None
    skipped: bool = False
    lost: bool = False
    sent: int = 0
    seconds: float = 0.0

    @property
    def is_last(self) -> bool:
        """Whether nothing more will be said of this upload."""
        return self.again_in is None


def share(files: Sequence[FileEntry], rank: int, world_size: int) -> tuple[FileEntry, ...]:
    """The data files that a rank sends: those that it has written, if the job has as many ranks as then."""
    return tuple(entry for entry in files if sender_of(entry, world_size) == rank)


def sender_of(entry: FileEntry, world_size: int) -> int:
    """Who sends a file, by its name; what no name tells of is rank 0's."""
    match = _OF_RANK.match(st.basename(entry.path))
    return 0 if match is None else int(match[1]) % world_size


class UploadRun:
    """One rank's part in an upload, over all its tries."""

    def __init__(self, job: UploadJob) -> None:
        self.job = job
        self._part = _Part()
        self._began: float | None = None
        self._tries = 0

    def attempt(self, until: float = math.inf) -> UploadReport:
        """Tries it once. Never raises.

        Args:
            until: when it is given up at the latest, by `time.monotonic`.

        Returns:
            What came of it: the last word, or in how many seconds it is to be tried again.
        """
        if self._began is None:
            self._began = time.monotonic()
        job, lost = self.job, False
        try:
            decision, manifest = _upload(job, self._part)
        except Exception as raised:  # noqa: BLE001 - told, and tried again
            error, fate = _explain(job, raised)
            if fate == "gone":
                return UploadReport(job.number, skipped=True)
            lost = fate == "lost"
            text = f"{type(error).__name__}: {error}"
            log.warning("upload of iteration %d, rank %d: %s", job.begin.iteration, job.rank, text)
            pause = min(MAX_RETRY_PAUSE, 2.0**self._tries)
            self._tries += 1
            final = isinstance(error, (CopyRefusedError, IntegrityError)) or not isinstance(error, (CkptError, OSError))
            until = min(until, self._began + job.give_up_after)
            if not (final or lost or time.monotonic() + pause > until):
                return UploadReport(job.number, error=text, again_in=pause)
            standing = _committed_anyway(job)
            if standing is None:
                _tell_others(job, text)
                return UploadReport(job.number, error=text, lost=lost, seconds=time.monotonic() - self._began)
            decision, manifest = standing, None
        nbytes = sum(entry.size for entry in self._part.sent)
        return UploadReport(job.number, decision, manifest, sent=nbytes, seconds=time.monotonic() - self._began)


@dataclass
class _Part:
    """What this rank has done of an upload: the files that it has sent, and whether that is all of its part."""

    sent: list[FileEntry] = field(default_factory=list)
    is_sent: bool = False


def _committed_anyway(job: UploadJob) -> Decision | None:
    """The commit that stands at the durable location, whoever made it, if one can be seen."""
    try:
        target, root = st.resolve(job.target, job.target_options, single_writer=job.single_writer)
        path = roots.iteration_path(root, job.begin.iteration, job.begin.kind)
        save = commit.read_save(target, path, job.begin.save_id)
    except Exception:  # noqa: BLE001 - what the try has failed by is told
        return None
    return save.decision if save.committed else None


def _upload(job: UploadJob, part: _Part) -> tuple[Decision, bytes | None]:
    storage, path = st.resolve(job.url, job.storage_options)
    _wait_for_commit(storage, path, job)
    target, root = st.resolve(job.target, job.target_options, single_writer=job.single_writer)
    transfer = Transfer.between(Place(storage, path), target, root, job.begin.save_id)
    mine = share(transfer.manifest.files_of("data"), job.rank, job.world_size)
    total = sum(entry.size for entry in mine)
    pulse = beats.Pulse(target, transfer.target.path, job.begin, job.rank, total, job.heartbeat)
    try:
        if job.rank == 0:
            _send_leading(transfer, job, mine, part.sent, pulse)
            decision = transfer.decide()
        else:
            decision = _send_following(transfer, job, mine, part, pulse)
    finally:
        pulse.stop()
    # The others watch for signs of life until they see the decision: the last one may come after the records went.
    target.remove([st.join(commit.save_dir(transfer.target.path, job.begin.save_id), commit.beat_name(job.rank))])
    if job.rank != 0:
        return decision, None
    _follow_up(storage, target, root, job)
    return decision, transfer.manifest_bytes


def _wait_for_commit(storage: st.Storage, path: str, job: UploadJob) -> None:
    """Until the first tier has the checkpoint.

    Raises:
        SaveAbortedError: it has none, so far.
        StorageUnavailableError: it is not there itself.
    """
    deadline = time.monotonic() + job.commit_timeout
    pause = _Pauses()
    while not commit.read_save(storage, path, job.begin.save_id).committed:
        if time.monotonic() > deadline:
            raise SaveAbortedError(f"{storage.url(path)}: not committed within {job.commit_timeout:g} s")
        if _fate(job) != "there":
            raise SaveAbortedError(f"{storage.url(path)}: aborted, replaced, or removed")
        pause.wait()


Fate = Literal["there", "gone", "lost"]
"""Of a checkpoint on the first tier: it may still be uploaded; it need not be; it can not be, and nobody said why."""


def _explain(job: UploadJob, error: Exception) -> tuple[Exception, Fate]:
    """What a try has failed by: what is read of a first tier that is away looks damaged, or as if it had never been."""
    try:
        return error, _fate(job)
    except StorageUnavailableError as away:
        return away, "there"
    except Exception:  # noqa: BLE001 - nobody can tell
        return error, "there"


def _fate(job: UploadJob) -> Fate:
    """What has become of a checkpoint that has begun on the first tier.

    Raises:
        StorageUnavailableError: the first tier is away: what is not seen there may still be there.
        OSError, CkptError: a storage failed.
    """
    storage, path = st.resolve(job.url, job.storage_options)
    _, root = st.resolve(job.root, job.storage_options)
    save = commit.read_save(storage, path, job.begin.save_id)
    if save.begin is None and save.damage is None and not save.tombstoned:
        if roots.read_identity(storage, root) is None:
            raise StorageUnavailableError(f"{job.root}: the first tier is not there; is it mounted?")
        save = commit.read_save(storage, path, job.begin.save_id)  # it may have come back just before
    if save.tombstoned or (save.decision is not None and save.decision.outcome != "commit"):
        return "gone"
    if save.begin is not None or save.damage is not None:
        return "there"
    return "gone" if _is_replaced(storage, root, path, job.begin) or _is_settled(job) else "lost"


def _is_replaced(storage: st.Storage, root: str, path: str, begin: Begin) -> bool:
    """Whether a newer checkpoint of the first tier has taken the place of this one."""
    if any(save.committed and save.save_id > begin.save_id for save in commit.list_saves(storage, path)):
        return True
    if begin.kind != "non_persistent_global":
        return False
    order = (*roots.order_of(begin.save_id, begin.iteration), begin.save_id)
    return any(each.state == "committed" and each.order > order for each in roots.scan_non_persistent(storage, root))


def _is_settled(job: UploadJob) -> bool:
    """Whether the durable location has the checkpoint, or has had it: what is durable may leave the first tier."""
    target, root = st.resolve(job.target, job.target_options, single_writer=job.single_writer)
    path = roots.iteration_path(root, job.begin.iteration, job.begin.kind)
    save = commit.read_save(target, path, job.begin.save_id)
    return save.tombstoned or save.decision is not None


def _tell_others(job: UploadJob, reason: str) -> None:
    """Rank 0 says that it has given up; best effort, those who wait for it have deadlines."""
    if job.rank != 0:
        return
    try:
        target, root = st.resolve(job.target, job.target_options, single_writer=job.single_writer)
        path = roots.iteration_path(root, job.begin.iteration, job.begin.kind)
        commit.publish_failure(target, path, job.begin.save_id, 0, reason, attempt_id=job.attempt_id)
    except Exception as error:  # noqa: BLE001 - told where it matters already
        log.warning("upload of iteration %d: could not tell the others: %s", job.begin.iteration, error)


def _send_leading(
    transfer: Transfer, job: UploadJob, mine: tuple[FileEntry, ...], sent: list[FileEntry], pulse: beats.Pulse
) -> None:
    plan = transfer.plan()
    if plan.committed:
        return
    transfer.open(plan)
    storage = transfer.target.storage
    storage.remove([st.join(commit.save_dir(transfer.target.path, plan.save_id), commit.failure_name(0))])
    pace = Pace(job.limit)
    transfer.send(mine, sent, pace=pace, told=pulse.wrote)
    _wait_for_others(transfer, job)
    lacking = receipts.lacking(transfer.target.storage, transfer.target.path, transfer.manifest)
    if lacking and not _is_decided(transfer):
        transfer.send(lacking, sent, pace=pace, told=pulse.wrote)


def _wait_for_others(transfer: Transfer, job: UploadJob) -> None:
    """Until every file has been sent, or one of those who have to gives no sign of life."""
    storage, path = transfer.target.storage, transfer.target.path
    watch = beats.Watch(beats.FIRST)
    pause = _Pauses()
    while True:
        lacking = receipts.lacking(storage, path, transfer.manifest)
        ranks = sorted({sender_of(entry, job.world_size) for entry in lacking} - {0})
        if not ranks or _is_decided(transfer):
            return
        seen = beats.read_beats(storage, path, job.begin, ranks)
        lost = {*watch.lost(ranks, seen, time.monotonic()), *(rank for rank in ranks if _is_dead(seen.get(rank)))}
        if lost:
            log.warning(
                "upload of iteration %d: rank %s gives no sign of life; rank 0 sends what is lacking",
                job.begin.iteration,
                ", ".join(map(str, sorted(lost)[:8])),
            )
            return
        pause.wait()


def _send_following(
    transfer: Transfer, job: UploadJob, mine: tuple[FileEntry, ...], part: _Part, pulse: beats.Pulse
) -> Decision:
    """Sends when rank 0 has begun, and then waits for its decision."""
    storage, path, save_id = transfer.target.storage, transfer.target.path, job.begin.save_id
    watch = LeaderWatch()
    pause = _Pauses()
    while True:
        save = commit.read_save(storage, path, save_id)
        if save.tombstoned or (save.decision is not None and save.decision.outcome != "commit"):
            raise CopyRefusedError(f"{transfer.target.url()}: save {save_id} was deleted or aborted there")
        if save.decision is not None:
            return save.decision
        if save.begin is not None and not part.is_sent:
            transfer.send(mine, part.sent, pace=Pace(job.limit), told=pulse.wrote)
            part.is_sent = True
        if commit.failed_attempt(storage, path, save_id, 0) == job.attempt_id:
            raise CopyRefusedError(f"{transfer.target.url()}: rank 0 has given up the upload")
        if watch.is_lost(beats.read_beats(storage, path, job.begin, [0]).get(0), time.monotonic()):
            raise TimeoutError(
                f"{transfer.target.url()}: rank 0 has not committed the upload, and gives no sign of life"
            )
        pause.wait()


class LeaderWatch:
    """Judges by its beats whether rank 0 is at work. What an earlier attempt has left says nothing: one that has not
    moved since the first look is as good as none until a process has had the time to start.
    """

    def __init__(self) -> None:
        self._watch = beats.Watch(beats.START)
        self._first: tuple[beats.Beat | None, float] | None = None

    def is_lost(self, beat: beats.Beat | None, now: float) -> bool:
        """Whether it has stood still for too long.

        Args:
            now: seconds, by a clock that does not jump.
        """
        first, since = self._first = self._first or (beat, now)
        counts = beat is not None and (beat != first or now - since > beats.START)
        return bool(self._watch.lost([0], {0: beat} if beat is not None and counts else {}, now))


def _is_dead(beat: beats.Beat | None) -> bool:
    return beat is not None and beats.is_dead(beat)


def _is_decided(transfer: Transfer) -> bool:
    target = transfer.target
    return commit.read_decision(target.storage, target.path, transfer.manifest.begin.save_id) is not None


def _follow_up(storage: st.Storage, target: st.Storage, root: str, job: UploadJob) -> None:
    """What follows a commit at the durable location (W6). Never fails the upload."""
    begin = job.begin
    _, first = st.resolve(job.root, job.storage_options)
    try:
        if job.moves_tracker and _is_overtaken(target, root, begin):
            roots.write_tracker(target, root)
        else:
            Announcer(target, root, (), moves_tracker=job.moves_tracker).move_tracker(begin)
        removal.supersede(target, root, begin)
        if job.keep is not None:
            trimming.trim(storage, first, target, root, job.keep)
    except Exception:
        log.exception("iteration %d is durable; what follows that could not be done", begin.iteration)


def _is_overtaken(storage: st.Storage, root: str, begin: Begin) -> bool:
    """Whether a newer checkpoint may have become durable before this one, so that the tracker is not simply its own."""
    if roots.newest_attempt(storage, root) > begin.attempt:
        return True
    directory = root if begin.kind == "persistent" else st.join(root, roots.NON_PERSISTENT)
    tracked = roots.read_tracker(storage, directory)
    return tracked is not None and tracked.isdecimal() and int(tracked) > begin.iteration


class _Pauses:
    """Short ones first."""

    def __init__(self) -> None:
        self._next = 0.02

    def wait(self) -> None:
        time.sleep(self._next)
        self._next = min(self._next * 1.5, MAX_PAUSE)
