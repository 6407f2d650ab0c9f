"""When an attempt has taken as long as its job allows, so that no description is read to find those that have.

Revision: 0010, after 0009.
"""

from __future__ import annotations

from datetime import timedelta

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)
_JOBS = sa.table(
    "jobs",
    sa.column("id", sa.String),
    sa.column("state", sa.String),
    sa.column("attempt", sa.Integer),
    sa.column("spec", sa.JSON),
    sa.column("ends_by", _TIME),
)
_ATTEMPTS = sa.table(
    "attempts", sa.column("job_id", sa.String), sa.column("number", sa.Integer), sa.column("created_at", _TIME)
)


def upgrade() -> None:
    """Add the column, and fill it for the attempts that go on."""
    op.add_column("jobs", sa.Column("ends_by", _TIME, nullable=True))
    statement = (
        sa.select(_JOBS.c.id, _JOBS.c.spec, _ATTEMPTS.c.created_at)
        .join(_ATTEMPTS, (_ATTEMPTS.c.job_id == _JOBS.c.id) & (_ATTEMPTS.c.number == _JOBS.c.attempt))
        .where(_JOBS.c.state.in_(["STARTING", "RUNNING"]))
    )
    connection = op.get_bind()
    for job_id, spec, since in connection.execute(statement).all():
        limit_s = spec.get("max_duration_s")
        if limit_s is not None:
            ends_by = since + timedelta(seconds=limit_s)
            connection.execute(sa.update(_JOBS).where(_JOBS.c.id == job_id).values(ends_by=ends_by))


def downgrade() -> None:
    """Take it away again, not by batch: see 0002."""
    op.execute(sa.text("ALTER TABLE jobs DROP COLUMN ends_by"))
