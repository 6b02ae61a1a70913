"""Advantages from rewards, as pure functions."""
