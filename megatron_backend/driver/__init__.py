"""The job driver: one process that runs an attempt of a job from its folder."""
