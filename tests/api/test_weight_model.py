"""The estimator in weight space: when it is, what it says of what it never saw, and its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from benchmarks.generate import Generated, generate
from gpytorch.kernels import RBFKernel
from scipy.stats import entropy

import structgp
from structgp import Inducing, InputError, Mixture, Prior, SecondOrder, StructuredGPClassifier, Weights
from structgp.answers import potentials
from structgp.answers.ask import Question
from structgp.data.batch import Batch, pad
from structgp.data.encode import FeatureEncoder
from structgp.gp import DenseWeights, Posterior, Table, contrasts
from structgp.gp import Weights as WeightBlock
from structgp.gp.kernels import RelevanceKernel, weight_variances
from structgp.structures import Chain

Sequences = list[Any]

K, P = 6, 3
WIDTH = 3 * K * P + 2
NEW: Sequences = [[("v0", "v1", f"v{K}"), ("v1", "v0", f"v{K}"), ("v0", "v0", "v0")]]
"""Two tokens have a value that no generated one has."""


@pytest.fixture(scope="module")
def data() -> Generated:
    return generate(24, n_labels=3, n_values=K, n_templates=P, mean_length=4, strength=2.0, seed=1)


def dicts(X: Sequences) -> Sequences:
    return [[dict(zip("abc", token, strict=True)) for token in x] for x in X]


def bag(X: Sequences) -> Sequences:
    return [[{f"{p}={v}" for p, v in enumerate(token)} for token in x] for x in X]


def sparse(X: Sequences) -> Sequences:
    """Every third column; the others never have a value."""
    found = []
    for x in X:
        rows = np.zeros((len(x), WIDTH))
        for t, token in enumerate(x):
            for p, value in enumerate(token):
                rows[t, 3 * (p * K + int(value[1:])) + 1] = 1.0
        found.append(scipy.sparse.csr_matrix(rows))
    return found


def mixed(X: Sequences) -> Sequences:
    return [[{"a": a, "size": 1 + int(b[1:]) / K, "c": [c]} for a, b, c in x] for x in X]


def dense(X: Sequences) -> Sequences:
    return [np.array([[int(v[1:]) / K for v in token] for token in x]) for x in X]


FORMS = {"columns": list, "dicts": dicts, "bag": bag, "sparse": sparse, "mixed": mixed}
each_form = pytest.mark.parametrize("form", FORMS)


def fit(X: Sequences, y: Sequences, **parameters: Any) -> StructuredGPClassifier:
    return StructuredGPClassifier(**({"n_draws": 16} | parameters)).fit(X, y)


@pytest.fixture(scope="module")
def fitted(data: Generated) -> dict[str, StructuredGPClassifier]:
    return {name: fit(change(data.X), data.y) for name, change in FORMS.items()}


# -- which space ---------------------------------------------------------------------------------------


@each_form
def test_weights_where_features_can_be_told_apart(
    form: str, fitted: dict[str, StructuredGPClassifier]
) -> None:
    log, q = fitted[form].training_log_, fitted[form].model_.posterior.node
    assert log["posterior"] == "weights"
    assert isinstance(q, WeightBlock)
    assert log["n_inducing"] == len(weight_variances(q.kernel))
    assert log["inducing_residual"] == 0
    assert log["pilot"] is None
    assert log["optimizer"] == "second-order"


FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "by name": (list, {"posterior": "inducing"}),
    "inducing inputs": (list, {"posterior": Inducing(n_inducing=5)}),
    "covariance": (list, {"posterior": Inducing(covariance="full")}),
    "mixture": (list, {"posterior": Mixture(n_components=2)}),
    "kernel": (list, {"kernel": "linear"}),
    "kernel of a part": (mixed, {"kernel": {"categorical": "template"}}),
    "dense": (dense, {"inference": "natural"}),
    "inference": (list, {"kernel": "relevance", "inference": "adam"}),
    "fixed kernel": (list, {"prior": Prior(learn_kernel=False)}),
    "fixed scales": (list, {"inference": SecondOrder(learn_scales="transitions")}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_where_something_asks_for_them(name: str, data: Generated) -> None:
    change, parameters = FUNCTIONS[name]
    model = StructuredGPClassifier(n_draws=2, **parameters)
    model.fit(change(data.X[:8]), data.y[:8], callback=lambda info: True)
    assert model.training_log_["posterior"] == "inducing"
    assert not isinstance(model.model_.posterior.node, WeightBlock)


def test_weights_by_name(data: Generated) -> None:
    """A diagonal covariance is no other wish; a kernel given as an object is as good as its name."""
    kernel = RelevanceKernel([K, K, K])
    for parameters in (
        {"posterior": "weights"},
        {"posterior": Weights()},
        {"kernel": kernel, "posterior": "weights"},
        {"structure": "piecewise", "posterior": "weights"},
        {"prior": Prior(transition_sd=0), "posterior": Weights(basis="label")},
        {"inference": structgp.inference.SecondOrder(), "posterior": "weights"},
    ):
        model = StructuredGPClassifier(n_draws=2, **parameters)
        model.fit(data.X[:8], data.y[:8], callback=lambda info: True)
        assert model.training_log_["posterior"] == "weights"
    assert not kernel.log_scale.any(), "the kernel that was passed is not ours to change"


def test_dense_features_have_weights_by_default(data: Generated) -> None:
    for parameters in ({}, {"posterior": "weights"}, {"kernel": "rbf"}, {"kernel": RBFKernel()}):
        model = StructuredGPClassifier(n_draws=2, **parameters)
        model.fit(dense(data.X[:8]), data.y[:8], callback=lambda info: True)
        assert model.training_log_["posterior"] == "weights"
        assert isinstance(model.model_.posterior.node, DenseWeights)


LINEAR = r"posterior: 'weights' needs a kernel that is a prior on .*; use kernel='auto' or 'relevance'"
CLOSED = r"posterior: 'weights' is for the fit that learns .*; leave those at 'auto'"

REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "kernel": (list, {"kernel": "linear"}, LINEAR),
    "kernel of a part": (mixed, {"kernel": {"categorical": "template"}}, LINEAR),
    "inference": (list, {"kernel": "relevance", "inference": "adam"}, CLOSED),
    "fixed scales": (
        list,
        {"kernel": "relevance", "inference": SecondOrder(learn_scales="transitions")},
        CLOSED,
    ),
    "fixed kernel": (list, {"kernel": "relevance", "prior": Prior(learn_kernel=False)}, CLOSED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_cannot_be(name: str, data: Generated) -> None:
    change, parameters, says = REFUSED[name]
    with pytest.raises(InputError, match=f"^{says}"):
        fit(change(data.X), data.y, posterior="weights", **parameters)


def test_a_space_that_is_not_there(data: Generated) -> None:
    with pytest.raises(InputError, match=r"^posterior: 'dual' is not known; use one of auto, weights"):
        fit(data.X, data.y, posterior="dual")


# -- answers -------------------------------------------------------------------------------------------


@each_form
def test_marginals_sum_to_one(
    form: str, fitted: dict[str, StructuredGPClassifier], data: Generated
) -> None:
    for p in fitted[form].model_.ask(FORMS[form](data.X + NEW)).marginals():
        np.testing.assert_allclose(p.sum(-1), 1, rtol=0, atol=1e-12)
        assert (p > 0).all()


@each_form
def test_marginals_are_a_sequences_own(
    form: str, fitted: dict[str, StructuredGPClassifier], data: Generated
) -> None:
    """Whatever the order, and whatever else is asked."""
    model, change = fitted[form].model_, FORMS[form]
    X = change([*data.X[:6], *NEW, data.X[0] + data.X[1] + data.X[2]])
    whole = model.ask(X).marginals()
    backwards = model.ask(X[::-1]).marginals()[::-1]
    for x, p, q in zip(X, whole, backwards, strict=True):
        np.testing.assert_allclose(q, p, rtol=0, atol=1e-14)
        np.testing.assert_allclose(model.ask([x]).marginals()[0], p, rtol=0, atol=1e-14)


@each_form
def test_learns_what_there_is(
    form: str, fitted: dict[str, StructuredGPClassifier], data: Generated
) -> None:
    commonest = max(np.unique(np.concatenate(data.y), return_counts=True)[1])
    often = commonest / sum(map(len, data.y))
    assert fitted[form].score(FORMS[form](data.X), data.y) > often + 0.1


def test_columns_and_dicts_are_the_same(fitted: dict[str, StructuredGPClassifier], data: Generated) -> None:
    for one, other in zip(
        fitted["columns"].model_.ask(data.X + NEW).marginals(),
        fitted["dicts"].model_.ask(dicts(data.X + NEW)).marginals(),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


# -- what was never seen ---------------------------------------------------------------------------------

COLOURS = [["red", "blue", "red"], ["blue", "red"], ["red", "red", "blue"], ["blue", "blue"]] * 6
NAMES = [[{"red": "R", "blue": "B"}[word] for word in x] for x in COLOURS]


def words(X: Sequences) -> Sequences:
    return [[{"word": word, "end": word[-1:]} for word in x] for x in X]


def columns_of(X: Sequences) -> Sequences:
    """red is column 2, blue column 5; of ten."""
    place = {"red": [2], "blue": [5], "green": [9], "red + green": [2, 9], "white": [0]}
    rows = [[np.isin(np.arange(10), place[word]) for word in x] for x in X]
    return [scipy.sparse.csr_matrix(np.array(x, dtype=float)) for x in rows]


@pytest.fixture(scope="module")
def colours() -> dict[str, StructuredGPClassifier]:
    """Trained on two words, which tell all."""
    return {
        "words": fit(words(COLOURS), NAMES, n_draws=64),
        "columns": fit(columns_of(COLOURS), NAMES, n_draws=64),
    }


@pytest.mark.parametrize("form", ["words", "columns"])
def test_unseen_values_make_unsure(form: str, colours: dict[str, StructuredGPClassifier]) -> None:
    model = colours[form].model_
    change = {"words": words, "columns": columns_of}[form]
    seen, unseen = (model.ask(change([[word]])).marginals()[0][0] for word in ("red", "green"))
    assert seen.max() > 0.8
    assert entropy(unseen) > entropy(seen) + 0.2


def test_an_unseen_value_beside_a_seen_one_makes_less_sure(
    colours: dict[str, StructuredGPClassifier],
) -> None:
    """It has a weight, of which nothing is known; its mean says nothing."""
    model = colours["columns"].model_
    pairs = (columns_of([["red"]]), columns_of([["red + green"]]))
    alone, beside = (model.ask(x).marginals()[0][0] for x in pairs)
    assert entropy(beside) > entropy(alone) + 0.05
    plain, same = (model.ask(x, Question(0)).marginals()[0] for x in pairs)
    np.testing.assert_array_equal(plain, same)
    model = colours["words"].model_
    alone, beside = (
        model.ask([[token]]).marginals()[0][0]
        for token in ({"word": "red"}, {"word": "red", "end": "never"})
    )
    assert entropy(beside) > entropy(alone) + 0.05


@torch.no_grad()
def test_columns_never_seen_have_no_weight(colours: dict[str, StructuredGPClassifier]) -> None:
    model = colours["columns"].model_
    assert model.encoder.columns == [2, 5]
    assert model.encoder.width == 10
    assert model.posterior.node.kernel.sizes == [2]
    assert model.posterior.node.n_values == 3
    rows = model.encoder.encode(columns_of([["red", "blue", "green", "white", "red + green"]])[0])
    ids = [[int(i) for i in row[0::2] if i >= 0] for row in rows]
    assert ids[:2] == [[0], [1]]
    new = [ids[2][0], ids[3][0]]
    assert len(set(new)) == 2
    assert min(new) >= 2
    assert sorted(ids[4]) == sorted([0, ids[2][0]])


def test_columns_never_seen_change_nothing(data: Generated) -> None:
    """The same features in fewer columns are the same model, to the last bit."""
    wide = sparse(data.X)
    kept = np.flatnonzero(sum(np.asarray(x.sum(0))[0] for x in wide))
    narrow = [x[:, kept] for x in wide]
    assert len(kept) < WIDTH / 2
    one, other = fit(wide[:18], data.y[:18]), fit(narrow[:18], data.y[:18])
    seen = set(one.model_.encoder.columns)
    asked = [n for n, x in enumerate(wide) if seen.issuperset(x.indices)]
    assert len(asked) > 18
    for p, q in zip(
        one.model_.ask([wide[n] for n in asked]).marginals(),
        other.model_.ask([narrow[n] for n in asked]).marginals(),
        strict=True,
    ):
        np.testing.assert_array_equal(p, q)


# -- files ---------------------------------------------------------------------------------------------


@each_form
def test_round_trip_to_the_last_bit(
    form: str, fitted: dict[str, StructuredGPClassifier], data: Generated, tmp_path: Path
) -> None:
    """With values never seen among what is asked, and the posterior as it was."""
    estimator = fitted[form]
    path = tmp_path / "model"
    estimator.save(path)
    loaded = structgp.load(path)
    asked = FORMS[form](NEW + data.X[:5])
    y = [["L0"] * (x.shape[0] if scipy.sparse.issparse(x) else len(x)) for x in asked]
    assert loaded.predict_marginals(asked) == estimator.predict_marginals(asked)
    assert loaded.sequence_log_probs(asked, y) == estimator.sequence_log_probs(asked, y)
    for p, q in zip(
        loaded.model_.ask(asked, Question(0)).marginals(),
        estimator.model_.ask(asked, Question(0)).marginals(),
        strict=True,
    ):
        np.testing.assert_array_equal(p, q)
    for one, other in zip(
        loaded.model_.ask(asked).best_sequences(), estimator.model_.ask(asked).best_sequences(), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert isinstance(loaded.model_.posterior.node, WeightBlock)
    assert loaded.training_log_["posterior"] == "weights"
    state, again = estimator.model_.posterior.state_dict(), loaded.model_.posterior.state_dict()
    assert state.keys() == again.keys()
    for name, value in state.items():
        assert value.dtype == again[name].dtype
        assert torch.equal(value, again[name]), name
    assert loaded.model_.encoder == estimator.model_.encoder


def test_rare_values_are_kept_in_the_file(
    fitted: dict[str, StructuredGPClassifier], tmp_path: Path
) -> None:
    estimator = fitted["columns"]
    seldom = estimator.model_.posterior.node.kernel.seldom
    assert seldom.any()
    assert not seldom.all()
    estimator.save(tmp_path / "model")
    kernel = structgp.load(tmp_path / "model").model_.posterior.node.kernel
    assert kernel.rare
    assert torch.equal(kernel.seldom, seldom)


def test_a_posterior_of_functions_comes_back_as_one(data: Generated, tmp_path: Path) -> None:
    estimator = fit(data.X[:8], data.y[:8], posterior="inducing")
    estimator.save(tmp_path / "model")
    loaded = structgp.load(tmp_path / "model")
    assert not isinstance(loaded.model_.posterior.node, WeightBlock)
    assert loaded.predict_marginals(data.X) == estimator.predict_marginals(data.X)
    assert loaded.posterior == "inducing"


@each_form
def test_an_encoder_comes_back_from_json(form: str, data: Generated) -> None:
    X = FORMS[form](data.X)
    encoder = FeatureEncoder().fit(X[:12])
    again = FeatureEncoder.from_json(json.loads(json.dumps(encoder.to_json())))
    assert again == encoder
    for one, other in zip(encoder.transform(X), again.transform(X), strict=True):
        np.testing.assert_array_equal(one, other)
    assert bool(again.columns) == (form == "sparse")


def test_an_encoder_of_columns() -> None:
    """The place of a column among those seen is its number; others have one of their own behind them."""
    train = [scipy.sparse.csr_matrix(([1.0, 2.0], ([0, 1], [6, 1])), shape=(2, 8))]
    encoder = FeatureEncoder().fit(train)
    assert encoder.columns == [1, 6]
    every = encoder.encode(scipy.sparse.csr_matrix(np.eye(8)))
    ids = every[:, 0].astype(int)
    assert (ids[1], ids[6]) == (0, 1)
    assert len(set(ids)) == 8
    assert min(np.delete(ids, [1, 6])) >= 2
    assert (every[:, 1] == 1).all()


# -- draws ---------------------------------------------------------------------------------------------

V = 3


@pytest.fixture(scope="module")
def posterior() -> Posterior:
    """Nothing in it is at its starting value."""
    rng = np.random.default_rng(3)
    kernel = RelevanceKernel([3, 2], rare=True).double().requires_grad_(False)
    kernel.seldom[2] = True
    basis = contrasts(torch.tensor([3.0, 2.0, 1.0])) * torch.tensor([0.7, 1.4])
    node, table = WeightBlock(kernel, (V,), basis), Table((V, V), 0.9)
    q = Posterior({"node": node, "next": table}).requires_grad_(False)
    for p in [*kernel.parameters(), node.m, table.m]:
        p += 0.5 * torch.from_numpy(rng.normal(size=p.shape))
    for block in q.blocks:
        block.factor.copy_(torch.from_numpy(rng.normal(size=block.factor.shape)))
    node.log_amplitude.fill_(0.4)
    return q


def batch_of(index: list[int]) -> Batch:
    rng = np.random.default_rng(8)
    rows = [np.stack([rng.integers(-1, n + 2, T) for n in (3, 2)], -1).astype(float) for T in (3, 1, 4)]
    return pad(rows, None, np.full(2, -1.0), index)


def moments(posterior: Posterior, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Means (B, T, V) of the node scores, and covariances (B, T, V, T, V)."""
    node = posterior.node
    mean, covariance = node.gaussian(node.conditional(batch.x, batch.mask, node.prior_factor()))
    basis = node.basis
    return (mean @ basis.T)[0], torch.einsum("vr,wr,brtu->btvuw", basis, basis, covariance[0])


def test_the_plug_in_is_the_posterior_mean(posterior: Posterior) -> None:
    batch, draws = batch_of([0, 1, 2]), potentials.mean(posterior)
    at = draws.potentials(Chain(), batch)
    torch.testing.assert_close(at.f[0], moments(posterior, batch)[0])
    torch.testing.assert_close(at.g[0], posterior["next"].constant_scores()[0])


def test_draws_have_the_moments_of_the_posterior(posterior: Posterior) -> None:
    """Labels are made of functions. In mirrored draws, so that the mean is exact; five standard errors."""
    batch, half = batch_of([0, 1, 2]), 300
    mean, expected = moments(posterior, batch)
    table_mean, table_sd = posterior["next"].constant_scores()
    total, squares, rounds = torch.zeros_like(expected), 0.0, 4
    for seed in range(rounds):
        at = potentials.sample(posterior, 2 * half, seed).potentials(Chain(), batch)
        away, apart = at.f - mean, at.g - table_mean
        torch.testing.assert_close(away[:half], -away[half:])
        torch.testing.assert_close(apart[:half], -apart[half:])
        total += torch.einsum("sbtv,sbuw->btvuw", away[:half], away[:half]) / (half * rounds)
        squares = squares + apart[:half].square().mean(0) / rounds
    variance = torch.einsum("btvtv->btv", expected)
    error = (variance[..., None, None] * variance[:, None, None] + expected.square()).sqrt()
    few = 5 / (half * rounds) ** 0.5
    assert ((total - expected).abs() <= few * error + 1e-12).all()
    assert ((squares / table_sd.square() - 1).abs() <= few * 2**0.5).all()


def test_every_sequence_meets_the_same_functions(posterior: Posterior) -> None:
    draws = potentials.sample(posterior, 6, seed=4)
    whole = draws.potentials(Chain(), batch_of([0, 1, 2])).f
    for b, T in enumerate((3, 1, 4)):
        alone = draws.potentials(Chain(), batch_of([b])).f
        torch.testing.assert_close(alone[:, 0], whole[:, b, :T], rtol=0, atol=1e-14)
    twice = draws.potentials(Chain(), batch_of([2, 0, 2])).f
    assert torch.equal(twice[:, 0], twice[:, 2])


def test_seed_and_number(posterior: Posterior) -> None:
    batch = batch_of([0, 2])
    one, again, other = (
        potentials.sample(posterior, 5, seed).potentials(Chain(), batch) for seed in (2, 2, 3)
    )
    assert one.f.shape == (6, 2, 4, V)
    assert one.g.shape == (6, V, V)
    assert torch.equal(one.f, again.f)
    assert torch.equal(one.g, again.g)
    assert ((one.f - other.f)[:, batch.mask].abs() > 1e-6).all()
    assert not torch.equal(one.g, other.g)
