"""Loads from S3 at other shardings, against torch DCP through s3fs; bytes and requests as a proxy counts them.

Every tensor was saved in pieces of `saved` ranks, in one file of 16 MiB parts; each rank of the new size, one after the
other in this process, loads its own into memory that is used again. A real server (SeaweedFS, on this machine, in
memory). Both loaders take turns; medians and the median of the pairwise ratios. One more pass, not timed, goes through
a proxy that counts.

    PYTHONPATH=. python benchmarks/s3_load.py                # 1 GiB, 5 rounds
    PYTHONPATH=. python benchmarks/s3_load.py --mib 256 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from load import SlicePlanner, piece_of
from save_sync import large_tensors
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import ckptlib
from tests.support.fault_proxy import FaultProxy
from tests.support.s3_server import S3Server, running_s3_server

RESHARDS = ((2, 8, 0), (2, 2, 0), (2, 8, 1))
"""(ranks that saved, ranks that load, axis that is cut)."""

Load = Callable[[str], None]
"""Loads the parts of all ranks from an endpoint."""


def loaders(server: S3Server, url: str, full: dict[str, torch.Tensor], loaded: int, axis: int) -> dict[str, Load]:
    """Ours, and torch's."""
    parts = [
        {name: torch.zeros_like(piece_of(tensor, rank, loaded, axis)[0]) for name, tensor in full.items()}
        for rank in {0: 0, loaded - 1: 0}
    ]

    def targets(rank: int) -> dict[str, torch.Tensor]:
        return parts[-1] if rank == loaded - 1 else parts[0]

    def check(rank: int) -> None:
        for name, tensor in full.items():
            assert torch.equal(targets(rank)[name][-1], piece_of(tensor, rank, loaded, axis)[0][-1])

    def ours(endpoint: str) -> None:
        options = server.storage_options(endpoint=endpoint)
        for rank in range(loaded):
            wanted = {
                name: ckptlib.ShardedTensor.from_box(
                    name, part, full[name].shape, piece_of(full[name], rank, loaded, axis)[1]
                )
                for name, part in targets(rank).items()
            }
            ckptlib.load(wanted, url, check_coverage=False, storage_options=options)
            check(rank)

    def theirs(endpoint: str) -> None:
        given = server.storage_options(endpoint=endpoint)
        options = {
            "key": given["key"],
            "secret": given["secret"],
            "client_kwargs": {"endpoint_url": endpoint, "region_name": given["region_name"]},
        }
        for rank in range(loaded):
            planner = SlicePlanner(rank, loaded, axis, full)
            dcp.load(dict(targets(rank)), storage_reader=FsspecReader(url, **options), planner=planner)
            check(rank)

    return {"ckptlib": ours, "torch DCP": theirs}


def resharded(server: S3Server, mib: int, rounds: int, saved: int, loaded: int, axis: int) -> dict[str, float]:
    """Pieces of `saved` ranks, by `loaded` ranks."""
    full = large_tensors(mib)
    needed = sum(tensor.nbytes for tensor in full.values())
    pieces = {
        f"{name}.{rank}": ckptlib.ShardedTensor.from_box(name, part, tensor.shape, offset)
        for name, tensor in full.items()
        for rank in range(saved)
        for part, offset in [piece_of(tensor, rank, saved, axis)]
    }
    results: dict[str, float] = {}
    with server.bucket() as bucket:
        url = f"s3://{bucket}/iter_0000001"
        ckptlib.save(pieces, url, iteration=1, storage_options=server.storage_options())
        both = loaders(server, url, full, loaded, axis)
        costs: dict[str, list[tuple[float, float]]] = {name: [] for name in both}
        for round_ in range(rounds + 1):
            for name, load in both.items():
                cpu, wall = time.process_time(), time.perf_counter()
                load(server.endpoint)
                cost = (time.perf_counter() - wall, time.process_time() - cpu)
                if round_:
                    costs[name].append(cost)
        print(f"\n{saved} -> {loaded} ranks along axis {axis}: {needed / 2**20:.0f} MiB in {len(full)} tensors")
        for name, load in both.items():
            with FaultProxy(server) as proxy:
                load(proxy.endpoint)
                read, gets = proxy.bytes_downloaded("GetObject") / needed, proxy.counts()["GetObject"]
            wall, cpu = (statistics.median(run[i] for run in costs[name]) for i in (0, 1))
            print(
                f"  {name:10} wall {wall:6.2f} s   cpu {cpu:6.2f} s   read {read:.3f} x the bytes needed, {gets} GETs"
            )
            results |= {f"read / needed, {name}": round(read, 3), f"GETs, {name}": gets}
    for i, what in enumerate(("wall", "cpu")):
        pairs = zip(*costs.values(), strict=True)
        ratio = statistics.median(ours[i] / theirs[i] for ours, theirs in pairs)
        results[f"{what} ckptlib / torch DCP"] = round(ratio, 3)
        print(f"  {what:4} ckptlib / torch DCP: {ratio:.2f}   ({1 / ratio:.1f} times as fast)")
    return results


def main() -> None:
    """Runs all shardings and prints one JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    results: dict[str, Any] = {}
    with running_s3_server() as server:
        for saved, loaded, axis in RESHARDS:
            found = resharded(server, arguments.mib, arguments.rounds, saved, loaded, axis)
            results[f"{saved} -> {loaded}, axis {axis}"] = found
    print(json.dumps(results))


if __name__ == "__main__":
    main()
