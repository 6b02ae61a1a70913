"""API keys: made with 256 random bits, kept only as a hash.

A key is no password: nobody chooses it, so it cannot be guessed from a list, and one round of
SHA-256 is enough (a slow hash protects low-entropy secrets). A key that an operator brings along
must be as long, which `KEY_PATTERN` asks for.
"""

import hashlib
import re
import secrets

KEY_PREFIX = "planish_"
KEY_PATTERN = re.compile(r"planish_[A-Za-z0-9_-]{20,200}")


def new_key() -> str:
    """A new API key, `planish_` and 43 URL-safe characters (32 random bytes)."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_secret(secret: str) -> str:
    """SHA-256 of a key or token in hex, which is all that is stored of it."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def same_hash(presented: str, stored: str) -> bool:
    """Whether a presented secret has the stored hash, in time that does not depend on where
    they differ."""
    return secrets.compare_digest(hash_secret(presented), stored)
