"""A small GPT, and how to cut it over tensor-parallel ranks.

The model knows nothing about parallelism: attention heads are counted from the width of what the projections return,
so the same code runs whole, or on the slice that `tensor_parallel` leaves to a rank. Parameters that are cut become
DTensors (`torch.distributed.tensor`); all others stay plain tensors, equal on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model.

    Attributes:
        vocab: number of tokens; 256 for bytes.
        context: longest sequence, in tokens.
        width: size of the residual stream; a multiple of `heads`.
        layers: number of blocks.
        heads: attention heads per block; a multiple of the tensor-parallel size.
        dropout: applied where the residual stream is whole on every tensor-parallel rank, so that ranks of one
            replica that share a seed drop the same elements.
    """

    vocab: int = 256
    context: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")


class Attention(nn.Module):
    """Causal self-attention over the heads that this rank holds."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: (batch, tokens, width), whole on every rank; so is the result."""
        query, key, value = (self._heads(projection(x)) for projection in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        merged: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return merged

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, local width) to (batch, local heads, tokens, head width)."""
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)


class MLP(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: (batch, tokens, width)."""
        result: torch.Tensor = self.down(functional.gelu(self.up(x)))
        return result


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: (batch, tokens, width)."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        result: torch.Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return result


class GPT(nn.Module):
    """A decoder-only language model."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.apply(_initialize)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for the next token: (batch, tokens, vocab) from token numbers (batch, tokens)."""
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def tensor_parallel(model: GPT, mesh: DeviceMesh) -> None:
    """Cuts the model over the ranks of a one-dimensional mesh, in place.

    Every rank must hold the same initial weights: each keeps its own slice and nothing is sent. Norms and embeddings
    stay whole; their gradients come out equal on all ranks.

    Raises:
        ValueError: the mesh does not divide the attention heads or the vocabulary.
    """
    # Imported here: a run without tensor parallelism does not pay for it.
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    if model.config.heads % mesh.size() or model.config.vocab % mesh.size():
        raise ValueError(
            f"tensor parallel over {mesh.size()} ranks: {model.config.heads} heads and a vocabulary of "
            f"{model.config.vocab} must both be multiples of it"
        )
    plan: dict[str, ParallelStyle] = {"head": ColwiseParallel(output_layouts=Replicate())}
    for index in range(model.config.layers):
        plan |= {
            f"layers.{index}.attention.query": ColwiseParallel(),
            f"layers.{index}.attention.key": ColwiseParallel(),
            f"layers.{index}.attention.value": ColwiseParallel(),
            f"layers.{index}.attention.out": RowwiseParallel(),
            f"layers.{index}.mlp.up": ColwiseParallel(),
            f"layers.{index}.mlp.down": RowwiseParallel(),
        }
    parallelize_module(model, mesh, plan, src_data_rank=None)
