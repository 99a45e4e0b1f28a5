"""What ckptlib writes, the real Megatron-Core 0.19.2 loads through `dist_checkpointing.load`, bit for bit."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckptlib
from ckptlib import data_names
from ckptlib.data_names import data_name
from tests.megatron.judging import REPOSITORY, Judge, Verdict
from tests.megatron.reference import COMMON, ITERATION, PARAMETERS, cell_value, cells, expected, pieces, state

pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module")
def by_one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference state, saved without torch.distributed."""
    path = tmp_path_factory.mktemp("one") / f"iter_{ITERATION:07d}"
    ckptlib.save(state(1, 0), str(path), iteration=ITERATION, run="reference")
    return path


@pytest.fixture(scope="module")
def by_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same state, saved by two gloo processes, each with its half of every tensor."""
    path = tmp_path_factory.mktemp("two") / f"iter_{ITERATION:07d}"
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.megatron.writer", str(path), str(rank), "2", str(port)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    return path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.fixture(params=["by_one_process", "by_two_ranks"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    """Both, in turn."""
    path: Path = request.getfixturevalue(request.param)
    return path


def assert_holds(verdict: Verdict, wanted: dict[str, torch.Tensor]) -> None:
    assert verdict.error == ""
    assert verdict.tensors.keys() == wanted.keys()
    for name, value in wanted.items():
        assert verdict.tensors[name].dtype == value.dtype, name
        assert torch.equal(verdict.tensors[name], value), name


def test_one_megatron_rank_loads_every_piece(judge: Judge, checkpoint: Path) -> None:
    (verdict,) = judge.load(checkpoint, pieces(1, 0))
    assert_holds(verdict, expected(1, 0))


def test_two_megatron_ranks_load_their_halves(two_ranks: Judge, checkpoint: Path) -> None:
    verdicts = two_ranks.load(checkpoint, pieces(2, 0), pieces(2, 1))
    assert_holds(verdicts[0], expected(2, 0))
    assert_holds(verdicts[1], expected(2, 1))


def test_megatron_loads_whole_tensors_by_key(judge: Judge, checkpoint: Path) -> None:
    verdict = judge.load_whole(checkpoint)
    assert_holds(verdict, {parameter.key: parameter.values() for parameter in PARAMETERS})
    assert verdict.backend == "torch_dist"


def test_megatron_reads_the_common_state(judge: Judge, checkpoint: Path) -> None:
    (verdict,) = judge.load(checkpoint, [])
    wanted = {**COMMON, "args": vars(COMMON["args"])}
    assert {name: verdict.common.get(name) for name in wanted} == json.loads(json.dumps(wanted))


def test_megatron_reads_objects_of_both_ranks(two_ranks: Judge, by_two_ranks: Path) -> None:
    verdicts = two_ranks.load(by_two_ranks, cells(2, 0), cells(2, 1))
    for rank, verdict in enumerate(verdicts):
        assert verdict.error == ""
        assert verdict.objects == {cell.name: cell_value(cell) for cell in cells(2, rank)}


def test_megatron_finds_a_flipped_byte_with_the_integrity_file_we_wrote(judge: Judge, tmp_path: Path) -> None:
    path = tmp_path / "iter_0000007"
    ckptlib.save(state(1, 0), str(path), iteration=ITERATION, run="reference")
    shard = next(path.glob("*.distcp"))
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 3] ^= 0x10
    shard.write_bytes(damaged)
    (verdict,) = judge.load(path, pieces(1, 0))
    assert shard.name in verdict.error


def test_megatron_reads_and_checks_files_in_directories_below(
    judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of ranks from 10,000 on."""
    monkeypatch.setattr("ckptlib.writer.data_name", lambda rank, *rest: data_name(rank + data_names.FAN_OUT, *rest))
    path = tmp_path / "iter_0000007"
    ckptlib.save(state(1, 0), str(path), iteration=ITERATION, run="reference")
    (shard,) = path.glob("__1.*.ranks/*.distcp")
    (verdict,) = judge.load(path, pieces(1, 0))
    assert_holds(verdict, expected(1, 0))
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 3] ^= 0x10
    shard.write_bytes(damaged)
    (verdict,) = judge.load(path, pieces(1, 0))
    assert shard.name in verdict.error


def test_megatron_sees_the_newest_of_two_saves_of_one_iteration(judge: Judge, tmp_path: Path) -> None:
    """W9: a replaced save leaves nothing behind that Megatron would mix in."""
    path = tmp_path / "iter_0000007"
    first = state(1, 0)
    for piece in first["model"].values():
        piece.data.zero_()
    ckptlib.save(first, str(path), iteration=ITERATION, run="reference")
    ckptlib.save(state(1, 0), str(path), iteration=ITERATION, run="reference", on_exists="replace")
    (verdict,) = judge.load(path, pieces(1, 0))
    assert_holds(verdict, expected(1, 0))


def test_megatron_finds_what_it_asks_for_in_a_run_that_a_checkpointer_saved(judge: Judge, tmp_path: Path) -> None:
    """Megatron's `load_checkpoint`: the tracker, then the common state's counters and args, then `rng_state`."""
    own_to_checkpointer = {"args", "iteration", "checkpoint_version", "num_floating_point_operations_so_far"}
    parts = {name: part for name, part in state(1, 0).items() if name not in own_to_checkpointer}
    parts["objects"].pop("rng")
    with ckptlib.Checkpointer(str(tmp_path), run="reference", topology=ckptlib.Topology()) as checkpointer:
        checkpointer.save(parts, iteration=ITERATION, args=COMMON["args"], progress={"flops": 1.5e12})

    tracked = (tmp_path / "latest_checkpointed_iteration.txt").read_text()
    assert tracked == str(ITERATION)
    (verdict,) = judge.load(tmp_path / f"iter_{int(tracked):07d}", [*pieces(1, 0), *cells(1, 0)])
    assert_holds(verdict, expected(1, 0))
    assert {name: verdict.common[name] for name in own_to_checkpointer} == {
        name: vars(COMMON[name]) if name == "args" else COMMON[name] for name in own_to_checkpointer
    }
    (rng,) = verdict.objects["rng"]
    assert rng.keys() >= {"random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states"}


@pytest.mark.parametrize("strict", ["log_all", "raise_all"])
def test_megatron_compares_all_keys_of_a_state_without_plain_values(judge: Judge, tmp_path: Path, strict: str) -> None:
    sharded = {name: part for name, part in state(1, 0).items() if name not in COMMON}
    ckptlib.save(sharded, str(tmp_path / "iter_0000007"), iteration=ITERATION, run="reference")
    (verdict,) = judge.load(tmp_path / "iter_0000007", [*pieces(1, 0), *cells(1, 0)], strict=strict)
    assert_holds(verdict, expected(1, 0))


def test_megatron_cannot_compare_all_keys_when_there_are_plain_values(judge: Judge, by_one_process: Path) -> None:
    """A known limit (docs/compatibility.md): torch's DCP finds a plain value under its dotted path, and Megatron's
    non-default strictness takes the name of every bytes item for a cell of a ShardedObject."""
    (verdict,) = judge.load(by_one_process, [*pieces(1, 0), *cells(1, 0)], strict="log_all")
    assert verdict.error == "ValueError: not enough values to unpack (expected 2, got 1)"
