"""Which content a semantic type makes of a state: the one place that tells them apart on the way in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptlib.layouts import legacy, object_graph
from ckptlib.layouts.own_files import own_content
from ckptlib.manifest import SemanticType
from ckptlib.packing import Content, ShardedContent
from ckptlib.state import flatten
from ckptlib.topology import Topology


def check_topology(semantic_type: SemanticType, topology: Topology | None, world_size: int) -> None:
    """Refuses a topology that a layout cannot hold.

    Raises:
        UnsupportedError: LEGACY, and two ranks of the topology would need one directory, or a directory has no writer.
    """
    if semantic_type == "LEGACY":
        legacy.writers(topology or Topology(dp=world_size))


def writes(semantic_type: SemanticType, topology: Topology | None, rank: int, world_size: int) -> bool:
    """Whether a rank's state is looked at: of LEGACY only one rank of each place has anything to say."""
    if semantic_type != "LEGACY":
        return True
    topology = topology or Topology(dp=world_size)
    return legacy.writer_of(topology, rank) == rank


def content_of(semantic_type: SemanticType, tree: Mapping[str, Any] | None) -> Content:
    """What this rank brings to a save.

    Args:
        tree: the tree to save; None on a rank that writes nothing (see `writes`).

    Raises:
        StateError, UnsupportedError: the state cannot be saved so.
    """
    if tree is None or semantic_type in ("LOCAL", "LEGACY"):
        return own_content(tree)
    flat = flatten(tree)
    if semantic_type == "TORCH_DCP":
        object_graph.check(flat)
    return ShardedContent(flat, with_common=semantic_type == "GLOBAL")
