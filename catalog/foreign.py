"""What the catalog records of a checkpoint that others wrote (Megatron-Core, plain torch): read from its own files.

Its identity is the digest of its small metadata files and its iteration: tensor files of two saves may differ while
a `.metadata` of the same shapes does not, and a copy elsewhere is still the same checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from catalog.entries import FOREIGN_PREFIX, NewCheckpoint, NewFile
from ckptlib import roots
from ckptlib import storage as st
from ckptlib.errors import NotACheckpointError, StateError
from ckptlib.formats import torch_dist
from ckptlib.index import ItemIndex
from ckptlib.records import canonical
from ckptlib.topology import Topology

METADATA, MARKER, COMMON, INTEGRITY = ".metadata", "metadata.json", "common.pt", "integrity.json"
_SMALL = (METADATA, MARKER, COMMON)
_CONTENT_KEYS = {"opt_param_scheduler": "scheduler", "lr_scheduler": "scheduler", "args": "args"}
_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": "data_parallel_size",
}


def identity(storage: st.Storage, path: str, iteration: int) -> str:
    """The save id of a foreign checkpoint (S3)."""
    digests = {}
    for name in _SMALL:
        try:
            digests[name] = hashlib.sha256(storage.get(st.join(path, name))).hexdigest()
        except FileNotFoundError:
            continue
    return FOREIGN_PREFIX + hashlib.sha256(canonical({"iteration": iteration, "files": digests})).hexdigest()


def describe(storage: st.Storage, root: str, root_id: str | None, run: str, found: roots.Found) -> NewCheckpoint:
    """What to record of a complete foreign checkpoint. Reads its metadata, not its tensors.

    Digests come from its ``integrity.json`` where it has one (``imported``); the others are computed when its bytes
    are read first (``first-read``, V1).

    Raises:
        NotACheckpointError, IntegrityError: it is not readable after all; nothing was executed.
    """
    save_id = identity(storage, found.path, found.iteration)
    index = torch_dist.read_index(storage, found.path)
    common = torch_dist.read_common(storage, found.path, index)
    imported = _integrity(storage, found.path)
    files = []
    for name in (*index.files, *_SMALL):
        size = storage.stat(st.join(found.path, name))
        if size is None:
            if name in index.files:
                raise NotACheckpointError(f"{found.url}: {name} disappeared while it was being looked at")
            continue
        role = {METADATA: "metadata", MARKER: "metadata", COMMON: "common"}.get(name, "data")
        digest = imported.get(name)
        files.append(NewFile(name, size, digest, role, "imported" if digest else "first-read"))
    args = common.get("args")
    return NewCheckpoint(
        run=run,
        root_url=storage.url(root),
        root_id=root_id,
        path=found.name,
        save_id=save_id,
        iteration=found.iteration,
        manifest_sha256=save_id.removeprefix(FOREIGN_PREFIX),
        files=tuple(files),
        size=sum(file.size for file in files),
        kind=found.kind,
        semantic_type="TORCH_DCP" if found.format == "torch_dcp" else "GLOBAL",
        format=found.format or "torch_dist",
        topology=_topology(args),
        contents=_contents(index, common),
        progress=_progress(args, common),
        tensors=len(index.keys),
        objects=len(index.object_keys),
        adopted=True,
    )


def _integrity(storage: st.Storage, path: str) -> dict[str, str]:
    """Name -> SHA-256 from Megatron's ``integrity.json``; empty when there is none, or it says something else."""
    try:
        value = json.loads(storage.get(st.join(path, INTEGRITY)))
    except (FileNotFoundError, ValueError):
        return {}
    files = value.get("files") if isinstance(value, dict) and value.get("algorithm") == "sha256" else None
    if not isinstance(files, dict):
        return {}
    return {name: digest for name, digest in files.items() if isinstance(digest, str) and len(digest) == 64}


def _contents(index: ItemIndex, common: Mapping[str, Any]) -> tuple[str, ...]:
    """Which parts it holds. Optimizer state in a form that we cannot load is named with the form, so that no resume
    of ours is promised it."""
    names = set()
    for key in index.keys:
        names.add("optimizer" if key.startswith(("optimizer.", "chained_")) else "model")
    if any(key.startswith("optimizer.") for key in index.object_keys):
        names.add("optimizer")
    if any(key.startswith(("rng_state", "rng")) for key in index.object_keys):
        names.add("rng")
    form = torch_dist.optimizer_form(index, common) if "optimizer" in names else None
    if form in torch_dist.FLAT_FORMS:
        names.remove("optimizer")
        names.add(f"optimizer:{form}")
    names |= {name for key, name in _CONTENT_KEYS.items() if key in common}
    return tuple(sorted(names))


def _topology(args: Any) -> Topology | None:
    """The parallel sizes that Megatron's arguments name; None where they do not, or make no sense."""
    sizes = {axis: getattr(args, name, None) for axis, name in _AXES.items()}
    known = {axis: size for axis, size in sizes.items() if isinstance(size, int)}
    if "tp" not in known:
        return None
    try:
        return Topology(**known)
    except StateError:
        return None


def _progress(args: Any, common: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that a resume needs."""
    numbers = {
        "consumed_samples": getattr(args, "consumed_train_samples", None),
        "flops": common.get("num_floating_point_operations_so_far"),
    }
    return {
        name: value
        for name, value in numbers.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
