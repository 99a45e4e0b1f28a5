"""Verification of one of our own saves: records first, then every file that the manifest names, then the exports.

A single damaged record does not hide the rest: the decision, the manifest and its export vouch for each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptlib import commit, exported, exports, formats, receipts, records
from ckptlib import storage as st
from ckptlib.errors import CkptError, IntegrityError, NotACheckpointError, UncommittedError, VersionError
from ckptlib.index import ItemIndex
from ckptlib.inspection import list_files
from ckptlib.manifest import Decision, FileEntry, Manifest
from ckptlib.safe_pickle import check_object, load_metadata
from ckptlib.torch_file import TorchFile
from ckptlib.verify_files import Expected, FileCheck, FileChecker, Findings, Sealed, check_bytes, damaged, read_small
from ckptlib.verify_items import check_items, tiling_defects

RECORD_ENDING = b"}\n"

Files = Mapping[str, tuple[int, str]]
"""path -> (size, SHA-256)."""


@dataclass(frozen=True)
class Copies:
    """What the catalog recorded of a save at its commit (V1); nothing, where nobody asks it.

    Attributes:
        files: of the save itself.
        manifest_sha256: None: not known.
    """

    files: Files = field(default_factory=dict)
    manifest_sha256: str | None = None


def find_subject(storage: st.Storage, path: str, save_id: str | None, expected: Files | None) -> str | None:
    """Which save of a directory to verify: `save_id`, or the newest that was committed; None: there are no saves here.

    A save counts as committed also when its decision is damaged or gone but its exports are there: they are written
    after the decision only (W1). What the catalog has a copy of was committed as well.

    Raises:
        NotACheckpointError: `save_id` is not here, or was deleted.
        UncommittedError: no save here was ever committed.
    """
    saves = commit.list_saves(storage, path)
    if save_id is None:
        newest = _newest(storage, path, saves)
        if newest is None and saves and formats.sniff_beside(storage, path, saves) is None:
            states = ", ".join(f"{s.save_id} ({'deleted' if s.tombstoned else 'not committed'})" for s in saves)
            raise UncommittedError(f"{storage.url(path)}: no committed save here: {states}")
        return newest
    named = next((save for save in saves if save.save_id == save_id), None)
    if named is not None and named.tombstoned:
        raise NotACheckpointError(f"{storage.url(path)}: save {save_id} was deleted, or replaced by a later one")
    if expected:
        return save_id
    if named is None:
        raise NotACheckpointError(f"{storage.url(path)}: no save {save_id} here")
    if not _was_committed(storage, path, save_id):
        raise UncommittedError(f"{storage.url(path)}: save {save_id} was never committed")
    return save_id


def verify_save(storage: st.Storage, path: str, save_id: str, checker: FileChecker, copies: Copies) -> Findings:
    """Checks one save; beyond ``store`` also whether tensors are tiled and items parse.

    At ``store`` it need not: the bytes are those that were looked at before the commit (W3).

    Raises:
        VersionError: it was written by a newer version.
    """
    found = Findings()
    directory = f"{commit.CONTROL}/{save_id}"
    decision = _check_decision(storage, path, save_id, found)
    manifest, manifest_bytes = _check_manifest(storage, path, save_id, decision, found)
    want: dict[str, Expected] = {}
    exports: set[str] = set()
    if manifest is None:
        found.defects.append(
            f"save {save_id}: neither {directory}/{commit.MANIFEST} nor {exported.CHECKPOINT} is what was "
            "committed, so what the other files should be is not known from here"
        )
    else:
        want.update(_files(storage, path, manifest, found))
        if _newest(storage, path) in (None, save_id):
            of_exports = _exports(manifest, manifest_bytes, want)
            exports |= of_exports.keys()
            want.update(of_exports)
    _compare_copies(want, copies, found)
    if manifest is not None and copies.manifest_sha256 not in (None, hashlib.sha256(manifest_bytes).hexdigest()):
        found.defects.append(
            f"{directory}/{commit.MANIFEST}: not the manifest that the catalog recorded, whose SHA-256 is "
            f"{copies.manifest_sha256}"
        )
    linked = {} if manifest is None else _linked(storage, path, manifest, want)
    rest = [name for name in want if name not in found.checks and name not in linked]
    looked = checker.look({name: want[name] for name in rest})
    if manifest is not None and manifest.begin.format == "torch" and checker.level == "data":
        _seal(storage, path, manifest, want)
    found.checks.update(checker.check({name: want[name] for name in rest}, looked))
    found.checks.update({name: found.checks[source] for name, source in linked.items()})
    if manifest is not None and checker.level in ("structure", "data"):
        _check_content(storage, path, manifest, checker, found)
    if any(found.checks[name].verdict != "ok" for name in exports) and _newest(storage, path) not in (None, save_id):
        for name in exports:  # another save was committed meanwhile: the exports are its own
            del found.checks[name]
    _add_extras(storage, path, save_id, found)
    return found


def _newest(storage: st.Storage, path: str, saves: Sequence[commit.SaveState] | None = None) -> str | None:
    saves = commit.list_saves(storage, path) if saves is None else saves
    live = (save.save_id for save in reversed(saves) if not save.tombstoned)
    return next((save_id for save_id in live if _was_committed(storage, path, save_id)), None)


def _was_committed(storage: st.Storage, path: str, save_id: str) -> bool:
    try:
        decision = commit.read_decision(storage, path, save_id)
    except IntegrityError:
        return storage.stat(st.join(commit.save_dir(path, save_id), commit.MANIFEST)) is not None
    if decision is not None:
        return decision.outcome == "commit"
    shown = read_small(storage, path, exported.CHECKPOINT, recorded=False)
    try:
        return not isinstance(shown, FileCheck) and Manifest.decode(shown, "").begin.save_id == save_id
    except IntegrityError:
        return False


def _check_decision(storage: st.Storage, path: str, save_id: str, found: Findings) -> Decision | None:
    name = f"{commit.CONTROL}/{save_id}/{commit.DECISION}"
    data = read_small(storage, path, name)
    if isinstance(data, FileCheck):
        found.checks[name] = data
        return None
    try:
        decision = Decision.decode(data, name)
        if decision.save_id != save_id:
            raise IntegrityError(f"it decides save {decision.save_id}")
    except IntegrityError as error:
        _raise_if_newer(error, data)
        found.checks[name] = damaged(data, RECORD_ENDING, str(error), "writer")
        return None
    found.checks[name] = check_bytes(data, Expected(origin="writer"))
    if decision.outcome != "commit":
        found.defects.append(f"save {save_id}: the decision is to {decision.outcome}: {decision.reason}")
        return None
    return decision


def _check_manifest(
    storage: st.Storage, path: str, save_id: str, decision: Decision | None, found: Findings
) -> tuple[Manifest | None, bytes]:
    """The manifest that was committed, from its own file or from its export; verdict on its own file."""
    name = f"{commit.CONTROL}/{save_id}/{commit.MANIFEST}"
    own = read_small(storage, path, name)
    trusted, manifest = b"", None
    for data in (own, read_small(storage, path, exported.CHECKPOINT, recorded=False)):
        if isinstance(data, FileCheck):
            continue
        digest = hashlib.sha256(data).hexdigest()
        if decision is not None and digest != decision.manifest_sha256:
            continue
        try:
            manifest = Manifest.decode(data, name)
        except IntegrityError as error:
            _raise_if_newer(error, data)
            continue
        if manifest.begin.save_id == save_id:
            trusted = data
            break
        manifest = None
    if isinstance(own, FileCheck):
        found.checks[name] = own
    elif manifest is not None:
        want = Expected(len(trusted), hashlib.sha256(trusted).hexdigest(), "writer")
        found.checks[name] = check_bytes(own, want)
    else:
        found.checks[name] = damaged(own, RECORD_ENDING, "not the manifest that was committed", "writer")
    return manifest, trusted


def _raise_if_newer(error: IntegrityError, data: bytes) -> None:
    """A flipped bit can look like a newer version; a record that is one has a digest that fits."""
    if isinstance(error, VersionError):
        value = json.loads(data)
        digest = value.pop("digest", None)
        if hashlib.sha256(records.canonical(value)).hexdigest() == digest:
            raise error


def _files(storage: st.Storage, path: str, manifest: Manifest, found: Findings) -> dict[str, Expected]:
    want = {}
    for entry in _entries(storage, path, manifest, found):
        parts = entry.path.split("/")
        if entry.path.startswith("/") or "\\" in entry.path or ".." in parts or "" in parts:
            found.defects.append(f"the manifest names {entry.path!r}, which is no file of this directory")
            continue
        want[entry.path] = _expected(entry)
    return want


def _expected(entry: FileEntry) -> Expected:
    return Expected(
        entry.size,
        entry.sha256,
        "writer",
        part_size=entry.part_size,
        part_sha256=entry.part_sha256,
        control=entry.role != "data",
    )


def _entries(storage: st.Storage, path: str, manifest: Manifest, found: Findings) -> Sequence[FileEntry]:
    """The files of the save with the part digests that hold here; verdict on the record of them, if there is one."""
    name = f"{commit.CONTROL}/{manifest.begin.save_id}/{receipts.PARTS}"
    data = read_small(storage, path, name, recorded=False)
    if isinstance(data, FileCheck):
        if data.verdict != "missing":
            found.checks[name] = data
        return manifest.files
    try:
        entries = receipts.entries_at(manifest, data, name)
    except IntegrityError as error:
        _raise_if_newer(error, data)
        found.checks[name] = damaged(data, RECORD_ENDING, str(error), "writer")
        return manifest.files
    found.checks[name] = check_bytes(data, Expected(origin="writer"))
    return entries


def _exports(manifest: Manifest, manifest_bytes: bytes, files: Mapping[str, Expected]) -> dict[str, Expected]:
    """What foreign readers should find beside the save (W5)."""
    integrity = exports.integrity_bytes(manifest)
    derived = {exported.CHECKPOINT: manifest_bytes, exported.INTEGRITY: integrity}
    small = {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in derived.items()}
    want = {
        name: Expected(size, sha256, "writer", control=True)
        for name, (size, sha256) in (small | dict(manifest.exports)).items()
    }
    for name, entry in exported.copies(manifest.begin, manifest.files):  # a copy may be in the parts of its source
        if name in want and (want[name].size, want[name].sha256) == (entry.size, entry.sha256):
            want[name] = files.get(entry.path, want[name])
    return want


def _linked(storage: st.Storage, path: str, manifest: Manifest, want: Mapping[str, Expected]) -> dict[str, str]:
    """Exports that are second names of files of the save, which need not be read twice."""
    return {
        name: entry.path
        for name, entry in exported.copies(manifest.begin, manifest.files)
        if entry.role == "data" and want.get(name) == want.get(entry.path) is not None
        if storage.shares(st.join(path, entry.path), st.join(path, name))
    }


def _seal(storage: st.Storage, path: str, manifest: Manifest, want: dict[str, Expected]) -> None:
    """Adds to whole state dicts the records in them that carry a CRC-32: then a damaged one is named."""
    for entry in manifest.files_of("data"):
        with contextlib.suppress(CkptError, OSError):  # the pass over all files says so
            records = TorchFile(storage, st.join(path, entry.path), entry.size).layout.records.values()
            sealed = tuple(Sealed(r.offset, r.size, r.crc32, r.name) for r in records)
            want[entry.path] = replace(want[entry.path], sealed=sealed)


def _compare_copies(want: dict[str, Expected], copies: Copies, found: Findings) -> None:
    """V1: the catalog's copy comes first; a manifest that contradicts it was changed after it was recorded."""
    for name, (size, sha256) in copies.files.items():
        known = want.get(name)
        if known is None:
            want[name] = Expected(size, sha256, "writer")
        elif (known.size, known.sha256) != (size, sha256):
            found.defects.append(
                f"{name}: the manifest says {known.size} bytes, SHA-256 {known.sha256}; the catalog recorded {size} "
                f"bytes, {sha256}"
            )
            want[name] = Expected(size, sha256, "writer")
        checked = found.checks.get(name)
        if checked is not None and checked.verdict == "ok" and checked.sha256 != sha256:
            detail = "its bytes are not those that the catalog recorded"
            found.checks[name] = replace(checked, verdict="digest", expected_sha256=sha256, detail=detail)


def _check_content(storage: st.Storage, path: str, manifest: Manifest, checker: FileChecker, found: Findings) -> None:
    """The small files by digest (also where data is not hashed), then index, pickles, tiling, items."""
    index: ItemIndex | None = None
    for entry in manifest.files:
        if entry.role == "data" or found.checks.get(entry.path, FileCheck("missing")).verdict != "ok":
            continue
        data = read_small(storage, path, entry.path)
        if isinstance(data, FileCheck):
            found.checks[entry.path] = data
            continue
        check = check_bytes(data, Expected(entry.size, entry.sha256, "writer"))
        if check.verdict == "ok":
            try:
                parsed = _parse(entry, data)
                index = parsed if parsed is not None else index
            except VersionError:
                raise
            except CkptError as error:
                check = replace(check, verdict="digest", detail=str(error))
        found.checks[entry.path] = check
    if index is None:
        return
    found.defects.extend(tiling_defects(index))
    if manifest.begin.format == "torch":
        _check_own_files(storage, path, manifest, found)
        return
    sizes = {entry.path: entry.size for entry in manifest.files_of("data")}
    found.defects.extend(
        f"{name}: the index names it, the manifest does not" for name in set(index.files) - sizes.keys()
    )
    readable = [name for name in sizes if found.checks.get(name, FileCheck("missing")).verdict == "ok"]
    # Whoever read all bytes and found the writer's digest need not parse every tensor again.
    items = check_items(storage, path, index, readable, tensors=checker.level != "data")
    found.defects.extend(items.contradictions)
    for name, damage in items.damage.items():
        found.checks[name] = replace(found.checks[name], verdict="digest", detail=damage)


def _check_own_files(storage: st.Storage, path: str, manifest: Manifest, found: Findings) -> None:
    """Whole state dicts: are they containers, and is what their pickles say plain data of the sizes that are there?"""
    for entry in manifest.files_of("data"):
        if found.checks.get(entry.path, FileCheck("missing")).verdict == "ok":
            try:
                TorchFile(storage, st.join(path, entry.path), entry.size).check()
            except CkptError as error:
                found.checks[entry.path] = replace(found.checks[entry.path], verdict="digest", detail=str(error))


def _parse(entry: FileEntry, data: bytes) -> ItemIndex | None:
    """Reads a small file as what it is; returns the index."""
    if entry.role == "index":
        return ItemIndex.decode(data, entry.path)
    if entry.role == "metadata":
        load_metadata(data, entry.path)
    elif entry.role == "common":
        check_object(data, entry.path)
    return None


def _add_extras(storage: st.Storage, path: str, save_id: str, found: Findings) -> None:
    """Files that this save does not name: legitimate sidecars, or those of other saves."""
    for name, size in list_files(storage, path).items():
        if name not in found.checks and not name.startswith(f"{commit.CONTROL}/{commit.TOMBSTONES}/"):
            found.checks[name] = FileCheck("extra", size, detail=f"not part of save {save_id}")
