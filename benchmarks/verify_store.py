"""Verification of a checkpoint on S3 by the store's own digests, beside reading it back.

A real server (SeaweedFS, on this machine, in memory) holds a gibibyte in one file, in parts of 16 MiB. What passes is
counted by a proxy in between, in a round of its own; times are without it. The limits of level ``data`` are one pass of
SHA-256 over as many bytes in memory, and the same bytes fetched by as many connections and thrown away. Peak memory is
the growth of VmHWM. Medians.

    PYTHONPATH=. python benchmarks/verify_store.py               # 1 GiB, 5 rounds
    PYTHONPATH=. python benchmarks/verify_store.py --mib 256 --rounds 3
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from save_sync import large_tensors

import ckptlib
from ckptlib import storage as st
from ckptlib.read_ahead import BLOCK_BYTES
from tests.support.fault_proxy import FaultProxy
from tests.support.s3_server import running_s3_server


def seconds(work: Callable[[], object]) -> float:
    """Wall time of a call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def hash_memory(mib: int) -> None:
    """One pass of SHA-256, block by block."""
    block = bytes(BLOCK_BYTES)
    digest = hashlib.sha256()
    for _ in range(mib * 2**20 // BLOCK_BYTES):
        digest.update(block)


def fetch_all(url: str, name: str, size: int, options: dict[str, Any]) -> None:
    """The file in blocks, over as many connections as verification uses for one file."""
    store, path = st.resolve(url, options)

    def fetch(start: int) -> None:
        store.read_into(st.join(path, name), [(start, memoryview(bytearray(min(BLOCK_BYTES, size - start))))])

    with ThreadPoolExecutor(store.capabilities.reads_at_once) as pool:
        list(pool.map(fetch, range(0, size, BLOCK_BYTES)))


def verify(url: str, level: str, options: dict[str, Any]) -> ckptlib.VerifyReport:
    """A verification that finds nothing wrong."""
    report = ckptlib.verify(url, level=level, storage_options=options)
    if not report.ok or report.level != level:
        raise SystemExit(f"level {report.level}: {report.problems}")
    return report


def peak_growth(work: Callable[[], object]) -> float:
    """MiB by which a call raises the peak of this process."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _peak()
    work()
    return _peak() - before


def _peak() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))


def main() -> None:
    """Prints the table, and one JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with running_s3_server() as server, server.bucket() as bucket, FaultProxy(server) as proxy:
        url = f"s3://{bucket}/iter_0000001"
        direct = server.storage_options()
        ckptlib.save(large_tensors(arguments.mib), url, iteration=1, storage_options=direct)
        (name, size) = max(ckptlib.inspect(url, storage_options=direct).files.items(), key=lambda file: file[1])
        result: dict[str, Any] = {"mib": arguments.mib}
        for level in ("store", "data"):
            proxy.forget()
            verify(url, level, server.storage_options(endpoint=proxy.endpoint))
            payload = [p for p in proxy.passed if p.key.endswith(name)]
            result[level] = {
                "payload_bytes": sum(p.downloaded for p in payload if p.operation == "GetObject"),
                "payload_requests": len(payload),
                "bytes": proxy.bytes_downloaded(),
                "requests": sum(proxy.counts().values()),
            }
        times: dict[str, list[float]] = {}
        for _ in range(arguments.rounds):
            for what, work in {
                "store": lambda: verify(url, "store", direct),
                "data": lambda: verify(url, "data", direct),
                "sha256": lambda: hash_memory(arguments.mib),
                "fetch": lambda: fetch_all(url, name, size, direct),
            }.items():
                times.setdefault(what, []).append(seconds(work))
        result["seconds"] = {what: round(statistics.median(taken), 4) for what, taken in times.items()}
        limits = [max(pair) for pair in zip(times["sha256"], times["fetch"], strict=True)]
        ratios = [limit / taken for limit, taken in zip(limits, times["data"], strict=True)]
        result["data_of_the_limit"] = round(statistics.median(ratios), 3)
        result["data_peak_mib"] = round(peak_growth(lambda: verify(url, "data", direct)))
    for level in ("store", "data"):
        passed = result[level]
        print(
            f"{level:5}  {result['seconds'][level]:8.3f} s   {passed['requests']} requests, {passed['bytes']} bytes; "
            f"of the payload {passed['payload_requests']} requests, {passed['payload_bytes']} bytes"
        )
    print(f"limits of data: SHA-256 {result['seconds']['sha256']:.2f} s, fetching {result['seconds']['fetch']:.2f} s")
    print(
        f"data reaches {result['data_of_the_limit']:.2f} of the slower one; peak memory +{result['data_peak_mib']} MiB"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
