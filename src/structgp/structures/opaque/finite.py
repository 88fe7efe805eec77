"""A log-likelihood of training data must be finite at every draw."""

from __future__ import annotations

from torch import Tensor

from structgp.errors import LikelihoodError


def all_finite(values: Tensor) -> Tensor:
    """``values`` (S, B) as they are; LikelihoodError, naming a sequence of the batch, if one of them is
    not finite."""
    bad = ~values.detach().isfinite()
    if not bool(bad.any()):
        return values
    draw, row = bad.nonzero()[0].tolist()
    share = 100 * float(bad[:, row].double().mean())
    raise LikelihoodError(
        "likelihood",
        f"log p is {float(values[draw, row].detach())} at {share:.3g} % of the draws, so that "
        "its expectation, and with it the bound, does not exist",
        "return finite numbers for training data: compute in log space, or mix in a small "
        "probability of any labelling",
        row,
    )
