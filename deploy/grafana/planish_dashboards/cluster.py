"""Clusters: what waits, runs and fails there, and how they answer."""

from planish_dashboards.parts import CLUSTERS, Dashboard, Panel, Query, quantiles

CLUSTER = Dashboard(
    name="cluster",
    title="Planish / Clusters",
    variables=[CLUSTERS],
    rows=[
        (
            "Jobs",
            [
                Panel(
                    title="Jobs that have not ended, by state",
                    stacked=True,
                    queries=[
                        Query(
                            'sum by (state) (cluster_state:planish_jobs:max{cluster=~"$cluster", '
                            'state!~"SUCCEEDED|FAILED|CANCELLED"})',
                            "{{state}}",
                        )
                    ],
                ),
                Panel(
                    title="Longest wait",
                    unit="s",
                    queries=[
                        Query(
                            'max by (cluster) (planish_queue_oldest_seconds{cluster=~"$cluster"})',
                            "{{cluster}}, in the service",
                        ),
                        Query(
                            "max by (cluster) "
                            '(planish_starting_oldest_seconds{cluster=~"$cluster"})',
                            "{{cluster}}, in the cluster",
                        ),
                    ],
                ),
                Panel(
                    title="Time in the service's queue",
                    unit="s",
                    queries=quantiles("planish_queue_seconds", "cluster", 'cluster=~"$cluster"'),
                ),
                Panel(
                    title="Jobs that ended in an hour",
                    queries=[
                        Query(
                            "sum by (state) (max by (cluster, state) (increase("
                            'planish_jobs_finished_total{cluster=~"$cluster"}[1h])))',
                            "{{state}}",
                        )
                    ],
                ),
                Panel(
                    title="Jobs that failed in an hour, by reason",
                    queries=[
                        Query(
                            "sum by (reason) (cluster_reason:planish_jobs_failed:increase1h"
                            '{cluster=~"$cluster"}) > 0 or vector(0)',
                            "{{reason}}",
                        )
                    ],
                ),
                Panel(
                    title="Attempts that failed in an hour, by reason",
                    queries=[
                        Query(
                            "sum by (reason) (cluster_reason:planish_attempts_failed:increase1h"
                            '{cluster=~"$cluster"}) > 0 or vector(0)',
                            "{{reason}}",
                        )
                    ],
                ),
            ],
        ),
        (
            "How the cluster answers",
            [
                Panel(
                    title="Calls without an answer, or refused",
                    unit="ops",
                    queries=[
                        Query(
                            "sum by (cluster, call, error) (rate("
                            'planish_launcher_errors_total{cluster=~"$cluster"}'
                            "[$__rate_interval]))",
                            "{{cluster}} {{call}} {{error}}",
                        )
                    ],
                ),
                Panel(
                    title="Time of a call",
                    unit="s",
                    queries=quantiles(
                        "planish_launcher_call_seconds", "call", 'cluster=~"$cluster"'
                    ),
                ),
                Panel(
                    title="Since the watch last heard of the cluster",
                    unit="s",
                    description="Only clusters that are watched (Kubernetes).",
                    queries=[
                        Query(
                            "min by (cluster) "
                            '(planish_launcher_watch_age_seconds{cluster=~"$cluster"})',
                            "{{cluster}}",
                        )
                    ],
                ),
            ],
        ),
        (
            "What is trained",
            [
                Panel(
                    title="Tokens a second",
                    stacked=True,
                    queries=[
                        Query(
                            "sum by (algorithm) (algorithm_cluster:planish_training_tokens:rate5m"
                            '{cluster=~"$cluster"})',
                            "{{algorithm}}",
                        )
                    ],
                ),
                Panel(
                    title="Checkpoints published, and missed",
                    unit="ops",
                    queries=[
                        Query(
                            "sum(rate("
                            'planish_checkpoints_total{cluster=~"$cluster"}[$__rate_interval]))',
                            "published",
                        ),
                        Query(
                            "sum(rate(planish_checkpoints_missed_total"
                            '{cluster=~"$cluster"}[$__rate_interval]))',
                            "missed",
                        ),
                    ],
                ),
                Panel(
                    title="Running jobs",
                    kind="table",
                    queries=[
                        Query(
                            "max by (job_id, name, algorithm, cluster, state) "
                            '(planish_job_info{cluster=~"$cluster"})'
                        )
                    ],
                ),
            ],
        ),
    ],
)
