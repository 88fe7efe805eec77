"""Values that no fit can use, and fits that are of no use: said in one line."""

from __future__ import annotations

import copy
import io
import re
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from gpytorch.kernels import RBFKernel, ScaleKernel
from hypothesis import given, settings
from hypothesis import strategies as st

import structgp
from structgp import InputError, Prior, StructgpWarning, StructuredGPClassifier
from structgp.answers import encoded
from structgp.data import sources
from structgp.data.sources.wapiti import find, parse, translate
from structgp.errors import cut
from structgp.plan import choices, label_cost

X = [[{"w": "a"}, {"w": "b"}], [{"w": "c"}, {"w": "a"}]]
y = [["x", "y"], ["y", "x"]]
HOLDS_ITSELF: dict[str, Any] = {}
HOLDS_ITSELF["c"] = HOLDS_ITSELF
DATES = np.array([["2020-01-01"], ["2020-01-02"]], dtype="datetime64[D]")


@pytest.fixture(scope="module")
def fitted() -> StructuredGPClassifier:
    return StructuredGPClassifier().fit(X, y)


@pytest.mark.parametrize(
    ("data", "labels", "says"),
    [
        (None, y, "X: expected a list of sequences, got a NoneType"),
        (7, y, "X: expected a list of sequences, got a int"),
        ([[{"a": 10**400}, {"a": 1}]], [["x", "y"]], "X[0][0]: feature 'a' is beyond 1e300, too large"),
        ([[{"a": 1e308}, {"a": 1}]], [["x", "y"]], "X[0][0]: feature 'a' is 1e+308, too large"),
        ([[{"a": np.float32("inf")}, {"a": 1}]], [["x", "y"]], "X[0][0]: feature 'a' is inf; replace"),
        ([[HOLDS_ITSELF, {"a": 1}]], [["x", "y"]], "has dicts in dicts, more than 20 deep"),
        ([scipy.sparse.csr_matrix([[1e308, 0], [0, 1]])], [["x", "y"]], "X[0][0]: column 0 is 1e+308"),
        ([np.ma.masked_array(np.ones((2, 1)), [[1], [0]])], [["x", "y"]], "X[0]: a masked array"),
        ([DATES], [["x", "y"]], "X[0]: dates or times"),
        (X, [{"x", "y"}, ["y", "x"]], "y[0]: expected a list of labels, got a set"),
        (X, 7, "y: expected a list of label sequences, got a int"),
        (X, "xy", "y: expected a list of label sequences, got a str"),
        (X, np.array(3), "y: expected a list of label sequences, got a ndarray"),
        (np.array(3), y, "X: expected a list of sequences, got a ndarray"),
    ],
)
def test_data_that_cannot_be_fitted(data: Any, labels: Any, says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        StructuredGPClassifier().fit(data, labels)


@pytest.mark.parametrize("value", [np.ones(3), 3.0, 7, ["a", "b"], {"a": 1}])
def test_other_values_under_a_key_that_had_text(value: Any, fitted: StructuredGPClassifier) -> None:
    with pytest.raises(InputError, match=r"^X\[0\]\[1\]: feature 'w' is a \w+, but training had text"):
        fitted.predict([[{"w": "a"}, {"w": value}]])
    assert fitted.predict([[{"w": None}, {"w": True}, {}]])
    mixed = [[{"w": "a"}, {"w": 2.0}], [{"w": "c"}, {"w": ["a"]}]]
    assert StructuredGPClassifier().fit(mixed, y).predict(mixed), "as in training"


def test_paths_that_are_none(fitted: StructuredGPClassifier) -> None:
    for path in (None, 3, "", "a\0b", np.ones(3)):
        with pytest.raises(InputError, match=r"^path: .*; name the file to write"):
            fitted.save(path)  # type: ignore[arg-type]
    for path in ("a\0b", "\ud800"):
        with pytest.raises(InputError, match="not a name of a file"):
            structgp.load(path)
    with pytest.raises(InputError):
        fitted.predict(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("labels", [None, 7, "xy", {"x"}, [np.array(3)], [scipy.sparse.eye(2)]])
def test_labels_that_are_no_labels(labels: Any, fitted: StructuredGPClassifier) -> None:
    ask: Any
    for ask in (fitted.sequence_log_probs, fitted.evaluate, fitted.score, fitted.calibrate):
        with pytest.raises(InputError, match=r"^y"):
            ask(X[:1], labels)
    if labels is not None:
        with pytest.raises(InputError, match=r"^known"):
            fitted.predict(X[:1], known=labels)
    with pytest.raises(InputError, match=r"^n: must be a number of labellings, got True"):
        fitted.predict_n_best(X, True)


def test_errors_are_short() -> None:
    with pytest.raises(InputError) as caught:
        StructuredGPClassifier().fit([[{"a" * 20_000: float("nan")}, {"b": 1}]], [["x", "y"]])
    assert len(str(caught.value)) < 700
    assert str(caught.value).startswith("X[0][0]: feature 'aaa")
    assert str(caught.value).endswith("is nan; replace NaN and infinite values")
    error = InputError("train:3\n4", "two\nlines", "x" * 10_000)
    assert "\n" not in str(error)
    assert len(str(error)) < 700
    assert len(str(StructgpWarning("x" * 10_000))) < 1000
    assert cut("short") == "short"


def test_more_labellings_than_there_are(fitted: StructuredGPClassifier) -> None:
    assert [len(found) for found in fitted.predict_n_best(X, 10**9)] == [4, 4]
    assert sum(p for _, p in fitted.predict_n_best(X, 10**9)[0]) == pytest.approx(1)
    with pytest.raises(InputError, match=r"^n: 1,000,000,000 labellings of 100 tokens .* at most [\d,]+$"):
        fitted.predict_n_best([X[0] * 50], 10**9)
    with pytest.raises(InputError, match=r"^n_draws: must be at most 10,000"):
        StructuredGPClassifier(n_draws=10**9).fit(X, y)


def test_many_labels_are_announced_and_take_little_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The identity on transitions would hold V^4 numbers: 100 MB for these labels."""
    for module in (label_cost, choices):
        monkeypatch.setattr(module, "MANY_TRANSITIONS", 1e5)
    monkeypatch.setattr(label_cost, "MANY_LABELS", 60)
    labels = [f"l{k}" for k in range(60)]
    tokens, every = [[{"w": label} for label in labels]] * 6, [labels] * 6
    with pytest.warns(StructgpWarning, match="60 labels: the chain sums over 3,600 transitions"):
        model = StructuredGPClassifier(n_draws=2).fit(tokens, every, callback=lambda info: True)
    model.save(tmp_path / "model")
    assert (tmp_path / "model").stat().st_size < 2_000_000
    assert "many labels" in model.training_log_["plan"]["data_weight"]["reason"]
    assert structgp.load(tmp_path / "model").predict(tokens[:1]) == model.predict(tokens[:1])


def test_transitions_that_were_hardly_seen_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_cost, "MANY_TRANSITIONS", 1e4)
    monkeypatch.setattr(label_cost, "MANY_LABELS", 30)
    labels = [f"l{k}" for k in range(30)]
    tokens, every = [[{"w": label} for label in labels]] * 2, [labels] * 2
    with pytest.warns(StructgpWarning, match="30 labels: 60 tokens show next to nothing of 900"):
        model = StructuredGPClassifier(n_draws=2).fit(tokens, every, callback=lambda info: True)
    plan = model.training_log_["plan"]["structure"]
    assert plan["value"] == "chain(order=0)"
    assert plan["reason"] == "the data can hold few of the 900 transitions"
    assert model.model_.spec == structgp.chain(order=0)
    with pytest.warns(StructgpWarning, match="the chain sums over 900 transitions"):
        model = StructuredGPClassifier(structure=structgp.chain()).fit(
            tokens, every, callback=lambda _: True
        )
    assert model.model_.spec == structgp.chain()
    with warnings.catch_warnings():  # whoever asks for none need not hear why there are none
        warnings.simplefilter("error", StructgpWarning)
        asked = StructuredGPClassifier(structure=structgp.chain(order=0))
        asked.fit(tokens * 4, every * 4, callback=lambda _: True)
    more = [x for x in tokens for _ in range(2)]
    assert label_cost.SEEN_SHARE * 120 > 30**2
    with pytest.warns(StructgpWarning, match="the chain sums over"):
        StructuredGPClassifier(n_draws=2).fit(more, every * 2, callback=lambda info: True)


def test_very_many_labels_are_fitted_batch_by_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without contrasts, and without a table of transitions that nothing reads: V^2 numbers each."""
    monkeypatch.setattr(label_cost, "MANY_TRANSITIONS", 1e4)
    for module in (label_cost, choices):
        monkeypatch.setattr(module, "MANY_LABELS", 30)
    labels = [f"l{k}" for k in range(30)]
    tokens, every = [[{"w": label} for label in labels]] * 2, [labels] * 2
    with pytest.warns(StructgpWarning, match="30 labels: 60 tokens show next to nothing of 900"):
        model = StructuredGPClassifier().fit(tokens, every)
    plan = model.training_log_["plan"]
    assert plan["basis"]["value"] == "label"
    assert (plan["optimizer"]["value"], plan["optimizer"]["reason"]) == (
        "minibatch",
        "there are very many labels",
    )
    assert model.model_.posterior["next"].m.numel() == 1
    assert model.predict(tokens) == every
    assert structgp.describe(model).transitions.shape == (30, 30)
    model.save(tmp_path / "model")
    again = structgp.load(tmp_path / "model")
    assert again.predict_marginals(tokens) == model.predict_marginals(tokens)
    again.partial_fit([[{"w": "new"}, {"w": "l3"}]], [["l30", "l3"]])
    assert "l30" in again.classes_.tolist()
    assert again.predict([[{"w": "l3"}]]) == [["l3"]]


def test_going_on_keeps_the_transitions(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = [f"l{k}" for k in range(12)]
    tokens, every = [[{"w": label} for label in labels]] * 10, [labels] * 10
    model = StructuredGPClassifier(prior=structgp.Prior(data_weight=1.0)).fit(tokens, every)
    monkeypatch.setattr(label_cost, "MANY_TRANSITIONS", 300)
    monkeypatch.setattr(label_cost, "SEEN_SHARE", 1)
    model.partial_fit(tokens[:2], every[:2], remember=False)
    assert model.model_.spec == structgp.chain()


def sparse_data(scale: float) -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(3)
    words = [rng.integers(0, 12, 5) for _ in range(16)]
    return [[{f"w{k}": scale, "b": scale} for k in x] for x in words], [
        [f"l{k % 3}" for k in x] for x in words
    ]


def test_the_scale_of_sparse_features_does_not_matter() -> None:
    bounds = []
    for scale in (1e-8, 1e4, 1e8):
        model = StructuredGPClassifier().fit(*sparse_data(scale))
        bounds.append(model.training_log_["elbo"])
        wrong = np.mean(
            np.concatenate(model.predict(sparse_data(scale)[0])) != np.concatenate(sparse_data(scale)[1])
        )
        assert wrong < 0.1
    assert bounds == pytest.approx([bounds[0]] * 3, rel=1e-3)


def test_a_word_about_fits_that_are_of_no_use() -> None:
    rng = np.random.default_rng(1)
    dense = [rng.normal(size=(6, 3)) for _ in range(10)]
    labels = [["a" if v > 0 else "b" for v in x[:, 0]] for x in dense]
    smooth = RBFKernel()
    smooth.lengthscale = 1e6
    fixed = Prior(learn_kernel=False)
    with pytest.warns(StructgpWarning, match="the fitted scores hardly depend on the features"):
        StructuredGPClassifier(kernel=ScaleKernel(smooth), prior=fixed).fit(dense, labels)
    broken = [x.copy() for x in dense]
    broken[3][2, 1] = 1e6
    with pytest.warns(StructgpWarning, match="the fitted scores hardly depend on the features"):
        StructuredGPClassifier(kernel="linear", posterior=structgp.Inducing(6)).fit(broken, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StructgpWarning)
        StructuredGPClassifier(kernel="rbf").fit(dense, labels)
    with pytest.raises(InputError, match=r"^amplitude: must be a variance above 0, at most 1e6"):
        StructuredGPClassifier(prior=Prior(amplitude=1e12)).fit(dense, labels)


EXPRESSIONS = st.lists(
    st.tuples(st.sampled_from(["a", "b", ".", "\\d", "\\A"]), st.sampled_from(["", "*", "?"])), max_size=5
)


@given(EXPRESSIONS, st.booleans(), st.booleans(), st.text("ab1", max_size=7))
@settings(max_examples=200, deadline=None)
def test_expressions_in_linear_time_find_what_backtracking_finds(
    items: list[tuple[str, str]], start: bool, end: bool, text: str
) -> None:
    expression = "^" * start + "".join(map("".join, items)) + "$" * end
    found = re.compile(translate(expression), re.DOTALL).search(text)
    assert parse(expression).find(text) == (None if found is None else found.group())


def test_an_expression_that_backtracking_does_not_end_on() -> None:
    began = time.process_time()
    assert find("a*" * 20 + "b", "a" * 2000) is None
    assert find("a?" * 30 + "a" * 30, "a" * 30) == "a" * 30
    assert time.process_time() - began < 5


def test_carriage_returns_alone() -> None:
    with pytest.raises(InputError, match=r"^f:1: lines end in carriage returns alone, as on old Macs"):
        sources.read_columns(io.BytesIO(b"two Q\reggs N\r\rfigs N\r"), name="f")
    assert (
        sources.read_columns(io.BytesIO(b"a\rb\rc X\nd Y\n"), name="f").sequences[0].rows[0][0] == "a\rb\rc"
    )


def test_a_sequence_that_would_take_too_much_memory(
    fitted: StructuredGPClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has fewer draws, and no other answer changes; beyond the fewest it is refused."""
    long = copy.copy(fitted).set_params(n_draws=128)
    alone = long.predict_marginals([X[0]])
    monkeypatch.setattr(encoded, "MOST_SCORES", 2 * 16 * 50)
    with pytest.raises(InputError, match=r"^X\[1\]: an example of 60 tokens .* at most 50, or use fewer"):
        long.predict_marginals([X[0], X[0] * 30])
    with pytest.warns(
        StructgpWarning, match=r"^X\[1\]: an example of 50 tokens; .* over 16 draws"
    ) as caught:
        found = long.predict_marginals([X[0], X[0] * 25])
    assert caught[0].filename == __file__
    assert found[:1] == alone
    assert len(found[1]) == 50
    assert all(sum(p.values()) == pytest.approx(1) for p in found[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(long.predict_marginals([X[0] * 3])[0]) == 6
        assert len(long.set_params(n_draws=0).predict_marginals([X[0] * 30])[0]) == 60


def test_answers_about_several_sequences_where_one_has_fewer_draws(
    fitted: StructuredGPClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, pool = copy.copy(fitted).set_params(n_draws=128), [X[0], X[0] * 25, X[1]]
    whole = long.expected_scores(pool)
    monkeypatch.setattr(encoded, "MOST_SCORES", 2 * 18 * 50)
    with pytest.warns(StructgpWarning, match="its answers average over 18 draws"):
        found = long.expected_scores(pool)
    assert found.n_tokens == whole.n_tokens
    assert found.error.mean == pytest.approx(whole.error.mean, abs=0.1)
    with pytest.warns(StructgpWarning, match="its answers average over 18 draws"):
        assert sorted(structgp.select(long, pool, 3)) == [0, 1, 2]
    with pytest.warns(StructgpWarning, match="its answers average over 18 draws"):
        assert np.isfinite(long.sequence_log_probs(pool, long.predict(pool))).all()
