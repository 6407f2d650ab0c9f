"""How much telemetry of a job never came.

Revision: 0007, after 0006.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column. Of what is there it is not known: nothing."""
    op.add_column("jobs", sa.Column("lost", sa.JSON(), nullable=False, server_default="{}"))


def downgrade() -> None:
    """Take it away again, not by batch: see 0002."""
    op.execute(sa.text("ALTER TABLE jobs DROP COLUMN lost"))
