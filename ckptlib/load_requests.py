"""What one rank wants of a checkpoint: the leaves of its state, as far as the options go, under stored names (R4)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptlib.errors import DtypeMismatchError, ShapeMismatchError, StateError, TilingError
from ckptlib.fetch import Target
from ckptlib.formats import torch_dist
from ckptlib.index import TensorInfo
from ckptlib.load_options import MAIN_PARAMS, LoadOptions, Renames, check_cast, leaves_of
from ckptlib.read_plan import Int64s, ReadPlan, Requests, plan_reads
from ckptlib.sharding import Box
from ckptlib.source import Source
from ckptlib.state import Finisher, FlatState, TensorLeaf, dtype_of, flatten
from ckptlib.tiling import Boxes, check_tilings

_OPTIMIZER_KEY = re.compile(r"(?:chained_\d+\.)?optimizer(?:\.|$)")


@dataclass(frozen=True)
class Wanted:
    """What one rank wants.

    Attributes:
        flat: without what the options leave out; keys are stored names.
        names: stored name -> the state's, where they differ.
        idle: entries of the options that fit no key here.
        replaced: names of weights whose main parameters are read instead.
    """

    flat: FlatState
    names: Mapping[str, str]
    idle: tuple[str, ...]
    replaced: frozenset[str]

    def keys(self) -> set[str]:
        """All stored names that this rank asks for."""
        return {leaf.key for leaf in self.flat.tensors} | self.flat.object_keys() | self.replaced


def wants(state: dict[str, Any], source: Source, options: LoadOptions) -> Wanted:
    """The leaves of a state, as a load wants them.

    Raises:
        StateError: the state cannot be filled; `rename` makes two names one; main parameters are wanted and the
            optimizer too, or none are stored.
        UnsupportedError: optimizer state is wanted that the checkpoint keeps in flat buffers.
    """
    renames = options.renames
    flat = flatten(state, stored=_Stored(source, options, renames))
    names = renames.apply(flat)
    flat.tensors = [leaf for leaf in flat.tensors if options.chosen(leaf.key)]
    flat.objects = [leaf for leaf in flat.objects if options.chosen(leaf.key)]
    flat.values = [leaf for leaf in flat.values if options.chosen(leaf.key)]
    kept = {id(leaf) for leaf in leaves_of(flat)}
    flat.finishers = [finish for finish in flat.finishers if _is_loaded(finish, kept)]
    replaced = _ask_for_main_params(source, flat) if options.load_main_params else frozenset()
    requested = {leaf.key for leaf in flat.tensors} | flat.object_keys() | replaced
    idle = options.unmatched((*source.index.keys, *source.index.object_keys), requested)
    idle += [f"rename: the state has no key {entry!r}" for entry in renames.entries if entry not in renames.used]
    _check_optimizer(source, flat)
    return Wanted(flat, names, tuple(idle), replaced)


def _is_loaded(finish: Finisher | Callable[[], None], kept: set[int]) -> bool:
    """Whether anything of a part is loaded: a part of which nothing is chosen is left alone."""
    leaves = finish.leaves if isinstance(finish, Finisher) else ()
    return not leaves or any(id(leaf) in kept for leaf in leaves)


class _Stored:
    """What the checkpoint holds for an optimizer, under the names of the state and as far as the options go."""

    def __init__(self, source: Source, options: LoadOptions, renames: Renames) -> None:
        self._source = source
        self._options = options
        self._renames = renames

    def tensors_below(self, prefix: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """See `ckptlib.optim.StoredState`."""
        index = self._source.index
        found = {}
        for rest, stored in self._below(prefix, index.keys_below):
            if stored in index:
                info = index.tensor(stored)
                found[rest] = (dtype_of(info.dtype), info.shape)
        return found

    def objects_below(self, prefix: str) -> list[str]:
        """See `ckptlib.optim.StoredState`."""
        source = self._source
        return [rest for rest, stored in self._below(prefix, source.object_keys_below) if source.has_object(stored)]

    def _below(self, prefix: str, keys_below: Callable[[str], list[str]]) -> list[tuple[str, str]]:
        """Rests of keys below a prefix, and their stored names: candidates, not all of them stored."""
        start = self._renames(prefix) + "."
        rests = dict.fromkeys(key.removeprefix(start) for key in keys_below(start))
        rests |= dict.fromkeys(sorted(self._renames.candidates(prefix)))
        named = [(rest, self._renames(f"{prefix}.{rest}")) for rest in rests]
        return [(rest, stored) for rest, stored in named if self._options.chosen(stored)]


def _ask_for_main_params(source: Source, flat: FlatState) -> frozenset[str]:
    """Has weights read from the optimizer's main parameters; returns their own keys."""
    optimizer = [leaf.key for leaf in leaves_of(flat) if _OPTIMIZER_KEY.match(leaf.key)]
    if optimizer:
        raise StateError(
            f"load_main_params: the optimizer is loaded too ({_some(optimizer)}), and would make the weights from its "
            "main parameters itself. Leave it out of what is loaded, or leave out load_main_params."
        )
    main_of = {match["key"]: key for key in source.index.keys if (match := MAIN_PARAMS.fullmatch(key))}
    taken = set()
    for leaf in flat.tensors:
        if leaf.key in main_of:
            taken.add(leaf.key)
            leaf.key = main_of[leaf.key]
    if flat.tensors and not taken:
        raise StateError(
            f"load_main_params: {source.url} stores no main parameters of these weights "
            "(optimizer.state.param.<key>). Load without it."
        )
    return frozenset(taken)


def plan_leaves(
    source: Source, leaves: Sequence[TensorLeaf], stored: Sequence[TensorInfo], options: LoadOptions | None = None
) -> ReadPlan:
    """The reads that fill leaves; checks R4 for them.

    Args:
        stored: what the index says of each.

    Raises:
        ShapeMismatchError, DtypeMismatchError, TilingError: name the tensor, what is stored and what is wanted.
    """
    index, url = source.index, source.url
    wanted = np.array([leaf.box.volume for leaf in leaves], np.int64)
    for i, (leaf, info) in enumerate(zip(leaves, stored, strict=True)):
        if info.shape != leaf.global_shape:
            if not (leaf.allow_shape_mismatch and len(info.shape) == len(leaf.global_shape)):
                raise ShapeMismatchError(
                    f"tensor {leaf.key!r}: {url} holds the global shape {info.shape}, the state wants "
                    f"{leaf.global_shape}"
                )
            common = leaf.box.intersect(Box.whole(info.shape))
            wanted[i] = 0 if common is None else common.volume
        if info.dtype != leaf.dtype:
            _check_dtype(leaf, info.dtype, url, options)
    requests = Requests.build([leaf.key for leaf in leaves], [leaf.box for leaf in leaves])
    plan = plan_reads(index, requests)
    lacking = wanted - plan.covered(len(leaves))
    if lacking.any():
        i = int(np.flatnonzero(lacking)[0])
        what = "has no chunk for" if lacking[i] > 0 else "has more than one chunk for"
        raise TilingError(f"tensor {leaves[i].key!r}: {url} {what} {abs(lacking[i])} elements of {leaves[i].box}")
    if source.manifest is None:
        _check_disjoint(plan, requests, wanted, url)
    return plan


def _check_disjoint(plan: ReadPlan, requests: Requests, wanted: Int64s, url: str) -> None:
    """Parts that add up to a request may still overlap and leave a hole: not in our saves (W3), in others' perhaps."""
    several = np.flatnonzero(np.bincount(plan.request, minlength=len(requests)) > 1)
    several = several[wanted[several] == requests.sizes[several].prod(axis=1)]  # not those that are padded
    rows = np.flatnonzero(np.isin(plan.request, several))
    boxes = Boxes(np.searchsorted(several, plan.request[rows]), plan.target[rows], plan.sizes[rows])
    keys = [requests.keys[i] for i in several.tolist()]
    try:
        check_tilings(keys, requests.sizes[several], np.full(len(several), requests.axes), boxes)
    except TilingError as error:
        raise TilingError(f"{url}: its chunks do not fit together: {error}") from error


def target_of(leaf: TensorLeaf, stored: TensorInfo) -> Target:
    """Where a leaf's elements go: its tensor with its box's axes; prepended ones have size 1."""
    tensor = leaf.tensor
    for _ in range(len(leaf.box.shape) - tensor.dim()):
        tensor = tensor.unsqueeze(0)
    if tuple(tensor.shape) != leaf.box.shape:
        raise StateError(f"tensor {leaf.key!r}: local shape {tuple(tensor.shape)} is not its box {leaf.box}")
    return Target(leaf.key, tensor, dtype_of(stored.dtype))


def _check_dtype(leaf: TensorLeaf, stored: str, url: str, options: LoadOptions | None) -> None:
    main = MAIN_PARAMS.fullmatch(leaf.key)
    if options is not None and (options.may_cast(leaf.key) or (options.load_main_params and main)):
        check_cast(leaf.key, stored, leaf.dtype, url)
        return
    raise DtypeMismatchError(
        f"tensor {leaf.key!r}: {url} holds {stored}, the state wants {leaf.dtype}. Nothing was converted; cast=True "
        "converts."
    )


def _check_optimizer(source: Source, flat: FlatState) -> None:
    """Optimizer tensors that are stored under their own names, in another shape: old Megatron's flattened form."""
    if source.manifest is not None:
        return
    reshaped = [
        leaf.key
        for leaf in flat.tensors
        if leaf.key.startswith("optimizer.state.")
        and leaf.key in source.index
        and source.index.tensor(leaf.key).shape != leaf.global_shape
    ]
    if reshaped:
        torch_dist.check_optimizer_request(source.index, source.read_common(), reshaped, source.url)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
