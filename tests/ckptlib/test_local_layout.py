"""LOCAL + torch: every rank's own state in a `torch.save` file of its own, for the same topology, on request only."""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import ckptlib
from ckptlib import Checkpointer, LocalNonpersistentObject, Topology
from ckptlib.async_options import AsyncOptions
from ckptlib.errors import (
    CkptError,
    IntegrityError,
    KeyMismatchError,
    NoResumePointError,
    ShapeMismatchError,
    StateError,
    UnsupportedError,
)
from ckptlib.events import Notice
from ckptlib.manifest import IoMode, SemanticType
from tests.support.ranks import run_ranks, try_ranks

THREAD = AsyncOptions(worker="thread")


class Part:
    """A part with a state of its own."""

    def __init__(self, counter: int) -> None:
        self.counter = counter
        self.memory = torch.full((3,), float(counter))

    def state_dict(self) -> dict[str, Any]:
        return {"counter": self.counter, "memory": self.memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counter = state["counter"]
        self.memory.copy_(state["memory"])


def training(seed: int, steps: int) -> dict[str, Any]:
    """A model with tied weights, an optimizer in another precision, a scheduler, views, and plain values."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)).to(torch.bfloat16)
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        scheduler.step()
    for slots in optimizer.state.values():  # as Megatron keeps them; torch's own load would cast them
        slots["exp_avg"] = torch.randn(slots["exp_avg"].shape)
    base = torch.randn(60, 80)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "part": Part(steps),
        "views": {"transposed": base.T, "strided": base[::2, 1::3], "base": base, "empty": torch.empty(0, 4)},
        "flags": torch.tensor([True, False]),
        "nested": [{"a": torch.tensor(seed)}, (torch.full((2,), float(seed)), "text")],
        "plain": {"step": steps, "list": [1, 2.5, None], "bytes": b"\0\1"},
    }


def assert_equal(one: Any, other: Any, where: str = "state") -> None:
    """Bit for bit, whatever the parts are."""
    one, other = (x.state_dict() if hasattr(x, "state_dict") else x for x in (one, other))
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for name in one:
            assert_equal(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{where}.{i}")
    else:
        assert one == other, where


def own_file(directory: Path, rank: int = 0) -> Path:
    (found,) = directory.glob(f"__{rank}_0.*.pt")
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.mark.parametrize("io_mode", ["sync", "async"])
def test_everything_comes_back_bit_for_bit_where_it_was_saved(root: Path, io_mode: IoMode) -> None:
    state = training(1, steps=3)
    with Checkpointer(str(root), run="gpt", semantic_type="LOCAL", io_mode=io_mode, background=THREAD) as job:
        saved = job.save(state, iteration=3, progress={"consumed_samples": 12}, args={"layers": 2}, rerun_state=7)
        assert saved.wait(60).files == 1
        expected = training(1, steps=3)
        drawn = torch.rand(4)
    url = root / "iter_0000003"
    assert {"checkpoint.json", "integrity.json"} == {path.name for path in url.glob("*.json")}
    info = ckptlib.inspect(str(url))
    assert (info.semantic_type, info.format, info.committed) == ("LOCAL", "torch", True)
    target = training(2, steps=1)
    job = Checkpointer(str(root), run="gpt")
    restored = job.restore(target, at=3)
    assert (restored.iteration, restored.args, restored.rerun_state) == (3, {"layers": 2}, 7)
    assert restored.progress["consumed_samples"] == 12
    assert target["plain"] == {"step": 3, "list": [1, 2.5, None], "bytes": b"\0\1"}
    assert_equal(target, expected)
    assert target["optimizer"].state[target["model"][0].weight]["exp_avg"].dtype == torch.float32
    assert torch.equal(torch.rand(4), drawn) or io_mode == "async"  # the streams go on from the save


def test_plain_torch_reads_the_file_and_ties_and_views_are_what_they_were(root: Path) -> None:
    state = training(1, steps=1)
    ckptlib.save(state, str(root), iteration=1, semantic_type="LOCAL")
    path = own_file(root)
    loaded = torch.load(path, weights_only=True)
    assert_equal(loaded["model"], state["model"].state_dict())
    assert_equal(loaded["views"], state["views"])
    assert loaded["model"]["0.weight"].data_ptr() == loaded["model"]["1.weight"].data_ptr()
    assert loaded["views"]["base"].data_ptr() == loaded["views"]["transposed"].data_ptr()
    assert loaded["views"]["strided"].untyped_storage().nbytes() == 30 * 27 * 4  # without the memory around it
    assert loaded["nested"][1][1] == "text"
    assert zipfile.ZipFile(path).testzip() is None  # every CRC-32 is the payload's
    fresh = training(2, steps=2)
    fresh["model"].load_state_dict(loaded["model"])
    assert_equal(fresh["model"], state["model"])


def test_a_small_view_of_a_large_memory_is_stored_alone(tmp_path: Path) -> None:
    large = torch.zeros(1_000_000)
    ckptlib.save({"a": large[10:20], "b": large[::1000]}, str(tmp_path), iteration=1, semantic_type="LOCAL")
    assert own_file(tmp_path).stat().st_size < 16_000


def test_what_changes_after_an_asynchronous_save_is_not_in_the_file(root: Path) -> None:
    """P05 for whole state dicts: tensors are staged, plain values are taken when `save` is called."""
    state = training(1, steps=2)
    with Checkpointer(str(root), run="gpt", semantic_type="LOCAL", io_mode="async") as job:
        pending = job.save(state, iteration=1)
        expected = training(1, steps=2)
        with torch.no_grad():
            for tensor in (*state["model"].parameters(), *state["views"].values(), state["part"].memory):
                tensor.fill_(-1)
        state["plain"]["list"].append("later")
        pending.wait(60)
    target = training(3, steps=1)
    ckptlib.load(target, str(root / "iter_0000001"))
    assert_equal(target, expected)


def ranks_save(rank: int, root: str) -> str:
    job = Checkpointer(root, run="gpt", topology=Topology(dp=2), semantic_type="LOCAL")
    state = {"w": torch.full((2, rank + 1), float(rank)), "who": rank, f"only on {rank}": torch.ones(1)}
    job.save(state, iteration=1)
    job.close()
    target = {"w": torch.zeros(2, rank + 1), "who": -1, f"only on {rank}": torch.zeros(1)}
    ckptlib.load(target, f"{root}/iter_0000001")
    assert torch.equal(target["w"], state["w"])
    assert target["who"] == rank
    resumed = Checkpointer(root, run="gpt", topology=Topology(tp=2))
    try:
        resumed.restore(target, at=1)
    except UnsupportedError as error:
        return str(error)
    return ""


def test_ranks_may_differ_in_everything_and_another_topology_is_refused_by_name(root: Path) -> None:
    messages = run_ranks(2, ranks_save, str(root))
    for message in messages:
        assert "LOCAL checkpoint of 2 ranks, topology dp2; this job has 2, topology tp2" in message
        assert "needs conversion" in message
    assert {path.name.split(".")[0] for path in (root / "iter_0000001").glob("*.pt")} == {"__0_0", "__1_0"}
    with pytest.raises(UnsupportedError, match=r"of 2 ranks, topology dp2; this job has 1, topology tp1.*conversion"):
        ckptlib.load({"w": torch.zeros(2, 1)}, str(root / "iter_0000001"))


def one_rank_refuses(rank: int, url: str) -> None:
    ckptlib.save({"x": torch.ones(2) if rank == 0 else {1, object()}}, url, iteration=1, semantic_type="LOCAL")


def test_what_one_rank_cannot_save_fails_the_save_on_all_before_a_byte_is_written(tmp_path: Path) -> None:
    outcomes = try_ranks(2, one_rank_refuses, str(tmp_path / "c"))
    assert all(isinstance(outcome.error, CkptError) for outcome in outcomes)
    assert "no reader would load it" in str(outcomes[0].error)
    assert not (tmp_path / "c").exists()


def test_it_is_never_resumed_from_unless_its_iteration_is_named(root: Path) -> None:
    notices: list[Notice] = []
    with Checkpointer(str(root), run="gpt") as job:
        job.save({"w": torch.full((2,), 1.0)}, iteration=1)
        job.save({"w": torch.full((2,), 2.0)}, iteration=2, semantic_type="LOCAL")
        assert (root / "latest_checkpointed_iteration.txt").read_text() == "1"
    target = {"w": torch.zeros(2)}
    with Checkpointer(str(root), run="gpt", on_event=notices.append) as job:
        assert (root / "latest_checkpointed_iteration.txt").read_text() == "1"
        assert job.restore(target).iteration == 1
        assert any(notice.name == "resume_candidate_rejected" and "LOCAL" in notice.message for notice in notices)
        assert job.restore(target, at=2).iteration == 2
        assert target["w"][0] == 2
        with pytest.raises(NoResumePointError):
            job.restore(target, at=3)


def test_what_does_not_fit_changes_nothing(root: Path) -> None:
    """R4: shapes, kinds and keys are compared before anything is filled."""
    url = str(root)
    ckptlib.save({"a": torch.ones(2), "b": {"c": torch.ones(3), "d": 1}}, url, iteration=1, semantic_type="LOCAL")
    a = torch.zeros(2)
    with pytest.raises(ShapeMismatchError, match=r"'b\.c'.* holds \(3,\), the state wants \(4,\)"):
        ckptlib.load({"a": a, "b": {"c": torch.zeros(4), "d": 0}}, url)
    with pytest.raises(StateError, match=r"b\.c: .* holds a Tensor, the state has a mapping"):
        ckptlib.load({"a": a, "b": {"c": {"x": 1}, "d": 0}}, url)
    with pytest.raises(KeyMismatchError, match=r"missing 1 \(b\.e\); not requested 1 \(b\.d\)") as caught:
        ckptlib.load({"a": a, "b": {"c": torch.zeros(3), "e": 0}}, url)
    assert (caught.value.missing, caught.value.unexpected) == (("b.e",), ("b.d",))
    with pytest.raises(UnsupportedError, match="keys, cast: a whole state dict is loaded as it is"):
        ckptlib.load({"a": a}, url, keys=["a"], cast=True)
    with pytest.raises(UnsupportedError, match="without global tensors"):
        ckptlib.read(url)
    assert not a.any()
    report = ckptlib.load({"a": a}, url, strict="return")
    assert (report.unexpected, a.tolist()) == (["b"], [1, 1])


def test_what_is_of_this_process_alone_stays_where_it_stands(root: Path) -> None:
    def state(fill: float) -> dict[str, Any]:
        mine = LocalNonpersistentObject(fill)
        return {
            "list": [mine, torch.full((2,), fill), mine, {"x": fill}],
            "tuple": (mine, fill),
            "plain": [mine, fill],
            "alone": [mine],
            "dict": {"mine": mine, "x": fill},
        }

    ckptlib.save(state(1.0), str(root), iteration=1, semantic_type="LOCAL")
    target = state(7.0)
    ckptlib.load(target, str(root))
    values = {name: [x.obj if isinstance(x, LocalNonpersistentObject) else x for x in target[name]] for name in target}
    assert values["list"][1].tolist() == [1, 1]
    assert (values["list"][0], values["list"][2:]) == (7, [7, {"x": 1}])
    assert (values["tuple"], values["plain"], values["alone"]) == ([7, 1], [7, 1], [7])
    assert (target["dict"]["mine"].obj, target["dict"]["x"]) == (7, 1)


def trained(size: int, make: Callable[..., torch.optim.Optimizer], *, steps: int) -> dict[str, Any]:
    model = torch.nn.Linear(size, 3)
    optimizer = make(model.parameters())
    for _ in range(steps):

        def loss() -> Any:
            optimizer.zero_grad()
            value = model(torch.ones(2, size)).square().sum()
            value.backward()
            return value

        optimizer.step(loss)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
def test_moments_of_another_shape_are_refused_before_anything_changes(root: Path, steps: int) -> None:
    """R4: torch's own load takes them, and fails at the next step."""
    ckptlib.save(trained(4, torch.optim.Adam, steps=1), str(root), iteration=1, semantic_type="LOCAL")
    optimizer = trained(5, torch.optim.Adam, steps=steps)["optimizer"]
    before = optimizer.state_dict()
    wrong = r"'optimizer\.state\.0\.exp_avg': .* holds \(3, 4\), the optimizer wants \(3, 5\)"
    with pytest.raises(ShapeMismatchError, match=wrong):
        ckptlib.load({"optimizer": optimizer}, str(root), strict="return")
    assert_equal(optimizer, before)


@pytest.mark.parametrize("name", ["Adam", "Adafactor", "LBFGS", "SGD", "Rprop"])
def test_what_an_optimizer_of_torch_keeps_is_loaded_into_a_fresh_one(root: Path, name: str) -> None:
    make = getattr(torch.optim, name)
    saved = trained(4, make, steps=2)
    ckptlib.save(saved, str(root), iteration=1, semantic_type="LOCAL")
    for steps in (0, 1):
        target = trained(4, make, steps=steps)
        ckptlib.load(target, str(root))
        assert_equal(target, saved)


@pytest.mark.parametrize("semantic_type", ["LOCAL", "LEGACY"])
def test_tied_tensors_are_not_filled_from_values_that_differ(root: Path, semantic_type: SemanticType) -> None:
    """Which of the two won would be chance; what cannot be told apart by bits may be loaded."""
    url = str(root)
    nan = torch.tensor([float("nan"), 1.0])
    stored = {"a": torch.ones(2), "b": {"c": torch.zeros(2)}, "d": nan, "e": nan.clone()}
    ckptlib.save(stored, url, iteration=1, semantic_type=semantic_type)
    tied, other = torch.full((2,), 7.0), torch.zeros(2)
    target = {"a": tied, "b": {"c": tied}, "d": other, "e": other}
    with pytest.raises(StateError, match=r"'a' and 'b\.c' are one memory here, but .*\.pt holds different values"):
        ckptlib.load(target, url)
    assert (tied.tolist(), other.tolist()) == ([7, 7], [0, 0])
    target["b"] = {"c": torch.ones(2)}
    ckptlib.load(target, url)
    assert (tied.tolist(), other[1].item()) == ([1, 1], 1)


@pytest.mark.parametrize("level", ["structure", "data"])
@pytest.mark.parametrize("where", ["pickle", "payload", "directory", "cut"])
def test_damage_is_found_and_nothing_is_loaded_from_it(root: Path, level: str, where: str) -> None:
    url = str(root)
    ckptlib.save({"a": torch.arange(5000.0)}, url, iteration=1, semantic_type="LOCAL")
    assert ckptlib.verify(url, level=level).ok
    path = own_file(root)
    data = bytearray(path.read_bytes())
    place = {"pickle": data.find(b"_rebuild") + 2, "payload": len(data) // 2, "directory": len(data) - 60, "cut": 0}
    data[place[where]] ^= 4 if where != "cut" else 0
    path.write_bytes(data if where != "cut" else data[:-100])
    found = ckptlib.verify(url, level=level)
    assert found.corrupt == (level == "data" or where != "payload")  # payloads are only read at level data
    if found.corrupt:
        assert found.files[path.name] == ("size" if where == "cut" else "digest")
    if level == "data" and where == "payload":
        assert "data/0: CRC-32" in found.checks[path.name].detail  # which tensor it is
    target = torch.zeros(5000)
    with pytest.raises((IntegrityError, OSError)):
        ckptlib.load({"a": target}, url)
    assert not target.any()


def test_a_tensor_inside_an_opaque_object_is_refused(tmp_path: Path) -> None:
    class Bag:
        pass

    bag = argparse.Namespace(x=torch.ones(2))
    with pytest.raises(StateError, match="a tensor lies inside an object that is no dict, list or tuple"):
        ckptlib.save({"bag": bag}, str(tmp_path / "c"), iteration=1, semantic_type="LOCAL")
    with pytest.raises(StateError):
        ckptlib.save({"bag": Bag()}, str(tmp_path / "c"), iteration=1, semantic_type="LOCAL")
    assert not (tmp_path / "c").exists()


class Pair(NamedTuple):
    one: Any
    other: Any


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Pair(torch.ones(2), 1), "cannot be saved"),
        (argparse.Namespace(x=torch.ones(2)), "a tensor lies inside an object"),
        (object(), "cannot be saved, because no reader would load it"),
        (lambda: None, "cannot be saved"),
        ({Pair(1, 2): 1}, "cannot be saved"),
    ],
    ids=["namedtuple", "opaque", "object", "function", "key"],
)
def test_what_cannot_be_saved_is_named_by_its_path(tmp_path: Path, value: Any, why: str) -> None:
    state = {"fine": [1, {"a"}, torch.ones(3)], "deep": {"list": [0, value]}, "w": torch.ones(1)}
    with pytest.raises(StateError, match=rf"^deep\.list\.1.*: {why}"):
        ckptlib.save(state, str(tmp_path / "c"), iteration=1, semantic_type="LOCAL")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("semantic_type", ["LOCAL", "LEGACY", "GLOBAL", "TORCH_DCP"])
def test_names_at_the_top_are_strings(root: Path, semantic_type: SemanticType) -> None:
    state: Any = {1: torch.ones(2), "a": torch.ones(1)}
    wrong = r"state: the name 1 is a int, expected a string: '1'"
    with pytest.raises(StateError, match=wrong):
        ckptlib.save(state, str(root / "bare"), iteration=1, semantic_type=semantic_type)
    with Checkpointer(str(root), run="gpt", semantic_type=semantic_type) as job, pytest.raises(StateError, match=wrong):
        job.save(state, iteration=1)
