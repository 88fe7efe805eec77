"""Numbers in text files."""

from __future__ import annotations

import math

from structgp.data.arrays import LARGEST
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
