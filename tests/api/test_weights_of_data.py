"""How often a sequence counts, and how often a label: as if the data had been so."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.generate import Generated, generate
from torch import Tensor

import structgp
from structgp import InputError, Prior, StructuredGPClassifier
from structgp.data.encode import FeatureEncoder
from structgp.data.examples import Examples
from structgp.data.labels import LabelEncoder
from structgp.gp import Inducing, Posterior, Table, Weights, choose_inducing
from structgp.gp.kernels.build import build_kernel
from structgp.inference import Minibatch, Natural, Problem, SecondOrder
from structgp.inference.loop import make_batches
from structgp.inference.second_order import Draws, _fit_covariances
from structgp.plan.options import ESTIMATORS, Options
from structgp.plan.pilot import run_pilot
from structgp.plan.resolve import resolve
from structgp.structures import Chain, Structure

TIMES = np.array([1, 3, 1, 2, 1])
V = 3


@pytest.fixture(scope="module")
def data() -> Generated:
    return generate(5, n_labels=V, mean_length=3, n_templates=2, n_values=3, strength=2.0, seed=4)


def problem(
    data: Generated,
    times: np.ndarray | None,
    *,
    space: str = "functions",
    structure: Structure | None = None,
    repeat: bool = False,
    batch_tokens: int = 1000,
    **options: Any,
) -> Problem:
    """Each sequence as often as ``times`` says: by weights, or with ``repeat`` written out."""
    encoder = FeatureEncoder().fit(data.X)
    rows = encoder.transform(data.X)
    labels = LabelEncoder([f"L{v}" for v in range(V)]).transform(data.y)
    tokens = torch.from_numpy(np.concatenate(rows))
    node: Any
    if space == "weights":
        kernel = build_kernel("relevance", encoder.blocks, tokens).requires_grad_(False)
        node = Weights(kernel, (V,))
    else:
        kernel = build_kernel("template", encoder.blocks, tokens).requires_grad_(False)
        node = Inducing(kernel, tokens[choose_inducing(kernel, tokens, 6).index], (V,))
    posterior = Posterior({"node": node, "next": Table((V, V))})
    weights = None if times is None else times.astype(float)
    if repeat and times is not None:
        order = np.repeat(np.arange(len(rows)), times)
        rows, labels, weights = [rows[i] for i in order], [labels[i] for i in order], None
    batches = make_batches(rows, labels, encoder.pad_row, batch_tokens, weights)
    return Problem(posterior, structure or Chain(), batches, **options)


def both(cases: ModuleType, data: Generated, **options: Any) -> tuple[Problem, Problem]:
    """With weights and written out, at one place where nobody would start from."""
    made = [problem(data, TIMES, repeat=repeat, **options) for repeat in (False, True)]
    for one in made:
        cases.disturb(one.posterior)
    return made[0], made[1]


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


spaces = pytest.mark.parametrize("space", ["functions", "weights"])


# -- a weight of n is the sequence n times ---------------------------------------------------------


@spaces
def test_value_gradients_and_curvature(space: str, cases: ModuleType, data: Generated) -> None:
    """Of the second-order fit, at a draw that is the same for every sequence."""
    found = []
    for one in both(cases, data, space=space):
        with torch.no_grad():
            draws = Draws(one, None)
            value, grads = cases.value_and_gradients(draws)
            _fit_covariances(draws)
        found.append([value, *grads, *(block.factor.detach() for block in one.posterior.blocks)])
    close(*found)


OPTIMIZERS = {
    "functions": ("functions", SecondOrder(learn_scales=False, tolerance=1e-6)),
    "weights": ("weights", SecondOrder(learn_scales=False, tolerance=1e-6)),
    "minibatch": ("weights", Minibatch(learn_scales=False, steps=100, tolerance=1e-6)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_posteriors_where_they_are_exact(name: str, cases: ModuleType, data: Generated) -> None:
    """Under a quadratic likelihood draws do not matter."""
    space, optimizer = OPTIMIZERS[name]
    found = []
    for one in both(cases, data, space=space, structure=cases.Regression(V)):
        cases.finish(optimizer, one)
        found.append(cases.numbers(one.posterior))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@spaces
def test_bound_and_gradients_of_an_estimator(space: str, cases: ModuleType, data: Generated) -> None:
    """What Adam, L-BFGS, SAGA and natural gradients go by."""
    found = []
    for one in both(cases, data, space=space, estimator=cases.Exact()):
        bound = one.bound(0, torch.Generator())
        node, table = one.posterior.blocks
        parameters = [node.m, node.factor, table.m, table.factor, node.log_amplitude]
        found.append([bound.elbo.detach(), *torch.autograd.grad(bound.elbo, parameters)])
    close(*found)


def test_natural_steps(cases: ModuleType, data: Generated) -> None:
    found = []
    for one in both(cases, data, estimator=cases.Exact()):
        optimizer = Natural()
        state = optimizer.start(one, torch.Generator())
        for _ in range(4):
            state, _ = optimizer.step(one, state)
        found.append(cases.numbers(one.posterior))
    close(*found)


def test_step_sizes_of_saga(cases: ModuleType, data: Generated) -> None:
    weighted, repeated = both(cases, data)
    for k in (0, 1):
        one, same, plain = (
            p.posterior.blocks[k].curvature_bound(p.of_block(k))
            for p in (weighted, repeated, problem(data, None))
        )
        assert one == pytest.approx(same, rel=1e-9)
        assert one > 1.2 * plain


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_what_estimators_see(name: str, data: Generated) -> None:
    """log p, and the stand-ins of those that have some, as often as the sequence counts."""
    estimator = ESTIMATORS[name]
    targets = []
    for times in (None, TIMES):
        one = problem(data, times, estimator=estimator)
        targets.append(one.target(0, one.latents(0)))
    generator = torch.Generator().manual_seed(0)
    shapes = [group.shape(4) for group in targets[0].groups]
    draws = tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    one = problem(data, TIMES)
    times = one.weights[0]
    assert times.tolist() == TIMES[one.batches[0].index].tolist()
    plain, weighted = (target.log_prob(draws) for target in targets)
    close(weighted, times * plain)
    if targets[0].parts is not None and targets[1].parts is not None:
        plain, weighted = (target.parts(draws) for target in targets)
        # Stand-ins are computed in single precision.
        torch.testing.assert_close(weighted, times[:, None] * plain, rtol=1e-6, atol=1e-6)


@spaces
def test_fresh_bound(space: str, cases: ModuleType, data: Generated) -> None:
    values = []
    for times in (np.ones(5), np.full(5, 3.0)):
        one = problem(data, times, space=space)
        cases.disturb(one.posterior)
        rest = float(one.posterior.divergence().detach())
        values.append(one.fresh_bound(8, torch.Generator().manual_seed(2)) + rest)
    assert values[1] == pytest.approx(3 * values[0], rel=1e-9)


def test_batches_to_come_stand_by_their_weight(data: Generated) -> None:
    """In the first pass of minibatches: one of a hundred says a hundredth."""
    times = np.array([100.0, 1, 1, 1, 1])
    one = problem(data, times, space="weights", batch_tokens=1)
    optimizer = Minibatch(learn_scales=False)
    state = optimizer.start(one, torch.Generator().manual_seed(0))
    heavy = next(i for i, batch in enumerate(one.batches) if 0 in batch.index)
    state.order = [0 if heavy else 1, heavy]
    state, info = optimizer.step(one, state)
    value = float(state.values[heavy])
    assert info.elbo + state.divergence == pytest.approx(value * 104 / 100)


def test_the_pilot_counts_too(monkeypatch: pytest.MonkeyPatch, data: Generated) -> None:
    monkeypatch.setattr("structgp.plan.pilot.TOKENS", 1000)
    monkeypatch.setattr("structgp.plan.pilot.WORTH_IT", 0.0)
    found: list[Tensor | None] = []

    def train(posterior: Any, structure: Any, batches: Any, *_: Any, **__: Any) -> Any:
        found.extend(batch.weight for batch in batches)
        found.extend(batch.index for batch in batches)
        raise KeyError

    monkeypatch.setattr("structgp.plan.pilot.train", train)
    encoder = FeatureEncoder().fit(data.X)
    rows, labels = encoder.transform(data.X), LabelEncoder(["L0", "L1", "L2"]).transform(data.y)
    tokens = torch.from_numpy(np.concatenate(rows))
    kernel = build_kernel("relevance", encoder.blocks, tokens).requires_grad_(False)
    examples = Examples(encoder, LabelEncoder(["L0", "L1", "L2"]), rows, labels, TIMES * 1.0, None)
    with pytest.raises(KeyError):
        run_pilot(
            kernel, examples, tokens, resolve(Options(), examples), None, torch.Generator().manual_seed(0)
        )
    weight, index = found
    assert weight is not None
    assert index is not None
    assert weight.tolist() == TIMES[index].tolist()


# -- through the classifier --------------------------------------------------------------------------


def same(one: StructuredGPClassifier, other: StructuredGPClassifier) -> bool:
    a, b = (e.model_.posterior.state_dict() for e in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("parameters", [{}, {"posterior": "inducing"}, {"inference": "minibatch"}])
def test_no_weight_is_left_out_and_one_is_once(parameters: dict[str, Any], data: Generated) -> None:
    def fit(X: Any, y: Any, weight: Any = None) -> StructuredGPClassifier:
        return StructuredGPClassifier(n_draws=4, **parameters).fit(X, y, sample_weight=weight)

    plain = fit(data.X[1:], data.y[1:])
    assert same(fit(data.X, data.y, [0, 1, 1, 1, 1]), plain)
    assert not same(fit(data.X[1:], data.y[1:], [1, 1, 1, 2]), plain)


def test_contradictions_are_settled_by_weight() -> None:
    X, y = [[["x"]], [["x"]], [["z"]]], [["A"], ["B"], ["B"]]
    for label, weight in {"A": [20, 1, 1], "B": [1, 20, 1]}.items():
        model = StructuredGPClassifier(n_draws=16).fit(X, y, sample_weight=np.array(weight))
        assert model.predict_marginals(X[:1])[0][0][label] > 0.7
    assert model.model_.info["label_counts"] == {"A": 1.0, "B": 21.0}


@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_weights_that_are_none(method: str, data: Generated) -> None:
    fit = getattr(StructuredGPClassifier(), method)
    with pytest.raises(InputError, match=r"^sample_weight: shape \(4,\) for 5 sequences"):
        fit(data.X, data.y, sample_weight=np.ones(4))


# -- weights of labels -------------------------------------------------------------------------------


@pytest.fixture
def plugged(data: Generated) -> StructuredGPClassifier:
    """No pairwise scores and no doubt: a softmax for each token."""
    return StructuredGPClassifier(prior=Prior(transition_sd=0), n_draws=0).fit(data.X, data.y)


def array(marginals: Any) -> np.ndarray:
    return np.array([list(p.values()) for tokens in marginals for p in tokens])


def expected(p: np.ndarray, weights: Any) -> np.ndarray:
    moved = p * np.array(weights)
    return moved / moved.sum(1, keepdims=True)


def test_marginals_move_as_prior_odds_do(plugged: StructuredGPClassifier, data: Generated) -> None:
    p = array(plugged.predict_marginals(data.X))
    plugged.set_params(class_weight={"L0": 5.0, "L2": 0.25})
    q = array(plugged.predict_marginals(data.X))
    np.testing.assert_allclose(q, expected(p, [5, 1, 0.25]), atol=1e-12)
    assert (np.abs(q - p) > 0.1).any()
    assert np.array_equal(array(plugged.set_params(class_weight=None).predict_marginals(data.X)), p)


def test_balanced_is_the_inverse_of_frequency(plugged: StructuredGPClassifier, data: Generated) -> None:
    p = array(plugged.predict_marginals(data.X))
    labels = [label for y in data.y for label in y]
    counts = np.array([labels.count(label) for label in ("L0", "L1", "L2")])
    plugged.set_params(class_weight="balanced")
    q = array(plugged.predict_marginals(data.X))
    np.testing.assert_allclose(q, expected(p, 1 / counts), atol=1e-12)


def test_balanced_knows_how_often_sequences_count(data: Generated) -> None:
    weight = [0.1, 0.2, 0.1, 0.3, 0.1]
    model = StructuredGPClassifier(prior=Prior(transition_sd=0), n_draws=0)
    p = array(model.fit(data.X, data.y, sample_weight=weight).predict_marginals(data.X))
    counts = np.array(
        [sum(w * y.count(f"L{v}") for w, y in zip(weight, data.y, strict=True)) for v in range(V)]
    )
    assert counts.min() < 1
    model.set_params(class_weight="balanced")
    q = array(model.predict_marginals(data.X))
    np.testing.assert_allclose(q, expected(p, 1 / counts), atol=1e-12)


def test_labels_still_to_come_are_no_division_by_nothing(data: Generated) -> None:
    model = StructuredGPClassifier(class_weight="balanced", n_draws=4)
    model.partial_fit(data.X, data.y, classes=["L0", "L1", "L2", "L3"])
    p = array(model.predict_marginals(data.X))
    assert np.isfinite(p).all()
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-12)


def test_every_answer_is_under_the_same_weights(data: Generated, oracles: ModuleType) -> None:
    model = StructuredGPClassifier(class_weight={"L1": 8.0}, n_draws=16).fit(data.X, data.y)
    x = data.X[0][:2]
    labels = [[f"L{v}" for v in row] for row in oracles.labellings(2, V)]
    p = np.exp(np.array(model.sequence_log_probs([x] * len(labels), labels), dtype=float))
    assert p.sum() == pytest.approx(1)
    first = [sum(p[i] for i, y in enumerate(labels) if y[0] == f"L{v}") for v in range(V)]
    np.testing.assert_allclose(array(model.predict_marginals([x]))[0], first, atol=1e-9)
    np.testing.assert_allclose(model.predict_transition_marginals([x])[0][0].ravel(), p, atol=1e-9)


def test_a_file_keeps_them(data: Generated, tmp_path: Path) -> None:
    for given in ({"L0": 4.0}, "balanced"):
        model = StructuredGPClassifier(class_weight=given, n_draws=8).fit(data.X, data.y)
        model.save(tmp_path / "model")
        loaded = structgp.load(tmp_path / "model")
        assert loaded.class_weight == given
        assert loaded.predict_marginals(data.X) == model.predict_marginals(data.X)
        assert loaded.predict_marginals(data.X) != model.set_params(class_weight=None).predict_marginals(
            data.X
        )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("even", r"'even' is not known; use 'balanced', or a dict"),
        (3, r"3 is not known"),
        ([1, 2], r"\[1, 2\] is not known"),
        ({"L0": 0}, r"must be a factor above 0, got 0 for 'L0'; use a number above 0"),
        ({"L0": -1.0}, r"must be a factor above 0, got -1.0 for 'L0'"),
        ({"L0": float("nan")}, r"must be a factor above 0, got nan for 'L0'"),
        ({"L0": float("inf")}, r"must be a factor above 0, got inf for 'L0'"),
        ({"L0": "much"}, r"must be a factor above 0, got 'much' for 'L0'"),
    ],
)
def test_class_weights_that_are_none(given: Any, says: str, data: Generated) -> None:
    with pytest.raises(InputError, match=f"^class_weight: {says}"):
        StructuredGPClassifier(class_weight=given).fit(data.X, data.y)


def test_a_class_that_is_none(plugged: StructuredGPClassifier, data: Generated) -> None:
    plugged.set_params(class_weight={"L0": 1.0, "L9": 2.0})
    with pytest.raises(InputError, match=r"^class_weight: 'L9' is not a label of the training data"):
        plugged.predict(data.X)
