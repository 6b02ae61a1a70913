"""Runs commands by NeMo-Run's tunnels, for `nemo_run.py`: lines of JSON in, lines of JSON out.

    python nemo_run_program.py '{"home": ..., "type": "local"}'
    python nemo_run_program.py '{"home": ..., "type": "ssh", "host": ..., "user": ..., ...}'

`home` is a folder for files of NeMo-Run's own. It is removed at the end, by whoever sees it: the
service kills this program, or is killed itself, and then this program's input ends.

It runs in NeMo-Run's environment, so it imports nothing of ours. Whatever NeMo-Run and its
libraries print goes to stderr; stdout is kept for answers.
"""

import importlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from typing import Any


def main() -> int:
    """Connects, says so, and answers one request after the other until its input ends."""
    wanted = json.loads(sys.argv[1])
    try:
        return serve(wanted)
    finally:
        shutil.rmtree(wanted["home"], ignore_errors=True)


def serve(wanted: dict[str, Any]) -> int:
    """Serves one connection; the exit code."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    requests = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nobody is there to type a password
    try:
        tunnel = connect(wanted)
    except (Exception, SystemExit) as error:  # it exits where it cannot authenticate
        say({"fault": f"no connection: {describe(error)}"})
        return 1
    say({"connected": True})
    for line in requests:
        request = json.loads(line)
        try:
            answer = run(tunnel, request["command"], request["text"])
        except (Exception, SystemExit) as error:
            say({"id": request["id"], "fault": describe(error)})
            return 1  # whoever asks again gets a new connection
        say({"id": request["id"], **answer})
    tunnel.cleanup()
    return 0


def connect(wanted: dict[str, Any]) -> Any:
    """A tunnel of NeMo-Run, connected."""
    os.environ["NEMORUN_HOME"] = wanted["home"]
    client = importlib.import_module("nemo_run.core.tunnel.client")

    if wanted["type"] == "local":
        return client.LocalTunnel(job_dir=wanted["home"])
    tunnel = client.SSHTunnel(
        host=wanted["host"],
        user=wanted["user"],
        port=wanted["port"],
        identity=wanted["identity"],
        job_dir="/",
    )

    def refuse(*_: object) -> None:
        raise RuntimeError("the login node does not take the key, and nobody can type a password")

    tunnel.auth_handler = tunnel.fallback_auth_handler = refuse
    tunnel.connect()
    return tunnel


def run(tunnel: Any, command: str, text: str) -> dict[str, Any]:
    """Runs a command to its end, with `text` as its input.

    The text goes as a file: the library behind these tunnels feeds an input character by character.
    """
    if not text:
        return told(tunnel.run(f"{command} </dev/null", hide=True, warn=True, in_stream=False))
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="planish-") as here:
        here.write(text)
        here.flush()
        there = f"/tmp/planish-{secrets.token_hex(16)}"
        tunnel.put(here.name, there)
    feeding = f"{command} <{there}; code=$?; rm -f {there}; exit $code"
    return told(tunnel.run(feeding, hide=True, warn=True, in_stream=False))


def told(ran: Any) -> dict[str, Any]:
    """What a command said."""
    return {"code": ran.exited, "output": ran.stdout, "errors": ran.stderr}


def describe(error: BaseException) -> str:
    """An error, for people."""
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
