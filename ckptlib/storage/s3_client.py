"""The boto3 client of a process, and requests that are sent again.

A client is made once per process and options, and never used in a forked child of the process that made it: sockets and
TLS would be shared. Requests are repeated here, not by botocore: its ``standard`` mode stops to repeat anything once a
hundred requests of a process have failed, which a store that is busy for a minute makes of a save with many parts.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ckptlib.errors import StorageUnavailableError
from ckptlib.storage.s3_errors import BUSY, InterruptedBodyError, code_of, is_passing, note_repetition, translate
from ckptlib.storage.s3_options import S3Options

log = logging.getLogger("ckptlib")

MAX_CONNECTIONS = 16
"""That are kept for other options than the last ones: whoever passes tokens that rotate makes many."""

CONNECT_SECONDS = 20.0
"""For a connection to be made, and for every MiB of a body to be taken."""


@dataclass
class Connection:
    """A client, its threads, and what was found out about the store. Shared by all storages with the same options.

    Attributes:
        facts: answers of probes, by bucket and question (`s3_probe`).
        is_aws: it is Amazon's own: what is documented need not be probed.
        has_credentials: or needs none.
    """

    client: Any
    options: S3Options
    threads: ThreadPoolExecutor
    is_aws: bool
    has_credentials: bool
    facts: dict[tuple[str, str], bool] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def translate(self, error: Exception, what: str, url: str, attempts: int = 1) -> OSError:
        """See `s3_errors.translate`."""
        return translate(error, what, url, attempts=attempts, timeout=self.options.timeout)


_connections: dict[tuple[Any, ...], Connection] = {}
_lock = threading.Lock()


def _forget_all() -> None:
    global _lock
    _lock = threading.Lock()
    _connections.clear()


os.register_at_fork(after_in_child=_forget_all)


def connect(options: S3Options) -> Connection:
    """The connection of this process for these options.

    Raises:
        StorageError: boto3 cannot make a client from them (no region, unknown profile, ...).
    """
    with _lock:
        connection = _connections.pop(options.identity, None) or _connect(options)
        if connection.has_credentials:  # they may come later, and a client does not look again
            _connections[options.identity] = connection  # the last one used is the last one to go
        while len(_connections) > MAX_CONNECTIONS:
            _connections.pop(next(iter(_connections))).threads.shutdown(wait=False)
        return connection


def _connect(options: S3Options) -> Connection:
    import boto3
    import botocore
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    s3: Any = {
        # The digest header is signed and covers the body: hashing it again for the signature only costs.
        "payload_signing_enabled": False,
    }
    if options.addressing_style is not None:
        s3["addressing_style"] = options.addressing_style
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=options.timeout,
        retries={"total_max_attempts": 1},  # see `ask`
        max_pool_connections=options.concurrency + 8,
        tcp_keepalive=True,
        # Stores that do not know the checksum trailers that are the default elsewhere, store them in the object.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra="ckptlib",
        s3=s3,
    )
    if options.anon:
        config = config.merge(Config(signature_version=botocore.UNSIGNED))
    if options.config_kwargs:
        given = {name: value for name, value in options.config_kwargs.items() if name != "retries"}  # see `ask`
        given["s3"] = {**s3, **(given.get("s3") or {})}
        config = config.merge(Config(**given))
    try:
        session = boto3.Session(
            aws_access_key_id=options.aws_access_key_id,
            aws_secret_access_key=options.aws_secret_access_key,
            aws_session_token=options.aws_session_token,
            profile_name=options.profile,
        )
        arguments = {"region_name": options.region_name, "endpoint_url": options.endpoint_url, "verify": options.verify}
        arguments = {name: value for name, value in arguments.items() if value is not None}
        client = session.client("s3", config=config, **{**arguments, **options.client_kwargs})
    except (BotoCoreError, ValueError, TypeError) as error:
        raise StorageUnavailableError(errno.EINVAL, f"no S3 client can be made from the options: {error}") from error
    client.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
    return Connection(
        client=client,
        options=options,
        threads=ThreadPoolExecutor(options.concurrency, thread_name_prefix="ckptlib-s3"),
        is_aws=is_aws(client.meta.endpoint_url),
        has_credentials=options.anon or session.get_credentials() is not None,
    )


_REGION = r"[a-z]{2}(-[a-z]+)+-\d+"
_AWS = re.compile(
    rf"(.+\.)?s3(-fips|-accelerate|-{_REGION})?(\.dualstack)?(\.{_REGION})?(\.vpce)?\.amazonaws\.com(\.cn)?"
)


def is_aws(endpoint_url: str) -> bool:
    """Whether an endpoint is Amazon S3 itself, and not just a host of Amazon's, behind which anything may run."""
    return _AWS.fullmatch(urlsplit(endpoint_url).hostname or "") is not None


def _add_md5(params: dict[str, Any], **kwargs: Any) -> None:
    """Many stores want the older Content-MD5 for a batch deletion, which botocore does not send any more."""
    body = params.get("body") or b""
    body = body.encode() if isinstance(body, str) else body
    params["headers"]["Content-MD5"] = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def ask(connection: Connection, what: str, url: str, request: Callable[[], Any]) -> Any:
    """Sends a request, repeats it where that may help, and turns errors into those that storages raise.

    Args:
        what: is done, for people: ``upload of part 3``.
        url: to what.
        request: called for every try.

    Raises:
        OSError: see `s3_errors.translate`; `was_repeated` tells whether an earlier try may have been carried out.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    attempts = connection.options.attempts
    for attempt in range(1, attempts + 1):
        try:
            return request()
        except (ClientError, BotoCoreError, HTTPError, InterruptedBodyError) as error:
            if attempt == attempts or not is_passing(error):
                failure = connection.translate(error, what, url, attempt)
                if attempt > 1:
                    note_repetition(failure)
                raise failure from error
            log.info("%s: %s: %s; once more", url, what, code_of(error) or error)
            time.sleep(backoff(attempt, busy=code_of(error) in BUSY))
    raise AssertionError("attempts are at least one")


def backoff(attempt: int, *, busy: bool) -> float:
    """Seconds to wait after so many tries, with jitter: many ranks were refused at the same moment."""
    longest: float = min(20.0, (0.2 if busy else 0.05) * 2**attempt)
    return random.uniform(0.5, 1) * longest
