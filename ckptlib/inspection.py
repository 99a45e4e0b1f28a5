"""What a directory holds, without reading its tensors: our own saves, Megatron-Core's and torch's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptlib import commit, formats
from ckptlib import storage as st
from ckptlib.errors import NotACheckpointError, StateError, UncommittedError, UnsafePickleError, UnsupportedError
from ckptlib.formats import torch_dist
from ckptlib.index import ItemIndex
from ckptlib.manifest import Manifest
from ckptlib.sharding import Box
from ckptlib.topology import Topology

__all__ = ["CheckpointInfo", "ObjectEntry", "TensorEntry", "inspect", "list_files"]

MAX_DEPTH = 4
"""Directories below a checkpoint that are listed: tokenizers and sidecars are shallow."""

_ITERATION = re.compile(r"iter_(\d{7,})")
_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}


class TensorEntry(NamedTuple):
    """A stored tensor: global shape, dtype (``bfloat16``), and the boxes of its stored chunks."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Box, ...]


class ObjectEntry(NamedTuple):
    """A stored object: its file and its length there, in bytes."""

    file: str
    length: int


@dataclass(frozen=True)
class CheckpointInfo:
    """What `inspect` found.

    Attributes:
        url: the iteration directory.
        format: ``torch_dist``, ``torch_dcp``, ``fsdp_dtensor``, or ``torch`` of our own saves.
        semantic_type: as saved; of others ``GLOBAL``, or ``TORCH_DCP`` for plain torch checkpoints.
        iteration: None when a foreign checkpoint does not say, and neither does its directory's name.
        run, topology: None where unknown.
        committed: R1: safe to load.
        save_id, manifest: None for foreign checkpoints; no manifest before the commit.
        index: every item; empty where nothing was committed, and for whole state dicts.
        files: every file of the directory and its size in bytes, relative to it.
        notes: what a person should know, one sentence each.
    """

    url: str
    format: str
    semantic_type: str
    iteration: int | None
    run: str | None
    topology: Topology | None
    committed: bool
    save_id: str | None
    manifest: Manifest | None
    index: ItemIndex = field(repr=False)
    files: Mapping[str, int] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Every tensor by key. Entries are made on access: a million of them cost nothing until then."""
        return _Tensors(self.index)

    @property
    def objects(self) -> Mapping[str, ObjectEntry]:
        """Every object by key."""
        return {item.key: ObjectEntry(item.location.file, item.location.length) for item in self.index.objects()}


class _Tensors(Mapping[str, TensorEntry]):
    def __init__(self, index: ItemIndex) -> None:
        self._index = index

    def __getitem__(self, key: str) -> TensorEntry:
        info, chunks = self._index.tensor(key), self._index.chunks(key)
        return TensorEntry(info.shape, info.dtype, tuple(chunks.box(i) for i in range(len(chunks))))

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.keys)

    def __len__(self) -> int:
        return len(self._index.keys)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key in self._index


def inspect(
    url: str, *, save_id: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> CheckpointInfo:
    """What the directory at `url` holds. A save that was never committed is shown with `committed` False.

    Args:
        url: the iteration directory.
        save_id: which save in it; None: the newest committed one, or else the newest.

    Raises:
        NotACheckpointError: nothing here can be read as a checkpoint.
        UncommittedError: a foreign checkpoint whose writing stopped before its ``.metadata``.
        IntegrityError: its records are damaged; `UnsafePickleError`: hostile. Nothing was executed.
        UnsupportedError: a format that cannot be read item by item.
    """
    storage, path = st.resolve(url, storage_options)
    saves = [save for save in commit.list_saves(storage, path) if save_id in (None, save.save_id)]
    if save_id is not None and not saves:
        raise NotACheckpointError(f"{storage.url(path)}: no save {save_id} here")
    if (save_id is None and formats.sniff_beside(storage, path, saves) is not None) or not saves:
        return _inspect_foreign(storage, path)
    current = saves[0] if save_id is not None else commit.current_save(storage, path)
    return _inspect_save(storage, path, saves[-1] if current is None else current)


def list_files(storage: st.Storage, path: str) -> dict[str, int]:
    """Size of every file below a checkpoint's directory, by relative path. Links are not followed."""
    found: dict[str, int] = {}
    todo = [("", 0)]
    while todo:
        prefix, depth = todo.pop()
        for entry in storage.list(st.join(path, prefix) if prefix else path):
            name = f"{prefix}/{entry.name}" if prefix else entry.name
            if not entry.is_dir:
                found[name] = entry.size
            elif depth < MAX_DEPTH:
                todo.append((name, depth + 1))
    return dict(sorted(found.items()))


def _inspect_save(storage: st.Storage, path: str, save: commit.SaveState) -> CheckpointInfo:
    if save.damage is not None:
        raise save.damage
    if save.tombstoned:
        raise NotACheckpointError(f"{storage.url(path)}: save {save.save_id} was deleted, or replaced by a later one")
    manifest, index, notes = None, ItemIndex.build([]), []
    if save.committed:
        manifest = commit.read_manifest(storage, path, save)
        index = commit.read_index(storage, path, manifest)
    elif save.decision is not None:
        notes.append(f"not a checkpoint: save {save.save_id} was aborted: {save.decision.reason}")
    else:
        notes.append(f"not a checkpoint (yet): save {save.save_id} began and has not been committed")
    begin = save.begin if manifest is None else manifest.begin
    if manifest is not None and manifest.begin.format == "torch":
        whole = len(manifest.files_of("data"))
        notes.append(f"{whole} whole state dicts and no global tensors: it loads at its own topology only")
    if begin is None:
        raise UncommittedError(f"{storage.url(path)}: save {save.save_id} has no begin.json")
    return CheckpointInfo(
        url=storage.url(path),
        format=begin.format,
        semantic_type=begin.semantic_type,
        iteration=begin.iteration,
        run=begin.run,
        topology=begin.topology,
        committed=save.committed,
        save_id=save.save_id,
        manifest=manifest,
        index=index,
        files=list_files(storage, path),
        notes=tuple(notes),
    )


def _inspect_foreign(storage: st.Storage, path: str) -> CheckpointInfo:
    url = storage.url(path)
    format_ = formats.sniff(storage, path)
    if format_ is None:
        raise NotACheckpointError(
            f"{url}: not a checkpoint (no commit decision, metadata.json, .metadata or mp_rank_* directory). "
            "Give the iteration directory, e.g. <root>/iter_0001000."
        )
    if format_ == "torch":
        raise UnsupportedError(
            f"{url}: a legacy checkpoint (format torch, mp_rank_* directories); this version reads torch_dist and "
            "torch_dcp"
        )
    try:
        index = torch_dist.read_index(storage, path)
    except NotACheckpointError as error:
        raise UncommittedError(str(error)) from error
    complete, reason = formats.is_foreign_complete(storage, path, format_)
    common: Mapping[str, Any] = {}
    notes = [] if complete else [f"not complete: {reason}"]
    try:
        common = torch_dist.read_common(storage, path, index)
    except NotACheckpointError as error:
        notes.append(str(error))
    except UnsafePickleError as error:
        if format_ == "torch_dist":  # its common state is part of it; elsewhere these are values among others
            raise
        notes.append(str(error))
    files = list_files(storage, path)
    return CheckpointInfo(
        url=url,
        format=format_,
        semantic_type="GLOBAL" if format_ == "torch_dist" else "TORCH_DCP",
        iteration=_iteration(common, path),
        run=None,
        topology=topology_of(common),
        committed=complete,
        save_id=None,
        manifest=None,
        index=index,
        files=files,
        notes=(*notes, *_foreign_notes(index, common, files)),
    )


def _foreign_notes(index: ItemIndex, common: Mapping[str, Any], files: Mapping[str, int]) -> Iterator[str]:
    form = torch_dist.optimizer_form(index, common)
    if form is not None:
        yield torch_dist.conversion_note(form)
    elif any(key.startswith("optimizer.state.") for key in index.keys):
        yield "its optimizer state is stored in model space: it can be loaded at any parallel layout"
    if "integrity.json" in files:
        yield "integrity.json holds its writer's SHA-256 digests"
    else:
        yield "it has no digests of its own; verify checks the CRC-32 of every stored record"


def topology_of(common: Mapping[str, Any]) -> Topology | None:
    """The parallel layout that Megatron-Core's arguments name; None where they do not."""
    args = common.get("args")
    sizes = {axis: getattr(args, name, None) for axis, name in _AXES.items()}
    if not isinstance(sizes["tp"], int) or not isinstance(sizes["pp"], int):
        return None
    sizes["vpp"] = getattr(args, "virtual_pipeline_model_parallel_size", None)
    if sizes["ep"] not in (None, 1):  # without experts it is set too, and means nothing
        sizes["etp"] = getattr(args, "expert_tensor_parallel_size", None)
    try:
        return Topology(**{axis: size for axis, size in sizes.items() if isinstance(size, int)})
    except StateError:  # a hand-made Namespace may contradict itself
        return None


def _iteration(common: Mapping[str, Any], path: str) -> int | None:
    value = common.get("iteration")
    if isinstance(value, int):
        return value
    match = _ITERATION.fullmatch(st.basename(path))
    return int(match.group(1)) if match else None
