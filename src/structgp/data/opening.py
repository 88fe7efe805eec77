"""Errors for files that cannot be opened and for encodings that do not exist."""

from __future__ import annotations

import errno

from structgp.errors import InputError

_CANNOT_OPEN = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "name a file in it",
    errno.EACCES: "ask for the right to read it",
    errno.EPERM: "ask for the right to read it",
}


def check_encoding(encoding: str, place: str) -> None:
    """Raise an :class:`InputError` at ``place`` if Python does not know this encoding of text."""
    try:
        "".encode(encoding)  # also refuses codecs that do not encode text, such as hex
    except (LookupError, ValueError) as error:
        remedy = "name one that Python knows, such as utf-8, euc-jp or latin-1, with encoding="
        raise InputError(place, f"unknown encoding {encoding!r}", remedy) from error


def cannot_read(place: str, error: OSError) -> InputError:
    """The error for a file that the system cannot open or read."""
    remedy = _CANNOT_OPEN.get(error.errno or 0, "check the file and the disk")
    return InputError(place, f"cannot be read ({error.strerror or error})", remedy)
