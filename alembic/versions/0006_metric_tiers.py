"""Points of metrics by attempt, and their tiers: the extremes of longer and longer intervals.

Revision: 0006, after 0005. Fills the tiers from the points that are there: some seconds for each million of them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

NUM_LEVELS, FACTOR = 9, 4
_KEY = "job_id, series, attempt"
_TIER = f"INSERT INTO metric_tiers ({_KEY}, level, bucket, low_time_ns, low_step, low, high_time_ns, high_step, high)"
_FIRST = """{into}
SELECT {key}, {level}, bucket, MAX(CASE WHEN l = 1 THEN {low}time_ns END), MAX(CASE WHEN l = 1 THEN {low}step END),
  MAX(CASE WHEN l = 1 THEN {low_value} END), MAX(CASE WHEN h = 1 THEN {high}time_ns END),
  MAX(CASE WHEN h = 1 THEN {high}step END), MAX(CASE WHEN h = 1 THEN {high_value} END)
FROM (SELECT {source}.*, {bucket} AS {alias},
  ROW_NUMBER() OVER (PARTITION BY {key}, {bucket} ORDER BY {low_value}, {low}time_ns, {low}step) AS l,
  ROW_NUMBER() OVER (PARTITION BY {key}, {bucket} ORDER BY {high_value} DESC, {high}time_ns, {high}step) AS h
  FROM {source} {where}) ranked
WHERE l = 1 OR h = 1 GROUP BY {key}, bucket"""


def upgrade() -> None:
    """Create the tables and move the points. Of those that are there the attempt is not known: it is 0."""
    op.create_table(
        "series",
        *_key(),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "series", "attempt"),
    )
    op.create_table(
        "metric_points",
        *_key(),
        sa.Column("time_ns", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "series", "attempt", "time_ns", "step"),
    )
    op.create_table(
        "metric_tiers",
        *_key(),
        sa.Column("level", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("bucket", sa.BigInteger(), autoincrement=False, nullable=False),
        *(
            column
            for end in ("low", "high")
            for column in (
                sa.Column(f"{end}_time_ns", sa.BigInteger(), nullable=False),
                sa.Column(f"{end}_step", sa.BigInteger(), nullable=False),
                sa.Column(end, sa.Double(), nullable=False),
            )
        ),
        sa.PrimaryKeyConstraint("job_id", "series", "attempt", "level", "bucket"),
    )
    op.execute(
        sa.text(
            f"INSERT INTO metric_points ({_KEY}, time_ns, step, value) "
            "SELECT job_id, series, 0, time_ns, step, value FROM metrics"
        )
    )
    op.execute(
        sa.text(
            f"INSERT INTO series ({_KEY}, first_step) SELECT job_id, series, 0, MIN(step) FROM metrics "
            "GROUP BY job_id, series"
        )
    )
    op.drop_table("metrics")
    for level in range(NUM_LEVELS):
        op.execute(sa.text(_fill(level)))


def downgrade() -> None:
    """Put the points back, of all attempts together."""
    op.create_table(
        "metrics",
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("series", sa.String(length=128), nullable=False),
        sa.Column("time_ns", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "series", "time_ns", "step"),
    )
    op.execute(
        sa.text(
            "INSERT INTO metrics (job_id, series, time_ns, step, value) "
            "SELECT job_id, series, time_ns, step, MIN(value) FROM metric_points GROUP BY job_id, series, time_ns, step"
        )
    )
    for table in ("metric_tiers", "metric_points", "series"):
        op.drop_table(table)


def _key() -> tuple[sa.schema.SchemaItem, ...]:
    return (
        sa.Column("job_id", sa.String(length=36), nullable=False),
        sa.Column("series", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], ondelete="CASCADE"),
    )


def _fill(level: int) -> str:
    if level == 0:
        names = {"low": "", "high": "", "low_value": "value", "high_value": "value"}
        source = {"source": "metric_points", "bucket": "time_ns / 1000000000", "alias": "bucket", "where": ""}
        return _FIRST.format(into=_TIER, key=_KEY, level=level, **names, **source)
    names = {"low": "low_", "high": "high_", "low_value": "low", "high_value": "high"}
    below = (
        f"(SELECT {_KEY}, level, bucket / {FACTOR} AS wide, low_time_ns, low_step, low, high_time_ns, high_step, high "
    )
    below += f"FROM metric_tiers WHERE level = {level - 1}) below"
    text = _FIRST.replace("{source}.*", "below.*").replace("FROM {source} {where}", f"FROM {below}")
    text = text.replace("{bucket} AS {alias},", "wide AS bucket,")
    return text.format(into=_TIER, key=_KEY, level=level, bucket="wide", **names)
