"""What POSIX adds to the promises of a storage: durability, races between processes, modes, full and failing disks."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from ckptlib.errors import ExclusiveCreateError
from ckptlib.storage import PosixStorage, WriteStream, filesystems, posix
from ckptlib.storage.examination import examine
from tests.support.filesystems import small_filesystem

MIB = 1024 * 1024


@pytest.fixture
def store() -> PosixStorage:
    return PosixStorage()


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# --- several processes ------------------------------------------------------------------------------------------------


RACE = """
import json, multiprocessing, sys
from ckptlib.storage import PosixStorage

def race(number, folder, rounds, start, results):
    store = PosixStorage()
    won = []
    for i in range(rounds):
        start.wait()
        try:
            store.create(f"{folder}/{i}/decision.json", b"%d" % number)
        except FileExistsError:
            continue
        won.append(i)
    results.put((number, won))

context = multiprocessing.get_context("fork")
folder, racers, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
start, results = context.Barrier(racers, timeout=60), context.Queue()
processes = [context.Process(target=race, args=(i, folder, rounds, start, results)) for i in range(racers)]
for process in processes:
    process.start()
print(json.dumps([results.get(timeout=60) for _ in processes]))
for process in processes:
    process.join(60)
    assert process.exitcode == 0
"""


def test_of_sixteen_processes_that_race_to_create_a_file_one_wins(tmp_path: Path) -> None:
    """W4: ten races, each into a directory that does not exist yet."""
    rounds = 10
    raced = subprocess.run(
        [sys.executable, "-c", RACE, str(tmp_path), "16", str(rounds)], check=True, capture_output=True, timeout=100
    )
    winners = sorted((i, number) for number, won in json.loads(raced.stdout) for i in won)
    assert [i for i, _ in winners] == list(range(rounds))
    for i, number in winners:
        assert (tmp_path / str(i) / "decision.json").read_bytes() == b"%d" % number
        assert os.listdir(tmp_path / str(i)) == ["decision.json"]  # no temporary files


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path, store: PosixStorage) -> None:
    path = str(tmp_path / "tracker")
    contents = [bytes([letter]) * 50_000 for letter in b"abcd"]
    store.put(path, contents[0])
    stop = threading.Event()

    def write() -> None:
        for content in itertools.cycle(contents):
            if stop.is_set():
                return
            store.put(path, content)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert all(store.get(path) in contents for _ in range(300))
    finally:
        stop.set()
        writer.join()
    assert everything(tmp_path) == ["tracker"]


MODES = """
import os, sys
from ckptlib.storage import PosixStorage
os.umask(int(sys.argv[2], 8))
store = PosixStorage()
store.put(sys.argv[1] + "/new/put", b"x")
store.create(sys.argv[1] + "/new/created", b"x")
stream = store.open_write(sys.argv[1] + "/new/deep/streamed")
stream.write(b"x")
stream.finish()
"""


@pytest.mark.parametrize("umask", ["000", "022", "027", "077"])
def test_modes_are_what_the_umask_gives(tmp_path: Path, umask: str) -> None:
    """C33: never the 0600 of temporary files."""
    subprocess.run([sys.executable, "-c", MODES, str(tmp_path), umask], check=True, timeout=60)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    files, directories = 0o666 & ~int(umask, 8), 0o777 & ~int(umask, 8)
    assert modes == {
        "new": directories,
        "deep": directories,
        "put": files,
        "created": files,
        "streamed": files,
    }


def test_a_link_is_listed_as_a_link_and_not_followed(tmp_path: Path, store: PosixStorage) -> None:
    """D4."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "elsewhere")
    (entry,) = store.list(str(tmp_path / "root"))
    assert not entry.is_dir
    store.remove([str(tmp_path / "root" / "link")])
    assert everything(tmp_path) == ["elsewhere", "root"]


# --- durable before it counts -----------------------------------------------------------------------------------------


class Calls:
    """Records the calls that make files visible and durable, in order, by what they are about."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, str]] = []
        for name in ("fsync", "link", "replace", "mkdir"):
            monkeypatch.setattr(os, name, self._recording(name, getattr(os, name)))

    def _recording(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **options: Any) -> Any:
            target = (
                os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else str(args[-1 if name != "mkdir" else 0])
            )
            self.made.append((name, os.path.basename(target)))
            return call(*args, **options)

        return recorded


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc to tell which file a descriptor is")
    (tmp_path / "root").mkdir()
    return Calls(monkeypatch)


def test_a_created_file_is_on_disk_before_its_name_and_the_name_before_the_return(
    tmp_path: Path, store: PosixStorage, calls: Calls
) -> None:
    """W1, W4: fsynced temporary file, link(2), directory fsync."""
    store.create(str(tmp_path / "root" / "decision.json"), b"x")
    (first, temporary), *rest = calls.made
    assert (first, temporary.endswith(".tmp")) == ("fsync", True)
    assert rest == [("link", "decision.json"), ("fsync", "root")]


def test_who_loses_the_race_to_create_a_file_returns_when_it_is_durable(
    tmp_path: Path, store: PosixStorage, calls: Calls
) -> None:
    """W4: it goes on building on what is there, so that must not go away when the power does."""
    path = str(tmp_path / "root" / "decision.json")
    store.create(path, b"x")
    calls.made.clear()
    with pytest.raises(FileExistsError):
        store.create(path, b"y")
    assert calls.made[-2:] == [("link", "decision.json"), ("fsync", "root")]


def test_a_put_file_is_on_disk_before_it_replaces_and_its_name_before_the_return(
    tmp_path: Path, store: PosixStorage, calls: Calls
) -> None:
    store.put(str(tmp_path / "root" / "tracker"), b"x")
    (first, temporary), *rest = calls.made
    assert (first, temporary.endswith(".tmp")) == ("fsync", True)
    assert rest == [("replace", "tracker"), ("fsync", "root")]


def test_a_stream_and_each_new_directory_above_it_are_on_disk_when_it_is_finished(
    tmp_path: Path, store: PosixStorage, calls: Calls
) -> None:
    """W1: a file whose directory is not durable is not durable."""
    stream = store.open_write(str(tmp_path / "root" / "one" / "two" / "data"))
    stream.write(b"x")
    stream.finish()
    assert calls.made == [
        ("mkdir", "one"),
        ("fsync", "root"),
        ("mkdir", "two"),
        ("fsync", "one"),
        ("fsync", "data"),
        ("fsync", "two"),
    ]


@pytest.mark.parametrize("error", [FileExistsError(errno.EEXIST, "File exists"), OSError(errno.EIO, "lost")])
def test_a_link_that_was_made_is_made_whatever_its_answer_says(
    tmp_path: Path, store: PosixStorage, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """W4: an NFS server that gets a request twice says that the name exists, which it does since the first."""
    link = os.link

    def linked(source: str, target: str) -> None:
        link(source, target)
        raise error

    monkeypatch.setattr(os, "link", linked)
    store.create(str(tmp_path / "decision.json"), b"mine")
    assert store.get(str(tmp_path / "decision.json")) == b"mine"
    assert everything(tmp_path) == ["decision.json"]
    monkeypatch.setattr(os, "link", link)
    with pytest.raises(FileExistsError):
        store.create(str(tmp_path / "decision.json"), b"theirs")


def test_links_are_counted_past_the_caches(
    tmp_path: Path, store: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W4: a client may show the number from before its own link."""
    link, stat, fresh = os.link, os.stat, set[str]()

    def linked(source: str, target: str) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    def cached(path: Any, *args: Any, **options: Any) -> os.stat_result:
        found = stat(path, *args, **options)
        if not str(path).endswith(".tmp") or str(path) in fresh:
            return found
        return os.stat_result([*found[:3], 1, *found[4:10]])

    monkeypatch.setattr(os, "link", linked)
    monkeypatch.setattr(os, "stat", cached)
    monkeypatch.setattr(filesystems, "refresh", fresh.add)
    store.create(str(tmp_path / "decision.json"), b"mine")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_filesystem_without_hard_links_is_refused_and_the_doctor_says_why(
    tmp_path: Path, store: PosixStorage, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """W4: as vfat and some in user space; nothing is left."""
    monkeypatch.setattr(os, "link", _failing_after(os.link, 0, code))
    with pytest.raises(ExclusiveCreateError, match=r"decision\.json'.*has no hard links") as caught:
        store.create(str(tmp_path / "decision.json"), b"x")
    assert (caught.value.errno, everything(tmp_path)) == (code, [])
    found = {finding.promise: finding for finding in examine(str(tmp_path / "new"), size=1024).findings}
    exclusive = found["of several that create a file, exactly one succeeds"]
    assert exclusive.outcome == "unsafe"
    assert "hard links" in exclusive.detail


# --- locks ------------------------------------------------------------------------------------------------------------


def test_a_swap_does_not_wait_for_ever_for_one_who_was_stopped(
    tmp_path: Path, store: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the comparison is all."""
    monkeypatch.setattr(posix, "LOCK_WAIT", 0.05)
    path = str(tmp_path / "tracker")
    held = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with ThreadPoolExecutor(1) as pool:
            swapping = pool.submit(lambda: (store.swap(path, None, b"1"), store.swap(path, None, b"2")))
            try:
                assert swapping.result(20) == (True, False)
            finally:
                fcntl.flock(held, fcntl.LOCK_UN)
    finally:
        os.close(held)
    assert store.get(path) == b"1"


def test_a_swap_waits_for_another_one(tmp_path: Path, store: PosixStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "LOCK_WAIT", 60)
    path = str(tmp_path / "tracker")
    held = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with ThreadPoolExecutor(1) as pool:
            swapping = pool.submit(store.swap, path, None, b"1")
            assert wait([swapping], 0.1).not_done
            fcntl.flock(held, fcntl.LOCK_UN)
            assert swapping.result(20)
    finally:
        os.close(held)


# --- directories ------------------------------------------------------------------------------------------------------


def test_a_directory_is_made_in_one_that_may_be_written_and_not_read(
    tmp_path: Path, store: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ = os.open

    def opening(path: Any, *args: Any, **options: Any) -> int:
        if str(path) == str(tmp_path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return open_(path, *args, **options)

    monkeypatch.setattr(os, "open", opening)
    store.put(str(tmp_path / "run" / "file"), b"x")
    assert store.get(str(tmp_path / "run" / "file")) == b"x"


# --- failing disks ----------------------------------------------------------------------------------------------------


def test_short_writes_and_short_reads_are_gone_on_with(
    tmp_path: Path, store: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, memoryview(data)[:1000]))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [memoryview(buffers[0])[:7]], at))
    content = os.urandom(300_000)
    store.put(str(tmp_path / "put"), content)
    store.create(str(tmp_path / "created"), content)
    stream = store.open_write(str(tmp_path / "streamed"))
    stream.write(content[:200_000])
    stream.write(content[200_000:])
    assert stream.finish().size == len(content)
    for name in ("put", "created", "streamed"):
        assert (tmp_path / name).read_bytes() == content
    one, two = bytearray(100), bytearray(33)
    store.read_into(str(tmp_path / "put"), [(5, memoryview(one)), (105, memoryview(two)), (5, memoryview(one))])
    assert one + two == content[5:138]


def _failing_after(call: Callable[..., Any], calls: int, code: int) -> Callable[..., Any]:
    counter = itertools.count()

    def failing(*args: Any, **options: Any) -> Any:
        if next(counter) >= calls:
            raise OSError(code, os.strerror(code))
        return call(*args, **options)

    return failing


def _fill(stream: WriteStream, size: int) -> None:
    for _ in range(size // MIB):
        stream.write(b"x" * MIB)
    stream.finish()


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_put_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, store: PosixStorage, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = str(tmp_path / "tracker")
    store.put(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _failing_after(getattr(os, call), 0, errno.EIO))
        with pytest.raises(OSError, match="Input/output error") as caught:
            store.put(path, b"new")
    assert caught.value.errno == errno.EIO
    assert everything(tmp_path) == ["tracker"]
    assert store.get(path) == b"old"


@pytest.mark.parametrize("call", ["write", "fsync", "link"])
def test_a_create_that_fails_before_its_name_is_there_leaves_nothing(
    tmp_path: Path, store: PosixStorage, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _failing_after(getattr(os, call), 0, errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            store.create(str(tmp_path / "decision.json"), b"x")
    assert everything(tmp_path) == []
    store.create(str(tmp_path / "decision.json"), b"x")


@pytest.mark.parametrize(("call", "after"), [("write", 0), ("write", 1), ("fsync", 0), ("fsync", 1)])
def test_a_stream_that_fails_says_for_which_file_and_leaves_nothing_once_it_is_aborted(
    tmp_path: Path, store: PosixStorage, monkeypatch: pytest.MonkeyPatch, call: str, after: int
) -> None:
    """W1: also when only the directory could not be made durable (the last case): it was not finished."""
    path = str(tmp_path / "__0_0.distcp")
    stream = store.open_write(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _failing_after(getattr(os, call), after, errno.EIO))
        with pytest.raises(OSError, match=str(tmp_path)) as caught:
            _fill(stream, 3 * MIB)
        assert caught.value.errno == errno.EIO
        stream.abort()
    assert everything(tmp_path) == []


def test_a_full_disk_leaves_no_half_file_under_a_final_name(tmp_path: Path, store: PosixStorage) -> None:
    """A filesystem that really is full, and has room again afterwards."""
    with small_filesystem(tmp_path / "small", size="1m") as disk:
        store.put(str(disk / "tracker"), b"old")
        for fill in (store.put, store.create):
            with pytest.raises(OSError, match="No space left") as caught:
                fill(str(disk / "big"), b"x" * 2 * MIB)
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.filename == str(disk / "big")
        with pytest.raises(OSError, match="No space left"):
            store.put(str(disk / "tracker"), b"x" * 2 * MIB)
        stream = store.open_write(str(disk / "data"))
        with pytest.raises(OSError, match=r"No space left.*data"):
            _fill(stream, 3 * MIB)
        stream.abort()
        assert everything(disk) == ["tracker"]
        assert store.get(str(disk / "tracker")) == b"old"
        store.create(str(disk / "small"), b"x" * 1000)


LIMITED = """
import errno, os, resource, sys
from ckptlib.storage import PosixStorage
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
store, folder = PosixStorage(), sys.argv[1]
stream = store.open_write(folder + "/data")
for fill in (
    lambda: store.put(folder + "/tracker", b"x" * 200_000),
    lambda: store.create(folder + "/new", b"x" * 200_000),
    lambda: stream.write(b"x" * 200_000),
):
    try:
        fill()
    except OSError as error:
        assert error.errno == errno.EFBIG, error
    else:
        raise AssertionError("no error")
stream.abort()
"""


def test_a_limit_on_file_sizes_leaves_no_half_file_under_a_final_name(tmp_path: Path, store: PosixStorage) -> None:
    """The same where nothing can be mounted: writes stop in the middle."""
    store.put(str(tmp_path / "tracker"), b"old")
    subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], check=True, timeout=60)
    assert everything(tmp_path) == ["tracker"]
    assert store.get(str(tmp_path / "tracker")) == b"old"
