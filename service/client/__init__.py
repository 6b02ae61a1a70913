"""A small client of the HTTP API. The CLI is built on it; so can be your scripts.

with Client("http://127.0.0.1:8000", api_key) as client:
    file = client.upload(Path("rows.jsonl"))
    job = client.submit({"name": "first", ...})
    for event in client.events(job.id):      # reconnects; ends with the job
        print(event.kind, event.step, event.data)
    client.download_export(job.id, Path("model"))
"""

from service.client.client import Client
from service.client.errors import ApiError, ClientError, ConnectionLost

__all__ = ["ApiError", "Client", "ClientError", "ConnectionLost"]
