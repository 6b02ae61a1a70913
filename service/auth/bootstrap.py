"""The first API key of a service."""

from service.auth.keys import hash_secret, new_key
from service.settings import Settings
from service.store import Store


def ensure_first_key(store: Store, settings: Settings) -> str | None:
    """Makes sure that some key is accepted.

    A key that the operator brought (`settings.bootstrap_key`) is accepted from now on, also where
    there are others. Without one, the very first start makes one.

    Returns:
        The secret of a key that was made just now, for the operator to see this once; else None.
    """
    if settings.bootstrap_key is not None:
        store.keys.add("bootstrap", hash_secret(settings.bootstrap_key.get_secret_value()))
        return None
    if store.keys.count() > 0:
        return None
    secret = new_key()
    store.keys.add("first", hash_secret(secret))
    return secret
