"""What a function as likelihood must give, and what it can be given."""

from __future__ import annotations

from torch import Tensor

from structgp.errors import InputError, LikelihoodError


def one_table(g: Tensor) -> None:
    """InputError unless g is (S, V, V): a function sees one table of transition scores."""
    if g.dim() != 3:
        raise InputError(
            "structure",
            "a function cannot have transitions that depend on features",
            "use chain(features=...), or leave the features to the tokens",
        )


def all_finite(values: Tensor) -> Tensor:
    """``values`` (S, B) unchanged; LikelihoodError, naming a sequence of the batch, if one of them is not
    finite: the bound needs the expectation of a log-likelihood of training data."""
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
