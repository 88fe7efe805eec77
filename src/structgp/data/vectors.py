"""Word vectors in a text file, as word2vec, GloVe and fastText write them.

One word a line, then its D numbers, separated by spaces; the first line may say how many words there
are and what D is::

    2 3
    eggs 0.1 -0.2 0.3
    milk 0.0 0.5 -0.1
"""

from __future__ import annotations

import hashlib
import os
from typing import BinaryIO

import numpy as np

from structgp.data.columns import cannot_read, check_encoding
from structgp.data.numbers import parse_number
from structgp.errors import InputError

_MARK = b"\xef\xbb\xbf"


class WordVectors:
    """The vectors of a file, each read when it is first asked for.

    ``vectors["eggs"]`` is a (D,) array, zeros for a word that the file does not have; ``"eggs" in
    vectors`` tells. Opening reads the whole file once, to find the words and its digest, and holds one
    entry a word in memory. Of a word that comes twice the first vector counts; one with a space in it
    cannot be found.

    Parameters
    ----------
    path : the file, which is to stay as it is.
    encoding : of its words; any in which spaces and line ends are those of ASCII.

    Attributes
    ----------
    dimension : D.
    digest : SHA-256 of the file, in hexadecimal.

    Raises
    ------
    InputError
        At ``path:line``, for a line that has not D numbers (one by one only when a word is asked
        for); at ``path``, for a file that cannot be read, or that is empty.
    """

    def __init__(self, path: str | os.PathLike[str], *, encoding: str = "utf-8") -> None:
        self.name, self.encoding = os.fspath(path), encoding
        check_encoding(encoding, self.name)
        if " \n".encode(encoding) != b" \n":
            raise InputError(
                self.name,
                f"word vectors cannot be found in {encoding} text",
                "convert the file to utf-8",
            )
        self.dimension, self.digest = 0, ""
        self._places: dict[bytes, tuple[int, int]] = {}
        self._known: dict[str, np.ndarray] = {}
        try:
            with open(self.name, "rb") as file:
                self._index(file)
        except OSError as error:
            raise cannot_read(self.name, error) from error
        if not self._places:
            raise InputError(self.name, "no vectors in it", "give a line a word: word v1 ... vD")

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, word: str) -> bool:
        return self._key(word) in self._places

    def __getitem__(self, word: str) -> np.ndarray:
        """(D,) the vector of a word, zeros if there is none."""
        found = self._known.get(word)
        if found is None:
            place = self._places.get(self._key(word))
            found = np.zeros(self.dimension) if place is None else self._read(*place)
            found.flags.writeable = False  # it is handed out again
            self._known[word] = found
        return found

    def _key(self, word: str) -> bytes:
        return word.encode(self.encoding, errors="replace")

    def _index(self, file: BinaryIO) -> None:
        """Where the line of each word begins, and its number."""
        digest, offset = hashlib.sha256(), 0
        header: list[bytes] | None = None
        for number, line in enumerate(file, start=1):
            digest.update(line)
            fields = (line.removeprefix(_MARK) if number == 1 else line).split()
            if number == 1 and len(fields) == 2 and all(field.isdigit() for field in fields):
                header = fields
            elif fields:
                if not self.dimension:
                    self.dimension = int(header[1]) if header else len(fields) - 1
                if self._is_vector(fields, f"{self.name}:{number}"):
                    self._places.setdefault(fields[0], (offset, number))
            offset += len(line)
        self.digest = digest.hexdigest()

    def _is_vector(self, fields: list[bytes], place: str) -> bool:
        """Whether the line has one word; InputError if it has not D numbers."""
        extra = len(fields) - 1 - self.dimension
        if extra > 0 and not _is_number(fields[1]):
            return False  # a word with a space in it
        if extra or not self.dimension:
            raise InputError(
                place,
                f"{len(fields) - 1} numbers after the word where {self.dimension or 'some'} belong",
                "correct the line, or the header if there is one",
            )
        return True

    def _read(self, offset: int, number: int) -> np.ndarray:
        try:
            with open(self.name, "rb") as file:
                file.seek(offset)
                fields = file.readline().split()[-self.dimension :]
        except OSError as error:
            raise cannot_read(self.name, error) from error
        place = f"{self.name}:{number}"
        text = [field.decode("ascii", errors="replace") for field in fields]
        return np.array([parse_number(v, place, f"number {i}") for i, v in enumerate(text, 1)])


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True
