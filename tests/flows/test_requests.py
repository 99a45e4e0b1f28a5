"""A verification by hand names exactly one checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from ckptlib.errors import CatalogError, LeaseHeldError
from flows.requests import VerifyRequest, lease_one
from flows.settings import FlowsSettings
from tests.flows.workshop import Workshop


@pytest.mark.parametrize(
    "values",
    [
        {"checkpoint_id": 3},
        {"run": "run", "iteration": 0},
        {"run": "a run/with @ signs", "iteration": 10_000_000, "save_id": "000001-x-y", "level": "structure"},
    ],
)
def test_one_checkpoint_by_id_or_by_name(values: dict[str, Any]) -> None:
    assert VerifyRequest(**values).model_dump(exclude_none=True) == {"level": "auto", **values}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"run": "run"},
        {"iteration": 1},
        {"save_id": "x"},
        {"checkpoint_id": 3, "run": "run", "iteration": 1},
        {"checkpoint_id": 3, "save_id": "x"},
        {"checkpoint_id": 0},
        {"run": "", "iteration": 1},
        {"run": "run", "iteration": -1},
        {"run": "run", "iteration": 1, "level": "deep"},
        {"run": "run", "iteration": 1, "typo": 1},
    ],
)
def test_anything_else_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        VerifyRequest(**values)


def test_a_verified_checkpoint_can_be_verified_again(workshop: Workshop, settings: FlowsSettings) -> None:
    (row,) = workshop.save(0)
    by_name = lease_one(workshop.catalog, settings, VerifyRequest(run="run", iteration=0))
    workshop.catalog.release(by_name, reason="test")
    by_id = lease_one(workshop.catalog, settings, VerifyRequest(checkpoint_id=row.id))
    assert by_name.checkpoint_id == by_id.checkpoint_id == row.id


def test_a_checkpoint_that_is_being_verified_names_its_holder(workshop: Workshop, settings: FlowsSettings) -> None:
    workshop.save(1)
    request = VerifyRequest(run="run", iteration=1)
    holder = lease_one(workshop.catalog, settings, request)
    with pytest.raises(LeaseHeldError, match=holder.owner):
        lease_one(workshop.catalog, settings, request)


def test_an_unknown_checkpoint_is_an_error_that_names_it(workshop: Workshop, settings: FlowsSettings) -> None:
    workshop.save(1)
    with pytest.raises(CatalogError, match="2"):
        lease_one(workshop.catalog, settings, VerifyRequest(run="run", iteration=2))
    with pytest.raises(CatalogError, match="99"):
        lease_one(workshop.catalog, settings, VerifyRequest(checkpoint_id=99))
