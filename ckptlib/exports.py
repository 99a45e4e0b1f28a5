"""What foreign readers see of a committed save (W5), rolled forward by anyone; removal of what it replaces (D2).

Every export is a copy of an immutable file of the save, or follows from its manifest alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence

from ckptlib import commit
from ckptlib import storage as st
from ckptlib.errors import IntegrityError
from ckptlib.manifest import Begin, Manifest

log = logging.getLogger("ckptlib")


def integrity_bytes(manifest: Manifest) -> bytes:
    """``integrity.json`` as Megatron-Core writes it: SHA-256 of the files directly in the iteration directory.

    It already names ``.metadata`` and ``metadata.json``, which are written after it.
    """
    digests = {entry.path: entry.sha256 for entry in manifest.files if "/" not in entry.path}
    digests |= {name: sha256 for name, (_, sha256) in manifest.exports.items()}
    digests[commit.EXPORT_CHECKPOINT] = hashlib.sha256(manifest.encode()).hexdigest()
    return json.dumps({"algorithm": "sha256", "files": dict(sorted(digests.items()))}, indent=2).encode()


def export_plan(storage: st.Storage, path: str, save: commit.SaveState) -> list[tuple[str, bytes]]:
    """Name and bytes of every export of a committed save, in the order of W5.

    Raises:
        IntegrityError: what an export would be copied from is damaged or gone; the export may be all that is left.
    """
    manifest_bytes = commit.read_manifest_bytes(storage, path, save)
    manifest = Manifest.decode(manifest_bytes, commit.manifest_url(storage, path, save.save_id))
    exports = [(commit.EXPORT_CHECKPOINT, manifest_bytes)]
    sources = {entry.role: entry for entry in manifest.files if entry.role in ("common", "metadata")}
    if "common" in sources:
        exports.append((commit.EXPORT_COMMON, commit.get_checked(storage, path, sources["common"])))
    exports.append((commit.EXPORT_INTEGRITY, integrity_bytes(manifest)))
    exports.append((commit.EXPORT_METADATA, commit.get_checked(storage, path, sources["metadata"])))
    if commit.EXPORT_MARKER in manifest.exports:
        exports.append((commit.EXPORT_MARKER, commit.MARKER_BYTES))
    return exports


def export_changes(storage: st.Storage, path: str, exports: Sequence[tuple[str, bytes]]) -> tuple[list[str], list[str]]:
    """What a roll-forward has to change: names to write, and names to remove that a save of another format left.

    The marker is read first. Whoever found a wrong export took the marker away before mending it; so who finds the
    marker absent and everything else right really saw everything right after that.
    """
    stale = [name for name, data in reversed(exports) if commit.get_or_none(storage, st.join(path, name)) != data]
    names = {name for name, _ in exports}
    obsolete = [
        name
        for name in (commit.EXPORT_MARKER, commit.EXPORT_COMMON)
        if name not in names and storage.stat(st.join(path, name)) is not None
    ]
    return stale, obsolete


def roll_forward(storage: st.Storage, path: str) -> commit.SaveState | None:
    """Makes the exports those of the current save (W5, W9), and removes its rank records. Idempotent.

    The format's marker (``metadata.json``; ``.metadata`` for torch_dcp) goes first and comes back last, so a foreign
    reader sees a whole checkpoint or none. Several may do this at once, and the current save may change meanwhile:
    whoever was overtaken may have written one export of the older save over a newer one before it noticed. So nobody
    ends before everything read back is right, not even a process that has been fenced: what it writes is what anyone
    would, and it must not leave its last write behind.

    Returns:
        The current save, or None.
    """
    while True:
        save, right = _roll_forward_once(storage, path)
        if right:
            return save


def _roll_forward_once(storage: st.Storage, path: str) -> tuple[commit.SaveState | None, bool]:
    """The current save, and whether its exports were found right; if not, they have been written as far as it went."""
    save = commit.current_save(storage, path)
    if save is None:
        return None, True
    try:
        exports = export_plan(storage, path, save)
    except IntegrityError:
        if _is_current(storage, path, save):
            raise
        return save, False  # replaced and removed meanwhile
    stale, obsolete = export_changes(storage, path, exports)
    if not stale and not obsolete:
        _remove_records(storage, path, save)
        return save, True
    storage.remove([st.join(path, name) for name in obsolete])
    marker, _ = exports[-1]
    if stale and marker not in stale:
        storage.remove([st.join(path, marker)])
        stale = [*stale, marker]
    for name, data in exports:
        if name not in stale:
            continue
        if not _is_current(storage, path, save):
            break
        storage.put(st.join(path, name), data)
    return save, False


def _is_current(storage: st.Storage, path: str, save: commit.SaveState) -> bool:
    newest = commit.current_save(storage, path)
    return newest is not None and newest.save_id == save.save_id  # by id: a record with a NaN equals nothing


def bury(storage: st.Storage, path: str, save_id: str) -> None:
    """Removes a superseded save: tombstone first, then the files its manifest names, then its records (D2 order)."""
    save = commit.read_save(storage, path, save_id)
    tombstone = st.join(path, commit.CONTROL, commit.TOMBSTONES, save_id)
    if storage.stat(tombstone) is None:
        storage.put(tombstone, b"")
    directory = commit.save_dir(path, save_id)
    if save.decision is not None and save.decision.outcome == "commit":
        data = commit.get_or_none(storage, st.join(directory, commit.MANIFEST))
        if data is not None:
            manifest = Manifest.decode(data, commit.manifest_url(storage, path, save_id))
            storage.remove([st.join(path, entry.path) for entry in manifest.files if "/" not in entry.path])
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
