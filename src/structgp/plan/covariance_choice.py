"""Which form the covariances of inducing values have: full, low-rank or diagonal, by what they cost.

With R functions, K components, M inducing inputs, N tokens and rank r,

    full        8 K R M^2 bytes        R (N M^2 + M^3) multiplications a round
    low-rank    8 K R M (r + 1)        4 R N M r, two products with the precision, each there and back
    diagonal    8 K R M                R N M T, next to nothing

and 'auto' is the first of them that keeps within ``MOST_BYTES`` and ``MOST_WORK``. Natural gradients solve
for the means with the whole precision of a function, so that their time is the same under every form, and
only memory decides. SAGA and SGD hold gradients in the covariance itself, which a low-rank one never
forms; and the paper's presets are as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from structgp.gp import RANK, CovarianceForm
from structgp.gp.low_rank_fit import PASSES
from structgp.inference import Adam, Natural, SecondOrder
from structgp.paper import Blocks, MixtureFit
from structgp.plan.choose_optimizer import PRESETS, takes_second_order
from structgp.structures import Structure

MOST_BYTES = 1 << 29
"""Of the factors of the covariances. A round holds a few times as much."""

MOST_WORK = 2e12
"""Multiplications a round: a minute or two on one core."""


@dataclass(frozen=True)
class Form:
    """name, rank (0 unless low-rank), and in a few words why."""

    name: CovarianceForm
    rank: int
    reason: str


def choose_form(
    given: Any, structure: Structure, n_functions: int, n_inducing: int, n_tokens: int
) -> Form:
    """What ``covariance`` and ``covariance_rank`` of the estimator stand for on such data."""
    rank = min(n_inducing, RANK if given.covariance_rank is None else int(given.covariance_rank))
    asked: dict[str, Form] = {
        "full": Form("full", 0, "asked for"),
        "low-rank": Form("low-rank", rank, "asked for"),
        "diagonal": Form("diagonal", 0, "asked for"),
    }
    if given.covariance != "auto":
        return asked[given.covariance]
    if isinstance(given.inference, str) and given.inference in PRESETS:
        return Form("full", 0, "the paper's")
    N, M, R = n_tokens, n_inducing, n_functions
    pieces = given.n_components * R
    space = {"full": 8 * pieces * M**2, "low-rank": 8 * pieces * M * (rank + 1)}
    work = {"full": R * (N * M**2 + M**3), "low-rank": 2 * PASSES * R * N * M * rank}
    if _is_natural(given, structure):
        work = dict.fromkeys(work, 0)
    fits = {name: space[name] <= MOST_BYTES and work[name] <= MOST_WORK for name in space}
    price = f"full ones take {space['full'] / 1e9:.2g} GB"
    price += f" and {work['full']:.1e} multiplications a round" if work["full"] else ""
    if fits["full"]:
        return Form("full", 0, price)
    cheaper = rank < M and work["low-rank"] <= work["full"]
    if fits["low-rank"] and cheaper and _takes_low_rank(given.inference):
        return Form("low-rank", rank, price)
    return Form("diagonal", 0, price)


def _is_natural(given: Any, structure: Structure) -> bool:
    inference = given.inference
    if inference == "auto":
        full = given.pairwise_covariance == "full"
        return not takes_second_order(inference, structure, given.gradient, full)
    return inference == "natural" or isinstance(inference, Natural)


def _takes_low_rank(inference: Any) -> bool:
    """Whether it is sure to: an optimiser of one's own need not."""
    if isinstance(inference, str):
        return inference not in ("sgd", "saga")
    if isinstance(inference, MixtureFit):
        return _takes_low_rank(inference.first)
    return isinstance(inference, Adam | Blocks | Natural | SecondOrder)
