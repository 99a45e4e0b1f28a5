"""Megatron's legacy layout: one directory per (tp, pp, ep) place, with the whole state dict of that place. Pure.

    iter_0000100/mp_rank_00_001_003/model_optim_rng.pt      tp 0, pp 1, ep 3

The numbers of pp and ep are there only where those axes are larger than 1, so ``mp_rank_00_001`` is one or the other;
the arguments inside the file tell. Data and context parallel ranks have no directory of their own: they hold the same.
"""

from __future__ import annotations

import functools
import math

from ckptlib.errors import UnsupportedError
from ckptlib.topology import Topology

FILE = "model_optim_rng.pt"
RERUN = "rerun_state_machine"
"""Megatron's name for the rerun state in it."""


def place_name(topology: Topology, rank: int) -> str:
    """The directory of a rank's place: ``mp_rank_00_001``."""
    at = topology.coordinates(rank)
    pipeline = f"_{at.pp:03d}" if topology.pp > 1 else ""
    expert = f"_{topology.expert_coordinates(rank).ep:03d}" if topology.ep > 1 else ""
    return f"mp_rank_{at.tp:02d}{pipeline}{expert}"


def writer_count(topology: Topology) -> int:
    """How many ranks write, of a topology that the layout can hold: those of a stage with dp 0, dense or expert."""
    return topology.pp * max(topology.tp, topology.etp * topology.ep)


def writers(topology: Topology) -> dict[str, int]:
    """The rank that writes each place: of the data-parallel ranks 0 and the expert-data-parallel ranks 0, its only one.

    Raises:
        UnsupportedError: the layout cannot hold this topology: a place has several ranks that differ, or none of them.
    """
    return dict(_writers(topology))


@functools.lru_cache(maxsize=16)  # a save asks several times
def _writers(topology: Topology) -> tuple[tuple[str, int], ...]:
    stage = topology.tp * topology.cp * topology.dp
    experts = topology.etp * topology.ep
    # Which places a stage has comes again after this many ranks, and all that write are before that.
    period = max(topology.tp, experts) if topology.ep == 1 else math.lcm(topology.tp, experts)
    found: dict[str, list[int]] = {}
    for first in range(0, topology.world_size, stage):
        for rank in range(first, first + period):
            at = topology.coordinates(rank)
            writes = (at.dp == 0 and at.cp == 0) or topology.expert_coordinates(rank).dp == 0
            found.setdefault(place_name(topology, rank), []).extend([rank] if writes else [])
    for name, ranks in found.items():
        if len(ranks) != 1:
            who = f"ranks {', '.join(map(str, ranks))} would write it" if ranks else "no rank would write it"
            raise UnsupportedError(
                f"LEGACY + torch cannot hold the topology {topology}: a directory has the numbers of tp, pp and ep, "
                f"and of {name} {who}. Save it as GLOBAL + torch_dist."
            )
    return tuple((name, ranks[0]) for name, ranks in sorted(found.items()))


def writer_of(topology: Topology, rank: int) -> int:
    """The rank that writes the place of `rank`. Raises as `writers`."""
    return writers(topology)[place_name(topology, rank)]


def same_places(saved: Topology, now: Topology) -> bool:
    """Whether every rank of `now` finds its own state in a checkpoint of `saved`: all axes but dp and cp are equal."""
    return (saved.tp, saved.pp, saved.vpp, saved.ep, saved.etp) == (now.tp, now.pp, now.vpp, now.ep, now.etp)
