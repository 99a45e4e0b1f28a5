"""LEGACY + torch: one whole state dict per (tp, pp, ep) place, under the names that Megatron looks for."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib import Checkpointer, Topology, commit, exported, exports, formats, removal
from ckptlib import storage as st
from ckptlib.async_options import AsyncOptions
from ckptlib.errors import CheckpointExistsError, IntegrityError, UnsupportedError
from ckptlib.layouts import legacy
from ckptlib.manifest import Decision, IoMode
from ckptlib.safe_pickle import Foreign, load_object
from tests.support.foreign import COLLECTION
from tests.support.ranks import run_ranks

FILE = "model_optim_rng.pt"


# --- who writes what --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "rank", "name"),
    [
        (Topology(), 0, "mp_rank_00"),
        (Topology(tp=2, dp=3), 3, "mp_rank_01"),
        (Topology(tp=2, pp=2), 3, "mp_rank_01_001"),
        (Topology(dp=4, ep=4), 2, "mp_rank_00_002"),
        (Topology(tp=2, pp=2, dp=2, ep=2), 5, "mp_rank_01_001_001"),
    ],
)
def test_a_place_is_named_as_megatron_names_it(topology: Topology, rank: int, name: str) -> None:
    assert legacy.place_name(topology, rank) == name


@pytest.mark.parametrize(
    "topology",
    [
        Topology(tp=4, ep=2, dp=2),  # TP > EP x ETP
        Topology(tp=4, ep=2),
        Topology(tp=4, pp=2, ep=2, dp=2),
        Topology(tp=2, ep=4, dp=4),  # TP < EP x ETP
        Topology(tp=2, ep=4, etp=2, dp=4),
        Topology(tp=4, ep=4, etp=2, dp=2),
        Topology(tp=2, cp=2, dp=2),
        Topology(cp=2, dp=2, ep=4),
        Topology(tp=8, pp=4, dp=4, ep=8),
    ],
    ids=str,
)
def test_every_place_has_exactly_one_writer_among_the_ranks_that_megatron_lets_write(topology: Topology) -> None:
    found = legacy.writers(topology)
    assert {legacy.place_name(topology, rank) for rank in range(topology.world_size)} == found.keys()
    assert len(set(found.values())) == len(found)
    for name, rank in found.items():
        assert legacy.place_name(topology, rank) == name
        assert topology.coordinates(rank).dp == 0 or topology.expert_coordinates(rank).dp == 0
    writing = {
        rank
        for rank in range(topology.world_size)
        if (topology.coordinates(rank).dp, topology.coordinates(rank).cp) == (0, 0)
        or topology.expert_coordinates(rank).dp == 0
    }
    assert writing == set(found.values())


def test_who_writes_follows_from_few_ranks_however_many_there_are() -> None:
    every = 0
    for tp, cp, dp, ep, etp, pp in itertools.product((1, 2, 4), (1, 2), (1, 3, 4), (1, 2, 4), (1, 2, 3), (1, 2)):
        if tp * cp * dp % (ep * etp):
            continue
        topology = Topology(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, pp=pp)
        places: dict[str, list[int]] = {}
        for rank in range(topology.world_size):
            at = topology.coordinates(rank)
            writes = (at.dp == 0 and at.cp == 0) or topology.expert_coordinates(rank).dp == 0
            places.setdefault(legacy.place_name(topology, rank), []).extend([rank] if writes else [])
        if all(len(ranks) == 1 for ranks in places.values()):
            assert legacy.writers(topology) == {name: ranks[0] for name, ranks in places.items()}
            assert legacy.writer_count(topology) == len(places)
            every += 1
        else:
            with pytest.raises(UnsupportedError):
                legacy.writers(topology)
    assert every > 50
    assert legacy.writers(Topology(tp=2, dp=10**9)) == {"mp_rank_00": 0, "mp_rank_01": 1}


@pytest.mark.parametrize(
    ("topology", "why"),
    [
        (Topology(etp=2, dp=2), "ranks 0, 1 would write it"),  # two shards of experts, one directory
        (Topology(tp=3, ep=2, dp=2), "no rank would write it"),
    ],
    ids=str,
)
def test_a_topology_that_the_layout_cannot_hold_is_refused_at_construction(
    topology: Topology, why: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=rf"{topology}.*{why}.*GLOBAL \+ torch_dist"):
        legacy.writers(topology)


# --- what is written --------------------------------------------------------------------------------------------------


class Part:
    """Notes when its state is asked for."""

    def __init__(self, **state: Any) -> None:
        self.state = state
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def training(topology: Topology, rank: int, fill: float) -> dict[str, Any]:
    """Weights of a place, the same on its data-parallel ranks; a Megatron-like optimizer and scheduler."""
    at, ep = topology.coordinates(rank), topology.expert_coordinates(rank).ep
    value = fill + at.tp + 10 * at.pp + 100 * ep
    weights = {"decoder.layers.0.weight": torch.full((4, 3), value, dtype=torch.bfloat16), "norm._extra_state": None}
    moments = {"state": {0: {"step": 3, "exp_avg": torch.full((4, 3), value)}}, "param_groups": [{"lr": 0.1}]}
    main = [[torch.full((4, 3), value)]]
    return {
        "model": Part(**weights),
        "optimizer": Part(optimizer=moments, fp32_from_fp16_params=main),
        "opt_param_scheduler": Part(num_steps=80, lr_decay_style="cosine"),
    }


def save_by_ranks(rank: int, root: str, topology: Topology, io_mode: IoMode) -> tuple[int, int]:
    """How often this rank's model was asked for its state, and how many bytes it wrote or staged."""
    state = training(topology, rank, 1.0)
    args = argparse.Namespace(tensor_model_parallel_size=topology.tp, pipeline_model_parallel_size=topology.pp)
    with Checkpointer(root, run="gpt", topology=topology, semantic_type="LEGACY", io_mode=io_mode) as job:
        saved = job.save(state, iteration=10, progress={"flops": 1e13}, args=args, rerun_state={"mode": 1}).wait(60)
    return state["model"].asked, saved.bytes


def load_by_ranks(rank: int, root: str, topology: Topology) -> float:
    state = training(topology, rank, -1.0)
    with Checkpointer(root, run="gpt", topology=topology) as job:
        restored = job.restore(state)
    assert restored.iteration == 10
    assert restored.progress["flops"] == 1e13
    value = state["model"].state["decoder.layers.0.weight"]
    assert torch.equal(state["optimizer"].state["fp32_from_fp16_params"][0][0], value.float())
    return float(value[0, 0])


@pytest.mark.parametrize("io_mode", ["sync", "async"])
def test_only_the_writers_are_asked_for_their_state_and_all_ranks_load_their_place(
    tmp_path: Path, io_mode: IoMode
) -> None:
    topology = Topology(tp=2, dp=2, ep=1)
    root = str(tmp_path / "run")
    asked = run_ranks(4, save_by_ranks, root, topology, io_mode)
    assert [times for times, _ in asked] == [1, 1, 0, 0]
    if io_mode == "async":
        assert [staged > 0 for _, staged in asked] == [True, True, False, False]
    url = Path(root) / "iter_0000010"
    assert sorted(path.name for path in url.glob("mp_rank_*")) == ["mp_rank_00", "mp_rank_01"]
    assert (Path(root) / "latest_checkpointed_iteration.txt").read_text() == "10"
    for level in ("listing", "structure", "data"):
        assert ckptlib.verify(str(url), level=level).ok, level
    info = ckptlib.inspect(str(url))
    assert (info.semantic_type, info.format, str(info.topology)) == ("LEGACY", "torch", "tp2-dp2")
    assert run_ranks(4, load_by_ranks, root, topology) == [1.0, 2.0, 1.0, 2.0]
    assert run_ranks(2, load_by_ranks, root, Topology(tp=2)) == [1.0, 2.0]  # dp may differ
    with pytest.raises(UnsupportedError, match=r"LEGACY checkpoint of 4 ranks, topology tp2-dp2; .*topology tp1"):
        Checkpointer(root, run="gpt").restore(training(Topology(), 0, 0.0))


def test_experts_have_directories_of_their_own(tmp_path: Path) -> None:
    """TP > EP x ETP: with TP 4 and EP 2 every rank's (tp, ep) is another, and each is written."""
    topology = Topology(tp=4, ep=2)
    root = str(tmp_path / "run")
    assert [times for times, _ in run_ranks(4, save_by_ranks, root, topology, "sync")] == [1, 1, 1, 1]
    url = Path(root) / "iter_0000010"
    names = ["mp_rank_00_000", "mp_rank_01_001", "mp_rank_02_000", "mp_rank_03_001"]
    assert sorted(path.name for path in url.glob("mp_rank_*")) == names
    assert run_ranks(4, load_by_ranks, root, topology) == [1.0, 102.0, 3.0, 104.0]


def shape_of(value: Any, depth: int = 3) -> Any:
    """The layout of a state dict: names and types, some levels deep."""
    if isinstance(value, dict) and depth:
        return {name: shape_of(inner, depth - 1) for name, inner in value.items() if isinstance(name, str)}
    return "dict" if isinstance(value, dict) else type(value).__name__


@pytest.mark.skipif(not COLLECTION.exists(), reason="the collection of Megatron fixtures is not here")
def test_what_was_read_of_a_megatron_file_is_written_as_the_same_state_dict(tmp_path: Path) -> None:
    """Megatron-Core's own file, taken apart into the parts of a trainer and saved: names, order of nesting, types."""
    path = COLLECTION / "legacy0192_tp1pp1_fp16" / "ckpt" / "iter_0000010" / "mp_rank_00" / FILE
    theirs = load_object(path.read_bytes(), str(path))
    parts = {name: theirs[name] for name in ("model", "optimizer", "opt_param_scheduler")}
    known = {name: value for name, value in vars(theirs["args"]).items() if not isinstance(value, Foreign)}
    args = argparse.Namespace(**known)  # enums of Megatron-Core exist only where it does
    progress = {"flops": theirs["num_floating_point_operations_so_far"]}
    with Checkpointer(str(tmp_path / "run"), run="gpt", semantic_type="LEGACY") as job:
        job.save(parts, iteration=10, progress=progress, args=args)
    ours_path = tmp_path / "run" / "iter_0000010" / "mp_rank_00" / FILE
    ours = load_object(ours_path.read_bytes(), str(ours_path))
    assert ours.keys() - theirs.keys() == {"progress"}
    assert theirs.keys() <= ours.keys()
    without_rng = {name: value for name, value in theirs.items() if name != "rng_state"}
    assert shape_of({name: ours[name] for name in without_rng}) == shape_of(without_rng)
    assert {*ours["rng_state"][0]} == {*theirs["rng_state"][0]}
    for name, tensor in theirs["model"].items():
        assert tensor is None or torch.equal(ours["model"][name], tensor)
    assert (ours["iteration"], ours["checkpoint_version"]) == (theirs["iteration"], theirs["checkpoint_version"])


# --- names that appear with the commit --------------------------------------------------------------------------------


def test_w1_nothing_but_names_with_the_save_id_is_there_before_the_decision(tmp_path: Path) -> None:
    seen: list[str] = []
    decide = commit._decide

    def look(storage: Any, path: str, decision: Any) -> Any:
        seen.extend(entry.name for entry in storage.list(path))
        return decide(storage, path, decision)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "_decide", look)
        saved = ckptlib.save({"w": torch.ones(2)}, str(tmp_path / "i"), iteration=1, semantic_type="LEGACY")
    assert sorted(seen) == [".ckpt", f"__0_0.{saved.save_id}.pt"]
    written, named = tmp_path / "i" / f"__0_0.{saved.save_id}.pt", tmp_path / "i" / "mp_rank_00" / FILE
    assert written.samefile(named)  # a second name: nothing is stored twice


def test_w5_anyone_makes_the_megatron_names_again_and_twice_changes_nothing(tmp_path: Path) -> None:
    url = str(tmp_path / "i")
    ckptlib.save({"w": torch.ones(5000)}, url, iteration=1, semantic_type="LEGACY")
    named = tmp_path / "i" / "mp_rank_00" / FILE
    before = named.read_bytes()
    storage, path = st.resolve(url)
    for wrong in (None, b"something else", b"x" * len(before)):
        named.unlink()
        if wrong is not None:
            named.write_bytes(wrong)
        exports.roll_forward(storage, path)
        assert named.read_bytes() == before
        assert ckptlib.verify(url).ok
    assert ckptlib.verify(url).bytes_read < 2 * len(before)  # two names of one file are read once
    inode = named.stat().st_ino
    exports.roll_forward(storage, path)
    assert named.stat().st_ino == inode
    named.write_bytes(before[:-1])  # both names
    assert ckptlib.verify(url).corrupt


def test_without_hard_links_the_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "i")
    link = os.link

    def refuse(source: str, target: str) -> None:
        if source.endswith(".pt"):
            raise OSError(1, "Operation not permitted", target)
        link(source, target)

    monkeypatch.setattr(os, "link", refuse)
    saved = ckptlib.save({"w": torch.ones(2)}, url, iteration=1, semantic_type="LEGACY")
    written, named = tmp_path / "i" / f"__0_0.{saved.save_id}.pt", tmp_path / "i" / "mp_rank_00" / FILE
    assert not written.samefile(named)
    assert written.read_bytes() == named.read_bytes()
    named.write_bytes(b"x" * named.stat().st_size)
    storage, path = st.resolve(url)
    exports.roll_forward(storage, path)
    assert written.read_bytes() == named.read_bytes()


def test_a_start_reads_no_copies_where_nobody_can_have_spoilt_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W5: copies are compared byte for byte while their roll-forward is unfinished, or beside traces of other saves."""

    def no_links(source: str, target: str) -> None:
        raise OSError(1, "Operation not permitted", target)

    posix_link = os.link
    monkeypatch.setattr(os, "link", lambda one, other: (no_links if one.endswith(".pt") else posix_link)(one, other))
    compared: list[str] = []
    compare = st.base.equal_bytes
    monkeypatch.setattr(st.base, "equal_bytes", lambda s, one, other: compared.append(other) or compare(s, one, other))

    def start() -> int:
        compared.clear()
        Checkpointer(str(tmp_path), run="gpt").close()
        return len(compared)

    def save(**options: Any) -> None:
        with Checkpointer(str(tmp_path), run="gpt", semantic_type="LEGACY") as job:
            job.save({"w": torch.ones(2)}, iteration=1, **options)

    save()
    url = tmp_path / "iter_0000001"
    named = url / "mp_rank_00" / FILE
    right = named.read_bytes()
    assert start() == 0
    named.write_bytes(right[:-1])  # sizes are looked at
    assert start() > 0
    assert named.read_bytes() == right
    (written,) = url.glob("__0_0.*.pt")
    record = url / ".ckpt" / written.name.split(".")[1] / commit.record_name(0)
    record.touch()  # the roll-forward was not finished: of a foreign checkpoint the file may be
    named.write_bytes(b"x" * len(right))
    assert start() > 0
    assert named.read_bytes() == right
    assert not record.exists()
    save(on_exists="replace")  # from now on an overtaken process may have put the older copy back
    right = named.read_bytes()
    named.write_bytes(b"x" * len(right))
    assert start() > 0
    assert named.read_bytes() == right


@pytest.mark.parametrize("semantic_type", ["LEGACY", "LOCAL"])
def test_a_committed_manifest_that_names_no_file_of_a_writer_is_damage(tmp_path: Path, semantic_type: Any) -> None:
    saved = ckptlib.save({"w": torch.ones(2)}, str(tmp_path), iteration=1, semantic_type=semantic_type)
    directory = tmp_path / ".ckpt" / saved.save_id
    manifest = ckptlib.inspect(str(tmp_path)).manifest
    assert manifest is not None
    ten_million = replace(manifest.begin, world_size=10**7, topology=Topology(tp=10**7))
    for wrong in (replace(manifest, files=manifest.files_of("index")), replace(manifest, begin=ten_million)):
        data = wrong.encode()  # consistent with itself: begin record, export and digest are of it
        (directory / "manifest.json").write_bytes(data)
        (tmp_path / "checkpoint.json").write_bytes(data)
        (directory / "begin.json").write_bytes(wrong.begin.encode())
        decision = Decision.decode((directory / "decision.json").read_bytes(), "d")
        decision = replace(decision, manifest_sha256=hashlib.sha256(data).hexdigest())
        (directory / "decision.json").write_bytes(decision.encode())
        report = ckptlib.verify(str(tmp_path))
        assert report.corrupt
        assert not report.unreadable
        with pytest.raises(IntegrityError):
            ckptlib.load({"w": torch.zeros(2)}, str(tmp_path))


def killed_before_its_rename(url: Path) -> list[Path]:
    """What is left of an export's writing then: a second name of the file, or half a copy of it."""
    (written,) = url.glob("__0_0.*.pt")
    left = [url / "mp_rank_00" / f".{FILE}.{'0' * 32}.tmp", url / f".checkpoint.json.{'1' * 32}.tmp"]
    for path in left:
        os.link(written, path)
    return left


def test_what_a_killed_process_left_beside_the_exports_goes_with_the_next_roll_forward(tmp_path: Path) -> None:
    saved = ckptlib.save({"w": torch.ones(2)}, str(tmp_path), iteration=1, semantic_type="LEGACY")
    left = killed_before_its_rename(tmp_path)
    kept = tmp_path / "mp_rank_00" / ".another.tmp"
    kept.touch()
    (tmp_path / "mp_rank_00" / FILE).unlink()
    storage, path = st.resolve(str(tmp_path))
    exports.roll_forward(storage, path)
    assert not any(file.exists() for file in left)
    assert kept.exists()
    left = killed_before_its_rename(tmp_path)  # of a first roll-forward: records are still there
    (tmp_path / ".ckpt" / saved.save_id / commit.record_name(0)).touch()
    exports.roll_forward(storage, path)
    assert not any(file.exists() for file in left)
    assert ckptlib.verify(str(tmp_path)).ok


def test_it_goes_with_the_checkpoint_too_and_is_nobody_elses(tmp_path: Path) -> None:
    saved = ckptlib.save({"w": torch.ones(2)}, str(tmp_path / "i"), iteration=1, semantic_type="LEGACY")
    killed_before_its_rename(tmp_path / "i")
    storage, path = st.resolve(str(tmp_path / "i"))
    removal.remove_save(storage, path, saved.save_id)
    assert not (tmp_path / "i").exists()
    (tmp_path / "i" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "i" / "mp_rank_00" / f".{FILE}.{'0' * 32}.tmp").touch()  # an older version left it
    assert formats.sniff(storage, path) is None
    (tmp_path / "i" / "mp_rank_00" / FILE).touch()
    assert formats.sniff(storage, path) == "torch"


def test_an_export_whose_temporary_file_another_process_removed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, lost = os.replace, []

    def lose(source: str, target: str) -> None:
        if target not in lost:
            lost.append(target)
            os.unlink(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", lose)
    ckptlib.save({"w": torch.ones(2)}, str(tmp_path), iteration=1, semantic_type="LEGACY")
    assert {os.path.basename(name) for name in lost} >= {FILE, "checkpoint.json", "integrity.json"}
    assert ckptlib.verify(str(tmp_path)).ok
    assert not list(tmp_path.rglob("*.tmp"))


def test_memory_storage_holds_it_too() -> None:
    url = f"memory://legacy-{os.getpid()}/i"
    ckptlib.save({"w": torch.ones(2)}, url, iteration=1, semantic_type="LEGACY")
    storage, path = st.resolve(url)
    assert storage.stat(f"{path}/mp_rank_00/{FILE}")
    assert ckptlib.verify(url).ok
    target = {"w": torch.zeros(2)}
    ckptlib.load(target, url)
    assert target["w"].tolist() == [1, 1]


@pytest.mark.parametrize("newer", ["GLOBAL", "LOCAL", "LEGACY", "GLOBAL again"])
def test_w9_a_save_of_another_meaning_takes_the_names_away(tmp_path: Path, newer: str) -> None:
    url = tmp_path / "i"
    older = "GLOBAL" if newer == "GLOBAL again" else "LEGACY"
    meaning: Any = "LEGACY" if newer == "GLOBAL again" else newer
    ckptlib.save({"w": torch.ones(2)}, str(url), iteration=1, semantic_type=older)  # type: ignore[arg-type]
    with pytest.raises(CheckpointExistsError):
        ckptlib.save({"w": torch.ones(2)}, str(url), iteration=1, semantic_type=meaning)
    saved = ckptlib.save({"w": torch.zeros(2)}, str(url), iteration=1, semantic_type=meaning, on_exists="replace")
    manifest = ckptlib.inspect(str(url)).manifest
    assert manifest is not None
    expected = {exported.CHECKPOINT, exported.INTEGRITY, *manifest.exports}
    found = {str(path.relative_to(url)) for path in url.rglob("*") if path.is_file() and ".ckpt" not in path.parts}
    assert {name for name in found if saved.save_id not in name} == expected
    assert (url / "mp_rank_00").exists() == (meaning == "LEGACY")
    assert ckptlib.verify(str(url)).ok
    target = {"w": torch.ones(2)}
    ckptlib.load(target, str(url))
    assert target["w"].tolist() == [0, 0]


class DistributedOptimizer(Part):
    """Megatron-Core's: its moments are not in its state dict."""

    def get_parameter_state_dp_zero(self) -> None:
        pass


@pytest.mark.parametrize("chained", [False, True])
def test_an_optimizer_that_keeps_its_moments_elsewhere_is_refused(tmp_path: Path, chained: bool) -> None:
    optimizer: Any = DistributedOptimizer(param_groups=[])
    if chained:
        optimizer, inner = Part(param_groups=[]), optimizer
        optimizer.chained_optimizers = [Part(), inner]
    with pytest.raises(UnsupportedError, match=r"optimizer: a distributed optimizer .* distrib_optim\.pt.* GLOBAL"):
        ckptlib.save({"optimizer": optimizer}, str(tmp_path / "i"), iteration=1, semantic_type="LEGACY")
    assert not (tmp_path / "i").exists()


def random_init(rank: int, root: str) -> list[float]:
    topology = Topology(tp=2, dp=2)
    with Checkpointer(
        root, run="gpt", topology=topology, semantic_type="LEGACY", data_parallel_random_init=True
    ) as job:
        torch.manual_seed(rank)
        job.save({"w": torch.ones(2)}, iteration=1)
        drawn = torch.rand(3).tolist()
        torch.manual_seed(99)
        job.restore({"w": torch.zeros(2)})
        assert torch.rand(3).tolist() == drawn
    return drawn


def test_with_random_init_every_data_parallel_rank_has_its_own_streams(tmp_path: Path) -> None:
    drawn = run_ranks(4, random_init, str(tmp_path / "run"))
    assert len({tuple(numbers) for numbers in drawn}) == 4
    path = tmp_path / "run" / "iter_0000001" / "mp_rank_01" / FILE
    assert len(load_object(path.read_bytes(), str(path))["rng_state"]) == 2


def test_asynchronous_worker_processes_write_it_and_ordinary_torch_reads_it(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(3, 3), "steps": 5}
    with Checkpointer(
        str(tmp_path), run="gpt", semantic_type="LEGACY", io_mode="async", background=AsyncOptions(max_in_flight=2)
    ) as job:
        for iteration in (1, 2):
            job.save(state, iteration=iteration, contents=["model", "steps"])
    for iteration in (1, 2):
        found = torch.load(tmp_path / f"iter_{iteration:07d}" / "mp_rank_00" / FILE, weights_only=True)
        assert torch.equal(found["model"]["weight"], state["model"].weight)
        assert (found["iteration"], found["steps"], found["checkpoint_version"]) == (iteration, 5, 3.0)
