"""Numbers in text files: one cell read, whole columns brought to one scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from structgp.data.forms import LARGEST
from structgp.errors import InputError


def parse_number(text: str, place: str, what: str) -> float:
    """The finite number that ``text`` is; ``place`` and ``what`` say in errors where it stands."""
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
    """Columns of a file that hold numbers, each shifted and scaled to mean 0 and variance 1 in training.

    Attributes
    ----------
    columns : which ones, counted from 0.
    mean, sd : (D,) of each over the training tokens; sd is 1 where all are equal.
    """

    columns: tuple[int, ...]
    mean: tuple[float, ...]
    sd: tuple[float, ...]

    @classmethod
    def fit(cls, columns: Sequence[int], values: np.ndarray) -> NumericColumns:
        """From values (N, D) of the training tokens."""
        # The standard deviation of equal numbers may differ from 0 by rounding, and that of tiny ones be 0.
        found = values.std(0)
        sd = np.where((np.ptp(values, 0) > 0) & (found > 0), found, 1.0)
        return cls(tuple(columns), tuple(values.mean(0).tolist()), tuple(sd.tolist()))

    def scaled(self, values: np.ndarray) -> np.ndarray:
        """(T, D) values as they are in the file -> (T, D) on the scale of training."""
        return (values - np.array(self.mean)) / np.array(self.sd)

    def to_json(self) -> dict[str, Any]:
        return {"columns": list(self.columns), "mean": list(self.mean), "sd": list(self.sd)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> NumericColumns:
        return cls(tuple(state["columns"]), tuple(state["mean"]), tuple(state["sd"]))


def read_numbers(
    rows: Sequence[Sequence[str]], columns: Sequence[int], name: str, line: int
) -> np.ndarray:
    """(T, D) the numbers in some columns of the rows of one sequence, which begins on ``line``."""
    return np.array(
        [
            [parse_number(row[c], f"{name}:{line + t}", f"column {c}") for c in columns]
            for t, row in enumerate(rows)
        ]
    ).reshape(len(rows), len(columns))
