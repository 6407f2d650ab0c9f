"""The audit log: a row for each request that changed something, indexed by time and by what it changed.

Revision: 0012, after 0011.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table and its indices. Of what was done before there are no rows."""
    op.create_table(
        "audit",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("token_id", sa.String(36), nullable=True),
        sa.Column("token_name", sa.Text(), nullable=False),
        sa.Column("peer", sa.String(64), nullable=False),
        sa.Column("method", sa.String(16), nullable=False),
        sa.Column("route", sa.String(255), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
    )
    op.create_index("ix_audit_at_id", "audit", ["at", "id"])
    op.create_index("ix_audit_subject_at_id", "audit", ["subject", "at", "id"])


def downgrade() -> None:
    """Take the table away again, and with it what was recorded."""
    op.drop_table("audit")
