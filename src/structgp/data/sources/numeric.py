"""Numbers in text files: how a cell is read, and columns of numbers brought to one scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from structgp.data.sources.columns import ColumnSequence
from structgp.data.vocabulary import LARGEST
from structgp.errors import InputError


def parse_number(text: str, place: str, what: str) -> float:
    """The finite number in ``text``; errors name ``place`` and call the number ``what``."""
    try:
        # Python alone reads 1_000 as a thousand.
        number = math.nan if "_" in text else float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(place, f"{what} is {text!r}", "give a finite number such as 2 or -0.5")
    if abs(number) > LARGEST:
        raise InputError(place, f"{what} is {text!r}, too large", "rescale the feature")
    return number


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
    def learn(
        cls, columns: Sequence[int], sequences: Iterable[ColumnSequence], name: str
    ) -> NumericColumns:
        """Mean and standard deviation from the training sequences; errors name ``name:line``."""
        columns = tuple(dict.fromkeys(columns))
        values = np.concatenate([read_numbers(s.rows, columns, name, s.line) for s in sequences])
        # The standard deviation of equal numbers may differ from 0 by rounding, that of tiny ones may be 0.
        found = values.std(0)
        sd = np.where((np.ptp(values, 0) > 0) & (found > 0), found, 1.0)
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
