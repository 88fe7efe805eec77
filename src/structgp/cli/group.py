"""Errors and warnings of all commands: one line on standard error, and exit status 2 for an error."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import click

from structgp.cli.other_names import COMMANDS, Command
from structgp.errors import InputError, StructgpError, StructgpWarning

# Arguments of ``sources.learn`` and ``sources.from_json``, as errors name them, that are options here.
_ARGUMENT = re.compile(
    r"(?<!\S)(coverage|data_weight|dialect|encoding|field|level|missing|numeric|scheme|snap|vectors|"
    r"vector_column)=(?:True)?"
    r"(?=$|[ ,;])"
)


INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells: 128 plus the number of the signal."""


class Group(click.Group):
    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in COMMANDS and not ctx.resilient_parsing:
            here = COMMANDS[args[0]]
            raise InputError(
                args[0], "not a command", f"the command for this is '{here}': structgp {here} -h"
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with warnings.catch_warnings(), _ended_cleanly():
                for category in (DeprecationWarning, FutureWarning):  # of other packages, to their users
                    warnings.simplefilter("ignore", category)
                warnings.simplefilter("always", StructgpWarning)
                once = cache(show_warning)  # one line of many may have what it is about
                warnings.showwarning = lambda message, *_, **__: once(str(message))
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("structgp: interrupted", err=True)
            silence_stdout()
            ctx.exit(INTERRUPTED)
        except StructgpError as error:
            click.echo(f"structgp: error: {_in_options(error)}", err=True)
            ctx.exit(2)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                reason = error.strerror or str(error)
                click.echo(f"structgp: error: output: {reason}; choose another place", err=True)
                silence_stdout()
                ctx.exit(2)
            # The process that reads our output has ended, so nothing can be reported to it.
            sys.stderr.close()
            ctx.exit(1)


@contextmanager
def _ended_cleanly() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end the program by an exception, so that temporary files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def importing() -> Iterator[None]:
    """Turns the garbage collector off while torch is imported, and makes it ignore the half million
    permanent objects that the import creates: collecting them would take a fifth of the time of a short
    command."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    click.echo(f"structgp: warning: {message}", err=True)


def _in_options(error: StructgpError) -> StructgpError:
    """Replaces the names of Python arguments in an error by the names of the options."""
    if not isinstance(error, InputError):
        return error
    place, remedy = (
        _ARGUMENT.sub(lambda found: "--" + found[1].replace("_", "-"), text)
        for text in (error.place + "=", error.remedy)
    )
    return InputError(place.removesuffix("="), error.problem, remedy)


def silence_stdout() -> None:
    """Discards the rest of the buffer, since flushing it would fail again when the program ends."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
