"""A catalog per test, on every database that there is to test on: the behaviour suite is written once."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from catalog import Catalog
from catalog.rows import CheckpointRow
from tests.catalog.samples import GOOD, Clock, commit


def sqlite_url(directory: Path) -> str:
    """A database file of the test's own."""
    return str(directory / "catalog.db")


BACKENDS: dict[str, Callable[[Path], str]] = {"sqlite": sqlite_url}


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    return BACKENDS[request.param](tmp_path)


@pytest.fixture
def clock() -> Clock:
    """The catalog's clock."""
    return Clock()


@pytest.fixture
def catalog(database_url: str, clock: Clock) -> Iterator[Catalog]:
    """An open catalog without rows."""
    with Catalog(database_url, create=True, clock=clock) as opened:
        yield opened


@pytest.fixture
def verified(catalog: Catalog) -> Callable[..., CheckpointRow]:
    """Records a save and verifies it."""

    def record_and_verify(iteration: int, **facts: object) -> CheckpointRow:
        row = catalog.record(commit(iteration, **facts))  # type: ignore[arg-type]
        (lease,) = catalog.lease_unverified(owner="worker", ttl=60, checkpoint_id=row.id, force=True)
        return catalog.finish_verification(lease, GOOD)

    return record_and_verify


@pytest.fixture
def unused_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
