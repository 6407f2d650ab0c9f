"""The second port of a collective job's first rank.

Revision: 0003, after 0002.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("replicas", sa.Column("meeting_port", sa.Integer(), nullable=True))


def downgrade() -> None:
    """Take it away again, not by batch: see 0002."""
    op.execute(sa.text("ALTER TABLE replicas DROP COLUMN meeting_port"))
