"""A run's root directory: its identity, its attempts, and what checkpoints it holds (W6, W8, R2).

Discovery looks one level deep, by name and by record, never by modification time: ``iter_<n>`` and ``release`` in the
root, the same in ``non_persistent/``. Anything else is reported as unmanaged and left alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from ckptlib import commit, exported, records
from ckptlib import storage as st
from ckptlib.errors import IntegrityError, RecordError, StateError, StorageUnavailableError
from ckptlib.manifest import Kind, Manifest
from ckptlib.topology import Topology

log = logging.getLogger("ckptlib")

TRACKER = "latest_checkpointed_iteration.txt"
NON_PERSISTENT = "non_persistent"
ROOT = "root.json"
TRACKED_KINDS: tuple[Kind, ...] = ("persistent", "non_persistent_global")
"""Kinds with a tracker of their own."""
RELEASE: Literal["release"] = "release"
_ITERATION = re.compile(r"iter_(\d{7,})")

FoundState = Literal["committed", "undecided", "aborted", "deleted", "damaged", "foreign", "foreign-incomplete"]


@dataclass(frozen=True)
class RootIdentity:
    """``.ckpt/root.json``: proves that the storage is mounted and whose it is.

    Attributes:
        root_id: of this location: a root that was copied by `transfer` has one of its own.
        copy_of: the root that this one began as a copy of; None: of none.
    """

    root_id: str
    run: str
    copy_of: str | None = None

    @property
    def lineage(self) -> str:
        """Equal for all locations of one root: where it is the same, an attempt's number means the same attempt."""
        return self.copy_of or self.root_id


@dataclass(frozen=True)
class AttemptRecord:
    """``.ckpt/attempts/<n>.json``: one process lifetime of a run. Created exclusively; `number` orders attempts.

    `tracker` says who moves the root's tracker: ``committed``: the trainer, ``verified``: whoever verifies.
    """

    number: int
    attempt_id: str
    run: str
    started_at: float
    host: str
    pid: int
    topology: Topology | None
    tracker: str = "committed"

    def to_json(self) -> dict[str, Any]:
        """As a record body."""
        return {
            "number": self.number,
            "attempt_id": self.attempt_id,
            "run": self.run,
            "started_at": self.started_at,
            "host": self.host,
            "pid": self.pid,
            "topology": None if self.topology is None else self.topology.to_json(),
            "tracker": self.tracker,
        }

    @classmethod
    def decode(cls, data: bytes, where: str) -> AttemptRecord:
        """Reads an attempt record."""
        value = records.decode("attempt", data, where)
        try:
            topology = value["topology"]
            return cls(
                number=value["number"],
                attempt_id=value["attempt_id"],
                run=value["run"],
                started_at=value["started_at"],
                host=value["host"],
                pid=value["pid"],
                topology=None if topology is None else Topology.from_json(topology),
                tracker=value.get("tracker", "committed"),
            )
        except (KeyError, TypeError) as error:
            raise RecordError(f"{where}: member missing or of the wrong type: {error!r}") from error


@dataclass(frozen=True)
class Found:
    """One save in an iteration directory, or a foreign checkpoint.

    Attributes:
        name: relative to the root: ``iter_0000100``, ``non_persistent/iter_0000100``.
        state: see `FoundState`.
        save: None for foreign ones.
        format: ``torch_dist`` etc.
        reason: why it is not usable, for people.
    """

    name: str
    path: str
    url: str
    iteration: int
    kind: Kind
    state: FoundState
    save: commit.SaveState | None
    format: str | None
    reason: str = ""

    @property
    def only_on_request(self) -> bool:
        """Whether nothing resumes from it that was not told to: releases, and every rank's own state (LOCAL)."""
        begin = None if self.save is None else self.save.begin
        return self.kind == "release" or (begin is not None and begin.semantic_type == "LOCAL")

    @property
    def order(self) -> tuple[int, int, str]:
        """(attempt, iteration, save id): the order of checkpoints. Foreign ones come before all attempts."""
        if self.save is None:
            return (-1, self.iteration, "")
        return (_attempt_of(self.save.save_id), self.iteration, self.save.save_id)


@dataclass(frozen=True)
class RootScan:
    """Everything below a root, at one time."""

    identity: RootIdentity | None
    attempts: tuple[AttemptRecord, ...]
    found: tuple[Found, ...]
    unmanaged: tuple[str, ...]


def iteration_name(iteration: int) -> str:
    """``iter_0000100``; grows past seven digits."""
    return f"iter_{iteration:07d}"


def iteration_path(root: str, iteration: int, kind: Kind = "persistent") -> str:
    """Directory of a checkpoint of this kind."""
    if kind == "release":
        return st.join(root, RELEASE)
    if kind == "persistent":
        return st.join(root, iteration_name(iteration))
    return st.join(root, NON_PERSISTENT, iteration_name(iteration))


# --- identity and attempts --------------------------------------------------------------------------------------------


def open_root(storage: st.Storage, root: str, run: str, *, copy_of: str | None = None) -> RootIdentity:
    """The identity of a root; makes it when the root is new.

    Args:
        copy_of: the lineage of a new root (`RootIdentity.lineage`); None: it begins one.

    Raises:
        StorageUnavailableError: the root belongs to another run.
    """
    where = st.join(root, commit.CONTROL, ROOT)
    identity = read_identity(storage, root)
    if identity is None:
        lineage = {} if copy_of is None else {"copy_of": copy_of}
        try:
            storage.create(where, records.encode("root", {"root_id": str(uuid.uuid4()), "run": run, **lineage}))
        except FileExistsError:
            log.debug("%s: another process made the root at the same time", storage.url(root))
        identity = read_identity(storage, root)
    if identity is None or identity.run != run:
        owner = "nobody" if identity is None else repr(identity.run)
        raise StorageUnavailableError(
            f"{storage.url(root)}: this root belongs to run {owner}, not to {run!r}. Give each run a root of its own."
        )
    return identity


def is_root(storage: st.Storage, root: str) -> bool:
    """Whether a directory is a run's root, damaged or not."""
    return storage.stat(st.join(root, commit.CONTROL, ROOT)) is not None


def read_identity(storage: st.Storage, root: str) -> RootIdentity | None:
    """The identity of a root, or None when it has none."""
    where = st.join(root, commit.CONTROL, ROOT)
    try:
        value = records.decode("root", storage.get(where), storage.url(where))
    except FileNotFoundError:
        return None
    return RootIdentity(root_id=value["root_id"], run=value["run"], copy_of=value.get("copy_of"))


def start_attempt(
    storage: st.Storage, root: str, run: str, topology: Topology | None, tracker: str = "committed", *, after: int = 0
) -> AttemptRecord:
    """Creates the next attempt file, exclusively (W8). Attempts count from 1.

    A root that was copied without its hidden files has saves and no attempts: what comes next is newer than they are.

    Args:
        after: an attempt that another location knows.
    """
    while True:
        number = max(newest_attempt(storage, root) or newest_saving_attempt(storage, root), after) + 1
        attempt = AttemptRecord(
            number=number,
            attempt_id=uuid.uuid4().hex,
            run=run,
            started_at=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            topology=topology,
            tracker=tracker,
        )
        try:
            storage.create(_attempt_path(root, number), records.encode("attempt", attempt.to_json()))
        except FileExistsError:
            continue  # another process started at the same time: the next number is ours
        return attempt


def newest_attempt(storage: st.Storage, root: str) -> int:
    """Number of the newest attempt; 0 when there is none."""
    return max(_attempt_numbers(storage, root), default=0)


def read_attempts(storage: st.Storage, root: str) -> list[AttemptRecord]:
    """The attempts that have begun, by number. Damaged records are logged and left out."""
    attempts: list[AttemptRecord] = []
    for number in sorted(_attempt_numbers(storage, root)):
        where = _attempt_path(root, number)
        try:
            attempts.append(AttemptRecord.decode(storage.get(where), storage.url(where)))
        except IntegrityError as error:
            log.warning("attempt %d: %s", number, error)
    return attempts


def copy_attempt(source: st.Storage, root: str, target: st.Storage, copy: str, number: int) -> None:
    """Makes an attempt known at another location of its root. It may be there already."""
    with contextlib.suppress(FileExistsError):
        target.create(_attempt_path(copy, number), source.get(_attempt_path(root, number)))


def _attempt_numbers(storage: st.Storage, root: str) -> list[int]:
    names = (entry.name for entry in storage.list(st.join(root, commit.CONTROL, "attempts")))
    return [int(name.removesuffix(".json")) for name in names if re.fullmatch(r"\d+\.json", name)]


def newest_saving_attempt(storage: st.Storage, root: str) -> int:
    """Number of the newest attempt that has left a save; 0 when there is none."""
    saves = (found.save for found in scan(storage, root).found)
    return max((_attempt_of(save.save_id) for save in saves if save is not None), default=0)


def order_of(save_id: str | None, iteration: int) -> tuple[int, int]:
    """(attempt, iteration) of a save; foreign checkpoints (None) come before all attempts."""
    return (-1 if save_id is None else _attempt_of(save_id)), iteration


def _attempt_of(save_id: str) -> int:
    return int(save_id.partition("-")[0])


def _attempt_path(root: str, number: int) -> str:
    return st.join(root, commit.CONTROL, "attempts", f"{number}.json")


# --- discovery --------------------------------------------------------------------------------------------------------


def scan(storage: st.Storage, root: str) -> RootScan:
    """What is below a root. Reads records only, no data. Damaged records are reported, not raised."""
    found: list[Found] = []
    unmanaged: list[str] = []
    for name, here in _scan_directories(storage, root, list(list_root(storage, root))):
        if here:
            found.extend(here)
        else:
            unmanaged.append(name)
    attempts = read_attempts(storage, root)
    return RootScan(read_identity(storage, root), tuple(attempts), tuple(found), tuple(unmanaged))


def scan_non_persistent(storage: st.Storage, root: str) -> list[Found]:
    """What `scan` finds in ``non_persistent/``."""
    places = list(_list_non_persistent(storage, root))
    return [found for _, here in _scan_directories(storage, root, places) for found in here]


Place = tuple[int, Kind]
"""Iteration and kind, by the name of a directory."""


def _scan_directories(
    storage: st.Storage, root: str, places: Sequence[tuple[str, Place | None]]
) -> Iterator[tuple[str, list[Found]]]:
    """What is in each; several at once where every look is a request, of which a long run needs tens of thousands."""

    def look(place: tuple[str, Place | None]) -> list[Found]:
        name, is_iteration = place
        return [] if is_iteration is None else scan_directory(storage, st.join(root, name), name, *is_iteration)

    names = [name for name, _ in places]
    if storage.capabilities.reads_at_once <= 2:
        yield from zip(names, map(look, places), strict=True)
        return
    with ThreadPoolExecutor(2 * storage.capabilities.reads_at_once, thread_name_prefix="ckptlib-scan") as pool:
        yield from zip(names, pool.map(look, places), strict=True)


def list_root(storage: st.Storage, root: str) -> Iterator[tuple[str, Place | None]]:
    """What is below a root by name; with iteration and kind where it is the name of an iteration directory."""
    for entry in storage.list(root):
        if entry.name in (commit.CONTROL, TRACKER):
            continue
        if entry.is_dir and entry.name == NON_PERSISTENT:
            yield from _list_non_persistent(storage, root)
        else:
            yield entry.name, _place_of(entry, "persistent")


def _list_non_persistent(storage: st.Storage, root: str) -> Iterator[tuple[str, Place | None]]:
    for entry in storage.list(st.join(root, NON_PERSISTENT)):
        if entry.name != TRACKER:
            yield f"{NON_PERSISTENT}/{entry.name}", _place_of(entry, "non_persistent_global")


def _place_of(entry: st.Entry, kind: Kind) -> Place | None:
    match = _ITERATION.fullmatch(entry.name) if entry.is_dir else None
    if match is not None:
        return int(match.group(1)), kind
    if not entry.is_dir or entry.name != RELEASE:
        return None
    return 0, RELEASE if kind == "persistent" else kind


def scan_directory(storage: st.Storage, path: str, name: str, iteration: int, kind: Kind) -> list[Found]:
    """The saves in one iteration directory, oldest first; the foreign checkpoint that it is, if none was committed."""
    from ckptlib import formats  # needs torch, which whoever only lists names does not load

    url = storage.url(path)
    result = []
    saves = commit.list_saves(storage, path)
    for save in saves:
        state, reason = _state_of(save)
        if save.undecided and _is_exported(storage, path, save.save_id):
            save = commit.read_save(storage, path, save.save_id)  # committed since we looked, if its decision is there
            state, reason = _state_of(save)
            if save.undecided:
                state, reason = "damaged", "its commit decision is gone, although its exports are there"
        if save.begin is not None and kind != "release" and save.begin.iteration != iteration:
            state, reason = (
                "damaged",
                f"its records are of iteration {save.begin.iteration}: was the directory renamed?",
            )
        format_ = save.begin.format if save.begin is not None else None
        result.append(Found(name, path, url, iteration, kind, state, save, format_, reason))
    if all(found.state in ("undecided", "aborted") for found in result):
        foreign = formats.sniff_beside(storage, path, saves)
        if foreign is not None:
            complete, reason = formats.is_foreign_complete(storage, path, foreign)
            state = "foreign" if complete else "foreign-incomplete"
            result.insert(0, Found(name, path, url, iteration, kind, state, None, foreign, reason))
    return result


def _is_exported(storage: st.Storage, path: str, save_id: str) -> bool:
    """Whether ``checkpoint.json`` speaks of this save: it is written after a commit decision only (W1)."""
    where = st.join(path, exported.CHECKPOINT)
    try:
        return Manifest.decode(storage.get(where), storage.url(where)).begin.save_id == save_id
    except (FileNotFoundError, IntegrityError):
        return False


def _state_of(save: commit.SaveState) -> tuple[FoundState, str]:
    if save.tombstoned:
        return "deleted", "a tombstone says it was deleted or replaced"
    if save.damage is not None:
        return "damaged", str(save.damage)
    if save.decision is None:
        return "undecided", "begun and never committed"
    if save.decision.outcome == "abort":
        return "aborted", save.decision.reason or "aborted"
    return "committed", ""


def newest_committed(storage: st.Storage, root: str, *, at: int | None = None) -> Found | None:
    """The newest usable checkpoint of a root by (attempt, iteration), or exactly iteration `at` (R6).

    Non-persistent ones count; releases never do, every rank's own state (LOCAL) only at an iteration that is named.
    """
    return max(usable(scan(storage, root), at), key=lambda found: found.order, default=None)


def usable(scanned: RootScan, at: int | None) -> list[Found]:
    """What a run may resume from: of an iteration that is named, also what is `Found.only_on_request`; no releases."""
    return [
        found
        for found in scanned.found
        if found.state in ("committed", "foreign") and found.kind != "release"
        if (not found.only_on_request if at is None else found.iteration == at)
    ]


# --- trackers ---------------------------------------------------------------------------------------------------------


def tracker_mode(storage: st.Storage, root: str) -> str | None:
    """Who moves the trackers, by the newest attempt; None when the root has no attempts."""
    number = newest_attempt(storage, root)
    if not number:
        return None
    where = _attempt_path(root, number)
    return AttemptRecord.decode(storage.get(where), storage.url(where)).tracker


def put_tracker(storage: st.Storage, root: str, iteration: int | None, kind: Kind = "persistent") -> None:
    """Makes a tracker name this iteration; None: no iteration may be loaded, so the tracker goes.

    Where somebody else moves it at the same time, theirs stands: whoever cares looks again (`write_tracker`).
    """
    where = st.join(_tracker_directory(root, kind), TRACKER)
    if iteration is None:
        storage.remove([where])
        return
    found = st.get_or_none(storage, where)
    if found is None or found.strip() != str(iteration).encode():
        storage.swap(where, found, str(iteration).encode())


def write_tracker(storage: st.Storage, root: str) -> int | None:
    """Makes the trackers name the newest committed checkpoint (W6): an exported view, never the truth.

    Like a roll-forward, it does not end before what it reads back is right: what it wrote may have been overtaken.
    Where the newest attempt leaves the trackers to whoever verifies, it writes nothing.

    Returns:
        The newest persistent iteration.
    """
    while True:
        newest: dict[Kind, int] = {}
        for found in sorted(scan(storage, root).found, key=lambda found: found.order):
            if found.state == "committed" and found.kind in TRACKED_KINDS and not found.only_on_request:
                newest[found.kind] = found.iteration
        stale = [kind for kind, i in newest.items() if read_tracker(storage, _tracker_directory(root, kind)) != str(i)]
        if not stale or tracker_mode(storage, root) == "verified":
            return newest.get("persistent")
        for kind in stale:
            put_tracker(storage, root, newest[kind], kind)


def _tracker_directory(root: str, kind: Kind) -> str:
    return root if kind == "persistent" else st.join(root, NON_PERSISTENT)


def read_tracker(storage: st.Storage, directory: str) -> str | None:
    """Text of a tracker, stripped; None when there is none."""
    try:
        return storage.get(st.join(directory, TRACKER)).decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def check_run_name(run: str) -> None:
    """A run name is any printable text: it is stored in records and never becomes a path.

    Raises:
        StateError: empty, or holds control characters.
    """
    if not run or not run.isprintable():
        raise StateError(f"run {run!r}: expected a name of printable characters")
