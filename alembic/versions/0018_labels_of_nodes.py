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
    """Take it away, and from specifications `node_selector`, which the version before refuses to read."""
    op.drop_column("nodes", "labels")
    jobs = sa.table("jobs", sa.column("id", sa.String), sa.column("spec", sa.JSON))
    connection = op.get_bind()
    for job_id, spec in connection.execute(sa.select(jobs.c.id, jobs.c.spec)).all():
        if "node_selector" in spec:
            rest = {name: value for name, value in spec.items() if name != "node_selector"}
            connection.execute(jobs.update().where(jobs.c.id == job_id).values(spec=rest))
