"""Checkpoints of large training jobs: sharded, verified, committed once.

The trainer-side library: `save`, `load`, `read`, `inspect` and `verify` work on one iteration directory;
`Checkpointer` is the facade that a training job holds for a whole run.
"""

from ckptlib.api import save
from ckptlib.checkpointer import Checkpointer
from ckptlib.inspect import CheckpointInfo, inspect
from ckptlib.reader import LoadReport, load, read
from ckptlib.restoring import Restored
from ckptlib.rng import RngTracker
from ckptlib.saving import SaveResult
from ckptlib.sharding import LocalNonpersistentObject, ShardedObject, ShardedTensor
from ckptlib.topology import Topology
from ckptlib.verify import VerifyReport, verify

__all__ = [
    "CheckpointInfo",
    "Checkpointer",
    "LoadReport",
    "LocalNonpersistentObject",
    "Restored",
    "RngTracker",
    "SaveResult",
    "ShardedObject",
    "ShardedTensor",
    "Topology",
    "VerifyReport",
    "inspect",
    "load",
    "read",
    "save",
    "verify",
]
