from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import tempfile
from itertools import product

import numpy as np
import pytest
import torch
from benchmarks.generate import generate
from scipy.sparse import coo_array, csr_array, csr_matrix

from structgp.errors import InputError
from structgp.evaluation.crf import C2_GRID, LinearCRF

pycrfsuite = pytest.importorskip("pycrfsuite", reason="python-crfsuite is not installed")


@pytest.fixture(scope="module")
def data():
    return generate(60, n_labels=3, mean_length=6, n_templates=2, n_values=8, seed=0)


@pytest.fixture(scope="module")
def fitted(data):
    return LinearCRF(c2=0.1).fit(data.X[:40], data.y[:40])


def as_matrices(X, n_values=8):
    """Strings v0, v1, ... of two columns as one-hot rows: the same features under other names."""
    matrices = []
    for x in X:
        dense = np.zeros((len(x), 2 * n_values))
        for t, token in enumerate(x):
            for j, value in enumerate(token):
                dense[t, j * n_values + int(value[1:])] = 1.0
        matrices.append(dense)
    return matrices


# --- probabilities ---------------------------------------------------------------------------


def test_predictions_have_the_shape_of_X(fitted, data):
    X = data.X[40:]
    assert [len(p) for p in fitted.predict(X)] == [len(x) for x in X]
    assert fitted.classes_ == ["L0", "L1", "L2"]
    for x, dists in zip(X, fitted.predict_marginals(X), strict=True):
        assert len(dists) == len(x)
        for dist in dists:
            assert list(dist) == fitted.classes_
            assert sum(dist.values()) == pytest.approx(1.0, abs=1e-9)


def test_learns_the_chain(data):
    many = generate(400, n_labels=3, mean_length=6, n_templates=2, n_values=8, seed=0)
    crf = LinearCRF(c2=1.0, decode="marginal").fit(many.X[:300], many.y[:300])
    close = [
        abs(dist[label] - p)
        for x, dists in zip(many.X[300:], crf.predict_marginals(many.X[300:]), strict=True)
        for dist, row in zip(dists, many.chain.true_marginals(x), strict=True)
        for label, p in zip(many.chain.labels, row, strict=True)
    ]
    assert np.mean(close) < 0.05


def test_log_probs_of_all_labellings_sum_to_one_and_give_the_marginals(fitted, data):
    x = next(x for x in data.X[40:] if len(x) >= 4)[:4]
    paths = list(product(fitted.classes_, repeat=4))
    log_probs = fitted.sequence_log_probs([x] * len(paths), paths)
    assert math.fsum(map(math.exp, log_probs)) == pytest.approx(1.0, abs=1e-9)
    (dists,) = fitted.predict_marginals([x])
    for t, dist in enumerate(dists):
        for label, p in dist.items():
            by_sum = math.fsum(
                math.exp(v) for path, v in zip(paths, log_probs, strict=True) if path[t] == label
            )
            assert by_sum == pytest.approx(p, abs=1e-9)
    best = paths[int(np.argmax(log_probs))]
    assert fitted.predict([x]) == [list(best)]


def test_log_probs_agree_with_crfsuites_own(fitted, data):
    tagger = pycrfsuite.Tagger()
    tagger.open_inmemory(fitted.model_)
    ours = fitted.sequence_log_probs(data.X[40:], data.y[40:])
    for x, y, value in zip(data.X[40:], data.y[40:], ours, strict=True):
        tagger.set([[f"{j}={v}" for j, v in enumerate(token)] for token in x])
        own = tagger.probability([str(fitted.classes_.index(label)) for label in y])
        assert value == pytest.approx(math.log(own), abs=1e-8)


def test_log_prob_of_a_long_sequence_is_finite(fitted, data):
    x = [token for x in data.X for token in x] * 10
    y = [fitted.classes_[t % 3] for t in range(len(x))]
    assert len(x) > 3000
    (value,) = fitted.sequence_log_probs([x], [y])
    assert -math.inf < value < -1000


def test_unseen_label_gives_none(fitted, data):
    x = data.X[0]
    unseen = [*data.y[0][:-1], "never"]
    log_probs = fitted.sequence_log_probs([x, x], [unseen, data.y[0]])
    assert log_probs[0] is None
    assert log_probs[1] < 0


def test_decoders_differ_as_they_should(fitted, data):
    crf = LinearCRF(c2=0.1, decode="marginal").fit(data.X[:40], data.y[:40])
    assert crf.model_ == fitted.model_
    for path, dists in zip(crf.predict(data.X[40:]), fitted.predict_marginals(data.X[40:]), strict=True):
        assert path == [max(dist, key=dist.get) for dist in dists]


# --- forms of X ------------------------------------------------------------------------------


def test_strings_sparse_dense_and_dicts_give_the_same_model(data):
    dense = as_matrices(data.X)
    forms = {
        "strings": data.X,
        "lists": [[list(token) for token in x] for x in data.X],
        "string arrays": [np.array(x) for x in data.X],
        "dense": dense,
        "dense rows": [list(x) for x in dense],
        "tensors": [torch.tensor(x, requires_grad=True) for x in dense],
        "rows of tensors": [list(torch.tensor(x, dtype=torch.bfloat16)) for x in dense],
        "numbers": [x.tolist() for x in dense],
        "csr_array": [csr_array(x) for x in dense],
        "csr_matrix": [csr_matrix(x) for x in dense],
        "coo": [coo_array(x) for x in dense],
        "sparse rows": [[csr_matrix(row.reshape(1, -1)) for row in x] for x in dense],
        "1-D sparse rows": [[coo_array(row) for row in x] for x in dense],
        "dicts": [[{"a": token[0], "b": token[1]} for token in x] for x in data.X],
        "value dicts": [[{f"{j}{v}": 1.0 for j, v in enumerate(token)} for token in x] for x in data.X],
    }
    expected = None
    for name, X in forms.items():
        crf = LinearCRF(c2=0.3).fit(X[:40], data.y[:40])
        log_probs = np.array(crf.sequence_log_probs(X[40:], data.y[40:]))
        expected = log_probs if expected is None else expected
        # L-BFGS stops at a tolerance, and the order of features differs.
        np.testing.assert_allclose(log_probs, expected, rtol=1e-3, err_msg=name)


def test_columns_are_told_apart():
    X = [[("a", "b")], [("b", "a")]] * 5
    y = [["one"], ["two"]] * 5
    assert LinearCRF(c2=0.01).fit(X, y).predict(X[:2]) == [["one"], ["two"]]


def test_values_of_features_count():
    X = [np.array([[v]]) for v in (-1.0, 1.0)] * 5
    y = [["low"], ["high"]] * 5
    crf = LinearCRF(c2=0.01).fit(X, y)
    assert crf.predict([np.array([[-2.0], [3.0]])]) == [["low", "high"]]
    duplicates = coo_array(([1.0, -3.0], ([0, 0], [0, 0])), shape=(1, 1))
    assert crf.predict([duplicates]) == [["low"]]


def test_the_sign_of_a_feature_changes_nothing():
    rng = np.random.default_rng(0)
    X = [rng.normal(size=(4, 3)) for _ in range(20)]
    y = [["AB"[int(row[0] > row[1])] for row in x] for x in X]
    one, other = (LinearCRF(c2=0.3).fit(data, y) for data in (X, [-x for x in X]))
    found, expected = one.predict_marginals(X), other.predict_marginals([-x for x in X])
    for p, q in zip((p for x in found for p in x), (q for x in expected for q in x), strict=True):
        assert p == pytest.approx(q, abs=1e-3)


def test_generators_empty_sequences_unknown_values_and_single_labels(data):
    crf = LinearCRF(c2=1.0).fit((x for x in [*data.X[:20], []]), (y for y in [*data.y[:20], []]))
    assert crf.predict([[]]) == [[]]
    assert crf.predict_marginals([[]]) == [[]]
    assert crf.sequence_log_probs([[]], [[]]) == [0.0]
    assert len(crf.predict([[("new", "values"), ()]])[0]) == 2
    crf.decode = "marginal"
    assert crf.predict([[]]) == [[]]
    only = LinearCRF().fit([[("a",)], [("b",)]], [["X"], ["X"]])
    assert only.predict([[("a",), ("c",)]]) == [["X", "X"]]
    assert only.predict_marginals([[("a",)]]) == [[{"X": pytest.approx(1.0)}]]
    assert only.sequence_log_probs([[("a",)]], [["X"]]) == [pytest.approx(0.0)]


def test_labels_keep_their_type(data):
    y = [[int(label[1:]) for label in labels] for labels in data.y]
    crf = LinearCRF(c2=1.0).fit(data.X, y)
    assert crf.classes_ == [0, 1, 2]
    assert {type(v) for v in crf.predict(data.X[:1])[0]} == {int}


# --- choice of c2 ----------------------------------------------------------------------------


def test_cross_validation_is_what_it_says(data):
    X, y = data.X[:13], data.y[:13]
    crf = LinearCRF(c2=(0.1, 10.0), n_folds=3, random_state=7).fit(X, y)
    order = np.random.default_rng(7).permutation(13)
    for c2, score in crf.cv_scores_.items():
        wrong = 0
        for held_out in np.array_split(order, 3):
            rest = sorted(set(range(13)) - set(held_out.tolist()))
            part = LinearCRF(c2=c2).fit([X[i] for i in rest], [y[i] for i in rest])
            for i in held_out:
                (path,) = part.predict([X[i]])
                wrong += sum(a != b for a, b in zip(path, y[i], strict=True))
        assert score == pytest.approx(wrong / sum(map(len, y)))
    assert crf.cv_scores_[crf.c2_] == min(crf.cv_scores_.values())
    assert crf.model_ == LinearCRF(c2=crf.c2_).fit(X, y).model_


def test_grid_and_determinism(data):
    one, same = (LinearCRF().fit(data.X[:20], data.y[:20]) for _ in range(2))
    assert tuple(one.cv_scores_) == C2_GRID
    assert one.cv_scores_ == same.cv_scores_
    assert one.model_ == same.model_


def test_ties_go_to_the_larger_c2():
    X, y = [[("a",)]] * 4, [["X"]] * 4
    assert LinearCRF(c2=(0.1, 3.0, 1.0)).fit(X, y).c2_ == 3.0


def test_few_sequences(data):
    assert set(LinearCRF().fit(data.X[:2], data.y[:2]).cv_scores_) == set(C2_GRID)
    single = LinearCRF().fit(data.X[:1], data.y[:1])
    assert single.c2_ == 0.3
    assert single.cv_scores_ == {}


@pytest.mark.slow
def test_processes_give_the_same_and_leave_no_files_even_after_torch():
    # A process of its own: torch's threads are busy first, and the script has no __main__ guard.
    script = """
import torch
torch.randn(400, 400) @ torch.randn(400, 400)
from structgp.evaluation.crf import LinearCRF
from benchmarks.generate import generate
data = generate(20, n_labels=3, mean_length=5, n_templates=2, n_values=8, seed=0)
one = LinearCRF(c2=(0.1, 1.0)).fit(data.X, data.y)
two = LinearCRF(c2=(0.1, 1.0), n_jobs=2).fit(data.X, data.y)
assert one.cv_scores_ == two.cv_scores_ and one.model_ == two.model_
print("equal")
"""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "TMPDIR": folder, "JOBLIB_TEMP_FOLDER": folder},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.stdout == "equal\n", done.stderr
        assert os.listdir(folder) == []


# --- the object ------------------------------------------------------------------------------


def test_pickle_and_no_temporary_files(data, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    crf = LinearCRF(c2=(0.1, 1.0)).fit(data.X[:20], data.y[:20])
    other = pickle.loads(pickle.dumps(crf))
    assert other.predict(data.X[20:]) == crf.predict(data.X[20:])
    assert other.predict_marginals(data.X[20:]) == crf.predict_marginals(data.X[20:])
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_printed(data, capfd):
    LinearCRF(c2=(0.1, 1.0)).fit(data.X[:10], data.y[:10]).predict(data.X[:2])
    assert capfd.readouterr() == ("", "")


def test_missing_extra_is_named(monkeypatch, data):
    monkeypatch.setitem(sys.modules, "pycrfsuite", None)
    with pytest.raises(InputError, match=r'pip install "structgp\[crf\]"'):
        LinearCRF().fit(data.X, data.y)


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        ([["word"]], [["A"]], r"X\[0\]\[0\]: the token is the bare string 'word'"),
        (["word"], [["A"]], r"X\[0\]: a string is not a sequence"),
        ([[("a",)], [("a",), ("a", 3)]], [["A"], ["A", "A"]], r"X\[1\]\[1\]: a token of type tuple"),
        ([[3]], [["A"]], r"X\[0\]\[0\]: a token of type int"),
        ([np.ones(3)], [["A"]], r"X\[0\]: an array of 1 dimensions"),
        ([np.array([[np.nan]])], [["A"]], r"X\[0\]: a value is not finite"),
        ([[{"a": math.inf}]], [["A"]], r"X\[0\]\[0\]: feature 'a' is inf"),
        ([[{3: 1.0}]], [["A"]], r"X\[0\]\[0\]: the feature name 3"),
        ([[("a",)]], [["A", "B"]], r"y\[0\]: 2 tokens where X\[0\] has 1"),
        ([[("a",)]], [], "y: 0 sequences where X has 1"),
        ([[("a",)], [("a",)]], [["A"], [None]], "y: labels of mixed types"),
        ([], [], "y: no labels"),
    ],
)
def test_wrong_data_is_named(X, y, message):
    with pytest.raises(InputError, match=message):
        LinearCRF(c2=1.0).fit(X, y)


def test_wrong_parameters_are_named(data):
    for wrong in ({"c2": -1.0}, {"c2": ()}, {"decode": "best"}, {"n_folds": 1}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            LinearCRF(**wrong).fit(data.X, data.y)
    with pytest.raises(InputError, match="not fitted"):
        LinearCRF().predict(data.X)
