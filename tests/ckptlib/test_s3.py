"""What S3 adds to the promises of every storage, against a real server."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib import storage
from ckptlib.errors import StorageError
from ckptlib.storage import Vouched, join, s3_parts
from ckptlib.storage.s3 import S3Storage
from ckptlib.storage.s3_client import Connection
from ckptlib.storage.s3_options import S3Options
from tests.support.fault_proxy import FaultProxy
from tests.support.faults import Fault, Kind
from tests.support.s3_server import S3Server

MIB = 1024 * 1024
PART = 5 * MIB


@pytest.fixture
def place(s3: S3Server, s3_url: str) -> tuple[S3Storage, str]:
    """A storage with small parts, and a path of the test's own."""
    return open_storage(s3, s3_url)


def open_storage(s3: S3Server, url: str, **options: Any) -> tuple[S3Storage, str]:
    store, path = storage.resolve(url, s3.storage_options(**{"part_size": PART, **options}))
    assert isinstance(store, S3Storage)
    return store, path


@pytest.fixture
def calls(place: tuple[S3Storage, str]) -> Iterator[list[str]]:
    """Names of the requests that are sent, in order."""
    sent: list[str] = []
    events = place[0].connection.client.meta.events

    def note(model: Any, **kwargs: Any) -> None:
        sent.append(model.name)

    events.register("before-call.s3", note)
    yield sent
    events.unregister("before-call.s3", note)


def write(store: S3Storage, path: str, content: bytes) -> storage.Written:
    stream = store.open_write(path, size=len(content))
    stream.write(content)
    return stream.finish()


def test_a_large_file_goes_in_parts_whose_digests_the_store_keeps(place: tuple[S3Storage, str]) -> None:
    """W1, V3: what the writer records of the parts is what the store computed."""
    store, path = place
    content = os.urandom(2 * PART + 77)
    written = write(store, join(path, "file"), content)
    parts = [content[:PART], content[PART : 2 * PART], content[2 * PART :]]
    assert written.sha256 == hashlib.sha256(content).hexdigest()
    assert written.part_size == PART
    assert written.part_sha256 == tuple(hashlib.sha256(part).hexdigest() for part in parts)
    composite = s3_parts.composite(written.part_sha256)
    assert store.vouched(join(path, "file")) == Vouched(len(content), composite=composite, parts=3)
    assert store.get(join(path, "file")) == content


@pytest.mark.parametrize("size", [0, 1, PART])
def test_a_file_that_fits_one_part_is_one_put(place: tuple[S3Storage, str], calls: list[str], size: int) -> None:
    store, path = place
    content = os.urandom(size)
    written = write(store, join(path, "file"), content)
    assert calls == ["HeadObject", "PutObject", "HeadObject"]
    assert written == storage.Written(size, hashlib.sha256(content).hexdigest())
    assert store.vouched(join(path, "file")) == Vouched(size, sha256=written.sha256)


def test_a_part_is_not_sent_before_it_is_known_whether_it_is_the_last(
    place: tuple[S3Storage, str], calls: list[str]
) -> None:
    """Two full parts are two parts, not three of which one is empty."""
    store, path = place
    written = write(store, join(path, "file"), bytes(2 * PART))
    assert len(written.part_sha256) == 2
    assert calls.count("UploadPart") == 2


def test_the_parts_are_the_memory_of_the_caller(place: tuple[S3Storage, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied on the way but what is left over at a release."""
    store, path = place
    memory = bytearray(4 * PART)
    sent: list[Any] = []
    real = s3_parts.Body.__init__

    def keep(body: s3_parts.Body, buffers: Any) -> None:
        views = list(buffers)
        sent.extend(views)
        real(body, views)

    monkeypatch.setattr(s3_parts.Body, "__init__", keep)
    stream = store.open_write(join(path, "file"))
    stream.write(memory)
    stream.finish()
    assert sum(map(len, sent)) == len(memory)
    assert all(view.obj is memory for view in sent)


@pytest.mark.parametrize("end", ["abort", "drop", "raise"])
def test_nothing_but_finish_makes_an_object(place: tuple[S3Storage, str], end: str) -> None:
    """T02: other tools complete what was cut off when the file is closed by an exception or by garbage collection."""
    store, path = place
    stream = store.open_write(join(path, "file"))
    stream.write(os.urandom(2 * PART))
    if end == "raise":
        with pytest.raises(TypeError):
            stream.write("not bytes")  # type: ignore[arg-type]
        stream.abort()
    elif end == "abort":
        stream.abort()
    del stream
    gc.collect()
    assert store.stat(join(path, "file")) is None
    left = store.unfinished(path)
    assert len(left) == (1 if end == "drop" else 0)
    for upload in left:
        store.discard(upload)
        store.discard(upload)  # gone already
    assert store.unfinished(path) == []


def test_unfinished_uploads_are_those_below_a_directory(place: tuple[S3Storage, str]) -> None:
    store, path = place
    streams = [store.open_write(join(path, name)) for name in ("run/iter_1/a", "run/b", "run2/c")]
    for stream in streams:
        stream.write(bytes(PART + 1))
        stream.release()
    found = store.unfinished(join(path, "run"))
    assert sorted(upload.path for upload in found) == [join(path, "run", "b"), join(path, "run", "iter_1", "a")]
    assert all(upload.started > 1.7e9 for upload in found)
    for stream in streams:
        stream.abort()


def test_a_second_writer_goes_on_where_a_dead_one_was(place: tuple[S3Storage, str], calls: list[str]) -> None:
    """Only the parts that are not there, or differ, are sent again."""
    store, path = place
    content = bytearray(os.urandom(4 * PART))
    first = store.open_write(join(path, "file"))
    first.write(content)
    first.release()  # three parts are there; it is not known whether the fourth is the last
    content[PART] ^= 1  # the second part is another one
    calls.clear()
    again = store.resuming()
    assert isinstance(again, S3Storage)
    assert write(again, join(path, "file"), bytes(content)).size == len(content)
    assert calls.count("CreateMultipartUpload") == 0
    assert calls.count("UploadPart") == 2
    assert store.get(join(path, "file")) == content
    assert store.unfinished(path) == []


def test_writers_of_the_same_file_who_both_live_do_not_touch_each_others_upload(place: tuple[S3Storage, str]) -> None:
    """Two copies of one save: each completes its own, and what one gives up is its own."""
    store, path = place
    content = os.urandom(3 * PART)
    streams = [store.open_write(join(path, "file")) for _ in range(3)]
    for stream in streams:
        stream.write(content)
        stream.release()
    streams[0].abort()
    written = [stream.finish() for stream in streams[1:]]
    assert written[0] == written[1]
    assert store.get(join(path, "file")) == content
    assert store.unfinished(path) == []


def test_a_store_that_starts_late_is_waited_for(s3: S3Server) -> None:
    """A load balancer that restarts refuses connections for a moment."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    store = S3Storage(S3Options.parse(s3.storage_options(endpoint=f"http://127.0.0.1:{port}", attempts=8)))
    answered = threading.Event()

    def serve() -> None:
        with socket.create_server(("127.0.0.1", port)) as server:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                answered.set()

    timer = threading.Timer(0.3, serve)
    timer.start()
    try:
        assert store.stat("bucket/key") is None
        assert answered.wait(10)  # the thread that answered may be a moment behind
    finally:
        timer.join()


def test_a_store_that_ignores_ranges_is_found_out(s3: S3Server) -> None:
    """R3: or a part of a tensor would be filled with the beginning of the file."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nConnection: close\r\n\r\n0123456789")

        thread = threading.Thread(target=serve)
        thread.start()
        store = S3Storage(S3Options.parse(s3.storage_options(endpoint=f"http://127.0.0.1:{server.getsockname()[1]}")))
        with pytest.raises(StorageError, match="ignores ranges"):
            store.read_into("bucket/key", [(5, memoryview(bytearray(3)))])
        thread.join()


def test_one_that_fails_once_while_it_is_asked_what_it_honours_is_asked_again(s3: S3Server, s3_url: str) -> None:
    """W4: all ranks ask when they start, which is when stores throttle."""
    kinds: tuple[Kind, ...] = ("slow_down", "cut_after")
    for kind in kinds:
        with FaultProxy(s3, [Fault(kind, "PutObject")]) as proxy:
            store, path = open_storage(s3, s3_url, endpoint_url=proxy.endpoint)
            store.create(join(path, kind), b"x")
            assert proxy.faults[0].struck == 1


def test_files_are_removed_a_thousand_at_a_time(place: tuple[S3Storage, str], calls: list[str]) -> None:
    """Names that are not there cost nothing more, and are no failure."""
    store, path = place
    store.put(join(path, "there"), b"x")
    calls.clear()
    names = [join(path, f"absent{i}") for i in range(2500)]
    assert store.remove_each([*names, join(path, "there")]) == {}
    assert calls == ["DeleteObjects"] * 3
    assert store.stat(join(path, "there")) is None


def test_a_copy_is_made_by_the_store_and_has_the_digest_of_its_source(
    place: tuple[S3Storage, str], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts: as the source was written."""
    monkeypatch.setattr("ckptlib.storage.s3_copy.COPY_BYTES", 2 * PART)
    store, path = place
    large, small = os.urandom(2 * PART + 1), b"small"
    for name, content in (("large", large), ("small", small)):
        write(store, join(path, name), content)
        calls.clear()
        store.copy(join(path, name), join(path, "copy of", name))
        assert "GetObject" not in calls
        assert store.get(join(path, "copy of", name)) == content
        assert store.same_content(join(path, name), join(path, "copy of", name))
    assert store.unfinished(path) == []


def test_a_store_is_asked_once_what_it_honours(place: tuple[S3Storage, str], calls: list[str]) -> None:
    """W4: and probes are removed."""
    store, path = place
    connection = store.connection
    connection.facts.clear()
    store.create(join(path, "one"), b"1")
    store.vouched(join(path, "one"))
    assert set(connection.facts.values()) == {True}
    calls.clear()
    store.create(join(path, "two"), b"2")
    store.vouched(join(path, "two"))
    assert calls == ["PutObject", "HeadObject"]
    assert [entry.name for entry in store.list(path)] == ["one", "two"]


def test_a_forked_child_makes_a_client_of_its_own(place: tuple[S3Storage, str]) -> None:
    """T06: sockets of a parent are not used by its children."""
    store, path = place
    store.put(join(path, "parent"), b"p")
    parent = store.connection

    def child() -> int:
        fresh: Connection = store.connection
        store.put(join(path, "child"), b"c")
        return int(fresh is parent or store.get(join(path, "parent")) != b"p")

    assert in_child(child) == 0
    assert store.get(join(path, "child")) == b"c"


def in_child(work: Callable[[], int]) -> int:
    pid = os.fork()
    if not pid:
        status = 99
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_bucket_that_is_not_there_is_no_missing_file(s3: S3Server) -> None:
    """R1: nothing is known of what is stored: the name is not free."""
    store, path = open_storage(s3, f"s3://no-such-bucket-{uuid.uuid4().hex[:8]}/run")
    for work in (
        lambda: store.list(path),
        lambda: store.get(join(path, "file")),
        lambda: store.put(join(path, "file"), b"x"),
        lambda: write(store, join(path, "file"), bytes(PART + 1)),
    ):
        with pytest.raises(StorageError, match="no such bucket") as caught:
            work()
        assert not isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize("url", ["s3://{}/a b/ü#?%/", "s3://{}//a b///ü#?%", "s3a://{}/a b/ü#?%"])
def test_urls_of_one_place_mean_one_place(s3: S3Server, shared_bucket: str, url: str) -> None:
    store, path = open_storage(s3, url.format(shared_bucket))
    assert store.url(path) == f"s3://{shared_bucket}/a b/ü#?%"
    name = uuid.uuid4().hex
    store.put(join(path, name), b"x")
    assert name in [entry.name for entry in store.list(path)]
    with closing(s3.client()) as client:
        assert client.get_object(Bucket=shared_bucket, Key=f"a b/ü#?%/{name}")["Body"].read() == b"x"


def test_a_url_without_a_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="s3://bucket/prefix"):
        storage.resolve("s3:///")


def test_nothing_secret_is_in_errors_and_logs(s3: S3Server, s3_url: str, caplog: pytest.LogCaptureFixture) -> None:
    store, path = open_storage(s3, s3_url, key=s3.keys["admin"], secret="hidden-secret", token="hidden-token")
    with caplog.at_level(logging.DEBUG, logger="ckptlib"), pytest.raises(PermissionError) as caught:
        store.put(join(path, "file"), b"x")
    assert "hidden" not in f"{caught.value!r} {caught.value} {store.options!r} {caplog.text}"
    assert store.url(join(path, "file")) in str(caught.value)


@pytest.mark.deep
def test_ten_thousand_checkpoints_are_listed_and_removed_in_ten_requests_each(
    place: tuple[S3Storage, str], calls: list[str]
) -> None:
    store, path = place
    names = [join(path, f"iter_{i:07d}", "checkpoint.json") for i in range(10_000)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.put(name, b"{}"), names))
    calls.clear()
    assert [entry.name for entry in store.list(path)] == [f"iter_{i:07d}" for i in range(10_000)]
    assert calls == ["ListObjectsV2"] * 10
    calls.clear()
    assert store.remove_each(names) == {}
    assert calls == ["DeleteObjects"] * 10
    assert store.stat(names[0]) is None
    assert store.list(join(path, "iter_0009999")) == []


def test_what_is_given_to_reach_a_store_is_never_written_to_it(s3: S3Server, s3_url: str) -> None:
    """Credentials are in no record, manifest or export."""
    options = s3.storage_options(part_size=PART)
    state = {"w": torch.arange(10.0)}
    with ckptlib.Checkpointer(s3_url, run="run", storage_options=options, io_mode="async") as checkpointer:
        checkpointer.save(state, iteration=1)
        assert checkpointer.drain(60)
    bucket, prefix = s3_url.removeprefix("s3://").split("/")
    with closing(s3.client()) as client:
        for item in client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
            content = client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
            assert s3.secret.encode() not in content
            assert s3.keys["admin"].encode() not in content
