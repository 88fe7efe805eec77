"""Whether a user's likelihood predicts better when it answers itself than when the chain answers.

    python -m experiments.opaque_answers [--function NAME ...] [--length N ...] [--seeds N ...] [--quick]

Labels are generated from the function itself, given scores of words and of transitions, by Gibbs sampling.
The estimator is given the function as NumPy code, fits it from its values, and answers about other
sequences: 'own' from the function's values, 'chain' as with ``predict_with='chain'``. Labellings of
sequences of up to 6 tokens with 3 labels are enumerated, those of 12 are sampled. NLL is that of the
averaged marginals, in nats per token; 'MC error' is the largest Monte Carlo error of a probability,
'values' the number of labellings evaluated per sequence, and seconds are processor seconds. The 'chain'
function shows how far sampling alone changes the figures.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.data import run_command
from experiments.opaque import opaque_chain
from structgp import StructgpWarning, StructuredGPClassifier, load, metrics

Array = np.ndarray
Function = Callable[[Array, Array, Array], Array]

LABELS, N_WORDS = "ABC", 12
EARLY, EXTRA, SMOOTH = 3.0, 2.0, 0.2
SWEEPS = 20


def ordered(f: Array, g: Array, y: Array) -> Array:
    """The chain, except that every C without an earlier B is e^-EARLY times as probable."""
    after = np.array([[0, 1, 0], [1, 1, 1]])  # memory 1: B was there
    return _with_memory(f, g, y, after, np.array([[0, 0, -EARLY], [0, 0, 0]]))


def counted(f: Array, g: Array, y: Array) -> Array:
    """The chain, except that the second A is e^-EXTRA times as probable, and each later A e^-2 EXTRA
    times."""
    after = np.array([[1, 0, 0], [2, 1, 1], [2, 2, 2]])  # memory: number of A, up to 2
    return _with_memory(f, g, y, after, -EXTRA * np.array([[0, 0, 0], [1, 0, 0], [2, 0, 0]]))


def smoothed_memm(f: Array, g: Array, y: Array) -> Array:
    """A product of probabilities of each label given the one before, each mixed with a uniform one."""
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
    """log p of a chain with a memory of M states. after : (M, V) the next state of the memory, given its
    state and the label. extra : (M, V) an additional score of each label, given the state of the memory."""
    M, V = after.shape
    route = np.einsum("mvn,vw->mvnw", np.eye(M)[after] * np.exp(extra)[..., None], np.eye(V))
    route, node, step = route.reshape(M * V, M * V), np.exp(f), np.exp(g)
    ways = np.zeros((len(f), M, V))  # sums over all labellings that lead to each memory and last label
    ways[:, 0] = node[:, 0]
    score, log_z, memory = f[:, 0, y[0]] + extra[0, y[0]], np.zeros(len(f)), after[0, y[0]]
    for t in range(len(y)):
        if t:
            score = score + f[:, t, y[t]] + g[:, y[t - 1], y[t]] + extra[memory, y[t]]
            memory = after[memory, y[t]]
            ways = (ways @ step) * node[:, t, None]
        flat = ways.reshape(len(f), -1) @ route
        scale = flat.sum(1, keepdims=True)
        ways, log_z = (flat / scale).reshape(ways.shape), log_z + np.log(scale[:, 0])
    return score - log_z


def generated(
    function: Function, n: int, lengths: tuple[int, int], seed: int
) -> tuple[list[Any], list[Any]]:
    """n sequences of words, with labels drawn from the function. The scores of words and transitions are
    fixed."""
    rng = np.random.default_rng(0)  # the scores of words are the same for training and test data
    node, g = 1.2 * rng.standard_normal((N_WORDS, 3)), 1.5 * rng.standard_normal((1, 3, 3))
    rng = np.random.default_rng(seed)
    X, y = [], []
    for _ in range(n):
        words = rng.integers(N_WORDS, size=rng.integers(lengths[0], lengths[1] + 1))
        f, labels, values = node[words][None], rng.integers(3, size=len(words)), dict[bytes, float]()
        for t in list(range(len(words))) * SWEEPS:
            log_p = np.empty(3)
            for v in range(3):
                labels[t] = v
                key = labels.tobytes()
                if key not in values:
                    values[key] = float(function(f, g, labels)[0])
                log_p[v] = values[key]
            labels[t] = rng.choice(3, p=np.exp(log_p - np.logaddexp.reduce(log_p)))
        X.append([{"word": f"w{w}"} for w in words])
        y.append([LABELS[v] for v in labels])
    return X, y


def compare(
    name: str, length: int, seed: int, n_train: int, n_test: int, **options: Any
) -> dict[str, dict[str, float]]:
    """Scores of both kinds of answers, 'own' and 'chain'."""
    function, lengths = FUNCTIONS[name], (length - 2, length)
    X, y = generated(function, n_train, lengths, 2 * seed + 1)
    X_test, y_test = generated(function, n_test, lengths, 2 * seed + 2)
    began = time.process_time()
    model = StructuredGPClassifier(structure=function, **options).fit(X, y)
    fitted, found = time.process_time() - began, {}
    for way, answering in (("own", model), ("chain", _by_chain(model))):
        began, asked = time.process_time(), answering.ask(X_test)
        before = getattr(asked.model.structure, "n_values", 0)
        marginals, labels = answering.marginals_of(asked), answering.labels_of(asked)
        seconds = time.process_time() - began
        found[way] = {
            "NLL": _nll(y_test, marginals),
            "token error": 100 * metrics.token_error(y_test, labels),
            "MC error": max(float(e.max()) for e in asked.monte_carlo_error()),
            "values": (getattr(asked.model.structure, "n_values", 0) - before) / n_test,
            "fit s": fitted,
            "answer s": seconds,
        }
    return found


def _by_chain(model: StructuredGPClassifier) -> StructuredGPClassifier:
    """The same fit, where the chain answers."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", StructgpWarning)
        model.save(f"{folder}/model")
        return load(f"{folder}/model", structure="chain")


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
