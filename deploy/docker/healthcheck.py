"""The image's health check: exit code 0 where the service of this container answers.

It asks /healthz, which tells whether the process lives, and not /readyz: a restart mends no
database. The port is that of the image's command; a container that listens on another sets
PLANISH_HEALTH_PORT.
"""

import os
import sys
from http.client import HTTPConnection, HTTPException

SECONDS = 20.0


def main() -> int:
    """Asks once."""
    port = int(os.environ.get("PLANISH_HEALTH_PORT", "8000"))
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("GET", "/healthz")
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        sys.stderr.write(f"no answer on port {port}: {error}\n")
        return 1
    if status != 200:
        sys.stderr.write(f"/healthz answers {status}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
