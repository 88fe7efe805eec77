"""The same fit and the same answers on a GPU."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from benchmarks.generate import generate
from gpytorch.kernels import RBFKernel

from structgp import (
    Inducing,
    Mixture,
    Natural,
    SecondOrder,
    StructgpWarning,
    StructuredGPClassifier,
    chain,
    layers,
)
from structgp.gp.inducing_inputs import choose_inducing
from structgp.inference.checkpoint import Checkpoint
from structgp.inference.lbfgs import climb_down, descend, minimize
from structgp.plan.options import NAMED

WAYS = [minimize, climb_down, descend]
"""SciPy's, the plain one on arrays, and on tensors, as on a device."""

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def quadratic(device):
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(20, 20, generator=generator, dtype=torch.float64)
    matrix = (root @ root.T + torch.eye(20)).to(device)
    centre = torch.randn(20, generator=generator, dtype=torch.float64).to(device)

    def objective(x):
        away = x - centre
        return float(0.5 * away @ matrix @ away) + 3.0, matrix @ away

    return objective, centre


@pytest.mark.parametrize("way", WAYS)
def test_either_way_of_lbfgs_finds_the_least_value(way):
    objective, centre = quadratic("cpu")
    x, value = way(objective, torch.zeros_like(centre), steps=200, memory=10, tolerance=1e-12)
    torch.testing.assert_close(x, centre, atol=1e-4, rtol=0)
    assert value == pytest.approx(3.0, abs=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_a_first_try_that_is_too_long_does_not_end_the_search(way):
    """Logistic regression on columns of very different sizes, as under a smooth kernel of large amplitude:
    the steepest way down is long for one column and tiny for all others."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(0, 2, 10, dtype=torch.float64)
    x = sizes * torch.randn(40, 10, generator=generator, dtype=torch.float64)
    y = (x[:, 0] > 0).double()

    def objective(w):
        z = x @ w
        value = torch.nn.functional.softplus(z).sum() - y @ z + 0.5 * w @ w
        return float(value), x.T @ (z.sigmoid() - y) + w

    start = torch.zeros(10, dtype=torch.float64)
    _, least = minimize(objective, start, steps=500, memory=10, tolerance=1e-12)
    _, value = way(objective, start, steps=200, memory=10, tolerance=1e-8)
    assert objective(start)[0] > 2 * least
    assert value == pytest.approx(least, rel=0.01)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_gains_too_little_is_the_last(way):
    objective, centre = quadratic("cpu")
    calls = []

    def counted(x):
        calls.append(1)
        return objective(x)

    way(counted, torch.zeros_like(centre), steps=200, memory=10, tolerance=0.5)
    assert len(calls) < 15


def test_auto_is_the_gpu_where_there_is_one():
    made = generate(6, n_labels=2, mean_length=4, n_templates=2, n_values=4, seed=0)
    model = StructuredGPClassifier(device="auto").fit(made.X, made.y)
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert model.ask(made.X).question.device == expected
    assert model.training_log_["plan"]["device"]["value"] == expected


@pytest.mark.gpu
@needs_gpu
def test_the_same_inducing_inputs_are_picked():
    """However seldom a GPU is asked whether there are enough: fewer than all, none too many."""
    rows = torch.randn(300, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[:40] = rows[40:80]
    for most, enough in ((300, 0.0), (300, 0.05), (10, 0.0), (70, 0.2)):
        here, there = (
            choose_inducing(RBFKernel().double().to(where), rows.to(where), most, enough=enough)
            for where in ("cpu", "cuda")
        )
        assert here.index.tolist() == there.index.tolist()
        assert here.residual == pytest.approx(there.residual, abs=1e-9)


FITS = {
    "weights": {},
    "minibatch": {"inference": "minibatch"},
    "functions": {"posterior": Inducing(n_inducing=30)},
    "natural": {"inference": "natural", "posterior": Inducing(n_inducing=30)},
    "adam": {"inference": "adam", "posterior": Inducing(n_inducing=30)},
    "saga": {"posterior": Inducing(n_inducing=20), "inference": replace(NAMED["saga"], n_draws=8)},
    "lbfgs": {"inference": "lbfgs", "posterior": Inducing(n_inducing=20)},
    "mixture": {"posterior": Mixture(n_components=2, n_inducing=20)},
    "values": {
        "posterior": Inducing(n_inducing=20),
        "inference": Natural(gradient="surrogate", learn_scales="auto"),
    },
    # To its optimum: scales that are still moving when a fit stops depend on every step before.
    "constraints": {
        "constraints": {"forbidden": [("L1", "L0")]},
        "inference": SecondOrder(tolerance=1e-4, learn_scales="transitions"),
    },
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", FITS)
def test_a_fit_on_the_gpu_is_the_fit_on_the_host(name):
    made = generate(30, n_labels=3, mean_length=6, n_templates=3, n_values=8, seed=1)
    data = list(zip(made.X, made.y, strict=True))
    if name == "constraints":  # sequences that obey them
        data = [(x, y) for x, y in data if ("L1", "L0") not in pairwise(y)]
    X, y = zip(*data, strict=True)
    losses = {}
    for device in ("cpu", "cuda"):
        model = StructuredGPClassifier(**FITS[name], device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StructgpWarning)
            model.fit(X, y)
        losses[device] = -np.mean(model.sequence_log_probs(X, y))
        assert model.model_.posterior.node.m.device.type == "cpu"
    noisy = name in ("adam", "saga", "values", "mixture", "natural")
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0.1 if noisy else 0.01)


def vectors(n: int, seed: int) -> tuple[list[list[dict]], list[list[str]]]:
    """n sequences of 6 tokens: a vector of four numbers, of which three tell the label, and a letter."""
    rng = np.random.default_rng(seed)
    X, y = [], []
    for _ in range(n):
        x = rng.normal(size=(6, 4))
        X.append([{"letter": "ab"[int(row[3] > 0)], "vector": row} for row in x])
        y.append(["abc"[int(row[0] * row[1] > 0) + int(row[2] > 1)] for row in x])
    return X, y


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("form", ["beside templates", "alone", "layers", "early stopping", "checkpoint"])
def test_vectors(form, tmp_path, monkeypatch):
    """Their weights are made on the device, and are on the host when the fit has ended."""
    (X, y), (X_dev, y_dev) = vectors(80, 0), vectors(40, 1)
    given, fit, steps = {}, {}, []

    def killed(info):
        if info.iteration == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("structgp.plan.run.Checkpoint", partial(Checkpoint, seconds=0.0))
    if form == "alone":
        X, X_dev = ([np.array([t["vector"] for t in x]) for x in some] for some in (X, X_dev))
    if form == "layers":
        given = {"structure": layers(one=chain(), two=chain())}
        y, y_dev = ([{"one": one, "two": one} for one in some] for some in (y, y_dev))
    if form == "early stopping":
        fit = {"X_dev": X_dev, "y_dev": y_dev, "early_stopping": True}
    losses = {}
    for device in ("cpu", "cuda"):
        if form == "checkpoint":
            fit = {"checkpoint": tmp_path / device, "callback": killed}
            with pytest.raises(KeyboardInterrupt):
                StructuredGPClassifier(device=device).fit(X, y, **fit)
            assert fit["checkpoint"].exists()
            steps.clear()
            fit["callback"] = lambda info: steps.append(info.iteration)
        model = StructuredGPClassifier(**given, device=device).fit(X, y, **fit)
        assert steps[:1] == ([2] if form == "checkpoint" else [])
        assert {t.device.type for t in model.model_.posterior.state_dict().values()} == {"cpu"}
        losses[device] = -np.mean(model.sequence_log_probs(X_dev, y_dev))
        here = np.concatenate(model.ask(X_dev).marginals())
        there = np.concatenate(model.set_params(device="cpu").ask(X_dev).marginals())
        np.testing.assert_allclose(here, there, atol=1e-6)
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0.05)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("space", ["weights", "inducing"])
def test_answers_on_the_gpu_are_those_on_the_host(space):
    made = generate(20, n_labels=3, mean_length=6, n_templates=3, n_values=8, seed=2)
    # On the CPU, answers of an open number of draws come another way (``answers.local_points``).
    model = StructuredGPClassifier(class_weight="balanced", posterior=space, n_draws=128)
    model.fit(made.X, made.y)
    answers = {}
    for device in ("cpu", "cuda"):
        model.set_params(device=device)
        answers[device] = [
            np.concatenate(model.ask(made.X).marginals()),
            np.concatenate([p.sum(0) for p in model.predict_transition_marginals(made.X)]),
            np.array(model.sequence_log_probs(made.X, made.y)),
            np.array([best[0][1] for best in model.predict_n_best(made.X, 2)]),
            np.concatenate(model.ask(made.X).token_uncertainty()),
            model.ask(made.X).sequence_uncertainty(),
        ]
        answers[device].append(np.concatenate(model.predict(made.X)) == "L0")
    for here, there in zip(answers["cpu"], answers["cuda"], strict=True):
        np.testing.assert_allclose(here, there, atol=1e-6)


@pytest.mark.gpu
@needs_gpu
def test_the_device_form_of_lbfgs_runs_there():
    objective, centre = quadratic("cuda")
    x, _ = minimize(objective, torch.zeros_like(centre), steps=200, memory=10, tolerance=1e-12)
    assert x.is_cuda
    torch.testing.assert_close(x, centre, atol=1e-4, rtol=0)
