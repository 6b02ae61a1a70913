"""API keys, by the hash of their secret."""

import time

from sqlalchemy import func, insert, select, update

from service.jobs.identifiers import new_key_id
from service.jobs.records import ApiKey
from service.store import tables
from service.store.database import Database
from service.store.errors import NotFound

_table = tables.api_keys


class ApiKeys:
    """The keys that the service accepts."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, name: str, secret_hash: str) -> ApiKey:
        """Accepts a key from now on; one that is known already is returned as it is."""
        known = select(_table).where(_table.c.secret_hash == secret_hash)
        with self._database.writing() as connection:
            row = connection.execute(known).mappings().one_or_none()
            if row is None:
                connection.execute(
                    insert(_table).values(
                        id=new_key_id(), name=name, secret_hash=secret_hash, created_at=time.time()
                    )
                )
                row = connection.execute(known).mappings().one()
        return ApiKey(**row)

    def by_hash(self, secret_hash: str) -> ApiKey | None:
        """The key with this hash; null where there is none or it was revoked."""
        query = select(_table).where(
            _table.c.secret_hash == secret_hash, _table.c.revoked_at.is_(None)
        )
        with self._database.reading() as connection:
            row = connection.execute(query).mappings().one_or_none()
        return None if row is None else ApiKey(**row)

    def count(self) -> int:
        """How many keys are accepted."""
        query = select(func.count()).select_from(_table).where(_table.c.revoked_at.is_(None))
        with self._database.reading() as connection:
            return connection.execute(query).scalar_one()

    def listed(self) -> list[ApiKey]:
        """All keys, the revoked ones too, oldest first."""
        query = select(_table).order_by(_table.c.created_at, _table.c.id)
        with self._database.reading() as connection:
            return [ApiKey(**row) for row in connection.execute(query).mappings()]

    def used(self, key_id: str) -> None:
        """Keeps the time of the last use; call it seldom, since it writes."""
        self._stamp(key_id, "last_used_at")

    def revoke(self, key_id: str) -> None:
        """Refuses the key from now on.

        Raises:
            NotFound: there is none.
        """
        self._stamp(key_id, "revoked_at")

    def _stamp(self, key_id: str, column: str) -> None:
        query = update(_table).where(_table.c.id == key_id).values({column: time.time()})
        with self._database.writing() as connection:
            changed = connection.execute(query).rowcount
        if not changed:
            raise NotFound("API key", key_id)
