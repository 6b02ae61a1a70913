"""Advantages from rewards, as pure functions on plain numbers."""
