"""A hostile checkpoint gets an error from every verb, and never runs anything (R5)."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptlib
from ckptlib import roots
from ckptlib import storage as storages
from ckptlib.errors import CkptError, IntegrityError, UnsafePickleError
from ckptlib.formats import torch_dist
from ckptlib.index import ChunkItem, ItemIndex, Location, ObjectItem
from ckptlib.sharding import Box
from ckptlib.verification import verify
from tests.support.foreign import copy_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


def contained(value: Any) -> bytes:
    """`torch.save` of anything."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def with_pickle(container: bytes, pickled: bytes) -> bytes:
    """A container whose pickle is another one."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(container)) as source, zipfile.ZipFile(out, "w") as target:
        for info in source.infolist():
            target.writestr(info.filename, pickled if info.filename.endswith("data.pkl") else source.read(info))
    return out.getvalue()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run's root; its only checkpoint is the hostile one."""
    return Path(tmp_path, "root")


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Exists if hostile code ran."""
    return tmp_path / "executed"


def hostile_metadata(root: Path, marker: Path) -> Path:
    path = copy_of("td0140_tp1pp1_w", root)
    (path / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    return path


def hostile_metadata_behind_real_keys(root: Path, marker: Path) -> Path:
    """Looks like a torch_dist up to the last object."""
    path = copy_of("td0161_tp2pp2_w", root)
    value = pickle.loads((path / ".metadata").read_bytes())
    value.planner_data = Evil(marker)
    (path / ".metadata").write_bytes(pickle.dumps(value))
    return path


def hostile_common(root: Path, marker: Path) -> Path:
    path = copy_of("td0140_tp1pp1_w", root)
    (path / "common.pt").write_bytes(contained({"args": Evil(marker), "iteration": 10}))
    return path


def hostile_common_without_container(root: Path, marker: Path) -> Path:
    path = copy_of("td0140_tp1pp1_w", root)
    (path / "common.pt").write_bytes(pickle.dumps({"args": Evil(marker), "iteration": 10}))
    return path


def hand_made(root: Path, data: bytes, index: Callable[[Location], ItemIndex]) -> Path:
    """A plain torch checkpoint with one item, which is `data`."""
    path = root / "iter_0000010"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(data)
    (path / ".metadata").write_bytes(torch_dist.encode_metadata(index(Location("__0_0.distcp", 0, len(data)))))
    return path


def hostile_tensor_item(root: Path, marker: Path) -> Path:
    data = with_pickle(contained(torch.ones(2)), pickle.dumps(Evil(marker), protocol=2))
    return hand_made(root, data, lambda at: ItemIndex.build([ChunkItem("w", "float32", (2,), Box.whole((2,)), at)]))


def hostile_object_item(root: Path, marker: Path) -> Path:
    data = contained(Evil(marker))
    return hand_made(root, data, lambda at: ItemIndex.build([], [ObjectItem("w", False, at)]))


def hostile_item_of_torch(root: Path, marker: Path) -> Path:
    """As torch itself writes it: DCP loads such bytes items with `weights_only=False`."""
    path = root / "iter_0000010"
    dcp.save({"w": Evil(marker), "good": torch.ones(2)}, checkpoint_id=str(path), no_dist=True)
    return path


OBJECTS = [hostile_object_item, hostile_item_of_torch]
ITEMS = [hostile_tensor_item, *OBJECTS]
HOSTILE = [
    hostile_metadata,
    hostile_metadata_behind_real_keys,
    hostile_common,
    hostile_common_without_container,
    *ITEMS,
]


@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__)
def test_no_verb_runs_what_a_hostile_checkpoint_says(
    make: Callable[[Path, Path], Path], root: Path, marker: Path
) -> None:
    path = make(root, marker)
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    named = "posix.system|bare pickle"

    report = verify(str(path))
    assert not report.ok
    assert report.corrupt
    assert any("refused" in problem for problem in report.problems), report.problems

    target = torch.zeros(2)
    wanted = {"w": None, "good": target} if make in OBJECTS else {"w": target}
    with pytest.raises(CkptError, match=named):
        ckptlib.load(wanted, str(path), strict="return")
    assert target.tolist() == [0, 0]

    storage, at = storages.resolve(str(root))
    (found,) = roots.scan(storage, at).found
    if make in ITEMS:  # what nobody asked for is not read: it cannot harm, and is not seen
        notes = ckptlib.inspect(str(path)).notes
        assert any("posix.system" in note for note in notes) == (make in OBJECTS)
        assert found.state == "foreign"
    else:
        with pytest.raises(CkptError, match=named):
            ckptlib.inspect(str(path))
        assert found.state == "foreign-incomplete"
        assert "refused" in found.reason

    for level in ("listing", "structure"):
        verify(str(path), level=level)
    assert not marker.exists()
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before


def test_a_run_does_not_resume_from_a_hostile_checkpoint(root: Path, marker: Path) -> None:
    hostile_metadata(root, marker)
    model = torch.nn.Linear(2, 2)
    with ckptlib.Checkpointer(str(root), run="r") as checkpointer, pytest.raises(CkptError):
        checkpointer.restore({"model": model})
    assert not marker.exists()


def test_a_hostile_file_in_one_of_our_saves_is_damage_before_it_is_a_pickle(root: Path, marker: Path) -> None:
    path = root / "iter_0000001"
    ckptlib.save({"w": torch.ones(32), "x": {"y": 1}}, str(path), iteration=1)
    evil = {"metadata": pickle.dumps(Evil(marker)), "common.pt": contained({"x": Evil(marker)})}
    save_id = next(p.name for p in (path / ".ckpt").iterdir())
    for name in (".metadata", "common.pt", f".ckpt/{save_id}/metadata", f".ckpt/{save_id}/common.pt"):
        original = (path / name).read_bytes()
        (path / name).write_bytes(evil["common.pt" if name.endswith("common.pt") else "metadata"])
        report = verify(str(path))
        assert {n for n, verdict in report.files.items() if verdict != "ok"} == {name}
        ckptlib.inspect(str(path))
        ckptlib.read(str(path))
        (path / name).write_bytes(original)
    data = next(path.glob("__*.distcp"))
    data.write_bytes(contained(Evil(marker)).ljust(data.stat().st_size, b"\0"))
    assert verify(str(path)).files[data.name] == "digest"
    with pytest.raises(CkptError):
        ckptlib.load({"w": torch.zeros(32), "x": {"y": 0}}, str(path))
    assert not marker.exists()


def test_a_hostile_save_with_perfect_digests_is_refused_all_the_same(
    root: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write a checkpoint can write its digests: they prove nothing about intent."""
    path = root / "iter_0000001"
    with monkeypatch.context() as patch:
        for module in ("writer", "packing"):
            patch.setattr(f"ckptlib.{module}.dump_object", lambda value, where: contained(value))
        ckptlib.save({"w": torch.ones(2), "x": Evil(marker)}, str(path), iteration=1)
    report = verify(str(path))
    assert report.corrupt
    assert any("posix.system" in problem for problem in report.problems)
    target = torch.zeros(2)
    with pytest.raises(UnsafePickleError, match=r"posix\.system"):
        ckptlib.load({"w": target, "x": None}, str(path))
    assert target.tolist() == [0, 0]
    ckptlib.inspect(str(path))
    assert not marker.exists()


def test_the_refusal_is_an_integrity_failure_for_scripts() -> None:
    assert issubclass(UnsafePickleError, IntegrityError)
    assert UnsafePickleError.exit_code == 20
