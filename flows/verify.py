"""The verification flows. Thin: what they do is in `flows.drain` and `catalog.verification`.

A run may be killed at any moment. Its lease runs out, and the next run verifies that checkpoint from its beginning; a
verdict is one transaction that names the lease's token, so there is never half of one, and never two.
"""

from __future__ import annotations

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from catalog.catalog import Catalog
from catalog.rows import VerifyLease
from flows.artifacts import PrefectReporter
from flows.drain import Outcome, Summary, drain, verify_batch, verify_one
from flows.process import die_with_runner
from flows.requests import VerifyRequest, lease_one
from flows.settings import FlowsSettings


@task(name="verify-batch", task_run_name="batch from {lease.name}", cache_policy=NO_CACHE, persist_result=False)
def batch_task(
    settings: FlowsSettings, lease: VerifyLease, handled: frozenset[int], run: str | None = None
) -> list[Outcome]:
    """Verifies the leased checkpoint, then more, up to a batch of bytes and files; threads read and hash inside."""
    with Catalog(settings.db) as catalog:
        return verify_batch(catalog, settings, lease, handled, PrefectReporter(), run=run)


@task(name="verify-one", task_run_name="{lease.name}", cache_policy=NO_CACHE, persist_result=False)
def one_task(settings: FlowsSettings, lease: VerifyLease, level: str) -> Outcome:
    """Verifies one leased checkpoint."""
    with Catalog(settings.db) as catalog:
        return verify_one(catalog, settings, lease, PrefectReporter(), level=level)


@flow(name="verify-pending", persist_result=False)
def verify_pending(run: str | None = None) -> State[None]:
    """Verifies every checkpoint that waits for it, newest first, and then what is committed in the next seconds.

    Args:
        run: only this run's checkpoints; None: all.
    """
    die_with_runner()
    settings = FlowsSettings()
    with Catalog(settings.db) as catalog:
        return conclude(
            drain(catalog, settings, lambda lease, handled: batch_task(settings, lease, handled, run), run=run)
        )


@flow(name="verify", persist_result=False)
def verify(request: VerifyRequest) -> State[None]:
    """Verifies one checkpoint, also one that has a verdict.

    Raises:
        LeaseHeldError: somebody else verifies it at this moment.
        CatalogError: there is no such checkpoint, or it is not finalized.
    """
    die_with_runner()
    settings = FlowsSettings()
    with Catalog(settings.db) as catalog:
        lease = lease_one(catalog, settings, request)
        return conclude(Summary([one_task(settings, lease, request.level)]))


def conclude(summary: Summary) -> State[None]:
    """The state that a run ends in: a corrupt checkpoint is a result, an error of ours is a failure."""
    if summary.of("failed"):
        return Failed(message=str(summary))
    return Completed(message=str(summary), name="Corrupt" if summary.of("corrupt") else "Completed")
