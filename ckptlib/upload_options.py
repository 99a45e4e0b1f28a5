"""Where and how a run's checkpoints are uploaded from their first tier: what a trainer may choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptlib.errors import StateError
from ckptlib.manifest import Kind

UPLOADED_KINDS: tuple[Kind, ...] = ("persistent", "release", "non_persistent_global")


@dataclass(frozen=True)
class UploadOptions:
    """The durable location of a run whose root is a fast first tier: NVMe, a ramdisk, Lustre scratch.

    Attributes:
        root: the run's directory at the durable location.
        storage_options: for its storage.
        single_writer: see `Checkpointer`, of the durable location.
        kinds: which checkpoints are uploaded. The others stay on the first tier alone.
        keep: how many of the newest persistent checkpoints stay on the first tier when they are durable; None: all.
        limit: bytes per second of each rank; None: as fast as it goes.
        give_up_after: seconds for which the upload of one checkpoint is tried again after failures. What is given up
            the next attempt uploads, or `ckptlib.transfer.copy`.

    A worker process outlives the trainer until what was handed to it is uploaded, however long that takes; what fails
    then is tried again for `give_up_after` seconds in all. SIGTERM ends it when its saves are written.

    Raises:
        StateError: a value is out of its range.
    """

    root: str
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    single_writer: bool = False
    kinds: tuple[Kind, ...] = ("persistent",)
    keep: int | None = None
    limit: float | None = None
    give_up_after: float = 3600.0

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in UPLOADED_KINDS:
                raise StateError(f"upload of kind {kind!r}: expected some of {', '.join(UPLOADED_KINDS)}")
        if self.keep is not None and self.keep < 1:
            raise StateError(f"upload keep={self.keep}: expected at least 1, or None to keep all")
        if self.limit is not None and not self.limit > 0:
            raise StateError(f"upload limit={self.limit}: expected more than 0 bytes per second, or None")
        if not self.give_up_after >= 0:
            raise StateError(f"upload give_up_after={self.give_up_after}: expected seconds, 0 or more")
