"""`ckpt flows serve` for real: Prefect's server, the runner, events, artifacts, a kill, and nothing left behind.

One scenario, because a start costs half a minute of a loaded machine and each flow run some seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import ckptlib
from catalog.recorder import Recorder
from catalog.rows import CheckpointRow
from flows import state
from flows.artifacts import artifact_key
from flows.process import wait_until
from tests.flows.workshop import Workshop, flip_a_byte

pytestmark = pytest.mark.timeout(600)

CKPT = str(Path(sys.executable).with_name("ckpt"))
PATIENCE = 180.0


@dataclass
class Embedded:
    """A running set, and the workshop whose catalog it works on."""

    workshop: Workshop
    env: dict[str, str]
    process: subprocess.Popen[str]
    api_url: str

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Asks Prefect's API."""
        request = urllib.request.Request(
            f"{self.api_url}/{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30.0) as response:
            return json.load(response)

    def artifacts(self, kind: str, row: CheckpointRow) -> list[Any]:
        key = artifact_key(kind, row.run, row.save_id)
        found: list[Any] = self.post(
            "artifacts/filter", {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC"}
        )
        return found

    def flow_runs(self) -> list[str]:
        """Names of the states of those that are not just scheduled."""
        runs = self.post("flow_runs/filter", {"sort": "START_TIME_ASC"})
        return [run["state_name"] for run in runs if run["state_type"] != "SCHEDULED"]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        if not wait_until(condition, timeout=PATIENCE):
            logs = self.workshop.path / "state" / "logs"
            tails = "\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in sorted(logs.glob("*.log")))
            pytest.fail(f"{what}: not within {PATIENCE:g} s\n{tails}")


@contextlib.contextmanager
def embedded_set(workshop: Workshop) -> Iterator[Embedded]:
    """`ckpt flows serve`, ended cleanly and checked for it. All that is scheduled is a day away."""
    path = workshop.path
    env = {
        **os.environ,
        "HOME": str(path / "home"),
        "CKPT_DB": workshop.db,
        "CKPT_FLOWS_STATE_DIR": str(path / "state"),
        "CKPT_FLOWS_INTERVAL": "86400",
        "CKPT_FLOWS_CLEANUP_INTERVAL": "86400",
        "CKPT_FLOWS_LEASE_TTL": "3",
        "CKPT_FLOWS_WAKE_WINDOW": "0",
        "CKPT_FLOWS_LINGER": "0",
        "CKPT_FLOWS_THREADS": "1",
    }
    command = [CKPT, "flows", "serve", "--no-ui", "--exit-with-parent"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    family: list[psutil.Process] = []
    try:
        yield Embedded(workshop, env, process, _api_url(process))
        family = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
    assert process.returncode == 0, output
    assert len(family) >= 2
    assert psutil.wait_procs(family, timeout=20.0)[1] == []
    assert state.running(path / "state") is None
    assert not (path / "home").exists(), "nothing in the user's home"


def _api_url(process: subprocess.Popen[str]) -> str:
    """From the line that `serve` prints when everything is up."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "PREFECT_API_URL=" in line:
            return line.strip().partition("PREFECT_API_URL=")[2]
    pytest.fail("ckpt flows serve ended:\n" + "".join(said))


def test_embedded_set_verifies_what_it_finds_and_what_it_hears_of_survives_a_kill_and_leaves_nothing(
    workshop: Workshop,
) -> None:
    """S5, W6, V2."""
    # Before it starts: one good and one damaged checkpoint, and nobody told anybody.
    good, bad = workshop.save(1, 2, run="before")
    flip_a_byte(workshop.data_file(bad))
    with embedded_set(workshop) as embedded:
        embedded.wait_for(lambda: workshop.verdict(good) == "verified", "what was missed is verified at the start")
        assert workshop.verdict(bad) == "corrupt"
        _the_table_names_the_damaged_file(embedded, bad)
        embedded.wait_for(lambda: embedded.flow_runs() == ["Corrupt"], "the first drain has ended")

        # A commit wakes a drain: nothing else would before tomorrow. It is killed while it reads the large one.
        (large,) = workshop.save(1, run="large", floats=40_000_000)
        small = _commit_with_event(embedded)
        killed = _kill_its_verifier(workshop, large)
        assert workshop.verdict(small) == "verified"
        assert workshop.verdict(large) == "unverified"
        assert embedded.artifacts("progress", small)[0]["data"] == 100.0
        embedded.wait_for(lambda: sorted(embedded.flow_runs()) == ["Corrupt", "Crashed"], "Prefect sees the crash")

        time.sleep(3.0)  # the lease
        command = [CKPT, "flows", "run", "verify-pending", "-o", "json"]
        done = subprocess.run(command, env=embedded.env, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        assert (shown["state"], shown["message"]) == ("Completed", "1 verified")
        assert workshop.verdict(large) == "verified"
        (verification,) = workshop.catalog.verifications(large.id)
        assert verification.worker != killed


def _the_table_names_the_damaged_file(embedded: Embedded, bad: CheckpointRow) -> None:
    embedded.wait_for(lambda: bool(embedded.artifacts("verify", bad)), "table artifact")
    (artifact,) = embedded.artifacts("verify", bad)
    table = json.loads(artifact["data"])
    damaged = [line["file"] for line in table if line["verdict"] not in ("ok", "extra")]
    assert damaged == [embedded.workshop.data_file(bad).name]
    assert table[0]["verdict"] == "digest"
    assert "before@2" in artifact["description"]
    assert "corrupt" in artifact["description"]


def _commit_with_event(embedded: Embedded) -> CheckpointRow:
    """A trainer's save, recorded and announced in the background as a trainer does it."""
    workshop = embedded.workshop
    recorder = Recorder(workshop.db, notify_url=embedded.api_url)
    checkpointer = ckptlib.Checkpointer(str(workshop.root("woken")), run="woken", listeners=[recorder])
    checkpointer.save({"model": {"bias": 1.0}}, iteration=1)
    checkpointer.close()
    recorder.close(30.0)
    return workshop.catalog.checkpoint("woken", 1)


def _kill_its_verifier(workshop: Workshop, row: CheckpointRow) -> str:
    """SIGKILLs the process that holds the lease as soon as there is one: it is gone in a second. Returns the owner."""
    deadline = time.monotonic() + PATIENCE
    with contextlib.closing(sqlite3.connect(f"file:{workshop.db}?mode=ro", uri=True)) as connection:
        while time.monotonic() < deadline:
            found = connection.execute(
                "SELECT lease_owner FROM checkpoints WHERE id = ? AND lease_token IS NOT NULL", (row.id,)
            ).fetchone()
            if found:
                owner = str(found[0])
                os.kill(int(owner.rpartition(":")[2]), signal.SIGKILL)
                return owner
            time.sleep(0.002)
    pytest.fail("nobody leased the checkpoint")
