"""On PostgreSQL, the index of names also answers what begins a name: `LIKE 'start%'` in any collation.

Revision: 0009, after 0008. SQLite's answers a range.
"""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_INDEX, _COLUMNS = "ix_jobs_name_id", ["name", "id"]


def upgrade() -> None:
    """Make the index anew."""
    op.drop_index(_INDEX, table_name="jobs")
    op.create_index(_INDEX, "jobs", _COLUMNS, postgresql_ops={"name": "varchar_pattern_ops"})


def downgrade() -> None:
    """Make it as it was."""
    op.drop_index(_INDEX, table_name="jobs")
    op.create_index(_INDEX, "jobs", _COLUMNS)
