"""A small GPT that trains on any number of ranks, cut in every way: the same names and values everywhere.

Tensor parallel by `parallelize_module` (vocabulary, heads and the gated MLP), pipeline stages by sending activations
and gradients, data parallel by averaging gradients, FSDP2 and HSDP by `fully_shard`, and experts as DTensors over an
expert-parallel mesh. Sizes are such that FSDP2 cuts unevenly, on three and on four ranks, and leaves some ranks empty.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional

from ckptlib import Topology

VOCABULARY, CONTEXT, WIDTH, HIDDEN, HEADS, LAYERS, EXPERTS = 52, 8, 32, 44, 4, 2, 4
SEQUENCES = 12
"""In a global batch: shared evenly by 1, 2, 3 and 4 ranks."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (self._heads(projection(x)) for projection in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    @staticmethod
    def _heads(x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, local width) to (batch, local heads, tokens, head width)."""
        return x.view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Experts(nn.Module):
    """Every token goes through every local expert, weighted by the router: simple, and all experts are trained.

    Ranks of an expert-parallel group see the same tokens and add up what their experts say.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.gate, self.up = (nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 8) for _ in range(2))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 8)
        self.group: dist.ProcessGroup | None = None
        self.first = 0

    def over(self, mesh: DeviceMesh) -> None:
        """Cuts the experts over the axis ``ep`` of a mesh (dp, ep)."""
        self.group = mesh.get_group("ep")
        self.first = mesh.get_local_rank("ep") * (EXPERTS // mesh.size(1))
        for name in ("gate", "up", "down"):
            whole = getattr(self, name).detach()
            cut = distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None)
            setattr(self, name, nn.Parameter(cut))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = functional.softmax(self.router(x), dim=-1)
        if self.group is not None:
            x, weights = _SumOfGradients.apply(x, self.group), _SumOfGradients.apply(weights, self.group)
        gate, up, down = (local_of(parameter) for parameter in (self.gate, self.up, self.down))
        hidden = functional.silu(torch.einsum("bth,ehf->ebtf", x, gate)) * torch.einsum("bth,ehf->ebtf", x, up)
        mine = weights[..., self.first : self.first + len(gate)]
        out = torch.einsum("ebtf,efh,bte->bth", hidden, down, mine)
        return out if self.group is None else _Sum.apply(out, self.group)


class _Sum(torch.autograd.Function):
    """Adds over a group; every rank has the gradient of the sum already."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _SumOfGradients(torch.autograd.Function):
    """The same on all ranks; each has a part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Block(nn.Module):
    def __init__(self, *, experts: bool) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp_norm, self.mlp = nn.LayerNorm(WIDTH), Experts() if experts else GatedMlp()
        self.scale = nn.Parameter(torch.ones(1))  # one element: on most ranks of FSDP2 nothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.scale * self.mlp(self.mlp_norm(x))
        return out


class Gpt(nn.Module):
    """The whole model, or the stage of a pipeline; layers are named by their place in the whole."""

    def __init__(self, *, stage: int = 0, stages: int = 1, experts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block(experts=experts) for i in range(LAYERS)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        # Made whole and cut afterwards, so that every topology starts from the same values.
        self.first, self.last = stage == 0, stage == stages - 1
        each = LAYERS // stages
        for i in {*range(LAYERS)} - {*range(stage * each, (stage + 1) * each)}:
            del self.layers[str(i)]
        if not self.first:
            del self.embedding, self.positions
        if not self.last:
            del self.norm, self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens (batch, tokens), or the former stage's output, to logits or this stage's output."""
        if self.first:
            x = self.embedding(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if self.last else x

    def tensor_parallel(self, mesh: DeviceMesh) -> None:
        """Cuts vocabulary, heads and the MLP over a mesh axis."""
        plan: dict[str, ParallelStyle] = {}
        if self.first:
            plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
        if self.last:
            plan["head"] = ColwiseParallel(output_layouts=Replicate())
        for i in self.layers:
            plan |= {f"layers.{i}.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
            plan |= {f"layers.{i}.mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
            plan |= {f"layers.{i}.attention.out": RowwiseParallel(), f"layers.{i}.mlp.down": RowwiseParallel()}
        parallelize_module(self, mesh, plan, src_data_rank=None)


@dataclass(frozen=True)
class Layout:
    """How a job is cut.

    Attributes:
        fsdp: FSDP2 over that many ranks, in groups of `dp` copies (HSDP when there is more than one).
        ep: expert parallel; 0: the model has no experts.
    """

    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    fsdp: int = 0
    ep: int = 0

    @property
    def ranks(self) -> int:
        """Processes of the job."""
        return self.tp * self.pp * self.dp * max(self.fsdp, 1) * max(self.ep, 1)

    @property
    def topology(self) -> Topology:
        """As a save records it."""
        return Topology(tp=self.tp, pp=self.pp, dp=self.ranks // (self.tp * self.pp), ep=max(self.ep, 1))


class Job:
    """One rank of a job: its part of the model, an optimizer with two groups, and the training step."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.stage, self.copy, self.copies = 0, 0, max(layout.fsdp, 1) * layout.dp
        self.pipeline: list[int] = []
        self.replicas: dist.ProcessGroup | None = None
        if layout.fsdp:
            mesh = init_device_mesh("cpu", (layout.dp, layout.fsdp), mesh_dim_names=("dp", "fsdp"))
            self.model = Gpt()
            self.copy = dist.get_rank()
            for module in [*self.model.layers.values(), self.model]:
                fully_shard(module, mesh=mesh if layout.dp > 1 else mesh["fsdp"])
        elif layout.ep > 1:
            mesh = init_device_mesh("cpu", (layout.dp, layout.ep), mesh_dim_names=("dp", "ep"))
            self.model = Gpt(experts=True)
            self.copy = mesh.get_local_rank("dp")
            self.replicas = mesh.get_group("dp")
            for layer in self.model.layers.values():
                layer.mlp.over(mesh)  # type: ignore[operator, union-attr]
        elif layout.ranks > 1:
            mesh = init_device_mesh("cpu", (layout.dp, layout.pp, layout.tp), mesh_dim_names=("dp", "pp", "tp"))
            self.stage, self.copy = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
            self.model = Gpt(stage=self.stage, stages=layout.pp)
            self.replicas = mesh.get_group("dp")
            self.pipeline = dist.get_process_group_ranks(mesh.get_group("pp"))
            if layout.tp > 1:
                self.model.tensor_parallel(mesh["tp"])
        else:
            self.model = Gpt(experts=layout.ep > 0)
        parameters = [*self.model.parameters()]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0, "betas": (0.9, 0.95)},
            ],
            lr=1e-2,
            foreach=False,
        )

    def state(self) -> dict[str, Any]:
        """What is saved and loaded."""
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, steps: Iterable[int]) -> list[float]:
        """Trains on the global batches of these steps; the loss of each, over the whole batch, on every rank."""
        return [self._step(step) for step in steps]

    def _step(self, step: int) -> float:
        batch = _sequences(step).chunk(self.copies)[self.copy]
        loss = self._forward_and_backward(batch[:, :-1], batch[:, 1:])
        if self.replicas is not None:
            self._average_gradients(self.replicas)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size() // self.layout.pp
        return float(loss)

    def _forward_and_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss; 0 on the stages before the last."""
        former, later = self.stage - 1, self.stage + 1
        x = tokens
        if not self.model.first:
            x = torch.empty(*tokens.shape, WIDTH)
            dist.recv(x, self.pipeline[former])
            x.requires_grad_()
        out = self.model(x)
        if self.model.last:
            loss = functional.cross_entropy(out.flatten(0, 1), targets.flatten())
            loss.backward()
        else:
            dist.send(out.detach().contiguous(), self.pipeline[later])
            gradient = torch.empty_like(out)
            dist.recv(gradient, self.pipeline[later])
            out.backward(gradient)
            loss = torch.zeros(())
        if not self.model.first:
            assert x.grad is not None
            dist.send(x.grad, self.pipeline[former])
        return loss.detach()

    def _average_gradients(self, group: dist.ProcessGroup) -> None:
        gradients = [local_of(p.grad) for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name on storage and tensor of everything that this rank saves: parameters and what the optimizer has."""
        for name, parameter in self.model.named_parameters():
            yield f"model.{name}", parameter.detach()
            for slot, value in self.optimizer.state[parameter].items():
                yield f"optimizer.state.{name}.{slot}", value

    def write_truth(self, folder: str) -> None:
        """Gathers the global tensors by torch's own means; one rank of each stage writes them. Collective."""
        whole = {n: x.full_tensor() if isinstance(x, DTensor) else x.clone() for n, x in self.tensors()}
        os.makedirs(folder, exist_ok=True)
        if not dist.is_initialized() or dist.get_rank() == min(self._stage_mates()):
            torch.save(whole, f"{folder}/{self.stage}.pt")

    def _stage_mates(self) -> list[int]:
        stages: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(stages, self.stage)
        return [rank for rank, stage in enumerate(stages) if stage == self.stage]


def _sequences(step: int) -> torch.Tensor:
    """The global batch of a step: (sequences, tokens + 1); numbers in arithmetic progression, which can be learned."""
    generator = torch.Generator().manual_seed(step)
    start, stride = (torch.randint(1, high, (SEQUENCES, 1), generator=generator) for high in (VOCABULARY, 4))
    return (start + stride * torch.arange(CONTEXT + 1)) % VOCABULARY


@functools.cache
def read_truth(folder: str) -> dict[str, torch.Tensor]:
    """What `Job.write_truth` wrote, of all stages together. Read once; not to be changed."""
    out: dict[str, torch.Tensor] = {}
    for name in sorted(os.listdir(folder)):
        out |= torch.load(f"{folder}/{name}")
    return out


def local_part(like: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The part of a global tensor that this rank has of `like`, cut by torch."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, in its own memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
