"""What `inspect` says of our own saves (foreign ones: test_fixtures, test_verify_foreign)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptlib
from ckptlib import commit
from ckptlib import storage as storages
from ckptlib.errors import IntegrityError, RecordError
from ckptlib.inspection import topology_of
from ckptlib.sharding import Box, ShardedTensor


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "iter_0000012"
    state = {
        "w": torch.zeros(4, 3, dtype=torch.bfloat16),
        "left": ShardedTensor.from_box("cut", torch.ones(1, 4), (2, 4), (0, 0)),
        "right": ShardedTensor.from_box("cut", torch.ones(1, 4), (2, 4), (1, 0)),
        "step": 12,
    }
    ckptlib.save(state, str(path), iteration=12, run="a run", topology=ckptlib.Topology(tp=1, dp=1))
    return path


def test_inspect_shows_a_save_without_reading_its_data(saved: Path) -> None:
    data = next(saved.glob("__*.distcp"))
    data.write_bytes(b"gone")
    info = ckptlib.inspect(str(saved))
    assert (info.format, info.semantic_type, info.iteration, info.run) == ("torch_dist", "GLOBAL", 12, "a run")
    assert info.committed
    assert info.topology == ckptlib.Topology()
    assert info.manifest is not None
    assert info.save_id == info.manifest.begin.save_id
    assert info.files[data.name] == 4
    assert set(info.files) == {str(p.relative_to(saved)) for p in saved.rglob("*") if p.is_file()}
    assert info.notes == ()


def test_tensors_say_shape_dtype_and_chunks(saved: Path) -> None:
    info = ckptlib.inspect(str(saved))
    assert sorted(info.tensors) == ["cut", "w"]
    shape, dtype, chunks = info.tensors["w"]
    assert (shape, dtype, chunks) == ((4, 3), "bfloat16", (Box((0, 0), (4, 3)),))
    assert info.tensors["cut"].chunks == (Box((0, 0), (1, 4)), Box((1, 0), (1, 4)))
    assert "step" not in info.tensors
    assert list(info.objects) == ["step"]
    assert info.objects["step"].length > 0
    with pytest.raises(KeyError):
        info.tensors["absent"]


def test_a_save_can_be_named(saved: Path) -> None:
    save_id = ckptlib.inspect(str(saved)).save_id
    assert ckptlib.inspect(str(saved), save_id=save_id).save_id == save_id


def test_damaged_records_are_an_error_that_names_the_file(saved: Path) -> None:
    save_id = ckptlib.inspect(str(saved)).save_id
    for name in ("decision.json", "manifest.json", "index"):
        file = saved / ".ckpt" / str(save_id) / name
        content = file.read_bytes()
        file.write_bytes(content[:-5])
        with pytest.raises(IntegrityError, match=name):
            ckptlib.inspect(str(saved))
        file.write_bytes(content)
    assert ckptlib.inspect(str(saved)).committed


def test_an_aborted_save_is_shown_as_what_it_is(tmp_path: Path, saved: Path) -> None:
    storage, path = storages.resolve(str(saved))
    info = ckptlib.inspect(path)
    assert info.manifest is not None
    other = str(tmp_path / "iter_0000013")
    begin = info.manifest.begin
    commit.begin_save(storage, other, begin)
    assert "not been committed" in ckptlib.inspect(other).notes[0]
    commit.decide_abort(storage, other, begin.save_id, reason="rank 3 died", decided_by="test")
    shown = ckptlib.inspect(other)
    assert not shown.committed
    assert "rank 3 died" in shown.notes[0]
    assert (shown.iteration, shown.run, len(shown.tensors)) == (12, "a run", 0)


def test_a_save_whose_begin_is_damaged_is_an_error(saved: Path) -> None:
    begin = saved / ".ckpt" / str(ckptlib.inspect(str(saved)).save_id) / "begin.json"
    begin.write_bytes(b"{}")
    with pytest.raises(RecordError, match="begin"):
        ckptlib.inspect(str(saved))


@pytest.mark.parametrize("args", [None, 7, "text", {"tensor_model_parallel_size": 2}])
def test_a_topology_is_none_where_nothing_says_it(args: object) -> None:
    assert topology_of({"args": args}) is None
    assert topology_of({}) is None
