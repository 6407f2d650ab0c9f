"""Attempts apart from epochs, the ports and addresses of nodes, and the secret of an attempt.

Revision: 0002, after 0001.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns. Of what is there, the attempt is the epoch: they were one."""
    op.add_column("jobs", sa.Column("attempt", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("replicas", sa.Column("attempt", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("replicas", sa.Column("port", sa.Integer(), nullable=True))
    op.add_column("attempts", sa.Column("secret", sa.String(length=64), nullable=False, server_default=""))
    op.add_column("nodes", sa.Column("address", sa.String(length=255), nullable=False, server_default=""))
    op.add_column("nodes", sa.Column("ports", sa.JSON(), nullable=False, server_default="[]"))
    for name in ("jobs", "replicas"):
        op.execute(sa.text(f"UPDATE {name} SET attempt = epoch"))
    op.drop_index("ix_replicas_job_id_epoch", table_name="replicas")
    op.create_index("ix_replicas_job_id_attempt", "replicas", ["job_id", "attempt"])


def downgrade() -> None:
    """Take them away again."""
    op.drop_index("ix_replicas_job_id_attempt", table_name="replicas")
    op.create_index("ix_replicas_job_id_epoch", "replicas", ["job_id", "epoch"])
    # Not by batch: SQLite would drop and fill the table anew, and a dropped row takes those that refer to it along.
    for table, column in (
        ("nodes", "ports"), ("nodes", "address"), ("attempts", "secret"), ("replicas", "port"),
        ("replicas", "attempt"), ("jobs", "attempt"),
    ):  # fmt: skip
        op.execute(sa.text(f"ALTER TABLE {table} DROP COLUMN {column}"))
