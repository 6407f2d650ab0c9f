"""Projects with a share and quotas; the project and the priority of each job, in an index of those that wait.

Revision: 0011, after 0010.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_INDEX = "ix_jobs_state_project_priority_id"


def upgrade() -> None:
    """Make the table, the columns and the index. Every job that is there belongs to the project `default`."""
    op.create_table(
        "projects",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("share", sa.Double(), nullable=False),
        sa.Column("max_cpus", sa.Integer(), nullable=True),
        sa.Column("max_gpus", sa.Integer(), nullable=True),
        sa.Column("max_jobs", sa.Integer(), nullable=True),
    )
    op.add_column("jobs", sa.Column("project", sa.String(63), nullable=False, server_default="default"))
    op.add_column("jobs", sa.Column("priority", sa.Integer(), nullable=False, server_default="0"))
    op.create_index(_INDEX, "jobs", ["state", "project", "priority", "id"])


def downgrade() -> None:
    """Take them away again, the columns not by batch: see 0002."""
    op.drop_index(_INDEX, table_name="jobs")
    op.execute(sa.text("ALTER TABLE jobs DROP COLUMN priority"))
    op.execute(sa.text("ALTER TABLE jobs DROP COLUMN project"))
    op.drop_table("projects")
