"""Alembic's entry: runs the migrations in the transaction that `service.store.migrate` opened."""

from alembic import context

from service.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite's DDL is transactional where the driver does not begin by itself (see `database`).
    transactional_ddl=True,
    # SQLite alters a column by copying its table.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
