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

from enum import IntEnum

import typer


class ExitCode(IntEnum):
    """Exit codes that do not come from an error class."""

    OK = 0
    ERROR = 1
    PARTLY_DONE = 3
    WORK_PENDING = 4
    ACCESS_DENIED = 12
    INTEGRITY_FAILURE = 20
    NO_RESUME_POINT = 21
    CANCELLED = 130


class Ended(Exception):
    """Raised by a verb that has printed its result, and whose result is not success.

    Args:
        code: the exit code.
        reason: one sentence for standard error.
        advice: what to do next, for people.
    """

    def __init__(self, code: ExitCode, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.advice = advice


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
    return None


def _usage(error: typer.TyperException) -> str:
    ctx = getattr(error, "ctx", None)
    message = error.format_message().rstrip(".")
    # Without a message the help was printed instead: nothing was asked for.
    return f"{message} (see '{ctx.command_path} --help')" if message and ctx is not None else message


def _denied(error: BaseException) -> bool:
    """Whether the storage refused access somewhere down the chain of causes."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PermissionError):
            return True
        cause = cause.__cause__
    return False
