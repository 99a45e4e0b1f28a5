"""Exit signals: noted, chained, put back; in processes of their own, as handlers belong to a whole process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from ckptlib.errors import UnsupportedError
from ckptlib.exit_signals import ExitSignals


def run(body: str) -> str:
    """Standard output of a process with this program."""
    head = "import os, signal, sys, threading, time\nfrom ckptlib.exit_signals import ExitSignals\n"
    done = subprocess.run([sys.executable, "-c", head + body], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_training_loop_finishes_its_step_saves_and_leaves() -> None:
    """SIGTERM comes from outside in the middle of a step, twice."""
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            """
import signal, time
from ckptlib.cadence import Schedule
from ckptlib.cadence_loop import Cadence
from ckptlib.exit_signals import ExitSignals

schedule = Schedule(save_interval=1000, exit_signals=("SIGTERM", "SIGUSR1"))
with ExitSignals(schedule.exit_signals) as signals:
    cadence = Cadence(schedule, signals=signals)
    for iteration in range(1, 1000):
        if iteration == 3:
            print("in step 3", flush=True)
            while not signals.received:
                time.sleep(0.01)
            time.sleep(0.2)
        action = cadence.should_save_now(iteration)
        if action.save:
            print(f"saved {iteration} {action.save}: {action.reason}")
        if action.exit:
            break
print("left", signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
""",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "in step 3\n"
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 0
    assert out == "saved 3 persistent: SIGTERM on rank 0\nleft True\n"


def test_handlers_that_were_there_are_called_and_put_back() -> None:
    out = run("""
calls = []
def older(number, frame): calls.append(number)
signal.signal(signal.SIGUSR1, older)
with ExitSignals(("SIGUSR1", "SIGTERM")) as signals:
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)     # would end the process
    signal.raise_signal(signal.SIGUSR1)
    print(signals.received, len(calls))
print(signal.getsignal(signal.SIGUSR1) is older, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
signal.raise_signal(signal.SIGUSR1)
print(signals.received, len(calls))
""")
    assert out == "('SIGUSR1', 'SIGTERM') 2\nTrue True\n('SIGUSR1', 'SIGTERM') 3\n"


def test_a_signal_is_noted_even_when_the_handler_that_was_there_raises() -> None:
    out = run("""
def older(number, frame): raise RuntimeError("older")
signal.signal(signal.SIGUSR1, older)
with ExitSignals(("SIGUSR1",)) as signals:
    try:
        signal.raise_signal(signal.SIGUSR1)
    except RuntimeError as error:
        print(error, signals.received)
""")
    assert out == "older ('SIGUSR1',)\n"


def test_ctrl_c_can_be_an_exit_signal_and_ignored_signals_are_heard() -> None:
    out = run("""
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with ExitSignals(("SIGINT", "SIGHUP")) as signals:
    signal.raise_signal(signal.SIGINT)      # no KeyboardInterrupt
    signal.raise_signal(signal.SIGHUP)
print(signals.received, signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)
""")
    assert out == "('SIGINT', 'SIGHUP') True\n"


def test_a_handler_that_came_later_stays_and_ours_hands_on() -> None:
    out = run("""
calls = []
signal.signal(signal.SIGUSR1, lambda number, frame: calls.append("older"))
signals = ExitSignals(("SIGUSR1",)).install()
ours = signal.getsignal(signal.SIGUSR1)
def later(number, frame): calls.append("later"); ours(number, frame)
signal.signal(signal.SIGUSR1, later)
signals.close()
signals.close()
signal.raise_signal(signal.SIGUSR1)
print(signal.getsignal(signal.SIGUSR1) is later, calls, signals.received)
""")
    assert out == "True ['later', 'older'] ()\n"


def test_a_forked_child_can_be_terminated_as_before() -> None:
    """A data loader's worker inherits the handler; a SIGTERM that it only notes would leave it behind for ever."""
    out = run("""
with ExitSignals() as signals:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    print(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM, signals.received)
""")
    assert out == "True ()\n"


def test_a_forked_child_calls_the_handler_that_was_there() -> None:
    out = run("""
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
with ExitSignals() as signals:
    child = os.fork()
    if child == 0:
        time.sleep(60)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert out == "7\n"


def test_only_the_main_thread_can_listen_and_an_error_says_so() -> None:
    out = run("""
from ckptlib.errors import UnsupportedError
def work():
    try:
        ExitSignals().install()
    except UnsupportedError as error:
        print(error)
thread = threading.Thread(target=work, name="loader")
thread.start()
thread.join()
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
signals = ExitSignals().install()
thread = threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGTERM))
thread.start()
thread.join()
print(signals.received)                     # sent by a thread, handled in the main one
""")
    first, *rest = out.splitlines()
    assert "in the main thread only, not in 'loader'" in first
    assert rest == ["True", "('SIGTERM',)"]


def test_closing_in_another_thread_is_an_error_and_changes_nothing() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    signals = ExitSignals(("SIGUSR2",)).install()
    errors: list[Exception] = []

    def close() -> None:
        try:
            signals.close()
        except UnsupportedError as error:
            errors.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert signal.getsignal(signal.SIGUSR2) != before
    signals.close()
    assert signal.getsignal(signal.SIGUSR2) == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SIGKILL", "cannot be caught"),
        ("SIGSTOP", "cannot be caught"),
        ("SIGSEGV", "means a defect"),
        ("SIGTREM", "is no signal on this system"),
        ("15", "is no signal on this system"),
    ],
)
def test_signals_that_cannot_be_exit_signals_are_refused(name: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        ExitSignals((name,))


def test_a_handler_of_native_code_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with monkeypatch.context() as patched:
        real = signal.getsignal
        patched.setattr(signal, "getsignal", lambda number: None if number == signal.SIGTERM else real(number))
        with pytest.raises(UnsupportedError, match="SIGTERM: its handler was installed by native code"):
            ExitSignals(("SIGUSR2", "SIGTERM")).install()
    assert signal.getsignal(signal.SIGUSR2) == before
