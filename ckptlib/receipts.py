"""What one location knows of the files of a save that was copied to it.

A manifest is the same at every location. How a store cuts a file into the parts that it checks is a fact of one
location, so it stands beside the decision there, in ``parts.json``. While a copy is being made there is a receipt for
every data file that is durable: whoever goes on with the copy does not send that file again. That of ``begin.json`` is
there before it, so that a copy is never taken for a save.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from ckptlib import commit, records
from ckptlib import storage as st
from ckptlib.errors import RecordError
from ckptlib.manifest import FileEntry, Manifest

PARTS = "parts.json"


def publish_receipt(storage: st.Storage, path: str, save_id: str, number: int, entry: FileEntry) -> None:
    """Says that a file is durable here.

    Args:
        entry: of the manifest, with this location's part digests.
    """
    where = st.join(commit.save_dir(path, save_id), commit.receipt_name(number))
    storage.put(where, records.encode("sent", {"save_id": save_id, "file": entry.to_json()}))


def is_copy(storage: st.Storage, path: str, save_id: str) -> bool:
    """Whether an undecided save is a copy of one that was committed elsewhere."""
    return any(entry.name.startswith(commit.RECEIPT) for entry in storage.list(commit.save_dir(path, save_id)))


def read_receipts(
    storage: st.Storage, path: str, manifest: Manifest, of: Container[str] | None = None
) -> dict[str, FileEntry]:
    """The receipts that count, by path: of this save, and of files as the manifest has them. One request each.

    Args:
        of: only of the files with these paths.
    """
    save_id = manifest.begin.save_id
    directory = commit.save_dir(path, save_id)
    present = {entry.name for entry in storage.list(directory)}
    found: dict[str, FileEntry] = {}
    for number, entry in enumerate(manifest.files):
        if commit.receipt_name(number) not in present or (of is not None and entry.path not in of):
            continue
        where = st.join(directory, commit.receipt_name(number))
        data = st.get_or_none(storage, where)
        try:
            value = None if data is None else records.decode("sent", data, storage.url(where))
            if value is not None and value["save_id"] == save_id:
                found.update(_matching([entry], [FileEntry.from_json(value["file"], where)]))
        except (RecordError, KeyError, TypeError):
            continue  # as good as none: the file is sent again
    return found


def lacking(storage: st.Storage, path: str, manifest: Manifest) -> tuple[FileEntry, ...]:
    """The data files of which there is no receipt, by names alone: one listing."""
    present = {entry.name for entry in storage.list(commit.save_dir(path, manifest.begin.save_id))}
    return tuple(
        entry
        for number, entry in enumerate(manifest.files)
        if entry.role == "data" and commit.receipt_name(number) not in present
    )


def remove_receipts(storage: st.Storage, path: str, manifest: Manifest) -> None:
    """After the decision nobody needs them."""
    directory = commit.save_dir(path, manifest.begin.save_id)
    present = {entry.name for entry in storage.list(directory)}
    names = map(commit.receipt_name, range(len(manifest.files)))
    storage.remove([st.join(directory, name) for name in names if name in present])


def parts_bytes(manifest: Manifest, entries: Mapping[str, FileEntry]) -> bytes | None:
    """``parts.json``: the files that a location keeps in other parts than the manifest says; None: there are none."""
    here = [entries.get(entry.path, entry) for entry in manifest.files]
    files = [entry.to_json() for entry, own in zip(here, manifest.files, strict=True) if entry != own]
    return records.encode("parts", {"save_id": manifest.begin.save_id, "files": files}) if files else None


def entries_at(manifest: Manifest, data: bytes | None, where: str) -> tuple[FileEntry, ...]:
    """The files of a save as a location keeps them: the manifest's, with the part digests that hold there.

    Args:
        data: the location's ``parts.json``; None: it has none.
        where: its path, for messages.

    Raises:
        RecordError: it is damaged, or speaks of other files.
    """
    if data is None:
        return manifest.files
    value = records.decode("parts", data, where)
    try:
        if value["save_id"] != manifest.begin.save_id:
            raise RecordError(f"{where}: is of save {value['save_id']}, not of {manifest.begin.save_id}")
        entries = [FileEntry.from_json(entry, where) for entry in value["files"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{where}: member missing or of the wrong type: {error!r}") from error
    here = _matching(manifest.files, entries)
    for entry in entries:
        if entry.path not in here:
            raise RecordError(f"{where}: {entry.path} is not the file that the manifest names")
    return tuple(here.get(entry.path, entry) for entry in manifest.files)


def _matching(wanted: Sequence[FileEntry], entries: Sequence[FileEntry]) -> Mapping[str, FileEntry]:
    """Those entries that speak of the wanted files, by path."""
    known = {entry.path: (entry.size, entry.sha256) for entry in wanted}
    return {entry.path: entry for entry in entries if known.get(entry.path) == (entry.size, entry.sha256)}
