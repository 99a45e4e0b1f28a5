"""Runs revisions on the connection that `catalog.database` gives, inside its transaction.

The schema's models come from there too: this package stands below the catalog and imports nothing of it.
"""

from __future__ import annotations

from alembic import context
from alembic.util import CommandError

connection = context.config.attributes.get("connection")
if connection is None:
    raise CommandError("no database connection: run revisions with `ckpt db upgrade`, which chooses and locks it")

context.configure(
    connection=connection,
    target_metadata=context.config.attributes["target_metadata"],
    compare_type=True,
    compare_server_default=True,
    # SQLite cannot alter most things in place; batch mode copies the table instead, and is plain ALTER elsewhere.
    render_as_batch=True,
    # One transaction for all: a crash leaves the old schema or the new one, and two that upgrade at once take turns.
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
