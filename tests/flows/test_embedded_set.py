"""`ckpt flows serve` for real: Prefect's server, the runner, events, artifacts, kills, and nothing left behind.

One set serves all tests of this file: a start costs half a minute of a loaded machine.
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
from catalog.catalog import Catalog
from catalog.recorder import Recorder
from catalog.rows import CheckpointRow
from flows import state
from flows.artifacts import artifact_key
from flows.process import wait_until
from tests.flows.workshop import Workshop, flip_a_byte

pytestmark = pytest.mark.timeout(400)

CKPT = str(Path(sys.executable).with_name("ckpt"))
PATIENCE = 120.0


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

    @contextlib.contextmanager
    def recorder(self) -> Iterator[Recorder]:
        """As a trainer has it."""
        recorder = Recorder(self.workshop.db, notify_url=self.api_url)
        yield recorder
        recorder.close(30.0)
        assert recorder.pending == 0

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        if not wait_until(condition, timeout=PATIENCE):
            logs = self.workshop.path / "state" / "logs"
            tails = "\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in sorted(logs.glob("*.log")))
            pytest.fail(f"{what}: not within {PATIENCE:g} s\n{tails}")


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    """One set for the module. The schedule is far away, so that what happens is due to events and commands."""
    path = tmp_path_factory.mktemp("embedded")
    env = {
        **os.environ,
        "CKPT_DB": str(path / "catalog.db"),
        "CKPT_FLOWS_STATE_DIR": str(path / "state"),
        "CKPT_FLOWS_INTERVAL": "86400",
        "CKPT_FLOWS_LEASE_TTL": "3",
        "CKPT_FLOWS_WAKE_WINDOW": "0",
        "CKPT_FLOWS_LINGER": "0",
        "CKPT_FLOWS_THREADS": "1",
        "HOME": str(path),
    }
    with Catalog(env["CKPT_DB"], create=True) as catalog:
        process = subprocess.Popen(
            [CKPT, "flows", "serve", "--no-ui", "--exit-with-parent"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        family: list[psutil.Process] = []
        try:
            api_url = _api_url(process)
            yield Embedded(Workshop(path, catalog), env, process, api_url)
            family = psutil.Process(process.pid).children(recursive=True)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                output, _ = process.communicate(timeout=90.0)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
        # The clean shutdown, at the end of whatever the tests did.
        assert process.returncode == 0, output
        assert len(family) >= 2
        assert psutil.wait_procs(family, timeout=10.0)[1] == []
        assert state.running(path / "state") is None
        # Nothing of ours, or of Prefect's, in the user's home.
        assert {entry.name for entry in path.iterdir()} <= {
            "state",
            "catalog.db",
            "catalog.db-wal",
            "catalog.db-shm",
            *RUNS,
        }


RUNS = ("woken", "flipped", "killed")


def _api_url(process: subprocess.Popen[str]) -> str:
    """The line that `serve` prints when everything is up."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "PREFECT_API_URL=" in line:
            return line.strip().partition("PREFECT_API_URL=")[2]
    pytest.fail("ckpt flows serve ended:\n" + "".join(said))


def test_commit_wakes_the_verification_through_its_event(embedded: Embedded) -> None:
    """W6: the recorder's one POST; nothing is scheduled before tomorrow."""
    workshop = embedded.workshop
    with embedded.recorder() as recorder:
        checkpointer = ckptlib.Checkpointer(str(workshop.root("woken")), run="woken", listeners=[recorder])
        checkpointer.save({"model": {"bias": 1.0}}, iteration=1)
        checkpointer.close()
    row = workshop.catalog.checkpoint("woken", 1)
    embedded.wait_for(lambda: workshop.verdict(row) == "verified", "verification after an event")
    (progress,) = embedded.artifacts("progress", row)
    assert progress["data"] == 100.0
    table = json.loads(embedded.artifacts("verify", row)[0]["data"])
    assert {line["verdict"] for line in table} <= {"ok", "extra"}


def test_flipped_byte_makes_a_checkpoint_corrupt_and_the_table_names_the_file(embedded: Embedded) -> None:
    workshop = embedded.workshop
    checkpointer = ckptlib.Checkpointer(str(workshop.root("flipped")), run="flipped", listeners=[workshop])
    checkpointer.save({"model": {"bias": [1.0, 2.0], "weight": _weights(1000)}}, iteration=5)
    checkpointer.close()
    event = workshop.events[-1]
    bad = max(Path(event.url).glob("*.distcp"), key=lambda path: path.stat().st_size)
    flip_a_byte(bad)
    with embedded.recorder() as recorder:
        recorder.committed(event)
    row = workshop.catalog.checkpoint("flipped", 5)
    embedded.wait_for(lambda: workshop.verdict(row) == "corrupt", "corruption found")
    (artifact,) = embedded.artifacts("verify", row)
    table = json.loads(artifact["data"])
    assert [line["file"] for line in table if line["verdict"] == "digest"] == [bad.name]
    assert "corrupt" in artifact["description"]
    flow_run = embedded.post("flow_runs/filter", {"flow_runs": {"id": {"any_": [artifact["flow_run_id"]]}}})[0]
    embedded.wait_for(
        lambda: (
            embedded.post("flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run["id"]]}}})[0]["state_name"]
            == "Corrupt"
        ),
        "state of the flow run",
    )


def test_work_of_a_flow_run_that_was_killed_is_done_by_a_later_one(embedded: Embedded) -> None:
    """S5: kill -9 in the middle; the lease runs out and gives the work back."""
    workshop = embedded.workshop
    checkpointer = ckptlib.Checkpointer(str(workshop.root("killed")), run="killed", listeners=[workshop])
    checkpointer.save({"model": {"weight": _weights(40_000_000)}}, iteration=1)
    checkpointer.close()
    with embedded.recorder() as recorder:
        recorder.committed(workshop.events[-1])
    row = workshop.catalog.checkpoint("killed", 1)
    pid = _verifying_process(workshop, row)
    os.kill(pid, signal.SIGKILL)
    assert workshop.verdict(row) == "unverified"
    embedded.wait_for(lambda: _state_types(embedded).count("CRASHED") == 1, "Prefect sees the crash")

    time.sleep(3.0)
    command = [CKPT, "flows", "run", "verify-pending", "-o", "json"]
    done = subprocess.run(command, env=embedded.env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["state"] == "Completed"
    assert "1 verified" in shown["message"]
    assert workshop.verdict(row) == "verified"


def _weights(count: int) -> Any:
    import torch

    return torch.ones(count)


def _verifying_process(workshop: Workshop, row: CheckpointRow) -> int:
    """The process that holds the lease, from the lease's owner. Looks as often as it can: it is gone in a second."""
    deadline = time.monotonic() + PATIENCE
    with contextlib.closing(sqlite3.connect(f"file:{workshop.db}?mode=ro", uri=True)) as connection:
        while time.monotonic() < deadline:
            found = connection.execute(
                "SELECT lease_owner FROM checkpoints WHERE id = ? AND lease_token IS NOT NULL", (row.id,)
            ).fetchone()
            if found:
                return int(found[0].rpartition(":")[2])
            time.sleep(0.002)
    pytest.fail("nobody leased the checkpoint")


def _state_types(embedded: Embedded) -> list[str]:
    return [run["state_type"] for run in embedded.post("flow_runs/filter", {"sort": "START_TIME_DESC"})]
