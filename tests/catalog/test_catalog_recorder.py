"""S4: recording from inside a trainer costs it nothing, whatever state the database is in."""

from __future__ import annotations

import json
import logging
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from catalog import Catalog, Recorder, database, recorder
from catalog.notify import COMMITTED, committed_event, post_event, resource_id
from tests.catalog.samples import attempt, commit, empty_catalog, save_id

INSTANT = 0.005
"""Seconds that a trainer may spend in a call (median; a shared core may stop for longer at any point)."""


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.01)


def seconds_of_a_call(listener: Recorder, count: int = 5) -> float:
    """Tells of an attempt and commits; the median of the calls in seconds."""
    taken = []
    calls: list[Any] = [lambda: listener.attempt_started(attempt())]
    calls += [lambda n=n: listener.committed(commit(n)) for n in range(count)]
    for call in calls:
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def recorder_threads() -> int:
    return sum(thread.name == "ckpt-recorder" for thread in threading.enumerate())


def close_within(listener: Recorder, timeout: float) -> float:
    started = time.perf_counter()
    listener.close(timeout)
    return time.perf_counter() - started


def test_attempts_and_commits_are_recorded_in_their_order(catalog: Catalog, catalog_url: str) -> None:
    listener = Recorder(catalog_url, actor="trainer")
    assert seconds_of_a_call(listener) < INSTANT
    listener.close(10)
    assert listener.pending == 0
    assert [row.iteration for row in catalog.checkpoints("run")] == [0, 1, 2, 3, 4]
    assert [event.kind for event in catalog.events("run")] == ["attempt", *["saved"] * 5]
    assert {event.actor for event in catalog.events("run")} == {"trainer"}


def test_a_recorder_that_was_closed_goes_on_with_the_next_event(catalog: Catalog, catalog_url: str) -> None:
    """`Checkpointer.drain` closes its listeners and may save again."""
    listener = Recorder(catalog_url)
    for iteration in range(3):
        listener.committed(commit(iteration))
        listener.close(10)
        assert len(catalog.checkpoints("run")) == iteration + 1
    listener.close(0)


def test_an_absent_database_costs_nothing_and_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listener = Recorder(str(tmp_path / "none.db"), deadline=0.2)
    with caplog.at_level(logging.WARNING, "catalog"):
        assert seconds_of_a_call(listener) < INSTANT
        wait_for(lambda: caplog.records)
        assert close_within(listener, 2.0) < 2.5
    outages = [record.getMessage() for record in caplog.records if "no catalog at" in record.getMessage()]
    assert len(outages) == 1
    assert "ckpt scan /data/run --adopt" in outages[0]
    assert "6 events were not recorded" in caplog.records[-1].getMessage()
    assert not (tmp_path / "none.db").exists()


@pytest.fixture
def lockable(tmp_path: Path) -> Iterator[Catalog]:
    """An SQLite catalog: one writer locks the whole file."""
    with Catalog(empty_catalog(tmp_path)) as opened:
        yield opened


def test_a_locked_database_costs_nothing(lockable: Catalog, caplog: pytest.LogCaptureFixture) -> None:
    listener = Recorder(str(lockable), deadline=0.3)
    with lockable.database.write():
        assert seconds_of_a_call(listener) < INSTANT
        wait_for(lambda: "locked by another process" in caplog.text)
        assert close_within(listener, 1.0) < 1.5
    assert lockable.checkpoints("run") == []


def test_a_database_that_hangs_does_not_keep_the_trainer_from_ending(
    lockable: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Recorder(str(lockable), deadline=3.0)
    with lockable.database.write():
        assert seconds_of_a_call(listener) < INSTANT
        assert close_within(listener, 0.2) < 0.5
    assert "not recorded within 0.2 s" in caplog.text
    wait_for(lambda: recorder_threads() == 0)


def test_an_unreachable_server_costs_nothing(unused_port: int, caplog: pytest.LogCaptureFixture) -> None:
    listener = Recorder(f"postgresql://nobody@127.0.0.1:{unused_port}/none", deadline=1.0)
    assert seconds_of_a_call(listener) < INSTANT
    assert close_within(listener, 5.0) < 5.5
    assert "cannot be used" in caplog.text


def test_a_server_that_accepts_and_never_answers_costs_nothing() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        listener = Recorder(f"postgresql://nobody@127.0.0.1:{port}/none", deadline=1.0)
        assert seconds_of_a_call(listener) < INSTANT
        assert close_within(listener, 0.3) < 0.8
        wait_for(lambda: recorder_threads() == 0)  # by its own deadline


def test_a_schema_that_is_not_current_costs_nothing_and_names_the_remedy(
    catalog: Catalog, catalog_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with catalog.database.write() as (connection, _):
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0000'")
    listener = Recorder(catalog_url)
    assert seconds_of_a_call(listener) < INSTANT
    listener.close(5)
    assert "ckpt db upgrade" in caplog.text


def test_what_waited_is_recorded_when_the_database_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "RETRY", 0.05)
    path = str(tmp_path / "catalog.db")
    listener = Recorder(path)
    listener.committed(commit(1))
    wait_for(lambda: "no catalog at" in caplog.text)
    database.upgrade(path)
    wait_for(lambda: listener.pending == 0)
    listener.close(5)
    assert "works again" in caplog.text
    with Catalog(path) as catalog:
        assert [row.iteration for row in catalog.checkpoints("run")] == [1]


def test_an_event_that_can_never_be_recorded_does_not_stop_the_others(
    catalog: Catalog, catalog_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Recorder(catalog_url)
    listener.committed(commit(1, run=None))
    listener.committed(commit(2))
    listener.close(10)
    assert [row.iteration for row in catalog.checkpoints("run")] == [2]
    assert "names no run" in caplog.text


def test_more_events_than_fit_give_up_the_oldest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listener = Recorder(str(tmp_path / "none.db"), capacity=3)
    assert seconds_of_a_call(listener, 10) < INSTANT
    assert listener.pending == 3
    assert "gave one up" in caplog.text
    listener.close(1)


def test_a_broken_file_is_reported_and_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.db").write_bytes(b"not a database" * 500)
    listener = Recorder(str(tmp_path / "x.db"))
    assert seconds_of_a_call(listener) < INSTANT
    listener.close(5)
    assert "file is not a database" in caplog.text


# ---------------------------------------------------------------- waking the flows


class Server:
    """An HTTP server that keeps what it was sent."""

    def __init__(self, status: int = 204, delay: float = 0.0) -> None:
        self.requests: list[tuple[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.requests.append((self.path, json.loads(body)))
                time.sleep(delay)
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/api"
        self._thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_every_recorded_commit_wakes_the_flows_with_one_event(
    catalog: Catalog, catalog_url: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", server.url)
    listener = Recorder(catalog_url)
    listener.attempt_started(attempt())
    listener.committed(commit(7))
    listener.close(10)
    ((path, body),) = server.requests
    (row,) = catalog.checkpoints("run")
    assert path == "/api/events"
    (event,) = body
    assert event["event"] == COMMITTED == "ckpt.checkpoint.committed"
    assert (
        event["resource"]["prefect.resource.id"]
        == f"ckpt.checkpoint.run.{save_id(7)}"
        == resource_id("run", save_id(7))
    )
    assert all(isinstance(value, str) for value in event["resource"].values())
    assert event["payload"] == {
        "run": "run",
        "iteration": 7,
        "save_id": save_id(7),
        "checkpoint_id": row.id,
        "url": "/data/run/iter_0000007",
        "size": 107,
    }
    assert event == committed_event(row), "a repeated event has the same id, so that the server drops it"


def test_a_server_that_refuses_or_is_absent_is_logged_once_and_nothing_is_lost(
    catalog: Catalog, catalog_url: str, unused_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Recorder(catalog_url, notify_url=f"http://127.0.0.1:{unused_port}/api", deadline=1.0)
    for iteration in range(3):
        listener.committed(commit(iteration))
    listener.close(10)
    assert len(catalog.checkpoints("run")) == 3
    assert caplog.text.count("nobody was woken") == 1


def test_a_server_that_does_not_answer_is_given_up_after_the_deadline() -> None:
    slow = Server(delay=0.5)
    try:
        started = time.perf_counter()
        with pytest.raises(OSError, match="timed out"):
            post_event({"event": "x"}, slow.url, timeout=0.1)
        assert time.perf_counter() - started < 0.4
    finally:
        slow.close()


def test_only_http_is_spoken() -> None:
    with pytest.raises(ValueError, match="expected an http"):
        post_event({}, "file:///etc/passwd", timeout=1)


def test_nothing_is_left_open(tmp_path: Path) -> None:
    """The recorder closes the database it opened: another process may move the file away."""
    path = empty_catalog(tmp_path)
    listener = Recorder(path)
    listener.committed(commit(1))
    listener.close(10)
    assert not Path(f"{path}-wal").exists()
    with Catalog(path) as catalog:
        assert len(catalog.checkpoints()) == 1
