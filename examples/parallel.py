"""Where a rank stands in a TP x DP job, and the averaging of gradients over its data-parallel peers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ckptlib import Topology


@dataclass(frozen=True)
class Parallel:
    """This rank's place.

    Attributes:
        topology: sizes of the axes; only `tp` and `dp` are used here.
        rank: global rank; tensor-parallel ranks are neighbours, as `Topology` counts them.
        dp_rank: index among the replicas of the model.
        tp_mesh: the ranks that share this replica; None when a replica is one rank.
        dp_group: the ranks that hold the same slice; None when there is one replica.
    """

    topology: Topology
    rank: int = 0
    dp_rank: int = 0
    tp_mesh: DeviceMesh | None = None
    dp_group: dist.ProcessGroup | None = None


@contextmanager
def parallel(tp: int) -> Iterator[Parallel]:
    """Joins the job that torchrun started, or stands alone when there is none.

    A process group that already exists is used and left as it is.

    Raises:
        ValueError: the number of ranks is not a multiple of `tp`.
    """
    joined = dist.is_initialized()
    if not joined and "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    try:
        yield _place(tp)
    finally:
        if not joined and dist.is_initialized():
            dist.destroy_process_group()


def _place(tp: int) -> Parallel:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world % tp:
        raise ValueError(f"{world} ranks do not divide into replicas of tp={tp}")
    topology = Topology(tp=tp, dp=world // tp)
    if world == 1:
        return Parallel(topology)
    mesh = init_device_mesh("cpu", (topology.dp, topology.tp), mesh_dim_names=("dp", "tp"))
    return Parallel(
        topology,
        rank=dist.get_rank(),
        dp_rank=mesh.get_local_rank("dp"),
        tp_mesh=mesh["tp"] if topology.tp > 1 else None,
        dp_group=mesh.get_group("dp") if topology.dp > 1 else None,
    )


def average_gradients(model: nn.Module, loss: torch.Tensor, place: Parallel) -> float:
    """Averages all gradients over the replicas, in place, and returns the loss averaged with them.

    One collective for everything: gradients and loss travel in one flat buffer.
    """
    if place.dp_group is None:
        return float(loss.detach())
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients] + [loss.detach().reshape(1)])
    dist.all_reduce(flat, group=place.dp_group)
    flat /= place.topology.dp
    parts = torch.split(flat, [gradient.numel() for gradient in gradients] + [1])
    for gradient, part in zip(gradients, parts, strict=False):
        gradient.copy_(part.view_as(gradient))
    return float(parts[-1])


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own part of a DTensor, sharing its memory; any other tensor as it is."""
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()
