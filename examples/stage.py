"""What the demo plays on: a directory, a catalog, the flows in the background, trainers, and a voice."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from ranks import Ranks
from rich.console import Console
from rich.markup import escape

from catalog import Catalog
from catalog.rows import CheckpointRow
from flows import process, state

RUN = "gpt-demo"
STEPS = 100
SAVE_INTERVAL = 5
HERE = Path(__file__).resolve().parent
OWNER_VARIABLE = "CKPT_DEMO_ID"
"""Every process of the demo inherits it, so that none can be overlooked."""


class DemoFailedError(Exception):
    """Raised when something that the demo claims did not happen."""


class Stage:
    """Everything that runs during the demo. Leaving the `with` block ends all of it, whatever happened."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.root = out / "checkpoints"
        self.database = out / "catalog.db"
        self.journal = out / "journal.jsonl"
        self.console = Console(soft_wrap=True, highlight=False)
        self._flows_dir = out / "flows"
        self._flows: process.Child | None = None
        self._ranks: Ranks | None = None
        self._catalog: Catalog | None = None
        self._steps = 0
        self._id = uuid.uuid4().hex
        # The catalog, flows and settings of whoever runs the demo are none of its business.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CKPT_", "PREFECT_"))}
        self.env = inherited | {
            OWNER_VARIABLE: self._id,
            "CKPT_DB": str(self.database),
            "CKPT_FLOWS_STATE_DIR": str(self._flows_dir),
            # A lost event costs half a minute here, not five.
            "CKPT_FLOWS_INTERVAL": "30",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": str(max(120, self.console.width)),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends trainers, then flows, then anything else that carries our mark."""
        if kind is not None:
            self.say("ending the processes of the demo")
        if self._ranks is not None:
            self._ranks.kill()
        if self._flows is not None:
            self._flows.stop(60.0)
        if self._catalog is not None:
            self._catalog.close()
        for leftover in self.leftovers():
            with contextlib.suppress(psutil.NoSuchProcess):
                leftover.kill()

    # --- telling ------------------------------------------------------------------------------------------------------

    def step(self, title: str) -> None:
        """Begins a numbered part."""
        self._steps += 1
        self.console.print(f"\n[bold cyan]{self._steps}. {escape(title)}[/]")

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(f"   {escape(text)}")

    def check(self, holds: object, claim: str) -> None:
        """Says that a claim holds.

        Raises:
            DemoFailedError: it does not.
        """
        if not holds:
            raise DemoFailedError(f"this did not hold: {claim}")
        self.console.print(f"   [green]✓ {escape(claim)}[/]")

    # --- doing --------------------------------------------------------------------------------------------------------

    def ckpt(self, *arguments: str) -> str:
        """Runs `ckpt` as a person would, shows its output, and returns it.

        Raises:
            DemoFailedError: its exit status is not 0.
        """
        program = Path(sys.executable).with_name("ckpt")
        self.console.print(f"   [bold]$ ckpt {escape(shlex.join(arguments))}[/]")
        done = subprocess.run([program, *arguments], env=self.env, capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines() + done.stderr.splitlines():
            self.console.print(f"   {line}", markup=False)
        if done.returncode:
            raise DemoFailedError(f"ckpt {shlex.join(arguments)} ended with status {done.returncode}")
        return done.stdout

    def start_flows(self) -> None:
        """Starts `ckpt flows serve`, and waits until its flows are ready.

        Raises:
            DemoFailedError: it ended, or was not ready in time.
        """
        began = time.monotonic()
        program = str(Path(sys.executable).with_name("ckpt"))
        self._flows = process.start(
            "ckpt flows serve",
            [program, "flows", "serve", "--exit-with-parent"],
            env=self.env,
            cwd=self.out,
            log=self.out / "flows.log",
        )
        while (serving := state.running(self._flows_dir)) is None:
            if self._flows.exited() is not None or time.monotonic() - began > 600:
                raise DemoFailedError(f"the flows did not start:\n{self._flows.tail()}")
            time.sleep(0.2)
        self.env["PREFECT_API_URL"] = serving.api_url
        self.say(f"ready after {time.monotonic() - began:.0f} s; Prefect's API and UI: {serving.api_url}")

    def start_training(self, ranks: int, *, tp: int) -> Ranks:
        """Starts trainers on `ranks` processes."""
        options = {
            "root": str(self.root),
            "run-name": RUN,
            "steps": str(STEPS),
            "tp": str(tp),
            "save-interval": str(SAVE_INTERVAL),
            "catalog": str(self.database),
            "notify": self.env["PREFECT_API_URL"],
            "journal": str(self.journal),
        }
        command = [sys.executable, str(HERE / "train.py")]
        command += [word for name, value in options.items() for word in (f"--{name}", value)]
        self._ranks = Ranks(ranks, command, log=self.out / "train.log", env=self.env)
        return self._ranks

    @property
    def catalog(self) -> Catalog:
        """The catalog, once `ckpt init` has made it."""
        if self._catalog is None:
            self._catalog = Catalog(str(self.database))
        return self._catalog

    def rows(self) -> dict[str, CheckpointRow]:
        """The run's checkpoints in the catalog, by save id."""
        return {row.save_id: row for row in self.catalog.checkpoints(RUN)} if self.catalog.runs() else {}

    def wait(self, ready: Callable[[], bool], what: str, timeout: float) -> None:
        """Waits for something that happens in the background.

        Raises:
            DemoFailedError: it did not within `timeout` seconds, or the flows are gone.
        """
        deadline = time.monotonic() + timeout
        while not ready():
            if self._flows is not None and self._flows.exited() is not None:
                raise DemoFailedError(f"the flows ended by themselves:\n{self._flows.tail()}")
            if time.monotonic() > deadline:
                raise DemoFailedError(f"{what}: not within {timeout:.0f} s")
            time.sleep(0.25)

    def stop_flows(self) -> None:
        """Ends the flows as Ctrl-C would."""
        if self._flows is not None:
            self._flows.stop(60.0)

    def leftovers(self) -> list[psutil.Process]:
        """Processes of this demo that still run, itself not counted."""
        found = []
        for candidate in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if candidate.environ().get(OWNER_VARIABLE) == self._id:
                    found.append(candidate)
        return found
