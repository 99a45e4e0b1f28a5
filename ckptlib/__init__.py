"""Checkpoints of large training jobs: sharded, verified, committed once.

The trainer-side library: `save`, `load`, `read`, `inspect` and `verify` work on one iteration directory;
`Checkpointer` is the facade that a training job holds for a whole run.

Names are imported when they are first used: the catalog and the command line take errors and records from here
without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptlib import errors
    from ckptlib.api import save
    from ckptlib.async_options import AsyncOptions
    from ckptlib.cadence import Schedule
    from ckptlib.cadence_loop import Cadence
    from ckptlib.checkpointer import Checkpointer
    from ckptlib.exit_signals import ExitSignals
    from ckptlib.inspection import CheckpointInfo, inspect
    from ckptlib.local import LocalOptions
    from ckptlib.metrics import SaveMetrics
    from ckptlib.parts import ModelParts, OptimizerParts
    from ckptlib.reader import LoadReport, load, read
    from ckptlib.restoring import Restored
    from ckptlib.rng import RngTracker
    from ckptlib.saving import SaveResult
    from ckptlib.sharding import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
        WholeValue,
    )
    from ckptlib.topology import Topology
    from ckptlib.upload_options import UploadOptions
    from ckptlib.verification import VerifyReport, verify

__all__ = [
    "AsyncOptions",
    "Cadence",
    "CheckpointInfo",
    "Checkpointer",
    "ExitSignals",
    "LoadReport",
    "LocalNonpersistentObject",
    "LocalOptions",
    "ModelParts",
    "OptimizerParts",
    "Restored",
    "RngTracker",
    "SaveMetrics",
    "SaveResult",
    "Schedule",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "Topology",
    "UploadOptions",
    "VerifyReport",
    "WholeValue",
    "errors",
    "inspect",
    "load",
    "read",
    "save",
    "verify",
]

_HOMES = {
    "AsyncOptions": "async_options",
    "Cadence": "cadence_loop",
    "CheckpointInfo": "inspection",
    "Checkpointer": "checkpointer",
    "ExitSignals": "exit_signals",
    "LoadReport": "reader",
    "LocalNonpersistentObject": "sharding",
    "LocalOptions": "local",
    "ModelParts": "parts",
    "OptimizerParts": "parts",
    "Restored": "restoring",
    "RngTracker": "rng",
    "SaveMetrics": "metrics",
    "SaveResult": "saving",
    "Schedule": "cadence",
    "ShardedObject": "sharding",
    "ShardedTensor": "sharding",
    "ShardedTensorFactory": "sharding",
    "Topology": "topology",
    "UploadOptions": "upload_options",
    "VerifyReport": "verification",
    "WholeValue": "sharding",
    "inspect": "inspection",
    "load": "reader",
    "read": "reader",
    "save": "api",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module(f"{__name__}.errors")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
