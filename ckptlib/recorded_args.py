"""Whether a checkpoint's recorded arguments fit the job that wants it. Pure.

A load would find out too, tensor by tensor, or not at all: attention heads leave no trace in a shape. Megatron-Core
compares the same arguments (`check_checkpoint_args`); of tensor and pipeline parallel sizes only where its format
binds a checkpoint to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ckptlib.errors import ArgsMismatchError

COMPARED = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups")
LEGACY = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def check_args(stored: Any, given: Any, url: str, *, legacy: bool = False) -> None:
    """Refuses a checkpoint of another architecture.

    Args:
        stored, given: a namespace, a dataclass, a mapping, or None. What one of them lacks, or has as None, is not
            compared.
        legacy: a checkpoint in Megatron's ``torch`` format: its parallel sizes and its padded vocabulary count too.

    Raises:
        ArgsMismatchError: names every difference with both values.
    """
    found = differences(stored, given, legacy=legacy)
    if found:
        raise ArgsMismatchError(
            f"{url}: {'; '.join(f'{name} is {one!r} in the checkpoint and {two!r} here' for name, one, two in found)}. "
            "Nothing was loaded."
        )


def differences(stored: Any, given: Any, *, legacy: bool = False) -> list[tuple[str, Any, Any]]:
    """Arguments that differ: name, stored value, given value. See `check_args`."""
    old, new = _values(stored), _values(given)
    names = (*COMPARED, *LEGACY, "padded_vocab_size") if legacy else COMPARED
    found = [(name, old[name], new[name]) for name in names if name in old and name in new and old[name] != new[name]]
    return found if legacy else found + _vocabulary(old, new)


def _vocabulary(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The vocabulary, where it is known; else the padded one, which also depends on the tensor parallel size."""
    if "vocab_size" in old and "vocab_size" in new:
        return [("vocab_size", old["vocab_size"], new["vocab_size"])] if old["vocab_size"] != new["vocab_size"] else []
    name = "padded_vocab_size"
    if name not in old or name not in new or old[name] == new[name]:
        return []
    # Each padded size stands for the vocabularies that are padded to it; one of them may be the same.
    largest = min(old[name], new[name])
    smallest = max(args[name] - _multiple(args) + 1 for args in (old, new))
    return [] if smallest <= largest else [(name, old[name], new[name])]


def _multiple(args: Mapping[str, Any]) -> int:
    """What Megatron pads a vocabulary to a multiple of."""
    return int(args.get("make_vocab_size_divisible_by", 1)) * int(args.get("tensor_model_parallel_size", 1))


def _values(args: Any) -> dict[str, Any]:
    """The arguments that have a value."""
    if args is None:
        return {}
    if isinstance(args, Mapping):
        values = dict(args)
    elif dataclasses.is_dataclass(args):
        values = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    else:
        values = dict(vars(args))
    return {name: value for name, value in values.items() if value is not None}
