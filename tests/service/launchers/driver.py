"""A driver for tests: appends its attempt to JOB_DIR/starts, then does what it was told.

python driver.py [BEHAVIOUR...] JOB_DIR --attempt N

Runs with `python -I -S`, so it imports little.
"""

import json
import os
import signal
import subprocess
import sys
import time

*behaviours, job_dir, _, number = sys.argv[1:]
attempt_dir = f"{job_dir}/attempts/{number}"


def outcome(**fields: object) -> None:
    fresh = f"{attempt_dir}/.outcome"
    with open(fresh, "w", encoding="utf-8") as file:
        json.dump({"attempt": int(number), **fields}, file)
    os.replace(fresh, f"{attempt_dir}/outcome.json")


def events(count: int) -> None:
    with open(f"{attempt_dir}/events.jsonl", "w", encoding="utf-8") as file:
        for seq in range(1, count + 1):
            event = {"seq": seq, "time": time.time(), "kind": "progress", "step": seq, "data": {}}
            file.write(json.dumps(event) + "\n")
        file.write('{"seq": 99, "ti')  # a driver that is killed leaves half a line


def checkpoint() -> None:
    step = 10 * int(number)
    with open(f"{attempt_dir}/events.jsonl", "w", encoding="utf-8") as file:
        event = {"seq": 1, "time": time.time(), "kind": "checkpoint", "step": step, "data": {}}
        file.write(json.dumps(event) + "\n")


def children() -> None:
    """One child in the group, one in a session of its own, one that scrubbed its environment."""
    sleeper = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
    with open(f"{attempt_dir}/children", "w", encoding="ascii") as file:
        for extra in ({}, {"start_new_session": True}, {"env": {}}):
            file.write(f"{subprocess.Popen(sleeper, **extra).pid}\n")
    os.rename(f"{attempt_dir}/children", f"{job_dir}/children")


def ignore(*_: object) -> None:
    pass


with open(f"{job_dir}/starts", "a", encoding="ascii") as starts:
    starts.write(f"{number}\n")
for behaviour in behaviours:
    name, _, value = behaviour.partition("=")
    match name:
        case "events":
            events(int(value))
        case "checkpoint-until" if int(number) <= int(value):
            checkpoint()
        case "children":
            children()
        case "ignore-term":
            signal.signal(signal.SIGTERM, ignore)
        case "die-first" if number == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            print("last words")  # noqa: T201
            sys.exit(int(value))
        case "fail":
            outcome(status="failed", reason=value, message="it went wrong")
            sys.exit(1)
        case "print-environment":
            print(json.dumps(dict(os.environ)))  # noqa: T201
        case "succeed":
            outcome(status="succeeded")
        case "wait":
            deadline = time.monotonic() + 600
            while not os.path.exists(f"{job_dir}/go") and time.monotonic() < deadline:
                time.sleep(0.01)
