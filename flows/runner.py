"""The runner of the embedded set: registers the deployments and executes their runs. Started by `flows.serve`."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.runner import Runner
from prefect.states import Crashed

from flows import catalogue
from flows.process import RUNNER_PID
from flows.settings import FlowsSettings


async def run(settings: FlowsSettings, ready_fd: int | None) -> None:
    """Registers every deployment, tidies up, starts one drain for what was missed, and serves until SIGTERM."""
    # Schedules stay active on shutdown: the server that would act on them ends with us, and a paused one would need
    # somebody to resume it.
    runner = Runner(name="ckpt-flows", pause_on_shutdown=False, limit=settings.limit)
    ids = [await runner.aadd_deployment(await spec.build(settings)) for spec in catalogue.DEPLOYMENTS]
    async with get_client() as client:
        await _bury_the_dead(client, ids)
        for spec, deployment_id in zip(catalogue.DEPLOYMENTS, ids, strict=True):
            if spec.run_at_start:
                await client.create_flow_run_from_deployment(deployment_id)
    if ready_fd is not None:
        os.write(ready_fd, b"ready\n")
        os.close(ready_fd)
    await runner.start()


async def _bury_the_dead(client: PrefectClient, deployment_ids: Sequence[UUID]) -> None:
    """Marks runs as crashed that an earlier set left running: nothing else would, and none of them can be alive."""
    alive = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
    flow_runs = await client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=alive))),
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=list(deployment_ids))),
    )
    for flow_run in flow_runs:
        message = "The process that ran this is gone; its work went back to the catalog."
        await client.set_flow_run_state(flow_run.id, Crashed(message=message), force=True)


def main() -> None:
    """Entry point of ``python -m flows.runner``."""
    parser = argparse.ArgumentParser(prog="python -m flows.runner", description=__doc__)
    parser.add_argument("--ready-fd", type=int, help="file descriptor that gets a line once everything is registered")
    arguments = parser.parse_args()
    os.environ[RUNNER_PID] = str(os.getpid())
    asyncio.run(run(FlowsSettings(), arguments.ready_fd))


if __name__ == "__main__":
    main()
