"""All repositories over one database."""

from dataclasses import dataclass

from service.store.attempts import Attempts
from service.store.census import Census
from service.store.changes import Changes
from service.store.claims import Claims
from service.store.database import Database
from service.store.events import Events
from service.store.files import Files
from service.store.jobs import Jobs
from service.store.keys import ApiKeys
from service.store.migrate import migrate


@dataclass(frozen=True, slots=True)
class Store:
    """What the service keeps."""

    database: Database
    changes: Changes
    """Rings for every change of a job, its events among them."""
    wishes: Changes
    """Rings for what the reconciler must act on: a new job, a cancellation."""
    jobs: Jobs
    attempts: Attempts
    claims: Claims
    events: Events
    files: Files
    keys: ApiKeys
    census: Census

    @classmethod
    def open(cls, url: str) -> "Store":
        """Connects, brings the schema up to date, and returns the repositories."""
        database = Database(url)
        try:
            migrate(database)
        except BaseException:
            database.close()
            raise
        changes, wishes = Changes(), Changes()
        return cls(
            database=database,
            changes=changes,
            wishes=wishes,
            jobs=Jobs(database, changes, wishes),
            attempts=Attempts(database, changes),
            claims=Claims(database),
            events=Events(database, changes),
            files=Files(database),
            keys=ApiKeys(database),
            census=Census(database),
        )

    def close(self) -> None:
        """Closes the connections."""
        self.database.close()
