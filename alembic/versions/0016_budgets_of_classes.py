"""The restarts that a job took from budgets of single classes of failures.

Revision: 0016, after 0015.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column. Jobs that are there have no such budgets, so nothing is recorded of them.

    `ends_by` is when a job's wait ends, too, from now on. One that waits has there when its last attempt would have.
    """
    op.add_column("jobs", sa.Column("restarts_by_class", sa.JSON(), nullable=False, server_default="{}"))
    op.execute("UPDATE jobs SET ends_by = NULL WHERE state IN ('QUEUED', 'RECOVERING')")


def downgrade() -> None:
    """Take it away; what a job took in all stays in `restarts`, and counts against `max_restarts` then."""
    op.drop_column("jobs", "restarts_by_class")
