"""What every storage promises (`ckptlib.storage.base`), over POSIX, S3, fsspec and the explorer's recording disk."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ckptlib import storage
from ckptlib.errors import ExclusiveCreateError, StorageError, StorageTimeoutError
from ckptlib.storage import Buffer, Entry, FsspecStorage, PosixStorage, Storage, base, fsspec_store, join
from ckptlib.storage.s3 import S3Storage
from tests.ckptlib.support.recording import RecordingStorage
from tests.support.filesystems import small_filesystem
from tests.support.s3_server import S3Server

MIB = 1024 * 1024


class Place:
    """A storage, and a directory in it that is the test's own."""

    def __init__(self, store: Storage, root: str) -> None:
        self.store = store
        self.root = root

    def __call__(self, *names: str) -> str:
        return join(self.root, *names)


@pytest.fixture(params=["posix", "memory", "recording", "s3", "s3fs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "posix":
        yield Place(PosixStorage(), str(tmp_path))
    elif request.param == "s3":
        server: S3Server = request.getfixturevalue("s3")
        yield Place(*storage.resolve(request.getfixturevalue("s3_url"), server.storage_options()))
    elif request.param == "s3fs":
        yield Place(
            FsspecStorage(request.getfixturevalue("s3fs"), single_writer=True), request.getfixturevalue("s3_url")[5:]
        )
    elif request.param == "recording":
        yield Place(RecordingStorage(), "/root")
    else:
        root = f"/{uuid.uuid4().hex}"
        yield Place(FsspecStorage(fsspec.filesystem("memory")), root)
        _forget(root)


@pytest.fixture(scope="module")
def s3fs(s3: S3Server) -> Any:
    """Another client of S3, behind fsspec."""
    return fsspec.filesystem(
        "s3",
        key=s3.keys["admin"],
        secret=s3.secret,
        endpoint_url=s3.endpoint,
        use_listings_cache=False,
        skip_instance_cache=True,
    )


def _forget(root: str) -> None:
    fs = fsspec.filesystem("memory")
    if fs.exists(root):
        fs.rm(root, recursive=True)


def names(store: Storage, path: str) -> list[str]:
    return [entry.name for entry in store.list(path)]


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_finished_stream_is_there_with_its_size_and_digest(place: Place) -> None:
    pieces: list[Buffer] = [
        b"head",
        bytearray(range(256)) * 1024,
        b"",
        memoryview(b"tail" * 3),
        os.urandom(5 * MIB),
        b"end",
    ]
    stream = place.store.open_write(place("new", "deep", "file"))
    for piece in pieces:
        stream.write(piece)
    written = stream.finish()
    content = b"".join(pieces)
    assert (written.size, written.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert place.store.get(place("new", "deep", "file")) == content
    assert place.store.list(place("new", "deep")) == [Entry("file", False, len(content))]


def test_a_buffer_may_change_once_it_is_released(place: Place) -> None:
    stream = place.store.open_write(place("a"))
    buffer, digest = bytearray(3 * MIB), hashlib.sha256()
    for fill in range(4):
        buffer[:] = bytes([fill]) * len(buffer)
        digest.update(buffer)
        stream.write(buffer)
        stream.release()
    assert stream.finish().sha256 == digest.hexdigest()
    assert hashlib.sha256(place.store.get(place("a"))).hexdigest() == digest.hexdigest()


def test_an_empty_stream_makes_an_empty_file(place: Place) -> None:
    written = place.store.open_write(place("empty")).finish()
    assert (written.size, written.sha256) == (0, hashlib.sha256(b"").hexdigest())
    assert place.store.stat(place("empty")) == 0


@pytest.mark.parametrize("size", [0, 10, MIB])
def test_an_aborted_stream_leaves_nothing(place: Place, size: int) -> None:
    stream = place.store.open_write(place("gone"))
    stream.write(b"x" * size)
    stream.abort()
    assert place.store.stat(place("gone")) is None
    assert names(place.store, place.root) == []


def test_a_stream_does_not_start_on_a_name_that_exists(place: Place) -> None:
    place.store.put(place("taken"), b"old")
    with pytest.raises(FileExistsError, match="taken"):
        place.store.open_write(place("taken"))
    assert place.store.get(place("taken")) == b"old"


def test_streams_beside_each_other_do_not_mix(place: Place) -> None:
    streams = {name: place.store.open_write(place(name)) for name in ("a", "b", "c")}
    for _ in range(3):
        for name, stream in streams.items():
            stream.write(name.encode() * 100_000)
    for name, stream in streams.items():
        stream.finish()
        assert place.store.get(place(name)) == name.encode() * 300_000


# --- small files ------------------------------------------------------------------------------------------------------


def test_put_makes_a_file_and_replaces_it(place: Place) -> None:
    for content in (b"one", b"", b"the third, longer"):
        place.store.put(place("d", "file"), content)
        assert place.store.get(place("d", "file")) == content
    assert names(place.store, place("d")) == ["file"]


def test_a_copy_has_the_content_of_its_source_and_stands_when_that_is_replaced(place: Place) -> None:
    place.store.put(place("a"), b"one")
    for _ in range(2):  # twice changes nothing
        place.store.copy(place("a"), place("d", "b"))
        assert place.store.get(place("d", "b")) == b"one"
        assert place.store.same_content(place("a"), place("d", "b"))
    place.store.put(place("a"), b"two")
    assert place.store.get(place("d", "b")) == b"one"
    assert not place.store.same_content(place("a"), place("d", "b"))
    place.store.copy(place("a"), place("d", "b"))
    place.store.remove([place("a")])
    assert place.store.get(place("d", "b")) == b"two"
    assert names(place.store, place("d")) == ["b"]
    assert not place.store.same_content(place("a"), place("d", "b"))
    assert not place.store.same_content(place("d", "b"), place("absent"))
    with pytest.raises(FileNotFoundError):
        place.store.copy(place("absent"), place("c"))
    assert names(place.store, place()) == ["d"]


@pytest.mark.parametrize("size", [0, 1, 3 * MIB])
def test_contents_are_compared_to_their_end(place: Place, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "COMPARE_BYTES", MIB)
    place.store.put(place("a"), bytes(size) + b"x")
    place.store.put(place("b"), bytes(size) + b"x")
    place.store.put(place("c"), bytes(size) + b"y")
    assert place.store.same_content(place("a"), place("b"))
    assert not place.store.same_content(place("a"), place("c"))
    assert not place.store.shares(place("a"), place("b"))


def test_create_makes_a_file_once(place: Place) -> None:
    """W4: exclusive; the loser changes nothing."""
    place.store.create(place("d", "decision"), b"commit")
    with pytest.raises(FileExistsError, match="decision"):
        place.store.create(place("d", "decision"), b"abort")
    assert place.store.get(place("d", "decision")) == b"commit"
    assert names(place.store, place("d")) == ["decision"]


def test_a_swap_needs_the_content_that_was_looked_at(place: Place) -> None:
    path = place("d", "tracker")
    assert not place.store.swap(path, b"never was", b"1")
    assert place.store.stat(path) is None
    assert place.store.swap(path, None, b"1")
    assert not place.store.swap(path, None, b"2")
    assert not place.store.swap(path, b"0", b"2")
    assert place.store.get(path) == b"1"
    assert place.store.swap(path, b"1", b"")
    assert place.store.swap(path, b"", b"3")
    assert place.store.get(path) == b"3"
    assert names(place.store, place("d")) == ["tracker"]


def test_of_racing_swaps_exactly_one_takes_place(place: Place) -> None:
    turns, writers = (2, 4) if isinstance(place.store, S3Storage) else (5, 8)  # the server makes losers wait
    for turn in range(turns):
        path = place(f"tracker{turn}")
        place.store.put(path, b"old")
        start = threading.Barrier(writers)

        def swap(number: int, path: str = path, start: threading.Barrier = start) -> bool:
            start.wait()
            return place.store.swap(path, b"old", str(number).encode())

        with ThreadPoolExecutor(writers) as pool:
            done = list(pool.map(swap, range(writers)))
        assert done.count(True) == 1
        assert place.store.get(path) == str(done.index(True)).encode()


def test_a_removed_name_can_be_created_again(place: Place) -> None:
    place.store.create(place("file"), b"one")
    place.store.remove([place("file")])
    place.store.create(place("file"), b"two")
    assert place.store.get(place("file")) == b"two"


@pytest.mark.parametrize("path", [("absent",), ("absent", "below")])
def test_what_is_absent_is_not_found(place: Place, path: tuple[str, ...]) -> None:
    with pytest.raises(FileNotFoundError):
        place.store.get(place(*path))
    with pytest.raises(FileNotFoundError):
        place.store.read_into(place(*path), [(0, memoryview(bytearray(1)))])
    assert place.store.stat(place(*path)) is None
    assert place.store.list(place(*path)) == []


# --- reading ranges ---------------------------------------------------------------------------------------------------


def test_ranges_fill_their_buffers_in_any_order(place: Place) -> None:
    """R3: neighbours, gaps, overlaps and empty buffers."""
    content = os.urandom(10_000)
    place.store.put(place("data"), content)
    wanted = [(100, 50), (150, 850), (5_000, 0), (9_000, 1_000), (0, 10), (5, 10), (9_999, 1)]
    buffers = [bytearray(length) for _, length in wanted]
    place.store.read_into(place("data"), [(at, memoryview(b)) for (at, _), b in zip(wanted, buffers, strict=True)])
    assert [bytes(b) for b in buffers] == [content[at : at + length] for at, length in wanted]


def test_very_many_neighbours_are_read(place: Place) -> None:
    content = os.urandom(5_000)
    place.store.put(place("data"), content)
    found = bytearray(5_000)
    view = memoryview(found)
    place.store.read_into(place("data"), [(i, view[i : i + 1]) for i in range(5_000)])
    assert found == content


@pytest.mark.parametrize("ranges", [[(8, 3)], [(10, 1)], [(500, 4)], [(0, 5), (5, 6)], [(0, 2), (9, 2)]])
def test_a_short_read_is_an_error(place: Place, ranges: list[tuple[int, int]]) -> None:
    place.store.put(place("data"), b"0123456789")
    with pytest.raises(OSError, match="data"):
        place.store.read_into(place("data"), [(at, memoryview(bytearray(length))) for at, length in ranges])


@pytest.mark.parametrize(
    ("offset", "stride", "shape"), [(0, 100, (90, 100)), (4_097, 30, (150, 7)), (3, 4_000, (2, 1))]
)
def test_rows_of_a_table_are_read_whatever_lies_between_them(
    place: Place, monkeypatch: pytest.MonkeyPatch, offset: int, stride: int, shape: tuple[int, int]
) -> None:
    """R3: from pages or from a request each, into rows that are themselves far apart; a short file is an error."""
    content = np.frombuffer(os.urandom(10_000), np.uint8)
    place.store.put(place("data"), content.tobytes())
    place.store.put(place("short"), content[: offset + (shape[0] - 1) * stride + shape[1] - 1].tobytes())
    for window in (1, 5_000, 1 << 24) if isinstance(place.store, PosixStorage) else (1,):  # of pages
        monkeypatch.setattr("ckptlib.storage.posix_read.WINDOW_BYTES", window)
        memory = np.zeros((shape[0], shape[1] + 5), np.uint8)
        place.store.read_rows(place("data"), offset, stride, memory[:, 2 : 2 + shape[1]])
        for i, row in enumerate(memory):
            at = offset + i * stride
            assert bytes(row) == b"\0\0" + content[at : at + shape[1]].tobytes() + b"\0\0\0"
        with pytest.raises(OSError, match="short"):
            place.store.read_rows(place("short"), offset, stride, memory[:, : shape[1]])


def test_rows_are_read_where_a_file_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that cannot say beforehand whether the pages can be had, or a filesystem without mappings."""
    monkeypatch.setattr("ckptlib.storage.posix_read._MADV_POPULATE_READ", 4711)
    (tmp_path / "data").write_bytes(bytes(range(200)))
    rows = np.zeros((10, 3), np.uint8)
    PosixStorage().read_rows(str(tmp_path / "data"), 5, 20, rows)
    assert rows.tolist() == [[at, at + 1, at + 2] for at in range(5, 205, 20)]


# --- names ------------------------------------------------------------------------------------------------------------


def test_list_shows_one_level_sorted_by_name(place: Place) -> None:
    for name in ("b", "a", "Z", "a.b", "a-b", "dir/inner", "dir2/deep/er", ".hidden"):
        place.store.put(place(name), name.encode())
    assert place.store.list(place.root) == [
        Entry(".hidden", False, 7),
        Entry("Z", False, 1),
        Entry("a", False, 1),
        Entry("a-b", False, 3),
        Entry("a.b", False, 3),
        Entry("b", False, 1),
        Entry("dir", True, 0),
        Entry("dir2", True, 0),
    ]
    assert place.store.list(place("dir2")) == [Entry("deep", True, 0)]


def test_a_listing_has_what_stays_while_others_write_and_remove_beside_it(place: Place) -> None:
    """Who misses a record of a rank aborts a checkpoint that is whole; who misses all of them resumes from nothing."""
    stays = [f"rank_{i:02}" for i in range(40)]
    for name in stays:
        place.store.put(place(name), b"x")
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            place.store.put(place("beat"), b"x", durable=False)
            place.store.create(place("record"), b"x")
            place.store.remove([place("record")])

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        try:
            for _ in range(30):
                assert [name for name in names(place.store, place.root) if name.startswith("rank_")] == stays
        finally:
            over.set()
        writer.result(60)


def test_a_file_has_a_size_and_no_entries_and_a_directory_the_other_way_round(place: Place) -> None:
    place.store.put(place("dir", "file"), b"12345")
    assert place.store.stat(place("dir", "file")) == 5
    assert place.store.stat(place("dir")) is None
    assert place.store.list(place("dir", "file")) == []


def test_removing_what_is_gone_is_fine(place: Place) -> None:
    """D3: running twice changes nothing."""
    place.store.put(place("d", "file"), b"x")
    for _ in range(2):
        place.store.remove([place("d", "file"), place("never", "was")])
        assert place.store.stat(place("d", "file")) is None


def test_an_empty_directory_that_is_named_goes_and_one_with_something_in_it_stays(place: Place) -> None:
    """D2: what is not ours is never removed with its directory."""
    place.store.put(place("full", "not ours"), b"x")
    place.store.put(place("ours", "file"), b"x")
    place.store.remove([place("ours", "file"), place("ours"), place("full")])
    assert place.store.get(place("full", "not ours")) == b"x"
    if isinstance(place.store, FsspecStorage) and place.store.capabilities.name == "s3":
        pytest.xfail("SeaweedFS goes on listing an empty prefix whose objects were removed one by one")
    assert names(place.store, place.root) == ["full"]


@pytest.mark.parametrize("name", ["a b", "ünïcode", "per%cent", "#hash", "q?uestion", "dots..inside", "x" * 200])
def test_names_mean_what_they_say(place: Place, name: str) -> None:
    place.store.put(place(name, "file"), b"x")
    assert names(place.store, place.root) == [name]
    assert place.store.get(place(name, "file")) == b"x"
    place.store.create(place(name, "other"), b"y")
    assert names(place.store, place(name)) == ["file", "other"]


@pytest.mark.parametrize("kind", ["posix", "memory"])
def test_a_url_finds_the_same_place_again(tmp_path: Path, kind: str) -> None:
    """And a second storage object sees what the first has just written."""
    root = str(tmp_path / "a b") if kind == "posix" else f"memory://{uuid.uuid4().hex}/a b"
    one, path = storage.resolve(root)
    two, again = storage.resolve(one.url(join(path, "sub")))
    assert again == join(path, "sub")
    for i in range(3):
        one.create(join(path, "sub", f"file{i}"), b"x" * i)
        assert two.list(again)[i] == Entry(f"file{i}", False, i)
        assert two.stat(join(again, f"file{i}")) == i
    if kind == "memory":
        _forget(path)


@pytest.mark.parametrize("place", ["posix", "memory"], indirect=True)
def test_of_threads_that_race_to_create_a_file_one_wins(place: Place) -> None:
    """W4, within one process. (The recording disk takes one step at a time: it has no races.)"""
    for attempt in range(5):
        winners: list[int] = []
        start = threading.Barrier(16)

        def race(number: int, attempt: int = attempt, start: Any = start, winners: list[int] = winners) -> None:
            start.wait()
            try:
                place.store.create(place(f"decision{attempt}"), str(number).encode())
            except FileExistsError:
                return
            winners.append(number)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1
        assert place.store.get(place(f"decision{attempt}")) == str(winners[0]).encode()


# --- any order of operations ------------------------------------------------------------------------------------------

FILES = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a"])
CONTENT = st.binary(max_size=40)


class StorageMachine(RuleBasedStateMachine):
    """Every storage behaves like a dictionary from names to bytes, whatever is done in whatever order."""

    store: Storage

    @initialize()
    def start(self) -> None:
        self.store, self.root = self.new_place()
        self.files: dict[str, bytes] = {}

    def new_place(self) -> tuple[Storage, str]:
        return RecordingStorage(), "/root"

    @rule(name=FILES, content=CONTENT)
    def put(self, name: str, content: bytes) -> None:
        self.store.put(join(self.root, name), content)
        self.files[name] = content

    @rule(name=FILES, content=CONTENT, stream=st.booleans())
    def create(self, name: str, content: bytes, stream: bool) -> None:
        try:
            if stream:
                opened = self.store.open_write(join(self.root, name))
                opened.write(content)
                opened.finish()
            else:
                self.store.create(join(self.root, name), content)
        except FileExistsError:
            assert name in self.files
        else:
            assert name not in self.files
            self.files[name] = content

    @rule(name=FILES, content=CONTENT)
    def abort(self, name: str, content: bytes) -> None:
        if name not in self.files:
            stream = self.store.open_write(join(self.root, name))
            stream.write(content)
            stream.abort()

    @rule(source=FILES, name=FILES)
    def copy(self, source: str, name: str) -> None:
        if source == name:
            return
        try:
            self.store.copy(join(self.root, source), join(self.root, name))
        except FileNotFoundError:
            assert source not in self.files
        else:
            self.files[name] = self.files[source]

    @rule(names=st.lists(FILES, max_size=3))
    def remove(self, names: list[str]) -> None:
        self.store.remove([join(self.root, name) for name in names])
        for name in names:
            self.files.pop(name, None)

    @rule(name=FILES, start=st.integers(0, 50), length=st.integers(0, 50))
    def read(self, name: str, start: int, length: int) -> None:
        buffer = bytearray(length)
        expected = self.files.get(name, b"")[start : start + length]
        try:
            self.store.read_into(join(self.root, name), [(start, memoryview(buffer))])
        except FileNotFoundError:
            assert name not in self.files
        except OSError:
            assert len(expected) < length
        else:
            assert bytes(buffer) == expected

    @invariant()
    def every_name_is_as_it_should_be(self) -> None:
        for name in ("a", "b", "d/a", "d/b", "d/e/a"):
            content = self.files.get(name)
            assert self.store.stat(join(self.root, name)) == (None if content is None else len(content))
            if content is not None:
                assert self.store.get(join(self.root, name)) == content
        for directory in ("", "d/", "d/e/"):
            found = {e.name: e.size for e in self.store.list(join(self.root, directory).rstrip("/")) if not e.is_dir}
            inside = {n.removeprefix(directory): len(data) for n, data in self.files.items() if n.startswith(directory)}
            assert found == {name: size for name, size in inside.items() if "/" not in name}


class PosixMachine(StorageMachine):
    folder: Path
    count = 0

    def new_place(self) -> tuple[Storage, str]:
        type(self).count += 1
        return PosixStorage(), str(self.folder / str(self.count))


class MemoryMachine(StorageMachine):
    def new_place(self) -> tuple[Storage, str]:
        return FsspecStorage(fsspec.filesystem("memory")), f"/{uuid.uuid4().hex}"

    def teardown(self) -> None:
        _forget(self.root)


STEPS = settings(max_examples=25, stateful_step_count=15)


@pytest.mark.parametrize("machine", [StorageMachine, PosixMachine, MemoryMachine])
def test_a_storage_is_a_dictionary_in_any_order_of_operations(machine: type[StorageMachine], tmp_path: Path) -> None:
    if machine is PosixMachine:
        PosixMachine.folder = tmp_path
    run_state_machine_as_test(machine, settings=STEPS)


# --- fsspec only ------------------------------------------------------------------------------------------------------


def test_a_filesystem_without_exclusive_creation_is_refused_unless_there_is_one_writer(tmp_path: Path) -> None:
    """W4."""
    fs = fsspec.filesystem("file")
    several = FsspecStorage(fs)
    assert not several.capabilities.exclusive_create
    with pytest.raises(ExclusiveCreateError, match="single_writer"):
        several.create(str(tmp_path / "decision"), b"x")
    assert not (tmp_path / "decision").exists()
    alone = FsspecStorage(fs, single_writer=True)
    alone.create(str(tmp_path / "decision"), b"x")
    with pytest.raises(FileExistsError):
        alone.create(str(tmp_path / "decision"), b"y")
    assert (tmp_path / "decision").read_bytes() == b"x"


class Caching(MemoryFileSystem):  # type: ignore[misc]
    """Remembers listings until it is told not to, as remote filesystems do; loses the end of uploads when asked."""

    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    truncates = False
    breaks = False

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True, **kwargs)
        found = self.dircache[path]
        return found if detail else [info["name"] for info in found]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        super().pipe_file(path, value[:-1] if self.truncates else value, **kwargs)
        if self.breaks:
            raise RuntimeError("connection lost")

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())


@pytest.fixture
def caching() -> Iterator[type[Caching]]:
    yield Caching
    Caching.store.clear()
    Caching.truncates = Caching.breaks = False


def test_a_listing_is_never_an_old_one(caching: type[Caching]) -> None:
    reader, writer = FsspecStorage(caching()), FsspecStorage(caching())
    writer.put("/run/a", b"1")
    assert names(reader, "/run") == ["a"]
    writer.put("/run/b", b"2")
    assert names(reader, "/run") == ["a", "b"]
    assert reader.stat("/run/b") == 1


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_a_large_stream_waits_on_this_host_and_leaves_nothing_there(
    caching: type[Caching], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(fsspec_store, "SPOOL_BYTES", MIB)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = FsspecStorage(caching())
    stream = store.open_write("/run/data")
    content = os.urandom(3 * MIB + 7)
    for start in range(0, len(content), MIB // 2 + 1):
        stream.write(content[start : start + MIB // 2 + 1])
    assert len(list(tmp_path.iterdir())) == 1
    if end == "finish":
        assert stream.finish().sha256 == hashlib.sha256(content).hexdigest()
        assert store.get("/run/data") == content
    else:
        stream.abort()
        assert store.stat("/run/data") is None
    assert list(tmp_path.iterdir()) == []


def test_errors_of_other_libraries_name_the_file(caching: type[Caching], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("connection pool is closed")

    store = FsspecStorage(caching())
    for method in ("cat_file", "pipe_file", "info", "ls", "cp_file"):
        monkeypatch.setattr(caching, method, fail)
    for work in (
        lambda: store.get("/run/a"),
        lambda: store.put("/run/a", b""),
        lambda: store.stat("/run/a"),
        lambda: store.list("/run/a"),
        lambda: store.copy("/run/b", "/run/a"),
    ):
        with pytest.raises(StorageError, match=r"/run/a.*connection pool is closed"):
            work()


def test_errors_without_a_number_name_the_file_and_what_happened(
    caching: type[Caching], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As fsspec's own timeout is one. Those whose class says what happened keep it."""

    def fail(error: OSError) -> None:
        def cat_file(*args: Any, **kwargs: Any) -> None:
            raise error

        monkeypatch.setattr(caching, "cat_file", cat_file)

    store = FsspecStorage(caching())
    fail(FSTimeoutError())
    with pytest.raises(StorageTimeoutError, match=r"/run/a: read: no answer in time$") as caught:
        store.get("/run/a")
    assert caught.value.errno == errno.ETIMEDOUT
    fail(ConnectionError("the server hung up"))
    with pytest.raises(StorageError, match=r"/run/a: read: ConnectionError: the server hung up"):
        store.get("/run/a")
    for kept in (FileNotFoundError("/run/a"), PermissionError("/run/a")):
        fail(kept)
        with pytest.raises(type(kept)) as caught:
            store.get("/run/a")
        assert caught.value is kept


def test_a_full_temporary_directory_names_the_file_and_the_place(
    caching: type[Caching], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_store, "SPOOL_BYTES", MIB // 4)
    with small_filesystem(tmp_path / "small", size="1m") as full:
        monkeypatch.setattr(tempfile, "tempdir", str(full))
        stream = FsspecStorage(caching()).open_write("/run/data")
        with pytest.raises(StorageError, match=rf"/run/data: .*{full}/ckptlib-.*No space left.*TMPDIR") as caught:
            stream.write(bytes(2 * MIB))
        assert caught.value.errno == errno.ENOSPC
        stream.abort()
        assert list(full.iterdir()) == []


@pytest.mark.parametrize("spool", [MIB, 4], ids=["from memory", "from a file"])
def test_an_upload_that_lost_its_end_is_an_error_and_leaves_no_file(
    caching: type[Caching], monkeypatch: pytest.MonkeyPatch, spool: int
) -> None:
    monkeypatch.setattr(fsspec_store, "SPOOL_BYTES", spool)
    caching.truncates = True
    store = FsspecStorage(caching())
    stream = store.open_write("/run/data")
    stream.write(b"0123456789")
    with pytest.raises(StorageError, match="/run/data: wrote 10 bytes, store has 9"):
        stream.finish()
    assert store.stat("/run/data") is None


@pytest.mark.parametrize("method", ["put", "create", "swap"])
@pytest.mark.parametrize("told", [False, True], ids=["in silence", "with an error"])
def test_half_a_small_file_does_not_keep_its_name(caching: type[Caching], method: str, told: bool) -> None:
    """sftp, ftp, smb and hdfs open the final name. Of a `put` that failed openly the older file may be what is left."""
    store = FsspecStorage(caching(), single_writer=True)
    caching.truncates, caching.breaks = True, told
    work = {
        "put": lambda: store.put("/run/tracker", b"iter 12"),
        "create": lambda: store.create("/run/tracker", b"iter 12"),
        "swap": lambda: store.swap("/run/tracker", None, b"iter 12"),
    }[method]
    with pytest.raises(StorageError, match=r"/run/tracker: .*(wrote 7 bytes, store has 6|connection lost)"):
        work()
    if method == "create" or not told:
        assert store.stat("/run/tracker") is None


def test_what_another_writer_put_in_the_meantime_stays(caching: type[Caching], monkeypatch: pytest.MonkeyPatch) -> None:
    store, pipe_file = FsspecStorage(caching()), caching.pipe_file

    def overtaken(self: Caching, path: str, value: bytes, **kwargs: Any) -> None:
        pipe_file(self, path, value)
        pipe_file(self, path, b"other")

    monkeypatch.setattr(caching, "pipe_file", overtaken)
    store.put("/run/tracker", b"iter 12")
    assert store.get("/run/tracker") == b"other"
