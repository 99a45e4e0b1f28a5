"""An opened checkpoint: one save id pinned, its item index, and how to read its objects.

The same for our own saves and for what Megatron or torch wrote: readers see an `ItemIndex` and plain objects.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from isal import isal_zlib

from ckptlib import commit, formats
from ckptlib import storage as st
from ckptlib.errors import IntegrityError, NotACheckpointError, UncommittedError, UnsupportedError
from ckptlib.formats import torch_dist
from ckptlib.index import UNKNOWN, ChunkItem, ItemIndex, Location
from ckptlib.manifest import Manifest
from ckptlib.safe_pickle import load_object
from ckptlib.state import dtype_of


@dataclass(frozen=True)
class Source:
    """A committed checkpoint, pinned: what one reader sees does not change under it (W9).

    Attributes:
        manifest: None for a foreign checkpoint.
    """

    storage: st.Storage
    path: str
    format: str
    index: ItemIndex
    manifest: Manifest | None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """The iteration directory."""
        return self.storage.url(self.path)

    @property
    def save_id(self) -> str | None:
        """The pinned save; None for a foreign checkpoint."""
        return None if self.manifest is None else self.manifest.begin.save_id

    def has_object(self, key: str) -> bool:
        """Whether an object or a plain value is stored under this name.

        Megatron-Core keeps plain values in one nested common state; there a dotted path names what lies at its end.
        """
        return self.index.has_object(key) or _at(self._common_values, key) is not _ABSENT

    def read_object(self, key: str) -> Any:
        """A stored object, unpickled as plain data (R5). `KeyError` when it is absent.

        Raises:
            IntegrityError: damaged, or it names anything but plain data.
        """
        if not self.index.has_object(key) and (value := _at(self._common_values, key)) is not _ABSENT:
            return copy.deepcopy(value)
        item = self.index.object(key)
        where = f"{self.url}/{item.location.file} ({key})"
        value = load_object(self.read_object_bytes(key), where)
        if item.wrapped:
            if not isinstance(value, list) or len(value) != 1:
                raise IntegrityError(f"{where}: a sharded object must be a list of one, found {type(value).__name__}")
            return value[0]
        return value

    def read_object_bytes(self, key: str) -> bytes:
        """The container of a stored object. `KeyError` when it is absent.

        Raises:
            IntegrityError: its CRC-32 is not the recorded one.
        """
        location = self.index.object(key).location
        if key in self.index.repeated:
            return self.index.repeated[key]
        data = bytearray(location.length)
        self.storage.read_into(st.join(self.path, location.file), [(location.offset, memoryview(data))])
        if location.crc32 != UNKNOWN and isal_zlib.crc32(data) != location.crc32:
            raise IntegrityError(f"{self.url}/{location.file} ({key}): damaged: its CRC-32 is not the recorded one")
        return bytes(data)

    @functools.cached_property
    def _common_values(self) -> Mapping[str, Any]:
        return self.read_common() if self.manifest is None and self.format == "torch_dist" else {}

    def read_common(self) -> dict[str, Any]:
        """The plain values, as a nested dict.

        Raises:
            IntegrityError: missing, damaged, or it names anything but plain data.
        """
        if self.manifest is None:
            return torch_dist.read_common(self.storage, self.path, self.index)
        entries = self.manifest.files_of("common")
        if not entries:
            return self._values_by_path()
        (entry,) = entries
        where = f"{self.url}/{entry.path}"
        data = bytearray(entry.size)
        self.storage.read_into(st.join(self.path, entry.path), [(0, memoryview(data))])
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise IntegrityError(f"{where}: damaged: its SHA-256 is not the manifest's {entry.sha256}")
        value = load_object(bytes(data), where)
        if not isinstance(value, dict):
            raise IntegrityError(f"{where}: the common state is a {type(value).__name__}, expected a dict")
        return value

    def _values_by_path(self) -> dict[str, Any]:
        """The plain values of a format without a common state (torch_dcp), nested by their dotted paths.

        A name with a dot in it, and a list that has tensors, come back as dicts: the format does not tell.
        """
        root: dict[str, Any] = {}
        for key in self.index.object_keys:
            if key.startswith(_NOT_COMMON):
                continue
            *above, last = key.split(".")
            node: Any = root
            for name in above:
                node = node.setdefault(name, {}) if isinstance(node, dict) else {}
            if isinstance(node, dict):
                node[last] = self.read_object(key)
        return root

    def locate(self, items: Sequence[ChunkItem]) -> tuple[list[Location | None], list[int]]:
        """Where the payloads of chunks lie, read from their containers: for chunks whose index does not say it.

        Returns:
            The locations, and the positions of chunks without one: their elements do not lie in order (`read_chunk`).

        Raises:
            RecordError: a container holds another tensor than the index says.
        """
        try:
            return [*torch_dist.locate_payloads(self.storage, self.path, items)], []
        except UnsupportedError:
            found: list[Location | None] = []
            for item in items:
                try:
                    found.append(torch_dist.locate_payload(self.storage, self.path, item))
                except UnsupportedError:
                    found.append(None)
            return found, [i for i, location in enumerate(found) if location is None]

    def read_chunk(self, item: ChunkItem) -> torch.Tensor:
        """One whole chunk through its container, however its elements lie."""
        return torch_dist.read_chunk(self.storage, self.path, item)

    def tensors_below(self, prefix: str) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """See `ckptlib.optim.StoredState`."""
        start = prefix + "."
        return {
            info.key.removeprefix(start): (dtype_of(info.dtype), info.shape)
            for info in map(self.index.tensor, self.index.keys_below(start))
        }

    def objects_below(self, prefix: str) -> list[str]:
        """See `ckptlib.optim.StoredState`."""
        start = prefix + "."
        return [key.removeprefix(start) for key in self.object_keys_below(start)]

    def object_keys_below(self, start: str) -> list[str]:
        """Names of objects and plain values that begin with `start`; of a common state also the dicts and lists in it.

        See `has_object`.
        """
        return [
            *self.index.object_keys_below(start),
            *(key for key in _paths(self._common_values) if key.startswith(start)),
        ]


_ABSENT = object()

_NOT_COMMON = ("rng_state", "rerun_state_machine_state")
"""What belongs to ranks: read where it is wanted."""


def _paths(node: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of everything in nested dicts and lists."""
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        yield f"{prefix}{name}"
        yield from _paths(value, f"{prefix}{name}.")


def _at(node: Any, key: str) -> Any:
    """What a dotted path leads to in nested dicts and lists, whose names may have dots of their own."""
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        if key == str(name):
            return value
        if key.startswith(f"{name}.") and (found := _at(value, key[len(str(name)) + 1 :])) is not _ABSENT:
            return found
    return _ABSENT


def open_source(
    url: str,
    *,
    save_id: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Source:
    """Opens a checkpoint for reading.

    Args:
        url: the iteration directory.
        save_id: which save in it; None: the newest committed one.

    Raises:
        NotACheckpointError: nothing here is a checkpoint.
        UncommittedError: a save began here and was never committed, or `save_id` is not committed.
        IntegrityError: its records are damaged.
        UnsupportedError: a format that cannot be read item by item.
    """
    storage, path = st.resolve(url, storage_options)
    if save_id is None:
        save = commit.current_save(storage, path)
    else:
        save = commit.read_save(storage, path, save_id)
        if not save.committed:
            raise save.damage or UncommittedError(f"{storage.url(path)}: save {save_id} is not committed here")
    if save is not None:
        manifest = commit.read_manifest(storage, path, save)
        index = commit.read_index(storage, path, manifest)
        return Source(storage, path, manifest.begin.format, index, manifest, storage_options)
    return replace(_open_foreign(storage, path), storage_options=storage_options)


def _open_foreign(storage: st.Storage, path: str) -> Source:
    url = storage.url(path)
    saves = commit.list_saves(storage, path)
    format_ = formats.sniff_beside(storage, path, saves)
    if saves and format_ is None:
        states = ", ".join(f"{save.save_id}: {_what_happened(save)}" for save in saves)
        raise UncommittedError(f"{url}: no save was committed here ({states}). Resume from an earlier iteration.")
    if format_ is None:
        raise NotACheckpointError(
            f"{url}: not a checkpoint (no commit decision, metadata.json, .metadata or mp_rank_* directory). "
            "Give the iteration directory, e.g. <root>/iter_0001000."
        )
    if format_ not in ("torch_dist", "torch_dcp", "fsdp_dtensor"):
        raise UnsupportedError(
            f"{url}: format {format_} cannot be read tensor by tensor; convert it to torch_dist first"
        )
    # The index first: what is hostile or damaged in it is that, and not merely incomplete.
    index = torch_dist.read_index(storage, path)
    complete, reason = formats.is_foreign_complete(storage, path, format_, index)
    if not complete:
        raise UncommittedError(f"{url}: incomplete {format_} checkpoint: {reason}")
    return Source(storage, path, format_, index, None)


def _what_happened(save: commit.SaveState) -> str:
    if save.tombstoned:
        return "deleted"
    if save.decision is not None:
        return f"{save.decision.outcome} ({save.decision.reason})"
    return "undecided"
