"""Dense features of column files: columns of numbers, and vectors of the words in a column.

Word vectors come from a text file, as word2vec, GloVe and fastText write it: one word per line, followed by
its D numbers, separated by spaces; the first line may give the number of words and D::

    2 3
    eggs 0.1 -0.2 0.3
    milk 0.0 0.5 -0.1
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import numpy as np

from structgp.data.sources.columns import ColumnSequence
from structgp.data.sources.lines import cannot_read, check_encoding
from structgp.data.sources.number_text import parse_number
from structgp.errors import InputError

_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Coverage:
    """How many of some tokens have a vector.

    as_written : number of tokens whose word is in the file; lower_case : number of tokens whose word is
    there only in lower case; missing : number of tokens without a vector, which get zeros. Two coverages
    are added by ``+``."""

    as_written: int = 0
    lower_case: int = 0
    missing: int = 0

    @property
    def n_tokens(self) -> int:
        return self.as_written + self.lower_case + self.missing

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(
            self.as_written + other.as_written,
            self.lower_case + other.lower_case,
            self.missing + other.missing,
        )

    def __str__(self) -> str:
        share = 1 - self.missing / max(1, self.n_tokens)
        ways = f"{self.as_written} as written, {self.lower_case} in lower case"
        return f"{share:.1%} of {self.n_tokens} tokens have a vector ({ways}), {self.missing} get zeros"


class WordVectors:
    """The vectors of a file, each read when it is first asked for.

    ``vectors["eggs"]`` is a (D,) array. A word that the file does not have gets the vector of the word in
    lower case, and zeros if that is missing too (``"eggs" in vectors`` tells). Opening reads the whole file
    once, to find the words and its digest, and keeps one entry per word in memory. If a word occurs twice,
    its first vector is used; words that contain a space are skipped.

    path : the file, which must not change while it is used. encoding : of its words; any in which spaces
    and line ends are those of ASCII. lower_case : False to look words up only as they are written.
    dimension : D. digest : SHA-256 of the file, in hexadecimal. size : of the file, in bytes.

    An InputError names ``path:line`` for a line that does not have D numbers (each number is checked when
    its word is asked for), and ``path`` for a file that cannot be read or has no vectors.

    Example
    -------
    >>> from pathlib import Path
    >>> _ = Path("vectors.txt").write_text("eggs 0.1 -0.2\\nmilk 0.0 0.5\\n")
    >>> WordVectors("vectors.txt")["eggs"]
    array([ 0.1, -0.2])
    >>> print(WordVectors("vectors.txt").coverage(["eggs", "Milk", "MILK", "figs"]))
    75.0% of 4 tokens have a vector (1 as written, 2 in lower case), 1 get zeros
    """

    def __init__(
        self, path: str | os.PathLike[str], *, encoding: str = "utf-8", lower_case: bool = True
    ) -> None:
        self.name, self.encoding, self.lower_case = os.fspath(path), encoding, lower_case
        check_encoding(encoding, self.name)
        if " \n".encode(encoding) != b" \n":
            problem = f"word vectors cannot be read in {encoding}"
            raise InputError(self.name, problem, "convert the file to utf-8")
        self.dimension, self.digest = 0, ""
        self._places: dict[bytes, tuple[int, int]] = {}
        self._known: dict[str, np.ndarray] = {}
        try:
            self.size = _regular_size(self.name)
            with open(self.name, "rb") as file:
                self._index(file)
        except OSError as error:
            raise cannot_read(self.name, error) from error
        if not self._places:
            raise InputError(self.name, "no vectors", "give one word per line: word v1 ... vD")

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, word: str) -> bool:
        return self._place(word) is not None

    def coverage(self, words: Iterable[str]) -> Coverage:
        """How many tokens with these words have a vector."""
        total = Coverage()
        for word, n in Counter(iter(words)).items():
            as_written, found = self._key(word) in self._places, word in self
            total += Coverage(n * as_written, n * (found - as_written), n * (not found))
        return total

    def __getitem__(self, word: str) -> np.ndarray:
        """(D,) the vector of a word, zeros if it has none."""
        found = self._known.get(word)
        if found is None:
            place = self._place(word)
            found = np.zeros(self.dimension) if place is None else self._read(*place)
            found.flags.writeable = False  # it is handed out again
            self._known[word] = found
        return found

    def _place(self, word: str) -> tuple[int, int] | None:
        """Offset and number of the line with the vector of a word, None if it has none."""
        place = self._places.get(self._key(word))
        if place is None and self.lower_case:
            place = self._places.get(self._key(word.lower()))
        return place

    def _key(self, word: str) -> bytes:
        return word.encode(self.encoding, errors="replace")

    def _index(self, file: BinaryIO) -> None:
        """Find where the line of each word starts, and its number."""
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
        """True if the line is a word and D numbers, False if its word contains a space; InputError if it
        does not have D numbers."""
        extra = len(fields) - 1 - self.dimension
        if extra > 0 and not _is_number(fields[1]):
            return False  # a word with a space in it
        if extra or not self.dimension:
            problem = f"{len(fields) - 1} numbers after the word, expected {self.dimension or 'some'}"
            raise InputError(place, problem, "correct the line, or the header if there is one")
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


def _regular_size(path: str) -> int:
    """Size of a file in bytes. InputError for a pipe or a device, which cannot be read twice, and may have
    no end."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # a folder cannot be opened
        raise InputError(path, "not a regular file", "write the vectors to a file")
    return found.st_size


def _beside(model: str, path: str) -> str | None:
    """Where a model may open the file that it calls ``path`` if the user does not say where it is: at that
    path, if it is in the model's own folder or below, else under the same name in that folder. A model file
    is not trusted to choose what else is opened."""
    folder = os.path.dirname(os.path.realpath(model))
    for place in (path, os.path.join(folder, os.path.basename(path))):
        found = os.path.realpath(place)
        if os.path.commonpath([folder, found]) == folder and os.path.isfile(found):
            return found
    return None


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class ColumnVectors:
    """The vectors of the words in one column of a file.

    scale : factor by which vectors are multiplied, so that the vectors of the training words have mean
    squared length 1, and a vector counts as much as one number. coverage : of the training tokens, None in
    models that do not know it."""

    vectors: WordVectors
    column: int
    scale: float
    coverage: Coverage | None = None

    @classmethod
    def learn(cls, vectors: WordVectors, column: int, words: Sequence[str]) -> ColumnVectors:
        """Scale and coverage from the words of the training tokens."""
        known = [word for word in words if word in vectors]
        if not known:
            problem = f"none of the words in column {column} of the training file has a vector"
            remedy = "name the column of the words with vector_column=, or give other vectors"
            raise InputError(vectors.name, problem, remedy)
        square = float(np.mean([vectors[word] @ vectors[word] for word in known]))
        scale = square**-0.5 if square > 0 else 1.0
        return cls(vectors, column, scale, vectors.coverage(words))

    def coverage_of(self, rows: Iterable[Sequence[str]]) -> Coverage:
        """How many of the tokens with these columns have a vector."""
        return self.vectors.coverage(row[self.column] for row in rows)

    def features(self, rows: Sequence[Sequence[str]], name: str, line: int) -> np.ndarray:
        """(T, D) the scaled vectors of the rows of one sequence."""
        return np.array([self.vectors[row[self.column]] for row in rows]) * self.scale

    def to_json(self) -> dict[str, Any]:
        """Path and digest of the file and how it is used; the vectors themselves are not kept."""
        return {
            "path": os.path.abspath(self.vectors.name),
            "sha256": self.vectors.digest,
            "size": self.vectors.size,
            "encoding": self.vectors.encoding,
            "lower_case": self.vectors.lower_case,
            "column": self.column,
            "scale": self.scale,
            "coverage": None if self.coverage is None else asdict(self.coverage),
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any], model: str, path: str | None) -> ColumnVectors:
        """The vectors that ``model`` was trained with, now at ``path``; None to look for them in
        the model's folder and below."""
        path = _beside(model, state["path"]) if path is None else path
        if path is None:
            problem = f"its word vectors, in training {state['path']!r}, are not in its folder"
            raise InputError(model, problem, "say where they are with vectors=")
        if "size" in state and os.path.isfile(path) and os.path.getsize(path) != state["size"]:
            raise _other_vectors(path, model)  # before all of it is read
        # Models saved before words were looked up in lower case do not know coverage either.
        lower_case, coverage = state.get("lower_case", False), state.get("coverage")
        vectors = WordVectors(path, encoding=state["encoding"], lower_case=lower_case)
        if vectors.digest != state["sha256"]:
            raise _other_vectors(path, model)
        return cls(vectors, state["column"], state["scale"], Coverage(**coverage) if coverage else None)


def _other_vectors(path: str, model: str) -> InputError:
    remedy = "give those with vectors=, or train again with these"
    return InputError(path, f"not the word vectors that {model} was trained with", remedy)


@dataclass(frozen=True)
class NumericColumns:
    """Columns of a file that hold numbers, shifted and scaled to mean 0 and variance 1 in training.

    columns : their places, counted from 0. mean, sd : (D,) of each column over the training tokens; sd is 1
    where all numbers are equal.

    Example
    -------
    >>> from structgp.data.sources import read_columns
    >>> file = read_columns(["two 1 QTY", "eggs 3 NAME"])
    >>> numbers = NumericColumns.learn([1], file.sequences, file.name)
    >>> numbers.features([("figs", "5")], file.name, 1)
    array([[3.]])
    """

    columns: tuple[int, ...]
    mean: tuple[float, ...]
    sd: tuple[float, ...]

    @classmethod
    def learn(cls, columns: Sequence[int], found: Iterable[ColumnSequence], name: str) -> NumericColumns:
        """Mean and standard deviation from the training sequences; errors name ``name:line``."""
        columns = tuple(dict.fromkeys(columns))
        values = np.concatenate([read_numbers(s.rows, columns, name, s.line) for s in found])
        # The standard deviation of equal numbers may differ from 0 by rounding, that of tiny ones may be 0.
        sd = values.std(0)
        sd = np.where((np.ptp(values, 0) > 0) & (sd > 0), sd, 1.0)
        return cls(columns, tuple(values.mean(0).tolist()), tuple(sd.tolist()))

    def features(self, rows: Sequence[Sequence[str]], name: str, line: int) -> np.ndarray:
        """(T, D) the scaled numbers in the rows of one sequence, which starts at ``name:line``."""
        values = read_numbers(rows, self.columns, name, line)
        return (values - np.array(self.mean)) / np.array(self.sd)

    def to_json(self) -> dict[str, Any]:
        return {"columns": list(self.columns), "mean": list(self.mean), "sd": list(self.sd)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> NumericColumns:
        return cls(tuple(state["columns"]), tuple(state["mean"]), tuple(state["sd"]))


def read_numbers(rows: Sequence[Sequence[str]], columns: Sequence[int], name: str, line: int) -> np.ndarray:
    """(T, D) the numbers in some columns of the rows of one sequence, which starts at ``name:line``."""
    found = np.empty((len(rows), len(columns)))
    for t, row in enumerate(rows):
        found[t] = [parse_number(row[c], f"{name}:{line + t}", f"column {c}") for c in columns]
    return found
