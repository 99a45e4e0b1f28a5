"""`load_parallelism="dp"`: each byte is read by one rank and arrives at all that need it; a failure reaches everybody.

One launch of four gloo ranks runs all checks (see `tests.support.ranks.run_checks`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ckptlib
from ckptlib import ShardedTensor, exchange, sharing
from ckptlib.errors import LoadIncompleteError, RankFailedError
from ckptlib.reader import LoadReport
from tests.support.ranks import run_checks, try_ranks
from tests.support.trees import assert_same

pytestmark = pytest.mark.timeout(300)
WORLD = 4


def whole(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.rand(*shape, generator=generator).to(dtype)


def everywhere(value: int) -> list[int]:
    """One number of each rank."""
    out = [torch.zeros((), dtype=torch.int64) for _ in range(WORLD)]
    dist.all_gather(out, torch.tensor(value))
    return [int(number) for number in out]


def load(state: dict[str, Any], url: str, **options: Any) -> LoadReport:
    return ckptlib.load(state, url, load_parallelism="dp", timeout=30.0, **options)


def read_once(report: LoadReport, needed_once: int) -> list[int]:
    """Checks that all ranks together read these bytes and no more; what each read."""
    read = everywhere(report.bytes_read)
    assert sum(read) == needed_once, (read, needed_once)
    assert report.bytes_received == report.bytes_needed - report.bytes_read
    return read


def check_replicas_of_ddp_read_a_quarter_each(rank: int, folder: str) -> None:
    torch.manual_seed(5)
    layers = [torch.nn.Linear(40, 50) for _ in range(12)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    numbers = whole("numbers", 70)
    made = {"b": numbers > 0.5, "h": numbers.bfloat16(), "f8": numbers.to(torch.float8_e4m3fn), "c": numbers + 1j}
    state = {"model": model, "dtypes": made}
    wanted = {name: value.clone() for name, value in model.module.state_dict().items()}
    dtypes = {name: value.clone() for name, value in state["dtypes"].items()}
    ckptlib.save(state, f"{folder}/ddp", iteration=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank)
    state["dtypes"] = {name: torch.zeros_like(value) for name, value in dtypes.items()}
    report = load(state, f"{folder}/ddp")
    assert_same(dict(model.module.state_dict()), wanted)
    for name, value in dtypes.items():
        assert torch.equal(state["dtypes"][name].view(torch.uint8), value.view(torch.uint8)), name
    read = read_once(report, report.bytes_needed)
    assert max(read) <= 1.3 * sum(read) / WORLD, read


PLACES = {"col": (64, 24, Shard(0)), "row": (24, 64, Shard(1)), "norm": (24, 1, Replicate())}


def placed(fill: bool, *axes: tuple[str, int]) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", tuple(size for _, size in axes))
    out = {}
    for name, (rows, columns, placement) in PLACES.items():
        placements = [placement if axis == "tp" else Replicate() for axis, _ in axes]
        full = whole(name, rows, columns)
        out[name] = distribute_tensor(full if fill else full * 0, mesh, placements, src_data_rank=None)
    return out


def check_tensor_and_data_parallel_ranks_share_what_they_have_in_common(rank: int, folder: str) -> None:
    """Saved with TP 4; loaded with DP 2 x TP 2: halves by two ranks each, the norm by all four."""
    ckptlib.save({"model": placed(True, ("tp", 4))}, f"{folder}/tp", iteration=1)
    axes = (("dp", 2), ("tp", 2))
    target, wanted = placed(False, *axes), placed(True, *axes)
    report = load({"model": target}, f"{folder}/tp")
    for name in PLACES:
        assert torch.equal(target[name].to_local(), wanted[name].to_local()), name
    read_once(report, 4 * sum(rows * columns for rows, columns, _ in PLACES.values()))


def check_boxes_that_overlap_are_cut_at_their_edges(rank: int, folder: str) -> None:
    """Rank 0 wants everything, the others different windows; one wants a part twice, and in transposed memory."""
    full = whole("w", 30, 20)
    if rank == 0:
        torch.manual_seed(0)
    ckptlib.save({"w": full}, f"{folder}/windows", iteration=1)
    windows = [((0, 0), (30, 20)), ((5, 3), (10, 9)), ((8, 0), (22, 5)), ((0, 19), (30, 1))]
    offset, shape = windows[rank]
    own = torch.zeros(shape[::-1]).t()
    state = {"w": [ShardedTensor.from_box("w", own, (30, 20), offset, replica_id=rank)]}
    again = torch.zeros(2, 3)
    if rank == 1:
        state["w"].append(ShardedTensor.from_box("w", again, (30, 20), (6, 4), replica_id=7))
    report = ckptlib.load(state, f"{folder}/windows", load_parallelism="dp")
    assert torch.equal(own, full[offset[0] : offset[0] + shape[0], offset[1] : offset[1] + shape[1]])
    assert rank != 1 or torch.equal(again, full[6:8, 4:7])
    assert sum(everywhere(report.bytes_read)) == full.nbytes


def check_small_buckets_take_more_rounds(rank: int, folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "BUCKET_BYTES", 4096)
        patch.setattr(exchange, "PIECE_BYTES", 1000)
        patch.setattr(sharing, "CUT_MIN_BYTES", 10_000)
        ckptlib.save({"big": whole("big", 300, 40), "odd": whole("odd", 4999)}, f"{folder}/rounds", iteration=1)
        state = {"big": torch.zeros(300, 40), "odd": torch.zeros(4999)}
        read = read_once(load(state, f"{folder}/rounds"), 4 * (300 * 40 + 4999))
    assert_same(state, {"big": whole("big", 300, 40), "odd": whole("odd", 4999)})
    assert max(read) <= 1.3 * sum(read) / WORLD, read


def check_casts_and_renames_are_shared_too(rank: int, folder: str) -> None:
    """Ranks that want other dtypes read for themselves."""
    ckptlib.save({"w": whole("w", 100, 10)}, f"{folder}/cast", iteration=1)
    for dtype, times in ((torch.bfloat16, 1), (torch.float64 if rank < 2 else torch.bfloat16, 2)):
        state = {"mine": torch.zeros(100, 10, dtype=dtype)}
        report = load(state, f"{folder}/cast", cast=True, rename={"mine": "w"})
        assert torch.equal(state["mine"], whole("w", 100, 10).to(dtype))
        assert sum(everywhere(report.bytes_read)) == times * 4000


def check_each_process_group_shares_for_itself(rank: int, folder: str) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ckptlib.save({"w": whole("w", 64, 10)}, f"{folder}/groups", iteration=1)
    state = {"w": torch.zeros(64, 10)}
    report = load(state, f"{folder}/groups", process_group=groups[rank // 2])
    assert torch.equal(state["w"], whole("w", 64, 10))
    assert sum(everywhere(report.bytes_read)) == 2 * 64 * 10 * 4
    with pytest.raises((RankFailedError, ckptlib.errors.StateError), match="process_group"):
        load(state, f"{folder}/groups", process_group=groups[0])


def check_a_rank_that_cannot_read_stops_all_before_anything_is_sent(rank: int, folder: str) -> None:
    ckptlib.save({f"w{i}": whole("w", 64, 10) for i in range(8)}, f"{folder}/unread", iteration=1)
    state = {f"w{i}": torch.zeros(64, 10) for i in range(8)}

    def broken(*args: Any) -> None:
        raise OSError(5, "i/o error")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(ckptlib.storage.PosixStorage, "read_into", _only_data(broken))
        with pytest.raises((OSError, LoadIncompleteError)) as caught:
            load(state, f"{folder}/unread")
    assert rank != 2 or "i/o error" in str(caught.value)
    assert rank == 2 or "rank 2" in str(caught.value)
    load(state, f"{folder}/unread")
    assert_same(state, {f"w{i}": whole("w", 64, 10) for i in range(8)})


def _only_data(instead: Callable[..., None]) -> Callable[..., None]:
    original = ckptlib.storage.PosixStorage.read_into

    def read_into(self: Any, path: str, ranges: Any) -> None:
        (instead if path.endswith(".distcp") else original)(self, path, ranges)

    return read_into


def check_a_rank_that_cannot_take_what_it_gets_keeps_nobody_waiting(rank: int, folder: str) -> None:
    ckptlib.save({f"w{i}": whole("w", 64, 10) for i in range(8)}, f"{folder}/untaken", iteration=1)
    state = {f"w{i}": torch.zeros(64, 10) for i in range(8)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "BUCKET_BYTES", 4096)
        if rank == 1:
            patch.setattr(exchange.Exchange, "_unpack", lambda *_: (_ for _ in ()).throw(MemoryError("no more")))
        with pytest.raises(LoadIncompleteError, match="no more"):
            load(state, f"{folder}/untaken")


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(WORLD, CHECKS, str(tmp_path_factory.mktemp("shared")))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_four_ranks(check: Callable[..., None], verdicts: dict[str, str]) -> None:
    assert verdicts[check.__name__] == ""


def die_while_others_wait(rank: int, url: str) -> str:
    ckptlib.save({f"w{i}": whole("w", 64, 10) for i in range(8)}, url, iteration=1)
    if rank == 1:
        exchange.Exchange.run = lambda *_: os._exit(9)  # type: ignore[method-assign,assignment]
    try:
        ckptlib.load({f"w{i}": torch.zeros(64, 10) for i in range(8)}, url, load_parallelism="dp", timeout=5.0)
    except ckptlib.errors.CkptError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_a_rank_that_dies_in_the_exchange_fails_the_others_in_time(tmp_path: Path) -> None:
    outcomes = try_ranks(3, die_while_others_wait, str(tmp_path / "it"), timeout=40.0)
    assert outcomes[1].exitcode == 9
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value is not None, outcome.text
        assert outcome.value.startswith(("LoadIncompleteError", "RankTimeoutError")), outcome.value


def test_alone_there_is_nobody_to_share_with(tmp_path: Path) -> None:
    ckptlib.save({"w": torch.arange(40.0)}, str(tmp_path / "it"), iteration=1)
    state = {"w": torch.zeros(40)}
    report = ckptlib.load(state, str(tmp_path / "it"), load_parallelism="dp")
    assert torch.equal(state["w"], torch.arange(40.0))
    assert (report.bytes_read, report.bytes_received) == (160, 0)
