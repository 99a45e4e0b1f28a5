"""The commit protocol of one iteration directory (rules W1 to W7, R1).

Everything here is driven by what is on storage alone, so anybody can finish anybody's save: the coordinator of the
save, the next attempt, an adopter. The order of writes, each step durable before the next::

    begin.json           exclusive; fixes attempt, ranks and plan
    data, common.pt      under names that carry the save id
    rank_<r>.json        one per rank, after its data is durable
    index, metadata, manifest.json      exclusive; a pure function of the records
    decision.json        exclusive; THE commit (or abort)
    checkpoint.json, common.pt, integrity.json, .metadata, metadata.json      exports, rolled forward by anyone

Files that several deciders may write are created exclusively and, when somebody was faster, read back: whoever
decides uses the bytes that are there, so that one decision always names one manifest.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptlib import exported, records
from ckptlib import storage as st
from ckptlib.errors import IntegrityError, RecordError, StateError, UncommittedError
from ckptlib.figures import Figures
from ckptlib.index import ItemIndex
from ckptlib.manifest import Begin, Decision, FileEntry, Manifest, RankRecord, Role
from ckptlib.paused_gc import paused_gc

log = logging.getLogger("ckptlib")

CONTROL = ".ckpt"
BEGIN, MANIFEST, INDEX, METADATA, COMMON, DECISION = (
    "begin.json",
    "manifest.json",
    "index",
    "metadata",
    "common.pt",
    "decision.json",
)
TOMBSTONES = "tombstones"
RECEIPT = "sent_"
SAVE_ID = re.compile(r"\d{6,}-[0-9a-f]{12}-[0-9a-f]{8}")


@dataclass(frozen=True)
class SaveState:
    """What storage says of one save. `begin` and `decision` are None when they do not exist (yet), or are damaged."""

    save_id: str
    begin: Begin | None
    decision: Decision | None
    tombstoned: bool = False
    damage: IntegrityError | None = None

    @property
    def committed(self) -> bool:
        """R1 for our own format: a commit decision and no tombstone."""
        return self.decision is not None and self.decision.outcome == "commit" and not self.tombstoned

    @property
    def undecided(self) -> bool:
        """Begun, and nobody has decided."""
        return self.begin is not None and self.decision is None and not self.tombstoned and self.damage is None


class DefectError(StateError):
    """Raised inside this package when the records of a save contradict each other: decides `abort` (W3)."""


def save_dir(path: str, save_id: str) -> str:
    """``<iteration>/.ckpt/<save_id>``."""
    return st.join(path, CONTROL, save_id)


def record_name(rank: int) -> str:
    """Name of a rank's record."""
    return f"rank_{rank}.json"


def failure_name(rank: int) -> str:
    """Name of the file in which a rank says that it failed."""
    return f"failed_{rank}.json"


def beat_name(rank: int) -> str:
    """Name of the file in which a rank's writer shows that it is alive (`ckptlib.beats`)."""
    return f"beat_{rank}.json"


def receipt_name(number: int) -> str:
    """Name of the file that says of a copy that file `number` of the manifest is durable (`ckptlib.receipts`)."""
    return f"{RECEIPT}{number}.json"


def root_of(path: str) -> str:
    """The root directory that an iteration directory would belong to."""
    above = st.parent(path)
    return st.parent(above) if st.basename(above) == "non_persistent" else above


# --- reading the state of saves ---------------------------------------------------------------------------------------


def list_saves(storage: st.Storage, path: str) -> list[SaveState]:
    """Every save that left a trace in an iteration directory, oldest first.

    Several files are read, one after the other, while others may write. Saves are read from the oldest on, and again
    when there are others than before: a save that is being removed is never the only one that is seen, because the
    one that replaces it is committed, and therefore there, before the removal begins.
    """
    names = save_ids(storage, path)
    while names:
        buried = _tombstones(storage, path)
        saves = [read_save(storage, path, name, tombstoned=name in buried) for name in names]
        before, names = names, save_ids(storage, path)
        if names == before:
            return saves
    return []


def save_ids(storage: st.Storage, path: str) -> list[str]:
    """The saves that left a trace in an iteration directory, oldest first: one listing."""
    entries = storage.list(st.join(path, CONTROL))
    return sorted(entry.name for entry in entries if entry.is_dir and SAVE_ID.fullmatch(entry.name))


def read_save(storage: st.Storage, path: str, save_id: str, *, tombstoned: bool | None = None) -> SaveState:
    """The state of one save; damaged records are reported in it, not raised.

    Args:
        tombstoned: what is known of that: True for good; False as of a moment ago; None: not looked at yet.
    """
    begin, decision, damage = None, None, None
    try:
        where = st.join(save_dir(path, save_id), BEGIN)
        begin_bytes = st.get_or_none(storage, where)
        begin = None if begin_bytes is None else Begin.decode(begin_bytes, storage.url(where))
        decision = read_decision(storage, path, save_id)
    except IntegrityError as error:
        damage = error
    if not tombstoned and (tombstoned is None or decision is None):
        # Asked last: whoever removes a decision has written the tombstone first, so "undecided" is never a removed one.
        tombstoned = save_id in _tombstones(storage, path)
    return SaveState(save_id, begin, decision, bool(tombstoned), damage)


def read_recorded_save(storage: st.Storage, path: str, save_id: str) -> SaveState:
    """`read_save` of one that somebody recorded as committed: where its decision is not seen, it is waited for."""
    save = read_save(storage, path, save_id)
    if save.decision is None and save.damage is None and not save.tombstoned and save_id in save_ids(storage, path):
        storage.await_size(st.join(save_dir(path, save_id), DECISION), 1)
        return read_save(storage, path, save_id)
    return save


def read_decision(storage: st.Storage, path: str, save_id: str) -> Decision | None:
    """The decision of a save, or None.

    Raises:
        RecordError: it is damaged, or speaks of another save.
    """
    where = st.join(save_dir(path, save_id), DECISION)
    data = st.get_or_none(storage, where)
    if data is None:
        return None
    decision = Decision.decode(data, storage.url(where))
    if decision.save_id != save_id:
        raise RecordError(f"{storage.url(where)}: decides save {decision.save_id}, found in the directory of {save_id}")
    return decision


def current_save(storage: st.Storage, path: str) -> SaveState | None:
    """The newest committed save of an iteration directory: what a reader of it gets.

    Raises:
        IntegrityError: the records of a save that may be the newest are damaged, so nobody can tell.
    """
    return current_of(list_saves(storage, path))


def current_of(saves: Sequence[SaveState]) -> SaveState | None:
    """The newest committed one of the saves of a directory. Raises as `current_save`."""
    for save in reversed(saves):
        if save.damage is not None and not save.tombstoned:
            raise save.damage
        if save.committed:
            return save
    return None


def is_committed(storage: st.Storage, path: str) -> bool:
    """R1, the one predicate shared by load, resume, retention and verify: also true for complete foreign ones."""
    if current_save(storage, path) is not None:
        return True
    from ckptlib import formats

    found = formats.sniff_beside(storage, path, list_saves(storage, path))
    return found is not None and formats.is_foreign_complete(storage, path, found)[0]


def read_manifest(storage: st.Storage, path: str, save: SaveState) -> Manifest:
    """The manifest of a committed save, checked against the digest in its decision.

    Raises:
        UncommittedError: there is no commit decision.
        IntegrityError: the manifest is missing, or other bytes than were committed.
    """
    return Manifest.decode(read_manifest_bytes(storage, path, save), manifest_url(storage, path, save.save_id))


def read_manifest_bytes(storage: st.Storage, path: str, save: SaveState) -> bytes:
    """The bytes of `read_manifest`."""
    where = manifest_url(storage, path, save.save_id)
    if not save.committed or save.decision is None:
        raise UncommittedError(f"{storage.url(path)}: save {save.save_id} was never committed")
    data = get_recorded(storage, st.join(save_dir(path, save.save_id), MANIFEST), 1)
    if data is None:
        raise IntegrityError(f"{where}: missing, although the save was committed")
    digest = hashlib.sha256(data).hexdigest()
    if digest != save.decision.manifest_sha256:
        raise IntegrityError(f"{where}: SHA-256 {digest}, the commit decision says {save.decision.manifest_sha256}")
    return data


def read_index(storage: st.Storage, path: str, manifest: Manifest) -> ItemIndex:
    """The item index of a committed save, checked against its manifest.

    Raises:
        IntegrityError: the index is missing, or other bytes than were committed.
    """
    (entry,) = manifest.files_of("index")
    return ItemIndex.decode(get_checked(storage, path, entry), storage.url(st.join(path, entry.path)))


# --- writing: begin, records ------------------------------------------------------------------------------------------


def new_save_id(attempt: int, *, after: Sequence[str] = (), now: float | None = None) -> str:
    """A save id that sorts by (attempt, time) and after all of `after` that belong to the same or an older attempt.

    The clock only breaks ties inside an attempt; a clock that jumps back is pushed past what is there.
    """
    milliseconds = int((time.time() if now is None else now) * 1000)
    for other in after:
        number, clock, _ = other.split("-")
        if int(number) == attempt:
            milliseconds = max(milliseconds, int(clock, 16) + 1)
    return f"{attempt:06d}-{milliseconds:012x}-{uuid.uuid4().hex[:8]}"


def begin_save(storage: st.Storage, path: str, begin: Begin) -> None:
    """Fixes the save (W2). Nothing of it exists before this."""
    storage.create(st.join(save_dir(path, begin.save_id), BEGIN), begin.encode())


def write_common(storage: st.Storage, path: str, save_id: str, data: bytes) -> FileEntry:
    """Writes the common state under the save's own name."""
    name = f"{CONTROL}/{save_id}/{COMMON}"
    storage.create(st.join(path, name), data)
    return FileEntry(name, len(data), hashlib.sha256(data).hexdigest(), "common")


def write_metadata(storage: st.Storage, path: str, save_id: str, data: bytes) -> None:
    """Fixes torch's metadata of a save before it is decided; without this the decider derives it from the items."""
    storage.create(st.join(save_dir(path, save_id), METADATA), data)


def publish_record(storage: st.Storage, path: str, record: RankRecord) -> None:
    """Says that this rank's data is durable (W2)."""
    storage.create(st.join(save_dir(path, record.save_id), record_name(record.rank)), record.encode())


def publish_failure(
    storage: st.Storage, path: str, save_id: str, rank: int, reason: str, *, attempt_id: str | None = None
) -> None:
    """Says that this rank will never record its part: whoever waits for it need not.

    Args:
        attempt_id: whose try at a copy has failed; another attempt may try again.
    """
    body = {"save_id": save_id, "rank": rank, "reason": reason}
    by = {} if attempt_id is None else {"attempt_id": attempt_id}
    storage.put(st.join(save_dir(path, save_id), failure_name(rank)), records.encode("failure", {**body, **by}))


def failed_attempt(storage: st.Storage, path: str, save_id: str, rank: int) -> str | None:
    """The attempt of which a rank has failed at a copy of this save; None: none, or nobody can tell."""
    where = st.join(save_dir(path, save_id), failure_name(rank))
    data = st.get_or_none(storage, where)
    try:
        attempt_id = None if data is None else records.decode("failure", data, storage.url(where)).get("attempt_id")
    except RecordError as error:
        log.warning("failure does not count: %s", error)
        return None
    return None if attempt_id is None else str(attempt_id)


@dataclass(frozen=True)
class Progress:
    """Which ranks have a record of a save, by names alone, and which said that they failed, with their reasons."""

    missing: tuple[int, ...]
    failed: Mapping[int, str]


def progress(storage: st.Storage, path: str, begin: Begin) -> Progress:
    """How far a save is: one listing, and the failures."""
    directory = save_dir(path, begin.save_id)
    present = {entry.name for entry in storage.list(directory)}
    failed = {}
    for rank in range(begin.world_size):
        if failure_name(rank) in present:
            where = st.join(directory, failure_name(rank))
            data = st.get_or_none(storage, where)
            try:
                failed[rank] = "" if data is None else str(records.decode("failure", data, where)["reason"])
            except (RecordError, KeyError) as error:
                failed[rank] = str(error)
    missing = tuple(rank for rank in range(begin.world_size) if record_name(rank) not in present)
    return Progress(missing, failed)


# --- deciding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Records:
    """The rank records of a save that count: right save, world and plan."""

    by_rank: Mapping[int, RankRecord]
    missing: tuple[int, ...]


def read_records(storage: st.Storage, path: str, begin: Begin) -> Records:
    """Reads the records that exist; foreign, stale and damaged ones do not count (W2)."""
    directory = save_dir(path, begin.save_id)
    present = {entry.name for entry in storage.list(directory)}
    by_rank: dict[int, RankRecord] = {}
    for rank in range(begin.world_size):
        name = record_name(rank)
        data = st.get_or_none(storage, st.join(directory, name)) if name in present else None
        if data is None:
            continue
        try:
            record = RankRecord.decode(data, storage.url(st.join(directory, name)))
        except RecordError as error:
            log.warning("record does not count: %s", error)
            continue
        expected = (begin.save_id, rank, begin.world_size, begin.plan_digest)
        if (record.save_id, record.rank, record.world_size, record.plan_digest) == expected:
            by_rank[rank] = record
    return Records(by_rank, tuple(rank for rank in range(begin.world_size) if rank not in by_rank))


def await_records(storage: st.Storage, path: str, begin: Begin) -> bool:
    """Whether every rank's record is there, for somebody who knows that every rank has written one."""
    directory = save_dir(path, begin.save_id)
    names = (st.join(directory, record_name(rank)) for rank in range(begin.world_size))
    return all(storage.await_size(name, 1) is not None for name in names)


def try_commit(
    storage: st.Storage, path: str, begin: Begin, *, decided_by: str, now: float | None = None
) -> Decision | None:
    """Commits if every record is there, or all of a copy; else None. Decides `abort` on a defect (W3).

    Returns:
        The decision that stands, whoever made it.
    """
    decision = read_decision(storage, path, begin.save_id)
    if decision is not None:
        return decision
    found = read_records(storage, path, begin)
    if found.missing:
        copied = None if found.by_rank else _copied_manifest(storage, path, begin)
        decision = read_decision(storage, path, begin.save_id)  # a decision removes records: look again
        if decision is not None or copied is None:
            return decision
        return _decide_commit(storage, path, begin, copied, decided_by, now)
    try:
        with paused_gc():
            index = check_records(storage, path, begin, found.by_rank)
            manifest = _write_manifest(storage, path, begin, found.by_rank, index)
    except (DefectError, StateError) as error:
        return decide_abort(storage, path, begin.save_id, reason=str(error), decided_by=decided_by, now=now)
    return _decide_commit(storage, path, begin, manifest, decided_by, now)


def _decide_commit(
    storage: st.Storage, path: str, begin: Begin, manifest: bytes, decided_by: str, now: float | None
) -> Decision:
    return _decide(
        storage,
        path,
        Decision(
            save_id=begin.save_id,
            outcome="commit",
            decider=uuid.uuid4().hex,
            decided_by=decided_by,
            decided_at=time.time() if now is None else now,
            manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        ),
    )


def _copied_manifest(storage: st.Storage, path: str, begin: Begin) -> bytes | None:
    """The manifest of a copy, which has receipts in the place of records: it was written last (`transfer`).

    Returns:
        None: there is none, or not every file that it names is there with its size, and its receipt.
    """
    data = st.get_or_none(storage, st.join(save_dir(path, begin.save_id), MANIFEST))
    if data is None:
        return None
    try:
        manifest = Manifest.decode(data, manifest_url(storage, path, begin.save_id))
    except IntegrityError as error:
        log.warning("copy does not count: %s", error)
        return None
    names = {entry.name for entry in storage.list(save_dir(path, begin.save_id))}
    sent = [number for number, entry in enumerate(manifest.files) if entry.role == "data"]
    whole = bool(sent) and all(receipt_name(number) in names for number in sent)
    whole = whole and all(storage.stat(st.join(path, entry.path)) == entry.size for entry in manifest.files)
    return data if whole and manifest.begin.encode() == begin.encode() else None


def decide_abort(
    storage: st.Storage, path: str, save_id: str, *, reason: str, decided_by: str, now: float | None = None
) -> Decision:
    """Decides `abort`, unless somebody decided already. Returns the decision that stands."""
    return _decide(
        storage,
        path,
        Decision(
            save_id=save_id,
            outcome="abort",
            decider=uuid.uuid4().hex,
            decided_by=decided_by,
            decided_at=time.time() if now is None else now,
            reason=reason,
        ),
    )


def check_records(storage: st.Storage, path: str, begin: Begin, by_rank: Mapping[int, RankRecord]) -> ItemIndex:
    """W3: files present with their sizes, every tensor tiled exactly once, values agree.

    Returns:
        The index of all items.

    Raises:
        StateError: the first defect, with the name of the file, tensor or rank.
    """
    parts: list[ItemIndex] = []
    first = by_rank[min(by_rank)]
    for rank, record in sorted(by_rank.items()):
        for entry in record.files:
            size = storage.await_size(st.join(path, entry.path), entry.size)
            if size != entry.size:
                found = "is missing" if size is None else f"has {size} bytes"
                raise DefectError(f"rank {rank}: {entry.path} {found}, its record says {entry.size} bytes")
        if record.values_digest != first.values_digest:
            raise DefectError(f"unsharded values of rank {rank} differ from those of rank {first.rank}")
        parts.append(ItemIndex.from_record(record.items, record_name(rank)))
    recorded = {entry.path for record in by_rank.values() for entry in record.files}
    for name in exported.own_files(begin):
        if name not in recorded:
            raise DefectError(f"{name}: no record names it, although {begin.semantic_type} has it")
    index = ItemIndex.merge(parts)
    index.check_tilings()
    return index


def _write_manifest(
    storage: st.Storage, path: str, begin: Begin, by_rank: Mapping[int, RankRecord], index: ItemIndex
) -> bytes:
    from ckptlib.formats import torch_dist  # needs torch, which whoever only looks does not load

    directory = f"{CONTROL}/{begin.save_id}"
    small: list[tuple[str, bytes, Role]] = [(BEGIN, begin.encode(), "begin")]
    small.append((INDEX, _create_or_read(storage, st.join(path, directory, INDEX), index.encode()), "index"))
    if exported.has_metadata(begin.format):
        metadata = _create_or_read(storage, st.join(path, directory, METADATA), torch_dist.encode_metadata(index))
        small.append((METADATA, metadata, "metadata"))
    files = [entry for _, record in sorted(by_rank.items()) for entry in record.files]
    for name, data, role in small:
        files.append(FileEntry(f"{directory}/{name}", len(data), hashlib.sha256(data).hexdigest(), role))
    exports = {name: (entry.size, entry.sha256) for name, entry in exported.copies(begin, files)}
    if exported.has_marker(begin.format):
        exports[exported.MARKER] = (len(exported.MARKER_BYTES), hashlib.sha256(exported.MARKER_BYTES).hexdigest())
    figures = Figures.of((record.size, record.times) for _, record in sorted(by_rank.items()))
    manifest = Manifest(begin, tuple(files), exports, len(index.keys), len(index.object_keys), figures)
    return _create_or_read(storage, st.join(path, directory, MANIFEST), manifest.encode())


def _decide(storage: st.Storage, path: str, decision: Decision) -> Decision:
    """Creates the decision; if there is one already, or the answer was lost, the one that stands is read back (W4)."""
    where = st.join(save_dir(path, decision.save_id), DECISION)
    try:
        try:
            storage.create(where, decision.encode())
        except FileExistsError:
            raise
        except OSError as error:
            # It may be there although the answer was lost, or be there and not durable: only a second try tells.
            log.warning("%s: deciding again after: %s", storage.url(where), error)
            storage.create(where, decision.encode())
    except FileExistsError:
        standing = read_decision(storage, path, decision.save_id)  # ours is told by its decider id
        if standing is None:
            raise
        return standing
    return decision


def _tombstones(storage: st.Storage, path: str) -> set[str]:
    inside = storage.list(st.join(path, CONTROL, TOMBSTONES))
    at_root = storage.list(st.join(root_of(path), CONTROL, TOMBSTONES))
    return {entry.name for entry in [*inside, *at_root]}


def _create_or_read(storage: st.Storage, where: str, data: bytes) -> bytes:
    """Creates a file; when somebody was faster, theirs counts."""
    try:
        storage.create(where, data)
    except FileExistsError:
        return storage.get(where)
    return data


def get_checked(storage: st.Storage, path: str, entry: FileEntry) -> bytes:
    """A small file of a committed save, compared with the manifest's digest."""
    where = storage.url(st.join(path, entry.path))
    data = get_recorded(storage, st.join(path, entry.path), entry.size)
    if data is None:
        raise IntegrityError(f"{where}: missing, although the save was committed")
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise IntegrityError(f"{where}: damaged: its SHA-256 is not the manifest's {entry.sha256}")
    return data


def get_recorded(storage: st.Storage, where: str, size: int) -> bytes | None:
    """A small file that a record says is there; see `Storage.await_size`."""
    data = st.get_or_none(storage, where)
    if (data is None or len(data) < size) and (storage.await_size(where, size) or 0) >= size:
        return st.get_or_none(storage, where)
    return data


def manifest_url(storage: st.Storage, path: str, save_id: str) -> str:
    """Where the manifest of a save is, for messages."""
    return storage.url(st.join(save_dir(path, save_id), MANIFEST))
