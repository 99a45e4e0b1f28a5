"""How large a checkpoint will be, how long a save will stop the training, and how often to save. Pure arithmetic.

The model is the usual one for Megatron's mixed-precision training with the distributed optimizer: weights in two
bytes, main parameters in four, two Adam moments in eight. What is stored once is split evenly over the ranks of a
pipeline stage, and stages are taken to be equally large: real ones differ by their embeddings. Everything that is
not arithmetic is an `Assumptions`.

Three ways to save stop the training for different times:

============ =========================== ==================================================================
mode         stops for                   because
============ =========================== ==================================================================
legacy sync  its own bytes ÷ a stream    few ranks write whole shards, one file each, and all wait for them
sync         all bytes ÷ the filesystem  every rank writes an equal share (replicas once), and all wait
async        its own bytes ÷ D2H         a rank waits until its share is copied into host memory
============ =========================== ==================================================================

Writing never goes faster than one stream per writer, nor than the filesystem takes from all of them together; the
slower of the two counts. Planning, pickling, hashing and the commit are not in it: these are bounds, to size a job by.
An optimizer that is offloaded is counted in host memory; that it needs no D2H copy is not.

The interval is Young's ("A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; refined by
Daly, FGCS 22(3), 2006).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ckptlib.errors import StateError
from ckptlib.topology import Topology

Mode = Literal["legacy sync", "sync", "async"]
Limit = Literal["stream", "aggregate", "D2H"]


@dataclass(frozen=True)
class Assumptions:
    """What is taken for granted, and differs from cluster to cluster.

    Attributes:
        model_bytes: bytes per parameter of the weights (bfloat16: 2).
        main_bytes: bytes per parameter of the optimizer's own copy (float32: 4; none: 0).
        moment_bytes: bytes per parameter of all its moments together (Adam in float32: 8; none: 0).
        stream_bandwidth: bytes per second that one process writes to the filesystem.
        d2h_bandwidth: bytes per second from one accelerator to host memory (PCIe 4.0 x16: 25e9).
        aggregate_bandwidth: bytes per second that the filesystem takes from all writers together.
        gpus_per_node: ranks that share a node's memory.
        offload_optimizer: the optimizer's state lives in host memory anyway.

    Raises:
        StateError: a value is not a number in its range.
    """

    model_bytes: float = 2.0
    main_bytes: float = 4.0
    moment_bytes: float = 8.0
    stream_bandwidth: float = 2e9
    d2h_bandwidth: float = 25e9
    aggregate_bandwidth: float = 100e9
    gpus_per_node: int = 8
    offload_optimizer: bool = False

    def __post_init__(self) -> None:
        for name in ("model_bytes", "stream_bandwidth", "d2h_bandwidth", "aggregate_bandwidth", "gpus_per_node"):
            _require_positive(name, getattr(self, name))
        for name in ("main_bytes", "moment_bytes"):
            _require_positive(name, getattr(self, name), or_zero=True)


@dataclass(frozen=True)
class Stall:
    """How long one way to save stops the training.

    Attributes:
        seconds: `bytes` ÷ `bandwidth`.
        bytes: what is waited for.
        bandwidth: bytes per second.
        limit: which of the assumed bandwidths that is.
        write_seconds: until everything is on storage; what a save needs in the background when it is asynchronous.
    """

    mode: Mode
    seconds: float
    bytes: int
    bandwidth: float
    limit: Limit
    write_seconds: float


@dataclass(frozen=True)
class Estimate:
    """Sizes in bytes, rounded up.

    Attributes:
        model, main, moments: each stored once, however many replicas there are.
        model_per_rank, optimizer_per_rank: what each rank writes when replicas share the work.
        legacy_writers: ranks that write in the legacy format: one per tensor, pipeline and expert shard.
        legacy_per_writer: what the largest of them writes: a dense shard, an expert shard, and their optimizer state.
        staged_per_node: host memory of one staging generation.
        offloaded_per_node: host memory of an offloaded optimizer; 0 when it is not offloaded.
        stalls: legacy sync, sync, async.
    """

    params: int
    expert_params: int
    topology: Topology
    model: int
    main: int
    moments: int
    model_per_rank: int
    optimizer_per_rank: int
    legacy_writers: int
    legacy_per_writer: int
    staged_per_node: int
    offloaded_per_node: int
    stalls: tuple[Stall, ...]

    @property
    def total(self) -> int:
        """Bytes of one checkpoint."""
        return self.model + self.main + self.moments

    @property
    def per_rank(self) -> int:
        """Bytes that each rank writes."""
        return self.model_per_rank + self.optimizer_per_rank

    def host_per_node(self, generations: int) -> int:
        """Host memory of a node: so many staging generations, and the optimizer if it is offloaded."""
        return generations * self.staged_per_node + self.offloaded_per_node


def estimate(
    params: int, topology: Topology, *, expert_params: int = 0, assumptions: Assumptions | None = None
) -> Estimate:
    """Sizes and stalls of one checkpoint.

    Args:
        params: parameters of the model, experts included.
        topology: of the job. Dense parameters are split over tp and pp, their optimizer also over cp and dp; expert
            parameters over etp, ep and pp, their optimizer also over the expert data parallel ranks.
        expert_params: those of `params` that belong to routed experts.
        assumptions: None: those of `Assumptions()`.

    Raises:
        StateError: there is no parameter, more are in experts than there are, or ep is set without any in experts.
    """
    given = assumptions or Assumptions()
    _require_positive("params", params)
    _require_positive("expert_params", expert_params, or_zero=True)
    if expert_params > params:
        raise StateError(f"expert params {expert_params}: more than all params {params}, which include them")
    if topology.ep > 1 and not expert_params:
        raise StateError(f"ep {topology.ep}: no parameters are in experts; say how many (expert params)")

    optimizer_bytes = given.main_bytes + given.moment_bytes
    model, main, moments = (
        math.ceil(params * each) for each in (given.model_bytes, given.main_bytes, given.moment_bytes)
    )
    # Dense and expert shards have different sizes, but either sort is spread over all ranks of its stage.
    ranks = topology.world_size
    model_per_rank = math.ceil(params * given.model_bytes / ranks)
    optimizer_per_rank = math.ceil(params * optimizer_bytes / ranks)
    per_rank = model_per_rank + optimizer_per_rank

    # A legacy file holds a dense and an expert shard; the ranks with dp 0 and those with expert dp 0 write (their
    # union: with tp > ep * etp the former are more, otherwise the latter).
    dense_shards, expert_shards = topology.tp * topology.pp, topology.etp * topology.ep * topology.pp
    shard_params = (params - expert_params) / dense_shards + expert_params / expert_shards
    writers = max(dense_shards, expert_shards) if expert_params else dense_shards
    per_writer = math.ceil(shard_params * (given.model_bytes + optimizer_bytes))

    total = model + main + moments
    legacy = _write("legacy sync", per_writer * writers, per_writer, given)
    sync = _write("sync", total, per_rank, given)
    d2h = per_rank / given.d2h_bandwidth
    on_a_node = min(given.gpus_per_node, ranks)
    return Estimate(
        params=params,
        expert_params=expert_params,
        topology=topology,
        model=model,
        main=main,
        moments=moments,
        model_per_rank=model_per_rank,
        optimizer_per_rank=optimizer_per_rank,
        legacy_writers=writers,
        legacy_per_writer=per_writer,
        staged_per_node=per_rank * on_a_node,
        offloaded_per_node=optimizer_per_rank * on_a_node if given.offload_optimizer else 0,
        stalls=(legacy, sync, Stall("async", d2h, per_rank, given.d2h_bandwidth, "D2H", sync.write_seconds)),
    )


def save_interval(mtbf: float, stall: float, *, at_least: float = 0.0) -> float:
    """Seconds between saves that lose the least time to stalls and to work that is repeated after failures.

    Young's square root of 2 · MTBF · stall. It is meant for stalls that are short beside the MTBF.

    Args:
        mtbf: mean time between failures of the whole job, in seconds.
        stall: seconds that a save stops the training.
        at_least: seconds that a save is written for: the next one cannot begin before.

    Raises:
        StateError: a time is not a positive number.
    """
    _require_positive("mtbf", mtbf)
    _require_positive("stall", stall)
    return max(math.sqrt(2.0 * mtbf * stall), at_least)


def lost_share(mtbf: float, stall: float, interval: float) -> float:
    """Share of the time that saving so often loses, to first order: one stall per interval, and half an interval
    repeated per failure. At most 1.
    """
    return min(1.0, stall / interval + interval / (2.0 * mtbf))


def _write(mode: Mode, total: int, per_writer: int, given: Assumptions) -> Stall:
    """A save that is waited for: the slower of one writer's stream and the filesystem."""
    stream, together = per_writer / given.stream_bandwidth, total / given.aggregate_bandwidth
    if stream > together:
        return Stall(mode, stream, per_writer, given.stream_bandwidth, "stream", stream)
    return Stall(mode, together, total, given.aggregate_bandwidth, "aggregate", together)


def _require_positive(name: str, value: float, *, or_zero: bool = False) -> None:
    # The bounds keep every product and quotient here finite; NaN is outside them.
    if not (1e-9 <= value <= 1e18 or (or_zero and value == 0)):
        expected = "a positive number of at most 1e18" + (", or 0" if or_zero else "")
        raise StateError(f"{name.replace('_', ' ')} {value:g}: expected {expected}")
