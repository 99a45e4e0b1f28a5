"""A catalog per test, on every database that there is to test on: the behaviour suite is written once."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from catalog import Catalog
from catalog.rows import CheckpointRow
from tests.catalog.samples import GOOD, Clock, commit, empty_catalog


@dataclass(frozen=True)
class Backend:
    """A kind of database.

    Attributes:
        url: of an empty database, from a directory of the test's own.
        ready: of one with the schema.
    """

    url: Callable[[Path], str]
    ready: Callable[[Path], str]


BACKENDS = {"sqlite": Backend(url=lambda directory: str(directory / "catalog.db"), ready=empty_catalog)}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every kind of database in turn."""
    return BACKENDS[request.param]


@pytest.fixture
def database_url(backend: Backend, tmp_path: Path) -> str:
    """A database without a schema."""
    return backend.url(tmp_path)


@pytest.fixture
def clock() -> Clock:
    """The catalog's clock."""
    return Clock()


@pytest.fixture
def catalog_url(backend: Backend, tmp_path: Path) -> str:
    """A catalog without rows."""
    return backend.ready(tmp_path)


@pytest.fixture
def catalog(catalog_url: str, clock: Clock) -> Iterator[Catalog]:
    """An open catalog without rows."""
    with Catalog(catalog_url, clock=clock) as opened:
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
