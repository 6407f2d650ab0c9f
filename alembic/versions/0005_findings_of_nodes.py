"""What an agent found of its machine that someone may want to mend.

Revision: 0005, after 0004.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column. A node that is there has no findings until its agent connects again."""
    op.add_column("nodes", sa.Column("findings", sa.JSON(), nullable=False, server_default="[]"))


def downgrade() -> None:
    """Take it away again, not by batch: see 0002."""
    op.execute(sa.text("ALTER TABLE nodes DROP COLUMN findings"))
