"""Deadlines of drains, and why a node's state is as it is.

Revision: 0017, after 0016.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns. A node that drains already waits for what runs there, as it did."""
    op.add_column("nodes", sa.Column("drain_by", sa.DateTime(timezone=True), nullable=True))
    op.add_column("nodes", sa.Column("reason", sa.String(32), nullable=False, server_default=""))
    op.add_column("nodes", sa.Column("reason_detail", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    """Take them away; a drain waits for what runs there again."""
    for name in ("reason_detail", "reason", "drain_by"):
        op.drop_column("nodes", name)
