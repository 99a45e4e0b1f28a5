"""The catalog: runs, locations, attempts, checkpoints, files, verifications, holds, events.

Revision: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True)
JSON = sa.JSON(none_as_null=True)


def upgrade() -> None:

    op.create_table(
        "runs",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
        sa.UniqueConstraint("name", name="uq_runs_name"),
    )
    op.create_table(
        "attempts",
        sa.Column("id", ID, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("attempt_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("resumed_from", sa.String()),
        sa.Column("host", sa.String()),
        sa.Column("pid", sa.BigInteger()),
        sa.Column("topology", JSON),
        sa.Column("started_at", TIME),
        sa.Column("recorded_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_attempts_run_id_runs"),
        sa.PrimaryKeyConstraint("id", name="pk_attempts"),
        sa.UniqueConstraint("run_id", "attempt_id", name="uq_attempts_run_id_attempt_id"),
    )
    op.create_index("ix_attempts_run_id_number", "attempts", ["run_id", "number"])
    op.create_table(
        "locations",
        sa.Column("id", ID, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("root_id", sa.String()),
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("registered_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_locations_run_id_runs"),
        sa.PrimaryKeyConstraint("id", name="pk_locations"),
        sa.UniqueConstraint("run_id", "root_id", name="uq_locations_run_id_root_id"),
    )
    op.create_index("ix_locations_run_id_url", "locations", ["run_id", "url"])
    op.create_table(
        "checkpoints",
        sa.Column("id", ID, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("location_id", ID, nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("save_id", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.String()),
        sa.Column("iteration", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("semantic_type", sa.String(), nullable=False),
        sa.Column("format", sa.String(), nullable=False),
        sa.Column("io_mode", sa.String(), nullable=False),
        sa.Column("topology", JSON),
        sa.Column("contents", JSON, nullable=False),
        sa.Column("progress", JSON, nullable=False),
        sa.Column("metrics", JSON, nullable=False),
        sa.Column("parent", sa.String()),
        sa.Column("replaces", JSON, nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("tensors", sa.BigInteger(), nullable=False),
        sa.Column("objects", sa.BigInteger(), nullable=False),
        sa.Column("manifest_sha256", sa.String(), nullable=False),
        sa.Column("adopted", sa.Boolean(), nullable=False),
        sa.Column("created_at", TIME),
        sa.Column("committed_at", TIME, nullable=False),
        sa.Column("recorded_at", TIME, nullable=False),
        sa.Column("lifecycle", sa.String(), nullable=False),
        sa.Column("verdict", sa.String(), nullable=False),
        sa.Column("branch", sa.String(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("verified_at", TIME),
        sa.Column("verified_level", sa.String()),
        sa.Column("lease_owner", sa.String()),
        sa.Column("lease_token", sa.String()),
        sa.Column("lease_expires_at", TIME),
        sa.Column("verify_failures", sa.Integer(), nullable=False),
        sa.Column("retry_at", TIME),
        sa.CheckConstraint("branch IN ('live', 'abandoned')", name="ck_checkpoints_branch"),
        sa.CheckConstraint(
            "lifecycle IN ('writing', 'finalized', 'aborted', 'missing', 'deleting', 'deleted')",
            name="ck_checkpoints_lifecycle",
        ),
        sa.CheckConstraint(
            "verdict IN ('unverified', 'verified', 'corrupt', 'unverifiable', 'suspect')", name="ck_checkpoints_verdict"
        ),
        sa.ForeignKeyConstraint(["location_id"], ["locations.id"], name="fk_checkpoints_location_id_locations"),
        sa.ForeignKeyConstraint(
            ["run_id", "attempt_id"],
            ["attempts.run_id", "attempts.attempt_id"],
            name="fk_checkpoints_run_id_attempt_id_attempts",
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_checkpoints_run_id_runs"),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoints"),
        sa.UniqueConstraint("run_id", "save_id", name="uq_checkpoints_run_id_save_id"),
    )
    op.create_index("ix_checkpoints_location_id_path", "checkpoints", ["location_id", "path"])
    op.create_index(
        "ix_checkpoints_run_id_attempt_iteration_id", "checkpoints", ["run_id", "attempt", "iteration", "id"]
    )
    op.create_index("ix_checkpoints_run_id_iteration", "checkpoints", ["run_id", "iteration"])
    op.create_index("ix_checkpoints_verdict_lifecycle_id", "checkpoints", ["verdict", "lifecycle", "id"])
    op.create_table(
        "events",
        sa.Column("id", ID, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("checkpoint_id", ID),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("data", JSON, nullable=False),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_events_checkpoint_id_checkpoints"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_events_run_id_runs"),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
    )
    op.create_index("ix_events_checkpoint_id_id", "events", ["checkpoint_id", "id"])
    op.create_index("ix_events_run_id_id", "events", ["run_id", "id"])
    op.create_table(
        "files",
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String()),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("origin", sa.String(), nullable=False),
        sa.Column("part_size", sa.BigInteger()),
        sa.Column("part_sha256", JSON),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_files_checkpoint_id_checkpoints"),
        sa.PrimaryKeyConstraint("checkpoint_id", "path", name="pk_files"),
    )
    op.create_table(
        "holds",
        sa.Column("id", ID, nullable=False),
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("expires_at", TIME),
        sa.Column("released_at", TIME),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_holds_checkpoint_id_checkpoints"),
        sa.PrimaryKeyConstraint("id", name="pk_holds"),
    )
    op.create_index("ix_holds_checkpoint_id", "holds", ["checkpoint_id"])
    op.create_table(
        "verifications",
        sa.Column("id", ID, nullable=False),
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("level", sa.String(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("verdict", sa.String(), nullable=False),
        sa.Column("worker", sa.String(), nullable=False),
        sa.Column("finished_at", TIME, nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("bytes_read", sa.BigInteger(), nullable=False),
        sa.Column("counts", JSON, nullable=False),
        sa.Column("failed", JSON, nullable=False),
        sa.Column("problems", JSON, nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name="fk_verifications_checkpoint_id_checkpoints"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_verifications"),
    )
    op.create_index("ix_verifications_checkpoint_id", "verifications", ["checkpoint_id"])


def downgrade() -> None:

    op.drop_table("verifications")
    op.drop_table("holds")
    op.drop_table("files")
    op.drop_table("events")
    op.drop_table("checkpoints")
    op.drop_table("locations")
    op.drop_table("attempts")
    op.drop_table("runs")
