"""T09, T11: on a remote storage, what a run was resumed from stays, and nothing is published before it is durable."""

from __future__ import annotations

import os
import signal
from typing import Any, Literal
from unittest import mock

import pytest
import torch

from ckptlib import Checkpointer, roots, storage, verify
from ckptlib.errors import CkptError
from ckptlib.storage import Written, join
from ckptlib.storage.s3 import S3Storage
from ckptlib.storage.s3_parts import Body
from ckptlib.storage.s3_upload import S3WriteStream, Sent
from tests.support.fault_proxy import FaultProxy
from tests.support.faults import Fault
from tests.support.ranks import try_ranks
from tests.support.roots import small_state
from tests.support.s3_server import S3Server
from tests.support.trees import assert_same, blanked

NP: Literal["non_persistent_global"] = "non_persistent_global"


def committed(url: str, options: dict[str, Any]) -> set[int]:
    return {f.iteration for f in roots.scan(*storage.resolve(url, options)).found if f.state == "committed"}


def test_t09_what_a_run_resumed_from_survives_until_a_newer_one_is_verified(s3: S3Server, s3_url: str) -> None:
    """D2: one non-persistent checkpoint is kept, and what the tracker names; whoever verifies moves that."""
    with FaultProxy(s3) as proxy:
        options = s3.storage_options(endpoint=proxy.endpoint, attempts=2)
        store, root = storage.resolve(s3_url, options)
        with Checkpointer(s3_url, run="run", storage_options=options) as first:
            first.save(small_state(1.0), iteration=10, kind=NP)
        with Checkpointer(s3_url, run="run", storage_options=options, tracker="verified") as second:
            found = blanked(small_state())
            assert second.restore(found).iteration == 10
            proxy.faults = [Fault("forbidden", "PutObject", key="*decision.json", times=None)]
            with pytest.raises((CkptError, OSError), match="access denied"):
                second.save(small_state(2.0), iteration=20, kind=NP)
            proxy.faults = []
            assert committed(s3_url, options) == {10}
            for iteration in (30, 40):
                second.save(small_state(float(iteration)), iteration=iteration, kind=NP)
                assert committed(s3_url, options) == {10, iteration}
            assert verify(f"{s3_url}/{roots.NON_PERSISTENT}/iter_0000040", storage_options=options).ok
            roots.put_tracker(store, root, 40, NP)
            second.save(small_state(50.0), iteration=50, kind=NP)
            assert committed(s3_url, options) == {40, 50}


def large_state(iteration: int) -> dict[str, Any]:
    return {"w": torch.full((1_500_000,), float(iteration))}


def train_until(rank: int, url: str, options: dict[str, Any], moment: str) -> None:
    """Commits iteration 10, and is killed while it saves 20."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    finish, send, create = S3WriteStream.finish, S3WriteStream._send_part, S3Storage.create

    def send_part(stream: S3WriteStream, number: int, body: Body) -> Sent:
        if moment == "second part" and number:
            die()
        return send(stream, number, body)

    def finish_file(stream: S3WriteStream) -> Written:
        written = finish(stream)
        if moment == "last shard":
            die()
        return written

    def create_file(store: S3Storage, path: str, data: bytes) -> None:
        if moment == "decision" and path.endswith("decision.json"):
            die()
        create(store, path, data)

    with Checkpointer(url, run="run", storage_options=options) as checkpointer:
        checkpointer.save(large_state(10), iteration=10)
        with (
            mock.patch.object(S3WriteStream, "_send_part", send_part),
            mock.patch.object(S3WriteStream, "finish", finish_file),
            mock.patch.object(S3Storage, "create", create_file),
        ):
            checkpointer.save(large_state(20), iteration=20)


@pytest.mark.parametrize(
    ("moment", "resumed"),
    [
        ("second part", 10),
        *(pytest.param(*late, marks=pytest.mark.deep) for late in (("last shard", 10), ("decision", 20))),
    ],
)
def test_t11_a_trainer_that_is_killed_before_its_commit_has_published_nothing(
    s3: S3Server, s3_url: str, moment: str, resumed: int
) -> None:
    """W6, W7: the tracker is at the older one; what was complete the next attempt commits, what was not never is."""
    options = s3.storage_options(part_size=5 << 20, concurrency=1)
    [killed] = try_ranks(1, train_until, s3_url, options, moment)
    assert killed.exitcode == -signal.SIGKILL, killed.text
    store, root = storage.resolve(s3_url, options)
    assert store.get(join(root, roots.TRACKER)) == b"10"
    assert committed(s3_url, options) == {10}
    assert len(store.unfinished(root)) == (1 if moment == "second part" else 0)
    found = large_state(0)
    with Checkpointer(s3_url, run="run", storage_options=options, settle_wait=0.0) as following:
        assert following.restore(found).iteration == resumed
    assert_same(found, large_state(resumed))
    assert committed(s3_url, options) == {10, resumed}
    assert verify(f"{s3_url}/iter_{resumed:07d}", storage_options=options).ok
    for left in store.unfinished(root):
        store.discard(left)
    assert list(store.unfinished(root)) == []
