"""What the errors of S3 clients and stores mean, as the errors that storages raise. Pure.

An error names what was done and to what; never a credential: only the store's code and message are repeated, and what
the client says of its own.
"""

from __future__ import annotations

import errno
from typing import Any

from ckptlib.errors import StorageError, StorageTimeoutError, StorageUnavailableError

MISSING = frozenset({"NoSuchKey", "404", "NotFound", "NoSuchVersion"})
CHANGED = frozenset({"PreconditionFailed", "412"})
BUSY = frozenset(
    {
        "SlowDown", "SlowDownRead", "SlowDownWrite", "503", "ServiceUnavailable", "Throttling", "ThrottlingException",
        "429", "TooManyRequests", "RequestLimitExceeded", "InternalError",
    }
)  # fmt: skip
DAMAGED = frozenset(
    {"BadDigest", "InvalidDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}
)
"""What arrived is not what was sent."""

_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 509})
_PASSING = frozenset({"RequestTimeout", "RequestTimeoutException", "ConditionalRequestConflict", "OperationAborted"})

_EXPIRED = "the credentials have expired; give new ones, or a source that renews them"
_WRONG = "check key, secret and token"
_DENIED = "access denied; without s3:ListBucket a name that does not exist looks the same"
_REGION = "the bucket is in another region or behind another endpoint; check region_name and endpoint_url"

_PERMISSION = {
    "AccessDenied": _DENIED,
    "403": f"{_DENIED}, and so does a clock that is wrong",
    "Forbidden": _DENIED,
    "AllAccessDisabled": _DENIED,
    "InvalidAccessKeyId": _WRONG,
    "SignatureDoesNotMatch": _WRONG,
    "InvalidToken": _WRONG,
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "RequestExpired": _EXPIRED,
}

_OTHER: dict[str, tuple[type[StorageError], int, str]] = {
    "NoSuchBucket": (StorageUnavailableError, errno.ENXIO, "there is no such bucket"),
    "AuthorizationHeaderMalformed": (StorageUnavailableError, errno.EREMOTE, _REGION),
    "PermanentRedirect": (StorageUnavailableError, errno.EREMOTE, _REGION),
    "TemporaryRedirect": (StorageUnavailableError, errno.EREMOTE, _REGION),
    "IllegalLocationConstraintException": (StorageUnavailableError, errno.EREMOTE, _REGION),
    "301": (StorageUnavailableError, errno.EREMOTE, _REGION),
    "307": (StorageUnavailableError, errno.EREMOTE, _REGION),
    "RequestTimeTooSkewed": (
        StorageError,
        errno.EINVAL,
        "the clocks of this host and of the store differ too much; set this host's",
    ),
    "InvalidRange": (StorageError, errno.EIO, "the object ends before that"),
    "416": (StorageError, errno.EIO, "the object ends before that"),
    "QuotaExceeded": (StorageError, errno.EDQUOT, "no space"),
    "XMinioStorageFull": (StorageError, errno.ENOSPC, "no space"),
    "InsufficientStorage": (StorageError, errno.ENOSPC, "no space"),
    "507": (StorageError, errno.ENOSPC, "no space"),
    "EntityTooLarge": (StorageError, errno.EFBIG, "too large for one request"),
    "EntityTooSmall": (StorageError, errno.EINVAL, "parts are too small for this store; raise part_size"),
    "NoSuchUpload": (
        StorageError,
        errno.ECANCELED,
        "the upload is not there any more: a cleanup, a lifecycle rule or another writer ended it",
    ),
    "400": (
        StorageError,
        errno.EINVAL,
        "the store gave no reason; expired credentials and a wrong region are answered so",
    ),
    **dict.fromkeys(BUSY, (StorageError, errno.EAGAIN, "the store is too busy, or broke down")),
    **dict.fromkeys(DAMAGED, (StorageError, errno.EIO, "what arrived was not what was sent")),
}


class Refusal(Exception):
    """An error that came for one object in an answer for many.

    Args:
        item: as the store says it: Code, Message.
    """

    def __init__(self, item: dict[str, Any]) -> None:
        super().__init__(item.get("Message", ""))
        self.response = {"Error": item}


class InterruptedBodyError(Exception):
    """Raised while the body of an answer is read and the connection breaks: ask again, from there on."""


def code_of(error: BaseException | None) -> str:
    """The store's own code of an error, or of what caused it; a status where it gave none; empty: not the store's."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return str(
            response.get("Error", {}).get("Code") or response.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
        )
    cause = getattr(error, "__cause__", None)
    return "" if cause is None else code_of(cause)


def is_passing(error: Exception) -> bool:
    """Whether the same request may succeed a moment later.

    The store is busy or broke down, a connection failed or was never made, what was sent or received came damaged, or
    another conditional write of the same name was under way; whose it is, the next try tells.
    """
    from botocore import exceptions as boto
    from urllib3.exceptions import HTTPError

    if isinstance(error, boto.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return code_of(error) in BUSY | DAMAGED | _PASSING or status in _PASSING_STATUS
    if isinstance(error, boto.SSLError):
        return "certificate" not in str(error).lower()  # which is as wrong the next time; a cut handshake is not
    return isinstance(error, _unreached() | HTTPError | boto.CredentialRetrievalError | InterruptedBodyError)


def _unreached() -> Any:
    """Kinds of errors of connections: that could not be made, and that broke."""
    from botocore import exceptions as boto

    return boto.HTTPClientError | boto.ConnectionError


def note_repetition(error: OSError) -> None:
    """The request that failed so had been sent before."""
    error.repeated = True  # type: ignore[attr-defined]


def was_repeated(error: OSError) -> bool:
    """Whether a request that failed had been sent before: then an earlier one may have been carried out."""
    return getattr(error, "repeated", False)


def translate(error: Exception, what: str, url: str, *, attempts: int, timeout: float) -> OSError:
    """The error that a storage raises for one of the client's.

    Args:
        what: was done, for people; to `url`.
        attempts, timeout: how often it was tried, seconds for each answer.

    Returns:
        `FileNotFoundError`, `FileExistsError`, `PermissionError`, `StorageTimeoutError`, `StorageUnavailableError` (no
        such bucket, another region, nobody answers), or another `StorageError`.
    """
    from botocore import exceptions as boto

    code = code_of(error)
    if code in MISSING:
        return FileNotFoundError(errno.ENOENT, f"{what}: no such object", url)
    if code in CHANGED:
        return FileExistsError(errno.EEXIST, f"{what}: it exists, or was changed", url)
    if code in _PERMISSION:
        return PermissionError(errno.EACCES, f"{what}: {_PERMISSION[code]} ({code}: {_said(error)})", url)
    subject = f"{url}: {what}"
    if code in _OTHER:
        kind, number, meaning = _OTHER[code]
        return kind(number, f"{subject}: {meaning} ({code}: {_said(error)})")
    if code:
        return StorageError(errno.EIO, f"{subject}: {code}: {_said(error)}")
    tries = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    if isinstance(error, boto.ReadTimeoutError):
        return StorageTimeoutError(errno.ETIMEDOUT, f"{subject}: no answer within {timeout:g} s, {tries}")
    if isinstance(error, boto.ConnectTimeoutError):
        return StorageTimeoutError(errno.ETIMEDOUT, f"{subject}: {error}, {tries}")
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.CredentialRetrievalError):
        return PermissionError(errno.EACCES, f"{what}: {error}", url)
    if isinstance(error, _unreached()):
        return StorageUnavailableError(errno.EHOSTUNREACH, f"{subject}: {error}, {tries}")
    return StorageError(errno.EIO, f"{subject}: {error}")


def _said(error: Exception) -> str:
    response = getattr(error, "response", None)
    said = response.get("Error", {}).get("Message") if isinstance(response, dict) else None
    return str(said or "no reason was given")
