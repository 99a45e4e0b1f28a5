"""T09, T11: on a remote storage, what a run was resumed from stays, and nothing is published before it is durable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any, Literal

import pytest
import torch

from ckptlib import Checkpointer, roots, storage, verify
from ckptlib.errors import CkptError
from ckptlib.storage import join
from tests.support.fault_proxy import FaultProxy
from tests.support.faults import Fault
from tests.support.roots import small_state
from tests.support.s3_server import S3Server
from tests.support.trees import blanked

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


TRAINER = """
import os, signal, sys
import torch
from ckptlib import Checkpointer, commit
from ckptlib.storage.s3 import S3Storage
from ckptlib.storage.s3_upload import S3WriteStream, Target

url, moment = sys.argv[1:]

def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def state(iteration):
    return {"w": torch.full((1_500_000,), float(iteration))}

with Checkpointer(url, run="run", storage_options={"part_size": 5 << 20, "concurrency": 1}) as checkpointer:
    checkpointer.save(state(10), iteration=10)
    finish, send, create = S3WriteStream.finish, S3WriteStream._send_part, S3Storage.create

    def create_or_die(store, path, data):
        die() if path.endswith("decision.json") else create(store, path, data)

    if moment == "second part":
        S3WriteStream._send_part = lambda stream, number, body: die() if number else send(stream, number, body)
    elif moment == "last shard":
        S3WriteStream.finish = lambda stream: (finish(stream), die())
    else:
        S3Storage.create = create_or_die
    checkpointer.save(state(20), iteration=20)
"""


@pytest.mark.parametrize(("moment", "resumed"), [("second part", 10), ("last shard", 10), ("decision", 20)])
def test_t11_a_trainer_that_is_killed_before_its_commit_has_published_nothing(
    s3: S3Server, s3_url: str, moment: str, resumed: int
) -> None:
    """W6, W7: the tracker is at the older one; what was complete the next attempt commits, what was not never is."""
    options = s3.storage_options(part_size=5 << 20)
    killed = subprocess.run(
        [sys.executable, "-c", TRAINER, s3_url, moment],
        env={**os.environ, **s3.environment()},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    store, root = storage.resolve(s3_url, options)
    assert store.get(join(root, roots.TRACKER)) == b"10"
    assert committed(s3_url, options) == {10}
    assert len(store.unfinished(root)) == (1 if moment == "second part" else 0)
    found = {"w": torch.zeros(1_500_000)}
    with Checkpointer(s3_url, run="run", storage_options=options, settle_wait=0.0) as following:
        assert following.restore(found).iteration == resumed
    assert torch.equal(found["w"], torch.full((1_500_000,), float(resumed)))
    assert committed(s3_url, options) == {10, resumed}
    assert verify(f"{s3_url}/iter_{resumed:07d}", storage_options=options).ok
    for left in store.unfinished(root):
        store.discard(left)
    assert list(store.unfinished(root)) == []
