"""What a fitted estimator answers, with constraints and known labels: names, shapes, mistakes, files."""

from __future__ import annotations

import math
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import structgp
from structgp import Custom, InputError, StructgpWarning, StructuredGPClassifier, metrics
from structgp.data.batch import pad
from structgp.structures import Chain, Rules, Structure

CLASSES = ["B-X", "I-X", "O"]
WORDS = {"O": "abc", "B-X": "bcd", "I-X": "cde"}


def sequences(n: int, seed: int) -> tuple[list[Any], list[list[str]]]:
    """Words that hint at their labels, spans of one to three tokens."""
    rng = np.random.default_rng(seed)
    X, y = [], []
    for _ in range(n):
        labels: list[str] = []
        while len(labels) < 3:
            labels += ["O"] if rng.random() < 0.5 else ["B-X", *["I-X"] * rng.integers(0, 3)]
        y.append(labels[:4])
        X.append([{"w": str(rng.choice(list(WORDS[label])))} for label in y[-1]])
    return X, y


@pytest.fixture(scope="module")
def fitted() -> StructuredGPClassifier:
    return StructuredGPClassifier(constraints="BIO", n_draws=6).fit(*sequences(12, 0))


@pytest.fixture(scope="module")
def X() -> list[Any]:
    """Lengths 4, 0, 1 and 3."""
    return [[{"w": word} for word in words] for words in ("dcea", "", "c", "dcb")]


@pytest.fixture(scope="module")
def known(X: list[Any]) -> list[list[str | None]]:
    return [[None, None, None, "I-X"], [], [None], ["O", None, None]]


def restored(fitted: StructuredGPClassifier, **parameters: Any) -> StructuredGPClassifier:
    """The same fit, asked otherwise."""
    other = StructuredGPClassifier(**(fitted.get_params(deep=False) | parameters))
    other.model_, other.classes_ = fitted.model_, fitted.classes_
    other.training_log_ = fitted.training_log_
    return other


class Average:
    """All labellings of one sequence and their probabilities, from the fitted draws by enumeration."""

    def __init__(self, oracles: ModuleType, fitted: Any, x: Any, known: Any = None) -> None:
        model, V = fitted.model_, len(fitted.classes_)
        rows, draws = (model.encoder.transform([x]), model.draws(fitted.n_draws))
        batch = pad(rows, None, model.encoder.pad_row, [0])
        rules = model.constraints
        joint = []
        at = draws.potentials(model.structure, batch)
        for f, g in zip(at.f, at.g, strict=True):
            table = oracles.chain_table(f[0].numpy(), g.numpy())
            keep = np.array(
                [oracles.obeys(y, rules.follows, rules.starts, rules.ends) for y in table.labels]
            )
            told = [-1 if v is None else CLASSES.index(v) for v in known or [None] * len(x)]
            agreeing = np.array([oracles.agrees(y, told) for y in table.labels])
            joint.append((oracles.among(table, keep).prob * agreeing).astype(float))
        total = np.array(joint)
        self.labels = [[CLASSES[i] for i in y] for y in table.labels]
        self.prob = total.sum(0) / total.sum()
        self.share = total.sum(1) / total.sum()
        self.each = total / total.sum(1, keepdims=True)
        self.on = table.on
        self.V = V

    def of(self, labels: list[str]) -> float:
        return float(self.prob[self.labels.index(labels)])


@pytest.fixture(params=["draws", "mean"])
def asked(request: pytest.FixtureRequest, fitted: Any) -> StructuredGPClassifier:
    return restored(fitted, n_draws=0 if request.param == "mean" else fitted.n_draws)


@pytest.fixture
def averages(oracles: ModuleType, asked: Any, X: Any, known: Any) -> Any:
    """For X with tokens, without and with what is known."""

    def make(told: Any) -> dict[int, Average]:
        return {
            i: Average(oracles, asked, x, None if told is None else told[i]) for i, x in enumerate(X) if x
        }

    return make


with_known = pytest.mark.parametrize("given_known", [False, True], ids=["free", "known"])


# -- answers ------------------------------------------------------------------------------------------


@with_known
def test_marginals_and_pairs(asked: Any, averages: Any, X: Any, known: Any, given_known: bool) -> None:
    told = known if given_known else None
    p, pairs = asked.predict_marginals(X, told), asked.predict_transition_marginals(X, told)
    assert p[1] == []
    assert pairs[1].shape == (0, 3, 3)
    assert pairs[2].shape == (0, 3, 3)
    for i, table in averages(told).items():
        expected = np.tensordot(table.prob, table.on, 1)
        assert [list(token) for token in p[i]] == [CLASSES] * len(X[i])
        found = np.array([list(token.values()) for token in p[i]])
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8)
        both = np.einsum("n,nti,ntj->tij", table.prob, table.on[:, :-1], table.on[:, 1:])
        np.testing.assert_allclose(pairs[i], both, rtol=0, atol=1e-8)


@with_known
def test_labels(asked: Any, averages: Any, X: Any, known: Any, given_known: bool) -> None:
    told = known if given_known else None
    found = restored(asked, decode="accuracy", n_draws=asked.n_draws).predict(X, told)
    best = restored(asked, decode="sequence", n_draws=0).predict(X, told)
    assert found[1] == best[1] == []
    for i, table in averages(told).items():
        p = np.tensordot(table.prob, table.on, 1)
        right = (table.on * p).sum((1, 2)) * (table.prob > 0)
        assert right[table.labels.index(found[i])] == pytest.approx(right.max(), abs=1e-10)
        if asked.n_draws == 0:
            assert table.of(best[i]) == pytest.approx(table.prob.max(), abs=1e-10)


@with_known
@pytest.mark.parametrize("n", [2, 1000])
def test_n_best(asked: Any, averages: Any, X: Any, known: Any, given_known: bool, n: int) -> None:
    told = known if given_known else None
    found = asked.predict_n_best(X, n, told)
    assert found[1] == [([], 1.0)]
    for i, table in averages(told).items():
        values = [one.probability for one in found[i]]
        assert values == sorted(values, reverse=True)
        assert len(values) <= n
        for one in found[i]:
            assert one.probability == pytest.approx(table.of(one.labels), abs=1e-8)
        if n == 1000:
            assert sum(values) == pytest.approx(1, abs=1e-8)
            assert len(values) == (table.prob > 0).sum()
        if asked.n_draws == 0:
            largest = np.sort(table.prob)[::-1][: len(values)]
            np.testing.assert_allclose(values, largest, rtol=0, atol=1e-8)


@with_known
def test_drawn_labellings(asked: Any, averages: Any, X: Any, known: Any, given_known: bool) -> None:
    """2,000 of them, within four standard errors."""
    told, n = known if given_known else None, 2_000
    found = asked.sample_labellings(X, n, told)
    assert [len(drawn) for drawn in found] == [n] * 4
    assert found[1] == [[]] * n
    for i, table in averages(told).items():
        share = np.array([found[i].count(y) for y in table.labels]) / n
        error = np.sqrt(table.prob * (1 - table.prob) / n)
        assert (np.abs(share - table.prob) <= 4 * error + 1e-12).all()
    assert asked.sample_labellings(X[:1], 5) == asked.sample_labellings(X[:1], 5)
    # Sequences that are alike are drawn apart.
    one, other = asked.sample_labellings([X[0], X[0]], 50)
    assert one != other


@with_known
def test_spans(asked: Any, averages: Any, X: Any, known: Any, given_known: bool) -> None:
    told = known if given_known else None
    found = asked.predict_spans(X, 0.05, told)
    assert found[1] == []
    for i, table in averages(told).items():
        chunks = [metrics.chunks(y) for y in table.labels]
        one = None if told is None else told[i]
        likely = {}
        for start, stop in product(range(len(X[i])), range(1, len(X[i]) + 1)):
            if start >= stop:
                continue
            there = np.array([(start, stop, "X") in spans for spans in chunks], dtype=float)
            p = asked.span_probability(X[i], start, stop, "X", known=one)
            assert p == pytest.approx(table.prob @ there, abs=1e-8)
            bounds = asked.span_probability(X[i], start, stop, sense="bounds", known=one)
            assert bounds == pytest.approx(p, abs=1e-12)
            covered = [any(a <= start and stop <= b for a, b, _ in s) for s in chunks]
            covers = asked.span_probability(X[i], start, stop, sense="covers", known=one)
            assert covers == pytest.approx(table.prob @ np.array(covered, dtype=float), abs=1e-8)
            doubt = asked.span_uncertainty(X[i], start, stop, "X", known=one)
            each = table.each @ there
            data = table.share @ [entropy([q, 1 - q]) for q in each]
            assert doubt.total == pytest.approx(entropy([p, 1 - p]), abs=1e-7)
            assert doubt.data == pytest.approx(data, abs=1e-7)
            assert doubt.model == pytest.approx(doubt.total - doubt.data, abs=1e-12)
            if p >= 0.05:
                likely[start, stop, "X"] = p
        assert {span[:3]: pytest.approx(span.probability, abs=1e-8) for span in found[i]} == likely


def entropy(p: Any) -> float:
    return -sum(q * math.log(q) for q in p if q > 1e-300)


@with_known
def test_doubt(asked: Any, averages: Any, X: Any, known: Any, given_known: bool) -> None:
    told = known if given_known else None
    tokens, whole = (asked.predict_uncertainty(X, of, told) for of in ("tokens", "sequences"))
    assert tokens.total[1].shape == (0,)
    assert whole.total[1] == whole.data[1] == 0
    for i, table in averages(told).items():
        p = np.tensordot(table.prob, table.on, 1)
        np.testing.assert_allclose(tokens.total[i], [entropy(q) for q in p], rtol=0, atol=1e-8)
        each = np.einsum("sn,ntv->stv", table.each, table.on)
        data = table.share @ [[entropy(q) for q in of] for of in each]
        np.testing.assert_allclose(tokens.data[i], data, rtol=0, atol=1e-8)
        np.testing.assert_allclose(tokens.model[i], tokens.total[i] - data, rtol=0, atol=1e-8)
        data = table.share @ [entropy(of) for of in table.each]
        assert whole.data[i] == pytest.approx(data, abs=1e-8)
        assert whole.total[i] == pytest.approx(entropy(table.prob), abs=0.15)
        if asked.n_draws == 0:
            assert whole.total[i] == pytest.approx(entropy(table.prob), abs=1e-8)
    np.testing.assert_allclose(whole.model, whole.total - whole.data, rtol=0, atol=1e-12)
    assert asked.predict_uncertainty(X, "sequences").total.tolist() == (
        asked.predict_uncertainty(X, "sequences").total.tolist()
    )


def test_log_prob_of_a_part(asked: Any, oracles: ModuleType, X: Any, known: Any) -> None:
    """p(known and rest) = p(known) p(rest given known)."""
    x, y = X[0], ["B-X", "I-X", "O", "O"]
    part = [y[0], None, None, None]
    free = Average(oracles, asked, x)
    (whole,), (some,) = asked.sequence_log_probs([x], [y]), asked.sequence_log_probs([x], [part])
    assert math.exp(whole) == pytest.approx(free.of(y), abs=1e-10)
    expected = sum(p for p, z in zip(free.prob, free.labels, strict=True) if z[0] == y[0])
    assert math.exp(some) == pytest.approx(expected, abs=1e-10)
    found = {tuple(one.labels): one.probability for one in asked.predict_n_best([x], 100, [part])[0]}
    assert math.exp(some) * found[tuple(y)] == pytest.approx(math.exp(whole), abs=1e-10)
    nothing = [None] * len(y)
    assert asked.sequence_log_probs([x], [nothing]) == [pytest.approx(0, abs=1e-12)]
    forbidden = ["O", "I-X", "O", "O"]
    assert asked.sequence_log_probs([x], [forbidden]) == [-math.inf]
    assert asked.sequence_log_probs([x, []], [["other", *y[1:]], []]) == [None, 0.0]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 2**16), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_no_answer_breaks_the_constraints(fitted: Any, seed: int, lengths: list[int]) -> None:
    """Labels known at random, from labellings that are allowed."""
    rng = np.random.default_rng(seed)
    X, known = [], []
    for n in lengths:
        X.append([{"w": str(rng.choice(list("abcdefg")))} for _ in range(n)])
        labels = fitted.sample_labellings([[{"w": "c"}] * n], 1)[0][0]
        known.append([v if rng.random() < 0.4 else None for v in labels])
    whole = restored(fitted, decode="sequence")
    for told in (None, known):
        found = [
            fitted.predict(X, told),
            whole.predict(X, told),
            *zip(*fitted.sample_labellings(X, 10, told), strict=True),
        ]
        answers = [(i, y) for labellings in found for i, y in enumerate(labellings)]
        for i, best in enumerate(fitted.predict_n_best(X, 4, told)):
            answers += [(i, one.labels) for one in best]
        for i, y in answers:
            assert all(
                label != "I-X" or before in ("B-X", "I-X")
                for before, label in zip(["O", *y[:-1]], y, strict=True)
            )
            if told is not None:
                assert all(v in (None, label) for v, label in zip(told[i], y, strict=True))


def test_one_batch_or_many(fitted: Any, X: Any, known: Any, monkeypatch: Any) -> None:
    def everything() -> list[Any]:
        return [
            fitted.predict_marginals(X, known),
            fitted.predict_n_best(X, 3, known),
            fitted.predict_spans(X, 0.05, known),
        ]

    together = everything()
    monkeypatch.setattr("structgp.answers.encoded.BATCH_TOKENS", 1)
    apart = everything()
    for one, other in zip(together[0], apart[0], strict=True):
        for p, q in zip(one, other, strict=True):
            assert p == pytest.approx(q, abs=1e-10)
    for k in (1, 2):
        for one, other in zip(together[k], apart[k], strict=True):
            assert [a[:-1] for a in one] == [b[:-1] for b in other]
            assert [a[-1] for a in one] == pytest.approx([b[-1] for b in other], abs=1e-10)


def test_generators_are_read_out(fitted: Any, X: Any) -> None:
    lazy = (iter(x) if x else [] for x in X)
    assert fitted.predict_n_best(lazy, 1) == fitted.predict_n_best(X, 1)


# -- mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda e, X: e.predict(X[3:], [["O", "Z", None]]), "known[0][1]: 'Z' is not a label of the"),
        (lambda e, X: e.predict(X[3:], [["O"]]), "known[0]: 1 labels for 3 tokens"),
        (lambda e, X: e.predict(X[3:], []), "known: 0 label sequences for 1 sequences"),
        (lambda e, X: e.predict(X[3:], ["OOO"]), "known[0]: expected a list of labels"),
        (lambda e, X: e.predict(X[3:], [[1, None, None]]), "known[0][0]: label 1 is not a string"),
        (
            lambda e, X: e.predict_marginals(X[2:], [[None], ["O", "I-X", None]]),
            "sequence 1: no labelling of its 3 tokens agrees with the constraints and with the labels",
        ),
        (
            lambda e, X: e.predict([X[3], X[3]], [[None] * 3, ["O", "I-X", None]]),
            "sequence 1: no labelling of its 3 tokens",
        ),
        (lambda e, X: e.predict_n_best(X[2:3], 3, [["I-X"]]), "sequence 0: no labelling of its 1"),
        (lambda e, X: e.sample_labellings(X[2:3], 3, [["I-X"]]), "sequence 0: no labelling"),
        (lambda e, X: e.span_probability(X[2], 0, 1, "X", known=["I-X"]), "sequence 0: no"),
        (lambda e, X: e.span_probability(X[2], 0, 1, "X", known=["O", "O"]), "known[0]: 2 labels"),
        (lambda e, X: e.predict_n_best(X, 0), "n: must be a number of labellings, got 0"),
        (lambda e, X: e.predict_n_best(X, 1.5), "n: must be a number of labellings, got 1.5"),
        (lambda e, X: e.sample_labellings(X, 0), "n: must be a number of labellings, got 0"),
        (lambda e, X: e.sample_labellings(X, "3"), "n: must be a number of labellings, got '3'"),
        (lambda e, X: e.span_probability(X[3], 0, 2, "X", "inside"), "sense: 'inside' is not known"),
        (lambda e, X: e.span_probability(X[3], 0, 2), "label: 'exact' needs a label"),
        (lambda e, X: e.span_uncertainty(X[3], 0, 2, "X", "bounds"), "label: 'bounds' is for any label"),
        (lambda e, X: e.span_probability(X[3], 0, 2, "Y"), "label: 'Y' is not a type of span; use"),
        (lambda e, X: e.span_probability(X[3], 2, 2, "X"), "start, stop: 2 to 2 is not a span of 3"),
        (lambda e, X: e.span_probability(X[3], -1, 2, "X"), "start, stop: -1 to 2"),
        (lambda e, X: e.span_probability(X[3], 0, 4, "X"), "start, stop: 0 to 4"),
        (lambda e, X: e.span_probability([], 0, 1, "X"), "start, stop: 0 to 1 is not a span of 0"),
        (lambda e, X: e.predict_spans(X, 0), "threshold: must be above 0 and at most 1, got 0"),
        (lambda e, X: e.predict_spans(X, 1.1), "threshold: must be above 0 and at most 1, got 1.1"),
        (lambda e, X: e.predict_spans(X, math.nan), "threshold: must be above 0 and at most 1, got nan"),
        (lambda e, X: e.predict_uncertainty(X, "words"), "of: 'words' is not known; use 'tokens' or"),
    ],
)
def test_mistakes(fitted: Any, X: Any, ask: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        ask(fitted, X)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


class OnlyMarginals(Structure):
    """A softmax at each position that answers little."""

    def log_prob(self, f: Any, g: Any, y: Any, mask: Any) -> Any:
        p = f.log_softmax(-1).gather(-1, y.expand(len(f), -1, -1)[..., None])[..., 0]
        return torch.where(mask, p, 0).sum(-1) + 0 * g.sum((1, 2))[:, None]

    def marginals(self, f: Any, g: Any, mask: Any) -> Any:
        return f.softmax(-1) * mask[..., None]


def test_a_structure_that_knows_only_marginals(fitted: Any, X: Any, known: Any) -> None:
    model = fitted.model_
    other = restored(fitted)
    other.model_ = structgp.answers.ask.Model(
        model.encoder, model.labels, model.posterior, n_draws=4, predictor=OnlyMarginals()
    )
    assert len(other.predict(X)) == 4
    for ask, what in (
        (lambda: other.predict_n_best(X, 2), "n best labellings"),
        (lambda: other.sample_labellings(X, 2), "labellings to draw"),
        (lambda: other.predict_transition_marginals(X), "transition marginals"),
        (lambda: other.predict_spans(X), "spans"),
        (lambda: other.span_probability(X[0], 0, 1, "X"), "spans"),
        (lambda: other.predict_uncertainty(X, "sequences"), "entropy"),
        (lambda: restored(other, decode="sequence").predict(X), "decoder"),
        (lambda: other.predict(X, known), "answers where labels are known"),
        (lambda: other.sequence_log_probs(X[:1], [known[0]]), "where labels are missing"),
    ):
        with pytest.raises(InputError, match=f"OnlyMarginals offers no .*{what}"):
            ask()


@pytest.mark.parametrize("name", ["structure", "predict_with"])
def test_rules_belong_into_constraints(name: str) -> None:
    rules = Rules(torch.eye(3, dtype=torch.bool), *torch.ones(2, 3, dtype=torch.bool))
    chain = Chain(rules)
    given = chain if name == "structure" else Custom(Chain(), predict_with=chain)
    with pytest.raises(InputError, match=f"^{name}: a chain with rules; declare"):
        StructuredGPClassifier(structure=given).fit(*sequences(3, 0))


def test_constraints_that_leave_nothing() -> None:
    """Training data of two tokens obeys; there is no labelling of three."""
    X, y = [[["a"], ["b"]]] * 3, [["u", "v"]] * 3
    only = StructuredGPClassifier(constraints={"allowed": [("u", "v")]}, n_draws=2).fit(X, y)
    assert only.predict(X[:1]) == [["u", "v"]]
    with pytest.raises(InputError, match=r"^sequence 1: no labelling of its 3 tokens agrees with"):
        only.predict([X[0], [["a"]] * 3])
    assert only.sequence_log_probs([[["a"]] * 3], [["u", "v", "u"]]) == [-math.inf]


# -- fits ---------------------------------------------------------------------------------------------


def test_a_file_keeps_the_constraints(fitted: Any, X: Any, known: Any, tmp_path: Any) -> None:
    fitted.save(tmp_path / "model")
    again = structgp.load(tmp_path / "model")
    assert again.predict_n_best(X, 3, known) == fitted.predict_n_best(X, 3, known)
    assert again.sample_labellings(X, 3) == fitted.sample_labellings(X, 3)
    with pytest.raises(InputError, match="no labelling"):
        again.predict(X[2:3], [["I-X"]])
    free = StructuredGPClassifier(n_draws=2, constraints=None).fit(*sequences(4, 0))
    free.save(tmp_path / "free")
    assert structgp.load(tmp_path / "free").model_.constraints is None


def test_labels_missing_in_training() -> None:
    """A fit without them says what one with them says, where they tell nothing new."""
    X, y = sequences(12, 0)
    partly = [[None if (i + t) % 5 == 0 else v for t, v in enumerate(s)] for i, s in enumerate(y)]
    found = StructuredGPClassifier(constraints="BIO", n_draws=6).fit(X, partly)
    assert found.score(X, y) > 0.6
    assert found.model_.info["n_tokens"] == sum(map(len, X))
    with pytest.warns(StructgpWarning, match="1 of 13 sequences have no label"):
        again = StructuredGPClassifier(constraints="BIO", n_draws=6).fit(
            [*X, X[0]], [*partly, [None] * len(X[0])]
        )
    assert again.predict_marginals(X) == found.predict_marginals(X)


def test_labels_missing_where_the_likelihood_cannot_have_them() -> None:
    X, y = sequences(3, 0)
    with pytest.raises(InputError, match="labels are missing, and OnlyMarginals does not say"):
        StructuredGPClassifier(structure=OnlyMarginals()).fit(X, [[None, *s[1:]] for s in y])


def test_constraints_that_the_predictor_does_not_know() -> None:
    with pytest.raises(InputError, match="OnlyMarginals does not know them"):
        StructuredGPClassifier(
            constraints="BIO", structure=Custom(Chain(), predict_with=OnlyMarginals())
        ).fit(*sequences(3, 0))
