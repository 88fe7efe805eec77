"""Extreme numbers and shapes, and many threads: a fit must give probabilities, or say why not in one
line."""

from __future__ import annotations

import copy
import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import scipy.sparse

import structgp
from fuzz import models
from fuzz.trial import Tally, _place
from structgp import Prior, StructuredGPClassifier

SCALES = [1e-300, 1e-150, 1e-30, 1e-8, 1.0, 1e4, 1e8, 1e30, 1e90, 1e120, 1e300]
CHOICES: dict[str, list[Any]] = {
    "kernel": ["auto", "auto", "linear", "rbf", "linear+rbf", "matern", "rbf-ard"],
    "posterior": ["auto", "auto", "inducing", structgp.Inducing(3), structgp.Mixture(n_inducing=3)],
    "inference": ["auto", "auto", "adam", "natural"],
    "n_draws": [0, 2, 8],
}


def data(rng: random.Random) -> tuple[list[Any], list[Any]]:
    """Dense or sparse sequences with one to three things wrong."""
    numbers = np.random.default_rng(rng.randrange(2**32))
    D, n = rng.choice([1, 3, 8]), rng.choice([2, 6, 12])
    X = [numbers.normal(size=(rng.choice([0, 1, 4, 9]), D)) for _ in range(n)] + [
        numbers.normal(size=(4, D))
    ]
    y = [["a" if row[0] > 0 else "b" for row in x] for x in X]
    y[-1] = ["a", "b", "a", "b"]
    for _ in range(rng.randint(1, 3)):
        way, k = rng.randrange(6), rng.randrange(len(X))
        if way == 0:
            scale = rng.choice(SCALES)
            X = [x * scale for x in X]
        elif way == 1 and len(X[k]):
            X[k][rng.randrange(len(X[k])), rng.randrange(D)] = rng.choice(
                [1e6, -1e7, 1e30, 1e99, np.nan, np.inf]
            )
        elif way == 2:
            X = [np.round(x) * 0 + rng.choice([0.0, 3.0, 1e8]) for x in X]
        elif way == 3:
            X = [np.repeat(x[:1], len(x), 0) if len(x) else x for x in X]
        elif way == 4:
            y = [[f"l{rng.randrange(12)}" for _ in labels] for labels in y]
        else:
            X = [x + rng.choice([1e3, 1e9, -1e15]) for x in X]
    if rng.random() < 0.3:
        X = [scipy.sparse.csr_matrix(x) for x in X]
    return X, y


def fits(number: int, seed: int) -> Tally:
    tally = Tally("stressed fits")
    for k in range(number):
        rng = random.Random(f"{seed}-{k}")
        parameters = {name: rng.choice(some) for name, some in CHOICES.items()}
        try:
            tally.add(_fit(rng, parameters))
        except Exception as error:
            tally.add("failed", f"{seed}-{k}, {parameters}: {_place(error)}")
    return tally


def _fit(rng: random.Random, parameters: dict[str, Any]) -> str:
    X, y = data(rng)
    model = StructuredGPClassifier(prior=Prior(data_weight=1.0)).set_params(**parameters)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            model.fit(X, y, callback=lambda info: info.iteration >= 10)
            p = model.predict_marginals(X)
            model.predict(X)
        except structgp.InputError as error:
            return "refused" if "\n" not in str(error) else "failed"
    values = np.array([list(token.values()) for x in p for token in x])
    if not (np.isfinite(values).all() and np.allclose(values.sum(1), 1)):
        raise FloatingPointError("no probabilities, and nothing was said")
    return "answered"


def threads(number: int, seed: int) -> Tally:
    """Asks one model with different settings from eight threads: the answers must be those of one
    thread."""
    tally, rng = Tally("threads"), random.Random(seed)
    model = models.fitted("weights", rng)
    X, _ = models.strings(rng, 20)
    asked = [copy.copy(model).set_params(n_draws=2 * k, random_state=0) for k in range(8)]
    alone = [one.predict_marginals(X) for one in asked]
    fresh = copy.deepcopy(model)
    asked = [copy.copy(fresh).set_params(n_draws=2 * k, random_state=0) for k in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(number):
            order = rng.sample(range(8), 8)
            found = list(pool.map(lambda k: asked[k].predict_marginals(X), order))
            same = all(found[i] == alone[k] for i, k in enumerate(order))
            tally.add("the same" if same else "failed", "" if same else f"order {order}")
    return tally
