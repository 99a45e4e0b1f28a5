"""What becomes of every operation on S3 when something goes wrong at each of its requests.

It is done, right, or it fails with an error that names the object and what happened; in time; and nothing half is left.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib import storage
from ckptlib.errors import CkptError, IntegrityError, LoadIncompleteError, StorageError, StorageTimeoutError
from ckptlib.storage import Storage, join
from tests.support.fault_proxy import FaultProxy
from tests.support.faults import Fault, Kind
from tests.support.s3_server import S3Server

PART = 5 << 20
SMALL = os.urandom(1000)
MEDIUM = os.urandom(300_000)
LARGE = os.urandom(2 * PART + 1000)

DEEP = pytest.mark.deep
ANSWER_SECONDS = 0.5
ATTEMPTS = 3
DEADLINE = 15.0
"""Nothing here waits for more than a handful of answers, each of which may be tried `ATTEMPTS` times."""


@dataclass(frozen=True)
class Place:
    """A directory of the test's own, through the proxy and directly."""

    proxy: FaultProxy
    store: Storage
    direct: Storage
    root: str

    def __call__(self, *names: str) -> str:
        return join(self.root, *names)


@pytest.fixture(scope="module")
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3) as running:
        yield running


@pytest.fixture
def place(s3: S3Server, proxy: FaultProxy, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Requests are repeated at once: how long to wait before is not what is tested here."""
    monkeypatch.setattr("ckptlib.storage.s3_client.backoff", lambda attempt, *, busy: 0.0)
    options = {"part_size": PART, "timeout": ANSWER_SECONDS, "attempts": ATTEMPTS}
    store, root = storage.resolve(s3_url, s3.storage_options(endpoint=proxy.endpoint, **options))
    direct, _ = storage.resolve(s3_url, s3.storage_options(part_size=PART))
    store.create(join(root, "asked"), b"")  # what the store honours is found out before anything goes wrong
    store.swap(join(root, "asked"), b"", b"x")
    store.vouched(join(root, "asked"))
    proxy.faults = []
    proxy.forget()
    yield Place(proxy, store, direct, root)
    proxy.faults = []


# --- operations: what must be there before, what is done while things go wrong, what must be true afterwards ----------

Steps = Generator[None, None, None]


def put(place: Place, path: str) -> Steps:
    yield
    place.store.put(path, SMALL)
    yield
    assert place.direct.get(path) == SMALL


def replace(place: Place, path: str) -> Steps:
    place.direct.put(path, b"old")
    yield
    place.store.put(path, SMALL)
    yield
    assert place.direct.get(path) == SMALL


def create(place: Place, path: str) -> Steps:
    yield
    place.store.create(path, SMALL)
    yield
    assert place.direct.get(path) == SMALL


def swap(place: Place, path: str) -> Steps:
    place.direct.put(path, b"old")
    yield
    assert place.store.swap(path, b"old", SMALL)
    yield
    assert place.direct.get(path) == SMALL


def get(place: Place, path: str) -> Steps:
    place.direct.put(path, MEDIUM)
    yield
    assert place.store.get(path) == MEDIUM
    yield


def read_ranges(place: Place, path: str) -> Steps:
    place.direct.put(path, MEDIUM)
    head, tail = bytearray(1000), bytearray(10_000)
    yield
    place.store.read_into(path, [(0, memoryview(head)), (290_000, memoryview(tail))])
    yield
    assert (head, tail) == (MEDIUM[:1000], MEDIUM[290_000:])


def look(place: Place, path: str) -> Steps:
    place.direct.put(path, SMALL)
    yield
    assert place.store.stat(path) == len(SMALL)
    yield


def ask_for_digest(place: Place, path: str) -> Steps:
    place.direct.put(path, SMALL)
    expected = place.direct.vouched(path)
    yield
    assert place.store.vouched(path) == expected
    yield


def list_names(place: Place, path: str) -> Steps:
    for name in ("a", "b", "d/c"):
        place.direct.put(join(path, name), b"x")
    yield
    assert [entry.name for entry in place.store.list(path)] == ["a", "b", "d"]
    yield


def remove(place: Place, path: str) -> Steps:
    names = [join(path, name) for name in ("a", "b")]
    for name in names:
        place.direct.put(name, b"x")
    yield
    place.store.remove(names)
    yield
    assert place.direct.list(path) == []


def copy(place: Place, path: str) -> Steps:
    place.direct.put(join(path, "a"), MEDIUM)
    yield
    place.store.copy(join(path, "a"), join(path, "b"))
    yield
    assert place.direct.get(join(path, "b")) == MEDIUM


def write_small(place: Place, path: str) -> Steps:
    yield
    stream = place.store.open_write(path)
    try:
        stream.write(SMALL)
        written = stream.finish()
    except BaseException:
        stream.abort()
        raise
    assert written.size == len(SMALL)
    yield
    assert place.direct.get(path) == SMALL


def write_large(place: Place, path: str) -> Steps:
    yield
    stream = place.store.open_write(path, size=len(LARGE))
    try:
        stream.write(LARGE)
        written = stream.finish()
    except BaseException:
        stream.abort()
        raise
    assert written.size == len(LARGE)
    yield
    assert place.direct.get(path) == LARGE


def end_upload(place: Place, path: str) -> Steps:
    stream = place.direct.open_write(path)
    stream.write(LARGE)
    stream.release()
    yield
    for unfinished in place.store.unfinished(base_of(path)):
        if unfinished.path == path:
            place.store.discard(unfinished)
    yield
    assert place.direct.unfinished(base_of(path)) == []


def base_of(path: str) -> str:
    return path.rpartition("/")[0]


Operation = Callable[[Place, str], Steps]
SMALL_OPERATIONS: list[Operation] = [
    *(put, replace, create, swap, get, read_ranges, look, ask_for_digest, list_names, remove, copy, write_small)
]
OPERATIONS: list[Operation] = [*SMALL_OPERATIONS, write_large, end_upload]


def requests_of(place: Place, operation: Operation) -> list[str]:
    """What the operation asks for when all goes well, each kind of request once."""
    steps = operation(place, place("clean", operation.__name__))
    next(steps)
    place.proxy.forget()
    next(steps)
    found = list(dict.fromkeys(passed.operation for passed in place.proxy.passed))
    next(steps, None)
    return found


def attempt(place: Place, operation: Operation, fault: Fault) -> OSError | None:
    """The operation under a fault; its error, if it is one that may be; whatever it was, what is left is whole."""
    path = place(uuid.uuid4().hex[:8], operation.__name__)
    steps = operation(place, path)
    next(steps)
    place.proxy.faults = [fault]
    start = time.monotonic()
    error: OSError | None = None
    try:
        next(steps)
    except OSError as raised:
        error = raised
    finally:
        place.proxy.faults = []
    assert time.monotonic() - start < DEADLINE
    what = f"{operation.__name__}, {fault.kind} at {fault.operation}"
    assert fault.struck, what
    if error is None:
        next(steps, None)
    else:
        assert base_of(path) in str(error), f"{what}: {error}"
        assert isinstance(error, StorageError | PermissionError | FileExistsError), f"{what}: {error!r}"
        if operation is write_small or operation is write_large:
            content = SMALL if operation is write_small else LARGE
            assert place.direct.stat(path) in (None, len(content)), what
            assert fault.times is None or place.direct.unfinished(base_of(path)) == [], what
    return error


def rarely(*kinds: Kind) -> list[Any]:
    """With larger explorations only."""
    return [pytest.param(kind, marks=DEEP) for kind in kinds]


PASSING: list[Any] = [
    *("slow_down", "cut_after", "short_download", "conflict"),
    *rarely("internal_error", "error_after", "request_timeout", "cut_before", "cut_upload", "cut_download", "delay"),
]
"""What goes away by itself, at any request."""


@pytest.mark.parametrize("kind", PASSING)
def test_what_passes_by_itself_is_not_noticed(place: Place, kind: Kind) -> None:
    """At each request of every operation, twice."""
    for operation in SMALL_OPERATIONS:
        for request in requests_of(place, operation):
            if kind == "conflict" and not (operation in (create, swap) and request == "PutObject"):
                continue
            if kind == "request_timeout" and request.startswith(("Get", "Head", "List")):
                continue  # it is of bodies that come too slowly
            error = attempt(place, operation, Fault(kind, request, times=2))
            assert error is None, f"{operation.__name__}, {kind} at {request}: {error!r}"


@pytest.mark.parametrize("operation", [write_large, end_upload])
@pytest.mark.parametrize(
    "kind", ["cut_after", *rarely("slow_down", "cut_before", "cut_upload", "error_after", "delay")]
)
def test_an_upload_in_parts_gets_over_what_passes_by_itself(place: Place, operation: Operation, kind: Kind) -> None:
    for request in requests_of(place, operation):
        error = attempt(place, operation, Fault(kind, request))
        assert error is None, f"{operation.__name__}, {kind} at {request}: {error!r}"


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        (create, "hang_after"),
        (get, "hang"),
        *(pytest.param(write_large, k, marks=DEEP) for k in ("hang", "hang_after")),
    ],
)
def test_an_answer_that_does_not_come_is_asked_for_again(place: Place, operation: Operation, kind: Kind) -> None:
    request = requests_of(place, operation)[-1]
    assert attempt(place, operation, Fault(kind, request)) is None


LASTING: dict[Kind, str] = {
    "slow_down": "SlowDown",
    "internal_error": "InternalError",
    "cut_before": "attempts",
    "expired_token": "expired",
    "forbidden": "access denied",
    "skewed": "clocks",
    "wrong_region": "region",
    "moved": "region",
}


@pytest.mark.parametrize(
    "kind", ["slow_down", "forbidden", *rarely("cut_before", "internal_error", "expired_token", "skewed", "moved")]
)
def test_what_stays_is_an_error_that_names_the_object_and_the_cause(place: Place, kind: Kind) -> None:
    for operation in SMALL_OPERATIONS:
        for request in requests_of(place, operation):
            error = attempt(place, operation, Fault(kind, request, times=None))
            assert error is not None, f"{operation.__name__}, {kind} at {request}"
            if not request.startswith("Head"):  # whose answers have no body to say it
                assert LASTING[kind] in str(error), f"{operation.__name__}, {kind} at {request}: {error}"


@pytest.mark.parametrize("kind", ["wrong_region", *rarely("forbidden", "slow_down", "cut_before", "skewed", "moved")])
def test_an_upload_that_fails_says_why_and_leaves_no_object(place: Place, kind: Kind) -> None:
    for request in ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"):
        error = attempt(place, write_large, Fault(kind, request, times=None))
        assert error is not None
        assert LASTING[kind] in str(error)
        assert place.direct.unfinished(place.root) == []


def test_a_store_that_never_answers_is_given_up_in_time(place: Place) -> None:
    """P24: it accepts a part and then says nothing."""
    for operation, request in ((get, "GetObject"), (write_large, "UploadPart")):
        error = attempt(place, operation, Fault("hang", request, times=None))
        assert isinstance(error, StorageTimeoutError)
        assert f"{ANSWER_SECONDS:g} s" in str(error)


def test_a_store_that_was_busy_for_long_is_still_asked_as_often_as_it_should(place: Place) -> None:
    """botocore's own repetitions end for good after a hundred failures of a process."""
    for _ in range(55):
        assert attempt(place, put, Fault("slow_down", "PutObject", times=None)) is not None
    assert attempt(place, put, Fault("slow_down", "PutObject", times=ATTEMPTS - 1)) is None


@pytest.mark.parametrize("kind", ["cut_after", *rarely("slow_down", "cut_before", "error_after", "hang_after")])
def test_what_a_store_honours_is_found_out_in_spite_of_faults(place: Place, kind: Kind) -> None:
    """W4, V3: at each request of the probes; a wrong answer would stay for the life of the process."""
    facts = place.store.connection.facts  # type: ignore[attr-defined]
    known = dict(facts)
    assert set(known.values()) == {True}
    for skip in range(12):
        facts.clear()
        place.proxy.faults = [Fault(kind, skip=skip)]
        place.store.create(place(f"created{skip}"), SMALL)
        assert place.store.swap(place(f"created{skip}"), SMALL, b"x")
        assert place.store.vouched(place(f"created{skip}")) is not None
        assert facts == known
    assert place.proxy.faults[0].struck


# --- what only the content can tell -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cut_after", "hang_after", "error_after"])
def test_a_creation_whose_answer_was_lost_is_ours_if_its_content_is(place: Place, kind: Kind) -> None:
    """W4: the repetition finds the name taken; by whom, the content says."""
    place.proxy.faults = [Fault(kind, "PutObject")]
    place.store.create(place("ours"), SMALL)
    place.direct.create(place("theirs"), b"theirs")
    place.proxy.faults = [Fault("cut_before", "PutObject")]
    with pytest.raises(FileExistsError):
        place.store.create(place("theirs"), SMALL)
    assert place.direct.get(place("theirs")) == b"theirs"


def test_a_creation_that_conflicts_with_its_own_lost_one_is_ours(place: Place) -> None:
    """W4: the first is done and its answer lost, the second is told to try again, the third finds the name taken."""
    place.proxy.faults = [Fault("cut_after", "PutObject"), Fault("conflict", "PutObject")]
    place.store.create(place("ours"), SMALL)
    place.proxy.faults = [Fault("error_after", "PutObject"), Fault("conflict", "PutObject")]
    place.direct.put(place("swapped"), b"old")
    assert place.store.swap(place("swapped"), b"old", SMALL)


def test_of_two_that_create_one_name_with_one_content_one_has_created_it(place: Place) -> None:
    """W4: nothing was lost, so the name was taken by somebody else, whatever it holds."""
    place.direct.create(place("file"), SMALL)
    with pytest.raises(FileExistsError):
        place.store.create(place("file"), SMALL)


@pytest.mark.parametrize("kind", ["cut_download", "short_download"])
def test_a_read_that_breaks_goes_on_where_it_broke(place: Place, kind: Kind) -> None:
    place.direct.put(place("data"), LARGE[: 4 << 20])
    found = bytearray(4 << 20)
    place.proxy.faults = [Fault(kind, "GetObject")]
    place.store.read_into(place("data"), [(0, memoryview(found))])
    assert found == LARGE[: 4 << 20]
    assert place.proxy.counts()["GetObject"] == 2
    assert place.proxy.bytes_downloaded("GetObject") < 1.6 * len(found)


def test_a_part_that_was_damaged_on_the_way_is_refused_and_sent_again(place: Place) -> None:
    """W1."""
    for operation, request in ((write_large, "UploadPart"), (write_small, "PutObject"), (create, "PutObject")):
        expected = {write_large: 4, write_small: 2, create: 2}[operation]
        place.proxy.forget()
        assert attempt(place, operation, Fault("flip_upload", request)) is None
        assert place.proxy.counts()[request] == expected
        error = attempt(place, operation, Fault("flip_upload", request, times=None))
        assert "not what was sent" in str(error)


@pytest.mark.parametrize("kind", ["error_in_200", *rarely("error_after", "cut_after", "hang_after")])
def test_a_completion_that_took_place_is_known_whatever_was_answered(place: Place, kind: Kind) -> None:
    assert attempt(place, write_large, Fault(kind, "CompleteMultipartUpload")) is None


def test_a_credential_that_expires_between_parts_ends_the_upload(place: Place) -> None:
    """And where it cannot be ended either, it is listed, and goes later."""
    path = place("file")
    place.proxy.faults = [Fault("expired_token", skip=4, times=None)]
    stream = place.store.open_write(path)
    stream.write(LARGE)
    with pytest.raises(PermissionError, match="expired"):
        stream.finish()
    stream.abort()
    place.proxy.faults = []
    assert place.store.stat(path) is None
    for left in place.store.unfinished(place.root):
        place.store.discard(left)
    assert place.store.unfinished(place.root) == []


def test_a_byte_that_changes_on_the_way_down_is_found(s3: S3Server, place: Place) -> None:
    """R3: by the CRC of the chunk, or by what reads a record."""
    url = f"s3://{place.root}/iter_0000001"
    weights = torch.randn(300, 300)
    options = s3.storage_options(endpoint=place.proxy.endpoint, timeout=ANSWER_SECONDS, attempts=ATTEMPTS)
    ckptlib.save({"w": weights}, url, iteration=1, storage_options=options)
    place.proxy.faults = [Fault("flip_download", "GetObject", key="*.distcp")]
    state = {"w": torch.zeros(300, 300)}
    with pytest.raises((IntegrityError, LoadIncompleteError)) as caught:
        ckptlib.load(state, url, storage_options=options)
    assert place.proxy.faults[0].struck
    assert isinstance(caught.value, CkptError)
    ckptlib.load(state, url, storage_options=options)
    assert torch.equal(state["w"], weights)
