"""Sampling from the model: the engines, and the part of a rank that generates.

Nothing is imported here, so that the driver can ask `shares` without paying for Megatron.
"""
