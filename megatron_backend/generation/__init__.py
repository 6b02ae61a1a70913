"""Sampling from the model: the engines, and the part of a rank that generates."""
