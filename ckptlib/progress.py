"""How far a training is: numbers recorded with a checkpoint, and compared with the restored state (C38).

What the state itself says is *observed* at the save, beside what the trainer passes, and observed again after a load: a
scheduler that was stepped twice, a position that is derived and not stored, or a rate that jumps is an error then, not
a loss curve that somebody has to explain.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ckptlib.errors import ProgressError, StateError

LR = "lr"
SCHEDULER_STEP = "scheduler_step"
CONSUMED_SAMPLES = "consumed_samples"
OBSERVED = (LR, SCHEDULER_STEP, CONSUMED_SAMPLES)

_TOLERANCE = 1e-9
"""Relative: a rate is stored exactly, and one that is computed again may be rounded in another order."""


def observe(state: Mapping[str, Any]) -> dict[str, float]:
    """What the parts of a state say, the first that knows it:

    - ``lr``: of the first parameter group of an optimizer, torch's or Megatron-Core's, or of its state dict;
    - ``scheduler_step``: ``last_epoch`` of a torch scheduler, ``num_steps`` of Megatron-Core's (there in samples);
    - ``consumed_samples``: an entry or attribute of that name, as Megatron-Core's samplers have it.

    Nothing is asked for its state dict: that may be large, and a collective.
    """
    found: dict[str, float] = {}
    readers: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        (LR, _lr),
        (SCHEDULER_STEP, _scheduler_step),
        (CONSUMED_SAMPLES, lambda part: _member(part, CONSUMED_SAMPLES)),
    )
    for part in _parts(state):
        for name, read in readers:
            if name not in found and (number := _number(read(part))) is not None:
                found[name] = number
    return found


def check(
    recorded: Mapping[str, float], now: Mapping[str, float], where: str, allowed: Collection[str] = ()
) -> dict[str, tuple[float, float]]:
    """Compares what was observed at the save with what is now; numbers that only one of them has say nothing.

    Args:
        allowed: names that may differ, because they were changed on purpose.

    Returns:
        The allowed differences: name -> (recorded, now).

    Raises:
        ProgressError: a number differs.
    """
    differences = {
        name: (recorded[name], now[name])
        for name in OBSERVED
        if name in recorded and name in now and not _same(recorded[name], now[name])
    }
    refused = {name: pair for name, pair in differences.items() if name not in allowed}
    if refused:
        text = "; ".join(f"{name} was {old:g} at the save and is {new:g} now" for name, (old, new) in refused.items())
        raise ProgressError(
            f"{where}: the restored state is not where the checkpoint was: {text}. If that is meant, pass "
            f"allow_changed={sorted(refused)}.",
            differences=refused,
        )
    return differences


def check_names(allowed: Collection[str]) -> None:
    """Raises:
    StateError: a name that is never compared.
    """
    unknown = sorted({*([allowed] if isinstance(allowed, str) else allowed)} - {*OBSERVED})
    if isinstance(allowed, str) or unknown:
        raise StateError(f"allow_changed={allowed!r}: expected a collection of names out of {', '.join(OBSERVED)}")


def with_args(given: Mapping[str, float], args: Any) -> dict[str, float]:
    """The trainer's numbers, with the consumed samples that its arguments have (Megatron-LM keeps them there).

    Raises:
        StateError: they disagree: a resume could trust either.
    """
    consumed = _number(getattr(args, "consumed_train_samples", None))
    if consumed is None:
        return dict(given)
    if given.get(CONSUMED_SAMPLES, consumed) != consumed:
        raise StateError(
            f"progress: consumed_samples is {given[CONSUMED_SAMPLES]:g}, and args.consumed_train_samples is "
            f"{consumed:g}. Pass one number in both."
        )
    return {CONSUMED_SAMPLES: consumed, **given}


def numbers_of(what: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Checks user numbers; NaN and infinities are values.

    Raises:
        StateError: names the one that is no number.
    """
    numbers: dict[str, float] = {}
    for name, value in values.items():
        try:
            if isinstance(value, bool | str):
                raise TypeError
            try:
                numbers[name] = operator.index(value)  # whole numbers stay exact
            except TypeError:
                numbers[name] = float(value)  # NumPy and torch scalars too
        except (TypeError, ValueError) as error:
            raise StateError(f"{what} {name!r}: expected a number, got {value!r}") from error
    return numbers


def _parts(value: Any, above: tuple[int, ...] = ()) -> Iterator[Any]:
    """Every container and every object of a state, outer ones first. Modules and tensors know nothing of progress.

    A container in itself is left to who flattens the state, and says so.
    """
    if isinstance(value, torch.Tensor | torch.nn.Module | str | int | float | None) or id(value) in above:
        return
    yield value
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _parts(inner, (*above, id(value)))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _parts(inner, (*above, id(value)))


def _lr(part: Any) -> Any:
    groups = _member(part, "param_groups")
    if not isinstance(groups, Sequence) or not groups or not isinstance(groups[0], Mapping):
        return None
    return groups[0].get("lr")


def _scheduler_step(part: Any) -> Any:
    if isinstance(part, torch.optim.lr_scheduler.LRScheduler):
        inner = getattr(part, "_schedulers", None)  # ChainedScheduler has no position of its own
        return getattr(part, "last_epoch", None) if "last_epoch" in vars(part) or not inner else inner[0].last_epoch
    if isinstance(part, Mapping):
        if "last_epoch" in part and "_step_count" in part:
            return part["last_epoch"]
        return part.get("num_steps") if "lr_decay_style" in part else None
    # Megatron-Core's OptimizerParamScheduler.
    return getattr(part, "num_steps", None) if hasattr(part, "lr_decay_style") else None


def _member(part: Any, name: str) -> Any:
    return part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_TOLERANCE) or (math.isnan(one) and math.isnan(other))
