"""Checkpoint formats of others: which one a directory holds, and whether it is complete.

Our own saves are recognised by their commit decision (`ckptlib.commit`), never by what is looked at here: the foreign
files in one of our directories are exports.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Protocol

from ckptlib import storage as st
from ckptlib.errors import CkptError, NotACheckpointError
from ckptlib.formats import torch_dist
from ckptlib.formats.metadata import METADATA
from ckptlib.index import ItemIndex

__all__ = ["is_foreign_complete", "sniff", "sniff_beside"]

MARKER = "metadata.json"


_CELL = re.compile(rb"/shard_\d+(?:\.\d+)*_\d+(?:\.\d+)*")
"""A cell of a grid of objects (`ShardedObject.unique_key`), in a pickle that is not opened."""


def sniff(storage: st.Storage, path: str) -> str | None:
    """Format of the foreign checkpoint in a directory, in Megatron-Core's order; None when there is none.

    ``torch_dist`` by its ``metadata.json``, ``torch`` by ``mp_rank_*`` directories, ``torch_dcp`` or ``fsdp_dtensor``
    by ``.metadata``. Unlike Megatron, a ``.metadata`` with sharded objects and no ``metadata.json`` is called what it
    is: a ``torch_dist`` that was not finished (R1). Nothing is unpickled.
    """
    entries = storage.list(path)
    names = {entry.name for entry in entries}
    if MARKER in names:
        return "torch_dist"
    places = (st.join(path, entry.name) for entry in entries if entry.is_dir and entry.name.startswith("mp_rank_"))
    if any(map(functools.partial(_holds_something, storage), places)):
        return "torch"
    if METADATA not in names:
        return None
    keys = storage.get(st.join(path, METADATA))
    if _CELL.search(keys):
        return "torch_dist"
    return "fsdp_dtensor" if b"optimizer.param_to_group_meta." in keys else "torch_dcp"


def _holds_something(storage: st.Storage, place: str) -> bool:
    """Not only the temporary files that a process of ours left when it was killed."""
    names = [entry.name for entry in storage.list(place)]
    return not names or not all(name.startswith(".") and name.endswith(".tmp") for name in names)


class _Save(Protocol):
    @property
    def committed(self) -> bool: ...
    @property
    def tombstoned(self) -> bool: ...
    @property
    def damage(self) -> Exception | None: ...


def sniff_beside(storage: st.Storage, path: str, saves: Sequence[_Save]) -> str | None:
    """`sniff` where saves of ours left a trace: what failed there has left nothing that others read (W1).

    None when what lies there may be exports of ours.
    """
    if any(save.committed or save.tombstoned or save.damage is not None for save in saves):
        return None
    if saves and storage.stat(st.join(path, "checkpoint.json")) is not None:
        return None
    return sniff(storage, path)


def is_foreign_complete(
    storage: st.Storage, path: str, format: str, index: ItemIndex | None = None
) -> tuple[bool, str]:
    """R1 for a foreign checkpoint: its format's marker, and every file that its metadata names, with enough bytes.

    Args:
        path: the iteration directory.
        format: what `sniff` said.
        index: the checkpoint's, if it is at hand.

    Returns:
        Whether it is complete, and if not, why: for people. Hostile and damaged metadata are a reason, not an error.

    Raises:
        OSError: the storage cannot be read (which is not the same as incomplete).
    """
    if format == "torch":
        return False, "the legacy format `torch` is recognised but not read by this version"
    try:
        if format == "torch_dist":
            check_marker(storage, path)
        index = torch_dist.read_index(storage, path) if index is None else index
        ends = torch_dist.file_ends(index)
        for name, end in ends.items():
            size = storage.await_size(st.join(path, name), end)
            if size is None or size < end:
                return False, f"{name} {'is missing' if size is None else f'has {size} bytes'}, {end} bytes are needed"
        if format == "torch_dist":
            torch_dist.read_common(storage, path, index)
    except CkptError as error:
        return False, str(error)
    return True, ""


def check_marker(storage: st.Storage, path: str) -> None:
    """Checks ``metadata.json`` of a torch_dist checkpoint.

    Raises:
        NotACheckpointError: absent, or it says something else.
    """
    where = st.join(path, MARKER)
    try:
        value = json.loads(storage.get(where))
    except FileNotFoundError:
        raise NotACheckpointError(f"{storage.url(path)}: {MARKER} is missing: the save was not finished") from None
    except ValueError as error:
        raise NotACheckpointError(f"{storage.url(where)}: no JSON ({error}): the save was not finished") from error
    found = (
        (value.get("sharded_backend"), value.get("sharded_backend_version", 1)) if isinstance(value, dict) else value
    )
    if found != ("torch_dist", 1):
        raise NotACheckpointError(f"{storage.url(where)}: says {found!r}, expected ('torch_dist', 1)")
