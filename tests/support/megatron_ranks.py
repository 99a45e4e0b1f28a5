"""What each rank of a Megatron-Core job holds of the fixtures' models, at any TP, PP and EP.

The rules are Megatron-Core's for its local GPT layers: row- and column-parallel weights, a gated MLP in two pieces,
grouped experts, a padded vocabulary, layers spread evenly over pipeline stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ckptlib import ShardedTensor, ShardedTensorFactory, factories
from ckptlib.sharding import Box

LAYERS = "decoder.layers."
EXPERTS = ".experts.experts."


@dataclass(frozen=True)
class Model:
    """What distinguishes the fixtures' models.

    Attributes:
        keys: name, shape and dtype of every tensor.
        gated: the MLPs are (SwiGLU).
        tied: the output layer is the embedding: the last stage has it too.
        divisible_by: the vocabulary is padded to a multiple of this times TP; None: it is not padded.
        vocabulary: rows of it, not padded.
    """

    keys: dict[str, tuple[tuple[int, ...], torch.dtype]]
    gated: bool = True
    tied: bool = False
    divisible_by: int | None = None
    vocabulary: int = 0

    def padded(self, tp: int) -> int:
        """Rows of the vocabulary's tensors at this TP."""
        assert self.divisible_by is not None
        unit = self.divisible_by * tp
        return -(-self.vocabulary // unit) * unit


@dataclass(frozen=True)
class Rank:
    """Coordinates of a rank; data-parallel copies of it are the same."""

    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    ep: int = 1
    ep_rank: int = 0


def ranks(tp: int, pp: int, ep: int = 1) -> Iterator[Rank]:
    """All of them."""
    for number in range(tp * pp * ep):
        yield Rank(tp, number % tp, pp, number // tp % pp, ep, number // (tp * pp))


@dataclass(frozen=True)
class Local:
    """A rank's tensor of one layer (and expert): what a module has as a parameter.

    `offsets` are those of the axes before its own, layer and expert; `request` describes `data` to ckptlib.
    """

    key: str
    data: torch.Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]
    request: ShardedTensor | ShardedTensorFactory

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """What `data` must be, from the global tensor; rows beyond it are zero."""
        pieces = self.request.build() if isinstance(self.request, ShardedTensorFactory) else [self.request]
        parts = []
        for piece in pieces:
            part = torch.zeros(piece.box.shape, dtype=whole.dtype)
            common = piece.box.intersect(Box.whole(whole.shape))
            if common is not None:
                part[_slices(common.relative_to(piece.box.offset))] = whole[_slices(common)]
            parts.append(part.reshape(piece.data.shape))
        return self.request.merge(parts) if isinstance(self.request, ShardedTensorFactory) else parts[0]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))


def parameters(model: Model, rank: Rank, *, prefix: str = "", dtype: torch.dtype | None = None) -> Iterator[Local]:
    """What a rank holds.

    Args:
        prefix: stands before the keys: ``optimizer.state.exp_avg.`` and the like.
        dtype: of everything; None: of the stored tensors.
    """
    for key, (shape, stored) in model.keys.items():
        first, last = rank.pp_rank == 0, rank.pp_rank == rank.pp - 1
        if key.startswith("embedding.") and not (first or (last and model.tied)):
            continue
        if key.startswith(("output_layer.", "decoder.final_")) and not last:
            continue
        if "word_embeddings" in key or key.startswith("output_layer."):
            rows = model.padded(rank.tp) if model.divisible_by else shape[0]
            yield _local(model, rank, prefix + key, (rows, *shape[1:]), (), dtype or stored)
        elif key.startswith(LAYERS):
            share = shape[0] // rank.pp
            for layer in range(rank.pp_rank * share, (rank.pp_rank + 1) * share):
                if EXPERTS in key:
                    owned = shape[1] // rank.ep
                    for expert in range(rank.ep_rank * owned, (rank.ep_rank + 1) * owned):
                        yield _local(model, rank, prefix + key, shape, (layer, expert), dtype or stored)
                else:
                    yield _local(model, rank, prefix + key, shape, (layer,), dtype or stored)
        else:
            yield _local(model, rank, prefix + key, shape, (), dtype or stored)


def _local(
    model: Model, rank: Rank, key: str, shape: tuple[int, ...], offsets: tuple[int, ...], dtype: torch.dtype
) -> Local:
    own = list(shape[len(offsets) :])
    axis = tensor_parallel_axis(key)
    if axis is not None:
        own[axis] //= rank.tp
    data = torch.full(own, 7, dtype=dtype)
    cuts: list[tuple[int, int, int]] = [(i, offset, shape[i]) for i, offset in enumerate(offsets)]
    before = len(offsets)
    request: ShardedTensor | ShardedTensorFactory
    if model.gated and "linear_fc1.weight" in key:
        request = factories.swiglu(key, data, rank.tp_rank, rank.tp, *cuts, prepend_axis_num=before)
    else:
        if axis is not None:
            cuts.append((before + axis, rank.tp_rank, rank.tp))
        request = ShardedTensor.from_rank_offsets(
            key,
            data,
            *cuts,
            prepend_axis_num=before,
            allow_shape_mismatch=model.divisible_by is not None and not before,
        )
    return Local(key, data, offsets, shape, request)


def tensor_parallel_axis(key: str) -> int | None:
    """Which of a parameter's own axes tensor parallelism cuts; None: every rank has it whole."""
    if "layer_norm" in key or "layernorm" in key:
        return None
    if any(name in key for name in ("word_embeddings", "output_layer.", "linear_qkv.", "linear_fc1.")):
        return 0
    if any(name in key for name in ("linear_proj.weight", "linear_fc2.weight")):
        return 1
    return None


def owned_range(numel: int, dp: int, dp_rank: int) -> tuple[int, int]:
    """A share of a flattened parameter as a distributed optimizer has it: no matter where rows end."""
    cuts = [numel * i // dp + (i * 5 % 3 if 0 < i < dp else 0) for i in range(dp + 1)]
    return min(cuts[dp_rank], numel), min(cuts[dp_rank + 1], numel)


def flat_request(local: Local, start: int, stop: int, data: torch.Tensor) -> Sequence[ShardedTensor]:
    """The range of a local parameter, in global coordinates."""
    if isinstance(local.request, ShardedTensorFactory):
        return factories.flat_range(local.request, start, stop, data)
    return ShardedTensor.from_flat_range(
        local.request.key,
        local.request.global_shape,
        local.request.box,
        start,
        stop,
        data,
        allow_shape_mismatch=local.request.allow_shape_mismatch,
    )


def nbytes_stored(request: ShardedTensor, stored: Sequence[int]) -> int:
    """Bytes of a request that a tensor of the shape `stored` has."""
    common = request.box.intersect(Box.whole(stored))
    return 0 if common is None else math.prod(common.shape) * request.data.element_size()
