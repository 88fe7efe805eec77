"""Errors and warnings of this package: where something went wrong, what, and what to do about it.

Every error a user can cause is a :class:`StructgpError` whose text is one line. The command line
prints that line and exits with status 2; Python users catch it as a ``ValueError``.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from typing import Any

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep

MOST_CHARACTERS = 400
"""Largest number of characters in each part of an error. Errors quote the data, and a cell of a broken file
may hold a megabyte."""


def cut(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text on one line; its middle is left out where it has more than ``most`` characters."""
    text = " ".join(text.splitlines()) if text.isprintable() is False else text
    if len(text) <= most:
        return text
    return f"{text[: most * 2 // 3]} [...] {text[-most // 4 :]}"


class StructgpError(ValueError):
    """Base of every error that is the input's fault, not the program's."""


class InputError(StructgpError):
    """Data that cannot be used.

    Parameters
    ----------
    place : where, e.g. ``train.conll:4031`` or ``X[3][7]``.
    problem : what is wrong, e.g. ``3 columns where line 1 has 4``.
    remedy : what the reader should do.
    """

    def __init__(self, place: str, problem: str, remedy: str) -> None:
        super().__init__(f"{cut(place)}: {cut(problem)}; {cut(remedy)}")
        self.place = place
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.place, self.problem, self.remedy)


class ModelFileError(InputError):
    """A model file that is missing, damaged, foreign or of a later format."""


class NotThereError(InputError, AttributeError):
    """An attribute that this model does not have; ``hasattr`` is False for it."""


class LikelihoodError(InputError):
    """A user's likelihood raised an error, or returned something that is not a log-probability.

    ``sequence`` is the position in its batch of the sequence where this happened, None if unknown.
    """

    def __init__(self, place: str, problem: str, remedy: str, sequence: int | None = None) -> None:
        super().__init__(place, problem, remedy)
        self.sequence = sequence

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.place, self.problem, self.remedy, self.sequence)


class StructgpWarning(UserWarning):
    """Something the user should know that does not stop the work."""

    def __init__(self, message: str) -> None:
        super().__init__(cut(message, 2 * MOST_CHARACTERS))


def warn_caller(message: str) -> None:
    """Issues a StructgpWarning at the line that called this package, however many of the package's own
    functions lie in between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, functools.__file__)):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, StructgpWarning, stacklevel=level)
