"""Planning at scale, simulated in one process: who writes what for up to 16,384 ranks of 64 tensors each.

Every rank owns one row block of each tensor. Ours is planned, validated (W3), and, from the ranks' records, indexed
and validated again; torch's is `create_global_plan` of its default planner, which validates. Each size runs in
processes of its own, ours and torch's in turn, so that peak memory is that of one of them. CPU seconds.

Also printed: what ``.metadata`` and the index cost, what a load plan of one rank against that index costs, and a
steady-state save's planning on one rank (structure digest and offer) and on rank 0.

    python benchmarks/plan.py                       # 64, 1024, 4096, 16384 ranks; torch up to 16384
    python benchmarks/plan.py --ranks 64 512 --torch-max 512
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

TENSORS = 64
ROWS, COLUMNS = 4, 128


def measured(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process, and the result."""
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def ours(ranks: int) -> dict[str, float]:
    """Plans, records, index, exports, loads of one checkpoint."""
    from ckptlib.formats.metadata_writer import encode_metadata
    from ckptlib.index import ChunkItem, ItemIndex, Location
    from ckptlib.paused_gc import paused_gc
    from ckptlib.pieces import LocalPlan, PieceTable, TensorPiece
    from ckptlib.plan import make_write_plan
    from ckptlib.planning import PlanCache, Share
    from ckptlib.sharding import Box

    shape = (ROWS * ranks, COLUMNS)
    values = {f"args.{i}": "0" * 64 for i in range(20)}

    def pieces(rank: int) -> list[TensorPiece]:
        box = Box((ROWS * rank, 0), (ROWS, COLUMNS))
        return [TensorPiece(f"layers.{i}.weight", "bfloat16", shape, box, 2 * box.volume, True) for i in range(TENSORS)]

    def record(rank: int) -> str:
        chunks = [
            ChunkItem(
                p.key, p.dtype, p.global_shape, p.box, Location(f"__{rank}_0.x.distcp", 2600 * i, 2600, 704, 1024, i)
            )
            for i, p in enumerate(pieces(rank))
        ]
        return ItemIndex.build(chunks).to_record()

    local_plans = [LocalPlan(PieceTable.build(pieces(rank)), {}, values) for rank in range(ranks)]
    for local in local_plans:
        assert local.structure  # each rank has computed the digest of its own and sends it along
    records = [record(rank) for rank in range(ranks)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with paused_gc():  # as `PlanCache.settle` and `commit.try_commit` have it
        planned, plan = measured(lambda: make_write_plan(local_plans))

    def indexed() -> ItemIndex:
        index = ItemIndex.merge([ItemIndex.from_record(text, f"rank {rank}") for rank, text in enumerate(records)])
        index.check_tilings()
        return index

    with paused_gc():
        merged, index = measured(indexed)
        encoded, data = measured(index.encode)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        exported, metadata = measured(lambda: encode_metadata(index))

    caches = [PlanCache() for _ in range(ranks)]
    for rank, (cache, local) in enumerate(zip(caches, local_plans, strict=True)):
        cache.keep(local, Share.of(plan, rank))
    caches[0]._whole[plan.digest] = plan
    fresh = LocalPlan(PieceTable.build(pieces(ranks - 1)), {}, values)  # a digest of its own to compute
    rank_time, _ = measured(lambda: caches[-1].offer(fresh))
    offers = [cache.offer(local) for cache, local in zip(caches, local_plans, strict=True)]
    root_time, settled = measured(lambda: caches[0].settle(offers))
    assert settled == (plan, True)
    return {
        "plan": planned,
        "index": merged,
        "encode": encoded,
        "index_mb": len(data) / 1e6,
        "peak_mb": peak / 1024,
        "inputs_mb": before / 1024,
        "metadata": exported,
        "metadata_mb": len(metadata) / 1e6,
        "steady_rank_ms": 1000 * rank_time,
        "steady_root_ms": 1000 * root_time,
        "load_ms": 1000 * load_plan(index, ranks),
        "bytes_per_chunk": index.nbytes / (TENSORS * ranks),
    }


def load_plan(index: Any, ranks: int) -> float:
    """Seconds to plan the load of one rank of half as many, in the middle, with the check that nothing is missing."""
    from ckptlib.read_plan import Requests, plan_reads
    from ckptlib.sharding import Box

    box = Box((ROWS * 2 * (ranks // 4), 0), (2 * ROWS, COLUMNS))
    keys = [f"layers.{i}.weight" for i in range(TENSORS)]

    def plan() -> None:
        requests = Requests.build(keys, [box] * TENSORS)
        found = plan_reads(index, requests)
        assert (found.covered(TENSORS) == box.volume).all()
        assert found.nbytes <= 256 * len(found)

    return measured(plan)[0]


def torchs(ranks: int) -> dict[str, float]:
    """The same items through torch's default planner."""
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    size = torch.Size((ROWS * ranks, COLUMNS))

    def item(rank: int, i: int) -> WriteItem:
        offsets = torch.Size((ROWS * rank, 0))
        data = TensorWriteData(
            ChunkStorageMetadata(offsets, torch.Size((ROWS, COLUMNS))), TensorProperties(torch.bfloat16), size
        )
        return WriteItem(MetadataIndex(f"layers.{i}.weight", offsets), WriteItemType.SHARD, tensor_data=data)

    plans = [SavePlan([item(rank, i) for i in range(TENSORS)]) for rank in range(ranks)]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({}, None, is_coordinator=True)
    seconds, _ = measured(lambda: planner.create_global_plan(plans))
    return {"plan": seconds, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def child(part: str, ranks: int) -> dict[str, float]:
    """Runs one part in a process of its own."""
    command = [sys.executable, __file__, "--part", part, "--ranks", str(ranks)]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def main() -> None:
    """Prints one line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 4096, 16384])
    parser.add_argument("--torch-max", type=int, default=16384, help="largest number of ranks that torch plans")
    parser.add_argument("--part", choices=["ours", "torch"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        warnings.simplefilter("ignore")
        print(json.dumps({"ours": ours, "torch": torchs}[options.part](options.ranks[0])))
        return
    for ranks in options.ranks:
        items = ranks * TENSORS
        mine = child("ours", ranks)
        total = mine["plan"] + mine["index"]
        print(f"{ranks} ranks x {TENSORS} tensors = {items} chunks")
        print(
            f"  ours   plan + validate {mine['plan']:.2f} s, index + validate {mine['index']:.2f} s "
            f"({1e6 * total / items:.1f} us per chunk), peak {mine['peak_mb']:.0f} MiB "
            f"(inputs {mine['inputs_mb']:.0f}), {mine['bytes_per_chunk']:.0f} bytes per chunk"
        )
        if ranks <= options.torch_max:
            theirs = child("torch", ranks)
            print(
                f"  torch  plan + validate {theirs['plan']:.2f} s ({1e6 * theirs['plan'] / items:.1f} us per chunk), "
                f"peak {theirs['peak_mb']:.0f} MiB; ours takes {total / theirs['plan']:.3f} of its time"
            )
        print(
            f"  files  index {mine['index_mb']:.1f} MB in {mine['encode']:.2f} s, "
            f".metadata {mine['metadata_mb']:.1f} MB in {mine['metadata']:.2f} s"
        )
        print(
            f"  rank   load plan {mine['load_ms']:.1f} ms; steady save: {mine['steady_rank_ms']:.2f} ms per rank, "
            f"{mine['steady_root_ms']:.1f} ms on rank 0 for all ranks"
        )


if __name__ == "__main__":
    main()
