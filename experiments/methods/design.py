"""Turns sequences in any accepted form into one sparse matrix, for methods that are linear in features.

Column d holds the value of feature d. A template has one column for each value seen in training, which is 1
for tokens with that value; numbers are kept as they are. Features unseen in training have no column, and so
no weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from structgp.data.encode import FeatureEncoder
from structgp.data.labels import LabelEncoder, check_all_labelled
from structgp.data.vocabulary import Block
from structgp.errors import InputError


@dataclass(frozen=True)
class Tokens:
    """All tokens of some sequences, one after another.

    features : (N, D). lengths : lengths of the sequences, including empty ones; they sum to N.
    """

    features: csr_array
    lengths: list[int]

    @property
    def starts(self) -> list[int]:
        """Index of the first token of each sequence, followed by N."""
        return self.starts_of(self.lengths)

    def split(self, rows: np.ndarray) -> list[np.ndarray]:
        """Splits an array (N, ...) over all tokens into one (T, ...) per sequence."""
        return [rows[a:b] for a, b in pairwise(self.starts)]

    @staticmethod
    def starts_of(lengths: Sequence[int]) -> list[int]:
        return [0, *np.cumsum(lengths, dtype=int).tolist()]


@dataclass
class LinearFeatures:
    """Assigns features to columns. features : how lists of strings are read, as in
    :class:`structgp.data.encode.FeatureEncoder`."""

    features: str = "auto"
    encoder: FeatureEncoder = field(init=False)

    def fit(self, X: Sequence[Any]) -> LinearFeatures:
        self.encoder = FeatureEncoder(self.features).fit(X)
        return self

    def transform(self, X: Iterable[Any]) -> Tokens:
        """X as one sparse matrix. Time and memory are linear in the number of feature values."""
        rows = self.encoder.transform(X)
        lengths = [len(matrix) for matrix in rows]
        starts = Tokens.starts_of(lengths)
        none = np.empty(0, dtype=int)
        token, column, value, begin = [none], [none], [np.empty(0)], 0
        for block in self.encoder.blocks:
            for start, matrix in zip(starts, rows, strict=False):
                if len(matrix):
                    t, d, v = self._entries(block, matrix)
                    token.append(t + start)
                    column.append(d + begin)
                    value.append(v)
            begin += self._n_columns(block)
        where = np.concatenate(token), np.concatenate(column)
        shape = (starts[-1], begin)
        return Tokens(csr_array((np.concatenate(value), where), shape=shape), lengths)

    def _n_columns(self, block: Block) -> int:
        if block.kind == "categorical":
            return sum(map(len, self.encoder.values))
        if block.kind == "sparse":
            return len(self.encoder.attributes) or len(self.encoder.columns)
        return self.encoder.width

    def _entries(self, block: Block, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The nonzero entries of rows (T, W) in a block: token, column within the block, and value."""
        part = matrix[:, block.start : block.stop]
        if block.kind == "dense":
            t, d = np.nonzero(part)
            return t, d, part[t, d]
        if block.kind == "sparse":
            ids, values = part[:, 0::2].astype(int), part[:, 1::2]
            t, slot = np.nonzero((ids >= 0) & (ids < self._n_columns(block)) & (values != 0))
            return t, ids[t, slot], values[t, slot]
        sizes = np.array([len(known) for known in self.encoder.values])
        ids = part.astype(int)
        t, p = np.nonzero((ids >= 0) & (ids < sizes))
        return t, ids[t, p] + (np.cumsum(sizes) - sizes)[p], np.ones(len(t))


def read_out(X: Iterable[Any]) -> list[Any]:
    """X as a list, in which generators are replaced by lists."""
    return [x if hasattr(x, "__len__") or hasattr(x, "shape") else list(x) for x in X]


def checked_labels(X: Sequence[Any], y: Iterable[Sequence[str]]) -> tuple[list[list[str]], LabelEncoder]:
    """y as lists of strings that fit X, and an encoder of its labels, which must be two or more."""
    paths = check_all_labelled(X, list(y))
    labels = LabelEncoder().fit(paths)
    if len(labels.classes) < 2:
        raise InputError(
            "y",
            "no labels" if not labels.classes else f"every token has the label {labels.classes[0]!r}",
            "pass data with at least two labels",
        )
    return paths, labels
