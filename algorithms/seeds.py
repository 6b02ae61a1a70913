"""Seeds for draws that must be the same in a repeated or resumed run."""

import hashlib


def derive_seed(seed: int, *path: str | int) -> int:
    """A seed of 62 bits for one purpose, from the job's seed and the purpose's name.

    Purposes are independent of each other, and nothing is drawn in between, so step 7 draws the
    same whether or not steps 1 to 6 ran in this process.
    """
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
