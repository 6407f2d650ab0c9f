"""When the next attempt of a job that recovers may start.

Revision: 0004, after 0003.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column. Jobs that recover now need not wait."""
    op.add_column("jobs", sa.Column("next_attempt_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Take it away again, not by batch: see 0002."""
    op.execute(sa.text("ALTER TABLE jobs DROP COLUMN next_attempt_at"))
