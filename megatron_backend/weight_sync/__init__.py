"""Moves training weights to the generation layout on the same ranks."""
