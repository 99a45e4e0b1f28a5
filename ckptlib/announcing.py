"""What follows a commit (W6): the tracker file and the listeners. None of it can fail the training (S4)."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence

from ckptlib import commit, roots
from ckptlib import storage as st
from ckptlib.errors import CkptError
from ckptlib.events import AttemptEvent, CommitEvent, CommitListener
from ckptlib.manifest import Begin, Decision, Manifest
from ckptlib.topology import Topology

log = logging.getLogger("ckptlib")


class Announcer:
    """Rank 0's voice in one attempt.

    Args:
        moves_tracker: this process moves the tracker file after each commit.
    """

    def __init__(
        self,
        storage: st.Storage,
        root: str,
        listeners: Sequence[CommitListener],
        *,
        moves_tracker: bool,
    ) -> None:
        self._storage = storage
        self._root = root
        self._listeners = tuple(listeners)
        self._moves_tracker = moves_tracker
        self._newest_saved: dict[str, int] = {}
        self._announced = False

    def committed(
        self,
        identity: roots.RootIdentity,
        attempt: roots.AttemptRecord,
        path: str,
        begin: Begin,
        decision: Decision,
        *,
        by_worker: bool = False,
    ) -> CommitEvent | None:
        """After a save: tracker, then listeners; after reading back.

        Args:
            by_worker: a worker committed it and has moved the tracker; it may have moved it on since.

        Returns:
            What listeners were told; None: reading back failed.
        """
        event = self.commit_event(identity, path, begin.save_id, decision)
        if event is None:
            return None
        self.announce(identity, attempt, begin.run, begin.topology, begin.parent)
        if by_worker:
            self._is_newest(begin)
        else:
            self.move_tracker(begin)
        self.tell_of_commit(event)
        return event

    def commit_event(
        self,
        identity: roots.RootIdentity,
        path: str,
        save_id: str,
        decision: Decision,
        manifest_bytes: bytes | None = None,
    ) -> CommitEvent | None:
        """What listeners are told of a commit, read back from storage; None when that fails.

        Args:
            manifest_bytes: those that the decision names, where they are known: then nothing is read.
        """
        try:
            if manifest_bytes is not None and hashlib.sha256(manifest_bytes).hexdigest() == decision.manifest_sha256:
                manifest = Manifest.decode(manifest_bytes, commit.manifest_url(self._storage, path, save_id))
            else:
                manifest = commit.read_manifest(self._storage, path, commit.read_save(self._storage, path, save_id))
        except (OSError, CkptError):
            log.exception("%s: committed; reading it back failed", self._storage.url(path))
            return None
        return CommitEvent(
            url=self._storage.url(path),
            root_url=self._storage.url(self._root),
            root_id=identity.root_id,
            manifest=manifest,
            manifest_sha256=decision.manifest_sha256 or "",
            decision=decision,
        )

    def events_of(self, identity: roots.RootIdentity, standing: Iterable[roots.Found]) -> list[CommitEvent]:
        """What listeners are told of commits of older attempts; nothing is read where nobody listens."""
        events = [
            self.commit_event(identity, found.path, found.save.save_id, found.save.decision)
            for found in (standing if self._listeners else ())
            if found.save is not None and found.save.decision is not None
        ]
        return [event for event in events if event is not None]

    def announce(
        self,
        identity: roots.RootIdentity,
        attempt: roots.AttemptRecord,
        run: str | None,
        topology: Topology | None,
        resumed_from: str | None,
    ) -> None:
        """Tells listeners of this attempt once, when it is known what it resumed from."""
        if self._announced:
            return
        self._announced = True
        event = AttemptEvent(
            run=run or "",
            root_url=self._storage.url(self._root),
            root_id=identity.root_id,
            attempt=attempt.number,
            attempt_id=attempt.attempt_id,
            topology=topology,
            resumed_from=resumed_from,
            host=attempt.host,
            pid=attempt.pid,
            started_at=attempt.started_at,
        )
        self._tell(lambda listener: listener.attempt_started(event))

    def tell_of_commit(self, event: CommitEvent) -> None:
        """Tells listeners that a checkpoint exists."""
        self._tell(lambda listener: listener.committed(event))

    def drain(self, timeout: float) -> None:
        """Has listeners hand over what they still hold, within `timeout` seconds."""
        self._tell(lambda listener: listener.close(timeout))

    def move_tracker(self, begin: Begin) -> None:
        """Forward within this attempt only; a release or an earlier iteration leaves it. Never fails a save (W6)."""
        if not self._moves_tracker:
            return
        try:
            self._move_tracker(begin)
        except OSError:
            log.exception("iteration %d: committed; its tracker could not be moved", begin.iteration)

    def _move_tracker(self, begin: Begin) -> None:
        if begin.kind not in roots.TRACKED_KINDS or begin.semantic_type == "LOCAL" or not self._is_newest(begin):
            return
        if not self._fenced(begin.attempt):
            roots.put_tracker(self._storage, self._root, begin.iteration, begin.kind)
            if self._fenced(begin.attempt):  # overtaken meanwhile: a newer attempt's tracker may be lost under ours
                roots.write_tracker(self._storage, self._root)

    def _is_newest(self, begin: Begin) -> bool:
        """Whether no later iteration of this kind was saved; remembers this one."""
        newest = self._newest_saved.get(begin.kind, -1)
        self._newest_saved[begin.kind] = max(newest, begin.iteration)
        return begin.iteration >= newest

    def _fenced(self, attempt: int) -> bool:
        return roots.newest_attempt(self._storage, self._root) > attempt

    def _tell(self, what: Callable[[CommitListener], None]) -> None:
        """A listener that breaks its promise never to raise must not fail the training (S4)."""
        for listener in self._listeners:
            try:
                what(listener)
            except Exception:
                log.exception("listener %r failed", listener)
