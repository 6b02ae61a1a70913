#!/usr/bin/env -S python3 -I -S
"""A driver that does what JOB_DIR/behave says, with the standard library alone.

    driver.py [-m MODULE] JOB_DIR --attempt N [--log]

It stands where a worker's python would, and keeps to `service.spec.attempt`: the first start of an
attempt makes `started`, holds `driver.lock`, raises the fence if it is behind, and writes
`outcome.json` last. A second start under the same number writes NODE_FAILURE; one below the fence,
or beside a living first, writes nothing. Each start that gets to work is a line in JOB_DIR/starts.

JOB_DIR/behave holds one behaviour a line, done in this order. `N:` before it restricts it to
attempt N, `N-:` to N and later ones.

    print=TEXT        a line of the log
    events=COUNT      so many events in the spool
    children          a child of its own session, that touches JOB_DIR/beats/PID ten times a second
    ignore-term       takes no notice of TERM and USR1 from here on
    slow-term=SECONDS takes so long to end when asked to
    wait              until JOB_DIR/go is there (or JOB_DIR/go-N), 15 minutes at most
    eat-memory=GIB    takes so much memory, in steps, and keeps it until `go`
    die               SIGKILL to itself
    exit=CODE         without an outcome
    fail=REASON       outcome, code 1
    succeed           outcome, code 0
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

EXIT_FAILED, EXIT_STALE = 1, 2
WAIT_SECONDS = 900


class Attempt:
    """One start of one attempt."""

    def __init__(self, job_dir: str, number: int) -> None:
        self.job_dir, self.number = job_dir, number
        self.folder = f"{job_dir}/attempts/{number}"
        self.slow = 0.0
        self.started: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        os.makedirs(self.folder, exist_ok=True)
        fence = self._raise_fence()
        lock = os.open(f"{self.folder}/driver.lock", os.O_RDWR | os.O_CREAT, 0o644)  # until it ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return EXIT_STALE
        if fence > self.number or os.path.exists(f"{self.folder}/outcome.json"):
            return EXIT_STALE
        try:
            os.close(os.open(f"{self.folder}/started", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            self.outcome(status="failed", reason="NODE_FAILURE", message="its first start was lost")
            return EXIT_FAILED
        append(f"{self.job_dir}/starts", f"{self.number}\n")
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._stop)
        for behaviour in self._behaviours():
            name, _, value = behaviour.partition("=")
            code = getattr(self, name.replace("-", "_"))(value)
            if code is not None:
                return code
        return 0

    def outcome(self, **fields: object) -> None:
        fresh = f"{self.folder}/.outcome"
        with open(fresh, "w", encoding="utf-8") as file:
            json.dump({"attempt": self.number, **fields}, file)
        os.replace(fresh, f"{self.folder}/outcome.json")

    def print(self, text: str) -> None:
        say(text)

    def events(self, count: str) -> None:
        for seq in range(1, int(count) + 1):
            event = {"seq": seq, "time": time.time(), "kind": "progress", "step": seq, "data": {}}
            append(f"{self.folder}/events.jsonl", json.dumps(event) + "\n")

    def children(self, _: str) -> None:
        os.makedirs(f"{self.job_dir}/beats", exist_ok=True)
        beat = (
            "import os, sys, time\n"
            "while True: open(f'{sys.argv[1]}/{os.getpid()}', 'w').close(); time.sleep(0.1)"
        )
        command = [sys.executable, "-I", "-S", "-c", beat, f"{self.job_dir}/beats"]
        child = subprocess.Popen(command, start_new_session=True)
        self.started.append(child)
        while not os.path.exists(f"{self.job_dir}/beats/{child.pid}"):
            time.sleep(0.05)
        append(f"{self.job_dir}/children", f"{child.pid}\n")

    def ignore_term(self, _: str) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)

    def slow_term(self, seconds: str) -> None:
        self.slow = float(seconds)

    def wait(self, _: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            if any(os.path.exists(f"{self.job_dir}/{go}") for go in ("go", f"go-{self.number}")):
                return
            time.sleep(0.05)

    def eat_memory(self, gib: str) -> None:
        kept = []
        for _ in range(int(float(gib) * 64)):
            kept.append(os.urandom(16 << 20))  # zero pages would not count
            time.sleep(0.05)
        self.wait("")

    def die(self, _: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def exit(self, code: str) -> int:
        say("last words")
        return int(code)

    def fail(self, reason: str) -> int:
        self.outcome(status="failed", reason=reason, message="it went wrong")
        return EXIT_FAILED

    def succeed(self, _: str) -> int:
        self.outcome(status="succeeded")
        return 0

    def _behaviours(self) -> Iterator[str]:
        with open(f"{self.job_dir}/behave", encoding="utf-8") as file:
            for line in file.read().splitlines():
                when, colon, behaviour = line.partition(":")
                if not colon or not when.rstrip("-").isdecimal():
                    yield line
                elif int(when.rstrip("-")) == self.number or (
                    when.endswith("-") and int(when[:-1]) <= self.number
                ):
                    yield behaviour

    def _raise_fence(self) -> int:
        """The newest attempt's number, which is this one's or higher afterwards."""
        path = f"{self.job_dir}/fence"
        with open(f"{path}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            newest = 0
            if os.path.exists(path):
                with open(path, encoding="ascii") as file:
                    newest = int(file.read())
            if newest < self.number:
                with open(f"{path}.{os.getpid()}", "w", encoding="ascii") as file:
                    file.write(f"{self.number}\n")
                os.replace(f"{path}.{os.getpid()}", path)
            return max(newest, self.number)

    def _stop(self, number: int, _frame: object) -> None:
        for other in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(other, signal.SIG_IGN)  # it knows by now
        name = signal.Signals(number).name
        say(f"asked to end by {name}")
        time.sleep(self.slow)
        for child in self.started:
            child.kill()  # as a driver ends its ranks; one that is killed cannot
        reason = "TIMEOUT" if name == "SIGUSR1" else "PREEMPTED"
        if os.path.exists(f"{self.folder}/stop"):
            with open(f"{self.folder}/stop", encoding="ascii") as file:
                reason = file.read().strip()
        self.outcome(status="failed", reason=reason, message=f"stopped by {name}")
        os._exit(EXIT_FAILED)


def append(path: str, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def main(arguments: list[str]) -> int:
    if arguments[0] == "-m":
        del arguments[:2]
    job_dir, number = arguments[0], int(arguments[arguments.index("--attempt") + 1])
    attempt = Attempt(job_dir, number)
    os.makedirs(attempt.folder, exist_ok=True)
    if "--log" in arguments:
        log = os.open(f"{attempt.folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    return attempt.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
