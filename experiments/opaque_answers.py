"""Does a likelihood of one's own predict better under itself than through the chain?

    python -m experiments.opaque_answers [--function NAME ...] [--length N ...] [--seeds N ...] [--quick]

Labels are generated from the function itself, given scores of words and of transitions, by Gibbs sampling.
The estimator is given the function as NumPy code, fits it by its values, and answers about other sequences:
'own' by the function's values, 'chain' with ``predict_with='chain'``. Sequences of up to 6 tokens with 3
labels are enumerated, those of 12 are sampled. NLL is in nats per token, of the averaged marginals; 'error'
the largest Monte Carlo error of a probability, 'values' how many labellings were evaluated per sequence.
The 'chain' function shows how far sampling alone moves the figures.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.data import run_command
from experiments.opaque import opaque_chain
from structgp import Custom, StructgpWarning, StructuredGPClassifier, metrics

Array = np.ndarray
Function = Callable[[Array, Array, Array], Array]

LABELS, N_WORDS = "ABC", 12
EARLY, EXTRA, SMOOTH = 3.0, 2.0, 0.2
SWEEPS = 20


def ordered(f: Array, g: Array, y: Array) -> Array:
    """The chain, but every C that no B came before is e^-EARLY as probable."""
    after = np.array([[0, 1, 0], [1, 1, 1]])  # memory 1: B was there
    return _with_memory(f, g, y, after, np.array([[0, 0, -EARLY], [0, 0, 0]]))


def counted(f: Array, g: Array, y: Array) -> Array:
    """The chain, but the second A is e^-EXTRA as probable, and each after it e^-2 EXTRA."""
    after = np.array([[1, 0, 0], [2, 1, 1], [2, 2, 2]])  # memory: number of A, up to 2
    return _with_memory(f, g, y, after, -EXTRA * np.array([[0, 0, 0], [1, 0, 0], [2, 0, 0]]))


def smoothed_memm(f: Array, g: Array, y: Array) -> Array:
    """Each label given the one before; every local probability is mixed with a uniform one."""
    total = np.zeros(len(f))
    for t in range(len(y)):
        row = f[:, t] + (g[:, y[t - 1]] if t else 0)
        p = np.exp(row - row.max(-1, keepdims=True))
        total += np.log((1 - SMOOTH) * p[:, y[t]] / p.sum(-1) + SMOOTH / f.shape[-1])
    return total


FUNCTIONS: dict[str, Function] = {
    "ordered": ordered,
    "counted": counted,
    "smoothed_memm": smoothed_memm,
    "chain": opaque_chain,
}


def _with_memory(f: Array, g: Array, y: Array, after: Array, extra: Array) -> Array:
    """log p of a chain that remembers one of M things. after : (M, V) what is remembered after each label;
    extra : (M, V) the score that it has besides, given what is remembered."""
    route = np.eye(len(after))[after] * np.exp(extra)[..., None]  # (M, V, M)
    step, score, log_z, memory = np.exp(g), np.zeros(len(f)), np.zeros(len(f)), 0
    ways = np.zeros((len(f), *after.shape))  # how much leads to each memory and last label
    for t in range(len(y)):
        score += f[:, t, y[t]] + (g[:, y[t - 1], y[t]] if t else 0) + extra[memory, y[t]]
        memory = after[memory, y[t]]
        moved = ways @ step if t else np.repeat(np.eye(len(after))[:1, :, None], len(f), 0)
        ways = np.einsum("smv,sv,mvn->snv", np.broadcast_to(moved, ways.shape), np.exp(f[:, t]), route)
        scale = ways.sum((1, 2))
        ways, log_z = ways / scale[:, None, None], log_z + np.log(scale)
    return score - log_z


def generated(
    function: Function, n: int, lengths: tuple[int, int], seed: int
) -> tuple[list[Any], list[Any]]:
    """n sequences of words and labels from the function, with scores that depend on nothing but it."""
    rng = np.random.default_rng(0)  # the scores of words are the same for training and test data
    node, g = 1.2 * rng.standard_normal((N_WORDS, 3)), 1.5 * rng.standard_normal((1, 3, 3))
    rng = np.random.default_rng(seed)
    X, y = [], []
    for _ in range(n):
        words = rng.integers(N_WORDS, size=rng.integers(lengths[0], lengths[1] + 1))
        f, labels = node[words][None], rng.integers(3, size=len(words))
        for t in list(range(len(words))) * SWEEPS:
            log_p = np.empty(3)
            for v in range(3):
                labels[t] = v
                log_p[v] = function(f, g, labels)[0]
            labels[t] = rng.choice(3, p=np.exp(log_p - np.logaddexp.reduce(log_p)))
        X.append([{"word": f"w{w}"} for w in words])
        y.append([LABELS[v] for v in labels])
    return X, y


def compare(
    name: str, length: int, seed: int, n_train: int, n_test: int, **options: Any
) -> dict[str, dict[str, float]]:
    """Figures of both ways to answer."""
    function, lengths = FUNCTIONS[name], (length - 2, length)
    X, y = generated(function, n_train, lengths, 2 * seed + 1)
    X_test, y_test = generated(function, n_test, lengths, 2 * seed + 2)
    found = {}
    for way, structure in (("own", function), ("chain", Custom(function, predict_with="chain"))):
        began = time.perf_counter()
        model = StructuredGPClassifier(structure=structure, **options).fit(X, y)
        fitted = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("always", StructgpWarning)
            asked = model.ask(X_test)
            before = getattr(asked.model.structure, "n_values", 0)
            marginals, labels = model.marginals_of(asked), model.labels_of(asked)
            errors = [float(e.max()) for e in asked.monte_carlo_error()]
        found[way] = {
            "NLL": _nll(y_test, marginals),
            "token error": 100 * metrics.token_error(y_test, labels),
            "MC error": max(errors),
            "values": (getattr(asked.model.structure, "n_values", 0) - before) / n_test,
            "fit s": fitted - began,
            "answer s": time.perf_counter() - fitted,
        }
    return found


def _nll(y: list[list[str]], marginals: list[list[dict[str, float]]]) -> float:
    each = [
        -np.log(p[v])
        for labels, row in zip(y, marginals, strict=True)
        for v, p in zip(labels, row, strict=True)
    ]
    return float(np.mean(each))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m experiments.opaque_answers", description=__doc__)
    parser.add_argument("--function", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS))
    parser.add_argument("--length", nargs="+", type=int, default=[6, 12])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--quick", action="store_true", help="fewer sequences and draws")
    options = parser.parse_args(words)
    sizes = {"n_train": 60, "n_test": 40} | ({"n_test": 20, "n_draws": 16} if options.quick else {})
    for name in options.function:
        for length in options.length:
            for seed in options.seeds:
                for way, row in compare(name, length, seed, **sizes).items():
                    figures = "  ".join(f"{k} {v:.4g}" for k, v in row.items())
                    print(f"{name:<14} T <= {length:<3} seed {seed}  {way:<6} {figures}", flush=True)


if __name__ == "__main__":
    run_command(main)
