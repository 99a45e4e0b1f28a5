"""The parts of `ckpt flows serve` that need no Prefect server."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from pydantic import ValidationError

from ckptlib.errors import CkptError, LeaseHeldError
from flows import state
from flows.catalogue import DEPLOYMENTS, find
from flows.serve import choose_port, healthy, prefect_environment, serve
from flows.settings import FlowsSettings, default_state_dir


def last_time(port: int) -> state.ServeState:
    return state.ServeState(pid=1, api_url=f"http://127.0.0.1:{port}/api", database="db", started_at=0.0)


def test_port_of_last_time_is_taken_again_if_it_is_free() -> None:
    """Trainers that run for weeks know it."""
    port = choose_port("127.0.0.1", 0, None)
    assert choose_port("127.0.0.1", 0, last_time(port)) == port


def test_port_of_last_time_that_is_taken_is_replaced() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert choose_port("127.0.0.1", 0, last_time(port)) != port


def test_given_port_that_is_taken_is_an_error_that_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CkptError, match=f"port {port}"):
            choose_port("127.0.0.1", port, None)


def test_environment_takes_nothing_from_another_prefect_and_tells_nobody(tmp_path: Path) -> None:
    inherited = {
        "PATH": "/bin",
        "PREFECT_API_URL": "https://api.prefect.cloud/api/accounts/1",
        "PREFECT_API_KEY": "secret",
        "PREFECT_PROFILE": "work",
        "PREFECT_API_AUTH_STRING": "user:password",
        "no_proxy": "example.org",
        "http_proxy": "http://proxy:3128",
    }
    env = prefect_environment(inherited, FlowsSettings(state_dir=tmp_path), "http://127.0.0.1:4200/api")
    assert env["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
    assert "PREFECT_API_KEY" not in env
    assert "PREFECT_PROFILE" not in env
    assert env["PREFECT_API_AUTH_STRING"] == "user:password"
    assert env["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert env["DO_NOT_TRACK"] == "1"
    assert Path(env["PREFECT_HOME"]).is_relative_to(tmp_path)
    assert env["no_proxy"] == env["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    assert env["PATH"] == "/bin"


def test_second_set_in_the_same_directory_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    settings = FlowsSettings(state_dir=tmp_path)
    with state.exclusive(tmp_path):
        last_time(4200).write(tmp_path)
        found = state.running(tmp_path)
        assert found is not None
        assert found.api_url == "http://127.0.0.1:4200/api"
        with pytest.raises(LeaseHeldError, match="4200"):
            serve(settings, database="db", label="db", echo=print)
    assert state.running(tmp_path) is None


def test_state_file_that_is_damaged_or_of_another_version_is_no_running_set(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"pid": 1}', "\x00"):
        (tmp_path / "serve.json").write_text(text)
        assert state.remembered(tmp_path) is None
        assert state.running(tmp_path) is None


def test_nothing_answers_where_no_server_is() -> None:
    assert not healthy(f"http://127.0.0.1:{choose_port('127.0.0.1', 0, None)}/api")


def test_server_that_cannot_start_is_reported_with_its_own_words(tmp_path: Path) -> None:
    """It reads ``prefect.toml`` in the directory it runs in."""
    settings = FlowsSettings(state_dir=tmp_path)
    (tmp_path / "prefect.toml").write_text('[server.api]\nport = "no number"\n')
    with pytest.raises(CkptError, match=r"server ended by itself with status [1-9]") as caught:
        serve(settings, database="db", label="db", echo=print)
    assert "no number" in str(caught.value)
    assert str(tmp_path / "logs" / "server.log") in str(caught.value)
    assert state.running(tmp_path) is None


def test_linger_shorter_than_the_wake_window_is_refused() -> None:
    with pytest.raises(ValidationError, match="linger"):
        FlowsSettings(linger=1.0, wake_window=10.0)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CKPT_DB", "/data/catalog.db")
    monkeypatch.setenv("CKPT_FLOWS_LEASE_TTL", "5")
    monkeypatch.setenv("CKPT_FLOWS_BATCH_SIZE", "2GiB")
    monkeypatch.setenv("CKPT_FLOWS_STATE_DIR", str(tmp_path))
    settings = FlowsSettings()
    assert (settings.db, settings.lease_ttl, settings.state_dir) == ("/data/catalog.db", 5.0, tmp_path)
    assert settings.batch_size == 2 * 2**30


@pytest.mark.parametrize(
    ("name", "value"), [("LEVEL", "listing"), ("PORT", "70000"), ("LEASE_TTL", "0"), ("BATCH_SIZE", "0")]
)
def test_settings_that_would_never_work_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """A drain at `listing` would never grant a verdict, and so never empty the queue (V3)."""
    monkeypatch.setenv(f"CKPT_FLOWS_{name}", value)
    with pytest.raises(ValidationError):
        FlowsSettings()


def test_state_directory_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/somewhere")
    assert default_state_dir() == Path("/somewhere/ckptlib/flows")
    monkeypatch.delenv("XDG_DATA_HOME")
    assert default_state_dir() == Path(os.path.expanduser("~/.local/share/ckptlib/flows"))


def test_every_deployment_is_found_by_its_flow_and_wakes_are_backed_by_a_schedule() -> None:
    """S5: an event is delivered at most once, so whatever an event starts is scheduled too."""
    for spec in DEPLOYMENTS:
        assert find(spec.flow) is spec
        assert spec.schedule is not None or not spec.wakes_on_commit
    with pytest.raises(KeyError):
        find("no such flow")
