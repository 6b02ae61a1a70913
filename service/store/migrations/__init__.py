"""Alembic's scripts; `service.store.migrate` runs them."""
