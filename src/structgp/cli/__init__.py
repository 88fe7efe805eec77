"""The command line: the only room that prints and exits."""

import os

# Before torch is imported. OpenMP's threads spin while they wait for each other; if they sleep instead,
# a fit is several times faster on a machine that does other work as well.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from structgp.cli.commands import main
from structgp.cli.deciding import calibrate, expect
from structgp.cli.fitting import train
from structgp.cli.tagging import next_command, tag

for command in (train, tag, next_command, expect, calibrate):
    main.add_command(command)

__all__ = ["main"]
