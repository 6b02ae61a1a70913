"""The first API key of a service.

Only a service that never had a key is given one unasked. Where all keys were revoked, somebody
wants nobody in: a restart, for which a crash is enough, must not let the next reader of the log in.
The same holds for the key that the operator brought, since the variable that names it outlives its
revocation.
"""

import logging

from service.auth.keys import hash_secret, new_key
from service.settings import BOOTSTRAP_KEY_VARIABLE, Settings
from service.store import Store

_log = logging.getLogger(__name__)


def ensure_first_key(store: Store, settings: Settings) -> str | None:
    """Makes sure that a new service can be called; the log says so where nobody can.

    A key that the operator brought (`settings.bootstrap_key`) is accepted from now on, also where
    there are others, unless it was revoked. Without one, the very first start makes one.

    Returns:
        The secret of a key that was made just now, for the operator to see this once; else None.
    """
    if settings.bootstrap_key is not None:
        _accept(store, settings.bootstrap_key.get_secret_value())
    elif not store.keys.listed():
        secret = new_key()
        store.keys.add("first", hash_secret(secret))
        return secret
    if store.keys.count() == 0:
        _log.warning(
            "no API key is accepted, since all were revoked; `planish keys new NAME` makes one"
        )
    return None


def _accept(store: Store, secret: str) -> None:
    key = store.keys.add("bootstrap", hash_secret(secret))
    if key.revoked_at is not None:
        _log.warning(
            "the key in %s was revoked (%s) and stays refused; set another one there",
            BOOTSTRAP_KEY_VARIABLE,
            key.id,
        )
