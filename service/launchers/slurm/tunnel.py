"""How SLURM's commands and our files get to where SLURM is.

Commands are lists of words, never a line of shell; where a shell is in between (sshd starts one),
the far side of the tunnel quotes them.
"""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from service.launchers.protocol import LauncherUnavailable

_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SLURM_CONF", "TZ", "USER")
"""What a command gets to see of the service's variables. sbatch hands its own environment on to
the job, and the service's may hold secrets; SLURM_* and SBATCH_* ones would change options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A command that came to its end."""

    code: int
    output: str
    errors: str


class Tunnel(Protocol):
    """A way to SLURM. It may be used by several threads."""

    def run(self, command: Sequence[str], *, text: str = "", keep: int | None = None) -> Ran:
        """Runs a command to its end.

        Args:
            command: its words.
            text: for its standard input.
            keep: a descriptor that the command's process holds open until it ends, so that a lock
                on it outlives this process with it; only where the command is on this machine.

        Raises:
            LauncherUnavailable: it did not come to its end; it may have done its work.
        """

    def close(self) -> None:
        """Lets go of connections."""


class LocalTunnel:
    """Starts the commands on this machine."""

    def __init__(self, *, seconds: float, variables: Mapping[str, str]) -> None:
        """Starts nothing yet.

        Args:
            seconds: how long a command may take.
            variables: set for each command.
        """
        self._seconds = seconds
        self._environment = command_environment(variables)

    def run(self, command: Sequence[str], *, text: str = "", keep: int | None = None) -> Ran:
        """Runs a command to its end; see `Tunnel`."""
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment,
                pass_fds=() if keep is None else (keep,),
                start_new_session=True,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise LauncherUnavailable(f"{command[0]} cannot be run: {error}") from error
        with process:
            try:
                output, errors = process.communicate(text, timeout=self._seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise LauncherUnavailable(
                    f"{command[0]} gave no answer within {self._seconds:g} s"
                ) from None
        return Ran(code=process.returncode, output=output, errors=errors)

    def close(self) -> None:
        """There is nothing to let go of."""


def command_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of commands on this machine, with `variables`."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return kept | dict(variables)
