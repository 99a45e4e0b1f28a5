"""Every error of the system, in one tree.

::

    CkptError                                   exit 1
    ├── NotACheckpointError (FileNotFoundError)     nothing here that we can read
    │   ├── UncommittedError                        a save began here and was never committed
    │   └── SupersededError                         a newer non-persistent checkpoint took its place, and it is gone
    ├── CheckpointExistsError (FileExistsError)     W9: this attempt already committed this iteration
    ├── FencedError                                 W8: a newer attempt owns this run
    ├── SaveAbortedError                            W4: the decision for this save is `abort`
    │   └── BackgroundSaveError                     a save that was written in the background failed; says which, why
    ├── SaveLimitError                              as many saves are in flight as the caller allows
    ├── StagingError (MemoryError)                  no memory, or no budget, to stage a save in
    ├── StateError (ValueError)                     the state tree cannot be saved or filled as it is
    │   ├── TilingError                             a global tensor has a hole, an overlap, or leaves its shape
    │   ├── DisagreementError                       ranks disagree about something that must be equal
    │   ├── ShapeMismatchError                      stored and requested global shapes differ
    │   ├── DtypeMismatchError                      stored and requested dtypes differ
    │   ├── KeyMismatchError                        missing or unexpected keys
    │   ├── ArgsMismatchError                       a checkpoint's recorded arguments are another architecture's
    │   ├── RngStateError                           an RNG state cannot be taken or put back; nothing was changed
    │   └── ProgressError                           lr or scheduler position after a load are not those recorded
    ├── LoadIncompleteError                         a load failed after tensors had been changed; names them
    ├── IntegrityError                          exit 20   bytes are not what was recorded
    │   ├── RecordError                             a JSON record is malformed, or its own digest is wrong
    │   ├── VersionError                            written by a newer major version than this library reads
    │   └── UnsafePickleError                       R5: a pickle names something that is not plain data
    ├── UnsupportedError (ValueError)               a combination or format that does not exist (here, yet)
    ├── StorageError (OSError)                      the storage failed; says the operation and the path
    │   ├── StorageUnavailableError                 root identity absent or another: not mounted? no such bucket?
    │   ├── StorageTimeoutError (TimeoutError)      the storage did not answer in time
    │   └── ExclusiveCreateError                    W4: this storage cannot create exclusively
    ├── CoordinationError                           ranks could not agree
    │   ├── RankTimeoutError (TimeoutError)         names the ranks that did not answer in time
    │   └── RankFailedError                         names the rank that failed, and its cause
    ├── NoResumePointError                      exit 21   with the reason for every rejected candidate
    ├── CatalogError
    │   ├── NoCatalogError                      exit 10
    │   ├── DatabaseLockedError                 exit 11   another process keeps the database locked
    │   ├── StaleWriteError                         a compare-and-set found another version
    │   ├── TransitionError                         a checkpoint cannot go from its state to the requested one
    │   └── LeaseHeldError                      exit 11   names the holder
    ├── CopyRefusedError                        exit 22   a location must not get a copy; says why
    └── GuardRefusedError                       exit 22

Each message names the checkpoint, the file or tensor, what was found, what was expected and what to do.
Errors subclass the fitting builtin too, so that a caller may catch ``FileNotFoundError`` or ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class CkptError(Exception):
    """Base of all errors here. `exit_code` is what the command line returns for it."""

    exit_code: int = 1

    def __str__(self) -> str:
        # OSError and KeyError reformat their arguments; a message is a sentence and stays one. An error number may
        # stand before it.
        return next((arg for arg in self.args if isinstance(arg, str)), type(self).__name__)


class NotACheckpointError(CkptError, FileNotFoundError):
    """Raised when a location holds nothing that can be read as a checkpoint."""


class UncommittedError(NotACheckpointError):
    """Raised when a save began at a location and no commit decision exists (R1)."""


class SupersededError(NotACheckpointError):
    """Raised when a non-persistent checkpoint is gone because a newer one has taken its place (D2)."""


class CheckpointExistsError(CkptError, FileExistsError):
    """Raised when this attempt has already committed this iteration (W9)."""


class FencedError(CkptError):
    """Raised when a newer attempt of the run exists: this process must stop writing (W8)."""


class SaveAbortedError(CkptError):
    """Raised when the decision of a save is `abort` (W3, W4); the reason is in the message."""


class BackgroundSaveError(SaveAbortedError):
    """Saves that were written in the background failed; told at the next call.

    Attributes:
        iteration: of the first of them.
        save_ids: of all that this error tells of.
    """

    def __init__(self, message: str, *, iteration: int | None = None, save_ids: frozenset[str] = frozenset()) -> None:
        # Optional, as everywhere here: an error is sent to other ranks, and made anew there from its message alone.
        super().__init__(message)
        self.iteration = iteration
        self.save_ids = save_ids


class SaveLimitError(CkptError):
    """As many saves are in flight as the caller allows, and it asked for an error then."""


class StagingError(CkptError, MemoryError):
    """No memory, or no budget, to stage a save in; nothing was written."""


class StateError(CkptError, ValueError):
    """Raised when a state tree cannot be saved, or cannot be filled from a checkpoint."""


class TilingError(StateError):
    """Raised when the shards of a tensor do not cover its global shape exactly once (W3)."""


class DisagreementError(StateError):
    """Raised when ranks disagree about values, shapes or dtypes that must be equal (W3)."""


class ShapeMismatchError(StateError):
    """Raised when a stored tensor and the requested one have different global shapes (R4)."""


class DtypeMismatchError(StateError):
    """Raised when a stored tensor and the requested one have different dtypes (R4)."""


class KeyMismatchError(StateError):
    """Raised when keys are missing from the checkpoint, or unexpected in it (R4)."""

    def __init__(self, message: str, *, missing: Sequence[str] = (), unexpected: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)


class ArgsMismatchError(StateError):
    """Raised when a checkpoint's recorded arguments (layers, heads, vocabulary, ...) are not those of the job."""


class RngStateError(StateError):
    """Raised when an RNG state cannot be taken, or cannot be put back; no generator was changed."""


class ProgressError(StateError):
    """Raised when a restored state is not where the checkpoint was: its lr or scheduler position differ (C38).

    The state has been filled by then. `differences` names each number: what was recorded, and what the state says.
    """

    def __init__(self, message: str, *, differences: Mapping[str, tuple[float, float]] | None = None) -> None:
        super().__init__(message)
        self.differences = dict(differences or {})


class LoadIncompleteError(CkptError):
    """Raised when a load failed after it had begun to change tensors; `changed` names them (R4)."""

    def __init__(self, message: str, *, changed: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.changed = tuple(changed)


class IntegrityError(CkptError):
    """Raised when bytes are not what was recorded for them."""

    exit_code = 20


class RecordError(IntegrityError):
    """Raised when a record (begin, rank, manifest, decision, index) is malformed or damaged."""


class VersionError(IntegrityError):
    """Raised when a record was written by a newer major version than this library understands."""


class UnsafePickleError(IntegrityError):
    """Raised when a pickle names anything that is not plain data (R5). Nothing was executed."""


class UnsupportedError(CkptError, ValueError):
    """Raised for a combination or format that is not supported; names the nearest possible one."""


class StorageError(CkptError, OSError):
    """Raised when a storage operation fails; the message names the operation and the path."""


class StorageUnavailableError(StorageError):
    """Raised when nothing is known of what is stored, because the place itself cannot be had.

    A root's identity file is absent or another one: the storage is not mounted (D4). There is no such bucket, or nobody
    answers at the endpoint. Never `FileNotFoundError`: that would mean that a name is free.
    """


class StorageTimeoutError(StorageError, TimeoutError):
    """Raised when a storage did not answer in time, however often it was asked."""


class ExclusiveCreateError(StorageError):
    """Raised when a storage cannot create a file exclusively and `single_writer` was not given (W4)."""


class CoordinationError(CkptError):
    """Raised when ranks could not agree."""


class RankTimeoutError(CoordinationError, TimeoutError):
    """Raised when ranks did not answer in time; `ranks` names them."""

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RankFailedError(CoordinationError):
    """Raised on every rank when one rank failed; carries each failed rank's cause."""

    def __init__(self, message: str, *, causes: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.causes = dict(causes or {})


class NoResumePointError(CkptError):
    """Raised when nothing can be resumed from; `rejected` gives the reason for each candidate."""

    exit_code = 21

    def __init__(self, message: str, *, rejected: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.rejected = tuple(rejected)


class CatalogError(CkptError):
    """Base of the catalog's errors."""


class NoCatalogError(CatalogError):
    """Raised when there is no catalog database, or its schema is not the current one."""

    exit_code = 10


class DatabaseLockedError(CatalogError):
    """Raised when another process keeps the database locked for longer than the timeout. Trying again may help."""

    exit_code = 11


class StaleWriteError(CatalogError):
    """Raised when a compare-and-set found another version than the one it was decided on (S1)."""


class TransitionError(CatalogError):
    """Raised when a checkpoint cannot go from the state it is in to the requested one (S1)."""


class LeaseHeldError(CatalogError):
    """Raised when somebody else holds the lease; names the holder and when it ends."""

    exit_code = 11


class CopyRefusedError(CkptError):
    """Raised when a location must not get a copy of a save: it was deleted or aborted there, or another run's is."""

    exit_code = 22


class GuardRefusedError(CkptError):
    """Raised when a guard refuses a destructive step (D5)."""

    exit_code = 22
