"""Jobs and attempts are counted from indexes"""

from alembic import op

revision = "0002"
down_revision = "0001"

_JOBS = ["state", "cluster", "reason", "created_at"]


def upgrade() -> None:
    op.create_index(op.f("ix_jobs_state_cluster_reason_created_at"), "jobs", _JOBS)
    op.drop_index(op.f("ix_jobs_state"), "jobs")
    op.create_index(op.f("ix_attempts_reason_launcher"), "attempts", ["reason", "launcher"])
    op.create_index(
        op.f("ix_attempts_state_launcher_created_at"),
        "attempts",
        ["state", "launcher", "created_at"],
    )


def downgrade() -> None:
    op.drop_index(op.f("ix_attempts_state_launcher_created_at"), "attempts")
    op.drop_index(op.f("ix_attempts_reason_launcher"), "attempts")
    op.create_index(op.f("ix_jobs_state"), "jobs", ["state"])
    op.drop_index(op.f("ix_jobs_state_cluster_reason_created_at"), "jobs")
