from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from benchmarks.generate import generate
from experiments.methods.design import LinearFeatures
from experiments.methods.frank_wolfe import FrankWolfe, best_labelling
from experiments.methods.svm import C_GRID, StructuredSVM
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from structgp.data.labels import LabelEncoder
from structgp.errors import InputError


@pytest.fixture(scope="module")
def data():
    return generate(60, n_labels=3, mean_length=6, n_templates=2, n_values=8, seed=0)


@pytest.fixture(scope="module")
def tiny():
    """Tokens and labels of few, short sequences, so that labellings can be listed."""
    made = generate(6, n_labels=3, mean_length=3, n_templates=2, n_values=4, seed=1)
    X, y = [x[:4] for x in made.X], [path[:4] for path in made.y]
    return LinearFeatures().fit(X).transform(X), LabelEncoder().fit(y).transform(y)


def score(x, path, weights, transitions):
    node = (x @ weights)[np.arange(len(path)), path].sum()
    return node + transitions[path[:-1], path[1:]].sum()


def objective(tokens, y, C, weights, transitions):
    """|w|^2 / 2 + C sum_n max_y [...], by listing every labelling."""
    total = 0.5 * ((weights**2).sum() + (transitions**2).sum())
    for n, truth in enumerate(y):
        x = tokens.features[tokens.starts[n] : tokens.starts[n + 1]].toarray()
        paths = map(np.array, product(range(3), repeat=len(truth)))
        violation = max((p != truth).sum() + score(x, p, weights, transitions) for p in paths)
        total += C * (violation - score(x, truth, weights, transitions))
    return total


# --- decoding --------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(T=st.integers(1, 4), V=st.integers(1, 3), G=st.integers(1, 2), seed=st.integers(0, 1000))
def test_best_labelling_is_the_best_of_all(T, V, G, seed):
    rng = np.random.default_rng(seed)
    scores, transitions = rng.normal(size=(G, T, V)), rng.normal(size=(G, V, V))
    found = best_labelling(scores, transitions)
    for g in range(G):
        paths = [np.array(p) for p in product(range(V), repeat=T)]
        values = [scores[g, np.arange(T), p].sum() + transitions[g, p[:-1], p[1:]].sum() for p in paths]
        np.testing.assert_array_equal(found[g], paths[int(np.argmax(values))])


# --- the solver ------------------------------------------------------------------------------


def solver_on(tiny, C, passes, tolerance=1e-12):
    tokens, y = tiny
    solver = FrankWolfe(tokens, y, range(len(y)), np.atleast_1d(C), 3, seed=0)
    solver.run(tolerance, passes)
    return solver


def test_objective_is_that_of_all_labellings_and_the_gap_closes(tiny):
    tokens, y = tiny
    for passes in (5, 300):
        solver = solver_on(tiny, 0.3, passes)
        primal = objective(tokens, y, 0.3, solver._node[:, 0], solver._transitions[0])
        assert solver.objective[0] == pytest.approx(primal, rel=1e-9)
    assert solver.relative_gap[0] < 1e-3
    # No other weights come below the dual, which is the objective less the gap.
    dual = primal - solver.relative_gap[0] * 0.3 * solver.n_tokens
    rng = np.random.default_rng(0)
    for _ in range(20):
        step = 0.03 * rng.normal(size=solver._node[:, 0].shape)
        assert objective(tokens, y, 0.3, solver._node[:, 0] + step, solver._transitions[0]) >= dual


def test_weights_are_the_sum_of_the_shares(tiny):
    solver = solver_on(tiny, [0.1, 1.0], 7)
    node, transitions = np.zeros_like(solver._node), np.zeros_like(solver._transitions)
    for block in solver._blocks:
        node[block.columns] += block.node
        transitions += block.transitions
    np.testing.assert_allclose(node, solver._node, atol=1e-12)
    np.testing.assert_allclose(transitions, solver._transitions, atol=1e-12)


def test_average_gives_iterate_k_the_weight_k(tiny, monkeypatch):
    iterates = []
    step = FrankWolfe._step

    def watched(self, block):
        step(self, block)
        iterates.append((self._node.copy(), self._transitions.copy()))

    monkeypatch.setattr(FrankWolfe, "_step", watched)
    found = solver_on(tiny, 0.3, 4).average()
    weight = np.arange(1, len(iterates) + 1)
    for part in (0, 1):
        expected = np.average([iterate[part] for iterate in iterates], axis=0, weights=weight)
        np.testing.assert_allclose(found[part], expected, atol=1e-12)


def test_several_C_at_once_are_each_alone(tiny):
    together = solver_on(tiny, [0.03, 0.3, 3.0], 10).average()
    for g, C in enumerate((0.03, 0.3, 3.0)):
        alone = solver_on(tiny, C, 10).average()
        np.testing.assert_allclose(together[0][:, g], alone[0][:, 0], atol=1e-12)
        np.testing.assert_allclose(together[1][g], alone[1][0], atol=1e-12)


# --- the estimator ---------------------------------------------------------------------------


def test_learns_the_chain():
    many = generate(300, n_labels=3, mean_length=6, n_templates=2, n_values=8, seed=0)
    svm = StructuredSVM(0.1).fit(many.X[:200], many.y[:200])
    assert svm.training_log_["stopped"] == "converged"
    assert svm.training_log_["gap"] <= svm.tolerance
    best = [[many.chain.labels[v] for v in many.chain.true_marginals(x).argmax(1)] for x in many.X[200:]]
    right = sum(a == b for p, q in zip(best, many.y[200:], strict=True) for a, b in zip(p, q, strict=True))
    possible = right / sum(map(len, best))
    assert svm.score(many.X[200:], many.y[200:]) > possible - 0.03


def test_cross_validation_is_what_it_says(data):
    X, y = data.X[:13], data.y[:13]
    svm = StructuredSVM((0.03, 0.3), n_folds=3, random_state=7, max_passes=5).fit(X, y)
    order = np.random.default_rng(7).permutation(13)
    features = LinearFeatures().fit(X)
    tokens, labels = features.transform(X), LabelEncoder().fit(y).transform(y)
    for C, error in svm.cv_scores_.items():
        wrong = 0
        for held_out in np.array_split(order, 3):
            rest = sorted(set(range(13)) - set(held_out.tolist()))
            solver = FrankWolfe(tokens, labels, rest, np.array([C]), 3, seed=7)
            solver.run(svm.tolerance, 5)
            weights, transitions = solver.average()
            for n in held_out:
                x = tokens.features[tokens.starts[n] : tokens.starts[n + 1]]
                path = best_labelling((x @ weights[:, 0])[None], transitions)[0]
                wrong += int((path != labels[n]).sum())
        assert error == pytest.approx(wrong / sum(map(len, y)))
    assert svm.cv_scores_[svm.C_] == min(svm.cv_scores_.values())


def test_grid_ties_and_few_sequences(data):
    assert tuple(StructuredSVM(max_passes=1).fit(data.X[:4], data.y[:4]).cv_scores_) == C_GRID
    X, y = [[("a",), ("b",)]] * 4, [["P", "Q"]] * 4
    assert StructuredSVM((1.0, 3.0)).fit(X, y).C_ == 1.0
    single = StructuredSVM().fit(X[:1], y[:1])
    assert C_GRID[len(C_GRID) // 2] == single.C_
    assert single.cv_scores_ == {}


def test_equal_seeds_give_equal_fits(data):
    one, same = (StructuredSVM((0.1, 1.0), max_passes=5).fit(data.X[:20], data.y[:20]) for _ in "ab")
    np.testing.assert_array_equal(one.weights_, same.weights_)
    assert one.cv_scores_ == same.cv_scores_


def test_forms_of_X_give_the_same_labels(data):
    names = [sorted({token[j] for x in data.X for token in x}) for j in range(2)]
    dense = [
        np.array([[float(token[j] == v) for j in range(2) for v in names[j]] for token in x])
        for x in data.X
    ]
    forms = [
        data.X,
        dense,
        [csr_array(x) for x in dense],
        [[{"a": token[0], "b": token[1]} for token in x] for x in data.X],
        (iter(x) for x in data.X),
    ]
    expected = None
    for X in forms:
        X = list(X)
        # A generator within X is read only once.
        train, test = X[:40], X[40:]
        found = StructuredSVM(0.1).fit(iter(train), iter(data.y[:40])).predict(test)
        expected = found if expected is None else expected
        assert found == expected


def test_empty_sequences_and_unknown_values(data):
    svm = StructuredSVM(0.1).fit([*data.X[:20], []], [*data.y[:20], []])
    assert svm.predict([[]]) == [[]]
    assert svm.predict([]) == []
    assert len(svm.predict([[("new", "values")], data.X[0]])[0]) == 1
    assert list(svm.classes_) == ["L0", "L1", "L2"]


def test_mistakes_are_named(data):
    with pytest.raises(InputError, match="it has no probabilities"):
        StructuredSVM(0.1).predict_marginals(data.X)
    with pytest.raises(InputError, match="not fitted yet"):
        StructuredSVM().predict(data.X)
    with pytest.raises(InputError, match=r"y\[0\]: 1 labels for 2 tokens"):
        StructuredSVM().fit([[("a",), ("b",)]], [["A"]])
    for wrong in ({"C": 0.0}, {"C": ()}, {"n_folds": 1}, {"tolerance": 0}, {"max_passes": 0}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            StructuredSVM(**wrong).fit(data.X, data.y)
