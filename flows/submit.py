"""Starting a run of a deployment through the API of a running set, and waiting for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flows.serve import prefect_environment
from flows.settings import FlowsSettings
from flows.state import ServeState


@dataclass(frozen=True)
class Submitted:
    """A flow run as the API shows it; `state` is Prefect's name of it (`Scheduled`, `Completed`, `Corrupt`, ...)."""

    id: str
    name: str
    state: str
    message: str
    url: str


def submit(
    settings: FlowsSettings, running: ServeState, deployment: str, parameters: Mapping[str, Any], *, wait: bool
) -> Submitted:
    """Starts a run of `deployment` (``flow/deployment``); with `wait`, returns when it has ended.

    Prefect is imported here and told to use this set, whatever the user's own profile says.
    """
    environment = prefect_environment(os.environ, settings, running.api_url)
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        del os.environ[name]
    os.environ.update(environment)
    from prefect.deployments import arun_deployment

    # as_subflow would look for a parent run; there is none on a command line.
    flow_run = asyncio.run(
        arun_deployment(
            deployment, parameters=dict(parameters), timeout=None if wait else 0, poll_interval=1.0, as_subflow=False
        )
    )
    state = flow_run.state
    return Submitted(
        id=str(flow_run.id),
        name=flow_run.name,
        state=state.name or state.type.value if state is not None else "Unknown",
        message=(state.message or "") if state is not None else "",
        url=f"{running.api_url.removesuffix('/api')}/runs/flow-run/{flow_run.id}",
    )
