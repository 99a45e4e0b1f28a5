"""`ckpt flows serve`: a Prefect server and a runner for our deployments, brought up and ended as one thing.

This process imports no Prefect and has no threads: it starts two children and watches them. Whatever ends it, the
children end too (SIGTERM and SIGINT: in order, the runner first because it needs the API; SIGKILL: by the kernel).
When a child ends by itself, everything ends and the exit status says so: restarting is a process manager's work, and
nothing is lost meanwhile, because the catalog is the queue (S5).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from ckptlib.errors import CkptError
from flows import state
from flows.process import Child, start
from flows.settings import FlowsSettings

RUNNER_GRACE = 30.0
"""Seconds the runner has to stop its flow runs: each gives its lease back and reports to the API."""
SERVER_GRACE = 10.0
_PAUSE = 0.2

Echo = Callable[[str], None]


class _StopRequested(BaseException):
    """A signal asked us to end. Not an `Exception`: nothing between the signal and `serve` may swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def serve(settings: FlowsSettings, *, database: str, label: str, echo: Echo, exit_with_parent: bool = False) -> int:
    """Runs the embedded set until a signal or a dead child ends it; returns the exit status.

    Args:
        settings: where and how.
        database: the catalog's URL, as the children shall see it in ``CKPT_DB``; may hold a password.
        label: the catalog for people, without a password.
        echo: prints one line for people.
        exit_with_parent: end also when the process that started this one is gone (it may have been SIGKILLed).

    Raises:
        LeaseHeldError: another set runs in the same state directory.
        CkptError: the server or the runner did not come up; the message ends with its log.
    """
    parent = os.getppid() if exit_with_parent else None
    with state.exclusive(settings.state_dir):
        return _Supervisor(settings, database, label, echo, parent).run()


class _Supervisor:
    def __init__(self, settings: FlowsSettings, database: str, label: str, echo: Echo, parent: int | None) -> None:
        self.settings = settings
        self.database = database
        self.label = label
        self.echo = echo
        self.parent = parent
        self.children: list[Child] = []
        self.stop_signal: int | None = None

    def run(self) -> int:
        settings = self.settings
        logs = settings.state_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        # What is ignored stays ignored: `nohup` means it.
        stopping = [signum for signum in _STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
        previous = {signum: signal.signal(signum, self._on_signal) for signum in stopping}
        try:
            port = choose_port(settings.host, settings.port, state.remembered(settings.state_dir))
            api_url = f"http://{settings.host}:{port}/api"
            env = prefect_environment(os.environ, settings, api_url) | {"CKPT_DB": self.database}
            self._start_server(env, port, api_url, logs)
            self._start_runner(env, logs)
            state.ServeState(os.getpid(), api_url, self.label, time.time()).write(settings.state_dir)
            self.echo(f"flows are ready; catalog {self.label}, logs in {logs}")
            self.echo(f"trainers need: export PREFECT_API_URL={api_url}")
            return self._watch()
        except _StopRequested as stop:
            self.echo(f"{signal.Signals(stop.signum).name}: stopping")
            return 0
        finally:
            # The set is no longer to be relied on from here; a second signal must not interrupt the clean-up.
            for signum in stopping:
                signal.signal(signum, signal.SIG_IGN)
            for child in reversed(self.children):
                child.stop(RUNNER_GRACE if child.name == "runner" else SERVER_GRACE)
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.stop_signal = signum

    def _start_server(self, env: Mapping[str, str], port: int, api_url: str, logs: Path) -> None:
        host = self.settings.host
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", host, "--port", str(port)]
        server = start("server", command, env=env, cwd=self.settings.state_dir, log=logs / "server.log")
        self.children.append(server)
        self.echo(f"starting Prefect's server on {api_url} (a first start takes up to a minute)")
        self._wait_for(lambda: healthy(api_url), server, "answer")

    def _start_runner(self, env: Mapping[str, str], logs: Path) -> None:
        reader, writer = os.pipe()
        try:
            command = [sys.executable, "-m", "flows.runner", "--ready-fd", str(writer)]
            runner = start(
                "runner", command, env=env, cwd=self.settings.state_dir, log=logs / "runner.log", pass_fds=[writer]
            )
            self.children.append(runner)
            os.close(writer)
            writer = -1
            self._wait_for(lambda: _said_ready(reader), runner, "register the deployments")
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)

    def _wait_for(self, ready: Callable[[], bool], child: Child, what: str) -> None:
        deadline = time.monotonic() + self.settings.startup_timeout
        while not ready():
            self._check()
            if time.monotonic() >= deadline:
                raise CkptError(
                    f"Prefect's {child.name} did not {what} within {self.settings.startup_timeout:g} s "
                    f"(CKPT_FLOWS_STARTUP_TIMEOUT); end of {child.log}:\n{child.tail()}"
                )
            time.sleep(_PAUSE)

    def _watch(self) -> int:
        while True:
            self._check()
            time.sleep(_PAUSE)

    def _check(self) -> None:
        """Raises when it is time to end: a signal, a parent that is gone, a child that ended by itself."""
        if self.stop_signal is not None:
            raise _StopRequested(self.stop_signal)
        if self.parent is not None and os.getppid() != self.parent:
            raise _StopRequested(signal.SIGHUP)
        for child in self.children:
            status = child.exited()
            if status is not None:
                raise CkptError(
                    f"Prefect's {child.name} ended by itself with status {status}; the flows stop (pending work stays "
                    f"in the catalog, start them again); end of {child.log}:\n{child.tail()}"
                )


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _said_ready(reader: int) -> bool:
    readable, _, _ = select.select([reader], [], [], 0)
    # End of file means that the runner died before it was ready; its exit status is what gets reported.
    return bool(readable) and os.read(reader, 16) != b""


def choose_port(host: str, port: int, last: state.ServeState | None) -> int:
    """`port` if it is given; else the port of last time, which trainers may still know, if it is free; else a free one.

    Raises:
        CkptError: the given port is taken.
    """
    if port:
        return _free_port(host, port)
    last_port = _port_of(last)
    if last_port is not None:
        with contextlib.suppress(CkptError):
            return _free_port(host, last_port)
    return _free_port(host, 0)


def _free_port(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CkptError(
                f"cannot listen on {host} port {port}: {error.strerror}; choose another port, or 0 for any free one"
            ) from error
        return int(probe.getsockname()[1])


def _port_of(last: state.ServeState | None) -> int | None:
    try:
        return None if last is None else urlsplit(last.api_url).port
    except ValueError:
        return None


def healthy(api_url: str) -> bool:
    """Whether a Prefect server answers there. Never through a proxy: the server is on this machine."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{api_url}/health", timeout=5.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def prefect_environment(inherited: Mapping[str, str], settings: FlowsSettings, api_url: str) -> dict[str, str]:
    """The environment of every process that talks Prefect: server, runner, flow runs, and a client of them.

    Prefect's settings are ours alone: what the user's shell or profile says about another Prefect (its API, its
    cloud, its home) must not leak in. Authentication is the exception, because only the user can know it.
    """
    home = settings.state_dir / "prefect"
    env = {
        name: value
        for name, value in inherited.items()
        if not name.startswith("PREFECT_") or name in ("PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING")
    }
    unproxied = [inherited.get("NO_PROXY") or inherited.get("no_proxy") or "", "127.0.0.1", "localhost", settings.host]
    no_proxy = ",".join(dict.fromkeys(filter(None, unproxied)))
    ours = {
        "CKPT_FLOWS_STATE_DIR": str(settings.state_dir.absolute()),
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "PYTHONUNBUFFERED": "1",
        "PREFECT_HOME": str(home.absolute()),
        "PREFECT_API_URL": api_url,
        # Nothing leaves the machine.
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        # A flow run that lost its API must fail, not start a server of its own.
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
        "PREFECT_SERVER_UI_ENABLED": str(settings.ui).lower(),
        # The default is inside the installed package, which may be read-only and belongs to everybody.
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str((home / "ui").absolute()),
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        # We use none, and it is a quarter of a first start.
        "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
        # Without this the database grows by every run for ever.
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        # Runs that were scheduled ahead all start at once after a pause: schedule few.
        "PREFECT_SERVER_SERVICES_SCHEDULER_MIN_RUNS": "1",
        "PREFECT_SERVER_SERVICES_SCHEDULER_MAX_RUNS": "2",
        "PREFECT_SERVER_SERVICES_SCHEDULER_MIN_SCHEDULED_TIME": "PT0S",
        "PREFECT_RUNNER_POLL_FREQUENCY": str(settings.poll_frequency),
        "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,catalog,ckptlib",
    }
    return env | ours
