"""Uploaded files: stored under ids of our own, checked line by line before they count."""
