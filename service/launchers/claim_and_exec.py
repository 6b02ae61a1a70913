"""The first code of an attempt's process: takes the attempt for itself, then becomes the driver.

    python -I -S claim_and_exec.py RECORD PIPE COMMAND...

A server that is killed just after it started this process cannot know, once it is back, whether the
attempt runs. It starts another one, and the two settle it here: each offers a file with its own pid
and start time under the name RECORD, by a hard link, which only one of them can make. The other
leaves. So RECORD exists before the driver does anything, is whole, names the one process that is
the driver (exec keeps pid and start time), and can be made by `cancel` too, to shut out a process
that has not come this far yet.

PIPE is the number of a file descriptor: closed without a word by a successful exec, else the
process writes there why it failed. Imports are few, since a driver waits for them.
"""

import os
import sys


def _claim(record: str) -> bool:
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        start_ticks = int(file.read().rpartition(")")[2].split()[19])
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    offer = f"{record}.{os.getpid()}"
    with open(offer, "w", encoding="ascii") as file:
        file.write(
            f'{{"pid": {os.getpid()}, "start_ticks": {start_ticks}, "boot_id": "{boot_id}"}}\n'
        )
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(offer, record)
    except FileExistsError:
        return False
    finally:
        os.unlink(offer)
    folder = os.open(os.path.dirname(record), os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(folder)
    os.close(folder)
    return True


def _main(record: str, pipe: int, command: list[str]) -> int:
    try:
        if not _claim(record):
            return 0
        os.set_inheritable(pipe, False)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(pipe, f"{command[0]}: {error}".encode())
        return 127


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
