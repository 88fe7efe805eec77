"""The command line: the only room that prints and exits."""

import os

# Before torch is imported. OpenMP's threads spin while they wait for each other; if they sleep instead,
# a fit is several times faster on a machine that does other work as well.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from structgp.cli.commands import main

__all__ = ["main"]
