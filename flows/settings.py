"""Settings of the flows, from the environment (``CKPT_DB`` and ``CKPT_FLOWS_…``), validated once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import AliasChoices, ByteSize, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

GrantingLevel = Literal["auto", "data", "store"]
"""Verification levels that grant `verified` (V3); a drain at another level would never empty the queue."""


def default_state_dir() -> Path:
    """Per-user directory of the embedded set: ``$XDG_DATA_HOME/ckptlib/flows``."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "ckptlib" / "flows"


class FlowsSettings(BaseSettings):
    """What the flows and the embedded set can be told; every field is an environment variable ``CKPT_FLOWS_<NAME>``.

    Attributes:
        db: the catalog: a path or an SQLAlchemy URL (``CKPT_DB``); None is the per-user default.
        state_dir: where the embedded set keeps Prefect's home, its logs and the state file.
        host: address the embedded server listens on. It has no password of its own: keep it on loopback.
        port: its port; 0 is the port of last time where that is free, else any free one.
        ui: serve Prefect's UI too.
        startup_timeout: seconds the server may take to answer, and then the runner to register its deployments. A
            fresh database took up to 94 s on two loaded cores.
        poll_frequency: seconds between two looks of the runner for scheduled runs.
        interval: seconds between two scheduled drains: the backstop for lost events.
        cleanup_interval: seconds between two scheduled cleanups.
        orphan_age: seconds after which an upload that nobody finished is discarded, where its save was not decided and
            gives no sign of life. Longer than any save takes.
        wake_window: seconds in which many commits wake one drain only.
        linger: seconds a drain lives at least, looking for new work. At least `wake_window`: a commit whose event fell
            into the window is then seen by the drain that the window's first event started.
        limit: flow runs that the embedded runner executes at a time.
        level: verification level of the drain; ``data`` also reads back what only the store has vouched for.
        threads: threads that read and hash within one task.
        batch_size: bytes that one task reads; a larger checkpoint is several tasks, a file never more than one.
        batch_files: files that one task reads.
        lease_ttl: seconds after which the work of a killed drain is given back.
    """

    model_config = SettingsConfigDict(env_prefix="CKPT_FLOWS_", frozen=True, extra="ignore", populate_by_name=True)

    db: str | None = Field(default=None, validation_alias=AliasChoices("CKPT_DB"))
    state_dir: Path = Field(default_factory=default_state_dir)
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    ui: bool = True
    startup_timeout: PositiveFloat = 300.0
    poll_frequency: PositiveInt = 2
    interval: float = Field(default=300.0, ge=1.0)
    cleanup_interval: float = Field(default=6 * 3600.0, ge=60.0)
    orphan_age: float = Field(default=24 * 3600.0, ge=60.0)
    wake_window: NonNegativeFloat = 10.0
    linger: NonNegativeFloat = 12.0
    limit: PositiveInt = 2
    level: GrantingLevel = "auto"
    threads: PositiveInt = Field(default_factory=lambda: max(1, min(8, os.cpu_count() or 1)))
    batch_size: ByteSize = Field(default=ByteSize(4 << 30), gt=0)
    batch_files: PositiveInt = 500
    lease_ttl: float = Field(default=120.0, ge=1.0)

    @model_validator(mode="after")
    def _linger_covers_the_window(self) -> Self:
        if self.linger < self.wake_window:
            raise ValueError(
                f"linger={self.linger} is shorter than wake_window={self.wake_window}: commits whose events fell into "
                "the window would wait for the next scheduled drain; make linger at least as long"
            )
        return self
