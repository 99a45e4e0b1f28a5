"""The cleanup flow. Thin: what it does is in `catalog.cleanup`."""

from __future__ import annotations

import logging

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from catalog.catalog import Catalog
from catalog.cleanup import apply_cleanup, plan_cleanup
from flows.drain import PARTLY
from flows.process import die_with_runner
from flows.settings import FlowsSettings

log = logging.getLogger(__name__)


@flow(name="cleanup", persist_result=False)
def cleanup(run: str | None = None, dry_run: bool = False) -> State[None]:
    """Discards uploads that dead processes left unfinished, below the roots of every run.

    Args:
        run: only this run's roots; None: all.
        dry_run: only say what would be discarded.
    """
    die_with_runner()
    settings = FlowsSettings()
    with Catalog(settings.db) as catalog:
        plan = plan_cleanup(catalog, older_than=settings.orphan_age, run=run)
    problems = [*plan.problems, *({} if dry_run else apply_cleanup(plan)).values()]
    for problem in problems:
        log.warning("%s", problem)
    message = "; ".join([f"{plan}{' (nothing discarded: dry run)' if dry_run else ''}", *problems[:3]])
    return Failed(message=message, name=PARTLY) if problems else Completed(message=message)
