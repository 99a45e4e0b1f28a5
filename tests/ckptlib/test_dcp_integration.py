"""torch.distributed.checkpoint over our writer and reader (W1 to W5, R3, R4, R5)."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptlib
from ckptlib import commit
from ckptlib import storage as st
from ckptlib.integrations.dcp import CkptReader, CkptWriter
from ckptlib.source import open_source

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def a_state(fill: float) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((6, 4), fill), "b": torch.full((4,), fill, dtype=torch.bfloat16)},
        "list": [1, {"inner": torch.full((2,), fill)}],
        "step": int(fill),
        "empty": torch.zeros(0),
    }


def test_what_torch_plans_is_committed_verified_and_read_back(tmp_path: Path) -> None:
    url = str(tmp_path / "step-7")
    dcp.save(a_state(3), storage_writer=CkptWriter(url))
    info = ckptlib.inspect(url)
    assert (info.committed, info.format, info.iteration) == (True, "torch_dcp", 7)
    assert ckptlib.verify(url).ok
    assert not (tmp_path / "step-7" / "metadata.json").exists(), "that marker belongs to torch_dist (W1)"
    state = a_state(0)
    dcp.load(state, storage_reader=CkptReader(url))
    assert state["step"] == 3
    assert state["model"]["w"].eq(3).all()
    assert state["list"][1]["inner"].eq(3).all()


def test_a_name_that_looks_like_a_cell_of_a_grid_is_a_plain_name(tmp_path: Path) -> None:
    url = str(tmp_path / "step-7")
    dcp.save({"a/shard_b": {"x": 1}, "t": torch.ones(2)}, storage_writer=CkptWriter(url))
    state: dict[str, Any] = {"a/shard_b": {"x": 0}, "t": torch.zeros(2)}
    ckptlib.load(state, url)
    assert state["a/shard_b"] == {"x": 1}


def test_plain_torch_reads_it_with_all_its_tools(tmp_path: Path) -> None:
    url = str(tmp_path / "ckpt")
    dcp.save(a_state(3), storage_writer=CkptWriter(url))
    state = a_state(0)
    dcp.load(state, checkpoint_id=url)
    assert state["model"]["b"].eq(3).all()
    dcp_to_torch_save(url, str(tmp_path / "one.pt"))  # needs torch's own planner data
    assert torch.load(tmp_path / "one.pt", weights_only=True)["list"][1]["inner"].tolist() == [3, 3]


def test_our_reader_takes_what_plain_torch_wrote(tmp_path: Path) -> None:
    dcp.save(a_state(5), checkpoint_id=str(tmp_path / "theirs"))
    state = a_state(0)
    dcp.load(state, storage_reader=CkptReader(tmp_path / "theirs"))
    assert state["model"]["w"].eq(5).all()


def test_a_committed_checkpoint_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    """W9."""
    url = str(tmp_path / "ckpt")
    dcp.save(a_state(1), storage_writer=CkptWriter(url))
    with pytest.raises(CheckpointException, match="Checkpoint already exists"):
        dcp.save(a_state(2), storage_writer=CkptWriter(url))
    assert ckptlib.read(url)["model.w"].eq(1).all()
    dcp.save(a_state(2), storage_writer=CkptWriter(url, on_exists="replace"))
    assert ckptlib.read(url)["model.w"].eq(2).all()
    assert len(list((tmp_path / "ckpt").glob("*.distcp"))) == 1


def test_one_writer_saves_to_one_place_after_another(tmp_path: Path) -> None:
    writer = CkptWriter(tmp_path / "a")
    dcp.save(a_state(1), storage_writer=writer)
    dcp.save(a_state(2), storage_writer=writer, checkpoint_id=str(tmp_path / "b"))
    assert ckptlib.read(str(tmp_path / "a"))["model.w"].eq(1).all()
    assert ckptlib.read(str(tmp_path / "b"))["model.w"].eq(2).all()


def test_another_dtype_is_an_error_unless_a_cast_is_asked_for(tmp_path: Path) -> None:
    """R4: plain torch converts without a word."""
    url = str(tmp_path / "ckpt")
    dcp.save({"w": torch.ones(3)}, storage_writer=CkptWriter(url))
    wanted = {"w": torch.zeros(3, dtype=torch.float64)}
    with pytest.raises(CheckpointException, match="the state wants torch"):
        dcp.load(wanted, storage_reader=CkptReader(url))
    assert wanted["w"].eq(0).all()
    dcp.load(wanted, storage_reader=CkptReader(url, cast=True))
    assert wanted["w"].eq(1).all()


def test_a_writer_that_dies_before_the_end_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W1: nothing that a foreign reader would take for a checkpoint is there before the commit."""
    url = str(tmp_path / "ckpt")
    with monkeypatch.context() as patch:
        patch.setattr(commit, "try_commit", _die)
        with pytest.raises(CheckpointException, match="the coordinator is gone"):
            dcp.save(a_state(1), storage_writer=CkptWriter(url))
    assert not (tmp_path / "ckpt" / ".metadata").exists()
    with pytest.raises(ckptlib.errors.UncommittedError):
        ckptlib.read(url)
    storage, path = st.resolve(url)
    (save,) = commit.list_saves(storage, path)
    assert save.begin is not None
    decision = commit.try_commit(storage, path, save.begin, decided_by="adopt")  # W7: anybody can finish it
    assert decision is not None
    assert decision.outcome == "commit"
    assert ckptlib.read(url)["model.w"].eq(1).all()


def _die(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("the coordinator is gone")


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("/nonexistent/executed"),))


def test_a_hostile_object_is_refused_before_torch_unpickles_it(tmp_path: Path) -> None:
    """R5: torch's planner calls `torch.load(weights_only=False)` on objects."""
    dcp.save({"w": torch.ones(1), "x": Hostile()}, checkpoint_id=str(tmp_path / "theirs"))
    state = {"w": torch.zeros(1), "x": None}
    with pytest.raises(CheckpointException, match="not plain data"):
        dcp.load(state, storage_reader=CkptReader(tmp_path / "theirs"))
    assert state["x"] is None


def test_a_plan_that_torch_kept_is_a_save_of_its_own(tmp_path: Path, kept_plans: None) -> None:
    """Also with a writer of its own: torch keeps plans in the class, for as long as the process lives."""
    for step in (1, 2, 3):
        writer = CkptWriter(tmp_path / f"step-{step}")
        dcp.save(a_state(step), storage_writer=writer, planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
    manifests = [open_source(str(tmp_path / f"step-{step}")).manifest for step in (1, 3)]
    assert [manifest and manifest.begin.contents for manifest in manifests] == [("empty", "list", "model", "step")] * 2
    state = a_state(0)
    dcp.load(state, storage_reader=CkptReader(tmp_path / "step-3"))
    assert (state["step"], state["model"]["w"].unique().tolist()) == (3, [3])
    assert ckptlib.verify(str(tmp_path / "step-3")).ok


def test_a_kept_plan_of_another_dtype_is_refused(tmp_path: Path, kept_plans: None) -> None:
    """torch compares no dtypes, and would write metadata that are wrong."""
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    dcp.save({"w": torch.ones(4)}, storage_writer=CkptWriter(tmp_path / "a"), planner=planner)
    with pytest.raises(CheckpointException, match="enable_plan_caching=False"):
        dcp.save({"w": torch.ones(4).half()}, storage_writer=CkptWriter(tmp_path / "b"), planner=planner)
    assert not (tmp_path / "b" / ".metadata").exists()


@pytest.fixture
def kept_plans() -> Iterator[None]:
    """torch keeps them in class attributes."""
    kept = (
        "_cached_save_plan",
        "_cached_final_save_plan",
        "_cached_all_plans",
        "_cached_global_plan",
        "_cached_metadata",
    )
    yield
    for name in kept:
        getattr(dcp.SavePlanner, name).clear()


def test_a_place_that_no_filesystem_knows_is_not_taken_for_ours() -> None:
    """torch asks every storage whether it wants a checkpoint id."""
    for kind in (CkptWriter, CkptReader):
        assert kind.validate_checkpoint_id("/somewhere")
        assert kind.validate_checkpoint_id(Path("some/where"))
        assert kind.validate_checkpoint_id("memory://somewhere")
        assert not kind.validate_checkpoint_id("abc://abc.abc")
        assert not kind.validate_checkpoint_id("")


def test_torchs_metadata_travels_as_plain_data(tmp_path: Path) -> None:
    dcp.save(a_state(1), storage_writer=CkptWriter(tmp_path / "a"))
    metadata = CkptReader(tmp_path / "a").read_metadata()
    theirs = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    assert metadata.state_dict_metadata == theirs.state_dict_metadata
    assert metadata.planner_data == theirs.planner_data
    assert metadata.storage_data == theirs.storage_data


def test_a_replaced_save_of_a_run_leaves_exports_of_the_new_one(tmp_path: Path) -> None:
    with ckptlib.Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save({"w": torch.zeros(4)}, iteration=1)
    url = str(tmp_path / "iter_0000001")
    dcp.save({"w": torch.ones(4)}, storage_writer=CkptWriter(url, on_exists="replace"), no_dist=True)
    for reader in (CkptReader(url), dcp.FileSystemReader(url)):
        state = {"w": torch.zeros(4)}
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert state["w"].tolist() == [1, 1, 1, 1]
