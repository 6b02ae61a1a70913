"""Runs attempts as batch jobs of SLURM (docs/slurm.md)."""
