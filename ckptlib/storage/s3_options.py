"""What `storage_options` mean for S3: the names of boto3, and those that users of s3fs know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ckptlib.storage import s3_parts

IGNORED = frozenset({"use_listings_cache", "skip_instance_cache", "listings_expiry_time", "max_paths", "asynchronous"})
"""Options of fsspec about caches that this storage does not have."""

_SAME = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
    "profile_name": "profile",
    "region": "region_name",
}

_EXTRAS = frozenset(
    {
        "ServerSideEncryption", "SSEKMSKeyId", "SSEKMSEncryptionContext", "BucketKeyEnabled", "StorageClass", "ACL",
        "Tagging", "ExpectedBucketOwner",
    }
)  # fmt: skip
"""Parameters of requests that write; credentials of SSE-C would have to go with every read too."""


@dataclass(frozen=True)
class S3Options:
    """How to reach a store and what to ask of it. What is None comes from boto3: environment, profile, instance role.

    Attributes:
        aws_access_key_id, aws_secret_access_key, aws_session_token, profile, region_name: as boto3 names them.
        endpoint_url: of a store that is not AWS.
        anon: requests are not signed.
        verify: TLS: False, or a path of certificates.
        addressing_style: ``path``, ``virtual`` or ``auto``.
        requester_pays: whoever asks pays.
        s3_additional_kwargs: parameters of every write: ServerSideEncryption, SSEKMSKeyId, StorageClass, ...
        client_kwargs: of boto3's ``client``; config_kwargs: of botocore's ``Config``, but ``retries``: see `attempts`.
        part_size: bytes of a part of an upload, at least.
        max_parts: parts that the store takes per object.
        concurrency: requests in flight, per process.
        timeout: seconds that an answer may take before the request is sent again.
        attempts: how often a request is sent, at most.
    """

    aws_access_key_id: str | None = None
    aws_secret_access_key: str | None = field(default=None, repr=False)
    aws_session_token: str | None = field(default=None, repr=False)
    profile: str | None = None
    region_name: str | None = None
    endpoint_url: str | None = None
    anon: bool = False
    verify: bool | str | None = None
    addressing_style: str | None = None
    requester_pays: bool = False
    s3_additional_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    client_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    config_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    part_size: int = s3_parts.PART_BYTES
    max_parts: int = s3_parts.MAX_PARTS
    concurrency: int = 8
    timeout: float = 60.0
    attempts: int = 5

    @classmethod
    def parse(cls, options: Mapping[str, Any], configured: Mapping[str, Any] | None = None) -> S3Options:
        """Reads `storage_options`.

        Args:
            configured: fsspec's configuration, for what is not given; options in it that are others' are passed over.

        Raises:
            ValueError: an option that is not known, given twice, or out of range. Its value is not repeated.
        """
        known = {member.name for member in fields(cls)}
        values: dict[str, Any] = {}
        for given, value in options.items():
            if given in IGNORED:
                continue
            name = _SAME.get(given, given)
            if name not in known:
                raise ValueError(
                    f"storage_options: {given!r} is not known for s3://; known are {', '.join(sorted(known))}"
                )
            if name in values:
                raise ValueError(f"storage_options: {given!r} and {name!r} are the same option")
            values[name] = value
        for given, value in (configured or {}).items():
            if (name := _SAME.get(given, given)) in known:
                values.setdefault(name, value)
        for name in ("s3_additional_kwargs", "client_kwargs", "config_kwargs"):
            values[name] = dict(values.get(name) or {})
        parsed = cls(**values)
        parsed._check()
        return parsed

    def _check(self) -> None:
        for url in (self.endpoint_url, self.client_kwargs.get("endpoint_url")):
            if url and "@" in str(url).split("://", 1)[-1].split("/", 1)[0]:
                raise ValueError("storage_options: endpoint_url holds a user; give key and secret instead")
        if unknown := self.s3_additional_kwargs.keys() - _EXTRAS:
            raise ValueError(
                f"storage_options: s3_additional_kwargs has {', '.join(sorted(unknown))}; "
                f"known are {', '.join(sorted(_EXTRAS))}"
            )
        for name, least in (
            ("part_size", s3_parts.MIN_PART_BYTES),
            ("max_parts", 2),
            ("concurrency", 1),
            ("attempts", 1),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"storage_options: {name} is {value!r}; expected a whole number, {least} or more")
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"storage_options: timeout is {self.timeout!r}; expected seconds, more than 0")

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for options that mean the same."""

        def freeze(value: Any) -> Any:
            if isinstance(value, Mapping):
                return tuple(sorted((name, freeze(member)) for name, member in value.items()))
            return repr(value) if isinstance(value, (list, set, dict)) else value

        return tuple(freeze(getattr(self, member.name)) for member in fields(self))
