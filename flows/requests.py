"""What a verification by hand is asked for, validated."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from catalog.catalog import Catalog, default_actor
from catalog.rows import VerifyLease
from flows.settings import FlowsSettings


class VerifyRequest(BaseModel):
    """One checkpoint, by its id in the catalog or by run and iteration, and how closely to look at it.

    Attributes:
        checkpoint_id: as `ckpt ls` shows it.
        run: name of the run.
        iteration: training step.
        save_id: where an iteration was saved several times; None: the newest finalized save.
        level: only `store`, `data` and `auto` (one of these two) can grant `verified` (V3).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    checkpoint_id: int | None = Field(default=None, ge=1)
    run: str | None = Field(default=None, min_length=1)
    iteration: int | None = Field(default=None, ge=0)
    save_id: str | None = Field(default=None, min_length=1)
    level: Literal["auto", "data", "structure", "store", "listing"] = "auto"

    @model_validator(mode="after")
    def _names_one_checkpoint(self) -> Self:
        partly = self.run is not None or self.iteration is not None or self.save_id is not None
        by_name = self.run is not None and self.iteration is not None
        if partly != by_name or by_name == (self.checkpoint_id is not None):
            raise ValueError("name one checkpoint: either checkpoint_id alone, or run and iteration (and save_id)")
        return self


def lease_one(catalog: Catalog, settings: FlowsSettings, request: VerifyRequest) -> VerifyLease:
    """Leases the checkpoint of a request, whatever its verdict is.

    Raises:
        LeaseHeldError: somebody else verifies it at this moment.
        CatalogError: there is no such checkpoint, or it is not finalized.
    """
    checkpoint_id = request.checkpoint_id
    if request.run is not None and request.iteration is not None:
        checkpoint_id = catalog.checkpoint(request.run, request.iteration, request.save_id).id
    (lease,) = catalog.lease_unverified(
        owner=default_actor(), ttl=settings.lease_ttl, checkpoint_id=checkpoint_id, force=True
    )
    return lease
