"""Runs drivers in a Ray cluster that is there already, over its Jobs API."""
