"""Fits where labels are missing: what is not known is summed over, and says nothing of its own."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.generate import Generated, generate
from gpytorch.kernels import RBFKernel, ScaleKernel

import structgp.plan.dense_shape
import structgp.plan.start
from structgp import Inducing, InputError, Prior, StructgpWarning, StructuredGPClassifier
from structgp.data.examples import read_examples
from structgp.inference.second_order import Draws
from structgp.plan.dense_shape import by_regression
from structgp.plan.options import Options
from structgp.plan.resolve import resolve
from structgp.structures import Chain, Piecewise, Structure

V = 3
Labels = list[list[str | None]]


@pytest.fixture(scope="module")
def data() -> Generated:
    return generate(8, n_labels=V, n_values=4, n_templates=2, mean_length=4, strength=2.0, seed=1)


def some_missing(y: list[list[str]], every: int = 3) -> Labels:
    """Every third label, through all sequences; but one of each stays."""
    found, n = [], 0
    for labels in y:
        kept: list[str | None] = []
        for t, label in enumerate(labels):
            n += 1
            kept.append(None if n % every == 0 and t else label)
        found.append(kept)
    return found


def dense(X: Any) -> list[np.ndarray]:
    return [np.array([[float(v[1:]) for v in token] for token in x]) for x in X]


def same(one: StructuredGPClassifier, other: StructuredGPClassifier) -> bool:
    a, b = (e.model_.posterior.state_dict() for e in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# -- what is left out ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_sequences_without_any_label(method: str, data: Generated) -> None:
    y: Labels = [list(labels) for labels in data.y]
    y[2] = [None] * len(y[2])
    model = StructuredGPClassifier(n_draws=4)
    with pytest.warns(StructgpWarning, match="1 of 8 sequences have no label at all") as caught:
        getattr(model, method)(data.X, y)
    assert caught[0].filename == __file__
    without = [i for i in range(8) if i != 2]
    plain = StructuredGPClassifier(n_draws=4)
    plain.fit([data.X[i] for i in without], [data.y[i] for i in without])
    assert same(model, plain)
    assert model.model_.info["n_sequences"] == 7


def test_the_line_that_is_warned_of_later_on(data: Generated) -> None:
    model = StructuredGPClassifier(n_draws=4).fit(data.X, data.y)
    with pytest.warns(StructgpWarning, match="1 of 2") as caught:
        model.partial_fit(data.X[:2], [data.y[0], [None] * len(data.y[1])])
    assert caught[0].filename == __file__


def test_no_label_at_all(data: Generated) -> None:
    with pytest.raises(InputError, match=r"^y: no token has a label"):
        StructuredGPClassifier().fit(data.X, [[None] * len(y) for y in data.y])


def test_labels_missing_are_not_counted(data: Generated) -> None:
    y = some_missing(data.y)
    counts = StructuredGPClassifier(n_draws=4).fit(data.X, y).model_.info["label_counts"]
    flat = [label for labels in y for label in labels]
    assert counts == {label: flat.count(label) for label in ("L0", "L1", "L2")}


# -- the likelihood ------------------------------------------------------------------------------------


def plain_softmax(f: Any, g: Any, y: Any) -> Any:
    assert (y >= 0).all()
    return f.log_softmax(-1)[:, torch.arange(len(y)), y].sum(-1) + 0 * g.sum((-1, -2))


def test_a_likelihood_that_does_not_know_them(data: Generated) -> None:
    y = some_missing(data.y)
    for likelihood, name in ((plain_softmax, "plain_softmax"), (Other(), "Other")):
        with pytest.raises(InputError, match=rf"^y: labels are missing, and {name}"):
            StructuredGPClassifier(structure=likelihood).fit(data.X, y)
    quick = {"n_draws": 4, "prior": Prior(learn_kernel=False), "posterior": Inducing(n_inducing=6)}
    StructuredGPClassifier(structure=plain_softmax, **quick).fit(data.X, data.y, callback=lambda info: True)


class Other(Structure):
    """The chain, but for what it knows of labels that are missing."""

    def log_prob(self, f: Any, g: Any, y: Any, mask: Any) -> Any:
        return Chain().log_prob(f, g, y, mask)


@pytest.mark.parametrize("form", ["torch", "numpy", "differences"])
def test_a_likelihood_that_does_is_told_which(form: str, data: Generated) -> None:
    seen: set[tuple[int, ...]] = set()

    def softmax(f: Any, g: Any, y: Any) -> Any:
        seen.add(tuple(int(v) for v in y))
        known = y >= 0
        places = np.flatnonzero(np.asarray(known))
        if form == "torch":
            return f.log_softmax(-1)[:, places, y[known]].sum(-1) + 0 * g.sum((-1, -2))
        f = f - np.logaddexp.reduce(f, axis=-1, keepdims=True)
        return f[:, places, y[known]].sum(-1)

    softmax.handles_missing = True  # type: ignore[attr-defined]
    y = some_missing(data.y)
    parameters = (
        {}
        if form == "differences"
        else {"prior": Prior(learn_kernel=False), "posterior": Inducing(n_inducing=6)}
    )
    model = StructuredGPClassifier(n_draws=4, structure=softmax, **parameters)
    model.fit(data.X, y, callback=lambda info: True)
    assert (model.training_log_["gradient"] == "differences") == (form == "differences")
    index = {"L0": 0, "L1": 1, "L2": 2, None: -1}
    assert {tuple(index[label] for label in labels) for labels in y} <= seen


def test_a_sum_over_what_is_missing(oracles: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    f, g = (torch.randn(s, generator=generator).double() for s in ((2, 1, 4, V), (2, V, V)))
    y, mask = torch.tensor([[1, -1, 2, -1]]), torch.ones(1, 4, dtype=torch.bool)
    filled = [y.clone() for _ in range(V * V)]
    for n, whole in enumerate(filled):
        whole[0, 1], whole[0, 3] = n // V, n % V
    total = torch.stack([Chain().log_prob(f, g, whole, mask) for whole in filled]).logsumexp(0)
    torch.testing.assert_close(Chain().log_prob(f, g, y, mask), total)


# -- the bound -----------------------------------------------------------------------------------------


def unlabel(problem: Any) -> None:
    """Takes away labels in the middle of the sequences, and one at an end."""
    for batch in problem.batches:
        batch.y[batch.mask & (torch.arange(batch.y.shape[1]) % 2 == 1)] = -1
    problem.batches[0].y[0, 0] = -1
    assert any(bool(((b.y < 0) & b.mask).any()) for b in problem.batches)


@pytest.mark.parametrize("structure", [Chain(), Piecewise()], ids=["chain", "piecewise"])
@pytest.mark.parametrize("route", ["estimator", "second-order"])
def test_gradients_of_the_bound(structure: Structure, route: str, cases: ModuleType) -> None:
    """In the means, against differences; on points that stand for the posterior."""
    problem = cases.make_problem(structure, estimator=cases.Exact(), n_inducing=3)
    cases.disturb(problem.posterior)
    unlabel(problem)
    means = [block.m for block in problem.posterior.blocks]

    def bound() -> Any:
        if route == "estimator":
            return problem.bound(0, torch.Generator()).elbo
        with torch.no_grad():
            return cases.value_and_gradients(Draws(problem, None))

    slopes = torch.autograd.grad(bound(), means) if route == "estimator" else bound()[1]
    step = 1e-5
    for parameter, slope in zip(means, slopes, strict=True):
        flat = parameter.data.view(-1)
        for k in range(flat.numel()):
            values = []
            for sign in (1, -1):
                flat[k] += sign * step
                found = bound()
                values.append(float((found[0] if route != "estimator" else found).detach()))
                flat[k] -= sign * step
            numeric = (values[0] - values[1]) / (2 * step)
            assert float(slope.reshape(-1)[k]) == pytest.approx(numeric, abs=1e-5)


@pytest.mark.parametrize(
    "parameters",
    [{}, {"posterior": "inducing"}, {"inference": "minibatch"}, {"structure": "piecewise"}],
    ids=lambda p: "-".join(p.values()) or "plain",
)
def test_the_fit_ends_and_answers(parameters: dict[str, Any], data: Generated) -> None:
    y = some_missing(data.y)
    model = StructuredGPClassifier(n_draws=8, **parameters).fit(data.X, y)
    log = model.training_log_
    assert log["stopped"] == "converged"
    assert log["elbo"] == pytest.approx(log["fresh_elbo"], abs=3)
    # Fewer labels have less to be surprised by.
    assert log["elbo"] > StructuredGPClassifier(**parameters).fit(data.X, data.y).training_log_["elbo"]
    assert model.score(data.X, data.y) > 0.5


# -- before the fit ------------------------------------------------------------------------------------


def test_the_relaxation_sees_the_tokens_that_have_labels(
    data: Generated, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y = dense(data.X), some_missing(data.y)
    seen: list[Any] = []

    def learn_shape(kernel: Any, x: Any, labels: Any, generator: Any, most: int = 0) -> Any:
        seen.append((x, labels))
        raise KeyError

    monkeypatch.setattr(structgp.plan.start, "learn_shape", learn_shape)
    monkeypatch.setattr(structgp.plan.dense_shape, "learn_shape", learn_shape)
    with pytest.raises(KeyError):
        StructuredGPClassifier(kernel=ScaleKernel(RBFKernel()), posterior="inducing").fit(X, y)
    examples = read_examples(X, y)
    with pytest.raises(KeyError):
        by_regression(Options(), resolve(Options(), examples), examples, torch.Generator())
    for rows, labels in seen:
        for x, found, own, given in zip(X, rows, labels, y, strict=True):
            known = [t for t, label in enumerate(given) if label is not None]
            np.testing.assert_array_equal(found, x[known])
            assert [f"L{v}" for v in own.tolist()] == [given[t] for t in known]
    assert len(seen) == 2


def test_dense_features(data: Generated) -> None:
    for posterior, learned in (("weights", "pilot"), ("inducing", "relaxation")):
        model = StructuredGPClassifier(n_draws=8, posterior=posterior)
        model.fit(dense(data.X), some_missing(data.y))
        assert model.training_log_[learned] is not None
        assert model.training_log_["stopped"] == "converged"
        assert len(model.predict(dense(data.X))) == 8


def test_with_nothing_missing_nothing_changes(data: Generated, monkeypatch: Any) -> None:
    """The way for labels that are missing is not taken."""

    def never(*_: Any) -> Any:
        raise AssertionError

    plain = StructuredGPClassifier(n_draws=4).fit(data.X, data.y)
    monkeypatch.setattr("structgp.structures.program.keep_known", never)
    again = StructuredGPClassifier(n_draws=4).fit(data.X, [list(labels) for labels in data.y])
    assert same(plain, again)


def test_dev_data_has_all_its_labels(data: Generated) -> None:
    y: Labels = [list(labels) for labels in data.y]
    y[1][0] = None
    model = StructuredGPClassifier(n_draws=4)
    for early in (False, True):
        with pytest.raises(InputError, match=r"^y\[1\]\[0\]: the token has no label"):
            model.fit(data.X, data.y, data.X, y, early_stopping=early)


def test_a_likelihood_that_fails_names_the_sequence(data: Generated) -> None:
    """By its place in the data, whatever was left out before it."""

    def fails(f: Any, g: Any, y: Any) -> Any:
        if len(y) == length:
            raise RuntimeError("mine")
        return f.log_softmax(-1)[:, torch.arange(len(y)), y].sum(-1) + 0 * g.sum((-1, -2))

    lengths = [len(y) for y in data.y]
    n = next(i for i in range(2, 8) if lengths.count(lengths[i]) == 1 and lengths[i] != 3)
    length = lengths[n]
    weight = [0, 0, *np.ones(6)]
    model = StructuredGPClassifier(
        structure=fails, prior=Prior(learn_kernel=False), posterior=Inducing(n_inducing=4)
    )
    with pytest.raises(InputError, match=rf"training sequence {n + 1} \({length} tokens\)"):
        model.fit(data.X, data.y, sample_weight=weight)
