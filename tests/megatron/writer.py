"""A trainer's rank: saves its part of the reference state with ckptlib. Several of them form a gloo group.

Usage: ``python -m tests.megatron.writer URL RANK WORLD PORT``
"""

from __future__ import annotations

import datetime
import sys

import torch

import ckptlib
from tests.megatron.reference import ITERATION, state


def main(url: str, rank: int, world: int, port: int) -> None:
    """Saves as tensor-parallel rank `rank` of `world`."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    ckptlib.save(state(world, rank), url, iteration=ITERATION, run="reference", topology=ckptlib.Topology(tp=world))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
