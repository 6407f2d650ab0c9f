"""Labels of nodes.

Revision: 0018, after 0017.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column. A node's labels come with the next connection of its agent."""
    op.add_column("nodes", sa.Column("labels", sa.JSON(), nullable=False, server_default="{}"))


def downgrade() -> None:
    """Take it away; a job's `node_selector` has no effect then."""
    op.drop_column("nodes", "labels")
