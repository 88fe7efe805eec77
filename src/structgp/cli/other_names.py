"""Commands and options of other taggers that users may type, and what to type here instead."""

from __future__ import annotations

import shlex
from typing import Any

import click

from structgp.errors import InputError

COMMANDS = {
    "learn": "train",
    "crf_learn": "train",
    "fit": "train",
    "test": "tag",
    "crf_test": "tag",
    "predict": "tag",
}
# Options of crf_learn and of wapiti train, with what to do instead.
TRAIN = {
    "-c": ("regularisation is learned from the data", "leave it out"),
    "-f": ("rare values share a feature, so there is no cut-off", "leave it out"),
    "-a": ("there is one model", "leave it out; --inference chooses another optimiser"),
    "-e": ("the fit ends when its bound has settled", "leave it out; Ctrl-C keeps the model so far"),
    "-m": ("the fit ends when its bound has settled", "leave it out; -o names the model"),
    "-p": ("threads are set in the environment", "use OMP_NUM_THREADS=N structgp train ..."),
    "-t": ("models have one format", "leave it out; 'structgp describe MODEL' prints a model"),
    "-d": ("not an option of train", "use --dev FILE for labelled data to score"),
}

LONG = 200
"""Commands of this many characters or more are not repeated in a message."""


class Command(click.Command):
    """A command that understands what users of crf_learn and crf_test are likely to type."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        if any(p.name == "model_path" and isinstance(p, click.Argument) for p in self.params):
            args = _model_first(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if self.name == "train" and error.option_name in TRAIN:
                raise InputError(f"train {error.option_name}", *TRAIN[error.option_name]) from error
            raise
        except click.MissingParameter as error:
            if named := _named(self.name, error.param, given):
                raise InputError(*named) from error
            raise


def _model_first(args: list[str]) -> list[str]:
    """Moves the model to the front: for commands with the argument MODEL, ``-m MODEL`` means the same."""
    for n, word in enumerate(args[:-1]):
        if word in ("-m", "--model"):
            return [args[n + 1], *args[:n], *args[n + 2 :]]
    return args


def _named(command: str | None, missing: click.Parameter | None, given: list[str]) -> Any:
    """Place, problem and remedy of an error if a model was given without its option; else None."""
    if not isinstance(missing, click.Option) or any(word.startswith("-") for word in given):
        return None  # a word could be a file or the value of an option
    if command == "train" and missing.name == "output" and len(given) > 2:
        words, usual = [*given[:-1], "-o", given[-1]], "TEMPLATE TRAIN -o MODEL"
        problem = "the model to write needs the option -o"
    elif missing.name == "model_path" and len(given) > 1:
        words, usual = ["-m", *given], "-m MODEL FILE"
        problem = "the model to read needs the option -m"
    else:
        return None
    typed = shlex.join(words)
    return str(command), problem, f"use structgp {command} {typed if len(typed) < LONG else usual}"
