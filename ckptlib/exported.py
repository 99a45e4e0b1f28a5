"""What readers of a format find beside a committed save (W5): names, and which files of the save they copy. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ckptlib.layouts import legacy, own_names
from ckptlib.layouts.own_names import own_file_name
from ckptlib.manifest import Begin, FileEntry, Format
from ckptlib.topology import Topology

CHECKPOINT, COMMON, INTEGRITY, METADATA, MARKER = (
    "checkpoint.json",
    "common.pt",
    "integrity.json",
    ".metadata",
    "metadata.json",
)
TEMPORARY = ".tmp"
"""How the name of a file ends that is being written beside an export."""
MARKER_BYTES = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}).encode()
"""Exactly what Megatron-Core writes: one line, no newline."""


def own_files(begin: Begin) -> list[str]:
    """The files of whole state dicts that a save must have."""
    ranks = own_names.ranks(begin.semantic_type, topology_of(begin), begin.world_size)
    return [own_file_name(rank, begin.save_id) for rank in ranks]


def has_metadata(format: Format) -> bool:
    """Whether the format has torch's ``.metadata``: a table of items."""
    return format != "torch"


def has_marker(format: Format) -> bool:
    """Whether ``metadata.json`` says that a checkpoint is complete."""
    return format == "torch_dist"


def topology_of(begin: Begin) -> Topology:
    """The topology of a save; plain data parallel where none was given."""
    return begin.topology or Topology(dp=begin.world_size)


def copies(begin: Begin, files: Sequence[FileEntry]) -> Iterator[tuple[str, FileEntry]]:
    """The exports that have the content of a file of the save, in the order in which they appear.

    Of LEGACY the first place comes last: there a Megatron reader looks whether there is anything.
    """
    by_role = {entry.role: entry for entry in files}
    if "common" in by_role:
        yield COMMON, by_role["common"]
    if "metadata" in by_role:
        yield METADATA, by_role["metadata"]
    if begin.semantic_type == "LEGACY":
        by_path = {entry.path: entry for entry in files}
        for place, rank in reversed(legacy.writers(topology_of(begin)).items()):
            yield f"{place}/{legacy.FILE}", by_path[own_file_name(rank, begin.save_id)]


def names(begin: Begin) -> set[str]:
    """Every name that the exports of a save may have, beside those of all formats."""
    found = {METADATA} if has_metadata(begin.format) else set()
    if has_marker(begin.format):
        found |= {MARKER, COMMON}
    if begin.semantic_type == "LEGACY":
        found |= {f"{place}/{legacy.FILE}" for place in legacy.writers(topology_of(begin))}
    return found
