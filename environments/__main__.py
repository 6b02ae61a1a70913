"""What a program that imports no environments asks of them, as JSON over standard streams.

    python -m environments describe [ID ...]
        A list of {id, version, summary, config_schema, max_turns, reward_range, tools}: of all
        environments, or of the newest version of those named.
    python -m environments check < REFERENCE
        REFERENCE is {id, version, max_turns, config}, as in a job's `environment`. The answer is
        {"version": the one that is meant} and exit code 0, or {"errors": [{loc, message}]} and 1.

Any other exit code is a fault of the program, told on standard error.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from environments import registry
from environments.check import check
from environments.config import InvalidConfig, Problem
from environments.registry import UnknownEnvironment


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m environments", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    describing = commands.add_parser("describe", help="environments and their settings, as JSON")
    describing.add_argument("ids", nargs="*", metavar="ID")
    commands.add_parser("check", help="checks a reference read from standard input")
    asked = parser.parse_args(arguments)
    # Libraries print as they load; standard output is for the answer alone.
    answer_to = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        answer = describe(asked.ids) if asked.command == "describe" else {"version": _check_input()}
        code = 0
    except UnknownEnvironment as error:
        answer, code = _errors([Problem(("id",), str(error))]), 1
    except InvalidConfig as error:
        answer, code = _errors(error.problems), 1
    with os.fdopen(answer_to, "w") as stream:
        json.dump(answer, stream)
        stream.write("\n")
    return code


def describe(ids: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The environments of the registry, with the JSON schema of their settings.

    Args:
        ids: only these, in their newest version; empty for all in all versions.

    Raises:
        UnknownEnvironment: for an id that is not in the registry.
    """
    wanted = [(id, None) for id in ids] or registry.list_environments()
    found = [registry.get(id, version) for id, version in wanted]
    return [
        {
            "id": environment.id,
            "version": environment.version,
            "summary": environment.summary,
            "config_schema": environment.config_model.model_json_schema(),
            "max_turns": environment.max_turns,
            "reward_range": list(environment.reward_range),
            "tools": list(environment.tools),
        }
        for environment in found
    ]


def _check_input() -> int:
    try:
        reference = json.load(sys.stdin)
    except (ValueError, RecursionError) as error:
        raise InvalidConfig([Problem((), f"standard input is not JSON: {error}")]) from error
    if not isinstance(reference, dict):
        raise InvalidConfig([Problem((), "expected a JSON object")])
    return check(reference).type.version


def _errors(problems: Sequence[Problem]) -> dict[str, Any]:
    return {"errors": [{"loc": list(item.loc), "message": item.message} for item in problems]}


if __name__ == "__main__":
    sys.exit(main())
