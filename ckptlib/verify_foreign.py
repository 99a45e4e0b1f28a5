"""Verification of checkpoints that others wrote: their own digests where there are any, CRC-32s where there are none.

Megatron-Core writes SHA-256 digests (``integrity.json``) only on request. Every record of a `torch.save` container
carries a CRC-32 that neither torch nor Megatron compares: here it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from ckptlib import formats
from ckptlib import storage as st
from ckptlib.data_names import is_below
from ckptlib.errors import CkptError, IntegrityError, NotACheckpointError, UncommittedError, UnsupportedError
from ckptlib.formats import torch_dist
from ckptlib.formats.metadata import METADATA, to_index
from ckptlib.index import ItemIndex
from ckptlib.inspection import list_files
from ckptlib.safe_pickle import check_object, load_metadata
from ckptlib.verify_files import (
    Expected,
    FileCheck,
    FileChecker,
    Findings,
    Looked,
    Origin,
    Sealed,
    check_bytes,
    cut_off,
    damaged,
    read_small,
)
from ckptlib.verify_items import check_items, tiling_defects

INTEGRITY = "integrity.json"
# How these files always end: tells one that was cut off from one that was changed.
METADATA_ENDING = b"b."
ENDINGS = {METADATA: METADATA_ENDING, formats.MARKER: b"1}", INTEGRITY: b"\n  }\n}"}
END_RECORD = b"PK\x05\x06"
END_RECORD_BYTES = 22

_HEX = re.compile(r"[0-9a-f]{64}")


def verify_foreign(
    storage: st.Storage,
    path: str,
    checker: FileChecker,
    *,
    expected: Mapping[str, tuple[int, str]],
) -> Findings:
    """Checks a checkpoint that we did not write; beyond ``store`` also whether tensors are tiled and items parse.

    Args:
        expected: the catalog's copy; may be empty.

    Raises:
        NotACheckpointError: nothing here is a checkpoint.
        UncommittedError: its writing was not finished.
        UnsupportedError: a format that cannot be verified.
    """
    listing = list_files(storage, path)
    format_ = _format(storage, path, {*listing, *expected}, bool(expected))
    found = Findings()
    imported = _imported(storage, path, found) if INTEGRITY in listing else {}
    index = _check_metadata(storage, path, found)
    if format_ == "torch_dist":
        _check_marker(storage, path, found)
    want = {
        name: Expected(None, sha256, "imported", ending=ENDINGS.get(name, b"")) for name, sha256 in imported.items()
    }
    for name, end in ({} if index is None else torch_dist.file_ends(index)).items():
        want[name] = replace(want.get(name, Expected(origin="first-read")), at_least=end)
    for name in (METADATA, formats.MARKER, torch_dist.COMMON):
        if name in listing or (name != torch_dist.COMMON and name in found.checks):
            want.setdefault(name, Expected(origin="first-read", ending=ENDINGS.get(name, b"")))
    for name, (size, sha256) in expected.items():
        origin: Origin = "imported" if name in imported else "first-read"
        want[name] = replace(want.get(name, Expected()), size=size, sha256=sha256, origin=origin)
    if torch_dist.COMMON not in listing and _needs_common(format_, index):
        want.setdefault(torch_dist.COMMON, Expected(origin="first-read"))
    looked = checker.look(want)
    # Where one file is read that nobody has a digest of, its CRC-32s are all that there is to compare.
    undigested = any(not isinstance(found, FileCheck) and want[name].sha256 is None for name, found in looked.items())
    deep = undigested or checker.level in ("structure", "data")
    damage: dict[str, str] = {}
    if deep and index is not None:
        found.defects.extend(tiling_defects(index))
        damage = _seal(storage, path, index, listing, looked, want, found)
    if deep and torch_dist.COMMON in want:
        _seal_common(storage, path, want, found)
    _merge(checker.check(want, looked), damage, found)
    for name in listing.keys() - found.checks.keys():
        found.checks[name] = FileCheck(
            "extra", listing[name], detail="neither the metadata nor integrity.json names it"
        )
    return found


def _format(storage: st.Storage, path: str, names: Collection[str], recorded: bool) -> str:
    url = storage.url(path)
    format_ = formats.sniff(storage, path)
    if format_ == "torch":
        raise UnsupportedError(
            f"{url}: a legacy checkpoint (format torch); this version verifies torch_dist and torch_dcp"
        )
    if format_ is None:
        if not recorded and INTEGRITY not in names:
            raise NotACheckpointError(
                f"{url}: not a checkpoint. Give the iteration directory, e.g. <root>/iter_0001000."
            )
        return "torch_dist" if {formats.MARKER, INTEGRITY} & set(names) else "torch_dcp"
    # Megatron writes integrity.json after metadata.json: with it, a missing marker is a deleted one.
    finished = formats.MARKER in names or INTEGRITY in names
    if format_ == "torch_dist" and not finished:
        raise UncommittedError(f"{url}: {formats.MARKER} is missing: the save was not finished")
    return format_


def _imported(storage: st.Storage, path: str, found: Findings) -> dict[str, str]:
    """The digests of ``integrity.json``; it must be exactly what Megatron-Core writes for what it says."""
    data = read_small(storage, path, INTEGRITY)
    if isinstance(data, FileCheck):
        found.checks[INTEGRITY] = data
        return {}
    try:
        value = json.loads(data)
    except ValueError as error:
        found.checks[INTEGRITY] = damaged(data, ENDINGS[INTEGRITY], f"no JSON: {error}", "first-read")
        return {}
    files = value.get("files") if isinstance(value, dict) else None
    if not isinstance(files, dict) or not all(
        is_below(name.removeprefix(".")) and isinstance(digest, str) and _HEX.fullmatch(digest)
        for name, digest in files.items()
    ):
        found.checks[INTEGRITY] = damaged(data, b"", "not a list of SHA-256 digests", "first-read")
        return {}
    if data != json.dumps({"algorithm": "sha256", "files": dict(sorted(files.items()))}, indent=2).encode():
        detail = "not as Megatron-Core writes it: changed after it was written"
        found.checks[INTEGRITY] = damaged(data, b"", detail, "first-read")
        return files
    found.checks[INTEGRITY] = check_bytes(data, Expected(origin="first-read"))
    return files


def _check_metadata(storage: st.Storage, path: str, found: Findings) -> ItemIndex | None:
    """The index; a verdict on ``.metadata`` if it gives none."""
    data = read_small(storage, path, METADATA)
    if isinstance(data, FileCheck):
        found.checks[METADATA] = data
        return None
    try:
        return to_index(load_metadata(data, METADATA), METADATA)
    except IntegrityError as error:
        cut = not data.endswith(METADATA_ENDING) and not _is_metadata(data[: -len(METADATA_ENDING)] + METADATA_ENDING)
        found.checks[METADATA] = FileCheck("size" if cut else "digest", len(data), detail=str(error))
        return None


def _is_metadata(data: bytes) -> bool:
    try:
        load_metadata(data, METADATA)
    except IntegrityError:
        return False
    return True


def _check_marker(storage: st.Storage, path: str, found: Findings) -> None:
    data = read_small(storage, path, formats.MARKER)
    if isinstance(data, FileCheck):
        found.checks[formats.MARKER] = data
        return
    try:
        formats.check_marker(storage, path)
    except NotACheckpointError as error:
        found.checks[formats.MARKER] = damaged(data, ENDINGS[formats.MARKER], str(error), "first-read")


def _needs_common(format_: str, index: ItemIndex | None) -> bool:
    """Whether nothing but ``common.pt`` can hold the unsharded state: Megatron-Core up to 0.18."""
    return format_ == "torch_dist" and index is not None and not index.has_object(torch_dist.COMMON_KEY)


def _seal(
    storage: st.Storage,
    path: str,
    index: ItemIndex,
    listing: Mapping[str, int],
    looked: Looked,
    want: dict[str, Expected],
    found: Findings,
) -> dict[str, str]:
    """Adds to each data file the records in it that carry a CRC-32; returns what does not parse, by file."""
    whole = [name for name in torch_dist.file_ends(index) if _is_ours_to_check(looked[name])]
    items = check_items(storage, path, index, whole)
    for name, sealed in items.sealed.items():
        want[name] = replace(want[name], sealed=tuple(sealed))
    if items.contradictions:
        found.checks[METADATA] = FileCheck("digest", listing.get(METADATA), detail="; ".join(items.contradictions))
    return items.damage


def _is_ours_to_check(found: FileCheck | int) -> bool:
    """Whether a file has the size that it needs, and no store vouches for the rest."""
    return not isinstance(found, FileCheck) or (found.verdict == "ok" and not found.by_store)


def _seal_common(storage: st.Storage, path: str, want: dict[str, Expected], found: Findings) -> None:
    """The same for ``common.pt``, which is one container."""
    name = torch_dist.COMMON
    data = read_small(storage, path, name)
    if isinstance(data, FileCheck):
        return  # the pass over all files says so
    try:
        records = check_object(data, name).records.values()
        want[name] = replace(want[name], sealed=tuple(Sealed(r.offset, r.size, r.crc32, r.name) for r in records))
    except CkptError as error:
        cut = cut_off(data[: -END_RECORD_BYTES + len(END_RECORD)], END_RECORD)
        found.checks[name] = FileCheck("size" if cut else "digest", len(data), detail=str(error))


def _merge(checks: Mapping[str, FileCheck], damage: Mapping[str, str], found: Findings) -> None:
    """Puts verdicts on bytes and on content together; content that makes no sense is damage whatever its digest is."""
    for name, check in checks.items():
        if check.verdict in ("ok", "digest"):
            if name in found.checks:
                known = found.checks[name]
                check = replace(check, verdict=known.verdict, detail=known.detail or check.detail)
            elif name in damage:
                check = replace(check, verdict="digest", detail=damage[name])
        found.checks[name] = check
