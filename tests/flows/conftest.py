"""Fixtures of the flows' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from catalog.catalog import Catalog
from flows.settings import FlowsSettings
from tests.flows.workshop import Workshop


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    with Catalog(str(tmp_path / "catalog.db"), create=True) as catalog:
        yield Workshop(tmp_path, catalog)


@pytest.fixture
def settings(workshop: Workshop) -> FlowsSettings:
    return FlowsSettings(db=workshop.db, state_dir=workshop.path / "state", linger=0.0, wake_window=0.0, threads=1)
