"""Rollouts: environments, and what jobs sample in them."""

from planish_dashboards.parts import (
    CLUSTERS,
    ENVIRONMENTS,
    JOB,
    JOBS,
    Dashboard,
    Panel,
    Query,
    per_job,
)

ROLLOUT = Dashboard(
    name="rollout",
    title="Planish / Rollout",
    variables=[CLUSTERS, JOBS, ENVIRONMENTS],
    rows=[
        (
            "Environments",
            [
                Panel(
                    title="Episodes a second",
                    stacked=True,
                    queries=[
                        Query(
                            "sum by (environment) (rate(planish_episodes_total"
                            '{environment=~"$environment"}[$__rate_interval]))',
                            "{{environment}}",
                        )
                    ],
                ),
                Panel(
                    title="Episodes whose environment failed",
                    unit="percentunit",
                    queries=[
                        Query(
                            "environment:planish_episodes_failed:ratio15m"
                            '{environment=~"$environment"}',
                            "{{environment}}",
                        )
                    ],
                ),
                Panel(
                    title="Episodes without a reward",
                    unit="ops",
                    queries=[
                        Query(
                            "sum by (environment) (rate(planish_episodes_unscored_total"
                            '{environment=~"$environment"}[$__rate_interval]))',
                            "{{environment}}",
                        )
                    ],
                ),
            ],
        ),
        (
            "What jobs sample",
            [
                per_job("planish_job_reward_mean", "Mean reward"),
                per_job("planish_job_pass_at_1", "Best reward reached", "percentunit"),
                per_job("planish_job_policy_tokens_mean", "Tokens of an answer"),
                per_job("planish_job_truncated_rate", "Answers that were cut", "percentunit"),
                per_job("planish_job_tool_rate", "Episodes with a tool call", "percentunit"),
                per_job(
                    "planish_job_groups_flat_rate",
                    "Groups that teach nothing",
                    "percentunit",
                    description="All answers to a question earned the same.",
                ),
                per_job("planish_job_step_episodes_failed", "Failed episodes of a step"),
                per_job(
                    "planish_job_rollout_kl",
                    "Generator and trainer apart",
                    description="KL estimate in nats; it grows where the weights are stale.",
                ),
                per_job("planish_job_rollout_ratio_deviation", "Largest ratio's distance from 1"),
            ],
        ),
        (
            "Time",
            [
                Panel(
                    title="Mean time of each phase",
                    unit="s",
                    width=12,
                    queries=[Query("phase:planish_step_phase_seconds:mean15m", "{{phase}}")],
                ),
                Panel(
                    title="Handing weights to the generator",
                    unit="s",
                    width=12,
                    queries=[
                        Query(
                            f'max by (job_id) (planish_job_phase_seconds{{{JOB}, phase="sync"}})',
                            "{{job_id}}",
                        )
                    ],
                ),
            ],
        ),
    ],
)
