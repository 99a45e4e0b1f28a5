"""``ckpt doctor storage``: stores that keep what they promise, and stores that do not."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckptlib.storage import PosixStorage, s3_settings
from ckptlib.storage.examination import Examination, examine
from tests.support.fault_proxy import FaultProxy
from tests.support.s3_server import S3Server

MIB = 1024 * 1024
CREATE = "of several that create a file, exactly one succeeds"
SWAP = "of several that replace the same content, exactly one succeeds"
SEEN = "others see at once what was written, replaced and removed"
VOUCH = "the store keeps SHA-256 digests that it checked"


def outcomes(found: Examination) -> dict[str, str]:
    """What did not end well."""
    return {finding.promise: finding.outcome for finding in found.findings if finding.outcome != "ok"}


@pytest.mark.parametrize("name", ["posix", "memory"])
def test_what_every_backend_promises_holds_and_nothing_is_left(tmp_path: Path, name: str) -> None:
    url = str(tmp_path / "not there yet") if name == "posix" else f"memory://{uuid.uuid4().hex}"
    found = examine(url, size=2 * MIB)
    assert outcomes(found) == {VOUCH: "limited"}
    assert found.storage == name
    assert found.left == ()
    assert found.write_rate is not None
    assert found.read_rate is not None
    assert list(tmp_path.iterdir()) == []


def test_a_good_s3_store_is_told_from_one_that_ignores_what_it_does_not_know(s3: S3Server, s3_url: str) -> None:
    """W4, V3: through the proxy the same server seems not to know conditions and digests."""
    options = s3.storage_options(part_size=5 * MIB)
    found = examine(s3_url, options, size=11 * MIB)
    assert set(outcomes(found).values()) <= {"limited"}
    assert outcomes(found).keys().isdisjoint({CREATE, SWAP, VOUCH})
    with FaultProxy(s3, lacking=["conditions", "digests"]) as proxy:
        bad = examine(s3_url, {**options, "endpoint_url": proxy.endpoint}, size=11 * MIB)
    assert outcomes(bad)[CREATE] == "unsafe"
    assert outcomes(bad)[SWAP] == "limited"
    assert outcomes(bad)[VOUCH] == "limited"
    assert (found.left, bad.left) == ((), ())


class Forgetful(MemoryFileSystem):  # type: ignore[misc]
    """Trusts listings that it made before, whatever it is told: remote filesystems do, through caches between."""

    protocol = "forgetful"
    cachable = False
    listings: dict[str, Any]

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        known = self.__dict__.setdefault("listings", {})
        if path not in known:
            try:
                known[path] = super().ls(path, detail=True, **kwargs)
            except FileNotFoundError:
                known[path] = []
        return known[path] if detail else [info["name"] for info in known[path]]


@pytest.fixture
def forgetful() -> Iterator[None]:
    fsspec.register_implementation("forgetful", Forgetful, clobber=True)
    yield
    Forgetful.store.clear()


@pytest.mark.usefixtures("forgetful")
def test_stale_listings_and_a_create_that_is_not_exclusive_are_found() -> None:
    """T04."""
    found = examine(f"forgetful://{uuid.uuid4().hex}", size=MIB)
    assert outcomes(found)[SEEN] == "unsafe"
    assert outcomes(found)[CREATE] == "unsafe"
    detail = {finding.promise: finding.detail for finding in found.findings}
    assert "stale" in detail[SEEN]
    assert "single_writer" in detail[CREATE]


# The test server does not apply such a policy to batch deletions.
@pytest.mark.parametrize("action", ["s3:PutObject", "s3:GetObject", "s3:ListBucket"])
def test_a_missing_permission_is_named_and_what_may_remain_is_listed(s3: S3Server, bucket: str, action: str) -> None:
    with s3.denied(bucket, action):
        found = examine(f"s3://{bucket}/run", s3.storage_options(attempts=2), size=MIB)
    details = [finding.detail for finding in found.findings if finding.outcome != "ok"]
    assert any("denied" in detail for detail in details), found.findings
    with closing(s3.client()) as client:
        left = [item["Key"] for item in client.list_objects_v2(Bucket=bucket).get("Contents", ())]
    assert {url.removeprefix(f"s3://{bucket}/") for url in found.left} >= set(left)


def test_a_read_only_place_is_no_defect_of_a_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: PosixStorage, path: str, data: bytes, *, durable: bool = True) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(PosixStorage, "put", refuse)
    found = examine(str(tmp_path), size=MIB)
    assert [finding.outcome for finding in found.findings] == ["failed"]
    assert "Permission denied" in found.findings[0].detail


RULES = {
    "Rules": [
        {"ID": "old", "Status": "Enabled", "Filter": {"Prefix": "runs/"}, "Expiration": {"Days": 30}},
        {"ID": "cold", "Status": "Enabled", "Filter": {"Prefix": ""}, "Transitions": [{"StorageClass": "GLACIER"}]},
        {"ID": "off", "Status": "Disabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 1}},
        {"ID": "tidy", "Status": "Enabled", "Filter": {}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}},
    ]
}


def test_a_rule_that_deletes_checkpoints_is_a_risk_only_where_it_reaches() -> None:
    risks = [text for text, risk in s3_settings.notices("runs/llama", {}, RULES, {}) if risk]
    assert len(risks) == 2
    assert "'old' deletes" in risks[0]
    assert "GLACIER" in risks[1]
    assert [text for text, risk in s3_settings.notices("other", {}, RULES, {}) if "deletes" in text] == []
    assert [text for text, risk in s3_settings.notices("", {}, RULES, {}) if "'old' deletes" in text]


def test_versions_locks_and_missing_rules_are_told() -> None:
    told = s3_settings.notices(
        "runs", {"Status": "Enabled"}, {}, {"ObjectLockConfiguration": {"ObjectLockEnabled": "Enabled"}}
    )
    assert not any(risk for _, risk in told)
    assert [word for word in ("versions", "lock", "unfinished") if any(word in text for text, _ in told)] == [
        "versions",
        "lock",
        "unfinished",
    ]


def test_settings_of_a_real_bucket_are_read(s3: S3Server, bucket: str) -> None:
    with closing(s3.client()) as client:
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
        client.put_bucket_lifecycle_configuration(
            Bucket=bucket,
            LifecycleConfiguration={
                "Rules": [{"ID": "old", "Status": "Enabled", "Filter": {"Prefix": "run"}, "Expiration": {"Days": 3}}]
            },
        )
    found = outcomes(examine(f"s3://{bucket}/runs/a", s3.storage_options(), size=MIB))
    assert [outcome for promise, outcome in found.items() if "'old' deletes" in promise] == ["unsafe"]
    assert [outcome for promise, outcome in found.items() if "old versions" in promise] == ["limited"]
