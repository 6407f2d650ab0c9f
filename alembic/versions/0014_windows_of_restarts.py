"""When a job took the restarts that count in its window.

Revision: 0014, after 0013.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column. Jobs that are there have no window, so nothing is recorded of them."""
    op.add_column("jobs", sa.Column("restarted_at", sa.JSON(), nullable=False, server_default="[]"))


def downgrade() -> None:
    """Take it away; what a job took in all stays in `restarts`."""
    op.drop_column("jobs", "restarted_at")
