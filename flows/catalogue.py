"""Every deployment, declared once. `ckpt flows serve` applies this list; deploying to a work pool takes the same one.

Imports no Prefect until a deployment is built, so that `ckpt flows ls` is quick.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from flows.settings import FlowsSettings

if TYPE_CHECKING:
    from prefect.deployments.runner import RunnerDeployment


@dataclass(frozen=True)
class DeploymentSpec:
    """One deployment.

    No deployment has a concurrency limit in Prefect: its slot is a lease in the server's memory, so a server restart
    would crash long healthy runs. The catalog's leases keep two runs off the same work.

    Attributes:
        flow: the flow's name, as in the decorator.
        entrypoint: ``module:function``; must be importable wherever the deployment runs.
        description: for people.
        schedule: the setting that says after how many seconds it runs again; None: only when it is told to.
        wakes_on_commit: an event of a committed checkpoint starts a run.
        run_at_start: the embedded set starts a run when it comes up: events of the time before are lost.
        parameters: defaults of the flow's parameters.
    """

    flow: str
    entrypoint: str
    description: str
    schedule: Literal["interval", "cleanup_interval"] | None = None
    wakes_on_commit: bool = False
    run_at_start: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)

    deployment: str = "ckpt"

    @property
    def name(self) -> str:
        """As Prefect addresses it: ``flow/deployment``."""
        return f"{self.flow}/{self.deployment}"

    def every(self, settings: FlowsSettings) -> float | None:
        """Seconds between two scheduled runs; None: there are none."""
        return None if self.schedule is None else float(getattr(settings, self.schedule))

    async def build(self, settings: FlowsSettings) -> RunnerDeployment:
        """The deployment for Prefect, to be served or deployed."""
        from prefect.types.entrypoint import EntrypointType

        from flows.events import commit_trigger

        every = self.every(settings)
        module, function = self.entrypoint.split(":")
        flow = getattr(importlib.import_module(module), function)
        deployment: RunnerDeployment = await flow.ato_deployment(
            self.deployment,
            description=self.description,
            interval=None if every is None else timedelta(seconds=every),
            triggers=[commit_trigger(window=timedelta(seconds=settings.wake_window))] if self.wakes_on_commit else None,
            parameters=dict(self.parameters),
            tags=["ckpt"],
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        return deployment


DEPLOYMENTS: tuple[DeploymentSpec, ...] = (
    DeploymentSpec(
        flow="verify-pending",
        entrypoint="flows.verify:verify_pending",
        description="Verifies every checkpoint that the catalog holds unverified, newest first.",
        schedule="interval",
        wakes_on_commit=True,
        run_at_start=True,
    ),
    DeploymentSpec(
        flow="verify",
        entrypoint="flows.verify:verify",
        description="Verifies one checkpoint again, whatever its verdict is.",
    ),
    DeploymentSpec(
        flow="cleanup",
        entrypoint="flows.cleanup:cleanup",
        description="Discards uploads to object stores that dead processes left unfinished.",
        schedule="cleanup_interval",
    ),
)


def find(flow: str) -> DeploymentSpec:
    """The deployment of this flow.

    Raises:
        KeyError: there is none.
    """
    return {spec.flow: spec for spec in DEPLOYMENTS}[flow]
