"""Losses as pure functions on tensors; each algorithm's file puts them together."""
