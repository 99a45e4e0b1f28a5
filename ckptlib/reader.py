"""`load` and `read`: a checkpoint without a `Checkpointer` around it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ckptlib.coordination import lead, new_group
from ckptlib.errors import KeyMismatchError, StateError, UnsupportedError
from ckptlib.fetch import fetch_all
from ckptlib.layouts.loading import Place, open_own, prepare
from ckptlib.load_options import LoadOptions, LoadParallelism, Rename, Strict
from ckptlib.load_requests import plan_leaves, target_of
from ckptlib.loading import LoadReport, Prepared, load_together
from ckptlib.resume import is_bookkeeping
from ckptlib.sharding import Box
from ckptlib.source import Source, open_source
from ckptlib.state import TensorLeaf, dtype_of
from ckptlib.topology import Topology

__all__ = ["LoadReport", "load", "read"]

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def load(
    state: dict[str, Any],
    url: str,
    *,
    strict: Strict = "error",
    verify: str | None = None,
    keys: Collection[str] | None = None,
    rename: Rename | None = None,
    cast: bool | Collection[str] = False,
    load_main_params: bool = False,
    load_parallelism: LoadParallelism | None = None,
    process_group: ProcessGroup | None = None,
    check_coverage: bool = True,
    save_id: str | None = None,
    topology: Topology | None = None,
    timeout: float = 600.0,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Fills `state` in place from the checkpoint at `url`.

    Collective under `torch.distributed`: rank 0 decides which save is read (R2).

    Args:
        state: the tree to fill, as for `save`; tensors say what is wanted by their place, shape and dtype.
        url: the iteration directory.
        strict: what missing and unexpected keys do: ``error`` raises on either; ``warn`` logs; ``return`` only reports.
        verify: ``"data"`` checks the digest of every file before anything is read.
        keys: patterns of stored keys, e.g. ``["model.*"]``; what matches none stays as it is, and is neither missing
            nor unexpected.
        rename: state key -> stored key: a mapping of keys, or of what stands before a dot in them; or a function.
        cast: convert values to the state's dtypes: True, or patterns of stored keys. Otherwise another dtype is an
            error; a conversion that loses fractions, imaginary parts or high bits of integers always is.
        load_main_params: weights come from the fp32 main parameters of the stored optimizer, where it has any; only
            without the optimizer itself.
        load_parallelism: ``"dp"``: what several ranks need is read by one of them and sent to the others.
        process_group: whose ranks do that, with collectives on it; None: the default group.
        check_coverage: what all ranks ask for together has to cover each tensor exactly once, by main replicas; a rank
            that is left out or counted twice is then an error. False: to load parts of what a job would.
        save_id: which save of the directory; None: the newest committed.
        topology: of this job, for a LOCAL or LEGACY checkpoint, which is loaded where it was saved; None: that of the
            checkpoint, if it has as many ranks.
        timeout: seconds that a rank waits for another.

    Raises:
        NotACheckpointError, UncommittedError: nothing to load.
        KeyMismatchError, ShapeMismatchError, DtypeMismatchError, TilingError: R4; nothing was changed.
        UnsupportedError: a LOCAL or LEGACY checkpoint of another topology; nothing was changed.
        StateError: the options contradict the state or each other; nothing was changed.
        IntegrityError: bytes are not what was recorded; nothing was changed.
        LoadIncompleteError: reading failed after tensors had changed; names them.
    """
    options = LoadOptions(
        strict=strict,
        verify=verify,
        keys=keys,
        rename=rename,
        cast=cast,
        load_main_params=load_main_params,
        load_parallelism=load_parallelism,
        process_group=process_group,
        check_coverage=check_coverage,
    )
    group = new_group(timeout=timeout, name="bare")
    group.next_round()
    opened: Source | None = None  # on rank 0

    def pin() -> str | None:
        nonlocal opened
        opened = open_source(url, save_id=save_id, storage_options=storage_options)
        return opened.save_id

    pinned = lead(group, "pin", pin)

    def prepare_here() -> Prepared:
        source = opened or open_source(url, save_id=pinned, storage_options=storage_options)
        beside = source.manifest is None or source.manifest.begin.attempt > 0
        own = open_own(source, Place.of(group, topology))
        return prepare(state, source, options, own, is_bookkeeping if beside else lambda key: False)

    return load_together(group, prepare_here)


def read(
    url: str,
    keys: Collection[str] | None = None,
    *,
    save_id: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Whole global tensors, without a skeleton to fill.

    Args:
        keys: which; None: all tensors of the checkpoint.

    Raises:
        KeyMismatchError: a key is not in the checkpoint.
        StateError: `keys` is one string.
        UnsupportedError: a LOCAL or LEGACY checkpoint.
    """
    if isinstance(keys, str):
        raise StateError(f"keys={keys!r}: expected a collection of names, got one string")
    source = open_source(url, save_id=save_id, storage_options=storage_options)
    if source.format == "torch":
        raise UnsupportedError(
            f"{source.url}: whole state dicts of its ranks, without global tensors; load it where it was saved"
        )
    unknown = [key for key in keys or () if key not in source.index]
    if unknown:
        raise KeyMismatchError(f"{source.url}: no tensor {', '.join(map(repr, unknown[:8]))}", missing=unknown)
    stored = [source.index.tensor(key) for key in (source.index.keys if keys is None else dict.fromkeys(keys))]
    leaves = [
        TensorLeaf(info.key, torch.empty(info.shape, dtype=dtype_of(info.dtype)), info.shape, Box.whole(info.shape))
        for info in stored
    ]
    fetch_all(source, plan_leaves(source, leaves, stored), list(map(target_of, leaves, stored)))
    return {leaf.key: leaf.tensor for leaf in leaves}
