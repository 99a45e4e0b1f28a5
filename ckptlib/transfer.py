"""Copies of committed saves at other locations (W1 to W7, as for a save).

A copy is the same save at another place: the same id, the same files, byte for byte the same manifest. Whether it is
committed is a fact of each place. The order of writes, each step durable before the next::

    root.json, attempts        the place becomes a location of the run's root, if it is none yet
    begin.json                 after its receipt: whoever settles tells a copy from a save
    data                       each file under its name only when it is whole and its digest fits; then its receipt
    common, index, metadata, parts.json
    manifest.json              from here on anybody can decide (`commit.try_commit`)
    decision.json              exclusive; THE commit at this place
    exports, then the tracker

Every step may be done twice, by several copiers at once: all of them write the same bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptlib import beats, commit, exports, formats, receipts, roots, transfer_plan
from ckptlib import storage as st
from ckptlib.errors import (
    CkptError,
    CopyRefusedError,
    IntegrityError,
    NotACheckpointError,
    UnsupportedError,
)
from ckptlib.manifest import Decision, FileEntry, Manifest
from ckptlib.sending import TEMPORARY, Pace, Place, Sender
from ckptlib.transfer_plan import CopyPlan, RootFacts, Standing, TargetFacts

__all__ = ["CopyPlan", "CopyReport", "Pace", "Transfer", "copy"]


@dataclass(frozen=True)
class CopyReport:
    """What a copy did.

    Attributes:
        url: the iteration directory of the copy.
        decision: the one that stands there.
        sent: bytes of data that were sent; what was there already is not in it.
        files: data files that were sent.
        seconds: wall time.
    """

    url: str
    save_id: str
    decision: Decision
    sent: int
    files: int
    seconds: float


def copy(
    source: str,
    target: str,
    *,
    save_id: str | None = None,
    moves_tracker: bool = True,
    limit: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    single_writer: bool = False,
) -> CopyReport:
    """Copies one committed save into another location of its run. What an earlier copy has sent is not sent again.

    Args:
        source: the iteration directory.
        target: the run's root at the other location; of a bare save, the directory that gets it.
        save_id: which save; None: the newest that was committed.
        moves_tracker: the tracker at the target then names the newest checkpoint there, unless whoever verifies
            moves it (W6).
        limit: bytes per second; None: as fast as it goes.
        storage_options, target_options: for fsspec, of the source and of the target.
        single_writer: see `Checkpointer`, of the target.

    Raises:
        NotACheckpointError: there is no such save.
        UnsupportedError: what another tool wrote, or one rank's own piece.
        CopyRefusedError: the target must not get it.
        IntegrityError: the source is damaged; nothing was committed at the target.
        ExclusiveCreateError: W4, of the target.
        OSError: a storage failed. Copy again: it goes on from there.
    """
    transfer = Transfer.of(
        source,
        target,
        save_id=save_id,
        storage_options=storage_options,
        target_options=target_options,
        single_writer=single_writer,
    )
    return transfer.apply(moves_tracker=moves_tracker, pace=Pace(limit))


@dataclass(frozen=True)
class Transfer:
    """One save and the place that is to get a copy of it.

    Attributes:
        source_root, target_root: the roots around both places.
        manifest_bytes: as it was committed.
    """

    source: Place
    target: Place
    source_root: str
    target_root: str
    manifest: Manifest
    manifest_bytes: bytes = field(repr=False)

    @classmethod
    def of(
        cls,
        source: str,
        target: str,
        *,
        save_id: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        target_options: Mapping[str, Any] | None = None,
        single_writer: bool = False,
    ) -> Transfer:
        """Pins the save. Arguments and errors are those of `copy`."""
        from_storage, path = st.resolve(source, storage_options)
        to_storage, root = st.resolve(target, target_options, single_writer=single_writer)
        st.require_exclusive(to_storage, target, single_writer=single_writer)
        return cls.between(Place(from_storage, path), to_storage, root, save_id)

    @classmethod
    def between(cls, source: Place, storage: st.Storage, root: str, save_id: str | None = None) -> Transfer:
        """As `of`, for storages that are known.

        Args:
            storage, root: of the target.
        """
        saves = commit.list_saves(source.storage, source.path)
        if save_id is None:
            save = commit.current_of(saves)
        else:
            save = next((save for save in saves if save.save_id == save_id), None)
        if save is None or not save.committed:
            raise _no_save(source, saves, save, save_id)
        data = commit.read_manifest_bytes(source.storage, source.path, save)
        manifest = Manifest.decode(data, commit.manifest_url(source.storage, source.path, save.save_id))
        if manifest.begin.piece is not None:
            raise UnsupportedError(
                f"{source.url()}: one rank's own piece of a local checkpoint, which is of no use without the others"
            )
        from_root = commit.root_of(source.path)
        path = st.join(root, source.path.removeprefix(f"{from_root.rstrip('/')}/"))
        return cls(source, Place(storage, path), from_root, root, manifest, data)

    # --- plan ---------------------------------------------------------------------------------------------------------

    def plan(self) -> CopyPlan:
        """What `apply` would do now. Changes nothing.

        Raises:
            CopyRefusedError: the target must not get it.
        """
        begin = self.manifest.begin
        facts = _root_facts(self.source.storage, self.source_root, begin.attempt)
        return transfer_plan.plan(self.source.url(), self.manifest, facts, self._target_facts())

    def _target_facts(self) -> TargetFacts:
        storage, path = self.target.storage, self.target.path
        save_id = self.manifest.begin.save_id
        saves = commit.list_saves(storage, path)
        mine = next((save for save in saves if save.save_id == save_id), None)
        mine = commit.read_save(storage, path, save_id) if mine is None else mine  # a tombstone outlives the save
        newer = [save.save_id for save in saves if save.committed and save.save_id > save_id]
        reason = "" if mine.decision is None else mine.decision.reason or ""
        committed = [save for save in saves if save.committed]
        return TargetFacts(
            url=self.target.url(),
            root=_root_facts(storage, self.target_root, self.manifest.begin.attempt),
            standing=_standing(mine),
            reason=reason,
            newer=newer[-1] if newer else None,
            foreign=None if committed else formats.sniff_beside(storage, path, saves),
            sizes=self._sizes(),
        )

    def _sizes(self) -> dict[str, int]:
        storage, path = self.target.storage, self.target.path
        found: dict[str, int] = {}
        for directory in {st.parent(f"/{entry.path}") for entry in self.manifest.files}:
            below = directory.strip("/")
            for entry in storage.list(st.join(path, below) if below else path):
                if not entry.is_dir:
                    found[f"{below}/{entry.name}" if below else entry.name] = entry.size
        return found

    # --- apply --------------------------------------------------------------------------------------------------------

    def apply(
        self,
        *,
        moves_tracker: bool = True,
        pace: Pace | None = None,
        told: Callable[[int], None] = lambda nbytes: None,
    ) -> CopyReport:
        """Carries out what `plan` says by then. Idempotent; errors are those of `copy`.

        Args:
            told: called with bytes as they are sent, from several threads.
        """
        started = time.monotonic()
        plan = self.plan()
        sent: list[FileEntry] = []
        try:
            if plan.committed:
                decision = self.decide()
            else:
                decision = self._carry_out(plan, sent, pace or Pace(), told)
        except (IntegrityError, OSError) as error:
            if not commit.read_save(self.source.storage, self.source.path, plan.save_id).committed:
                raise NotACheckpointError(
                    f"{plan.source}: save {plan.save_id} was deleted while it was copied"
                ) from error
            if isinstance(error, IntegrityError) or not self._is_decided():
                raise
            decision = self.decide()  # another copier was faster, and has tidied up what this one was sending
        if moves_tracker and roots.read_identity(self.target.storage, self.target_root) is not None:
            roots.write_tracker(self.target.storage, self.target_root)
        return CopyReport(
            url=self.target.url(),
            save_id=plan.save_id,
            decision=decision,
            sent=sum(entry.size for entry in sent),
            files=len(sent),
            seconds=time.monotonic() - started,
        )

    def _carry_out(self, plan: CopyPlan, sent: list[FileEntry], pace: Pace, told: Callable[[int], None]) -> Decision:
        """Gives signs of life until the decision: an attempt that begins at the target does not abort it (W8)."""
        storage, path, begin = self.target.storage, self.target.path, self.manifest.begin
        data = self.manifest.files_of("data")
        total = sum(entry.size for entry in data)
        self._join(plan)
        beats.announce(storage, path, begin, 0, total, os.getpid())  # whoever sees begin.json sees it too
        pulse = beats.Pulse(storage, path, begin, 0, total, at_once=False)

        def count(nbytes: int) -> None:
            pulse.wrote(nbytes)
            told(nbytes)

        try:
            self._begin(plan)
            self.send(data, sent, pace=pace, told=count)
            return self.decide(decided=pulse.stop)
        finally:
            pulse.stop()

    def open(self, plan: CopyPlan) -> None:
        """Makes the place a location of the root, and begins the save there (W2).

        Raises:
            CopyRefusedError: somebody else has made it his meanwhile.
        """
        self._join(plan)
        self._begin(plan)

    def _join(self, plan: CopyPlan) -> None:
        storage = self.target.storage
        if plan.copy_of is not None:
            run = _root_facts(self.source.storage, self.source_root, 0).run
            roots.open_root(storage, self.target_root, run or "", copy_of=plan.copy_of)
        for number in plan.attempts:
            roots.copy_attempt(self.source.storage, self.source_root, storage, self.target_root, number)
        if plan.copy_of is not None or plan.attempts:
            self.plan()  # what was created by others at the same time is seen now

    def _begin(self, plan: CopyPlan) -> None:
        storage, path = self.target.storage, self.target.path
        for number, entry in enumerate(self.manifest.files):
            if entry.role == "begin":
                receipts.publish_receipt(storage, path, plan.save_id, number, entry)
        self._place_small(self.manifest.files_of("begin"))
        lacking = plan.to_send
        storage.prepare(path, size=sum(entry.size for entry in lacking), files=len(lacking))

    def send(
        self,
        entries: tuple[FileEntry, ...],
        sent: list[FileEntry],
        *,
        pace: Pace | None = None,
        told: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Sends those of these data files that are not there. There is a receipt of each of them then.

        Args:
            sent: gets the files that were sent.

        Raises:
            IntegrityError, OSError: as `copy`.
        """
        storage, path, save_id = self.target.storage, self.target.path, self.manifest.begin.save_id
        numbers = {entry.path: number for number, entry in enumerate(self.manifest.files)}
        known = receipts.read_receipts(storage, path, self.manifest, {entry.path for entry in entries})

        def done(entry: FileEntry, is_sent: bool) -> None:
            if known.get(entry.path) != entry:
                receipts.publish_receipt(storage, path, save_id, numbers[entry.path], entry)
            if is_sent:
                sent.append(entry)

        Sender(self.source, self.target, pace or Pace(), told=told).deliver_all(entries, known, done)

    def _is_decided(self) -> bool:
        return commit.read_decision(self.target.storage, self.target.path, self.manifest.begin.save_id) is not None

    def decide(self, *, decided: Callable[[], None] = lambda: None) -> Decision:
        """Commits at the target when all data is there: the small files, manifest, decision, exports.

        Args:
            decided: called when there is a decision, before what signs of life have left is removed.

        Raises:
            IntegrityError: a file of the target is not there with its size, or the source is damaged.
            CopyRefusedError: it was aborted or deleted there meanwhile.
        """
        storage, path, save_id = self.target.storage, self.target.path, self.manifest.begin.save_id
        decision = commit.read_decision(storage, path, save_id)
        if decision is None:
            self._write_records()
            decision = commit.try_commit(storage, path, self.manifest.begin, decided_by="copy")
            if decision is None:
                raise IntegrityError(f"{self.target.url()}: files of save {save_id} went while it was copied")
        decided()
        if decision.outcome == "abort":
            raise CopyRefusedError(f"{self.target.url()}: save {save_id} was aborted there: {decision.reason}")
        if commit.read_save(storage, path, save_id).tombstoned:
            raise CopyRefusedError(f"{self.target.url()}: save {save_id} was deleted there while it was copied")
        exports.conclude(storage, path, self.manifest.begin)
        receipts.remove_receipts(storage, path, self.manifest)
        storage.remove(self._leftovers())
        return decision

    def _write_records(self) -> None:
        storage, path, begin = self.target.storage, self.target.path, self.manifest.begin
        self._place_small(tuple(entry for entry in self.manifest.files if entry.role not in ("data", "begin")))
        known = receipts.read_receipts(storage, path, self.manifest)
        parts = receipts.parts_bytes(self.manifest, known)
        directory = commit.save_dir(path, begin.save_id)
        # Receipts go only after a decision, and then whoever decided has written this.
        if parts is not None and all(entry.path in known for entry in self.manifest.files_of("data")):
            _place(storage, st.join(directory, receipts.PARTS), parts)
        _place(storage, st.join(directory, commit.MANIFEST), self.manifest_bytes)

    def _place_small(self, entries: tuple[FileEntry, ...]) -> None:
        for entry in entries:
            data = commit.get_checked(self.source.storage, self.source.path, entry)
            _place(self.target.storage, self.target.at(entry.path), data)

    def _leftovers(self) -> list[str]:
        """What copiers that died have left: a sign of life, and what is beside data files."""
        beat = st.join(commit.save_dir(self.target.path, self.manifest.begin.save_id), commit.beat_name(0))
        directories = {st.parent(self.target.at(entry.path)) for entry in self.manifest.files_of("data")}
        return [beat] + [
            st.join(directory, entry.name)
            for directory in sorted(directories)
            for entry in self.target.storage.list(directory)
            if f".{self.manifest.begin.save_id}." in entry.name and entry.name.endswith(TEMPORARY)
        ]


def _place(storage: st.Storage, where: str, data: bytes) -> None:
    """Whoever copies this save writes these bytes here and no others, so nobody's can be lost."""
    if st.get_or_none(storage, where) != data:
        storage.put(where, data)


def _standing(save: commit.SaveState) -> Standing:
    if save.tombstoned:
        return "deleted"
    if save.damage is not None:
        raise save.damage
    if save.decision is None:
        return "absent" if save.begin is None else "begun"
    return "committed" if save.decision.outcome == "commit" else "aborted"


def _root_facts(storage: st.Storage, root: str, attempt: int) -> RootFacts:
    identity = roots.read_identity(storage, root)
    if identity is None:
        return RootFacts()
    attempts = {each.number: each.attempt_id for each in roots.read_attempts(storage, root) if each.number <= attempt}
    return RootFacts(identity.run, identity.lineage, attempts)


def _no_save(
    source: Place, saves: list[commit.SaveState], save: commit.SaveState | None, save_id: str | None
) -> CkptError:
    """Why there is nothing to copy."""
    if save is not None and save.damage is not None:
        return save.damage
    if save is not None and save.tombstoned:
        return NotACheckpointError(f"{source.url()}: save {save.save_id} was deleted")
    format_ = formats.sniff_beside(source.storage, source.path, saves)
    if format_ is not None and save_id is None:
        return UnsupportedError(
            f"{source.url()}: a checkpoint that another tool wrote ({format_}); only those with digests of their own "
            "are copied"
        )
    which = "save" if save_id is None else f"save {save_id}"
    return NotACheckpointError(f"{source.url()}: no committed {which} here")
