"""What the tests rely on from their S3 server: it checks digests and conditions, and refuses what is not allowed."""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.s3_server import S3Server


@pytest.fixture
def client(s3: S3Server) -> Iterator[Any]:
    with contextlib.closing(s3.client()) as made:
        yield made


def code_of(error: pytest.ExceptionInfo[ClientError]) -> str:
    return str(error.value.response["Error"]["Code"])


def digest_of(content: bytes) -> str:
    return base64.b64encode(hashlib.sha256(content).digest()).decode()


def test_a_wrong_digest_is_rejected(client: Any, bucket: str) -> None:
    with pytest.raises(ClientError) as error:
        client.put_object(Bucket=bucket, Key="a", Body=b"x", ChecksumSHA256=digest_of(b"y"))
    assert code_of(error) == "BadDigest"
    client.put_object(Bucket=bucket, Key="a", Body=b"x", ChecksumSHA256=digest_of(b"x"))
    assert client.head_object(Bucket=bucket, Key="a", ChecksumMode="ENABLED")["ChecksumSHA256"] == digest_of(b"x")


def test_a_name_is_created_once(client: Any, bucket: str) -> None:
    client.put_object(Bucket=bucket, Key="a", Body=b"x", IfNoneMatch="*")
    with pytest.raises(ClientError) as error:
        client.put_object(Bucket=bucket, Key="a", Body=b"y", IfNoneMatch="*")
    assert code_of(error) == "PreconditionFailed"


def test_a_bucket_that_does_not_exist_is_not_made(client: Any) -> None:
    with pytest.raises(ClientError) as error:
        client.put_object(Bucket="nowhere", Key="a", Body=b"x")
    assert code_of(error) == "NoSuchBucket"


def test_identities_and_buckets_can_be_restricted(s3: S3Server, client: Any, bucket: str) -> None:
    client.put_object(Bucket=bucket, Key="a", Body=b"x")
    with contextlib.closing(s3.client("reader")) as reader:
        assert reader.get_object(Bucket=bucket, Key="a")["Body"].read() == b"x"
        with pytest.raises(ClientError) as error:
            reader.put_object(Bucket=bucket, Key="b", Body=b"x")
        assert code_of(error) == "AccessDenied"
    with s3.denied(bucket, "s3:GetObject"), pytest.raises(ClientError) as error:
        client.get_object(Bucket=bucket, Key="a")
    assert code_of(error) == "AccessDenied"
    assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == b"x"
