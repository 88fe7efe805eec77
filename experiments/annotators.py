"""Five simulated annotators of different skill, one of them random: learned reliabilities, and the error.

    python -m experiments.annotators --data DIR [--task TASK ...] [--seeds N ...] [--sequences N] [--scale]

Tasks are the embedded corpus ('recipes') and the paper's, from raw columns. Each annotator labels a random
part of the training sequences. Where the true label is v, an annotator writes v with a probability close to
their skill, and otherwise another label, drawn from their own distribution of errors for v; the fifth
annotator draws labels at random, with the frequencies of the true ones. The error is measured on the true
labels of other sequences, for

    annotators   ours, fitted to all annotations
    vote, ours   ours, fitted to the label that most annotators gave
    vote, CRF    a cross-validated linear CRF, fitted to the same labels
    best, ours   ours, fitted to the labels of the annotator who is really the best

and 'apart' is the largest difference between an annotator's learned reliability and the share of their
labels that are right. With --scale, the time for 50 annotators and 2,000 generated sequences is compared
with that of a fit to one labelling.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from benchmarks.generate import generate

from experiments.active import load
from experiments.data import TASKS, keep, run_command
from structgp import Annotations, Prior, StructuredGPClassifier, metrics
from structgp.data.annotations import majority
from structgp.evaluation.crf import LinearCRF

SKILLS = (0.9, 0.75, 0.6, 0.5, None)
"""Probability that each annotator gives the right label; None for labels at random."""

SHARE = 0.6
"""Share of the training sequences that each annotator labels."""

Labels = list[list[str]]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.annotators",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    tasks = ("recipes", *TASKS)
    parser.add_argument("--task", nargs="+", choices=tasks, default=["recipes", "basenp"])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--sequences", type=int, default=100, help="to train with")
    parser.add_argument("--scale", action="store_true", help="measure time only")
    parser.add_argument(
        "--once", action="store_true", help="with --scale: data count once, no choice of it"
    )
    options = parser.parse_args(words)
    if options.scale:
        row = scale(once=options.once)
        keep("annotators", row)
        print(row)
        return
    for task in options.task:
        rows = []
        for seed in options.seeds:
            rows.append(compare(task, options.data, seed, options.sequences))
            keep("annotators", rows[-1])
            shown = "  ".join(f"{name} {100 * error:.2f} %" for name, error in rows[-1]["error"].items())
            print(f"{task}, seed {seed}: {shown}; apart {rows[-1]['apart']:.3f}", flush=True)
        others = ("vote, ours", "vote, CRF", "best, ours")
        won = sum(row["error"]["annotators"] < min(row["error"][name] for name in others) for row in rows)
        print(f"{task}: 'annotators' has the lowest error in {won} of {len(rows)} seeds")


def simulate(
    y: Labels, skills: Sequence[float | None], share: float, rng: np.random.Generator
) -> list[dict[str, list[str]]]:
    """The labels that each annotator gives to each sequence; at least one annotator labels each."""
    classes = sorted({label for labels in y for label in labels})
    V, index = len(classes), {label: i for i, label in enumerate(classes)}
    counts = np.bincount([index[label] for labels in y for label in labels], minlength=V)
    tables = [confusion(skill, counts / counts.sum(), rng) for skill in skills]
    given: list[dict[str, list[str]]] = []
    for labels in y:
        sees = rng.random(len(skills)) < share
        sees[rng.integers(len(skills))] |= not sees.any()
        said = {}
        for k in np.flatnonzero(sees).tolist():
            drawn = [rng.choice(V, p=tables[k][index[label]]) for label in labels]
            said[f"annotator {k + 1}"] = [classes[v] for v in drawn]
        given.append(said)
    return given


def confusion(skill: float | None, frequency: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(V, V) probability of each given label (column) for each true label (row)."""
    V = len(frequency)
    if skill is None:
        return np.tile(frequency, (V, 1))
    found = np.zeros((V, V))
    for v in range(V):
        right = float(np.clip(skill + rng.normal(0, 0.05), 0.05, 0.99))
        found[v, np.arange(V) != v] = (1 - right) * rng.dirichlet(np.full(V - 1, 0.3))
        found[v, v] = right
    return found


def compare(task: str, data: str | None, seed: int, n: int) -> dict[str, Any]:
    """Errors of all methods on one task, and how far the learned reliabilities are from the truth."""
    X, y, X_test, y_test = load(task, data, seed)
    X, y, rng = X[:n], y[:n], np.random.default_rng([seed, 2])
    given = simulate(y, SKILLS, SHARE, rng)
    vote: Any = majority(given, [len(labels) for labels in y])
    names = [f"annotator {k + 1}" for k in range(len(SKILLS))]
    right = {name: share_right(given, y, name) for name in names}
    best = max(names, key=lambda name: right[name])
    seen = [i for i, said in enumerate(given) if best in said]
    began = time.process_time()
    ours = StructuredGPClassifier().fit(X, Annotations(given))
    row: dict[str, Any] = {"task": task, "seed": seed, "sequences": n, "error": {}}
    row["seconds"] = round(time.process_time() - began, 1)
    fitted = {
        "annotators": ours,
        "vote, ours": StructuredGPClassifier().fit(X, vote),
        "vote, CRF": LinearCRF().fit(X, vote),
        "best, ours": StructuredGPClassifier().fit([X[i] for i in seen], [given[i][best] for i in seen]),
    }
    for name, model in fitted.items():
        row["error"][name] = round(metrics.token_error(y_test, model.predict(X_test)), 4)
    found = {name: ours.annotators_[name].mean for name in names}
    row["right"] = {name: [round(found[name], 3), round(right[name], 3)] for name in names}
    row["apart"] = round(max(abs(found[name] - right[name]) for name in names), 3)
    return row


def share_right(given: list[dict[str, list[str]]], y: Labels, name: str) -> float:
    """Share of an annotator's labels that are right."""
    told = [(said[name], of) for said, of in zip(given, y, strict=True) if name in said]
    return float(np.mean([a == b for labels, of in told for a, b in zip(labels, of, strict=True)]))


def scale(n: int = 2_000, n_annotators: int = 50, each: int = 3, once: bool = False) -> dict[str, Any]:
    """CPU seconds of a fit to annotations, with ``each`` annotators per sequence on average, and of a fit
    to the true labels."""
    data = generate(n, n_labels=6, n_values=40, n_templates=6, mean_length=10, seed=0)
    rng = np.random.default_rng(0)
    skills = rng.uniform(0.4, 0.95, n_annotators)
    given = simulate(data.y, skills.tolist(), each / n_annotators, rng)
    seconds = {}
    for name, labels in (("one labelling", data.y), ("annotators", Annotations(given))):
        began = time.process_time()
        StructuredGPClassifier(prior=Prior(data_weight=1.0) if once else Prior()).fit(data.X, labels)
        seconds[name] = round(time.process_time() - began, 1)
    ratio = round(seconds["annotators"] / seconds["one labelling"], 2)
    return {
        "sequences": n,
        "annotators": n_annotators,
        "once": once,
        "CPU seconds": seconds,
        "ratio": ratio,
    }


if __name__ == "__main__":
    run_command(main)
