"""The command line: the only room that prints and exits."""

import os
import signal
import threading

# Until there is someone to catch it, Ctrl-C ends the program without a traceback.
_IN_CHARGE = threading.current_thread() is threading.main_thread()
_BEFORE = signal.signal(signal.SIGINT, signal.SIG_DFL) if _IN_CHARGE else None

# Before torch is imported. OpenMP's threads spin while they wait for each other; if they sleep instead,
# a fit is several times faster on a machine that does other work as well.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from structgp.cli.commands import main  # noqa: E402

if _IN_CHARGE:
    signal.signal(signal.SIGINT, _BEFORE)

__all__ = ["main"]
