"""What became of the telemetry of each stream.

Revision: 0019, after 0018.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table. What streams that are there have produced is unknown until their processes report it."""
    op.create_table(
        "stream_counts",
        sa.Column("stream", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("job_id", sa.String(36), sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
        sa.Column("counts", sa.Text(), nullable=False),
    )
    op.create_index("ix_stream_counts_job_id", "stream_counts", ["job_id"])


def downgrade() -> None:
    """Drop it; what was counted is unknown then."""
    op.drop_table("stream_counts")
