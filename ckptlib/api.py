"""`save`: a checkpoint without a `Checkpointer` around it."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from typing import Any, Literal

from ckptlib import storage as st
from ckptlib.combinations import FORMAT_OF, WRITERS, check
from ckptlib.coordination import new_group
from ckptlib.errors import StateError, UnsupportedError
from ckptlib.layouts.contents import check_topology, content_of, writes
from ckptlib.manifest import Begin, Format, IoMode, Kind, SemanticType
from ckptlib.progress import numbers_of
from ckptlib.restoring import parts_of
from ckptlib.saving import SaveRequest, SaveResult, run_save
from ckptlib.state import content_names
from ckptlib.topology import Topology


def save(
    state: Mapping[str, Any],
    url: str,
    *,
    iteration: int,
    run: str | None = None,
    topology: Topology | None = None,
    semantic_type: SemanticType = "GLOBAL",
    format: Format | None = None,
    io_mode: IoMode = "sync",
    contents: Collection[str] | None = None,
    kind: Kind = "persistent",
    metrics: Mapping[str, float] | None = None,
    progress: Mapping[str, float] | None = None,
    on_exists: Literal["error", "replace"] = "error",
    single_writer: bool = False,
    timeout: float = 600.0,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveResult:
    """Writes and commits one checkpoint at `url`; nothing outside `url` is touched.

    Collective under `torch.distributed`, on the ranks of the default group. A bare save is its own attempt: it is not
    fenced by a run's attempts, and a copied iteration directory is a complete checkpoint.

    Args:
        state: nested dict of tensors, DTensors, `ShardedTensor`, `ShardedObject`, `LocalNonpersistentObject`, objects
            with `state_dict`, optimizers, and plain values.
        url: the iteration directory: a path, or any URL that fsspec knows.
        iteration: 0 or more.
        semantic_type: what the checkpoint means (docs/combinations.md).
        format: None: the one that goes with it.
        contents: top-level names of `state` to save; None: all.
        on_exists: ``replace`` supersedes a checkpoint that is already committed at `url`, once this one is committed.
        single_writer: vouches that nobody else writes to `url`, for storages without exclusive creation.
        timeout: seconds that a rank waits for another.

    Raises:
        UnsupportedError: this combination of semantic type, format and io mode is impossible (the message says why, and
            which is the nearest possible one), or not written by this function.
        CheckpointExistsError: W9, or a run's attempt has saved at `url`; nothing was written.
        StateError: the state cannot be saved; names the tensor or path.
        SaveAbortedError, RankFailedError, RankTimeoutError: the save failed; an older checkpoint is unharmed.
        OSError: the storage failed.
    """
    format_: Format = FORMAT_OF.get(semantic_type, "torch_dist") if format is None else format
    combination = check(semantic_type, format_, io_mode)
    writers = WRITERS[combination]
    if "ckptlib.save" not in writers:
        raise UnsupportedError(
            f"{combination} is not written by ckptlib.save, but by {' or '.join(writers)}: a save that goes on after "
            "the call needs an owner of its memory and its worker, who tells all ranks when it fails"
        )
    if run is not None and not isinstance(run, str):
        raise StateError(f"run {run!r}: expected a string")
    storage, path = st.resolve(url, storage_options, single_writer=single_writer)
    st.require_exclusive(storage, url, single_writer=single_writer)

    group = new_group(timeout=timeout, name="bare")
    if topology is not None and topology.world_size != group.world_size and format_ == "torch":
        raise StateError(f"topology {topology} has {topology.world_size} ranks, this job has {group.world_size}")
    check_topology(semantic_type, topology, group.world_size)
    writer = writes(semantic_type, topology, group.rank, group.world_size)

    def prepare() -> SaveRequest:
        tree = parts_of(state, contents)
        begin = Begin(
            save_id="",
            run=run,
            attempt=0,
            attempt_id=uuid.uuid4().hex,
            iteration=iteration,
            world_size=1,
            plan_digest="",
            kind=kind,
            semantic_type=semantic_type,
            format=format_,
            io_mode=io_mode,
            topology=topology,
            contents=tuple(sorted(content_names(tree))),
            progress=numbers_of("progress", progress or {}),
            metrics=numbers_of("metrics", metrics or {}),
        )
        return SaveRequest(storage, path, begin, content_of(semantic_type, tree if writer else None), on_exists)

    result, _, _ = run_save(group, prepare)
    return result
