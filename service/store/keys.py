"""API keys, by the hash of their secret."""

import time

from sqlalchemy import func, insert, select, update
from sqlalchemy.exc import IntegrityError

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
        """Accepts a key from now on; one that is known already, a revoked one too, is returned as
        it is."""
        try:
            return self._add(name, secret_hash)
        except IntegrityError:
            # On PostgreSQL, services that start together with one key get this far together.
            return self._add(name, secret_hash)

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
        """Keeps the time of the last use; call it seldom, since it writes.

        Raises:
            NotFound: there is none.
        """
        query = update(_table).where(_table.c.id == key_id).values(last_used_at=time.time())
        with self._database.writing() as connection:
            changed = connection.execute(query).rowcount
        if not changed:
            raise NotFound("API key", key_id)

    def revoke(self, key_id: str) -> tuple[ApiKey, bool]:
        """Refuses the key from now on, for good.

        Returns:
            The key, and whether it was accepted until now; the time of the first revocation stays.

        Raises:
            NotFound: there is none.
        """
        mine = _table.c.id == key_id
        accepted = update(_table).where(mine, _table.c.revoked_at.is_(None))
        with self._database.writing() as connection:
            changed = connection.execute(accepted.values(revoked_at=time.time())).rowcount
            row = connection.execute(select(_table).where(mine)).mappings().one_or_none()
        if row is None:
            raise NotFound("API key", key_id)
        return ApiKey(**row), changed > 0

    def _add(self, name: str, secret_hash: str) -> ApiKey:
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
