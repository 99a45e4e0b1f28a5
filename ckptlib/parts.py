"""Several model parts of a rank as one: virtual pipeline stages, and the optimizer of each.

With interleaved pipeline schedules a rank holds several stages, each a module with an optimizer of its own. Their
layers have global names (``layers.7.weight``), so together they are one state: `ModelParts` and `OptimizerParts` give
them to a state tree under one name, as torchtitan's ``ModelWrapper`` and ``OptimizersContainer`` do. Saved with any
number of stages per rank, loaded with any other.

    state = {"model": ModelParts(stages), "optimizer": OptimizerParts(optimizers, ModelParts(stages))}

Both are Stateful in torch's sense too, for `torch.distributed.checkpoint` itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckptlib import torch_leaves
from ckptlib.errors import StateError
from ckptlib.optim import merge_groups


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of a module's state dict: which part has it, and under which name."""

    part: int
    own_name: str
    value: Any


class ModelParts:
    """Modules whose parameters and buffers have names that are unique among them.

    Attributes:
        modules: the parts, in order.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.modules = tuple(modules)
        _expect(torch.nn.Module, self.modules, "model parts: expected modules")

    def state_dict(self) -> dict[str, Any]:
        """Canonical name -> value, over all parts.

        Raises:
            StateError: two parts use one name.
        """
        return {name: entry.value for name, entry in self.entries().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Gives every part what it has in `state_dict`.

        Raises:
            RuntimeError: torch's: an entry is missing or has another shape.
        """
        self.load_entries(self.entries(), state_dict)

    def entries(self) -> dict[str, Entry]:
        """Canonical name -> the value and where it belongs.

        Raises:
            StateError: two parts use one name.
        """
        merged: dict[str, Entry] = {}
        for i, module in enumerate(self.modules):
            for name, (own, value) in torch_leaves.named_state(module, f"model part {i}").items():
                if name in merged:
                    raise StateError(
                        f"model parts {merged[name].part} and {i} both have {name!r}. Name layers by their place in "
                        "the whole model; a buffer that every stage has is registered with persistent=False"
                    )
                merged[name] = Entry(i, own, value)
        return merged

    def load_entries(self, entries: Mapping[str, Entry], state_dict: Mapping[str, Any]) -> None:
        """`load_state_dict`, for who has the entries already: to list them is a collective with some modules."""
        owns: list[dict[str, Any]] = [{} for _ in self.modules]
        for name, entry in entries.items():
            if name in state_dict:
                owns[entry.part][entry.own_name] = state_dict[name]
        for module, own in zip(self.modules, owns, strict=True):
            module.load_state_dict(own)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter of every part under each of its canonical names."""
        for module in self.modules:
            yield from torch_leaves.named_parameters(module)


class OptimizerParts:
    """The optimizers of a rank's model parts, as one.

    Their parameter groups are matched by position: group 0 of all of them is one group, with the same options
    everywhere. A part without parameters of a group has that group empty.

    Attributes:
        optimizers: one for each part; any number when it is used without `state_dict`.
        model: the parts that they train. A state tree finds the names of parameters in the modules beside the
            optimizer and does not need it.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], model: ModelParts | None = None) -> None:
        self.optimizers = tuple(optimizers)
        self.model = model
        _expect(torch.optim.Optimizer, self.optimizers, "optimizer parts: expected optimizers")
        if model is not None and len(model.modules) != len(self.optimizers):
            raise StateError(f"optimizer parts: {len(self.optimizers)} optimizers for {len(model.modules)} model parts")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all parts, one after the other; the first one's ``lr`` is what a save records."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The state by parameter name, as `get_optimizer_state_dict` gives it for one module and optimizer.

        As there, a fresh optimizer gets its state first, so that it can be filled.

        Raises:
            StateError: `model` was not given, or the groups of the parts have other options.
        """
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # takes 0.2 s, for few users

        states: list[dict[str, Any]] = [
            get_optimizer_state_dict(module, optimizer) for module, optimizer in self._pairs()
        ]
        return {
            "state": {name: slots for state in states for name, slots in state["state"].items()},
            "param_groups": merge_groups([state["param_groups"] for state in states], "optimizer parts"),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Gives every optimizer the state of its own parameters, and all of them the options of the groups.

        Raises:
            StateError: `model` was not given.
        """
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        for module, optimizer in self._pairs():
            own = {name for name, _ in torch_leaves.named_parameters(module)}
            set_optimizer_state_dict(
                module,
                optimizer,
                {
                    "state": {name: slots for name, slots in state_dict["state"].items() if name in own},
                    "param_groups": [
                        {**group, "params": [name for name in group["params"] if name in own]}
                        for group in state_dict["param_groups"]
                    ],
                },
            )

    def _pairs(self) -> Iterator[tuple[torch.nn.Module, torch.optim.Optimizer]]:
        if self.model is None:
            raise StateError("optimizer parts: parameters have no names without the model: OptimizerParts(…, model)")
        return zip(self.model.modules, self.optimizers, strict=True)


def _expect(kind: type, parts: Iterable[object], what: str) -> None:
    strange = [type(part).__name__ for part in parts if not isinstance(part, kind)]
    if strange:
        raise StateError(f"{what}, got {', '.join(strange)}")
