"""Labels without positions: a line says which labels come in which order, not where each begins.

    python examples/unaligned.py [--seed N] [--quick]

'2 cups plain flour , sifted' comes with AMOUNT NAME OTHER and nothing more. The probability of such a
summary is the sum over all labellings that collapse to it,

    p(summary | f, g) = sum over y with collapse(y) = summary of chain(y | f, g),

by dynamic programming over positions and segments. No CRF has such a likelihood: no token has a label. The
estimator wants one label a token, so each summary is spread evenly over its line before the fit; the
likelihood collapses it again, and no true position reaches the fit.

The function is written in torch and autograd differentiates it: the engine finds that out by itself. What
is to be predicted are labels at their places, not summaries: ``predict_with="chain"`` reads f and g so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from structgp import Custom, Prior, StructgpError, StructuredGPClassifier, metrics
from structgp.data.corpora import recipes

Labels = list[list[str]]

NEVER = -1e4
"""Stands for log 0: autograd has no use for infinities."""


def log_prob_of_summary(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
    """log p(collapse(y) | f, g): f (S, T, V), g (S, V, V), y (T,) -> (S,). Cost O(S T (K + V^2)).

    ``inside[:, k]`` sums over what came so far and now stands in segment k of K.
    """
    labels = torch.unique_consecutive(y)  # (K,)
    stay, move = g[:, labels, labels], g[:, labels[:-1], labels[1:]]
    inside = torch.full((len(f), len(labels)), NEVER, dtype=f.dtype)
    inside[:, 0] = f[:, 0, labels[0]]
    never = torch.full((len(f), 1), NEVER, dtype=f.dtype)
    free = f[:, 0]
    for t in range(1, f.shape[1]):
        begun = torch.cat([never, inside[:, :-1] + move], 1)
        inside = torch.logaddexp(inside + stay, begun) + f[:, t, labels]
        free = torch.logsumexp(free[:, :, None] + g, 1) + f[:, t]
    return inside[:, -1] - free.logsumexp(-1)


def collapse(labels: Sequence[str]) -> list[str]:
    return [label for label, _ in groupby(labels)]


def spread(labels: Sequence[str]) -> list[str]:
    """The summary of these labels over as many tokens, as evenly as can be."""
    summary = collapse(labels)
    return [summary[t * len(summary) // len(labels)] for t in range(len(labels))]


def coarse(label: str) -> str:
    """Three labels out of eleven: the ingredient, how much of it, and the rest."""
    kind = label.rpartition("-")[2]
    return {"NAME": "NAME", "QTY": "AMOUNT", "UNIT": "AMOUNT"}.get(kind, "OTHER")


def main(words: Sequence[str] | None = None) -> dict[str, float]:
    """Prints token errors against the true labels of the test lines, and returns them."""
    parser = argparse.ArgumentParser(description="Labels without positions.")
    parser.add_argument("--seed", type=int, default=0, help="which lines are learned from")
    parser.add_argument("--quick", action="store_true", help="fewer lines")
    options = parser.parse_args(words)
    corpus = recipes()
    order = torch.randperm(len(corpus.X_train), generator=torch.Generator().manual_seed(options.seed))
    lines = order[: 20 if options.quick else 40].tolist()
    X = [corpus.template.expand(corpus.X_train[i]) for i in lines]
    y = [[coarse(label) for label in corpus.y_train[i]] for i in lines]
    X_test = [corpus.template.expand(x) for x in corpus.X_test]
    y_test = [[coarse(label) for label in labels] for labels in corpus.y_test]
    seen = [spread(labels) for labels in y]
    commonest = Counter(label for labels in seen for label in labels).most_common(1)[0][0]
    guess = [[commonest] * len(labels) for labels in y_test]
    errors = {"commonest label": metrics.token_error(y_test, guess)}
    print(f"{len(X)} lines, token error on {len(X_test)} others")
    print(f"{'always ' + commonest:<34}{100 * errors['commonest label']:6.1f} %", flush=True)
    # Left open, the amplitude would be learned as if the spread labels stood at their places.
    structure, prior = Custom(log_prob_of_summary, predict_with="chain"), Prior(amplitude=10.0)
    summaries = StructuredGPClassifier(structure=structure, prior=prior)
    for name, model, labels in (
        ("summaries", summaries, seen),
        ("chain, summaries spread evenly", StructuredGPClassifier(), seen),
        ("chain, true labels", StructuredGPClassifier(), y),
    ):
        began = time.perf_counter()
        model.fit(X, labels)
        errors[name] = metrics.token_error(y_test, model.predict(X_test))
        seconds = time.perf_counter() - began
        print(f"{name:<34}{100 * errors[name]:6.1f} %{seconds:8.1f} s", flush=True)
    return errors


if __name__ == "__main__":
    try:
        main()
    except StructgpError as error:
        sys.exit(f"unaligned: {error}")
