"""Files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from structgp.errors import InputError

_REMEDIES = {
    errno.ENOSPC: "free some space or choose another disk",
    errno.EDQUOT: "free some space or choose another disk",
    errno.ENOENT: "create its folder first",
    errno.ENOTDIR: "name a file in an existing folder",
    errno.EISDIR: "name a file, not a folder",
    errno.EACCES: "choose a place you may write to",
    errno.EPERM: "choose a place you may write to",
    errno.EROFS: "choose a place you may write to",
    errno.ENAMETOOLONG: "choose a shorter name",
}


@contextmanager
def atomic_write(
    path: str | os.PathLike[str], mode: Literal["w", "wb"], *, encoding: str = "utf-8"
) -> Iterator[Any]:
    """Open ``path`` for writing; the file appears there when the block ends without an error.

    The text goes to a temporary file in the same folder, which replaces ``path`` at the end (after
    an fsync, so one disk flush per file). When the block raises, or the disk is full, the temporary
    file is removed and a file that was at ``path`` is unchanged. The new file keeps the permissions
    of the one it replaces; a symbolic link keeps pointing to the file it names. A path that cannot
    be replaced, such as ``/dev/stdout`` or a named pipe, is written to directly.

    mode : ``"wb"`` for bytes, ``"w"`` for text, without translation of line ends. An ``OSError`` about
    the file itself becomes an InputError at ``path``; errors of the block about other files stay."""
    if mode not in ("w", "wb"):
        raise ValueError(f"mode {mode!r}; use 'w' or 'wb'")
    text = {} if mode == "wb" else {"encoding": encoding, "newline": ""}
    if not isinstance(path, str | os.PathLike):
        problem = f"expected a path, got a {type(path).__name__}"
        raise InputError("path", problem, "name the file to write")
    place = os.fspath(path)
    if not place or "\0" in place:
        raise InputError("path", "not a name of a file" if place else "no name", "name the file to write")
    target = os.path.realpath(place)
    temporary = os.path.join(os.path.dirname(target), f".structgp-{secrets.token_hex(8)}.tmp")
    try:
        before = os.stat(place) if os.path.exists(place) else None
        if before is not None and not stat.S_ISREG(before.st_mode):
            with open(place, mode, **text) as handle:  # type: ignore[call-overload]
                yield handle
            return
        # A rename needs rights on the folder only; a read-only file must not be replaced.
        if before is not None and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), target)
        try:
            with open(temporary, mode.replace("w", "x"), **text) as handle:  # type: ignore[call-overload]
                yield handle
                handle.flush()
                os.fsync(handle.fileno())
            if before is not None:
                os.chmod(temporary, stat.S_IMODE(before.st_mode))
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        if error.filename not in (None, place, target, temporary):
            raise
        remedy = _REMEDIES.get(error.errno or 0, "check the path and the disk")
        raise InputError(place, f"cannot be written ({error.strerror or error})", remedy) from error
