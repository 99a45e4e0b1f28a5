"""``ckpt estimate``: how large a job's checkpoints will be, what a save costs, how often to save. Needs no catalog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from catalog.cli import text
from catalog.cli.columns import column
from catalog.cli.context import Cli
from catalog.cli.durations import parse_duration
from catalog.cli.views import topology

if TYPE_CHECKING:
    from ckptlib.estimate import Assumptions, Estimate, Stall

GIGA = 1e9
"""Bandwidths are given in GB/s."""

_LIMITS = {
    "stream": "one writer's stream",
    "aggregate": "the filesystem, all writers together",
    "D2H": "the copy to host memory",
    "given": "as given by --stall",
}
_SCALES = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}


def _bandwidth(value: float) -> str:
    return f"{text.number(value / GIGA)} GB/s"


def _thousands(value: int) -> str:
    return f"{value:,}"


@dataclass(frozen=True)
class StallView:
    """One way to save: how long the training stops for it, why, and how often to save that way."""

    mode: str = column("MODE")
    stall_seconds: float = column("STALL", text.duration, justify="right")
    bytes: int | None = column("OF", text.decimal_size, justify="right", drop=3)
    bandwidth: float | None = column("AT", _bandwidth, justify="right", drop=3)
    limit: str = column("LIMITED BY", _LIMITS.__getitem__, prose=True, drop=4)
    write_seconds: float | None = column("WRITTEN IN", text.duration, justify="right", drop=2, optional=True)
    interval_seconds: float | None = column("SAVE EVERY", text.duration, justify="right", optional=True)
    lost_share: float | None = column("LOST", text.percent, justify="right", drop=1, optional=True)


@dataclass(frozen=True)
class AssumptionView:
    """What is taken for granted, and the option that changes it."""

    name: str = column("ASSUMPTION")
    value: float = column("VALUE", text.number, justify="right")
    unit: str = column("UNIT")
    option: str = column("CHANGE WITH")


@dataclass(frozen=True)
class EstimateView:
    """The whole answer. Sizes in bytes, times in seconds, bandwidths in bytes per second."""

    params: int = column("parameters", _thousands)
    expert_params: int | None = column("of them in experts", _thousands)
    topology: Mapping[str, int] = column("topology", topology)
    ranks: int = column("ranks")
    bytes: int = column("checkpoint", text.decimal_size)
    model_bytes: int = column("  model", text.decimal_size)
    main_bytes: int = column("  main parameters", text.decimal_size)
    moment_bytes: int = column("  moments", text.decimal_size)
    bytes_per_rank: int = column("per rank", text.decimal_size)
    optimizer_bytes_per_rank: int = column("  optimizer", text.decimal_size)
    model_bytes_per_rank: int = column("  model", text.decimal_size)
    legacy_writers: int = column("legacy format: writing ranks")
    legacy_bytes_per_writer: int = column("  per writing rank", text.decimal_size)
    host_bytes_per_node: int = column("host memory per node", text.decimal_size)
    host_bytes_per_node_two_generations: int = column("  two staging generations", text.decimal_size)
    offloaded_bytes_per_node: int | None = column("  optimizer in it", text.decimal_size)
    mtbf_seconds: float | None = column("mean time between failures", text.duration)
    stalls: tuple[StallView, ...] = column("stalls", default=())
    assumptions: tuple[AssumptionView, ...] = column("assumptions", default=())


def _count(value: str) -> int:
    """``7.5e9``, ``7500000000``, ``7.5B``."""
    digits, scale = (value[:-1], value[-1]) if value[-1:] in "MBT" else (value, "")
    try:
        return round(float(digits) * _SCALES[scale])
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{value!r}: expected a number such as 7.5e9, 7.5B, 405M or 1.2T") from None


def _seconds(value: str) -> float:
    try:
        return parse_duration(value).total_seconds()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def estimate(
    ctx: typer.Context,
    params: Annotated[
        int, typer.Option(parser=_count, metavar="N", help="Parameters, experts included: 7.5e9, 7.5B, 405M, 1.2T.")
    ],
    tp: Annotated[int, typer.Option(help="Tensor parallel size.", min=1)] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline parallel size.", min=1)] = 1,
    cp: Annotated[int, typer.Option(help="Context parallel size.", min=1)] = 1,
    dp: Annotated[int, typer.Option(help="Data parallel size, without cp.", min=1)] = 1,
    expert_params: Annotated[
        int | None,
        typer.Option(parser=_count, metavar="N", help="How many of the parameters are in routed experts."),
    ] = None,
    ep: Annotated[int, typer.Option(help="Expert parallel size.", min=1)] = 1,
    etp: Annotated[
        int | None, typer.Option(help="Tensor parallel size of the experts; by default that of tp.", min=1)
    ] = None,
    mtbf: Annotated[
        float | None,
        typer.Option(parser=_seconds, metavar="D", help="Mean time between failures of the whole job: 8h, 1.5d."),
    ] = None,
    stall: Annotated[
        float | None,
        typer.Option(parser=_seconds, metavar="D", help="A stall that was measured, to get its interval: 500ms, 2s."),
    ] = None,
    offload_optimizer: Annotated[
        bool, typer.Option("--offload-optimizer", help="The optimizer's state lives in host memory anyway.")
    ] = False,
    stream_bandwidth: Annotated[float, typer.Option(help="What one process writes, GB/s.")] = 2.0,
    aggregate_bandwidth: Annotated[float, typer.Option(help="What the filesystem takes from all, GB/s.")] = 100.0,
    d2h_bandwidth: Annotated[float, typer.Option(help="Device to host, per device, GB/s.")] = 25.0,
    model_bytes: Annotated[float, typer.Option(help="Bytes per parameter of the weights.")] = 2.0,
    main_bytes: Annotated[float, typer.Option(help="Bytes per parameter of the optimizer's own copy.")] = 4.0,
    moment_bytes: Annotated[float, typer.Option(help="Bytes per parameter of all moments together.")] = 8.0,
    gpus_per_node: Annotated[int, typer.Option(help="Ranks that share a node's memory.", min=1)] = 8,
) -> None:
    """Size a job's checkpoints: bytes, stalls, host memory, and how often to save.

    Arithmetic on the numbers given; nothing is measured. The assumptions are listed, and each is an option.
    """
    from ckptlib import estimate as sizing
    from ckptlib.errors import StateError
    from ckptlib.topology import Topology

    cli = Cli.of(ctx)
    try:
        given = sizing.Assumptions(
            model_bytes=model_bytes,
            main_bytes=main_bytes,
            moment_bytes=moment_bytes,
            stream_bandwidth=stream_bandwidth * GIGA,
            d2h_bandwidth=d2h_bandwidth * GIGA,
            aggregate_bandwidth=aggregate_bandwidth * GIGA,
            gpus_per_node=gpus_per_node,
            offload_optimizer=offload_optimizer,
        )
        if etp is None:
            etp = tp if expert_params else 1
        sizes = Topology(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, etp=etp)
        estimated = sizing.estimate(params, sizes, expert_params=expert_params or 0, assumptions=given)
        stalls = [_stall(each, mtbf) for each in estimated.stalls]
        if stall is not None:
            stalls.append(_measured(stall, mtbf))
    except StateError as error:
        raise typer.BadParameter(str(error)) from error
    cli.output.document(_view(estimated, given, stalls, mtbf))
    if mtbf is None:
        cli.output.note("How often to save: add --mtbf, the mean time between failures of the whole job.")


def _stall(each: Stall, mtbf: float | None) -> StallView:
    from ckptlib.estimate import lost_share, save_interval

    interval = None if mtbf is None else save_interval(mtbf, each.seconds, at_least=each.write_seconds)
    return StallView(
        mode=each.mode,
        stall_seconds=each.seconds,
        bytes=each.bytes,
        bandwidth=each.bandwidth,
        limit=each.limit,
        write_seconds=each.write_seconds,
        interval_seconds=interval,
        lost_share=None if mtbf is None or interval is None else lost_share(mtbf, each.seconds, interval),
    )


def _measured(seconds: float, mtbf: float | None) -> StallView:
    from ckptlib.estimate import lost_share, save_interval

    interval = None if mtbf is None else save_interval(mtbf, seconds)
    return StallView(
        mode="measured",
        stall_seconds=seconds,
        bytes=None,
        bandwidth=None,
        limit="given",
        write_seconds=None,
        interval_seconds=interval,
        lost_share=None if mtbf is None or interval is None else lost_share(mtbf, seconds, interval),
    )


def _view(estimated: Estimate, given: Assumptions, stalls: list[StallView], mtbf: float | None) -> EstimateView:
    return EstimateView(
        params=estimated.params,
        expert_params=estimated.expert_params or None,
        topology=estimated.topology.to_json(),
        ranks=estimated.topology.world_size,
        bytes=estimated.total,
        model_bytes=estimated.model,
        main_bytes=estimated.main,
        moment_bytes=estimated.moments,
        bytes_per_rank=estimated.per_rank,
        optimizer_bytes_per_rank=estimated.optimizer_per_rank,
        model_bytes_per_rank=estimated.model_per_rank,
        legacy_writers=estimated.legacy_writers,
        legacy_bytes_per_writer=estimated.legacy_per_writer,
        host_bytes_per_node=estimated.host_per_node(1),
        host_bytes_per_node_two_generations=estimated.host_per_node(2),
        offloaded_bytes_per_node=estimated.offloaded_per_node or None,
        mtbf_seconds=mtbf,
        stalls=tuple(stalls),
        assumptions=_assumptions(given),
    )


def _assumptions(given: Assumptions) -> tuple[AssumptionView, ...]:
    return (
        AssumptionView("weights", given.model_bytes, "bytes per parameter", "--model-bytes"),
        AssumptionView("main parameters", given.main_bytes, "bytes per parameter", "--main-bytes"),
        AssumptionView("moments", given.moment_bytes, "bytes per parameter", "--moment-bytes"),
        AssumptionView("a writer's stream", given.stream_bandwidth / GIGA, "GB/s", "--stream-bandwidth"),
        AssumptionView("the filesystem", given.aggregate_bandwidth / GIGA, "GB/s", "--aggregate-bandwidth"),
        AssumptionView("device to host", given.d2h_bandwidth / GIGA, "GB/s", "--d2h-bandwidth"),
        AssumptionView("a node", given.gpus_per_node, "ranks", "--gpus-per-node"),
    )
