"""A Megatron-style state at any tensor-parallel size: the same global values, cut as Megatron-Core cuts a GPT.

`state` is what a rank hands to ckptlib, `pieces` and `cells` are what a rank of the judge asks for, `expected` is what
it must get. The forms are those of real models: a prepended layer axis, row and column parallel weights, a gated MLP
whose rank holds two pieces of one tensor, replicated norms, a padded vocabulary, RNG and `_extra_state` objects.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.megatron.judging import Cell, Piece

LAYERS = 3
ITERATION = 7


@dataclass(frozen=True)
class Parameter:
    """A global tensor. Axes count the layer axis, which comes first where `layered`.

    `tp_axis` is cut by tensor parallelism; in each of `parts` equal parts when it is a gated MLP's.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tp_axis: int | None = None
    layered: bool = True
    parts: int = 1
    padded: bool = False

    def values(self) -> torch.Tensor:
        """The global tensor: every element differs from its neighbours."""
        start = sum(map(ord, self.key))
        return (torch.arange(math.prod(self.shape)) * 7 + start).remainder(251).reshape(self.shape).to(self.dtype)


PARAMETERS = (
    Parameter("embedding.word_embeddings.weight", (24, 8), torch.bfloat16, 0, layered=False, padded=True),
    Parameter("decoder.layers.self_attention.linear_qkv.weight", (LAYERS, 16, 8), torch.bfloat16, 1),
    Parameter("decoder.layers.self_attention.linear_qkv.layer_norm_weight", (LAYERS, 8), torch.bfloat16),
    Parameter("decoder.layers.self_attention.linear_proj.weight", (LAYERS, 8, 8), torch.bfloat16, 2),
    Parameter("decoder.layers.mlp.linear_fc1.weight", (LAYERS, 32, 8), torch.bfloat16, 1, parts=2),
    Parameter("decoder.final_layernorm.weight", (8,), torch.bfloat16, layered=False),
    Parameter(
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight", (LAYERS, 32, 8), torch.float32, 1, parts=2
    ),
    Parameter("optimizer.state.exp_avg.decoder.final_layernorm.weight", (8,), torch.float32, layered=False),
)

COMMON: dict[str, Any] = {
    "args": argparse.Namespace(num_layers=LAYERS, hidden_size=8, tensor_model_parallel_size=2, lr=1e-4, bf16=True),
    "checkpoint_version": 3.0,
    "iteration": ITERATION,
    "num_floating_point_operations_so_far": 1.5e12,
    "opt_param_scheduler": {"max_lr": 1e-4, "num_steps": 56, "lr_decay_style": "cosine"},
    "param_groups": [{"lr": 1e-4, "wd_mult": 1.0, "step": ITERATION}, {"lr": 1e-4, "wd_mult": 0.0, "step": ITERATION}],
}


def pieces(tp: int, rank: int) -> list[Piece]:
    """What rank `rank` of `tp` holds of every tensor."""
    return [piece for parameter in PARAMETERS for piece in _pieces_of(parameter, tp, rank)]


def _pieces_of(parameter: Parameter, tp: int, rank: int) -> Iterator[Piece]:
    prepended = int(parameter.layered)
    shape = list(parameter.shape)
    if parameter.tp_axis is not None:
        shape[parameter.tp_axis] //= tp * parameter.parts
    for layer in range(LAYERS if parameter.layered else 1):
        for part in range(parameter.parts):
            offsets = [(0, layer, LAYERS)] if parameter.layered else []
            if parameter.tp_axis is not None:
                offsets.append((parameter.tp_axis, part * tp + rank, parameter.parts * tp))
            yield Piece(
                name=f"{parameter.key}|layer {layer}|part {part}",
                key=parameter.key,
                shape=shape[prepended:],
                dtype=str(parameter.dtype).removeprefix("torch."),
                rank_offsets=offsets,
                replica_id=(0, 0 if parameter.tp_axis is not None else rank, 0),
                prepend_axis_num=prepended,
                allow_shape_mismatch=parameter.padded,
            )


def cells(tp: int, rank: int) -> list[Cell]:
    """The objects that rank `rank` of `tp` holds: its RNG state, and what Transformer Engine keeps per layer."""
    rng = Cell("rng", "rng_state", (1, tp), (0, rank))
    extra = "decoder.layers.mlp.linear_fc1._extra_state"
    return [rng, *(Cell(f"extra {i}", extra, (LAYERS,), (i,), (0, rank, 0)) for i in range(LAYERS))]


def cell_value(cell: Cell) -> Any:
    """What such an object holds."""
    return [{"seed": 1234, "rank": cell.global_offset[-1]}] if cell.name == "rng" else None


def expected(tp: int, rank: int) -> dict[str, torch.Tensor]:
    """Name of each piece -> its values."""
    values = {parameter.key: parameter.values() for parameter in PARAMETERS}
    return {piece.name: _cut(values[piece.key], piece) for piece in pieces(tp, rank)}


def _cut(values: torch.Tensor, piece: Piece) -> torch.Tensor:
    for axis, index, count in piece.rank_offsets:
        size = values.shape[axis] // count
        values = values.narrow(axis, index * size, size)
    return values.reshape(tuple(piece.shape)).clone()


def state(tp: int, rank: int) -> dict[str, Any]:
    """What a trainer's rank saves: the sharded state of Megatron, in ckptlib's wrappers."""
    from ckptlib import ShardedObject, ShardedTensor

    values = expected(tp, rank)
    return {
        **COMMON,
        "model": {
            piece.name: ShardedTensor.from_rank_offsets(
                piece.key,
                values[piece.name],
                *piece.rank_offsets,
                replica_id=tuple(piece.replica_id),
                prepend_axis_num=piece.prepend_axis_num,
                allow_shape_mismatch=piece.allow_shape_mismatch,
            )
            for piece in pieces(tp, rank)
        },
        "objects": {
            cell.name: ShardedObject(
                cell.key,
                cell_value(cell),
                tuple(cell.global_shape),
                tuple(cell.global_offset),
                tuple(cell.replica_id),
            )
            for cell in cells(tp, rank)
        },
    }
