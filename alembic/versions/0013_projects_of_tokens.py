"""Roles of tokens by project, who made a login code or a session, and an index for the jobs of a project.

Revision: 0013, after 0012.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns and the index. Tokens that are there keep their scopes in all projects."""
    op.add_column("tokens", sa.Column("projects", sa.JSON(), nullable=True))
    op.add_column("tokens", sa.Column("made_by", sa.String(36), nullable=True))
    op.create_index("ix_jobs_project_id", "jobs", ["project", "id"])


def downgrade() -> None:
    """Take them away. Tokens that were restricted to projects are revoked: without that they would open all."""
    op.execute("UPDATE tokens SET revoked_at = created_at WHERE projects IS NOT NULL AND revoked_at IS NULL")
    op.drop_index("ix_jobs_project_id", "jobs")
    op.drop_column("tokens", "made_by")
    op.drop_column("tokens", "projects")
