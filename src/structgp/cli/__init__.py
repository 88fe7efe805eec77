"""The command line: the only part of the package that prints and exits."""

import signal
import threading

# Until a command can catch it, Ctrl-C ends the program without a traceback.
_IN_CHARGE = threading.current_thread() is threading.main_thread()
_BEFORE = signal.signal(signal.SIGINT, signal.SIG_DFL) if _IN_CHARGE else None

from structgp.cli.commands import main  # noqa: E402

if _IN_CHARGE:
    signal.signal(signal.SIGINT, _BEFORE)

__all__ = ["main"]
