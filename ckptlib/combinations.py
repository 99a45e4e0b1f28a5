"""Which semantic types, formats and io modes go together, and why the others do not. Pure.

A checkpoint is described along three dimensions, each of which narrows the next:

* the *semantic type*, what it means: a whole state dict per model-parallel place (LEGACY), one rank's own state
  (LOCAL), one model that any topology can take its shards from (GLOBAL), or torch's own object graph (TORCH_DCP);
* the *format*, what its files look like: it must be able to say what is meant;
* the *io mode*, whether training waits for the storage. Staging makes a snapshot in host memory that any writer can
  write later, so no format forbids ``async``; a storage can.

`docs/combinations.md` holds the same as tables, made by `tables` and compared by a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, get_args

from ckptlib.errors import UnsupportedError
from ckptlib.manifest import Format, IoMode, SemanticType

if TYPE_CHECKING:
    from ckptlib.storage.base import Capabilities

SEMANTIC_TYPES: tuple[SemanticType, ...] = get_args(SemanticType)
FORMATS: tuple[Format, ...] = get_args(Format)
IO_MODES: tuple[IoMode, ...] = get_args(IoMode)

Worker = Literal["process", "thread"]


@dataclass(frozen=True)
class Combination:
    """One choice in each dimension."""

    semantic_type: SemanticType
    format: Format
    io_mode: IoMode

    def __str__(self) -> str:
        return " + ".join(astuple(self))


@dataclass(frozen=True)
class Constraint:
    """Why something is impossible. `name` is stable, `text` is half a sentence for people."""

    name: str
    text: str


FORMAT_OF: Mapping[SemanticType, Format] = {
    "LEGACY": "torch",
    "LOCAL": "torch",
    "GLOBAL": "torch_dist",
    "TORCH_DCP": "torch_dcp",
}
"""The one format that can say what is meant."""

MEANING: Mapping[SemanticType, str] = {
    "LEGACY": "the whole state dict of each (tp, pp, ep) place; any dp and cp, all else the same",
    "LOCAL": "a rank's own state; same topology only, resumed from by default only as `non_persistent_local`",
    "GLOBAL": "one model, in shards that know their place; any topology",
    "TORCH_DCP": "torch's object graph by dotted path; any topology",
}

POSSIBLE: tuple[Combination, ...] = tuple(
    Combination(semantic_type, FORMAT_OF[semantic_type], io_mode)
    for semantic_type in SEMANTIC_TYPES
    for io_mode in IO_MODES
)

WRITERS: Mapping[Combination, tuple[str, ...]] = {
    Combination("LEGACY", "torch", "sync"): ("ckptlib.save", "Checkpointer.save"),
    Combination("LEGACY", "torch", "async"): ("Checkpointer.save",),
    Combination("LOCAL", "torch", "sync"): ("ckptlib.save", "Checkpointer.save"),
    Combination("LOCAL", "torch", "async"): ("Checkpointer.save",),
    Combination("GLOBAL", "torch_dist", "sync"): ("ckptlib.save", "Checkpointer.save"),
    Combination("GLOBAL", "torch_dist", "async"): ("Checkpointer.save",),
    Combination("TORCH_DCP", "torch_dcp", "sync"): ("ckptlib.save", "Checkpointer.save", "dcp.save with CkptWriter"),
    Combination("TORCH_DCP", "torch_dcp", "async"): ("Checkpointer.save", "dcp.async_save with CkptWriter"),
}
"""What this version writes, and with what. A possible combination that is absent is not written yet.

`dcp` is `torch.distributed.checkpoint`, `CkptWriter` is in `ckptlib.integrations.dcp`. In an ``async_save`` torch
stages and waits, in its own thread; the manifest does not know of it and says ``sync``.
"""

_NO_PLACES = Constraint(
    "no-global-places", "a torch.save file does not say where its tensors lie in those of the whole model"
)
_WHOLE_STATE = Constraint(
    "whole-state-dicts",
    "LEGACY is one whole state dict per (tp, pp, ep) place, in the directories that Megatron looks for",
)
_ONE_PER_NAME = Constraint(
    "one-tensor-per-name", "under one name there is one tensor, and LOCAL has another one on every rank"
)
_COMMON_STATE = Constraint(
    "common-state", "torch_dcp has every value under a dotted path: no common state, no sharded objects as GLOBAL keeps"
)
_OBJECT_GRAPH = Constraint(
    "object-graph", "readers of torch_dist expect a common state and metadata.json, which an object graph does not have"
)
_MEGATRON_FSDP = Constraint(
    "megatron-fsdp-only", "it is Megatron-FSDP's own form, its parameters split and renamed, and no save here makes it"
)
_TENSORS_ONLY = Constraint(
    "tensors-only", "a safetensors file holds tensors and nothing else, so nothing could be resumed from it"
)
_IN_PROCESS = Constraint(
    "in-process-storage", "the storage lies in the memory of this process, where a worker process cannot write"
)

_BY_PAIR: Mapping[tuple[SemanticType, Format], Constraint] = {
    ("GLOBAL", "torch"): _NO_PLACES,
    ("TORCH_DCP", "torch"): _NO_PLACES,
    ("LEGACY", "torch_dist"): _WHOLE_STATE,
    ("LEGACY", "torch_dcp"): _WHOLE_STATE,
    ("LOCAL", "torch_dist"): _ONE_PER_NAME,
    ("LOCAL", "torch_dcp"): _ONE_PER_NAME,
    ("GLOBAL", "torch_dcp"): _COMMON_STATE,
    ("TORCH_DCP", "torch_dist"): _OBJECT_GRAPH,
    **{(semantic_type, "fsdp_dtensor"): _MEGATRON_FSDP for semantic_type in SEMANTIC_TYPES},
    **{(semantic_type, "safetensors"): _TENSORS_ONLY for semantic_type in SEMANTIC_TYPES},
}


def constraint_on(
    combination: Combination, *, storage: Capabilities | None = None, worker: Worker = "process"
) -> Constraint | None:
    """What forbids a combination; None when it is possible.

    Args:
        storage: where it would be written; None: any.
        worker: who writes asynchronous saves.
    """
    by_format = _BY_PAIR.get((combination.semantic_type, combination.format))
    if by_format is not None:
        return by_format
    in_process = storage is not None and storage.name == "memory"
    return _IN_PROCESS if combination.io_mode == "async" and worker == "process" and in_process else None


def nearest(
    combination: Combination, *, storage: Capabilities | None = None, worker: Worker = "process"
) -> Combination:
    """The possible combination that keeps the most important of what was asked for.

    What a checkpoint means comes first, then whether training waits for it; the format follows from the meaning.
    """
    fitting = replace(combination, format=FORMAT_OF[combination.semantic_type])
    if constraint_on(fitting, storage=storage, worker=worker) is None:
        return fitting
    return replace(fitting, io_mode="sync")


def check(
    semantic_type: str,
    format: str,
    io_mode: str,
    *,
    storage: Capabilities | None = None,
    worker: Worker = "process",
) -> Combination:
    """The combination of these words, if this version can write it.

    Args:
        storage: where it is to be written; None: not looked at.
        worker: who writes asynchronous saves.

    Raises:
        UnsupportedError: a word that is none of its dimension; an impossible combination, with the constraint that
            forbids it and the nearest possible one; a possible one that is not written yet.
    """
    for field, value, known in zip(
        fields(Combination), (semantic_type, format, io_mode), (SEMANTIC_TYPES, FORMATS, IO_MODES), strict=True
    ):
        if value not in known:
            raise UnsupportedError(f"{field.name} {value!r}: expected one of {', '.join(known)}")
    combination = Combination(semantic_type, format, io_mode)  # type: ignore[arg-type]  # looked at above
    constraint = constraint_on(combination, storage=storage, worker=worker)
    if constraint is not None:
        raise UnsupportedError(
            f"{combination} is impossible: {constraint.text}. {_advice(combination, constraint, storage, worker)}"
        )
    if combination not in WRITERS:
        written = ", ".join(map(str, WRITERS))
        raise UnsupportedError(f"{combination} is possible, and not written by this version; written are {written}")
    return combination


def _advice(combination: Combination, constraint: Constraint, storage: Capabilities | None, worker: Worker) -> str:
    advice = f"The nearest possible choice is {nearest(combination, storage=storage, worker=worker)}"
    if constraint is _IN_PROCESS:
        return f"{advice}, or a worker thread"
    keeping = [name for name, format in FORMAT_OF.items() if format == combination.format]
    return f"{advice}; {combination.format} goes with {' or '.join(keeping)}" if keeping else advice


def tables() -> str:
    """The tables of docs/combinations.md: what is possible, and what is not."""
    lines = ["| semantic type | format | io mode | what it means | written today by |", "|---|---|---|---|---|"]
    for each in POSSIBLE:
        writer = ", ".join(f"`{name}`" for name in WRITERS[each]) if each in WRITERS else "not yet"
        lines.append(
            f"| {each.semantic_type} | {each.format} | {each.io_mode} | {MEANING[each.semantic_type]} | {writer} |"
        )
    lines += ["", "| impossible, sync and async | because | constraint | nearest |", "|---|---|---|---|"]
    for (semantic_type, format), constraint in sorted(_BY_PAIR.items(), key=_in_order):
        near = f"{semantic_type} + {FORMAT_OF[semantic_type]}"
        lines.append(f"| {semantic_type} + {format} | {constraint.text} | `{constraint.name}` | {near} |")
    what, near = "async with a worker process on `memory://`", "sync, or a worker thread"
    lines.append(f"| {what} | {_IN_PROCESS.text} | `{_IN_PROCESS.name}` | {near} |")
    return "\n".join(lines) + "\n"


def _in_order(entry: tuple[tuple[SemanticType, Format], Constraint]) -> tuple[int, int]:
    (semantic_type, format), _ = entry
    return SEMANTIC_TYPES.index(semantic_type), FORMATS.index(format)
