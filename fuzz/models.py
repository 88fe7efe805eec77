"""Small fitted models of every kind, written to files that are then damaged."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

import structgp
from structgp import Prior, StructuredGPClassifier
from structgp.data import sources


def strings(rng: random.Random, n: int = 8) -> tuple[list[Any], list[Any]]:
    """Sequences of tokens with two strings each, and their labels."""
    X, y = [], []
    for _ in range(n):
        words = [rng.choice("abcdef") for _ in range(rng.randint(1, 5))]
        X.append([[w, w.upper() if w < "c" else "-"] for w in words])
        y.append(["B-X" if w < "c" else "O" for w in words])
    return X, y


def dense(rng: random.Random, n: int = 8) -> tuple[list[Any], list[Any]]:
    random_state = np.random.default_rng(rng.randrange(2**32))
    X = [random_state.normal(size=(rng.randint(1, 5), 3)) for _ in range(n)]
    return X, [["p" if row[0] > 0 else "q" for row in x] for x in X]


def mixed(rng: random.Random, n: int = 8) -> tuple[list[Any], list[Any]]:
    X, y = strings(rng, n)
    return [[{"w": w, "s": 1.0, "v": np.array([len(c), 0.5])} for w, c in x] for x in X], y


def sparse(rng: random.Random, n: int = 8) -> tuple[list[Any], list[Any]]:
    X, y = dense(rng, n)
    return [scipy.sparse.csr_matrix(np.maximum(x, 0)) for x in X], y


def grids(rng: random.Random, n: int = 6) -> tuple[list[Any], list[Any]]:
    random_state = np.random.default_rng(rng.randrange(2**32))
    X = [random_state.normal(size=(rng.randint(1, 3), 2, 3)) for _ in range(n)]
    return X, [[["p" if pixel[0] > 0 else "q" for pixel in row] for row in x] for x in X]


def layered(rng: random.Random, n: int = 8) -> tuple[list[Any], list[Any]]:
    X, y = strings(rng, n)
    return X, [{"a": labels, "b": [label[0] for label in labels]} for labels in y]


def annotated(rng: random.Random, n: int = 8) -> tuple[list[Any], Any]:
    X, y = strings(rng, n)
    return X, structgp.Annotations([{"ann": labels, "bob": [*labels[:-1], None]} for labels in y])


def trees(rng: random.Random, n: int = 8) -> tuple[list[Any], list[Any]]:
    X, y = strings(rng, n)
    nodes = [[{"w": w, "c": c} for w, c in x] for x in X]
    return [structgp.Graph(x, parents=[-1, *range(len(x) - 1)]) for x in nodes], y


Make = Callable[[random.Random], tuple[list[Any], list[Any]]]

KINDS: dict[str, tuple[Make, dict[str, Any]]] = {
    "weights": (strings, {}),
    "dense": (dense, {}),
    "mixed": (mixed, {}),
    "sparse": (sparse, {}),
    "bag": (strings, {"features": "bag"}),
    "inducing": (strings, {"posterior": structgp.Inducing(n_inducing=6)}),
    "low rank": (dense, {"posterior": structgp.Inducing(6, "low-rank", 2), "kernel": "rbf"}),
    "mixture": (strings, {"posterior": structgp.Mixture(n_inducing=4)}),
    "own kernel": (
        dense,
        {"kernel": ScaleKernel(MaternKernel(1.5, active_dims=[0, 2])) + RBFKernel(ard_num_dims=3)},
    ),
    "full table": (strings, {"posterior": structgp.Inducing(4, transition_covariance="full")}),
    "order 2": (strings, {"structure": structgp.chain(order=2)}),
    "segments": (strings, {"structure": structgp.segments()}),
    "tree": (trees, {"structure": structgp.tree()}),
    "features": (mixed, {"structure": structgp.chain(features=["w"])}),
    "grid": (grids, {"structure": structgp.grid()}),
    "layers": (layered, {"structure": structgp.layers(a=structgp.chain(), b=structgp.chain())}),
    "same": (mixed, {"structure": structgp.chain() + structgp.same("w")}),
    "annotators": (annotated, {}),
}
"""Maps the name of a kind to the function that makes its data, and the parameters of the fit."""


def fitted(name: str, rng: random.Random) -> StructuredGPClassifier:
    make, parameters = KINDS[name]
    X, y = make(rng)
    model = StructuredGPClassifier(prior=Prior(data_weight=1.0), n_draws=8).set_params(**parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X, y, callback=lambda info: info.iteration == 3)
        if name == "weights":
            model.calibrate(*make(rng))
    return model


COLUMNS = ["two 1 Q", "eggs 3 N", "", "figs 2 N"]
"""A file of columns, for a model that knows how to read it."""


def columns_model(folder: Path) -> tuple[StructuredGPClassifier, Any]:
    """A model of columns without numbers, and its reader."""
    lines = [line.replace(" Q", "\tQ").replace(" N", "\tN") for line in COLUMNS]
    reader = sources.learn(lines, template=sources.Template.parse("U:%x[0,0]\nB\n"))
    data = reader.read(lines, name="text")
    model = StructuredGPClassifier(features="columns", prior=Prior(data_weight=1.0), n_draws=8)
    return model.fit(data.X, data.y, callback=lambda info: info.iteration == 2), reader


def write_columns(folder: Path) -> Path:
    """Writes a model as the command line does: with a template, numbers and word vectors."""
    (folder / "vectors.txt").write_text("two 1 0\neggs 0 1\n")
    template = sources.Template.parse("U:%x[0,0]\nB:%x[0,0]\n")
    reader = sources.learn(COLUMNS, template=template, numeric=[1], vectors=folder / "vectors.txt")
    data, path = reader.read(COLUMNS, name="text"), folder / "columns.sgp"
    model = StructuredGPClassifier(prior=Prior(data_weight=1.0), n_draws=8)
    model.fit(data.X, data.y, callback=lambda info: info.iteration == 2)
    model.save(path, reader.to_json())
    return path


def write_all(folder: Path, seed: int) -> dict[str, Path]:
    """Writes one file per kind."""
    found = {"columns": write_columns(folder)}
    for name in KINDS:
        path = folder / f"{name.replace(' ', '-')}.sgp"
        fitted(name, random.Random(seed)).save(path)
        found[name] = path
    return found


def _numbers(found: Any) -> Iterator[float]:
    """The numbers in lists and dicts."""
    if isinstance(found, list | dict):
        for value in found.values() if isinstance(found, dict) else found:
            yield from _numbers(value)
    else:
        yield found


def answers(path: str, name: str) -> str:
    """'answered', or 'refused' with the error message; raises on anything else. name : name of the kind,
    whose examples the model is asked about."""
    make = mixed if name == "columns" else KINDS[name][0]
    X, y = make(random.Random(1))
    if name == "columns":
        X = [[{"0": "two", "1": "x", "numeric": np.ones(1), "vector": np.ones(2)}]]
        y = [["N"]]
    try:
        model = structgp.load(path)
        p = model.predict_marginals(X)
        for ask in (model.predict, lambda X: model.predict_n_best(X, 2), model.predict_uncertainty):
            ask(X)
        if name == "annotators":
            str(model.annotators_)
            y = strings(random.Random(1))[1]
        model.sequence_log_probs(X, y)
        str(structgp.describe(model))
        if name == "weights":
            model.predict_sets(X, 0.5)
        if name == "columns":
            reader = sources.from_json(model.model_.extra, path)
            model.predict(reader.read(COLUMNS, name="text").X)
    except structgp.InputError as error:
        if "\n" in str(error) or len(str(error)) > 2000:
            raise RuntimeError(f"an error of {len(str(error))} characters or several lines") from error
        return f"refused: {error}"
    if not np.isfinite(list(_numbers(p))).all():
        raise FloatingPointError("answers are not finite, and nothing was said")
    return "answered"
