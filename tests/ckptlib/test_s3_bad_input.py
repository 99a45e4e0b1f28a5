"""Buckets that are not there, permissions that are missing, odd names and settings: what a user of S3 is told."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib import Checkpointer, storage
from ckptlib.errors import CkptError, StorageError
from ckptlib.storage import join
from tests.support.fault_proxy import FaultProxy
from tests.support.faults import Fault
from tests.support.roots import small_state
from tests.support.s3_server import S3Server
from tests.support.trees import assert_same, blanked

PART = 5 << 20


def save(url: str, options: dict[str, Any], fill: float = 1.0, **more: Any) -> Any:
    return ckptlib.save(small_state(fill), url, iteration=1, storage_options=options, **more)


def load(url: str, options: dict[str, Any]) -> dict[str, Any]:
    state = blanked(small_state())
    ckptlib.load(state, url, storage_options=options)
    return state


def verify(url: str, options: dict[str, Any]) -> Any:
    return ckptlib.verify(url, storage_options=options)


def test_a_bucket_that_does_not_exist_is_named(s3: S3Server) -> None:
    url, options = "s3://nowhere-4711/run/iter_0000001", s3.storage_options()
    for act in (save, load):
        with pytest.raises(StorageError, match=r"s3://nowhere-4711/run.*no such bucket"):
            act(url, options)
    report = verify(url, options)
    assert (report.unreadable, report.corrupt) == (True, False)
    assert "no such bucket" in str(report.problems)


@pytest.mark.parametrize(
    ("action", "acts"), [("s3:PutObject", [save]), ("s3:GetObject", [load]), ("s3:ListBucket", [save, load])]
)
def test_a_permission_that_is_missing_is_told_with_the_object(
    s3: S3Server, bucket: str, action: str, acts: list[Callable[..., Any]]
) -> None:
    """Each alone; nothing that could be done before is spoilt, and nothing is called corrupt for it (V2)."""
    url, options = f"s3://{bucket}/run/iter_0000001", s3.storage_options()
    save(url, options)
    with s3.denied(bucket, action):
        for act in acts:
            with pytest.raises((PermissionError, CkptError), match="access denied") as caught:
                act(url if act is not save else f"s3://{bucket}/run/iter_0000002", options)
            assert f"s3://{bucket}/run/" in str(caught.value)
            assert s3.secret not in str(caught.value)
        if load in acts:
            report = verify(url, options)
            assert (report.unreadable, report.corrupt) == (True, False)
            assert f"s3://{bucket}/run/" in str(report.problems)
            assert "access denied" in str(report.problems)
    assert verify(url, options).ok
    assert_same(load(url, options), small_state(1.0))


def test_whoever_may_only_read_loads_and_verifies(s3: S3Server, s3_url: str) -> None:
    save(s3_url, s3.storage_options())
    reader = s3.storage_options("reader")
    assert_same(load(s3_url, reader), small_state(1.0))
    assert verify(s3_url, reader).ok
    with pytest.raises((PermissionError, CkptError), match="access denied"):
        save(f"{s3_url}/other", reader)
    store, path = storage.resolve(s3_url, reader)
    [name] = [entry.name for entry in store.list(path) if entry.name.endswith(".distcp")]
    failures = store.remove_each([join(path, name), join(path, "absent")])
    assert isinstance(failures[join(path, name)], PermissionError)
    assert verify(s3_url, reader).ok


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3) as running:
        yield running


def test_whoever_may_not_delete_saves_all_the_same(s3: S3Server, s3_url: str, proxy: FaultProxy) -> None:
    """What cannot go stays, and the save is committed."""
    proxy.faults = [Fault("forbidden", "DeleteObject*", times=None)]
    options = s3.storage_options(endpoint=proxy.endpoint)
    save(s3_url, options)
    assert proxy.faults[0].struck
    assert verify(s3_url, options).ok
    assert_same(load(s3_url, options), small_state(1.0))


def test_a_token_that_expires_during_a_save_fails_it_and_the_next_one_succeeds(
    s3: S3Server, s3_url: str, proxy: FaultProxy
) -> None:
    """The older checkpoint stays the one that is loaded."""
    options = s3.storage_options(endpoint=proxy.endpoint, attempts=2)
    with Checkpointer(s3_url, run="run", storage_options=options) as checkpointer:
        checkpointer.save(small_state(1.0), iteration=10)
        proxy.forget()
        proxy.faults = [Fault("expired_token", "PutObject", key="*.distcp", times=None)]
        with pytest.raises((PermissionError, CkptError), match="credentials have expired"):
            checkpointer.save(small_state(2.0), iteration=20)
        proxy.faults = []
        found = blanked(small_state())
        checkpointer.save(small_state(3.0), iteration=30)
    with Checkpointer(s3_url, run="run", storage_options=options) as again:
        assert again.restore(found).iteration == 30
    assert_same(found, small_state(3.0))


@pytest.mark.parametrize(
    ("name", "slashes"), [("a b/ünïcode №", "//"), ("#hash?query%20", "/"), ("a+b&c='\"" + "x" * 150, "")]
)
def test_a_run_may_have_any_name(s3: S3Server, shared_bucket: str, s3_url: str, name: str, slashes: str) -> None:
    """With one slash at the end, or too many anywhere."""
    url = f"{s3_url}/{slashes}{name}/{slashes}iter_0000001{slashes}"
    save(url, s3.storage_options())
    plain = f"{s3_url}/{name}/iter_0000001"
    assert_same(load(plain, s3.storage_options()), small_state(1.0))
    assert verify(plain, s3.storage_options()).ok
    store, path = storage.resolve(s3_url, s3.storage_options())
    assert [entry.name for entry in store.list(path)] == [name.split("/")[0]]


def test_an_endpoint_by_name_that_knows_only_paths(s3: S3Server, s3_url: str) -> None:
    options = s3.storage_options(endpoint=s3.endpoint.replace("127.0.0.1", "localhost"), addressing_style="path")
    save(s3_url, options)
    assert_same(load(s3_url, options), small_state(1.0))


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_an_endpoint_where_nobody_answers_is_named(s3: S3Server, s3_url: str, endpoint: str) -> None:
    options = s3.storage_options(endpoint=endpoint, attempts=2)
    with pytest.raises(StorageError, match=endpoint):
        save(s3_url, options)


def test_credentials_that_are_wrong_or_missing_are_told_and_never_shown(s3: S3Server, s3_url: str) -> None:
    for options, reason in (
        ({"secret": "mistyped-secret"}, "check key, secret and token"),
        ({"key": "AKIAUNKNOWN"}, "check key, secret and token"),
        ({"key": None, "secret": None}, "credentials"),
    ):
        with pytest.raises((PermissionError, CkptError), match=reason) as caught:
            save(s3_url, s3.storage_options(**options))
        assert "mistyped-secret" not in f"{caught.value} {caught.value!r}"
        assert s3.secret not in f"{caught.value} {caught.value!r}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"part_sise": 1}, "part_sise"),
        ({"part_size": -1}, "part_size is -1"),
        ({"timeout": 0}, "timeout is 0"),
        ({"profile": "nobody"}, "nobody"),
        ({"key": "a", "aws_access_key_id": "b"}, "the same option"),
    ],
)
def test_options_that_make_no_sense_are_named(s3: S3Server, s3_url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, StorageError), match=message):
        save(s3_url, {**s3.storage_options(), **options})


def test_a_bucket_with_versions_is_used_as_any_other(s3: S3Server, bucket: str) -> None:
    """What was removed is gone for us: the store hides it behind a marker."""
    with contextlib.closing(s3.client()) as client:
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
        url, options = f"s3://{bucket}/run", s3.storage_options()
        save(url, options)
        save(url, options, fill=2.0, on_exists="replace")
        assert_same(load(url, options), small_state(2.0))
        assert verify(url, options).ok
        store, path = storage.resolve(url, options)
        store.create(join(path, "decision"), b"one")
        store.remove([join(path, "decision")])
        assert store.stat(join(path, "decision")) is None
        store.create(join(path, "decision"), b"two")
        assert client.list_object_versions(Bucket=bucket, Prefix="run/decision")["DeleteMarkers"]
        assert store.get(join(path, "decision")) == b"two"


def test_a_bucket_that_locks_objects_is_saved_to(s3: S3Server) -> None:
    """Nothing that was written can be changed for a day, so what a save would remove stays as a version."""
    with s3.bucket(ObjectLockEnabledForBucket=True) as bucket, contextlib.closing(s3.client()) as client:
        rule = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}
        client.put_object_lock_configuration(
            Bucket=bucket, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule}
        )
        url, options = f"s3://{bucket}/run", s3.storage_options()
        save(url, options)
        assert verify(url, options).ok
        save(url, options, fill=2.0, on_exists="replace")
        assert_same(load(url, options), small_state(2.0))
        versions = client.list_object_versions(Bucket=bucket)
        for entry in [*versions.get("Versions", []), *versions.get("DeleteMarkers", [])]:
            client.delete_object(
                Bucket=bucket, Key=entry["Key"], VersionId=entry["VersionId"], BypassGovernanceRetention=True
            )


def test_what_a_lifecycle_rule_removes_is_missing_not_corrupt(s3: S3Server, s3_url: str) -> None:
    """V2: objects that went by themselves; a rule is carried out once a day, so the test does it."""
    save(s3_url, s3.storage_options())
    store, path = storage.resolve(s3_url, s3.storage_options())
    [data] = [entry.name for entry in store.list(path) if entry.name.endswith(".distcp")]
    store.remove([join(path, data)])
    report = verify(s3_url, s3.storage_options())
    assert not report.ok
    assert f"{data}" in str(report.problems)
    with pytest.raises((CkptError, OSError), match=data):
        load(s3_url, s3.storage_options())


def test_empty_tensors_and_files_are_kept(s3: S3Server, s3_url: str) -> None:
    state = {"none": torch.zeros(0, 4), "w": torch.ones(3), "text": ""}
    ckptlib.save(state, s3_url, iteration=0, storage_options=s3.storage_options())
    found = {"none": torch.ones(0, 4), "w": torch.zeros(3), "text": "other"}
    ckptlib.load(found, s3_url, storage_options=s3.storage_options())
    assert_same(found, state)
    store, path = storage.resolve(s3_url, s3.storage_options())
    store.open_write(join(path, "0 bytes")).finish()
    assert store.stat(join(path, "0 bytes")) == 0
    assert store.get(join(path, "0 bytes")) == b""


def test_an_object_of_more_parts_than_the_store_takes_is_refused_by_name(s3: S3Server, s3_url: str) -> None:
    """And what was sent of it is not left there."""
    store, path = storage.resolve(s3_url, s3.storage_options(part_size=PART, max_parts=2, concurrency=2))
    stream = store.open_write(join(path, "file"))
    with pytest.raises(StorageError, match=r"/file: more than 2 parts; raise part_size"):
        stream.write(os.urandom(10 * PART))
    stream.abort()
    assert store.stat(join(path, "file")) is None
    assert store.unfinished(path) == []


def test_the_user_s_own_settings_are_taken(
    s3: S3Server, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environment variables, or a profile in the shared file; no `storage_options` at all."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    save(f"{s3_url}/environment", {})
    for name in s3.environment():
        monkeypatch.delenv(name)
    credentials = tmp_path / "credentials"
    credentials.write_text(
        f"[team]\naws_access_key_id = {s3.keys['admin']}\naws_secret_access_key = {s3.secret}\nregion = us-east-1\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    save(f"{s3_url}/profile", {"profile": "team", "endpoint_url": s3.endpoint})
    assert verify(f"{s3_url}/environment", s3.storage_options()).ok
    assert verify(f"{s3_url}/profile", s3.storage_options()).ok
