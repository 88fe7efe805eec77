"""The command line: the only room that prints and exits."""

from structgp.cli.commands import main

__all__ = ["main"]
