"""The files of whole state dicts (LOCAL, LEGACY): their names, and which of them a save must have. Pure."""

from __future__ import annotations

from ckptlib.data_names import data_name
from ckptlib.layouts import legacy
from ckptlib.topology import Topology


def own_file_name(rank: int, save_id: str) -> str:
    """``__<rank>_0.<save_id>.pt``, as `data_name`: the file of a rank's own state."""
    return data_name(rank, 0, save_id, "pt")


def count(semantic_type: str, topology: Topology, world_size: int) -> int:
    """How many there must be; 0: a semantic type that has none. In no time, whatever the sizes claim to be."""
    if semantic_type == "LOCAL":
        return world_size
    return legacy.writer_count(topology) if semantic_type == "LEGACY" else 0


def ranks(semantic_type: str, topology: Topology, world_size: int) -> list[int]:
    """The ranks that have one.

    Raises:
        UnsupportedError: LEGACY, and it cannot hold this topology.
    """
    if semantic_type == "LOCAL":
        return [*range(world_size)]
    return [*legacy.writers(topology).values()] if semantic_type == "LEGACY" else []
