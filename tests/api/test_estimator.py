"""The estimator, end to end: every form of input, every option, every mistake."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re

import numpy as np
import pytest
import scipy.sparse
import torch
from benchmarks.generate import generate, true_chain
from experiments.methods.sgd import SGD
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV

import structgp.api.estimator
import structgp.paper
import structgp.plan.choices
import structgp.structures
from structgp import (
    Custom,
    Inducing,
    InputError,
    Mixture,
    ModelFileError,
    Prior,
    StructgpWarning,
    StructuredGPClassifier,
)
from structgp.errors import LikelihoodError
from structgp.gp import FullTable
from structgp.gp.kernels import RelevanceKernel, variance
from structgp.inference import Adam, Natural, SecondOrder, StepInfo
from structgp.paper import LbfgsBlocks, Saga
from structgp.plan.resolve import plan_lines
from structgp.plan.run import TRACE_POINTS
from structgp.structures import Chain, Piecewise, Structure

P, K, D = 3, 20, 5


def dicts(X):
    return [[{f"t{p}": v for p, v in enumerate(token)} for token in x] for x in X]


def bag(X):
    return [[[f"{p}={v}" for p, v in enumerate(token)] for token in x] for x in X]


def one_hot(X):
    """(T, P K) arrays, one column a template and value."""
    arrays = []
    for x in X:
        rows = np.zeros((len(x), P * K))
        for t, token in enumerate(x):
            for p, value in enumerate(token):
                rows[t, p * K + int(value[1:])] = 1
        arrays.append(rows)
    return arrays


def sparse(X):
    return [scipy.sparse.csr_matrix(rows) for rows in one_hot(X)]


def dense(X):
    """(T, D) arrays: the scores that the labels were drawn by, and columns that say little."""
    chain = true_chain(n_labels=3, n_values=K, n_templates=P, seed=0)
    table = np.random.default_rng(5).standard_normal((P * K, D - 3))
    return [
        np.concatenate([chain.scores(x), 0.1 * rows @ table], 1)
        for x, rows in zip(X, one_hot(X), strict=True)
    ]


def mixed(X):
    """Two strings, a number, a flag."""
    return [
        [{"a": a, "b": b, "size": float(c[1:]) / K, "first": t == 0} for t, (a, b, c) in enumerate(x)]
        for x in X
    ]


FORMS = {
    "columns": (list, {}),
    "dicts": (dicts, {}),
    "bag": (bag, {"features": "bag"}),
    "sparse": (sparse, {}),
    "sparse rbf": (sparse, {"kernel": "rbf"}),
    "dense": (dense, {}),
    "dense linear": (dense, {"kernel": "linear"}),
    "dense, user's kernel": (dense, {"kernel": ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=D))}),
    "dense as lists": (lambda X: [rows.tolist() for rows in dense(X)], {}),
    "product": (list, {"kernel": "template-product"}),
    "mixed": (mixed, {}),
    "mixed, chosen": (mixed, {"kernel": {"categorical": "template-product", "sparse": "rbf"}}),
    "mixed, objects": (mixed, {"kernel": {"sparse": ScaleKernel(structgp.gp.kernels.SparseRBFKernel())}}),
}


@pytest.fixture(scope="module")
def data():
    return generate(30, n_labels=3, n_values=K, n_templates=P, mean_length=5, seed=0)


@pytest.fixture(scope="module")
def train(data):
    return data.X[:20], data.y[:20]


@pytest.fixture(scope="module", name="test")
def held_out(data):
    return data.X[20:], data.y[20:]


@pytest.fixture(scope="module")
def fitted(train):
    return StructuredGPClassifier().fit(*train)


@pytest.fixture(scope="module")
def fits(train):
    """The fit of a form, made once."""
    made = {}

    def get(name):
        if name not in made:
            change, parameters = FORMS[name]
            estimator = StructuredGPClassifier(n_draws=16, **parameters)
            made[name] = estimator.fit(change(train[0]), train[1])
        return made[name]

    return get


def array(marginals):
    """(tokens, V) of predict_marginals' answer."""
    return np.array([list(token.values()) for sequence in marginals for token in sequence])


def flat(y):
    return [label for labels in y for label in labels]


# -- scikit-learn's rules --------------------------------------------------------------------------


def test_parameters_and_clone():
    kernel = ScaleKernel(RBFKernel())
    estimator = StructuredGPClassifier(kernel=kernel, posterior=Inducing(n_inducing=7), n_draws=0)
    parameters = estimator.get_params()
    assert parameters["posterior__n_inducing"] == 7
    assert parameters["kernel"] is kernel
    own = set(StructuredGPClassifier.__init__.__annotations__) - {"return"}
    assert set(estimator.get_params(deep=False)) == own
    assert own <= set(parameters)
    assert len(own) == 16
    assert estimator.set_params(posterior__n_inducing=9, decode="sequence") is estimator
    assert (estimator.posterior, estimator.decode) == (Inducing(9), "sequence")
    copied = clone(estimator)
    assert isinstance(copied.kernel, ScaleKernel)
    assert copied.kernel is not kernel
    assert copied.get_params() | {"kernel": None} == estimator.get_params() | {"kernel": None}
    with pytest.raises(ValueError, match="Invalid parameter"):
        estimator.set_params(lengthscale=1)


def test_clone_of_a_fit_is_unfitted_and_fits_the_same(fitted, train, test):
    copied = clone(fitted)
    with pytest.raises(NotFittedError):
        copied.predict(test[0])
    assert copied.fit(*train).predict_marginals(test[0]) == fitted.predict_marginals(test[0])


def test_the_constructor_only_stores():
    StructuredGPClassifier(
        kernel="nonsense", inference=3, prior=Prior(transition_sd="wide"), posterior=Inducing(n_inducing=-1)
    )


def test_fit_leaves_the_users_kernel_alone(fits):
    kernel = FORMS["dense, user's kernel"][1]["kernel"]
    before = copy.deepcopy(kernel.state_dict())
    estimator = fits("dense, user's kernel")
    assert estimator.kernel is kernel
    assert all(torch.equal(v, before[k]) for k, v in kernel.state_dict().items())
    assert all(v.dtype == before[k].dtype for k, v in kernel.state_dict().items())
    assert all(p.requires_grad for p in kernel.parameters())
    learned = estimator.model_.posterior.node.kernel.smooth
    assert not torch.allclose(
        learned.base_kernel.lengthscale, kernel.base_kernel.lengthscale.double(), rtol=1e-3
    )


def test_grid_search(train, test):
    grid = {"kernel": ["template", "template-product"], "posterior__n_inducing": [2, 50]}
    search = GridSearchCV(
        StructuredGPClassifier(n_draws=8, prior=Prior(learn_kernel=False), posterior=Inducing()),
        grid,
        cv=2,
        error_score="raise",
    ).fit(*train)
    scores = search.cv_results_["mean_test_score"]
    assert scores.shape == (4,)
    assert np.isfinite(scores).all()
    assert search.best_params_["posterior__n_inducing"] == 50
    accuracy = np.mean(np.array(flat(search.predict(test[0]))) == np.array(flat(test[1])))
    assert search.score(*test) == pytest.approx(accuracy)


def test_grid_search_with_a_scorer_of_sequences_and_kernel_objects(train):
    def whole_sequences(estimator, X, y):
        return np.mean([a == b for a, b in zip(estimator.predict(X), y, strict=True)])

    X = dense(train[0])
    grid = {"kernel": [RBFKernel(), ScaleKernel(MaternKernel(nu=0.5))]}
    search = GridSearchCV(
        StructuredGPClassifier(n_draws=8, prior=Prior(learn_kernel=False)),
        grid,
        cv=2,
        scoring=whole_sequences,
        error_score="raise",
    ).fit(X, train[1])
    best = search.best_estimator_
    assert search.score(X, train[1]) == whole_sequences(best, X, train[1])
    held_out = clone(best).fit(X[10:], train[1][10:])
    index = search.best_index_
    assert search.cv_results_["split0_test_score"][index] == pytest.approx(
        whole_sequences(held_out, X[:10], train[1][:10])
    )


def test_numbers_from_numpy_are_numbers(few, test, tmp_path):
    estimator = StructuredGPClassifier(
        n_draws=np.int64(6), random_state=np.int64(3), posterior=Inducing(n_inducing=np.int64(8))
    ).fit(*few)
    estimator.save(tmp_path / "model")
    loaded = structgp.load(tmp_path / "model")
    assert (loaded.posterior, loaded.n_draws, loaded.random_state) == (Inducing(8), 6, 3)
    assert loaded.predict_marginals(test[0]) == estimator.predict_marginals(test[0])


# -- forms of input --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_every_form_end_to_end(name, fits, train, test):
    change, _ = FORMS[name]
    estimator = fits(name)
    assert estimator.classes_.tolist() == ["L0", "L1", "L2"]
    assert estimator.training_log_["stopped"] == "converged"
    X = change(test[0])
    marginals = estimator.predict_marginals(X)
    assert [len(m) for m in marginals] == [len(y) for y in test[1]]
    assert all(list(token) == ["L0", "L1", "L2"] for m in marginals for token in m)
    assert all(type(p) is float for m in marginals for token in m for p in token.values())
    p = array(marginals)
    assert (p >= 0).all()
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-12)
    labels = estimator.predict(X)
    assert labels == [[max(token, key=token.get) for token in m] for m in marginals]
    # Better than the commonest label on what it has seen.
    common = max(flat(train[1]).count(label) for label in ["L0", "L1", "L2"])
    assert estimator.score(change(train[0]), train[1]) > common / len(flat(train[1])) + 0.05


@pytest.mark.parametrize("name", FORMS)
def test_one_by_one_is_all_at_once(name, fits, test):
    X = FORMS[name][0](test[0])
    estimator = fits(name)
    marginals, labels = estimator.predict_marginals(X), estimator.predict(X)
    for x, m, y in zip(X, marginals, labels, strict=True):
        alone = estimator.predict_marginals_single(x)
        np.testing.assert_allclose(array([alone]), array([m]), atol=1e-9, rtol=0)
        assert estimator.predict_single(x) == y


@pytest.mark.parametrize("name", FORMS)
def test_order_and_company_do_not_matter(name, fits, test):
    X = FORMS[name][0](test[0])
    estimator = fits(name)
    marginals = estimator.predict_marginals(X)
    order = np.random.default_rng(0).permutation(len(X)).tolist()
    shuffled = estimator.predict_marginals([X[i] for i in order])
    for i, found in zip(order, shuffled, strict=True):
        np.testing.assert_allclose(array([found]), array([marginals[i]]), atol=1e-9, rtol=0)
    long = FORMS[name][0]([test[0][0] + test[0][1] + test[0][2] + test[0][3]])
    with_long = estimator.predict_marginals(X + long)[:-1]
    np.testing.assert_allclose(array(with_long), array(marginals), atol=1e-9, rtol=0)


def test_no_sequences_have_no_answers() -> None:
    X, y = [[{"w": "a"}, {"w": "b"}]] * 4, [["A", "B"]] * 4
    model = StructuredGPClassifier(prior=Prior(data_weight=1)).fit(X, y)
    assert model.predict([]) == model.predict_marginals([]) == []


def test_a_warning_points_to_the_line_of_the_user() -> None:
    """Even from within a cached property; and it is the same each time, so that Python shows it once."""
    X, y = [[{"word": "a"}, {"word": "b"}]] * 4, [["A", "B"]] * 4
    model = StructuredGPClassifier(prior=Prior(data_weight=1)).fit(X, y)
    with pytest.warns(StructgpWarning, match="has the feature 'word', but all have 'Word'") as caught:
        model.predict_n_best([[{"Word": "a"}]], 1)
    assert {warning.filename for warning in caught} == {__file__}
    assert len({str(warning.message) for warning in caught}) == 1


def test_an_unknown_parameter_is_named_with_the_class() -> None:
    with pytest.raises(TypeError, match=r"^StructuredGPClassifier\(\) got an unexpected .* 'kernal'"):
        StructuredGPClassifier(kernal="linear")


def test_a_string_is_not_a_sequence_of_tokens() -> None:
    with pytest.raises(InputError, match=r"X\[0\]: expected a sequence of tokens, got a str"):
        StructuredGPClassifier().fit(["two eggs"], [["A", "B"]])


@pytest.mark.parametrize("name", FORMS)
def test_sequences_of_no_and_of_one_token(name, fits, test):
    X = FORMS[name][0](test[0])
    estimator = fits(name)
    empty = {"sparse": scipy.sparse.csr_matrix((0, P * K)), "dense": np.empty((0, D))}
    nothing = empty.get(name, [])
    assert estimator.predict([]) == []
    assert estimator.predict_single(nothing) == []
    assert estimator.predict_marginals_single(nothing) == []
    assert estimator.predict([nothing, X[0], nothing])[::2] == [[], []]
    assert estimator.sequence_log_probs([nothing], [[]]) == [0.0]
    one = X[0][:1]
    assert len(estimator.predict_single(one)) == 1
    (p,) = estimator.predict_marginals_single(one)
    # Of one token the labelling is the label.
    (log_prob,) = estimator.sequence_log_probs([one], [["L1"]])
    assert np.exp(log_prob) == pytest.approx(p["L1"], abs=1e-9)


def test_empty_sequences_in_training_change_nothing(fitted, train, test):
    estimator = StructuredGPClassifier().fit([[], *train[0], []], [[], *train[1], []])
    assert estimator.predict_marginals(test[0]) == fitted.predict_marginals(test[0])


def test_training_on_sequences_of_one_token(train):
    X = [[token] for x in train[0] for token in x]
    y = [[label] for labels in train[1] for label in labels]
    estimator = StructuredGPClassifier(n_draws=8).fit(X, y)
    assert estimator.score(X, y) > 0.6


def test_generators(fitted, train, test):
    estimator = StructuredGPClassifier()
    estimator.fit(
        ((token for token in x) for x in train[0]), (labels for labels in train[1]),
        (x for x in test[0]), (labels for labels in test[1]),
    )  # fmt: skip
    expected = fitted.predict_marginals(test[0])
    assert estimator.predict_marginals(iter(test[0])) == expected
    assert estimator.predict_marginals(iter(x) for x in test[0]) == expected
    assert estimator.predict(iter(test[0])) == fitted.predict(test[0])
    assert estimator.score(iter(test[0]), iter(test[1])) == fitted.score(*test)
    report = estimator.evaluate(iter(test[0]), iter(test[1]))
    assert report == fitted.evaluate(*test)
    assert estimator.training_log_["dev"] == report.as_dict()


def test_the_same_features_in_any_form_are_the_same_model(train, test):
    """With equal weights the template kernel is linear in one-hot features."""

    def fit(change, **parameters):
        estimator = StructuredGPClassifier(
            prior=Prior(amplitude=2.5, learn_kernel=False), n_draws=0, **parameters
        ).fit(change(train[0]), train[1])
        return array(estimator.predict_marginals(change(test[0])))

    expected = fit(list)
    assert expected.std() > 0.1
    assert np.array_equal(fit(dicts), expected)
    for change, parameters in ((bag, {"features": "bag"}), (sparse, {}), (one_hot, {"kernel": "linear"})):
        np.testing.assert_allclose(fit(change, **parameters), expected, atol=1e-3)


def test_auto_tells_columns_from_a_bag(few):
    X = [[list(token) for token in x] for x in few[0]]
    assert StructuredGPClassifier(n_draws=2).fit(X, few[1]).model_.encoder.templates
    X[3][0] = X[3][0][:2]
    assert not StructuredGPClassifier(n_draws=2).fit(X, few[1]).model_.encoder.templates


# -- answers ---------------------------------------------------------------------------------------


def test_score_is_token_accuracy(fitted, test):
    pairs = list(zip(flat(fitted.predict(test[0])), flat(test[1]), strict=True))
    assert fitted.score(*test) == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))


def test_it_learns(fitted, data):
    """New sequences are labelled better than by the commonest label: twenty were enough for a third
    of what the chain that made them knows."""
    new = generate(230, n_labels=3, n_values=K, n_templates=P, mean_length=5, seed=0)
    X, y = new.X[30:], new.y[30:]
    best = [[f"L{i}" for i in data.chain.true_marginals(x).argmax(1)] for x in X]
    ceiling = np.mean([a == b for a, b in zip(flat(best), flat(y), strict=True)])
    common = max(flat(y).count(label) for label in ["L0", "L1", "L2"]) / len(flat(y))
    assert fitted.score(X, y) > common + 0.3 * (ceiling - common)


def test_sequence_log_probs(fitted, test, oracles):
    x, fitted = test[0][0][:3], copy.copy(fitted).set_params(n_draws=128)
    labels = [[f"L{i}" for i in row] for row in oracles.labellings(3, 3)]
    log_probs = np.array(fitted.sequence_log_probs([x] * len(labels), labels))
    assert np.exp(log_probs).sum() == pytest.approx(1, abs=1e-9)
    p = fitted.predict_marginals_single(x)
    chosen = [row[1] == "L2" for row in labels]
    assert np.exp(log_probs[chosen]).sum() == pytest.approx(p[1]["L2"], abs=1e-9)
    assert fitted.sequence_log_probs([x, x], [labels[0], ["L0", "new", "L0"]])[1] is None


def test_dev_data(fitted, train, test):
    estimator = StructuredGPClassifier(n_draws=8).fit(*train, *test)
    assert estimator.training_log_["dev"] == estimator.evaluate(*test).as_dict()
    assert estimator.training_log_["dev"]["token_error"] == pytest.approx(1 - estimator.score(*test))
    assert "dev" not in fitted.training_log_


def test_an_unseen_label_is_wrong_and_no_error(train, test):
    y = [list(labels) for labels in test[1]]
    whole = StructuredGPClassifier(n_draws=8).fit(*train, test[0], y)
    known, predicted = whole.training_log_["dev"], whole.predict(test[0])
    was_wrong = predicted[0][0] != y[0][0]
    y[0][0] = "NEW"
    estimator = StructuredGPClassifier(n_draws=8).fit(*train, test[0], y)
    dev = estimator.training_log_["dev"]
    assert dev["n_unseen_tokens"] == 1
    assert dev["token_error"] == pytest.approx(known["token_error"] + (not was_wrong) / dev["n_tokens"])
    assert np.isfinite(dev["token_nll"])
    assert np.isfinite(dev["sequence_nll"])
    assert estimator.score(test[0], y) == pytest.approx(1 - dev["token_error"])
    assert "NEW" not in estimator.classes_


def test_the_mean_plugged_in(fitted, train, test):
    plugged = StructuredGPClassifier(n_draws=0).fit(*train)
    p, q = array(fitted.predict_marginals(test[0])), array(plugged.predict_marginals(test[0]))
    np.testing.assert_allclose(q.sum(1), 1, atol=1e-12)
    assert np.array_equal(array(plugged.set_params(n_draws="auto").predict_marginals(test[0])), p)
    # Doubt makes answers softer.
    assert q.max(1).mean() > p.max(1).mean() + 0.01


def test_whole_sequences(train, test, oracles):
    estimator = StructuredGPClassifier(decode="sequence", prior=Prior(learn_kernel=False), n_draws=0).fit(
        *train
    )
    for x in test[0]:
        if len(x) > 5:
            continue
        labels = [[f"L{i}" for i in row] for row in oracles.labellings(len(x), 3)]
        log_probs = estimator.sequence_log_probs([x] * len(labels), labels)
        assert estimator.predict_single(x) == labels[int(np.argmax(log_probs))]
    X = train[0] + test[0]
    assert estimator.predict(X) != estimator.set_params(decode="accuracy").predict(X)


def test_more_draws_settle(fitted, test):
    def marginals(n_draws, seed):
        estimator = copy.copy(fitted).set_params(n_draws=n_draws)
        estimator.model_ = dataclasses.replace(fitted.model_, seed=seed)
        return array(estimator.predict_marginals(test[0]))

    few = np.abs(marginals(4, 0) - marginals(4, 1)).mean()
    many = np.abs(marginals(400, 0) - marginals(400, 1)).mean()
    assert many < few / 3


# -- options of the fit ----------------------------------------------------------------------------


@pytest.mark.slow
def test_both_optimisers_agree(fitted, train, test):
    plain = {"prior": Prior(learn_kernel=False), "posterior": Inducing(basis="label")}
    adam = StructuredGPClassifier(inference="adam", **plain).fit(*train)
    second = StructuredGPClassifier(inference="second-order", **plain).fit(*train)
    assert adam.training_log_["optimizer"] == "adam"
    assert second.training_log_["optimizer"] == "second-order"
    assert fitted.training_log_["optimizer"] == "second-order"
    assert fitted.training_log_["reason"] != second.training_log_["reason"] == "asked for"
    p, q = array(adam.predict_marginals(test[0])), array(second.predict_marginals(test[0]))
    assert np.abs(p - q).mean() < 0.03
    assert np.mean(p.argmax(1) == q.argmax(1)) > 0.9
    assert adam.training_log_["fresh_elbo"] == pytest.approx(second.training_log_["fresh_elbo"], abs=4)
    asked = StructuredGPClassifier(inference="second-order").fit(*train)
    p, q = array(asked.predict_marginals(test[0])), array(fitted.predict_marginals(test[0]))
    assert np.array_equal(p, q)


def test_no_pairwise_scores(train, test):
    estimator = StructuredGPClassifier(prior=Prior(transition_sd=0), n_draws=0).fit(*train)
    assert estimator.training_log_["kl_transitions"] == 0
    assert not estimator.model_.posterior["next"].constant_scores()[0].any()
    X, y = test
    marginals = estimator.predict_marginals(X)
    alone = [[estimator.predict_marginals_single([token])[0] for token in x] for x in X]
    np.testing.assert_allclose(array(marginals), array(alone), atol=1e-9)
    by_token = [sum(np.log(p[v]) for p, v in zip(m, labels, strict=True))
                for m, labels in zip(marginals, y, strict=True)]  # fmt: skip
    np.testing.assert_allclose(estimator.sequence_log_probs(X, y), by_token, atol=1e-9)
    with_pairs = StructuredGPClassifier(n_draws=0).fit(*train)
    assert np.abs(array(with_pairs.predict_marginals(X)) - array(marginals)).max() > 0.1


def test_no_transition_scores_with_adam(few, test):
    estimator = StructuredGPClassifier(n_draws=8, inference="adam", prior=Prior(transition_sd=0))
    estimator.fit(*few, callback=lambda info: info.iteration == 8)
    assert np.isfinite(estimator.training_log_["elbo"])
    np.testing.assert_allclose(array(estimator.predict_marginals(test[0])).sum(1), 1, atol=1e-12)


def test_learned_scales_raise_the_bound(train):
    # From scales that are far off, so that there is something to gain.
    def log(learn_scales):
        estimator = StructuredGPClassifier(
            n_draws=2,
            prior=Prior(amplitude=0.1, transition_sd=6.0),
            inference=SecondOrder(learn_scales=learn_scales),
        )
        return estimator.fit(*train).training_log_

    fixed, pairwise, both = log(False), log("transitions"), log(True)
    assert fixed["amplitude_factor"] == pairwise["amplitude_factor"] == 1
    assert both["amplitude_factor"] > 1.5
    assert fixed["transition_sd"] == 6
    assert pairwise["transition_sd"] < 5
    assert both["transition_sd"] < 5
    for bound in ("elbo", "fresh_elbo"):
        assert fixed[bound] + 1 < pairwise[bound] < both[bound] - 1


def test_learned_scales_never_cost_much(few):
    def bound(learn_scales):
        model = StructuredGPClassifier(n_draws=2, inference=SecondOrder(learn_scales=learn_scales))
        return model.fit(*few).training_log_["elbo"]

    fixed, slack = bound(False), 0.02 * len(few[0])
    assert bound("transitions") > fixed - slack
    assert bound(True) > fixed - slack


@pytest.mark.parametrize("name", ["columns", "product", "dense", "sparse rbf", "mixed"])
def test_learned_kernel_raises_the_relaxations_evidence(name, train):
    change, parameters = FORMS[name]
    estimator = StructuredGPClassifier(inference="natural", n_draws=2, **parameters)
    estimator.fit(change(train[0]), train[1], callback=lambda info: True)
    log = estimator.training_log_
    before, after = log["relaxation"]["evidence"]
    assert after > before + 0.1
    assert log["relaxation"]["steps"] > 1


def test_kernel_that_is_not_learned(few):
    estimator = StructuredGPClassifier(n_draws=2, prior=Prior(learn_kernel=False)).fit(*few)
    assert estimator.training_log_["relaxation"] is None
    weights = estimator.model_.posterior.node.kernel.base_kernel.weights
    np.testing.assert_allclose(weights, 1, atol=1e-6)


@pytest.mark.parametrize("learn_kernel", [True, False])
def test_amplitude_is_the_prior_variance(learn_kernel, train):
    estimator = StructuredGPClassifier(
        n_draws=2, kernel="template", prior=Prior(amplitude=2.5, learn_kernel=learn_kernel)
    )
    kernel = estimator.fit(*train).model_.posterior.node.kernel
    assert float(kernel.outputscale) == pytest.approx(2.5)


def test_learning_the_balance_of_blocks_keeps_the_amplitude(train):
    X = mixed(train[0])

    def fit(learn_kernel):
        estimator = StructuredGPClassifier(
            n_draws=2,
            prior=Prior(amplitude=2.5, learn_kernel=learn_kernel),
            inference=SecondOrder(learn_scales="transitions"),
        )
        model = estimator.fit(X, train[1]).model_
        kernel = model.posterior.node.kernel
        found = [variance(kernel, torch.from_numpy(r)) for r in model.encoder.transform(X)]
        return float(torch.cat(found).mean()), kernel

    before, fixed = fit(False)
    after, learned = fit(True)
    assert [float(part.outputscale) for part in fixed.kernels] == pytest.approx([1.25, 1.25])
    assert after == pytest.approx(before)
    categorical, rest = learned.base_kernel.kernels
    assert abs(float(categorical.outputscale) - float(rest.outputscale)) > 0.1


def test_inducing_inputs(fitted, train):
    log = fitted.training_log_
    distinct = len({token for x in train[0] for token in x})
    assert log["n_inducing"] <= distinct
    assert log["inducing_residual"] < 1e-6
    few = StructuredGPClassifier(n_draws=2, posterior=Inducing(n_inducing=5)).fit(*train)
    assert few.training_log_["n_inducing"] == 5
    assert few.model_.posterior.node.inducing.shape == (5, P)
    assert few.training_log_["inducing_residual"] > 0.1
    assert few.training_log_["elbo"] < log["elbo"]


@pytest.mark.parametrize("inference", ["second-order", "adam"])
def test_one_seed_one_fit_to_the_last_bit(inference, train, test):
    def fit(seed):
        return StructuredGPClassifier(inference=inference, random_state=seed).fit(*train)

    one, same, other = fit(1), fit(1), fit(2)
    state, again = one.model_.posterior.state_dict(), same.model_.posterior.state_dict()
    assert all(torch.equal(v, again[k]) for k, v in state.items())
    assert one.predict_marginals(test[0]) == same.predict_marginals(test[0])
    assert one.training_log_["elbo"] == same.training_log_["elbo"]
    assert not torch.equal(one.model_.posterior.node.m, other.model_.posterior.node.m)
    p, q = array(one.predict_marginals(test[0])), array(other.predict_marginals(test[0]))
    assert 0 < np.abs(p - q).mean() < 0.05


def test_a_fit_does_not_touch_the_global_generators(few):
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    StructuredGPClassifier(n_draws=2).fit(*few).predict(few[0])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


def test_fitting_again_starts_afresh(fitted, train, test):
    estimator = StructuredGPClassifier().fit(dicts(train[0])[:8], train[1][:8])
    estimator.fit(*train)
    assert estimator.predict_marginals(test[0]) == fitted.predict_marginals(test[0])


# -- callbacks, reports, warnings ------------------------------------------------------------------


def test_callback_sees_every_step(fitted, train):
    seen = []
    estimator = StructuredGPClassifier().fit(*train, callback=seen.append)
    assert [info.iteration for info in seen] == list(range(len(seen)))
    assert seen == estimator.training_log_["steps"] == fitted.training_log_["steps"]
    assert [info.finished for info in seen] == [False] * (len(seen) - 1) + [True]


def test_a_callback_can_ask_the_posterior_so_far(fitted, train, test):
    looks = []
    estimator = StructuredGPClassifier()

    def look(info):
        looks.append(estimator.so_far())

    estimator.fit(*train, callback=look)
    asked = [look.predict_marginals(test[0]) for look in looks]
    # Looking changes nothing, and a look does not change when the fit goes on.
    assert estimator.predict_marginals(test[0]) == fitted.predict_marginals(test[0])
    np.testing.assert_allclose(array(asked[-1]), array(fitted.predict_marginals(test[0])), atol=1e-5)
    assert np.abs(array(asked[0]) - array(asked[-1])).max() > 1e-3
    first = StructuredGPClassifier().fit(*train, callback=lambda info: True)
    np.testing.assert_allclose(array(asked[0]), array(first.predict_marginals(test[0])), atol=1e-5)
    balanced = looks[-1].set_params(class_weight="balanced").predict_marginals(test[0])
    np.testing.assert_allclose(
        array(balanced), array(clone(looks[-1]).fit(*train).predict_marginals(test[0])), atol=1e-5
    )


def test_there_is_nothing_so_far_outside_of_a_fit(fitted):
    for estimator in (fitted, StructuredGPClassifier()):
        with pytest.raises(InputError, match="so_far: no fit is going on"):
            estimator.so_far()


@dataclasses.dataclass(frozen=True)
class Counting:
    """An optimiser that does nothing, so often."""

    n: int
    name = "any"

    def start(self, problem, generator):
        return 0

    def step(self, problem, state):
        return state + 1, StepInfo(state, -10.0 / (state + 1), 1, state + 1 == self.n, True)


@pytest.mark.filterwarnings("ignore:the fitted scores hardly depend")
@pytest.mark.parametrize("n", [1, 3, 5000])
def test_the_trace_has_the_bound_of_every_step_or_of_some(n, train):
    trace = StructuredGPClassifier(inference=Counting(n)).fit(*train).training_log_["trace"]
    assert len(trace) == min(n, TRACE_POINTS)
    assert (trace[0], trace[-1]) == ([1, -10.0], [n, -10 / n])
    assert n != 3 or trace[1] == [2, -5.0]


def test_a_saved_model_keeps_the_trace_of_its_fit(fitted, tmp_path):
    fitted.save(tmp_path / "model")
    trace = structgp.load(tmp_path / "model").training_log_["trace"]
    assert trace == [[s.iteration + 1, s.elbo] for s in fitted.training_log_["steps"]]


@pytest.mark.parametrize("inference", ["second-order", "adam"])
def test_callback_stops_and_keeps_what_there_is(inference, train, test, tmp_path):
    estimator = StructuredGPClassifier(inference=inference, n_draws=8)
    estimator.fit(*train, *test, callback=lambda info: True)
    assert estimator.training_log_["stopped"] == "interrupted"
    assert len(estimator.training_log_["steps"]) == 1
    assert "dev" in estimator.training_log_
    marginals = estimator.predict_marginals(test[0])
    np.testing.assert_allclose(array(marginals).sum(1), 1, atol=1e-12)
    estimator.save(tmp_path / "model")
    assert structgp.load(tmp_path / "model").predict_marginals(test[0]) == marginals


def test_stopping_at_the_last_step_is_no_interruption(few):
    estimator = StructuredGPClassifier(n_draws=2)
    estimator.fit(*few, callback=lambda info: info.finished)
    assert estimator.training_log_["stopped"] == "converged"


def test_an_error_of_the_callback_passes(few):
    def fail(info):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        StructuredGPClassifier(n_draws=2).fit(*few, callback=fail)


def test_verbose_writes_to_standard_error(few, monkeypatch, capsys):
    logger = logging.getLogger("structgp")
    # The test runner listens at the root; a plain script has nobody there.
    monkeypatch.setattr(logger, "propagate", False)
    handlers, level = list(logger.handlers), logger.level
    estimator = StructuredGPClassifier(verbose=True, n_draws=2).fit(*few)
    out, err = capsys.readouterr()
    assert out == ""
    steps = estimator.training_log_["steps"]
    plan = plan_lines(estimator.training_log_["plan"])
    assert any(line.startswith("optimizer ") for line in plan)
    assert err.splitlines() == [
        *plan,
        *(f"step {i}: bound {info.elbo:.2f}" for i, info in enumerate(steps, start=1)),
    ]
    assert (logger.handlers, logger.level) == (handlers, level)
    StructuredGPClassifier(n_draws=2).fit(*few)
    assert capsys.readouterr() == ("", "")


def test_verbose_goes_to_whoever_listens(few, caplog, capsys):
    with caplog.at_level(logging.INFO, "structgp"):
        estimator = StructuredGPClassifier(verbose=True, n_draws=2).fit(*few)
    log = estimator.training_log_
    assert len(caplog.messages) == len(log["plan"]) + len(log["steps"])
    assert caplog.messages[len(log["plan"])].startswith("step 1: bound ")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (SecondOrder(max_rounds=1, learn_scales=False), "the second-order .* after 1 steps"),
        (Adam(max_steps=4, learn_scales=False), "the adam .* after 4 steps"),
        (Natural(max_steps=2), "the natural .* after 2 steps"),
        (LbfgsBlocks(max_seconds=0.0, learn_scales=False), "the lbfgs .* after 1 steps"),
        (Saga(max_steps=3), "the saga .* after 3 steps"),
    ],
)
def test_stopping_at_the_limit_warns(optimizer, text, train, test):
    with pytest.warns(StructgpWarning, match=text) as caught:
        estimator = StructuredGPClassifier(n_draws=8, inference=optimizer).fit(*train)
    assert caught[0].filename == __file__
    assert estimator.training_log_["stopped"] == "limit"
    assert len(estimator.predict(test[0])) == len(test[0])


def test_training_log_is_complete(fitted):
    log = fitted.training_log_
    documented = StructuredGPClassifier.__doc__.split("training_log_ :")[1].split("model_ :")[0]
    keys = set(re.findall(r"'(\w+)'", documented)) - {"bound", "regression"}  # values of 'shape'
    assert keys == set(log) | {"dev", "vectors", "log_z", "low", "high"}
    assert np.isfinite(log["elbo"])
    assert log["evaluations"] > 0
    assert log["seconds"] > 0
    assert log["kl_inducing"] > 0
    assert log["kl_transitions"] > 0


# -- mistakes --------------------------------------------------------------------------------------


def refused(call, *parts):
    """The text of the InputError: one line, ``place: problem; remedy``, that holds ``parts``."""
    with pytest.raises(InputError) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    text = str(caught.value)
    assert "\n" not in text
    place, problem, remedy = caught.value.place, caught.value.problem, caught.value.remedy
    assert text == f"{place}: {problem}; {remedy}"
    assert min(map(len, (place, problem, remedy))) > 0
    for part in parts:
        assert part in text
    return caught.value


def fit(X, y, **parameters):
    return lambda: StructuredGPClassifier(**parameters).fit(X, y)


def test_one_label_only(train):
    error = refused(fit(train[0], [["L0"] * len(y) for y in train[1]]), "'L0'", "two labels")
    assert error.place == "y"


def test_nothing_to_learn_from():
    assert refused(fit([], []), "no token").place == "X"
    assert refused(fit([[], []], [[], []]), "no token").place == "X"


def test_lengths_that_do_not_match(train, test, fitted):
    X, y = train
    assert refused(fit(X, y[:-1]), "19 label sequences for 20").place == "y"
    assert refused(fit(X, [*y[:4], y[4][:-1], *y[5:]]), "labels for").place == "y[4]"
    for call in (fitted.score, fitted.evaluate, fitted.sequence_log_probs):
        refused(lambda call=call: call(test[0], test[1][1:]), "y: 9 label sequences for 10")


def test_labels_that_are_no_labels(train):
    X, y = train
    assert refused(fit(X, [*y[:2], [1] * len(y[2]), *y[3:]]), "str()").place == "y[2][0]"
    assert refused(fit(X, ["O" * len(labels) for labels in y])).place == "y[0]"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("when", ["fit", "predict"])
@pytest.mark.parametrize("form", ["dense", "sparse", "dicts"])
def test_nan_and_infinity(form, when, bad, fits, train):
    name = {"dense": "dense", "sparse": "sparse", "dicts": "mixed"}[form]
    X = FORMS[name][0](train[0])
    if form == "dense":
        X[2][1, 3] = bad
    elif form == "sparse":
        rows = X[2].toarray()
        rows[1, 3] = bad
        X[2] = scipy.sparse.csr_matrix(rows)
    else:
        X[2][1]["size"] = bad
    call = fit(X, train[1]) if when == "fit" else lambda: fits(name).predict(X)
    error = refused(call, str(bad), "replace NaN and infinite values")
    assert error.place == "X[2][1]"
    assert ("'size'" if form == "dicts" else "column 3") in error.problem


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("inference", "newton", "second-order"),
        ("inference", 3, "second-order"),
        ("inference", None, "second-order"),
        ("decode", "greedy", "sequence"),
        ("structure", "forest", "chain"),
        ("structure", "tree", "structgp.tree(...)"),
        ("structure", 3, "function(f, g, y)"),
        ("structure", None, "function(f, g, y)"),
        ("structure", structgp.structures.Chain, "Chain()"),
        ("prior", None, "structgp.Prior"),
        ("posterior", "dual", "inducing"),
        ("posterior", None, "structgp.Weights"),
        ("features", "words", "columns"),
        ("kernel", "polynomial", "template-product"),
        ("kernel", "rbf", "template-product"),
        ("kernel", {"dense": "rbf"}, "categorical"),
        ("kernel", {"categorical": "rbf"}, "template"),
        ("kernel", None, "GPyTorch"),
        ("kernel", 3, "GPyTorch"),
        ("kernel", {"categorical": 3}, "GPyTorch"),
        ("n_draws", -1, "0 or more"),
        ("n_draws", None, "0 or more"),
        ("random_state", -1, "0 or more"),
        ("random_state", None, "0 or more"),
        ("warm_start", 1, "True"),
    ],
)
def test_unknown_options(name, value, remedy, train):
    error = refused(fit(*train, **{name: value}))
    assert error.place == name
    assert remedy in error.remedy


NESTED = {
    "structure": (
        lambda **given: Custom(Chain(), **given),
        [
            ("predict_with", "tree", "chain"),
            ("predict_with", None, "chain"),
            ("predict_with", structgp.structures.Piecewise(), "chain"),
            ("n_jobs", 0, "1 or more"),
            ("n_jobs", 1.5, "1 or more"),
            ("n_jobs", "all", "1 or more"),
        ],
    ),
    "inference": (
        Natural,
        [
            ("gradient", "adjoint", "pathwise"),
            ("gradient", None, "pathwise"),
            ("learn_scales", "pairwise", "transitions"),
            ("learn_scales", None, "transitions"),
        ],
    ),
    "posterior": (
        Mixture,
        [
            ("n_components", 0, "1 or more"),
            ("n_components", None, "1 or more"),
            ("covariance", "sparse", "diagonal"),
            ("rank", 0, "1 or more"),
            ("rank", 2.5, "1 or more"),
            ("rank", 4, "covariance='low-rank'"),
            ("transition_covariance", None, "diagonal"),
            ("entropy", "renyi", "bhattacharyya"),
            ("basis", "vowels", "contrast"),
            ("n_inducing", 0, "1 or more"),
            ("n_inducing", 2.5, "1 or more"),
            ("n_inducing", "many", "1 or more"),
        ],
    ),
    "prior": (
        Prior,
        [
            ("learn_kernel", "shape", "auto"),
            ("amplitude", 0, "above 0"),
            ("amplitude", -1.0, "above 0"),
            ("amplitude", "large", "auto"),
            ("amplitude", float("nan"), "above 0"),
            ("amplitude", float("inf"), "above 0"),
            ("amplitude", None, "above 0"),
            ("transition_sd", -0.1, "0 or more"),
            ("transition_sd", float("nan"), "0 or more"),
            ("transition_sd", float("inf"), "0 or more"),
            ("transition_sd", "wide", "0 or more"),
        ],
    ),
}


@pytest.mark.parametrize(
    ("owner", "name", "value", "remedy"),
    [(owner, *case) for owner, (_, cases) in NESTED.items() for case in cases],
)
def test_unknown_values_in_option_objects(owner, name, value, remedy, train):
    error = refused(fit(*train, **{owner: NESTED[owner][0](**{name: value})}))
    assert error.place == name
    assert remedy in error.remedy


def test_one_kernel_for_two_kinds_of_features(train):
    error = refused(fit(mixed(train[0]), train[1], kernel=RBFKernel()), "dict", "categorical, sparse")
    assert error.place == "kernel"


def test_dev_data_needs_both_halves(train, test):
    estimator = StructuredGPClassifier(n_draws=2)
    refused(lambda: estimator.fit(*train, X_dev=test[0]), "y_dev")
    refused(lambda: estimator.fit(*train, y_dev=test[1]), "X_dev")
    assert not hasattr(estimator, "model_")


@pytest.mark.parametrize(
    ("trained", "given"),
    [("dicts", "columns"), ("columns", "dicts"), ("columns", "dense"), ("dense", "sparse"),
     ("sparse", "dense"), ("dense", "columns"), ("mixed", "sparse")],
)  # fmt: skip
def test_another_form_at_predict(trained, given, fits, test):
    X = FORMS[given][0](test[0])
    for ask in ("predict", "predict_marginals"):
        error = refused(lambda ask=ask: getattr(fits(trained), ask)(X), "but training had")
        assert error.place == "X[0]"
        assert "use one form throughout" in error.remedy


def test_another_width_at_predict(fits, test):
    X = dense(test[0])
    X[3] = X[3][:, :-1]
    assert refused(lambda: fits("dense").predict(X), "4 columns", "had 5").place == "X[3]"
    X = sparse(test[0])
    X[0] = X[0][:, :-1]
    assert refused(lambda: fits("sparse").predict(X), "59 columns", "had 60").place == "X[0]"
    X = [list(x) for x in test[0]]
    X[1][1] = ("v1", "v2")
    assert refused(lambda: fits("columns").predict(X), "2 strings", "had 3").place == "X[1][1]"


def test_forms_mixed_in_training(train):
    X = [*train[0][:3], dicts(train[0])[3], *train[0][4:]]
    assert refused(fit(X, train[1])).place == "X[3]"


@pytest.mark.parametrize("x", ["a sentence", 3, None, [1.0, 2.0], ["a", "b"]])
def test_what_is_no_sequence(x, fitted):
    refused(lambda: fitted.predict([x]))


def test_unfitted(train, tmp_path):
    estimator = StructuredGPClassifier()
    for call in (
        lambda: estimator.predict(train[0]),
        lambda: estimator.predict_single(train[0][0]),
        lambda: estimator.predict_marginals(train[0]),
        lambda: estimator.predict_marginals_single(train[0][0]),
        lambda: estimator.sequence_log_probs(*train),
        lambda: estimator.score(*train),
        lambda: estimator.evaluate(*train),
        lambda: estimator.save(tmp_path / "model"),
    ):
        with pytest.raises(NotFittedError, match="not fitted yet"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_fit_that_fails_leaves_the_last_one(few, test):
    estimator = StructuredGPClassifier(n_draws=2).fit(*few)
    before = estimator.predict(test[0])
    refused(lambda: estimator.fit(few[0], few[1][1:]))
    assert estimator.predict(test[0]) == before


# -- after the fit -----------------------------------------------------------------------------------


def test_parameters_of_prediction_may_change_after_the_fit(train):
    model = StructuredGPClassifier().fit(*train)
    many = model.predict_marginals(train[0])
    few = model.set_params(n_draws=2).predict_marginals(train[0])
    assert few != many
    assert model.set_params(n_draws="auto").predict_marginals(train[0]) == many
    with pytest.raises(
        InputError, match=r"^decode: 'foo' is not known; use one of auto, f1, accuracy, sequence, cost$"
    ):
        model.set_params(decode="foo").predict(train[0])


def test_scales_given_as_numpy_flags(few):
    plain, numpy = (
        StructuredGPClassifier(prior=Prior(amplitude=0.1), inference=SecondOrder(learn_scales=flag))
        .fit(*few)
        .training_log_
        for flag in (True, np.True_)
    )
    assert numpy["amplitude_factor"] == plain["amplitude_factor"] != 1


def test_features_that_say_nothing_are_no_crash():
    y = [["A", "B", "A"], ["B", "A", "A"]]
    silent = [scipy.sparse.csr_array((3, 5)), scipy.sparse.csr_array((3, 5))]
    assert len(StructuredGPClassifier().fit(silent, y).predict(silent)[0]) == 3
    zeros = [np.zeros((3, 2)), np.zeros((3, 2))]
    assert len(StructuredGPClassifier(kernel="linear").fit(zeros, y).predict(zeros)[0]) == 3


def test_verbose_is_heard_when_the_root_logger_is_not(few, caplog, capsys):
    logging.getLogger().setLevel(logging.WARNING)
    StructuredGPClassifier(verbose=True).fit(*few)
    assert "step 1: bound" in capsys.readouterr().err


# -- likelihoods of the user -----------------------------------------------------------------------


def torch_softmax(f, g, y):
    """Each label given the one before, by a softmax; in torch."""
    rows = torch.cat([f[:, :1], f[:, 1:] + g[:, y[:-1]]], 1)
    return rows.log_softmax(-1)[:, torch.arange(len(y)), y].sum(-1)


def numpy_softmax(f, g, y):
    """The same in NumPy."""
    f, g, y = np.asarray(f), np.asarray(g), np.asarray(y)
    rows = np.concatenate([f[:, :1], f[:, 1:] + g[:, y[:-1]]], 1)
    rows = rows - np.logaddexp.reduce(rows, axis=-1, keepdims=True)
    return rows[:, np.arange(len(y)), y].sum(-1)


def batched_softmax(f, g, y, mask):
    """The same on a whole batch."""
    rows = torch.cat([f[:, :, :1], f[:, :, 1:] + g[:, y[:, :-1]]], 2)
    chosen = rows.log_softmax(-1).gather(-1, y.expand(len(f), -1, -1)[..., None])[..., 0]
    return (chosen * mask).sum(-1)


batched_softmax.batched = True


class Softmax(Structure):
    """The same as a structure, with marginals of its own."""

    def log_prob(self, f, g, y, mask):
        return batched_softmax(f, g, y, mask)

    def marginals(self, f, g, mask):
        return f.softmax(-1) * mask[..., None]


LIKELIHOODS = {
    "torch": torch_softmax,
    "numpy": numpy_softmax,
    "batched": batched_softmax,
    "structure": Softmax(),
    "piecewise": "piecewise",
    "piecewise, object": Piecewise(),
    "chain, object": Chain(),
}
FIXED = {"prior": Prior(learn_kernel=False), "posterior": Inducing(n_inducing=12)}
QUICK = {"n_draws": 8, **FIXED}


@pytest.fixture(scope="module")
def few(train):
    return train[0][:8], train[1][:8]


@pytest.fixture(scope="module")
def custom(few):
    """The fit with a likelihood, made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = StructuredGPClassifier(structure=LIKELIHOODS[name], **QUICK).fit(*few)
        return made[name]

    return get


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_every_likelihood_fits_and_predicts(name, custom, few, test):
    estimator = custom(name)
    log = estimator.training_log_
    assert log["stopped"] == "converged"
    closed = "piecewise" in name or "chain" in name
    assert log["optimizer"] == ("second-order" if closed else "natural")
    assert log["gradient"] == ("surrogate" if name == "numpy" else "pathwise")
    p = array(estimator.predict_marginals(test[0]))
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-12)
    common = max(flat(few[1]).count(label) for label in ["L0", "L1", "L2"])
    assert estimator.score(*few) > common / len(flat(few[1])) + 0.05
    assert np.isfinite(estimator.evaluate(*test).token_nll)


def test_one_likelihood_in_every_form_is_one_fit(custom, test):
    """With and without gradients, and in one call or many: the same posterior but for noise."""
    one = array(custom("torch").predict_marginals(test[0]))
    for name, close in {"batched": 1e-9, "numpy": 0.05}.items():
        other = array(custom(name).predict_marginals(test[0]))
        assert np.abs(one - other).max() < close, name
    # A structure says itself that it ignores shifts; of a function it was found out.
    own = custom("structure").training_log_
    assert len(own["function_scales"]) == 3
    found = custom("torch").training_log_
    assert len(found["function_scales"]) == 2
    assert own["elbo"] - 1 < found["elbo"] < own["elbo"] + 5  # on the draws of the last step


def test_a_likelihood_by_name_or_as_an_object(custom, fitted, few, test):
    named = StructuredGPClassifier(**QUICK).fit(*few)
    assert custom("chain, object").predict_marginals(test[0]) == named.predict_marginals(test[0])
    pair = custom("piecewise"), custom("piecewise, object")
    assert pair[0].predict_marginals(test[0]) == pair[1].predict_marginals(test[0])
    assert pair[0].predict_marginals(test[0]) != named.predict_marginals(test[0])


def test_what_predictions_are_read_with(custom, few, test):
    """Marginals of its own if the likelihood has them, else its values; the chain's for the chain."""
    for name in ("piecewise", "chain, object"):
        assert isinstance(custom(name).model_.structure, Chain), name
        assert "answers" not in custom(name).training_log_["plan"]
    for name in ("torch", "numpy", "batched"):
        answers = custom(name).training_log_["plan"]["answers"]
        assert answers["value"] == "enumeration"
        assert f"labellings for {name}_softmax to value" in answers["reason"]
        assert custom(name).model_.structure.name == f"{name}_softmax"
    own = StructuredGPClassifier(structure=Softmax(), n_draws=0, **FIXED).fit(
        *few, callback=lambda info: info.iteration == 3
    )
    assert isinstance(own.model_.structure, Softmax)
    x = test[0][0]
    alone = [own.predict_marginals_single([token])[0] for token in x]
    np.testing.assert_allclose(array([own.predict_marginals_single(x)]), array([alone]), atol=1e-9)
    chain = StructuredGPClassifier(
        structure=Custom(Softmax(), predict_with="chain"), n_draws=0, **FIXED
    ).fit(*few, callback=lambda info: info.iteration == 3)
    assert isinstance(chain.model_.structure, Chain)
    assert chain.predict_marginals_single(x) != own.predict_marginals_single(x)
    given = StructuredGPClassifier(
        structure=Custom(Chain(), predict_with=Softmax()), n_draws=0, **FIXED
    ).fit(*few, callback=lambda info: info.iteration == 3)
    assert isinstance(given.model_.structure, Softmax)
    assert given.training_log_["optimizer"] == "second-order"


def test_a_structure_without_a_decoder(few, test):
    estimator = fit_log(few, 3, decode="sequence", structure=Softmax())
    error = refused(lambda: estimator.predict(test[0]), "Softmax offers no decoder")
    assert error.place == "decode"
    assert len(estimator.set_params(decode="accuracy").predict(test[0])) == len(test[0])


def test_clone_and_grid_search_with_a_callable(few):
    estimator = StructuredGPClassifier(structure=torch_softmax, **QUICK)
    assert estimator.get_params()["structure"] is torch_softmax
    assert clone(estimator).structure is not None
    grid = {"structure": ["chain", torch_softmax, batched_softmax]}
    search = GridSearchCV(estimator, grid, cv=2, error_score="raise")
    search.fit(*few, callback=lambda info: info.iteration == 5)
    scores = search.cv_results_["mean_test_score"]
    assert scores.shape == (3,)
    assert scores[1] == pytest.approx(scores[2])


def test_a_model_of_a_function_loads_and_answers_as_it_did(custom, test, tmp_path):
    """A file holds no code: the function has to be passed again, or the chain asked for."""
    estimator = custom("numpy")
    estimator.save(tmp_path / "model")
    with pytest.raises(ModelFileError, match=r"numpy_softmax, which a file does not hold; pass it"):
        structgp.load(tmp_path / "model")
    with pytest.raises(ModelFileError, match=r"numpy_softmax, .* and was given .*torch_softmax"):
        structgp.load(tmp_path / "model", structure=torch_softmax)
    with pytest.warns(StructgpWarning, match="a likelihood that a file does not hold; the chain answers"):
        loaded = structgp.load(tmp_path / "model", structure="chain")
    assert isinstance(loaded.model_.structure, Chain)
    assert loaded.get_params()["structure"] == "chain"
    loaded = structgp.load(tmp_path / "model", structure=numpy_softmax)
    assert loaded.get_params()["structure"] is numpy_softmax
    assert loaded.get_params()["posterior__n_inducing"] == 12
    assert loaded.predict_marginals(test[0]) == estimator.predict_marginals(test[0])
    assert loaded.training_log_["optimizer"] == "natural"


def test_parameters_that_a_file_cannot_keep(few, test, tmp_path):
    estimator = StructuredGPClassifier(
        inference=Natural(max_steps=2), structure=Custom(torch_softmax, predict_with=Softmax()), **QUICK
    )
    with pytest.warns(StructgpWarning, match="after 2 steps"):
        estimator.fit(*few)
    estimator.save(tmp_path / "model")
    with pytest.raises(ModelFileError, match=r"Softmax, which a file does not hold; pass it: load\(path, "):
        structgp.load(tmp_path / "model")
    loaded = structgp.load(tmp_path / "model", structure=Softmax())
    assert loaded.predict_marginals(test[0]) == estimator.predict_marginals(test[0])
    parameters = loaded.get_params()
    assert isinstance(parameters["structure"], Softmax)
    assert parameters["inference"] == Natural(max_steps=2)
    for name, value in QUICK.items():
        assert parameters[name] == value, name


@pytest.mark.parametrize("form", ["raises", "nan", "-inf"])
def test_a_failing_likelihood_names_the_sequence(form, few):
    order = sorted({label for labels in few[1] for label in labels})
    n = next(i for i, labels in enumerate(few[1]) if i and few[1].count(labels) == 1)
    wrong = [order.index(label) for label in few[1][n]]

    def failing(f, g, y):
        values = numpy_softmax(f, g, y)
        if list(y) == wrong:
            if form == "raises":
                raise RuntimeError("no such thing")
            values = np.where(np.arange(len(values)) == 1, float(form), values)
        return values

    error = refused(
        fit(*few, structure=Custom(failing, predict_with="chain"), **QUICK), f"training sequence {n + 1} "
    )
    assert isinstance(error, LikelihoodError)
    assert error.sequence == n
    assert f"({len(wrong)} tokens)" in error.place
    assert ("no such thing" if form == "raises" else form) in error.problem


@pytest.mark.slow
def test_processes_change_nothing(few):
    """Their number does not enter any result."""
    with pytest.warns(StructgpWarning, match="after 2 steps"):
        one, two = (
            StructuredGPClassifier(
                structure=Custom(numpy_softmax, n_jobs=n_jobs),
                inference=Natural(max_steps=2, n_draws=32),
                **QUICK,
            ).fit(*few)
            for n_jobs in (1, 2)
        )
    first, second = one.model_.posterior.state_dict(), two.model_.posterior.state_dict()
    assert all(torch.equal(v, second[k]) for k, v in first.items())
    assert one.training_log_["elbo"] == two.training_log_["elbo"]


# -- the engine's options ----------------------------------------------------------------------------


def fit_log(few, most=None, **parameters):
    """``most`` : steps, None for as many as it takes."""
    callback = None if most is None else lambda info: info.iteration + 1 == most
    return StructuredGPClassifier(**(QUICK | parameters)).fit(*few, callback=callback)


def test_the_gradient_is_what_was_asked_for(few):
    logs = {
        name: fit_log(
            few, 8, inference=Natural(gradient=name, n_draws=64, learn_scales="auto")
        ).training_log_
        for name in ("auto", "pathwise", "leave-one-out")
    }
    assert [log["gradient"] for log in logs.values()] == ["pathwise", "pathwise", "leave-one-out"]
    assert logs["auto"]["elbo"] == logs["pathwise"]["elbo"] != logs["leave-one-out"]["elbo"]
    for log in logs.values():
        assert log["evaluations"] == 64 * 8 * len(log["steps"])


@pytest.mark.parametrize("kind", [SecondOrder, Natural])
def test_draws_of_a_gradient_are_what_was_asked_for(kind, few):
    logs = [fit_log(few, 8, inference=kind(n_draws=n)).training_log_ for n in (4, 12)]
    for n, log in zip((4, 12), logs, strict=True):
        # The first step has evaluations at the mean too, the last on fresh draws.
        assert len(log["steps"]) > 2
        assert log["steps"][1].evaluations % (8 * n) == 0
    assert logs[0]["fresh_elbo"] != logs[1]["fresh_elbo"]


def test_components(few, test):
    estimator = fit_log(few, 60, posterior=Mixture(2, n_inducing=12))
    log = estimator.training_log_
    assert estimator.model_.posterior.n_components == 2
    assert log["optimizer"] == "second-order, then adam"
    assert log["reason"].endswith("a mixture starts from one component")
    np.testing.assert_allclose(array(estimator.predict_marginals(test[0])).sum(1), 1, atol=1e-12)
    # One component is where it came from, so that it cannot be much worse.
    assert log["fresh_elbo"] > fit_log(few).training_log_["fresh_elbo"] - 2


@pytest.mark.parametrize("inference", ["auto", "natural", "adam", "saga", "lbfgs"])
def test_components_with_every_inference(inference, few, test):
    posterior = Mixture(2, n_inducing=12)
    estimator = StructuredGPClassifier(**(QUICK | {"inference": inference, "posterior": posterior}))
    estimator.fit(*few, callback=lambda info: info.iteration == 10)
    q = estimator.model_.posterior
    assert q.n_components == 2
    assert np.isfinite(estimator.training_log_["fresh_elbo"])
    assert len(estimator.predict(test[0])) == len(test[0])


def test_forms_of_the_covariances(few, tmp_path, test):
    plain = fit_log(few)
    thin = fit_log(few, posterior=Inducing(12, covariance="diagonal"))
    full = fit_log(few, posterior=Inducing(12, transition_covariance="full"))
    forms = [
        (q.node.form, isinstance(q["next"], FullTable))
        for q in (e.model_.posterior for e in (plain, thin, full))
    ]
    assert forms == [("full", False), ("diagonal", False), ("full", True)]
    assert full.training_log_["optimizer"] == "natural"  # second order has no form for it
    assert thin.training_log_["elbo"] < plain.training_log_["elbo"]
    for estimator in (thin, full):
        estimator.save(tmp_path / "model")
        loaded = structgp.load(tmp_path / "model")
        assert loaded.predict_marginals(test[0]) == estimator.predict_marginals(test[0])


def test_second_order_and_full_pairs(few):
    error = refused(
        lambda: fit_log(
            few, inference="second-order", posterior=Inducing(12, transition_covariance="full")
        ),
        "use 'adam'",
    )
    assert error.place == "inference"


def test_the_entropy_of_a_mixture(few):
    """Jensen's bound is looser, and that shows in the divergence and in the bound."""

    def log(entropy):
        posterior = Mixture(2, entropy, n_inducing=12)
        estimator = StructuredGPClassifier(**(QUICK | {"inference": "adam", "posterior": posterior}))
        estimator.fit(*few, callback=lambda info: info.iteration == 12)
        q = estimator.model_.posterior
        assert estimator.training_log_["kl_inducing"] == pytest.approx(float(q.node.kl(entropy)))
        return estimator.training_log_

    auto, ours, jensen = log("auto"), log("bhattacharyya"), log("jensen")
    assert auto["elbo"] == ours["elbo"]
    # 0.153 nats a dimension, three labels of twelve inducing values.
    assert jensen["elbo"] < ours["elbo"] - 0.1 * 36
    error = refused(fit(*few, posterior=Mixture(n_components=2, entropy="exact")), "2 components")
    assert error.place == "entropy"


def test_learning_all_moves_the_kernel(few):
    fixed, moved = (
        StructuredGPClassifier(inference=LbfgsBlocks(5, 3, 3, learn_scales=learn), **QUICK).fit(
            *few, callback=lambda info: True
        )
        for learn in ("transitions", "all")
    )
    weights = [e.model_.posterior.node.kernel.base_kernel.weights for e in (fixed, moved)]
    np.testing.assert_allclose(weights[0], 1, atol=1e-6)
    assert (weights[1] - 1).abs().max() > 0.01
    assert moved.training_log_["elbo"] > fixed.training_log_["elbo"]
    for optimizer in (Natural(), Saga(), SGD()):
        error = refused(
            fit(*few, inference=dataclasses.replace(optimizer, learn_scales="all"), **QUICK),
            "'adam' or 'paper-batch'",
        )
        assert error.place == "learn_scales"


def with_draws(monkeypatch, name, n_draws, **changes):
    """A preset of the paper with fewer draws: its own are made for hours."""
    presets = structgp.paper.PRESETS
    optimizer = dataclasses.replace(presets[name].optimizer, n_draws=n_draws, **changes)
    monkeypatch.setitem(presets, name, dataclasses.replace(presets[name], optimizer=optimizer))


def test_learning_the_kernel_is_automatic(few, monkeypatch):
    parameters = {"n_draws": 2, "posterior": Inducing(n_inducing=12)}
    # On the bound, feature by feature; where the fit cannot, on a relaxation.
    fitted = StructuredGPClassifier(**parameters).fit(*few)
    assert isinstance(fitted.model_.posterior.node.kernel, RelevanceKernel)
    assert fitted.model_.posterior.node.kernel.log_relevance.std() > 0.01
    assert len(set(fitted.training_log_["kernel_scales"].values())) > 1
    assert fitted.training_log_["relaxation"] is None
    fixed = StructuredGPClassifier(prior=Prior(learn_kernel=False), **parameters).fit(*few)
    assert not isinstance(fixed.model_.posterior.node.kernel, RelevanceKernel)
    assert fixed.training_log_["function_scales"] == pytest.approx([1.0] * 2)
    natural = StructuredGPClassifier(inference="natural", **parameters)
    natural.fit(*few, callback=lambda info: True)
    assert natural.training_log_["relaxation"] is not None
    with_draws(monkeypatch, "paper-batch", 20, node_steps=2, transition_steps=1, hyper_steps=1)
    for learn_kernel, learned in (("auto", False), (True, True)):
        estimator = StructuredGPClassifier(
            prior=Prior(learn_kernel=learn_kernel), inference="paper-batch", **parameters
        ).fit(*few, callback=lambda info: True)
        assert (estimator.training_log_["relaxation"] is not None) == learned


def test_inducing_inputs_by_default(train, monkeypatch):
    monkeypatch.setattr(structgp.plan.choices, "N_INDUCING", 7)
    monkeypatch.setattr(structgp.plan.choices, "ALL_TOKENS_WORK", 0.0)
    with_draws(monkeypatch, "paper-stochastic", 20)
    presets = structgp.paper.PRESETS
    fewer = dataclasses.replace(presets["paper-stochastic"], n_inducing=5)
    monkeypatch.setitem(presets, "paper-stochastic", fewer)

    def count(**parameters):
        estimator = StructuredGPClassifier(n_draws=2, **parameters)
        estimator.fit(*train, callback=lambda info: True)
        return estimator.training_log_["n_inducing"]

    assert count(posterior="inducing") == 7
    assert count(inference="paper-stochastic") == 5
    assert count(inference="paper-stochastic", posterior=Inducing(9)) == 9


@pytest.mark.parametrize("inference", ["paper-batch", "paper-stochastic"])
@pytest.mark.parametrize("likelihood", ["chain", "numpy"])
def test_presets_run_to_the_end(inference, likelihood, few, test, monkeypatch):
    """With fewer draws and a limit: the schedules are made for hours."""
    short = {"max_iterations": 1, "node_steps": 4, "transition_steps": 2, "hyper_steps": 1}
    limits = {"paper-batch": short, "paper-stochastic": {"max_steps": 30}}
    with_draws(monkeypatch, inference, 60, **limits[inference])
    estimator = StructuredGPClassifier(
        n_draws=8,
        structure=LIKELIHOODS.get(likelihood, likelihood),
        posterior=Inducing(n_inducing=6),
        inference=inference,
    )
    with pytest.warns(StructgpWarning, match=f"the {inference} optimiser stopped after"):
        estimator.fit(*few)
    log = estimator.training_log_
    assert (log["optimizer"], log["gradient"]) == (inference, "control-variate")
    assert log["relaxation"] is None
    moved = log["amplitude_factor"] != 1
    assert moved == (inference == "paper-batch")
    np.testing.assert_allclose(array(estimator.predict_marginals(test[0])).sum(1), 1, atol=1e-12)


@pytest.mark.parametrize(
    "parameters",
    [
        {"structure": numpy_softmax},
        {"inference": "natural"},
        {"inference": "saga"},
        {"inference": LbfgsBlocks(node_steps=3, transition_steps=2, hyper_steps=1)},
        {"posterior": Mixture(2, n_inducing=12)},
    ],
    ids=lambda p: "-".join(map(str, p)),
)
def test_one_seed_one_fit_with_every_engine(parameters, few):
    # Enough for a gradient of every sequence to be stored, and to move after that.
    steps = 12 if parameters.get("inference") == "saga" else 1

    def state(seed):
        estimator = StructuredGPClassifier(**(QUICK | parameters), random_state=seed)
        estimator.fit(*few, callback=lambda info: info.iteration == steps)
        return estimator.model_.posterior.state_dict()

    first, again, other = state(1), state(1), state(2)
    assert all(torch.equal(v, again[k]) for k, v in first.items())
    assert not torch.equal(first["node.m"], other["node.m"])
