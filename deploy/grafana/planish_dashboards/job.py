"""One job: how it learns, and where its time goes."""

from planish_dashboards.parts import CLUSTERS, JOB, ONE_JOB, Dashboard, Panel, Query, stat

ONE = Dashboard(
    name="job",
    title="Planish / Job",
    variables=[CLUSTERS, ONE_JOB],
    rows=[
        (
            "Progress",
            [
                stat("Step", f"max(planish_job_step{{{JOB}}})", width=4),
                stat("Of", f"max(planish_job_steps_planned{{{JOB}}})", width=4),
                stat("Ranks", f"max(planish_job_ranks{{{JOB}}})", width=4),
                stat(
                    "Last event", f"max(job:planish_job_event_age_seconds{{{JOB}}})", "s", width=4
                ),
                stat(
                    "Last checkpoint",
                    f"time() - max(planish_job_checkpoint_timestamp_seconds{{{JOB}}})",
                    "s",
                    width=4,
                ),
                stat("Saves missed", f"max(planish_job_checkpoints_missed{{{JOB}}})", width=4),
            ],
        ),
        (
            "Learning",
            [
                Panel(
                    title="Loss",
                    queries=[
                        Query(f"max(planish_job_loss{{{JOB}}})", "loss"),
                        Query(f"max(planish_job_value_loss{{{JOB}}})", "critic"),
                        Query(f"max by (mode) (planish_job_evaluation_loss{{{JOB}}})", "{{mode}}"),
                    ],
                ),
                Panel(
                    title="Reward",
                    queries=[
                        Query(f"max(planish_job_reward_mean{{{JOB}}})", "mean"),
                        Query(f"max(planish_job_reward_std{{{JOB}}})", "standard deviation"),
                        Query(f"max(planish_job_reward_model_mean{{{JOB}}})", "reward model"),
                        Query(f"max(planish_job_reward_margin{{{JOB}}})", "margin of pairs"),
                    ],
                ),
                Panel(
                    title="Evaluation",
                    queries=[
                        Query(
                            f"max by (mode) (planish_job_evaluation_accuracy{{{JOB}}})",
                            "accuracy, {{mode}}",
                        ),
                        Query(
                            f"max by (mode) (planish_job_evaluation_reward_mean{{{JOB}}})",
                            "reward, {{mode}}",
                        ),
                    ],
                ),
                Panel(
                    title="KL",
                    unit="none",
                    description="To the reference, from the old policy, and between generator and "
                    "trainer, in nats.",
                    queries=[
                        Query(f"max(planish_job_kl{{{JOB}}})", "to the reference"),
                        Query(
                            f"max(planish_job_reward_kl{{{JOB}}})", "to the reference, of answers"
                        ),
                        Query(f"max(planish_job_approx_kl{{{JOB}}})", "from the old policy"),
                        Query(f"max(planish_job_rollout_kl{{{JOB}}})", "generator and trainer"),
                    ],
                ),
                Panel(
                    title="Entropy",
                    queries=[Query(f"max(planish_job_entropy{{{JOB}}})", "nats")],
                ),
                Panel(
                    title="Tokens that were clipped",
                    unit="percentunit",
                    queries=[Query(f"max(planish_job_ratio_clip_fraction{{{JOB}}})", "share")],
                ),
                Panel(
                    title="Norm of the gradient",
                    logarithmic=True,
                    queries=[
                        Query(f"max(planish_job_gradient_norm{{{JOB}}})", "policy"),
                        Query(f"max(planish_job_critic_gradient_norm{{{JOB}}})", "critic"),
                    ],
                ),
                Panel(
                    title="Learning rate",
                    unit="sci",
                    queries=[Query(f"max(planish_job_learning_rate{{{JOB}}})", "rate")],
                ),
                Panel(
                    title="Explained variance, pairs ahead",
                    unit="percentunit",
                    queries=[
                        Query(f"max(planish_job_explained_variance{{{JOB}}})", "critic"),
                        Query(f"max(planish_job_reward_accuracy{{{JOB}}})", "pairs"),
                    ],
                ),
            ],
        ),
        (
            "Speed",
            [
                Panel(
                    title="Where a step's time goes",
                    unit="s",
                    stacked=True,
                    queries=[
                        Query(f"max by (phase) (planish_job_phase_seconds{{{JOB}}})", "{{phase}}")
                    ],
                ),
                Panel(
                    title="Trained tokens a second",
                    queries=[Query(f"max(planish_job_tokens_per_second{{{JOB}}})", "tokens")],
                ),
                Panel(
                    title="Work of the update a second and rank (model FLOPs)",
                    unit="flops",
                    queries=[Query(f"max(planish_job_flops_per_second{{{JOB}}})", "operations")],
                ),
                Panel(
                    title="Share of the GPU's peak (MFU)",
                    unit="percentunit",
                    queries=[Query(f"max(planish_job_mfu{{{JOB}}})", "update")],
                ),
                Panel(
                    title="Checkpoints",
                    unit="s",
                    queries=[
                        Query(f"max(planish_job_checkpoint_seconds{{{JOB}}})", "to publish"),
                        Query(f"max(planish_job_checkpoint_stall_seconds{{{JOB}}})", "stood still"),
                    ],
                ),
            ],
        ),
    ],
)
