"""Waking the flows: one Prefect event over plain HTTP, without importing prefect.

The event is only a wake-up. The catalog is the queue, and a schedule finds what no event announced; so a lost event
costs some minutes and nothing else, and a second one with the same id is dropped by the server.
"""

from __future__ import annotations

import base64
import json
import os
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from typing import Any

from catalog.rows import CheckpointRow

COMMITTED = "ckpt.checkpoint.committed"
RESOURCE_PREFIX = "ckpt.checkpoint"
_EVENT_IDS = uuid.UUID("5f0c2f4e-6a0b-4c52-9f43-8d3c1f6c7f1a")


def resource_id(run: str, save_id: str) -> str:
    """Prefect's name of a checkpoint."""
    return f"{RESOURCE_PREFIX}.{run}.{save_id}"


def committed_event(row: CheckpointRow) -> dict[str, Any]:
    """The event that a checkpoint was committed and recorded. Its id follows from the checkpoint alone."""
    resource = resource_id(row.run, row.save_id)
    return {
        "id": str(uuid.uuid5(_EVENT_IDS, resource)),
        "occurred": row.recorded_at.isoformat(),
        "event": COMMITTED,
        "resource": {
            "prefect.resource.id": resource,
            "prefect.resource.name": row.name,
            "ckpt.run": row.run,
            "ckpt.iteration": str(row.iteration),
            "ckpt.save_id": row.save_id,
        },
        "related": [],
        "payload": {
            "run": row.run,
            "iteration": row.iteration,
            "save_id": row.save_id,
            "checkpoint_id": row.id,
            "url": row.url,
            "size": row.size,
        },
    }


def api_url(environment: Mapping[str, str] = os.environ) -> str | None:
    """Prefect's API, from ``PREFECT_API_URL``; None: there is nobody to notify."""
    return environment.get("PREFECT_API_URL") or None


def post_event(event: Mapping[str, Any], url: str, *, timeout: float) -> None:
    """Sends one event to the Prefect API at `url`.

    Args:
        timeout: seconds for each step of the exchange.

    Raises:
        OSError: it could not be delivered: no connection, a timeout, or the server refused it.
        ValueError: `url` is not an HTTP URL.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"Prefect API {url!r}: expected an http(s) URL")
    headers = {"Content-Type": "application/json", **_authorization(os.environ)}
    request = urllib.request.Request(
        f"{url.rstrip('/')}/events", data=json.dumps([event]).encode(), headers=headers, method="POST"
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        response.read()


def _authorization(environment: Mapping[str, str]) -> dict[str, str]:
    """The header that the Prefect settings in the environment ask for."""
    key = environment.get("PREFECT_API_KEY")
    if key:
        return {"Authorization": f"Bearer {key}"}
    user = environment.get("PREFECT_API_AUTH_STRING")
    if user:
        return {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}
    return {}
