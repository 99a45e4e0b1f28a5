"""torch's object graph (TORCH_DCP): every value under its dotted path, and nothing else."""

from __future__ import annotations

from ckptlib.errors import UnsupportedError
from ckptlib.state import FlatState


def check(flat: FlatState) -> None:
    """Refuses leaves that no reader of `torch.distributed.checkpoint` would find.

    Raises:
        UnsupportedError: a cell of a grid of objects, or a tensor under another name than its path.
    """
    if flat.objects:
        raise UnsupportedError(
            f"{flat.objects[0].key!r}: TORCH_DCP + torch_dcp has no grids of objects. Give the object a path of its "
            "own, {name: {rank: value}}, or save it as GLOBAL + torch_dist."
        )
    for key, path in flat.elsewhere.items():
        raise UnsupportedError(
            f"tensor {key!r} lies at {path!r}: TORCH_DCP + torch_dcp has every value under its path. Call it {path!r}, "
            "or save it as GLOBAL + torch_dist."
        )
