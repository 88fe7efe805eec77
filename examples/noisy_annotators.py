"""Labels from annotators who err: a likelihood that knows it, in plain NumPy and without a gradient.

    python examples/noisy_annotators.py [--seed N] [--quick]

A fifth of the training labels is replaced by others at random. The usual models take what they see
for true. Here the labels that are seen are one thing and the true ones another: the true labelling is
a chain, what an annotator writes at a position depends on its true label through a confusion matrix C,

    p(seen | f, g) = sum over labellings y of chain(y | f, g) prod_t C[y_t, seen_t]
                   = Z(f + log C[:, seen], g) / Z(f, g),

and that is all the engine is given: a function of f, g and the labels seen that returns numbers. It
fits the posterior from them. What is to be predicted is not what the annotators write, so
``predict_with="chain"`` reads f and g as a chain over the TRUE labels.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from structgp import Custom, InputError, StructgpError, StructuredGPClassifier, metrics
from structgp.data.corpora import recipes
from structgp.evaluation.crf import LinearCRF

Labels = list[list[str]]
Array = NDArray[np.float64]

FLIPPED = 0.2


class Annotator:
    """log p(labels seen | f, g), with true labels summed out. Cost O(S T V^2).

    An object rather than a closure, so that processes can share the work (``n_jobs``).

    Parameters
    ----------
    confusion : (V, V), C[y, o] is the probability that the annotator writes o where y is true. Rows sum
        to 1.
    """

    def __init__(self, confusion: Array) -> None:
        self.confusion = np.asarray(confusion, dtype=np.float64)

    def __call__(self, f: Array, g: Array, seen: NDArray[np.int64]) -> Array:
        """f (S, T, V), g (S, V, V), seen (T,) -> (S,).

        Two forward recursions side by side: row 0 of a message is weighted by the confusion, row 1 is
        not. In probability space, each message divided by its sum; the logs of the ratios of the sums
        of the two rows add up to the answer, and whatever scale f and g were given cancels.
        """
        seen_given = self.confusion[:, seen].T  # (T, V): C[y, seen_t]
        node = np.exp(f - f.max(-1, keepdims=True))
        edge = np.exp(g - g.max((-1, -2), keepdims=True))
        weight = np.stack([seen_given, np.ones_like(seen_given)], 1)  # (T, 2, V)
        total = np.empty((len(f), len(seen), 2))
        message = node[:, 0, None, :] * weight[0]  # (S, 2, V)
        for t in range(len(seen)):
            if t > 0:
                message = (message @ edge) * (node[:, t, None, :] * weight[t])
            total[:, t] = message.sum(-1)
            message = message / total[:, t, :, None]
        logs = np.log(total).sum(1)
        return logs[:, 0] - logs[:, 1]


def uniform_confusion(n_labels: int, flipped: float = FLIPPED) -> Array:
    """Any label is kept with probability 1 - flipped, else each other one is as likely."""
    other = flipped / (n_labels - 1)
    return np.full((n_labels, n_labels), other) + (1 - flipped - other) * np.eye(n_labels)


def flip(y: Labels, flipped: float, seed: int) -> Labels:
    """Each label replaced, with probability ``flipped``, by another one at random."""
    rng = np.random.default_rng(seed)
    names = sorted({label for labels in y for label in labels})
    place = {name: i for i, name in enumerate(names)}

    def seen(label: str) -> str:
        if rng.random() >= flipped:
            return label
        return names[(place[label] + 1 + int(rng.integers(len(names) - 1))) % len(names)]

    return [[seen(label) for label in labels] for labels in y]


def methods(n_labels: int, **options: Any) -> dict[str, Callable[[], Any]]:
    """The three by name; ``options`` are of the first one's classifier."""
    annotator = Annotator(uniform_confusion(n_labels))
    return {
        "annotator": lambda: StructuredGPClassifier(
            structure=Custom(annotator, predict_with="chain"), **options
        ),
        "chain": StructuredGPClassifier,
        "CRF": LinearCRF,
    }


def coarse(label: str) -> str:
    """Three labels out of eleven: the ingredient, how much of it, and the rest."""
    kind = label.rpartition("-")[2]
    return {"NAME": "NAME", "QTY": "AMOUNT", "UNIT": "AMOUNT"}.get(kind, "OTHER")


def main(words: Sequence[str] | None = None) -> dict[str, float]:
    """Prints token error and NLL of clean test labels; returns the NLL."""
    parser = argparse.ArgumentParser(description="Labels from annotators who err.")
    parser.add_argument("--seed", type=int, default=0, help="of the flips")
    parser.add_argument("--quick", action="store_true", help="fewer lines")
    options = parser.parse_args(words)
    corpus = recipes()
    n_lines = 40 if options.quick else 60
    X = [corpus.template.expand(x) for x in corpus.X_train[:n_lines]]
    y = [[coarse(label) for label in labels] for labels in corpus.y_train[:n_lines]]
    X_test = [corpus.template.expand(x) for x in corpus.X_test]
    y_test = [[coarse(label) for label in labels] for labels in corpus.y_test]
    seen = flip(y, FLIPPED, options.seed)
    n_labels = len({label for labels in seen for label in labels})
    wrong = metrics.token_error(y, seen)
    print(f"{len(X)} lines, {100 * wrong:.0f} % of labels wrong; error and NLL on {len(X_test)} clean ones")
    found = {}
    for name, method in methods(n_labels).items():
        began = time.perf_counter()
        try:
            model = method().fit(X, seen)
        except InputError as problem:
            if name != "CRF" or problem.place != "python-crfsuite":
                raise
            print(f"{name:<12}left out: {problem.problem}; {problem.remedy}")
            continue
        error = metrics.token_error(y_test, model.predict(X_test))
        found[name] = metrics.token_nll(y_test, model.predict_marginals(X_test))
        seconds = time.perf_counter() - began
        print(f"{name:<12}{100 * error:6.1f} %{found[name]:8.3f}{seconds:8.1f} s", flush=True)
    return found


if __name__ == "__main__":
    try:
        main()
    except StructgpError as error:
        sys.exit(f"noisy_annotators: {error}")
