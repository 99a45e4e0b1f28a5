"""The verification flows. Thin: what they do is in `flows.drain` and `catalog.verification`.

A run may be killed at any moment. Its lease runs out, and the next run verifies that checkpoint from its beginning; a
verdict is one transaction that names the lease's token, so there is never half of one, and never two.
"""

from __future__ import annotations

from collections.abc import Callable

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from catalog.catalog import Catalog
from catalog.rows import VerifyLease
from ckptlib.verification import Batches
from flows.artifacts import PrefectReporter
from flows.drain import Outcome, Summary, drain, verify_one
from flows.process import die_with_runner
from flows.requests import VerifyRequest, lease_one
from flows.settings import FlowsSettings


@task(name="verify-batch", task_run_name="{label}", cache_policy=NO_CACHE, persist_result=False)
def batch_task(label: str, work: Callable[[], None]) -> None:
    """Reads and hashes one batch of a checkpoint's files, with threads. Its findings stay in this process."""
    work()


def in_tasks(catalog: Catalog, settings: FlowsSettings, lease: VerifyLease, *, level: str | None = None) -> Outcome:
    """Verifies a leased checkpoint in as many tasks as it has batches, shown as artifacts of the run."""
    batches = Batches(
        settings.batch_size, settings.batch_files, lambda label, work: batch_task(f"{lease.name}: {label}", work)
    )
    return verify_one(catalog, settings, lease, PrefectReporter(), level=level, batches=batches)


@flow(name="verify-pending", persist_result=False)
def verify_pending(run: str | None = None) -> State[None]:
    """Verifies every checkpoint that waits for it, newest first, and then what is committed in the next seconds.

    Args:
        run: only this run's checkpoints; None: all.
    """
    die_with_runner()
    settings = FlowsSettings()
    with Catalog(settings.db) as catalog:
        return conclude(drain(catalog, settings, lambda lease: in_tasks(catalog, settings, lease), run=run))


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
        return conclude(Summary([in_tasks(catalog, settings, lease, level=request.level)]))


def conclude(summary: Summary) -> State[None]:
    """The state that a run ends in: a corrupt checkpoint is a result, an error of ours is a failure."""
    state = Failed if summary.of("failed") else Completed
    return state(message=str(summary), name=summary.ending or "Completed")
