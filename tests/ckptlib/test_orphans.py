"""Uploads that dead processes leave in an object store: ours go when nothing comes of them, others' never (W1, W8)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckptlib import Checkpointer, beats, orphans, save, settling, storage
from ckptlib.orphans import Facts, at_start, by_age, owner
from ckptlib.storage import join
from tests.support.fault_proxy import FaultProxy
from tests.support.faults import Fault
from tests.support.s3_server import S3Server
from tests.support.uploads import Uploads

HOUR = 3600.0
SAVE = "000002-00000000000a-0123abcd"

# ---------------------------------------------------------------- the decision


@pytest.mark.parametrize(
    ("facts", "goes"),
    [
        (Facts(1, "committed", 5), True),
        (Facts(1, "aborted", 5), True),
        (Facts(1, "deleted", 5), True),
        (Facts(9, "aborted", 5), True),
        (Facts(2, "gone", 5), True),
        (Facts(3, "gone", 5), False),
        (Facts(0, "gone", 5), False),
        (Facts(1, "undecided", 1e9), False),
        (Facts(0, "undecided", 1e9), False),
        (Facts(1, "damaged", 1e9), False),
        (Facts(1, "exporting", 1e9), False),
    ],
)
def test_an_attempt_discards_what_is_decided_and_nothing_that_may_be_written(facts: Facts, goes: bool) -> None:
    """W8: attempt 3 begins."""
    assert at_start(facts, 3)[0] is goes


@pytest.mark.parametrize(
    ("facts", "goes"),
    [
        (Facts(1, "aborted", 5), True),
        (Facts(1, "undecided", HOUR - 1), False),
        (Facts(1, "undecided", HOUR + 1), True),
        (Facts(1, "undecided", 9 * HOUR, silent=5.0), False),
        (Facts(1, "undecided", 9 * HOUR, silent=2 * HOUR), True),
        (Facts(0, "gone", HOUR - 1), False),
        (Facts(0, "gone", HOUR + 1), True),
        (Facts(1, "damaged", HOUR - 1), False),
        (Facts(1, "exporting", HOUR - 1), False),
        (Facts(1, "exporting", HOUR + 1), True),
    ],
)
def test_by_age_goes_what_is_old_and_gave_no_sign_of_life_since(facts: Facts, goes: bool) -> None:
    assert by_age(facts, HOUR)[0] is goes


@pytest.mark.parametrize(
    ("name", "directory"),
    [
        (f"iter_0000100/__0_0.{SAVE}.distcp", "iter_0000100"),
        (f"iter_0000100/.ckpt/{SAVE}/common.pt", "iter_0000100"),
        (f"iter_0000100/deep/__0_0.{SAVE}.pt", "iter_0000100"),
        (f"non_persistent/iter_0000100/__0_0.{SAVE}.distcp", "non_persistent/iter_0000100"),
        (f"release/__0_0.{SAVE}.distcp", "release"),
        ("iter_0000100/model.safetensors", None),
        (f"iter_0000100/{SAVE}", None),
        (f"elsewhere/__0_0.{SAVE}.distcp", None),
        (f"other/iter_0000100/__0_0.{SAVE}.distcp", None),
        (f"__0_0.{SAVE}.distcp", None),
    ],
)
def test_only_files_with_a_save_id_in_an_iteration_directory_are_ours(name: str, directory: str | None) -> None:
    """W1."""
    expected = None if directory is None else (f"bucket/run/{directory}", SAVE)
    assert owner("bucket/run", f"bucket/run/{name}") == expected
    assert owner("bucket/run", f"bucket/run-2/{name}") is None


# ---------------------------------------------------------------- on a real server


@pytest.fixture
def place(s3: S3Server, s3_url: str) -> Iterator[Uploads]:
    with contextlib.closing(s3.client()) as client:
        yield Uploads(s3, s3_url, client)


def test_an_attempt_that_begins_discards_the_uploads_of_settled_saves_only(place: Uploads) -> None:
    """W8: undecided saves of older attempts are aborted, and their uploads go; those that live, and others', stay."""
    dead = place.upload_of(place.begin(1).save_id)
    mine = place.upload_of(place.begin(2).save_id)
    bare = place.upload_of(place.begin(0).save_id)
    removed = place.upload_of("000001-000000000001-00000000")
    foreign = place.upload(join(place.directory(), "model.safetensors"))
    (settled,) = settling.settle(place.store, place.root, 2)
    assert settled.decision is not None
    assert settled.decision.outcome == "abort"
    assert place.left() == {mine, bare, foreign}
    assert {dead, removed}.isdisjoint(place.left())


def test_a_root_whose_name_begins_like_another_leaves_that_alone(place: Uploads, s3: S3Server) -> None:
    with contextlib.closing(s3.client()) as client:
        other = Uploads(s3, f"{place.url}-2", client)
        theirs = other.upload_of("000001-000000000001-00000000")
        settling.settle(place.store, place.root, 9)
        assert other.left() == {theirs}


def test_a_plan_says_what_goes_and_what_stays_and_nothing_happens_before_it_is_applied(place: Uploads) -> None:
    aborted, living, silent = place.begin(1), place.begin(1, 200), place.begin(1, 300)
    place.abort(aborted)
    paths = [place.upload_of(begin.save_id, begin.iteration) for begin in (aborted, living, silent)]
    foreign = place.upload(join(place.root, "notes.bin"))
    beats.announce(place.store, place.directory(200), living, 0, 10, os.getpid())

    plan = orphans.plan_by_age(place.store, place.root, older_than=HOUR)
    assert [orphan.upload.path for orphan in plan.discard] == paths[:1]
    assert {orphan.upload.path for orphan in plan.keep} == set(paths[1:])
    assert (plan.foreign, plan.discard[0].reason) == (1, "its save is aborted")
    assert place.left() == {*paths, foreign}

    later = orphans.plan_by_age(place.store, place.root, older_than=HOUR, now=time.time() + 2 * HOUR)
    assert {orphan.upload.path for orphan in later.discard} == set(paths)

    assert orphans.apply(place.store, plan) == {}
    assert place.left() == {*paths[1:], foreign}
    assert orphans.apply(place.store, plan) == {}, "what is gone is fine"


def test_a_sign_of_life_keeps_an_upload_however_old(place: Uploads) -> None:
    begin = place.begin(1)
    path = place.upload_of(begin.save_id)
    (upload,) = place.store.unfinished(place.root)
    time.sleep(1.5)  # the store's clock has whole seconds
    beats.announce(place.store, place.directory(), begin, 0, 10, os.getpid())
    plan = orphans.plan_by_age(place.store, place.root, older_than=HOUR, now=upload.started + HOUR + 0.25)
    assert [orphan.upload.path for orphan in plan.keep] == [path]
    assert "sign of life" in plan.keep[0].reason


def test_an_export_that_was_never_finished_goes_by_age(place: Uploads, s3: S3Server) -> None:
    """W5: large ones are copied in parts; until then anybody may be rolling them forward."""
    url = f"{place.url}/iter_0000100"
    save({"w": torch.rand(4)}, url, iteration=100, semantic_type="LEGACY", storage_options=s3.storage_options())
    export = place.upload(join(place.directory(), "mp_rank_00/model_optim_rng.pt"))
    foreign = place.upload(join(place.directory(), "mp_rank_00/model.bin"))
    elsewhere = place.upload(join(place.directory(200), "mp_rank_00/model_optim_rng.pt"))
    now = orphans.plan_by_age(place.store, place.root, older_than=HOUR)
    assert ([orphan.upload.path for orphan in now.keep], now.discard, now.foreign) == ([export], (), 2)
    settling.settle(place.store, place.root, 9)
    assert place.left() == {export, foreign, elsewhere}
    orphans.apply(
        place.store, orphans.plan_by_age(place.store, place.root, older_than=HOUR, now=time.time() + 2 * HOUR)
    )
    assert place.left() == {foreign, elsewhere}


TRAINER = """
import sys, torch, json
from ckptlib import Checkpointer
url, options = sys.argv[1], json.loads(sys.argv[2])
checkpointer = Checkpointer(url, run="run", storage_options=options)
print("ready", flush=True)
checkpointer.save({"w": torch.rand(4 * 1024 * 1024)}, iteration=100)
"""


def test_the_upload_of_a_killed_process_is_an_orphan_until_the_next_attempt(
    s3: S3Server, s3_url: str, tmp_path: Path
) -> None:
    """W8: killed in the middle of its parts; a living process's upload stays."""
    store, root = storage.resolve(s3_url, s3.storage_options())
    with FaultProxy(s3, [Fault("hang", "UploadPart", skip=1, times=None)]) as proxy:
        options = s3.storage_options(endpoint=proxy.endpoint, part_size=5 * 1024 * 1024)
        trainer = subprocess.Popen([sys.executable, "-c", TRAINER, s3_url, json.dumps(options)], stdout=subprocess.PIPE)
        try:
            while proxy.counts()["UploadPart"] < 2:
                assert trainer.poll() is None
                time.sleep(0.05)
            (upload,) = store.unfinished(root)
            living = orphans.plan_by_age(store, root, older_than=HOUR)
            assert [orphan.upload for orphan in living.keep] == [upload]
            assert living.discard == ()
        finally:
            trainer.send_signal(signal.SIGKILL)
            trainer.communicate()
    assert list(store.unfinished(root)) == [upload]
    with Checkpointer(s3_url, run="run", storage_options=s3.storage_options()) as checkpointer:
        assert list(store.unfinished(root)) == []
        checkpointer.save({"w": torch.rand(4)}, iteration=100)
    assert list(store.unfinished(root)) == []
