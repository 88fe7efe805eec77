"""Chooses which annotator to ask about which sequence, where the labels would tell most about the truth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from structgp.api.estimator import StructuredGPClassifier
from structgp.data.annotations import Annotations
from structgp.data.examples import as_list
from structgp.errors import InputError


class Ask(NamedTuple):
    """A question: sequence number ``sequence`` should be labelled by ``annotator``. The expected
    information about its true labels is ``gain`` nats."""

    sequence: int
    annotator: str
    gain: float


def who_to_ask(
    model: StructuredGPClassifier,
    X: Iterable[Any],
    n: int = 10,
    *,
    annotations: Annotations | None = None,
    costs: Mapping[str, float] | None = None,
) -> list[Ask]:
    """The n most useful questions, best first, at most one per sequence.

    A question is worth the mutual information of the annotator's label and the true label, summed over
    tokens, under the model's probabilities and the annotator's confusion matrix. Tokens whose labels are
    certain are therefore worth nothing, and neither are annotators who label at random.

    annotations : the labels that annotators have given to X so far; nobody is asked twice about a sequence.
    costs : the cost of asking each annotator, 1 for those not named; questions are then compared by their
    worth per cost. Cost O(A) matrix products per sequence."""
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise InputError("n", f"must be a number of questions, got {n!r}", "use 1 or more")
    annotators, X = model.annotators_, as_list(X)
    price = dict.fromkeys(annotators.names, 1.0) | dict(costs or {})
    for name, value in price.items():
        annotators.place(name)
        if not isinstance(value, int | float) or not 0 < value < np.inf:
            raise InputError(
                "costs", f"must be above 0, got {value!r} for {name!r}", "use a number above 0"
            )
    if annotations is not None and len(annotations) != len(X):
        problem = f"of {len(annotations)} sequences for {len(X)} sequences of tokens"
        raise InputError("annotations", problem, "pass one dict per sequence")
    found = []
    for i, p in enumerate(model.ask(X).marginals(annotations)):
        asked = set() if annotations is None else set(annotations.given[i])
        open_ = [name for name in annotators.names if name not in asked]
        if len(p) and open_:
            gains = {name: float(annotators.information(name, p).sum()) for name in open_}
            best = max(open_, key=lambda name: gains[name] / price[name])
            found.append(Ask(i, best, gains[best]))
    return sorted(found, key=lambda ask: -ask.gain / price[ask.annotator])[:n]
