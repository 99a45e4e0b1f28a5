"""One rank's save to S3 with SHA-256 of every part and of the file, against clients that compute no digest.

A real server (SeaweedFS, on this machine, in memory) takes the same gibibyte from each in turn, into a fresh bucket:
`ckptlib.save` of a state of 8 MiB tensors, records and commit included, and its stream alone; obstore, AWS's
s3torchconnector, boto3's `upload_fileobj` and s3fs with the bytes as one object; torch DCP through fsspec, the state.
Client CPU is of this process; the server takes its own from the same cores. Peak memory is the growth of VmHWM over the
payload in a process that does only that. Medians, and the median of the ratios round by round.

    PYTHONPATH=. python benchmarks/s3_save.py               # 1 GiB, 5 rounds
    PYTHONPATH=. python benchmarks/s3_save.py --mib 256 --rounds 3
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from save_sync import large_tensors

import ckptlib
from ckptlib import storage as st
from tests.support.s3_server import S3Server, running_s3_server

PART_BYTES = 16 * 2**20
THREADS = 8
Writer = Callable[[str], None]
"""Writes to a bucket."""


def writers(options: dict[str, Any], mib: int) -> dict[str, Writer]:
    """Everyone who is measured, by name; with parts of 16 MiB and up to 8 requests in flight, if they can."""
    import boto3
    import obstore
    import s3fs
    import s3torchconnectorclient._mountpoint_s3_client as mountpoint
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config
    from obstore.store import S3Store

    state = large_tensors(mib)
    tensors = [memoryview(tensor.view(-1).view(torch.uint8).numpy()) for tensor in state.values()]
    payload = b"".join(tensors)
    endpoint, key, secret, region = (options[name] for name in ("endpoint_url", "key", "secret", "region_name"))
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        region_name=region,
        config=Config(request_checksum_calculation="when_required", s3={"addressing_style": "path"}),
    )
    transfer = TransferConfig(multipart_chunksize=PART_BYTES, multipart_threshold=PART_BYTES, max_concurrency=THREADS)
    s3fs_options = {"key": key, "secret": secret, "client_kwargs": {"endpoint_url": endpoint, "region_name": region}}

    def ckptlib_save(bucket: str) -> None:
        ckptlib.save(state, f"s3://{bucket}/iter_0000001", iteration=1, storage_options=options)

    def ckptlib_stream(bucket: str) -> None:
        store, path = st.resolve(f"s3://{bucket}", options)
        stream = store.open_write(st.join(path, "data"), size=len(payload))
        for tensor in tensors:
            stream.write(tensor)
        stream.finish()

    def obstore_put(bucket: str) -> None:
        store = S3Store(
            bucket,
            endpoint=endpoint,
            access_key_id=key,
            secret_access_key=secret,
            region=region,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        obstore.put(store, "data", payload, chunk_size=PART_BYTES, max_concurrency=THREADS)

    def boto3_upload(bucket: str) -> None:
        client.upload_fileobj(io.BytesIO(payload), bucket, "data", Config=transfer)

    def s3fs_open(bucket: str) -> None:
        fs = s3fs.S3FileSystem(**s3fs_options, skip_instance_cache=True)
        with fs.open(f"{bucket}/data", "wb", block_size=PART_BYTES) as file:
            file.write(payload)

    def torch_dcp(bucket: str) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        dcp.save(state, storage_writer=FsspecWriter(f"s3://{bucket}/iter_0000001", **s3fs_options))

    def connector(bucket: str) -> None:
        with mountpoint_environment(options):
            crt = mountpoint.MountpointS3Client(
                region=region, part_size=PART_BYTES, endpoint=endpoint, force_path_style=True
            )
            stream = crt.put_object(bucket, "data")
            for tensor in tensors:
                stream.write(bytes(tensor))
            stream.close()

    return {
        "ckptlib save": ckptlib_save,
        "ckptlib stream": ckptlib_stream,
        "obstore": obstore_put,
        "s3torchconnector": connector,
        "boto3": boto3_upload,
        "s3fs": s3fs_open,
        "torch DCP fsspec": torch_dcp,
    }


def mountpoint_environment(options: dict[str, Any]) -> Any:
    """AWS's client takes credentials from the environment alone."""
    from unittest.mock import patch

    return patch.dict("os.environ", {"AWS_ACCESS_KEY_ID": options["key"], "AWS_SECRET_ACCESS_KEY": options["secret"]})


def measure(server: S3Server, write: Writer) -> tuple[float, float]:
    """Wall and client CPU seconds of one write into a fresh bucket, which goes again with all its space."""
    with server.bucket() as bucket:
        cpu, wall = time.process_time(), time.perf_counter()
        write(bucket)
        return time.perf_counter() - wall, time.process_time() - cpu


def peak_memory(name: str, options: dict[str, Any], server: S3Server, mib: int) -> float:
    """MiB by which one write raises the peak of a fresh process."""
    with server.bucket() as warm, server.bucket() as bucket:
        command = [sys.executable, __file__, "--memory", json.dumps([name, options, warm, bucket, mib])]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def _peak() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))


def _print_memory(name: str, options: dict[str, Any], warm: str, bucket: str, mib: int) -> None:
    write = writers(options, mib)[name]
    writers(options, 8)[name](warm)  # imports and clients are no payload
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak so far is forgotten
    before = _peak()
    write(bucket)
    print(_peak() - before)


def main() -> None:
    """Prints the table, and one JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--memory", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.memory:
        _print_memory(*arguments.memory)
        return
    with running_s3_server() as server:
        options = server.storage_options(part_size=PART_BYTES, concurrency=THREADS)
        everyone = {
            name: write
            for name, write in writers(options, arguments.mib).items()
            if not arguments.only or name in arguments.only
        }
        costs: dict[str, list[tuple[float, float]]] = {name: [] for name in everyone}
        for round_ in range(arguments.rounds + 1):
            for name, write in everyone.items():
                cost = measure(server, write)
                if round_:
                    costs[name].append(cost)
        report(costs, {name: peak_memory(name, options, server, arguments.mib) for name in everyone})


def report(costs: dict[str, list[tuple[float, float]]], memory: dict[str, float]) -> None:
    """Medians; ratios of each to the fastest client without digests, round by round."""
    plain = [name for name in costs if not name.startswith(("ckptlib", "torch"))]
    fastest = min(plain, key=lambda name: statistics.median(wall for wall, _ in costs[name]), default=None)
    ratios: dict[str, float] = {}
    for name, runs in costs.items():
        wall, cpu = (statistics.median(run[i] for run in runs) for i in (0, 1))
        print(f"{name:18} wall {wall:6.2f} s   client cpu {cpu:5.2f} s   peak memory +{memory[name]:.0f} MiB")
    for name in ("ckptlib save", "ckptlib stream"):
        for peer in (fastest, "torch DCP fsspec"):
            if name in costs and peer in costs:
                pairs = zip(costs[name], costs[peer], strict=True)
                ratios[f"{name} / {peer}"] = round(statistics.median(a[0] / b[0] for a, b in pairs), 3)
    for what, ratio in ratios.items():
        print(f"  wall {what}: {ratio:.2f}")
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
