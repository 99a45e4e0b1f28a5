"""The one place where an error becomes an exit code and a message.

==== ============================================================================
 0   ok
 1   error
 2   usage
 3   partly done
 4   work pending (``ckpt db check``)
10   no catalog, or its schema is not the current one
11   locked: somebody else holds the lease, or the database is busy
12   access denied
20   integrity failure
21   no resume point
22   refused by a guard
130  cancelled
==== ============================================================================
"""

from __future__ import annotations

import sys
from enum import IntEnum

import typer


class ExitCode(IntEnum):
    """Exit codes that do not come from an error class."""

    OK = 0
    ERROR = 1
    PARTLY_DONE = 3
    WORK_PENDING = 4
    LOCKED = 11
    ACCESS_DENIED = 12
    INTEGRITY_FAILURE = 20
    NO_RESUME_POINT = 21
    CANCELLED = 130


class Ended(Exception):
    """Raised by a verb that has printed its result, and whose result is not success.

    Args:
        code: the exit code.
        reason: one sentence for standard error.
    """

    def __init__(self, code: ExitCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def explain(error: BaseException) -> tuple[int, str] | None:
    """Exit code and message of an expected error; None for one that is a defect of this program."""
    from ckptlib.errors import CkptError

    match error:
        case Ended():
            return error.code, error.reason
        case typer.TyperException():
            return error.exit_code, _usage(error)
        case typer.Abort() | KeyboardInterrupt():
            return ExitCode.CANCELLED, "cancelled"
        case CkptError():
            denied = error.exit_code == ExitCode.ERROR and _denied(error)
            return ExitCode.ACCESS_DENIED if denied else error.exit_code, str(error)
        case PermissionError():
            return ExitCode.ACCESS_DENIED, f"access denied: {error}"
        case OSError():
            return ExitCode.ERROR, str(error)
    return _database(error)


def _usage(error: typer.TyperException) -> str:
    ctx = getattr(error, "ctx", None)
    hint = f" (see '{ctx.command_path} --help')" if ctx is not None else ""
    return f"{error.format_message().rstrip('.')}{hint}"


def _denied(error: BaseException) -> bool:
    """Whether the storage refused access somewhere down the chain of causes."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PermissionError):
            return True
        cause = cause.__cause__
    return False


def _database(error: BaseException) -> tuple[int, str] | None:
    """Errors of the database itself. SQLAlchemy is only looked at when something has imported it."""
    exceptions = sys.modules.get("sqlalchemy.exc")
    if exceptions is None or not isinstance(error, exceptions.SQLAlchemyError):
        return None
    message = str(getattr(error, "orig", None) or error).strip()
    if "locked" in message:
        return ExitCode.LOCKED, f"the catalog database is busy: {message}. Try again."
    return ExitCode.ERROR, f"the catalog database failed: {message}"
