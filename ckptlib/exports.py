"""What foreign readers see of a committed save (W5), rolled forward by anyone; removal of what it replaces (D2).

Every export is a copy of an immutable file of the save, or follows from its manifest alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ckptlib import commit, exported
from ckptlib import storage as st
from ckptlib.errors import IntegrityError
from ckptlib.manifest import Begin, Manifest

log = logging.getLogger("ckptlib")


@dataclass(frozen=True)
class Export:
    """One export of a save: `data`, or where that is None the content of `source`, a data file of the save."""

    name: str
    data: bytes | None = None
    source: str = ""

    def is_right(self, storage: st.Storage, path: str, *, by_size: bool = False) -> bool:
        """Whether it reads as it should. `by_size`: a copy of a data file is taken for one where it has its size."""
        if self.data is None:
            source, name = st.join(path, self.source), st.join(path, self.name)
            if by_size:
                return storage.stat(name) == storage.stat(source) is not None
            return storage.same_content(source, name)
        return st.get_or_none(storage, st.join(path, self.name)) == self.data

    def write(self, storage: st.Storage, path: str) -> None:
        """Puts it there, in the place of what was."""
        if self.data is None:
            storage.copy(st.join(path, self.source), st.join(path, self.name))
        else:
            storage.put(st.join(path, self.name), self.data)


def integrity_bytes(manifest: Manifest) -> bytes:
    """``integrity.json`` as Megatron-Core writes it: SHA-256 of the files directly in the iteration directory.

    Data files that lie below it are in it too: Megatron's check finds them by their paths.

    It already names ``.metadata`` and ``metadata.json``, which are written after it.
    """
    digests = {entry.path: entry.sha256 for entry in manifest.files}
    digests |= {name: sha256 for name, (_, sha256) in manifest.exports.items()}
    digests[exported.CHECKPOINT] = hashlib.sha256(manifest.encode()).hexdigest()
    data = {entry.path for entry in manifest.files_of("data")}
    here = {name: sha256 for name, sha256 in sorted(digests.items()) if "/" not in name or name in data}
    return json.dumps({"algorithm": "sha256", "files": here}, indent=2).encode()


def export_plan(storage: st.Storage, path: str, save: commit.SaveState) -> list[Export]:
    """Every export of a committed save, in the order of W5.

    Raises:
        IntegrityError: what an export would be copied from is damaged or gone; the export may be all that is left.
    """
    manifest_bytes = commit.read_manifest_bytes(storage, path, save)
    manifest = Manifest.decode(manifest_bytes, commit.manifest_url(storage, path, save.save_id))
    found = {exported.CHECKPOINT: Export(exported.CHECKPOINT, manifest_bytes)}
    found[exported.INTEGRITY] = Export(exported.INTEGRITY, integrity_bytes(manifest))
    for name, entry in exported.copies(manifest.begin, manifest.files):
        if entry.role == "data":
            found[name] = Export(name, source=entry.path)
        else:
            found[name] = Export(name, commit.get_checked(storage, path, entry))
    if exported.MARKER in manifest.exports:
        found[exported.MARKER] = Export(exported.MARKER, exported.MARKER_BYTES)
    first = [name for name in (exported.CHECKPOINT, exported.COMMON) if name in found]
    return [found.pop(name) for name in first] + [*found.values()]


def export_changes(
    storage: st.Storage, path: str, exports: Sequence[Export], others: Collection[str] = (), *, by_size: bool = False
) -> tuple[list[str], list[str]]:
    """What a roll-forward has to change: names to write, and names to remove that a save of another format left.

    The marker is read first. Whoever found a wrong export took the marker away before mending it; so who finds the
    marker absent and everything else right really saw everything right after that.

    Args:
        others: names that exports of other saves of this directory may have left.
        by_size: see `Export.is_right`.
    """
    stale = [export.name for export in reversed(exports) if not export.is_right(storage, path, by_size=by_size)]
    names = {export.name for export in exports}
    obsolete = [
        name
        for name in dict.fromkeys((exported.MARKER, exported.COMMON, *sorted(others)))
        if name not in names and storage.stat(st.join(path, name)) is not None
    ]
    return stale, obsolete


def roll_forward(storage: st.Storage, path: str, *, suspects_others: bool = True) -> commit.SaveState | None:
    """Makes the exports those of the current save (W5, W9), and removes its rank records. Idempotent.

    The format's marker (``metadata.json``; ``.metadata`` for torch_dcp) goes first and comes back last, so a foreign
    reader sees a whole checkpoint or none. Several may do this at once, and the current save may change meanwhile:
    whoever was overtaken may have written one export of the older save over a newer one before it noticed. So nobody
    ends before everything read back is right, not even a process that has been fenced: what it writes is what anyone
    would, and it must not leave its last write behind.

    Args:
        suspects_others: compare copies of data files byte for byte although a roll-forward was finished here, and no
            process can have written another save's. False: by their sizes then.

    Returns:
        The current save, or None.
    """
    written: frozenset[str] = frozenset()
    while True:
        save, right, names = _roll_forward_once(storage, path, written, suspects_others)
        if right:
            return save
        written |= names


def _roll_forward_once(
    storage: st.Storage, path: str, written: Collection[str], suspects_others: bool
) -> tuple[commit.SaveState | None, bool, frozenset[str]]:
    """The current save, and whether its exports were found right; if not, they have been written as far as it went.

    Args:
        written: names that this roll-forward wrote before, maybe for a save that is not current any more.

    Returns:
        Also the names of its exports.
    """
    saves = commit.list_saves(storage, path)
    save = commit.current_of(saves)
    if save is None:
        return None, True, frozenset()
    others = {*written}.union(*(exported.names(other.begin) for other in saves if other.begin is not None))
    try:
        exports = export_plan(storage, path, save)
    except IntegrityError:
        if _is_current(storage, path, save):
            raise
        return save, False, frozenset()  # replaced and removed meanwhile
    names = frozenset(export.name for export in exports)
    by_size = not (suspects_others or written or _may_be_of_others(storage, path, saves))
    stale, obsolete = export_changes(storage, path, exports, others, by_size=by_size)
    if not stale and not obsolete:
        if written or has_records(storage, path, save.save_id):  # it was cut short before, perhaps
            storage.remove(leftovers(storage, path, names | others))
            _remove_records(storage, path, save)
        return save, True, names
    storage.remove([st.join(path, name) for name in obsolete])
    storage.remove([st.parent(st.join(path, name)) for name in obsolete if "/" in name])
    marker = exports[-1].name
    if stale and marker not in stale:
        storage.remove([st.join(path, marker)])
        stale = [*stale, marker]
    changed = [export for export in exports if export.name in stale]
    for export in changed:
        # Looking costs as much as several writes. What was written too late in between, the next look finds and mends.
        if export in (changed[0], changed[-1]) and not _is_current(storage, path, save):
            break
        export.write(storage, path)
    return save, False, names


def _may_be_of_others(storage: st.Storage, path: str, saves: Sequence[commit.SaveState]) -> bool:
    """Whether a name may have the content of another save, or of another tool, although its size is right.

    While records are there, no roll-forward of the current save was finished: what a foreign checkpoint left may still
    stand. After that only a process that was overtaken while exporting another save can have written, and of a save
    that was ever committed here its records or its tombstone remain as long as the directory does.
    """
    if len(saves) > 1 or any(has_records(storage, path, save.save_id) for save in saves):
        return True
    return bool(storage.list(st.join(path, commit.CONTROL, commit.TOMBSTONES)))


def _is_current(storage: st.Storage, path: str, save: commit.SaveState) -> bool:
    newest = commit.current_save(storage, path)
    return newest is not None and newest.save_id == save.save_id  # by id: a record with a NaN equals nothing


def leftovers(storage: st.Storage, path: str, names: Collection[str]) -> list[str]:
    """Temporary files that a process left beside these exports when it was killed; whole copies, of LEGACY.

    One that is still in use is made again by who misses it (`storage.posix_files`).
    """
    below: dict[str, list[str]] = {}
    for name in names:
        directory, _, base = st.join(path, name).rpartition("/")
        below.setdefault(directory, []).append(f".{base}.")
    return [
        st.join(directory, entry.name)
        for directory, starts in below.items()
        for entry in storage.list(directory)
        if entry.name.endswith(exported.TEMPORARY) and entry.name.startswith(tuple(starts))
    ]


def bury(storage: st.Storage, path: str, save_id: str) -> None:
    """Removes a superseded save: tombstone first, then the files its manifest names, then its records (D2 order)."""
    save = commit.read_save(storage, path, save_id)
    tombstone = st.join(path, commit.CONTROL, commit.TOMBSTONES, save_id)
    if storage.stat(tombstone) is None:
        storage.put(tombstone, b"")
    directory = commit.save_dir(path, save_id)
    if save.decision is not None and save.decision.outcome == "commit":
        data = st.get_or_none(storage, st.join(directory, commit.MANIFEST))
        if data is not None:
            manifest = Manifest.decode(data, commit.manifest_url(storage, path, save_id))
            data_names = (entry.path for entry in manifest.files_of("data"))
            names = [name for name in data_names if "/" not in name or f".{save_id}." in name.partition("/")[0]]
            directories = sorted({name.rpartition("/")[0] for name in names} - {""})
            storage.remove([st.join(path, name) for name in (*names, *directories)])
    rest = [entry.name for entry in storage.list(directory)]
    storage.remove([st.join(directory, name) for name in sorted(rest, key=lambda name: name == commit.DECISION)])
    storage.remove([directory])


def conclude(storage: st.Storage, path: str, begin: Begin) -> None:
    """After a commit: exports, and the saves that it replaces. What fails here, anyone can do later (W5, W6)."""
    try:
        roll_forward(storage, path)
        for save_id in begin.replaces:
            bury(storage, path, save_id)
    except (OSError, IntegrityError):
        log.exception("%s: committed, but its exports are not complete yet", storage.url(path))


def has_records(storage: st.Storage, path: str, save_id: str) -> bool:
    """Whether rank records of a save are still there: what the end of a roll-forward removes."""
    return any(entry.name.startswith("rank_") for entry in storage.list(commit.save_dir(path, save_id)))


def _remove_records(storage: st.Storage, path: str, save: commit.SaveState) -> None:
    if save.begin is None:
        return
    directory = commit.save_dir(path, save.save_id)
    present = {entry.name for entry in storage.list(directory)}
    ranks = range(save.begin.world_size)
    names = [*map(commit.beat_name, ranks), *map(commit.record_name, ranks)]  # records tell that there is work left
    storage.remove([st.join(directory, name) for name in names if name in present])
