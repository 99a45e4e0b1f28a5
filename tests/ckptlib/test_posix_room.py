"""Whether a save fits, and why a filesystem says that it is full: by what is left, never by what is not known."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from ckptlib import Checkpointer
from ckptlib.errors import StorageError
from ckptlib.integrations.dcp import CkptWriter
from ckptlib.manifest import SemanticType
from ckptlib.pieces import LocalPlan
from ckptlib.plan import CONTAINER_BYTES, make_write_plan
from ckptlib.storage import PosixOptions, PosixStorage, filesystems
from ckptlib.storage.filesystems import Room
from ckptlib.storage.room import Bound, first_lack, why_full
from tests.ckptlib.test_plan import worlds
from tests.support.filesystems import small_filesystem

counts = st.integers(0, 2**60)
rooms = st.builds(Room, st.none() | counts, st.none() | counts)


@given(st.lists(rooms, max_size=4), counts, counts)
def test_a_save_is_refused_when_it_goes_beyond_what_is_known_and_only_then(
    found: list[Room], size: int, files: int
) -> None:
    lack = first_lack([Bound(f"in {i}", room) for i, room in enumerate(found)], size, files)
    beyond = [
        (room.bytes is not None and size > room.bytes) or (room.files is not None and files > room.files)
        for room in found
    ]
    assert (lack is not None) == any(beyond)
    if lack is not None:
        assert lack.text.endswith(f"in {beyond.index(True)}")


def test_a_refusal_names_what_is_needed_and_what_is_free() -> None:
    lack = first_lack([Bound("on the filesystem of /scratch", Room(3 * 2**30))], 5 * 2**30, 1)
    assert lack is not None
    assert lack.text == "5.0 GiB are to be written, 3.0 GiB are free on the filesystem of /scratch"
    lack = first_lack([Bound("in the quota of user 7", Room(None, 2), errno.EDQUOT)], 1, 3)
    assert lack is not None
    assert (lack.code, lack.text) == (errno.EDQUOT, "3 files are to be made, 2 more can be in the quota of user 7")


@pytest.mark.parametrize(
    ("code", "room", "kind", "words"),
    [
        (errno.ENOSPC, Room(500, 100), None, "500 bytes are left"),
        (errno.ENOSPC, Room(2**40, 0), None, "no more files"),
        (errno.ENOSPC, Room(2**40, None), "lustre", "OST"),
        (errno.ENOSPC, Room(2**40, 5), "nfs", "a quota, or one full target"),
        (errno.ENOSPC, Room(None, None), None, ""),
        (errno.EDQUOT, Room(2**40, 5), "lustre", "lfs quota"),
        (errno.EDQUOT, Room(), "nfs", "(quota shows which)"),
        (errno.EIO, Room(0, 0), None, ""),
    ],
)
def test_a_full_filesystem_is_explained_by_what_is_left_on_it(
    code: int, room: Room, kind: str | None, words: str
) -> None:
    why = why_full(code, room, 4 * 2**20, kind)
    assert words in why
    assert bool(why) == bool(words)


def test_the_kernel_says_how_much_room_there_is_also_for_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    with small_filesystem(tmp_path / "small", size="1m") as disk:
        there = filesystems.room(str(disk / "run" / "iter_0000001"))
        assert there.bytes is not None
        assert 0 < there.bytes <= 2**20
        assert there.files
        (disk / "file").write_bytes(bytes(600_000))
        after = filesystems.room(str(disk))
        assert after.bytes is not None
        assert there.bytes - after.bytes >= 600_000
        assert filesystems.kind(str(disk)) == "tmpfs"
        assert filesystems.kind(str(disk / "absent")) == "tmpfs"
    assert filesystems.kind(str(tmp_path)) is not None


def test_blocks_that_are_kept_for_root_are_no_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = os.statvfs_result((4096, 4096, 1000, 300, 100, 50, 40, 30, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: answer)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert filesystems.room("/") == Room(100 * 4096, 30)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert filesystems.room("/") == Room(300 * 4096, 40)


@pytest.mark.parametrize("blocks", [(4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255), None])
def test_a_filesystem_that_does_not_say_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: tuple[int, ...] | None
) -> None:
    def statvfs(path: str) -> os.statvfs_result:
        if blocks is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), path)
        return os.statvfs_result(blocks)

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert filesystems.room(str(tmp_path)) == Room()
    PosixStorage().prepare(str(tmp_path / "iter_0000001"), size=2**60, files=2**40)


def test_what_cannot_fit_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    with small_filesystem(tmp_path / "small", size="1m") as disk:
        with pytest.raises(StorageError, match=r"No space left.*iter_1.*5\.0 MiB are to be written.*free on") as caught:
            PosixStorage().prepare(str(disk / "run" / "iter_1"), size=5 * 2**20, files=1)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(disk / "run" / "iter_1"))
        PosixStorage().prepare(str(disk / "run" / "iter_1"), size=2**19, files=1)
        assert "'room': 'off'" in str(caught.value)
        PosixStorage(PosixOptions(room="off")).prepare(str(disk / "run" / "iter_1"), size=5 * 2**20, files=1)
        assert os.listdir(disk) == []


@pytest.mark.parametrize("semantic_type", ["GLOBAL", "TORCH_DCP", "LOCAL", "LEGACY"])
def test_a_save_says_beforehand_about_what_it_will_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, semantic_type: SemanticType
) -> None:
    """W2: before anything of it exists; and every time, with a plan that is kept."""
    said: list[tuple[int, int]] = []

    def noted(self: PosixStorage, path: str, *, size: int, files: int) -> None:
        assert not os.path.exists(path)
        said.append((size, files))

    monkeypatch.setattr(PosixStorage, "prepare", noted)
    state = {"model": {f"w{i}": torch.ones(500_000 + i) for i in range(10)}}
    job = Checkpointer(str(tmp_path / "run"), run="run", semantic_type=semantic_type)
    for iteration in (1, 2):
        result = job.save(state, iteration=iteration)
        size, files = said.pop()
        data = sum(path.stat().st_size for path in Path(result.url).glob("__*"))
        assert 0.99 * data < size < 1.01 * data
        assert files == result.files == 1
    assert said == []


def test_torchs_own_save_says_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, int]] = []
    monkeypatch.setattr(PosixStorage, "prepare", lambda self, path, *, size, files: said.append((size, files)))
    dcp.save({"w": torch.ones(50_000), "n": 3}, storage_writer=CkptWriter(tmp_path / "a"))
    assert said == [(200_000, 1)]


@given(worlds())
def test_a_plan_counts_every_byte_and_every_writer_once(world: list[LocalPlan]) -> None:
    plan = make_write_plan(world)
    extent = plan.extent([0] * len(world))
    writers = [rank for rank in range(len(world)) if any(vars(plan.of(rank)).values())]
    assert extent.files == len(writers)
    payload = int(plan.nbytes.sum())
    assert payload <= extent.nbytes <= payload + CONTAINER_BYTES * len(plan.parts)
    more = plan.extent([7] * len(world))
    assert (more.nbytes, more.files) == (extent.nbytes + 7 * len(world), len(world))
