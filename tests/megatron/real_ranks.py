"""A process of the judge's environment: the rank groups and the RNG tracker of the real Megatron-Core.

Reads one JSON object: `{"topologies": [{tp, cp, dp, pp, ep, etp}, …]}`. Answers with the groups of each axis, as
`initialize_model_parallel` makes them, and with what Megatron says of trackers whose states ckptlib put back.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from tests.megatron import stand_ins

stand_ins.install()

from megatron.core.parallel_state import RankGenerator  # noqa: E402
from megatron.core.tensor_parallel.random import (  # noqa: E402
    CudaRNGStatesTracker,
    convert_cuda_rng_state,
    is_graph_safe_cuda_rng_tracker,
)

from ckptlib import rng  # noqa: E402

ORDER = "tp-cp-ep-dp-pp"


def groups(sizes: dict[str, int]) -> dict[str, list[list[int]]]:
    """Groups by axis; those of the experts under ``etp``, ``ep`` and ``expert_dp``."""
    tp, cp, dp, pp, ep, etp = (sizes[axis] for axis in ("tp", "cp", "dp", "pp", "ep", "etp"))
    expert_dp = tp * cp * dp // (etp * ep)
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=ORDER)
    expert = RankGenerator(tp=etp, ep=ep, dp=expert_dp, pp=pp, cp=1, order=ORDER)
    made = {axis: dense.get_ranks(axis) for axis in ("tp", "cp", "dp", "pp")}
    return made | {"etp": expert.get_ranks("tp"), "ep": expert.get_ranks("ep"), "expert_dp": expert.get_ranks("dp")}


def trackers() -> list[dict[str, Any]]:
    """A stream saved from each form of Megatron's tracker and restored to each."""
    results = []
    for saved_graphable in (False, True):
        for running_graphable in (False, True):
            saved, running = tracker(saved_graphable, 5), tracker(running_graphable, 6)
            state = rng.capture(rng.RngTracker.of(saved))
            rng.restore(state, rng.RngTracker.of(running))
            (stream,) = running.get_states().values()
            results.append(
                {
                    "graph safe": is_graph_safe_cuda_rng_tracker(running),
                    "form": type(stream).__name__,
                    "same": torch.equal(convert_cuda_rng_state(stream), torch.Generator().manual_seed(5).get_state()),
                }
            )
    return results


def tracker(graphable: bool, seed: int) -> CudaRNGStatesTracker:
    """Megatron's own, with a stream of the CPU: `add` would ask for a GPU."""
    made = CudaRNGStatesTracker()
    made.use_cudagraphable_rng = graphable
    generator = torch.Generator().manual_seed(seed)
    made.set_states({"model-parallel-rng": generator if graphable else generator.get_state()})
    return made


if __name__ == "__main__":
    request = json.load(sys.stdin)
    print(json.dumps({"groups": [groups(sizes) for sizes in request["topologies"]], "trackers": trackers()}))
