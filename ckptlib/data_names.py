"""Names of data files, and which names can be files of a checkpoint. Pure."""

from __future__ import annotations

FAN_OUT = 10_000
"""Ranks whose files lie in one directory. Larger directories are slow on some filesystems and forbidden on others."""


def data_name(rank: int, number: int, save_id: str, ending: str) -> str:
    """``__<rank>_<number>.<save_id>.<ending>``; from rank 10,000 on below ``__<rank // 10000>.<save_id>.ranks/``."""
    name = f"__{rank}_{number}.{save_id}.{ending}"
    group = rank // FAN_OUT
    return f"__{group}.{save_id}.ranks/{name}" if group else name


def is_below(name: str) -> bool:
    """Whether a relative path means a file of the directory that it is joined to, or of one below it, and no other."""
    parts = name.split("/")
    return not any(part.startswith(".") or not part or "\\" in part or "\0" in part for part in parts)
