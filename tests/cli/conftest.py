"""The command line on a catalog of the test's own, filled by real saves."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from catalog import Catalog
from catalog.cli.logs import LOGGERS
from catalog.cli.main import app
from catalog.verification import verify_leased
from ckptlib.events import AttemptEvent, CommitEvent
from tests.catalog.training import Training, flip_a_byte

RUN = "team/llama 7B@host"
"""A run name with everything that a name may hold."""


@dataclass(frozen=True)
class Ended:
    """How one command line ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON value on standard output; NaN and the like are no JSON."""
        return json.loads(self.out, parse_constant=pytest.fail)

    @property
    def error(self) -> Any:
        """The last JSON object on standard error; every line is one."""
        return [json.loads(line) for line in self.err.splitlines()][-1]

    @property
    def lines(self) -> list[str]:
        """Standard output without trailing blanks."""
        return [line.rstrip() for line in self.out.splitlines()]


class Ckpt:
    """Runs ``ckpt`` in this process."""

    def __call__(
        self, *args: str, columns: int | None = None, answer: str | None = None, env: dict[str, str] | None = None
    ) -> Ended:
        width = {"COLUMNS": None if columns is None else str(columns)}
        loggers = [logging.getLogger(name) for name in LOGGERS]
        before = [(logger, logger.handlers, logger.level) for logger in loggers]
        try:
            result = CliRunner(env={**width, **(env or {})}).invoke(
                app, list(args), input=answer, catch_exceptions=False
            )
        finally:
            for logger, handlers, level in before:  # else they go on writing to a stream that is closed
                logger.handlers = handlers
                logger.setLevel(level)
        return Ended(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def ckpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ckpt]:
    """``ckpt`` with its catalog at ``catalog.db``, which does not exist yet, in a time zone that is not UTC."""
    monkeypatch.setenv("CKPT_DB", str(tmp_path / "catalog.db"))
    for name in ("CKPT_OUTPUT", "CKPT_QUIET", "CKPT_VERBOSE", "CKPT_YES", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TZ", "CET-1")
    time.tzset()
    yield Ckpt()
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def catalog(ckpt: Ckpt, tmp_path: Path) -> Iterator[Catalog]:
    """The catalog that `ckpt` works on, empty."""
    with Catalog(str(tmp_path / "catalog.db"), create=True) as catalog:
        yield catalog


@pytest.fixture
def training(catalog: Catalog, tmp_path: Path) -> Training:
    """A run that has saved nothing yet."""
    return Training(tmp_path / "root", RUN)


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Catalog, Training]]:
    """For tests that only read: iterations 0 (unverified), 90 (verified) and 10,000,000 (corrupt) of a run."""
    place = tmp_path_factory.mktemp("history")
    training = Training(place / "root", RUN)
    with Catalog(str(place / "catalog.db"), create=True) as catalog:
        record(training, catalog, 0, 90, 10_000_000)
        flip_a_byte(training.data_file(10_000_000))
        verify(catalog, 90)
        verify(catalog, 10_000_000)
        yield catalog, training


@pytest.fixture
def past(ckpt: Ckpt, history: tuple[Catalog, Training], monkeypatch: pytest.MonkeyPatch) -> Training:
    """Makes `ckpt` work on `history`."""
    catalog, training = history
    monkeypatch.setenv("CKPT_DB", str(catalog))
    return training


class Direct:
    """A commit listener that records at once."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def attempt_started(self, event: AttemptEvent) -> None:
        """Records it."""
        self._catalog.record_attempt(event)

    def committed(self, event: CommitEvent) -> None:
        """Records it."""
        self._catalog.record(event)

    def close(self, timeout: float) -> None:
        """Nothing waits."""


def record(training: Training, catalog: Catalog, *iterations: int, **options: Any) -> None:
    """Saves these iterations in one attempt, recorded in the catalog."""
    training.attempt(*iterations, listeners=[Direct(catalog)], **options)


def verify(catalog: Catalog, iteration: int) -> None:
    """Reads a checkpoint back and records the verdict."""
    row = catalog.checkpoint(RUN, iteration)
    (lease,) = catalog.lease_unverified(owner="me", ttl=60, checkpoint_id=row.id, force=True)
    verify_leased(catalog, lease)
