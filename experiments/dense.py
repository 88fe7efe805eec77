"""Generated tasks with dense features, whose true probabilities are known.

    python -m experiments.dense [--task TASK ...] [--seeds N ...] [--methods structgp crf] [--device D]
                                [--twice]

Labels are drawn given the inputs, or inputs given the labels, from a chain whose scores are known, so that
forward-backward gives the true probability of every label: no model can have a lower expected NLL than
this 'oracle'. Each fit is the default one, in a fresh process; 'draws' averages over the posterior, 'mean'
plugs in its mean. The CRF is linear, with its regulariser cross-validated on held-out likelihood. 'bias' is
mean confidence minus accuracy, 'CPU' the processor seconds, 'GB' the peak memory of the process. With
--twice a process fits twice, and the seconds are those of the second fit: on a GPU, the first fit includes
work that each process does only once. Rows go to results/dense.jsonl.

'smooth', 'linear', 'clusters' and 'process' have 800 to 1,200 training tokens and 4,800 to 16,000 test
tokens: with 1,600 test tokens, chance alone would make the oracle's ECE on the first two .02 to .03.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import string
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.ndimage import gaussian_filter

from experiments.data import Fold, keep, run_command
from experiments.methods.dense_crf import DenseCRF
from structgp import StructuredGPClassifier, metrics

LABELS = string.ascii_uppercase


@dataclass(frozen=True)
class Task(Fold):
    """Training and test data, and the truth about the test data.

    node : true scores (T, V) of each test sequence; transitions : (V, V) true scores of a label (row)
    followed by another; p(y | x) is proportional to exp(sum_t node[t, y_t] + sum_t transitions[y_{t-1},
    y_t]). Labels are the first V letters, in the order of the scores."""

    node: list[np.ndarray]
    transitions: np.ndarray

    def oracle(self) -> list[list[dict[str, float]]]:
        """True marginals of the test data, in the form of ``predict_marginals``."""
        names = LABELS[: len(self.transitions)]
        found = (true_marginals(node, self.transitions) for node in self.node)
        return [[dict(zip(names, map(float, p), strict=True)) for p in rows] for rows in found]


# -- chains ----------------------------------------------------------------------------------------


def log_sum(x: np.ndarray, axis: int) -> np.ndarray:
    """log(sum(exp(x))). SciPy's takes ten times as long on small arrays."""
    top = x.max(axis, keepdims=True)
    found: np.ndarray = np.log(np.exp(x - top).sum(axis)) + top.squeeze(axis)
    return found


def _backward(node: np.ndarray, transitions: np.ndarray) -> np.ndarray:
    """(T, V) log of the sum over labellings of all later tokens, given each token's label."""
    ahead = np.zeros_like(node)
    for t in range(len(node) - 2, -1, -1):
        ahead[t] = log_sum(transitions + node[t + 1] + ahead[t + 1], axis=1)
    return ahead


def true_marginals(node: np.ndarray, transitions: np.ndarray) -> np.ndarray:
    """(T, V) probabilities of labels under a chain with these scores, in log space."""
    behind = node.astype(float)
    for t in range(1, len(node)):
        behind[t] += log_sum(behind[t - 1][:, None] + transitions, axis=0)
    both = behind + _backward(node, transitions)
    return np.exp(both - log_sum(both, axis=1)[:, None])


def draw_labels(node: np.ndarray, transitions: np.ndarray, rng: np.random.Generator) -> list[int]:
    """Labels of one sequence from the chain with these scores, exactly."""
    scores, labels = node + _backward(node, transitions), []
    for t in range(len(node)):
        now = scores[t] if t == 0 else scores[t] + transitions[labels[-1]]
        labels.append(int(np.argmax(now + rng.gumbel(size=len(now)))))
    return labels


def _transitions(rng: np.random.Generator, n_labels: int) -> np.ndarray:
    """(V, V) random scores that favour repeating a label."""
    return rng.normal(size=(n_labels, n_labels)) + np.eye(n_labels)


def _lengths(rng: np.random.Generator, n_tokens: int, mean: int) -> list[int]:
    """Lengths from 0.5 to 1.5 times the mean, which sum to ``n_tokens``."""
    lengths: list[int] = []
    while (left := n_tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(rng.integers(mean // 2, mean + mean // 2 + 1))))
    return lengths


def _labelled(
    x: np.ndarray, node: np.ndarray, lengths: Sequence[int], n_train: int, transitions: np.ndarray, rng: Any
) -> Task:
    """A task from inputs x (N, D) and scores (N, V) of all tokens: labels are drawn given the inputs. The
    first ``n_train`` sequences are for training."""
    ends = np.cumsum(lengths)[:-1]
    X, scores = np.split(x, ends), np.split(node, ends)
    y = [[LABELS[v] for v in draw_labels(s, transitions, rng)] for s in scores]
    return Task(X[:n_train], y[:n_train], X[n_train:], y[n_train:], scores[n_train:], transitions)


# -- tasks -----------------------------------------------------------------------------------------


def embeddings(
    seed: int = 0, n_tokens: int = 20_000, n_dims: int = 768, n_labels: int = 9, n_test: int = 5_000
) -> Task:
    """Contextual embeddings: correlated dimensions, tokens of one sentence alike, scores linear in inputs.

    Most variance is in a few of 100 directions (that of direction i is proportional to i^-1.5), and a fifth
    of it is noise in all dimensions. Scores use all directions, standardised, with weights that fall as
    i^-0.25: most of the information about labels is in directions with little variance. Sequences have 20
    tokens on average."""
    rng = np.random.default_rng([seed, 1])
    rank, noise = min(n_dims, 100), 0.2
    order = np.arange(1, rank + 1)
    variance = order**-1.5 * (1 - noise) * n_dims / np.sum(order**-1.5)
    directions = np.linalg.qr(rng.normal(size=(n_dims, rank)))[0]
    weights = rng.normal(size=(rank, n_labels)) * order[:, None] ** -0.25
    weights *= 4 / np.linalg.norm(weights, axis=0)
    weights = directions @ (weights / np.sqrt(variance + noise)[:, None])
    train, test = _lengths(rng, n_tokens, 20), _lengths(rng, n_test, 20)
    lengths = [*train, *test]
    shared = np.repeat(rng.normal(size=(len(lengths), rank)), lengths, axis=0)
    own = rng.normal(size=shared.shape)
    latent = np.sqrt(variance) * (np.sqrt(0.3) * shared + np.sqrt(0.7) * own)
    x = latent @ directions.T
    x += np.sqrt(noise) * rng.normal(size=x.shape)
    return _labelled(x, x @ weights, lengths, len(train), _transitions(rng, n_labels), rng)


def pixels(
    seed: int = 0,
    n_tokens: int = 4_600,
    n_labels: int = 26,
    n_test: int = 2_300,
    *,
    n_styles: int = 4,
    style: float = 0.7,
    flips: Sequence[float] = (0.08, 0.35),
    blurred: float = 0.12,
) -> Task:
    """Handwriting: binary images of 16 by 8 pixels, in words of 8 letters on average.

    Each letter has ``n_styles`` prototypes: smooth random fields thresholded at 0, in which the part of
    each style has ``style`` times the standard deviation of the part that all styles share. An image is a
    prototype, shifted by up to one pixel in each direction, with pixels inverted at the first rate of
    ``flips``, or at the second rate for a share ``blurred`` of the images. Letters follow a random chain.
    The true probability of an image given its letter is a sum over styles, shifts and rates. The defaults
    were chosen so that a linear CRF has an error of about 20 % and an RBF clearly less."""
    rng = np.random.default_rng([seed, 2])
    fields = rng.normal(size=(n_labels, 1, 16, 8)) + style * rng.normal(size=(n_labels, n_styles, 16, 8))
    prototypes = gaussian_filter(fields, (0, 0, 1.5, 1.2), mode="wrap") > 0
    moves = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1)]
    shifted = np.stack([np.roll(prototypes, move, axis=(2, 3)) for move in moves], axis=2)
    modes = shifted.reshape(n_labels, -1, 128)  # (V, styles x shifts, pixels)
    chain = rng.dirichlet(np.full(n_labels, 0.5), size=n_labels) * 0.98 + 0.02 / n_labels
    train, test = _lengths(rng, n_tokens, 8), _lengths(rng, n_test, 8)
    words = [draw_labels(np.zeros((n, n_labels)), np.log(chain), rng) for n in [*train, *test]]
    letters = np.concatenate(words)
    images = modes[letters, rng.integers(modes.shape[1], size=len(letters))]
    rate = np.where(rng.random(len(letters)) < blurred, flips[1], flips[0])
    x = (images ^ (rng.random(images.shape) < rate[:, None])).astype(float)
    node = _image_scores(x, modes, zip(flips, (1 - blurred, blurred), strict=True))
    ends, n = np.cumsum([*train, *test])[:-1], len(train)
    X, scores = np.split(x, ends), np.split(node, ends)
    y = [[LABELS[v] for v in word] for word in words]
    return Task(X[:n], y[:n], X[n:], y[n:], scores[n:], np.log(chain))


def _image_scores(x: np.ndarray, modes: np.ndarray, rates: Iterable[tuple[float, float]]) -> np.ndarray:
    """(N, V) log-probability of images x (N, P) given letters. A letter is a mixture of modes (V, K, P);
    rates : pairs of a rate of inverted pixels and the share of images with that rate."""
    flat = modes.reshape(-1, x.shape[1])
    wrong = x.sum(1)[:, None] + flat.sum(1) - 2 * x @ flat.T
    right, parts = x.shape[1] - wrong, []
    for rate, share in rates:
        parts.append(wrong * np.log(rate) + right * np.log1p(-rate) + np.log(share))
    of_modes = log_sum(np.array(parts), axis=0).reshape(len(x), *modes.shape[:2])
    return log_sum(of_modes, axis=2) - np.log(modes.shape[1])


def smooth(seed: int = 0, n_sequences: int = 100, n_test: int = 2_000) -> Task:
    """5 inputs, 4 labels, 8 tokens per sequence: scores are sums of sines of random projections of the
    inputs."""
    rng = np.random.default_rng([seed, 3])
    x = rng.normal(size=(8 * (n_sequences + n_test), 5))
    slopes, weights = rng.normal(size=(5, 6)) * 0.8, rng.normal(size=(6, 4)) * 2
    node = np.sin(x @ slopes + rng.uniform(0, 2 * np.pi, size=6)) @ weights
    return _labelled(x, node, _eights(x), n_sequences, _transitions(rng, 4), rng)


def nearly_linear(seed: int = 0, n_sequences: int = 100, n_test: int = 2_000) -> Task:
    """20 inputs, 6 labels, 8 tokens per sequence: linear scores plus a nonlinear part a fifth as large."""
    rng = np.random.default_rng([seed, 4])
    x = rng.normal(size=(8 * (n_sequences + n_test), 20))
    linear = x @ rng.normal(size=(20, 6)) * (3 / np.sqrt(20))
    bend = np.tanh(x @ rng.normal(size=(20, 6)) / np.sqrt(20)) ** 2
    node = linear + 0.6 * bend / bend.std()
    return _labelled(x, node, _eights(x), n_sequences, _transitions(rng, 6), rng)


def clusters(seed: int = 0, n_sequences: int = 100, n_test: int = 2_000) -> Task:
    """12 inputs of which 3 matter, 3 labels, 8 tokens per sequence: each label has 3 Gaussian clusters."""
    rng = np.random.default_rng([seed, 5])
    V, n = 3, n_sequences + n_test
    centres, transitions = rng.normal(size=(V, 3, 3)) * 2, _transitions(rng, V)
    y = [draw_labels(np.zeros((8, V)), transitions, rng) for _ in range(n)]
    labels = np.concatenate(y)
    relevant = centres[labels, rng.integers(3, size=len(labels))] + 0.7 * rng.normal(size=(len(labels), 3))
    x = np.concatenate([relevant, rng.normal(size=(len(labels), 9))], 1)
    far = np.square(relevant[:, None, None, :] - centres).sum(-1)
    # Inputs are drawn from p(x | y) given the labels, and labels from a chain that has transition scores
    # only.
    node = np.split(log_sum(-far / (2 * 0.7**2), axis=2), n)
    X, names = np.split(x, n), [[LABELS[v] for v in labels] for labels in y]
    k = n_sequences
    return Task(X[:k], names[:k], X[k:], names[k:], node[k:], transitions)


def process(
    seed: int = 0,
    n_sequences: int = 150,
    n_test: int = 100,
    *,
    n_inputs: int = 10,
    lengthscale: float | Sequence[float] = 3.0,
    amplitude: float = 16.0,
    n_labels: int = 3,
) -> Task:
    """Scores drawn from a Gaussian process with an RBF kernel; inputs are standard normal.

    lengthscale : one number, or one per input (ARD). k(x, x') = amplitude exp(-|(x - x') / lengthscale|^2 /
    2): amplitude is the prior variance of a score. One independent function per label. Sequences have 8
    tokens. Cost O(N^3) in the number of tokens of training and test data together."""
    rng = np.random.default_rng([seed, 6])
    x = rng.normal(size=(8 * (n_sequences + n_test), n_inputs))
    scaled = x / np.broadcast_to(np.asarray(lengthscale, dtype=float), (n_inputs,))
    squares = np.square(scaled).sum(1)
    far = np.maximum(squares[:, None] + squares - 2 * scaled @ scaled.T, 0)
    covariance = amplitude * (np.exp(-far / 2) + 1e-8 * np.eye(len(x)))
    node = np.linalg.cholesky(covariance) @ rng.normal(size=(len(x), n_labels))
    return _labelled(x, node, _eights(x), n_sequences, _transitions(rng, n_labels), rng)


def relevant_process(seed: int = 0) -> Task:
    """``process`` with 3 of 10 inputs that matter: the others have a length-scale of 1,000."""
    return process(seed, lengthscale=[1.0, 1.5, 2.0, *[1000.0] * 7])


def _eights(x: np.ndarray) -> list[int]:
    return [8] * (len(x) // 8)


TASKS: dict[str, Callable[[int], Task]] = {
    "embeddings": embeddings,
    "pixels": pixels,
    "smooth": smooth,
    "linear": nearly_linear,
    "clusters": clusters,
    "process": partial(process, n_test=600),
    "ard": relevant_process,
}

# -- the command -----------------------------------------------------------------------------------

METHODS = ("structgp", "crf")
FIGURES = ("error", "nll", "ece", "bias")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.dense",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--device", default="cpu", help="of structgp's fit")
    parser.add_argument("--twice", action="store_true", help="time the second fit of a process")
    options = parser.parse_args(words)
    heads = "".join(f"{name:>9}" for name in ("error %", "NLL", "ECE", "bias", "seconds", "CPU", "GB"))
    print(f"{'task':<12}{'seed':<6}{'method':<17}{heads}")
    for task in options.task:
        for seed in options.seeds:
            for method in options.methods:
                row = {"task": task, "seed": seed, "method": method, "device": options.device}
                row |= {"twice": options.twice}
                row |= _in_new_process(task, seed, method, options.device, options.twice)
                keep("dense", row)
                _print_rows(row, with_oracle=method == options.methods[-1])


def _in_new_process(*arguments: Any) -> dict[str, Any]:
    """Calls ``run`` in a new process, so that its peak memory is that of one fit."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run, arguments)


def run(task: str, seed: int, method: str, device: str = "cpu", twice: bool = False) -> dict[str, Any]:
    """Fits a generated task, once or twice: scores of the answers and of the oracle, seconds and
    gigabytes."""
    data = TASKS[task](seed)
    model: Any = StructuredGPClassifier(device=device) if method == "structgp" else DenseCRF()
    if twice:
        model.fit(data.X, data.y)
    began, cpu = time.perf_counter(), time.process_time()
    model.fit(data.X, data.y)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    answers = {"linear CRF": model.predict_marginals(data.X_test)}
    if method == "structgp":
        answers = {"structgp draws": answers.popitem()[1]}
        answers["structgp mean"] = model.set_params(n_draws=0).predict_marginals(data.X_test)
    answers["oracle"] = data.oracle()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    found = {name: figures(data.y_test, marginals) for name, marginals in answers.items()}
    cost = {"seconds": seconds, "cpu_seconds": cpu, "gigabytes": peak}
    cost["test_tokens"] = sum(map(len, data.y_test))
    return {"answers": found} | {name: round(value, 2) for name, value in cost.items()}


def figures(y: list[list[str]], marginals: list[list[dict[str, float]]]) -> dict[str, float]:
    """Error in per cent, NLL, ECE, and mean confidence minus accuracy, of the most probable labels."""
    best = [[max(p, key=p.__getitem__) for p in rows] for rows in marginals]
    error = metrics.token_error(y, best)
    confidence = float(np.mean([max(p.values()) for rows in marginals for p in rows]))
    nll, ece = metrics.token_nll(y, marginals), metrics.calibration(y, marginals).ece
    return {"error": 100 * error, "nll": nll, "ece": ece, "bias": confidence - (1 - error)}


def _print_rows(row: dict[str, Any], with_oracle: bool) -> None:
    for name, found in row["answers"].items():
        if name == "oracle" and not with_oracle:
            continue
        cells = f"{found['error']:>9.2f}" + "".join(f"{found[f]:>9.4f}" for f in FIGURES[1:])
        cost = f"{row['seconds']:>9.1f}{row['cpu_seconds']:>9.1f}{row['gigabytes']:>9.2f}"
        cost = "" if name in ("oracle", "structgp mean") else cost
        print(f"{row['task']:<12}{row['seed']:<6}{name:<17}{cells}{cost}", flush=True)


if __name__ == "__main__":
    run_command(main)
