"""Parts of a state that know how to be overwritten in place, as the step after a save does it.

One `Held` for each kind of leaf that a state may have. It is made from a seed: the same seed makes the same content,
another one another, in the same structure; so a second instance is what a load fills.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ckptlib import (
    LocalNonpersistentObject,
    ModelParts,
    OptimizerParts,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    WholeValue,
    factories,
)
from ckptlib.sharding import Box

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.bool),
    *(torch.int64, torch.uint8, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2),
)
LAYOUTS = ("contiguous", "transposed", "strided", "inside")


@dataclass(frozen=True)
class Held:
    """Parts of a state.

    Attributes:
        parts: to be merged into the state's root.
        now: a copy of all their content.
        overwrite: changes all of it in place, with the seed of something else.
    """

    parts: dict[str, Any]
    now: Callable[[], Any]
    overwrite: Callable[[int], None]


Make = Callable[[str, int], Held]
"""(name that no other part has, seed) -> the part."""


def noise(dtype: torch.dtype, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Any bits; of bool, any truth."""
    generator = torch.Generator().manual_seed(seed)
    count = int(np.prod(shape, dtype=np.int64))
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def held_tensors(parts: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Held:
    """Parts whose content is these tensors."""

    def overwrite(seed: int) -> None:
        with torch.no_grad():
            for i, tensor in enumerate(tensors):
                tensor.copy_(noise(tensor.dtype, tensor.shape, seed + i))

    return Held(parts, lambda: [tensor.detach().clone() for tensor in tensors], overwrite)


def plain(dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> Make:
    """A tensor of some layout."""

    def make(name: str, seed: int) -> Held:
        tensor = noise(dtype, shape, seed)
        if layout == "transposed":
            tensor = noise(dtype, shape[::-1], seed).permute(tuple(reversed(range(len(shape)))))
        elif layout == "strided" and shape:
            tensor = noise(dtype, (*shape[:-1], 2 * shape[-1] + 1), seed)[..., 1::2]
        elif layout == "inside" and shape:
            tensor = noise(dtype, (shape[0] + 3, *shape[1:]), seed)[2:-1]
        return held_tensors({name: {"w": tensor}}, [tensor])

    return make


def expanded(name: str, seed: int) -> Held:
    """One row seen five times; made from an even seed, five rows of its own, which can be filled."""
    row = noise(torch.float32, (1, 3), seed)
    tensor = row.expand(5, 3) if seed % 2 else row.repeat(5, 1)

    def overwrite(other: int) -> None:
        (row if seed % 2 else tensor).copy_(noise(torch.float32, (1, 3), other))

    return Held({name: {"w": tensor}}, lambda: tensor.clone(), overwrite)


def conjugated(name: str, seed: int) -> Held:
    """A complex tensor whose memory has the opposite imaginary parts."""
    tensor = torch.complex(*(noise(torch.int8, (2, 4), seed).float())).conj()  # no NaN: its payload is not kept
    assert tensor.is_conj()
    return Held(
        {name: {"w": tensor}}, lambda: tensor.resolve_conj().clone(), lambda other: tensor.fill_(complex(other, 1))
    )  # fmt: skip


def tied(name: str, seed: int) -> Held:
    """Three names of one memory, one of them transposed."""
    base = noise(torch.float32, (3, 4), seed)
    return held_tensors({name: {"in": base, "out": base, "turned": base.T}}, [base])


def in_lists(name: str, seed: int) -> Held:
    """Tensors in a list and in dicts of a list."""
    tensors = [noise(torch.bfloat16, (2,), seed), noise(torch.int64, (3,), seed)]
    return held_tensors({name: [tensors[0], {"inner": tensors[1]}]}, tensors)


def values(name: str, seed: int) -> Held:
    """Plain Python values in containers that are changed in place."""
    tree: dict[str, Any] = {
        "number": seed,
        "list": [seed, [seed, "x"]],
        "dict": {"text": f"text {seed}", "set": {seed}},
        "whole": WholeValue({"a": [seed]}),
        "bytes": bytes([seed % 256]),
    }

    def overwrite(other: int) -> None:
        tree["number"] = other
        tree["list"][1].append(other)
        tree["list"][0] = other
        tree["dict"]["text"] += "!"
        tree["dict"]["set"].add(other)
        tree["whole"].obj["a"][0] = other
        tree["bytes"] = b""

    def now() -> Any:
        return copy.deepcopy({**tree, "whole": tree["whole"].obj})

    return Held({name: tree}, now, overwrite)


def arrays(name: str, seed: int) -> Held:
    """NumPy arrays, as values and inside an object."""
    generator = np.random.default_rng(seed)
    array, inner = generator.integers(0, 9, 5), generator.random((2, 2))
    cell = ShardedObject(f"{name} arrays", {"inner": inner})
    tree = {"array": array, "cell": cell}

    def now() -> Any:
        return [tree["array"].tolist(), cell.data["inner"].tolist()]

    def overwrite(other: int) -> None:
        tree["array"][:] = other  # type: ignore[index]
        cell.data["inner"][:] = other

    return Held({name: tree}, now, overwrite)


def cell(name: str, seed: int) -> Held:
    """A sharded object with a tensor and a list in it, beside what is of this process alone."""
    value = ShardedObject(f"{name} cell", {"list": [seed], "tensor": noise(torch.float32, (3,), seed)}, (2,), (1,))
    local = LocalNonpersistentObject([seed])

    def overwrite(other: int) -> None:
        value.data["list"].append(other)
        value.data["tensor"].copy_(noise(torch.float32, (3,), other))
        local.obj.append(other)

    def now() -> Any:
        return [list(value.data["list"]), value.data["tensor"].clone()]

    return Held({name: {"cell": value, "local": local}}, now, overwrite)


def shards(cuts: int) -> Make:
    """A global tensor in pieces that are views of one memory, its columns apart."""

    def make(name: str, seed: int) -> Held:
        whole = noise(torch.float32, (2, 3 * cuts), seed)
        boxes = [Box((0, 3 * i), (2, 3)) for i in range(cuts)]
        views = [whole[:, 3 * i : 3 * i + 3] for i in range(cuts)]
        pieces = [ShardedTensor(f"{name} w", view, (2, 3 * cuts), box) for view, box in zip(views, boxes, strict=True)]
        return held_tensors({name: pieces}, [whole])

    return make


def flat_range(at: int) -> Make:
    """A flattened shard in two ranges, as two owners of a distributed optimizer would have it."""

    def make(name: str, seed: int) -> Held:
        flat = noise(torch.float32, (30,), seed)
        box = Box.whole((3, 5, 2))
        ranges = [(start, stop) for start, stop in ((0, at), (at, 30)) if start < stop]
        parts = [
            ShardedTensor.from_flat_range(f"{name} w", (3, 5, 2), box, start, stop, flat[start:stop])
            for start, stop in ranges
        ]
        return held_tensors({name: [piece for part in parts for piece in part]}, [flat])

    return make


def factory(which: str) -> Make:
    """A tensor that is stored in another form; of a copying one the pieces are no views."""

    def make(name: str, seed: int) -> Held:
        data = noise(torch.float32, (8, 3), seed)

        def copied(key: str, data: torch.Tensor, replica_id: Any) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(key, data.T.contiguous() + 0, replica_id=replica_id)

        key = f"{name} w"
        made = {
            "gated": lambda: factories.swiglu(key, data, 0, 1),
            "gated, interleaved": lambda: factories.swiglu(key, data, 0, 1, interleaved=True),
            "fused": lambda: factories.fused_qkv(key, data, 0, 1, q_rows=2, kv_rows=1),
            "transposed": lambda: factories.transposed(key, data),
            "copying": lambda: ShardedTensorFactory(key, data, copied, lambda loaded: loaded.T),
        }[which]()
        return held_tensors({name: made}, [data])

    return make


FACTORIES = ("gated", "gated, interleaved", "fused", "transposed", "copying")


class Live:
    """A Stateful whose `state_dict` hands out its own memory."""

    def __init__(self, seed: int) -> None:
        self.inner = {"seen": [seed], "sums": noise(torch.float64, (4,), seed), "last": seed}

    def state_dict(self) -> dict[str, Any]:
        return self.inner

    def load_state_dict(self, inner: dict[str, Any]) -> None:
        self.inner = inner


def stateful(name: str, seed: int) -> Held:
    """See `Live`."""
    live = Live(seed)

    def overwrite(other: int) -> None:
        live.inner["seen"].append(other)
        live.inner["sums"].copy_(noise(torch.float64, (4,), other))
        live.inner["last"] = other

    return Held({name: live}, lambda: copy.deepcopy(live.inner), overwrite)


class Net(nn.Module):
    """Tied weights and a buffer."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(at): nn.Linear(3, 3), str(at + 1): nn.Linear(3, 3)})
        self.layers[str(at + 1)].weight = self.layers[str(at)].weight
        self.register_buffer(f"seen_{at}", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def trained(stages: int) -> Make:
    """A model and its AdamW, or the parts of a pipeline; training goes on after the save."""

    def make(name: str, seed: int) -> Held:
        torch.manual_seed(seed)
        nets = [Net(2 * i) for i in range(stages)]
        adams = [torch.optim.AdamW(net.parameters(), lr=0.1 + seed % 7) for net in nets]

        def train(other: int) -> None:
            generator = torch.Generator().manual_seed(other)
            for net, adam in zip(nets, adams, strict=True):
                net(torch.randn(4, 3, generator=generator)).square().sum().backward()
                adam.step()
                adam.param_groups[0]["lr"] *= 0.5
                for buffer in net.buffers():
                    buffer.add_(1)

        train(seed)
        model, optimizer = ModelParts(nets), OptimizerParts(adams, ModelParts(nets))
        parts: dict[str, Any] = {f"{name} model": model, f"{name} optimizer": optimizer}
        if stages == 1:
            parts = {f"{name} model": nets[0], f"{name} optimizer": adams[0]}

        def now() -> Any:
            states = [(net.state_dict(), adam.state_dict()) for net, adam in zip(nets, adams, strict=True)]
            return [_plain(copy.deepcopy(state)) for state in states]

        return Held(parts, now, train)

    return make


def _plain(state: Any) -> Any:
    """Mappings of any kind as dicts, so that only content is compared."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return [_plain(value) for value in state] if isinstance(state, list | tuple) else state
