"""Indices for what is asked twice a second, and for pages of lists: neither costs more with more jobs that ended.

Revision: 0008, after 0007.
"""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_NEW = {
    "ix_jobs_name_id": ("jobs", ["name", "id"]),
    "ix_jobs_state_id": ("jobs", ["state", "id"]),
    "ix_replicas_state_job_id": ("replicas", ["state", "job_id"]),
    "ix_events_job_id_id": ("events", ["job_id", "id"]),
}
_OLD = {
    "ix_jobs_name": ("jobs", ["name"]),
    "ix_jobs_state": ("jobs", ["state"]),
    "ix_events_job_id": ("events", ["job_id"]),
}


def upgrade() -> None:
    """Replace the indices."""
    _replace(_OLD, _NEW)


def downgrade() -> None:
    """Put the former ones back."""
    _replace(_NEW, _OLD)


def _replace(old: dict[str, tuple[str, list[str]]], new: dict[str, tuple[str, list[str]]]) -> None:
    for name, (table, columns) in new.items():
        op.create_index(name, table, columns)
    for name, (table, _) in old.items():
        op.drop_index(name, table_name=table)
