"""The service itself: requests, the reconciler, the database."""

from planish_dashboards.parts import Dashboard, Panel, Query, stat

SERVICE = Dashboard(
    name="service",
    title="Planish / Service",
    rows=[
        (
            "Health",
            [
                stat("Replicas up", 'sum(up{job="planish"})', width=6),
                stat("Reconciler's lag", "min(planish_reconcile_lag_seconds)", "s", width=6),
                stat("Alerts firing", 'sum(ALERTS{alertstate="firing"}) or vector(0)', width=6),
                stat("Running jobs not shown", "max(planish_jobs_unshown)", width=6),
            ],
        ),
        (
            "Requests",
            [
                Panel(
                    title="Requests by status",
                    unit="reqps",
                    stacked=True,
                    queries=[
                        Query(
                            "sum by (status) (rate(planish_http_requests_total[$__rate_interval]))",
                            "{{status}}",
                        )
                    ],
                ),
                Panel(
                    title="Failed requests by route",
                    unit="reqps",
                    queries=[
                        Query(
                            "sum by (route) (rate("
                            'planish_http_requests_total{status="5xx"}[$__rate_interval]))',
                            "{{route}}",
                        )
                    ],
                ),
                Panel(
                    title="Slowest routes, 95th percentile",
                    unit="s",
                    description="Streams live as long as they are watched.",
                    queries=[
                        Query("topk(10, route:planish_http_request_seconds:p95_5m)", "{{route}}")
                    ],
                ),
            ],
        ),
        (
            "Reconciler and database",
            [
                Panel(
                    title="A round over all jobs",
                    unit="s",
                    queries=[
                        Query(
                            "histogram_quantile(0.95, sum by (le) (rate("
                            "planish_reconcile_round_seconds_bucket[$__rate_interval])))",
                            "p95",
                        ),
                        Query(
                            "sum(rate(planish_reconcile_round_seconds_sum[$__rate_interval])) / "
                            "sum(rate(planish_reconcile_round_seconds_count[$__rate_interval]))",
                            "mean",
                        ),
                    ],
                ),
                Panel(
                    title="Reading the database for a scrape",
                    unit="s",
                    queries=[Query("planish_store_read_seconds", "{{instance}}")],
                ),
                Panel(
                    title="Events of workers stored",
                    unit="ops",
                    stacked=True,
                    queries=[
                        Query(
                            "sum by (kind) (rate(planish_events_total[$__rate_interval]))",
                            "{{kind}}",
                        )
                    ],
                ),
            ],
        ),
    ],
)
