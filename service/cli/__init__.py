"""The command line: `planish`. `docs/cli.md` describes it."""

from service.cli.main import main

__all__ = ["main"]
