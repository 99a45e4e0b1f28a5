"""What networks, load balancers and stores do wrong, and to which request."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Literal

ERRORS = {
    "slow_down": (503, "SlowDown", "Please reduce your request rate."),
    "internal_error": (500, "InternalError", "We encountered an internal error. Please try again."),
    "request_timeout": (400, "RequestTimeout", "Your socket connection was not read from within the timeout period."),
    "skewed": (403, "RequestTimeTooSkewed", "The difference between the request time and the server's is too large."),
    "expired_token": (400, "ExpiredToken", "The provided token has expired."),
    "forbidden": (403, "AccessDenied", "Access Denied"),
    "moved": (301, "PermanentRedirect", "The bucket must be addressed using the specified endpoint."),
    "wrong_region": (400, "AuthorizationHeaderMalformed", "The region 'us-east-1' is wrong; expecting 'eu-west-1'"),
    "conflict": (409, "ConditionalRequestConflict", "A conflicting operation is in progress; try again."),
    "no_such_upload": (404, "NoSuchUpload", "The specified upload does not exist."),
}
"""Answers in the server's place: it never sees the request."""

Kind = Literal[
    "slow_down", "internal_error", "request_timeout", "skewed", "expired_token", "forbidden", "moved", "wrong_region",
    "conflict", "no_such_upload",
    "cut_before",       # the connection breaks before the server has the request
    "cut_upload",       # in the middle of its body
    "cut_after",        # once the server has done it: the response is lost
    "error_after",      # the same, and a 500 instead
    "error_in_200",     # the same, and a 200 whose body is an error, as S3 may answer to a completion or a copy
    "cut_download",     # in the middle of the response's body
    "short_download",   # a well-formed response with half of the body
    "flip_upload",      # one byte of the request's body changes; the signature is not of the body, as over TLS
    "flip_download",    # one byte of the response's body changes
    "delay",            # everything passes, late
    "hang",             # never answered; the server does not see it
    "hang_after",       # never answered, but done
]  # fmt: skip

Lacking = Literal["digests", "conditions", "conditions_of_completion"]
"""What a store may silently ignore: digests of content other than the old Content-MD5, which it then demands; all
conditions, or only those that are sent at the end of a multipart upload (Ceph of 2021)."""


class Turns:
    """Which of the calls that fit are struck: `times` in a row, after the first `skip`."""

    operation: str
    key: str
    skip: int
    times: int | None
    seen: int

    def strikes(self, operation: str, key: str) -> bool:
        """Whether this call is one of those; counts it."""
        if not (fnmatch.fnmatchcase(operation, self.operation) and fnmatch.fnmatchcase(key, self.key)):
            return False
        self.seen += 1
        return self.seen > self.skip and (self.times is None or self.seen <= self.skip + self.times)

    @property
    def struck(self) -> int:
        """How often it has happened."""
        done = max(0, self.seen - self.skip)
        return done if self.times is None else min(done, self.times)


@dataclass
class Fault(Turns):
    """One thing that goes wrong with a request.

    Attributes:
        operation: pattern of the API's names: ``PutObject``, ``Upload*``, ``*``.
        key: pattern of keys.
        skip: so many requests that fit pass before the first that does not.
        times: so many in a row; None: all from there on.
        seconds: of a delay.
    """

    kind: Kind
    operation: str = "*"
    key: str = "*"
    skip: int = 0
    times: int | None = 1
    seconds: float = 0.02
    seen: int = 0
