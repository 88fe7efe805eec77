"""Units of compiled work, shared out to as many threads as torch uses."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import torch

WORTH_A_THREAD = 1_000_000
"""Products of a number by a number below which a second thread does not pay."""

WORTH_A_SWEEP = 200_000
"""The same for sweeps over graphs, which spend more on each product."""

Result = TypeVar("Result")


def share(
    work: Callable[[int, int], Result], units: int, cost: int, worth: int = WORTH_A_THREAD
) -> list[Result]:
    """Calls work(first, last) so that each unit is done once; what the calls return. cost : products of a
    number by a number, in all. worth : of those, how many a second thread is worth."""
    n = max(1, min(torch.get_num_threads(), units, cost // worth))
    first, *others = pairwise(units * i // n for i in range(n + 1))
    if not others:
        return [work(*first)]
    with ThreadPoolExecutor(len(others)) as pool:
        running = [pool.submit(work, *ends) for ends in others]
        done = work(*first)
    return [done, *(part.result() for part in running)]  # raises what went wrong there
