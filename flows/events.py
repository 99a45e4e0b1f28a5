"""Which Prefect events concern us, and the trigger that turns them into runs.

The trainer's side (`catalog.notify`) names and sends them without importing Prefect; this side takes the names from
there. Delivery is at most once, and that is enough: an event only wakes the drain early.
"""

from __future__ import annotations

from datetime import timedelta

from prefect.events import DeploymentEventTrigger
from prefect.events.schemas.automations import Posture

from catalog.notify import COMMITTED, RESOURCE_PREFIX


def commit_trigger(*, window: timedelta) -> DeploymentEventTrigger:
    """Starts a run at the first commit, then none for `window`, however many checkpoints are committed in it.

    Each run is a new process that costs seconds to import everything: one per checkpoint starves a small machine.
    Events inside the window are dropped, not postponed, so the run has to stay for at least that long
    (`FlowsSettings.linger`).
    """
    return DeploymentEventTrigger(
        name="ckpt: verify after a commit",
        description="A checkpoint was committed: drain the catalog's unverified ones.",
        posture=Posture.Reactive,
        expect={COMMITTED},
        match={"prefect.resource.id": f"{RESOURCE_PREFIX}.*"},
        threshold=1,
        within=window,
    )
