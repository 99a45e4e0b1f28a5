"""Children never outlive the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flows.process import die_with_runner, start, wait_until

STARTER = """
import sys, time, os
from pathlib import Path
from flows.process import start
child = start("sleeper", [sys.executable, "-c", "import time; time.sleep(60)"],
              env=dict(os.environ), cwd=Path.cwd(), log=Path("child.log"))
print(child.pid, flush=True)
time.sleep(60)
"""


RUNNER = """
import os, subprocess, sys, time
os.environ["CKPT_FLOWS_RUNNER_PID"] = str(os.getpid())
flow_run = '''
import time
from flows.process import die_with_runner
die_with_runner()
print("bound", flush=True)
time.sleep(60)
'''
child = subprocess.Popen([sys.executable, "-c", flow_run], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
@pytest.mark.parametrize("script", [STARTER, RUNNER], ids=["started by us", "flow run"])
def test_child_of_a_killed_process_dies_with_it(tmp_path: Path, script: str) -> None:
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=env, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        child = int(starter.stdout.readline())
        assert not gone(child)
        starter.send_signal(signal.SIGKILL)
        starter.wait()
    assert wait_until(lambda: gone(child), timeout=10.0)


def test_stop_ends_a_child_that_ignores_sigterm_and_everything_it_started(tmp_path: Path) -> None:
    script = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(grandchild.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    log = tmp_path / "child.log"
    child = start("stubborn", [sys.executable, "-c", script], env=dict(os.environ), cwd=tmp_path, log=log)
    assert wait_until(lambda: log.read_text().strip().isdigit(), timeout=20.0)
    grandchild = int(log.read_text())
    began = time.monotonic()
    child.stop(grace=0.5)
    assert time.monotonic() - began < 10.0
    assert child.exited() == -signal.SIGKILL
    assert wait_until(lambda: gone(grandchild), timeout=10.0)


def test_stop_lets_a_child_clean_up_first(tmp_path: Path) -> None:
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('cleaned up', flush=True), sys.exit(3)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    log = tmp_path / "child.log"
    child = start("polite", [sys.executable, "-c", script], env=dict(os.environ), cwd=tmp_path, log=log)
    assert wait_until(lambda: "ready" in log.read_text(), timeout=20.0)
    child.stop(grace=20.0)
    assert child.exited() == 3
    assert child.tail(1) == "cleaned up"


def test_log_of_the_start_before_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    for word in ("first", "second"):
        child = start("echo", ["echo", word], env=dict(os.environ), cwd=tmp_path, log=log)
        assert wait_until(lambda child=child: child.exited() is not None, timeout=10.0)
        child.stop(grace=1.0)
    assert log.read_text() == "second\n"
    assert log.with_name("child.log.1").read_text() == "first\n"


def test_flow_run_outside_the_embedded_set_is_bound_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_FLOWS_RUNNER_PID", raising=False)
    die_with_runner()
