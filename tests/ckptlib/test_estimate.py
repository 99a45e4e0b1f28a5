"""Sizes and stalls of a checkpoint: the published example exactly, and what must hold for every job."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.errors import StateError
from ckptlib.estimate import Assumptions, Estimate, estimate, lost_share, save_interval
from ckptlib.topology import Topology

EXAMPLE = Topology(tp=2, pp=2, dp=64)


def test_the_published_example_of_7b_on_256_ranks_is_reproduced_number_by_number() -> None:
    found = estimate(7_500_000_000, EXAMPLE)
    assert (found.model, found.main, found.moments, found.total) == (15 * 10**9, 30 * 10**9, 60 * 10**9, 105 * 10**9)
    assert found.optimizer_per_rank == 351_562_500  # 22.5 GB / 64, "352 MB"
    assert found.model_per_rank == 58_593_750  # 3.75 GB / 64, "59 MB"
    assert found.per_rank == 410_156_250  # "410 MB"
    assert (found.legacy_writers, found.legacy_per_writer) == (4, 26_250_000_000)  # "26.3 GB"
    assert found.host_per_node(1) == 3_281_250_000  # 8 ranks, "3.3 GB"
    assert found.host_per_node(2) == 2 * found.host_per_node(1)
    legacy, sync, asynchronous = found.stalls
    assert [stall.mode for stall in found.stalls] == ["legacy sync", "sync", "async"]
    assert legacy.seconds == pytest.approx(13.125)  # 26.25 GB / 2 GB/s, "13 s"
    assert sync.seconds == pytest.approx(1.05)  # 105 GB / 100 GB/s, "1 s"
    assert asynchronous.seconds == pytest.approx(0.01640625)  # 410 MB / 25 GB/s, "16 ms"
    assert [stall.limit for stall in found.stalls] == ["stream", "aggregate", "D2H"]
    assert asynchronous.write_seconds == sync.write_seconds == sync.seconds  # hidden, not gone


def test_a_few_ranks_are_limited_by_their_own_streams_and_not_by_the_filesystem() -> None:
    (_, sync, _) = estimate(7_500_000_000, Topology(dp=2)).stalls
    assert (sync.limit, sync.seconds) == ("stream", pytest.approx(52.5 / 2))


def test_many_legacy_writers_are_limited_by_the_filesystem() -> None:
    (legacy, _, _) = estimate(7_500_000_000, Topology(tp=8, pp=16)).stalls
    assert (legacy.limit, legacy.seconds) == ("aggregate", pytest.approx(1.05))


def test_context_parallel_ranks_share_the_optimizer_and_the_writing() -> None:
    assert estimate(10**9, Topology(tp=2, cp=4, dp=2)).per_rank == estimate(10**9, Topology(tp=2, dp=8)).per_rank


def test_experts_change_who_writes_legacy_files_and_not_what_a_rank_writes() -> None:
    topology = Topology(tp=2, dp=8, ep=4, etp=1)
    dense, mixed = estimate(10**9, Topology(tp=2, dp=8)), estimate(10**9, topology, expert_params=8 * 10**8)
    assert mixed.per_rank == dense.per_rank
    assert mixed.legacy_writers == 4  # one per expert shard: more than per tensor shard
    assert mixed.legacy_per_writer == (10**8 + 2 * 10**8) * 14  # half of the dense ones, a quarter of the experts'


def test_with_more_tensor_ranks_than_expert_shards_each_tensor_rank_writes() -> None:
    found = estimate(10**9, Topology(tp=4, dp=2, ep=2, etp=1), expert_params=8 * 10**8)
    assert found.legacy_writers == 4


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_legacy_writers_are_the_ranks_with_dp_zero_or_expert_dp_zero(tp: int, etp: int, ep: int) -> None:
    topology = Topology(tp=tp, pp=2, cp=2, dp=8, ep=ep, etp=etp)
    writers = 0
    for rank in range(topology.world_size):
        at, expert = topology.coordinates(rank), topology.expert_coordinates(rank)
        writers += (at.dp, at.cp) == (0, 0) or expert.dp == 0
    assert estimate(10**9, topology, expert_params=10**8).legacy_writers == writers


def test_an_offloaded_optimizer_is_in_host_memory_beside_what_is_staged() -> None:
    found = estimate(7_500_000_000, EXAMPLE, assumptions=Assumptions(offload_optimizer=True))
    assert found.offloaded_per_node == 8 * 351_562_500
    assert found.host_per_node(2) == 2 * 3_281_250_000 + 8 * 351_562_500


def test_a_node_that_is_not_filled_holds_no_more_ranks_than_there_are() -> None:
    assert estimate(10**6, Topology(dp=2)).staged_per_node == 14 * 10**6


@given(
    params=st.integers(1, 10**13),
    share=st.floats(0, 1),
    sizes=st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 4),
    ep=st.sampled_from([1, 2, 8]),
)
def test_what_all_ranks_write_is_the_checkpoint_and_nothing_is_lost_to_rounding(
    params: int, share: float, sizes: tuple[int, ...], ep: int
) -> None:
    tp, pp, cp, dp = sizes
    topology = Topology(tp=tp, pp=pp, cp=cp, dp=dp * ep, ep=ep)
    found = estimate(params, topology, expert_params=max(1, int(share * params)))
    ranks = topology.world_size
    assert found.total <= found.per_rank * ranks <= found.total + 2 * ranks + 1e-12 * found.total
    assert found.legacy_per_writer * found.legacy_writers >= found.total * (1 - 1e-12) - ranks
    assert all(stall.seconds == pytest.approx(stall.bytes / stall.bandwidth) for stall in found.stalls)
    legacy, sync, asynchronous = found.stalls
    assert legacy.seconds >= sync.seconds * (1 - 1e-9)
    assert asynchronous.write_seconds == sync.seconds


def test_the_interval_is_youngs_and_never_shorter_than_a_save_is_written() -> None:
    assert save_interval(36_000, 0.5) == pytest.approx(math.sqrt(2 * 36_000 * 0.5))
    assert save_interval(36_000, 0.5, at_least=600) == 600


@given(mtbf=st.floats(60, 1e7), stall=st.floats(1e-3, 1), factor=st.floats(0.1, 10))
def test_no_other_interval_loses_less(mtbf: float, stall: float, factor: float) -> None:
    best = save_interval(mtbf, stall)
    assert lost_share(mtbf, stall, best) <= lost_share(mtbf, stall, best * factor) * (1 + 1e-9)


def test_no_more_than_everything_is_lost() -> None:
    assert lost_share(10.0, 1000.0, save_interval(10.0, 1000.0)) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stream_bandwidth": 0}, "stream bandwidth 0: expected a positive number"),
        ({"d2h_bandwidth": -1}, "d2h bandwidth -1"),
        ({"aggregate_bandwidth": math.nan}, "aggregate bandwidth nan"),
        ({"aggregate_bandwidth": math.inf}, "aggregate bandwidth inf"),
        ({"gpus_per_node": 0}, "gpus per node 0"),
        ({"model_bytes": 0}, "model bytes 0"),
        ({"moment_bytes": -8}, "moment bytes -8: expected a positive number of at most 1e18, or 0"),
    ],
)
def test_an_assumption_out_of_range_is_named(changes: dict[str, float], message: str) -> None:
    with pytest.raises(StateError, match=message):
        Assumptions(**changes)  # type: ignore[arg-type]


def test_an_optimizer_without_moments_or_copies_is_possible() -> None:
    found: Estimate = estimate(10**9, Topology(), assumptions=Assumptions(main_bytes=0, moment_bytes=0))
    assert (found.optimizer_per_rank, found.total) == (0, 2 * 10**9)


def test_impossible_jobs_are_errors() -> None:
    with pytest.raises(StateError, match="params 0: expected a positive number"):
        estimate(0, Topology())
    with pytest.raises(StateError, match="expert params 11: more than all params 10"):
        estimate(10, Topology(), expert_params=11)
    with pytest.raises(StateError, match="ep 2: no parameters are in experts"):
        estimate(10, Topology(dp=2, ep=2))
    with pytest.raises(StateError, match="dp=0, expected a positive integer"):
        Topology(dp=0)
    with pytest.raises(StateError, match="mtbf 0"):
        save_interval(0, 1)
    with pytest.raises(StateError, match="stall 0"):
        save_interval(1, 0)
