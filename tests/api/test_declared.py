"""Every answer for every kind of declared structure, against direct enumeration of the posterior mean."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.api.declared_cases import CASES, Case, Enumerated, enumerated

import structgp
import structgp.plan.run
from structgp import InputError, Prior, StructgpWarning, StructuredGPClassifier, chain, edges, same
from structgp.answers import encoded
from structgp.answers import spans as answers_spans
from structgp.data.graphs import Graph
from structgp.inference.checkpoint import Checkpoint
from structgp.plan.options import ANSWER_DRAWS, LINKED_DRAWS
from structgp.structures import Declared

NAMES = list(CASES)
GRIDS = [name for name in NAMES if name.startswith("grid")]
SEQUENCES = ["order 2", "skip", "segments"]
FITTED = ["tree", "grid features", "layers", "edges features", "segments"]
"""What tests of fits take, which cost more."""


LIKE_OTHERS = ("tree features", "grid 8", "edges features", "3-ary")
"""Structures that differ little from another that is tried."""


@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.slow if n in LIKE_OTHERS else ()) for n in NAMES])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def fits() -> dict[str, StructuredGPClassifier]:
    return {}


@pytest.fixture
def case(name: str) -> Case:
    return CASES[name]


def fitted_of(fits: dict[str, StructuredGPClassifier], name: str) -> StructuredGPClassifier:
    if name not in fits:
        fits[name] = CASES[name].fit()
    return fits[name].set_params(n_draws=4, decode="auto", costs=None, class_weight=None)


@pytest.fixture
def fitted(fits: dict[str, StructuredGPClassifier], name: str) -> StructuredGPClassifier:
    """Answers average over draws."""
    return fitted_of(fits, name)


@pytest.fixture
def plugged(fitted: StructuredGPClassifier) -> StructuredGPClassifier:
    """Answers come from the posterior mean."""
    return fitted.set_params(n_draws=0)


@pytest.fixture(scope="module")
def listed() -> dict[str, list[Enumerated]]:
    return {}


@pytest.fixture
def all_labellings(fits, listed, name: str, case: Case) -> list[Enumerated]:
    """Of the first four examples, under the posterior mean; asked for before the settings of a test."""
    if name not in listed:
        listed[name] = list(enumerated(fits[name] if name in fits else fitted_of(fits, name), case.X[:4]))
    return listed[name]


def flat(values: Any) -> list[Any]:
    """Of one example, in the order of its nodes; layer after layer."""
    if isinstance(values, dict):
        return [value for some in values.values() for value in some]
    if isinstance(values, np.ndarray):
        return values.reshape(-1, *values.shape[2:]).tolist() if values.ndim > 1 else values.tolist()
    return [v for row in values for v in row] if isinstance(values[0], list) else list(values)


def held_sets(found: Any, name: str) -> list[list[str]]:
    """The sets of ``predict_sets`` of one example, in the order of its nodes."""
    return flat(found) if name in (*GRIDS, "layers") else found


def numbers(model: StructuredGPClassifier, labels: Any) -> list[int]:
    """Label indices of a labelling as a user sees it."""
    classes = list(model.classes_)
    if isinstance(labels, dict):
        return [classes.index(f"{layer}={v}") for layer, some in labels.items() for v in some]
    return [classes.index(str(label)) for label in flat(labels)]


def like(shape: Any, values: Sequence[Any]) -> Any:
    """Values of nodes in the shape of labels as a user gives them."""
    if isinstance(shape, dict):
        n = len(values) // len(shape)
        return {layer: list(values[k * n : (k + 1) * n]) for k, layer in enumerate(shape)}
    if isinstance(shape, np.ndarray) or isinstance(shape[0], list):
        H, W = len(shape), len(shape[0])
        return [list(values[h * W : (h + 1) * W]) for h in range(H)]
    return list(values)


def by_number(model: StructuredGPClassifier, p: Any) -> np.ndarray:
    """(N, V) from the dicts of ``predict_marginals``."""
    classes = [str(c) for c in model.classes_]
    if isinstance(p, dict):
        parts = [(layer, dist) for layer, some in p.items() for dist in some]
        return np.array([[dist.get(c.removeprefix(f"{of}="), 0.0) if c.startswith(f"{of}=") else 0.0
                          for c in classes] for of, dist in parts])  # fmt: skip
    return np.array([[dist[c] for c in classes] for dist in flat(p)])


# -- against enumeration ---------------------------------------------------------------------------


def test_marginals_are_those_of_all_labellings(plugged, case, all_labellings):
    found = plugged.predict_marginals(case.X[:4])
    for p, every in zip(found, all_labellings, strict=True):
        np.testing.assert_allclose(by_number(plugged, p), every.marginals(len(plugged.classes_)), atol=1e-8)


def test_log_probs_are_those_of_all_labellings(plugged, case, all_labellings):
    found = plugged.sequence_log_probs(case.X[:4], case.y[:4])
    wanted = [math.log(e.of(numbers(plugged, y))) for y, e in zip(case.y, all_labellings, strict=False)]
    np.testing.assert_allclose(found, wanted, atol=1e-8)


def test_log_probs_of_a_part_sum_over_the_rest(plugged, case, all_labellings):
    part = [like(y, [v if i % 2 == 0 else None for i, v in enumerate(flat(y))]) for y in case.y[:4]]
    part = [
        like(y, [None if v is None else str(v) for v in flat(p)])
        for y, p in zip(case.y, part, strict=False)
    ]
    found = plugged.sequence_log_probs(case.X[:4], part)
    for value, y, every in zip(found, case.y, all_labellings, strict=False):
        known = {i: v for i, v in enumerate(numbers(plugged, y)) if i % 2 == 0}
        keep = np.all([every.labellings[:, n] == v for n, v in known.items()], 0)
        assert value == pytest.approx(math.log(every.p[keep].sum()), abs=1e-8)


def test_known_labels_condition_every_answer(plugged, case, all_labellings):
    known = [like(y, [str(v) if i == 0 else None for i, v in enumerate(flat(y))]) for y in case.y[:4]]
    V = len(plugged.classes_)
    told = [e.given({0: numbers(plugged, y)[0]}) for y, e in zip(case.y, all_labellings, strict=False)]
    for p, every in zip(plugged.predict_marginals(case.X[:4], known), told, strict=True):
        np.testing.assert_allclose(by_number(plugged, p), every.marginals(V), atol=1e-8)
    for y, every in zip(
        plugged.set_params(decode="sequence").predict(case.X[:4], known), told, strict=True
    ):
        assert every.of(numbers(plugged, y)) == pytest.approx(every.p.max(), abs=1e-9)
    for drawn, y in zip(plugged.sample_labellings(case.X[:4], 5, known), case.y, strict=False):
        assert {numbers(plugged, one)[0] for one in drawn} == {numbers(plugged, y)[0]}


def test_n_best_are_the_most_probable_labellings(plugged, case, all_labellings):
    for found, every in zip(plugged.predict_n_best(case.X[:4], 5), all_labellings, strict=True):
        wanted = np.sort(every.p)[::-1][: len(found)]
        assert len(found) == 5
        np.testing.assert_allclose([one.probability for one in found], wanted, atol=1e-8)
        of = [every.of(numbers(plugged, one.labels)) for one in found]
        np.testing.assert_allclose(of, wanted, atol=1e-8)


def test_decoding_for_each_purpose(plugged, case, all_labellings):
    V = len(plugged.classes_)
    best = plugged.set_params(decode="sequence").predict(case.X[:4])
    tokens = plugged.set_params(decode="accuracy").predict(case.X[:4])
    costs = np.abs(np.arange(V)[:, None] - np.arange(V)) ** 2.0
    cheap = plugged.set_params(decode="cost", costs=costs).predict(case.X[:4])
    for one, each, low, every in zip(best, tokens, cheap, all_labellings, strict=True):
        p = every.marginals(V)
        assert every.of(numbers(plugged, one)) == pytest.approx(every.p.max(), abs=1e-9)
        assert numbers(plugged, each) == p.argmax(1).tolist()
        spent = np.where(p > 0, p @ costs, np.inf)
        assert numbers(plugged, low) == spent.argmin(1).tolist()


def test_entropy_of_labellings_and_of_nodes(plugged, case, all_labellings):
    whole = plugged.predict_uncertainty(case.X[:4], of="sequences")
    np.testing.assert_allclose(whole.total, [e.entropy for e in all_labellings], atol=1e-8)
    nodes = plugged.predict_uncertainty(case.X[:4])
    for u, every in zip(nodes.total, all_labellings, strict=True):
        p = every.marginals(len(plugged.classes_))
        wanted = -(p * np.log(np.where(p > 0, p, 1))).sum(1)
        np.testing.assert_allclose(flat(u), wanted, atol=1e-8)


def test_template_marginals_are_those_of_all_labellings(plugged, case, all_labellings):
    spec, V = plugged.model_.spec, len(plugged.classes_)
    for template in spec.templates:
        if template.rule == "length":
            with pytest.raises(InputError, match="predict_spans"):
                plugged.predict_template_marginals(case.X[:4], template.name)
            continue
        found = plugged.predict_template_marginals(case.X[:4], template.name)
        for (tuples, p), every in zip(found, all_labellings, strict=True):
            assert tuples.shape == (len(p), template.labels)
            n = every.labellings.shape[1] // max(1, len(spec.layers))
            for nodes, table in zip(tuples, p, strict=True):
                layers = [spec.layers.index(of) for of in template.layers] or [0] * template.labels
                names = [str(c) for c in plugged.classes_]
                own = [[v for v in range(V) if not spec.layers or names[v].startswith(f"{spec.layers[k]}=")]
                       for k in layers]  # fmt: skip
                wanted = np.zeros([len(v) for v in own])
                for y, q in zip(every.labellings, every.p, strict=True):
                    at = [y[t + n * k] for t, k in zip(nodes, layers, strict=True)]
                    wanted[tuple(v - labels[0] for v, labels in zip(at, own, strict=True))] += q
                np.testing.assert_allclose(table, wanted, atol=1e-8)


def test_template_marginals_average_over_draws(fitted, case):
    template = next(t for t in fitted.model_.spec.templates if t.rule not in ("node", "length"))
    for tuples, p in fitted.predict_template_marginals(case.X[:4], template.name):
        np.testing.assert_allclose(p.reshape(len(tuples), -1).sum(1), 1, atol=1e-9)
    node = fitted.model_.spec.node.name
    for (_, p), q in zip(
        fitted.predict_template_marginals(case.X[:2], node),
        fitted.predict_marginals(case.X[:2]),
        strict=True,
    ):
        told = by_number(fitted, q)[: len(p)]
        np.testing.assert_allclose(p, told[:, told.any(0)] if "=" in str(fitted.classes_[0]) else told)


def test_an_unknown_template_is_named(fitted, case):
    with pytest.raises(InputError, match=r"'sideways' is not one of this structure; use (pos )?node"):
        fitted.predict_template_marginals(case.X[:1], "sideways")


def test_samples_come_as_often_as_they_are_probable(plugged, case, all_labellings):
    (drawn,) = plugged.sample_labellings(case.X[:1], 2000)
    every = all_labellings[0]
    found = np.eye(len(plugged.classes_))[[numbers(plugged, y) for y in drawn]].mean(0)
    p = every.marginals(len(plugged.classes_))
    assert (np.abs(found - p) < 5 * np.sqrt(p * (1 - p) / 2000) + 1e-9).all()


def test_class_weights_move_all_nodes(plugged, case, all_labellings):
    label = str(plugged.classes_[0])
    plugged.set_params(class_weight={label: 3.0})
    (p,) = plugged.predict_marginals(case.X[:1])
    every = all_labellings[0]
    weight = every.p * 3.0 ** (every.labellings == 0).sum(1)
    moved = Enumerated(every.labellings, weight / weight.sum())
    np.testing.assert_allclose(by_number(plugged, p), moved.marginals(len(plugged.classes_)), atol=1e-8)


def spans_of(model: StructuredGPClassifier, every: Enumerated) -> dict[tuple[int, int, str], float]:
    """The probability of every span."""
    found: dict[tuple[int, int, str], float] = {}
    for y, p in zip(every.labellings, every.p, strict=True):
        for span in structgp.metrics.chunks([str(model.classes_[v]) for v in y]):
            found[span] = found.get(span, 0.0) + p
    return found


@pytest.mark.parametrize("name", SEQUENCES)
def test_the_probability_of_a_span_is_that_of_its_labellings(plugged, case, all_labellings):
    for x, every in zip(case.X, all_labellings, strict=False):
        wanted = spans_of(plugged, every)
        for (start, stop, label), p in wanted.items():
            assert plugged.span_probability(x, start, stop, label) == pytest.approx(p, abs=1e-8)
        covers = {
            (start, stop, label): sum(
                p for (a, b, v), p in wanted.items() if a <= start and stop <= b and v == label
            )
            for start, stop, label in wanted
        }
        for (start, stop, label), p in list(covers.items())[:4]:
            found = plugged.span_probability(x, start, stop, label, sense="covers")
            assert found == pytest.approx(p, abs=1e-8)


@pytest.mark.parametrize("name", ["segments"])
def test_spans_of_segments_are_exact(plugged, case, all_labellings):
    found = plugged.predict_spans(case.X[:4], 0.05)
    for spans, every in zip(found, all_labellings, strict=True):
        wanted = {s: p for s, p in spans_of(plugged, every).items() if p >= 0.05 and s[1] - s[0] <= 3}
        short = {(s.start, s.stop, s.label): s.probability for s in spans if s.stop - s.start <= 3}
        assert short.keys() == wanted.keys()
        for span, p in wanted.items():
            assert short[span] == pytest.approx(p, abs=1e-8)


# -- shapes ----------------------------------------------------------------------------------------


def test_answers_have_the_shape_of_the_labels(fitted, case):
    X, y = case.X[:3], case.y[:3]
    sets = fitted.calibrate(case.X, case.y).predict_sets
    answers = [
        fitted.predict(X),
        fitted.predict(X, defer=0.3),
        fitted.predict_marginals(X),
        fitted.predict_uncertainty(X).model,
        [found[0].labels for found in fitted.predict_n_best(X, 2)],
        [drawn[0] for drawn in fitted.sample_labellings(X, 2)],
        sets(X, 0.5),
        [found[0].labels for found in sets(X, 0.5, of="labellings")],
    ]
    for found in answers:
        for one, labels in zip(found, y, strict=True):
            if isinstance(labels, dict):
                assert {k: len(v) for k, v in one.items()} == {k: len(v) for k, v in labels.items()}
            elif not isinstance(labels[0], str):
                assert (len(one), len(one[0])) == (len(labels), len(labels[0]))
            else:
                assert len(one) == len(labels)


@pytest.mark.parametrize(
    ("name", "kind"), [("grid", np.int64), ("grid features", np.int64), ("grid 8", np.str_)]
)
def test_labels_of_grids_come_back_as_they_were_given(fits, name, kind):
    found = fitted_of(fits, name).predict(CASES[name].X[:2])
    for one in found:
        assert isinstance(one, np.ndarray)
        assert issubclass(one.dtype.type, kind)


def test_the_matrix_of_what_is_refused(fitted, case, name):
    """Spans and transitions are of sequences; all else is answered."""
    X = case.X[:2]
    questions = {
        "transition marginals": lambda: fitted.predict_transition_marginals(X),
        "spans": lambda: fitted.predict_spans(X),
        "span": lambda: fitted.span_probability(X[0], 0, 1, sense="bounds"),
        "uncertain span": lambda: fitted.span_uncertainty(X[0], 0, 1, sense="bounds"),
    }
    for ask in questions.values():
        if name in SEQUENCES:
            ask()
        else:
            with pytest.raises(InputError, match=r"^structure: .* offers no"):
                ask()
    with pytest.raises(InputError, match="partial_fit"):
        fitted.partial_fit(case.X, case.y)


# -- decisions -------------------------------------------------------------------------------------


def test_evaluation(fitted, case, name):
    report = fitted.evaluate(case.X, case.y)
    assert report.token_error == pytest.approx(1 - fitted.score(case.X, case.y))
    assert report.n_tokens == sum(len(flat(y)) for y in case.y)
    log_probs = fitted.sequence_log_probs(case.X, case.y)
    assert report.sequence_nll == pytest.approx(-np.mean(log_probs))
    assert set(report.layers) == ({"pos", "chunk"} if name == "layers" else set())


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        ("Z", "every token has the same label, 'Z' in layer 'chunk'"),
        (None, "no token has a label in layer"),
    ],
)
def test_a_layer_has_labels_to_tell_apart(label: str | None, problem: str) -> None:
    case = CASES["layers"]
    y: Any = [{"pos": of["pos"], "chunk": [label] * len(of["pos"])} for of in case.y]
    with pytest.raises(InputError, match=rf"^y: {problem}"):
        StructuredGPClassifier(structure=case.spec).fit(case.X, y)


def test_ties_join_tokens_at_their_distance() -> None:
    """The labels of the second layer follow from those of the next token in the first alone."""
    draw = np.random.default_rng(0)
    X = [[{"word": w} for w in draw.choice(["a", "b"], 5)] for _ in range(30)]
    pos = [["A" if token["word"] == "a" else "B" for token in x] for x in X]
    y: Any = [{"pos": p, "next": [*p[1:], "A"]} for p in pos]
    right = {}
    for ties in ((0,), (0, 1)):
        spec = structgp.layers(pos=structgp.chain(order=0), next=structgp.chain(order=0), ties=ties)
        model = StructuredGPClassifier(structure=spec, prior=Prior(data_weight=1)).fit(X[:20], y[:20])
        found: Any = model.predict(X[20:])
        right[ties] = np.mean([a == b for f, of in zip(found, y[20:], strict=True)
                               for a, b in zip(f["next"][:-1], of["next"][:-1], strict=True)])  # fmt: skip
    assert right[0, 1] == 1 > right[0,] + 0.2
    assert spec.templates[-1].name == "pos next +1"
    assert structgp.Spec.from_json(spec.to_json()) == spec
    assert repr(spec) == "layers(pos=chain(order=0), next=chain(order=0), ties=(0, 1))"


@pytest.mark.parametrize("ties", [(), (0, 0), [[0]], "next", (0.5,), None, structgp.chain()])
def test_ties_that_cannot_be(ties: Any) -> None:
    with pytest.raises(InputError, match="ties: "):
        structgp.layers(pos=structgp.chain(), chunk=structgp.chain(), ties=ties)


def test_layers_are_scored_one_by_one(fits):
    case, fitted = CASES["layers"], fitted_of(fits, "layers")
    report, found = fitted.evaluate(case.X, case.y), fitted.predict(case.X)
    for layer, own in report.layers.items():
        wrong = [
            a != b
            for y, p in zip(case.y, found, strict=True)
            for a, b in zip(y[layer], p[layer], strict=True)
        ]
        assert own.token_error == pytest.approx(np.mean(wrong))
    assert report.token_error == pytest.approx(np.mean([own.token_error for own in report.layers.values()]))
    part = [{"pos": y["pos"], "chunk": [None] * len(y["chunk"])} for y in case.y]
    assert report.layers["pos"].sequence_nll == pytest.approx(
        -np.mean(fitted.sequence_log_probs(case.X, part))
    )
    assert set(report.as_dict()["layers"]) == {"pos", "chunk"}


def test_spans_of_a_layer_are_read_within_it():
    case = CASES["layers"]
    tags = {"p": "B-NP", "q": "I-NP", "r": "O"}
    y = [{"pos": of["pos"], "chunk": [tags[v] for v in of["chunk"]]} for of in case.y]
    fitted = Case(case.spec, case.X, y).fit()
    report, found = fitted.evaluate(case.X, y), fitted.predict(case.X)
    layers = [[{"chunk": p["chunk"], "pos": p["pos"]}[layer] for p in some]
              for layer in ("chunk", "pos") for some in (y, found)]  # fmt: skip
    chunk = structgp.metrics.span_scores(layers[0], layers[1])
    pos = structgp.metrics.span_scores(layers[2], layers[3])
    assert report.layers["chunk"].span_f1 == pytest.approx(chunk.f1)
    right, total = chunk.n_correct + pos.n_correct, chunk.n_true + pos.n_true + chunk.n_pred + pos.n_pred
    assert report.span_f1 == pytest.approx(2 * right / total)


def test_expected_scores_are_those_of_labellings_drawn(plugged, case, all_labellings):
    found = plugged.set_params(decode="accuracy").expected_scores(case.X[:4])
    V = len(plugged.classes_)
    wrong = sum((1 - e.marginals(V).max(1)).sum() for e in all_labellings)
    n = sum(e.labellings.shape[1] for e in all_labellings)
    assert found.n_tokens == n
    assert found.error.mean == pytest.approx(wrong / n, abs=0.03)


def test_sets_hold_what_calibration_says(fitted, case, name):
    fitted.calibrate(case.X, case.y)
    sets = fitted.predict_sets(case.X, 0.9)
    truth = [str(v) for y in case.y for v in flat(y)]
    held = [some for one in sets for some in held_sets(one, name)]
    assert np.mean([label in some for label, some in zip(truth, held, strict=True)]) >= 0.85


def test_labels_are_deferred_where_they_are_dear(fitted, case):
    fitted.set_params(decode="accuracy")
    found, p = fitted.predict(case.X[:4], defer=0.3), fitted.predict_marginals(case.X[:4])
    for one, dists in zip(found, p, strict=True):
        for label, top in zip(flat(one), by_number(fitted, dists).max(1), strict=True):
            assert (label is None) == (1 - top > 0.3)


@pytest.mark.parametrize(
    "strategy", ["batch", "bald", "margin", "n-best-entropy", "least-confidence", "token-entropy"]
)
def test_active_learning(fitted, case, strategy):
    found = structgp.select(fitted, case.X, 3, strategy)
    assert len(set(found)) == 3


def test_the_least_confident_example_is_the_one_whose_best_labelling_is_least_probable(
    plugged, case, all_labellings
):
    found = structgp.select(plugged, case.X[:4], 4, "least-confidence")
    assert found == np.argsort([e.p.max() for e in all_labellings]).tolist()


# -- reasons ---------------------------------------------------------------------------------------


def place(name: str) -> Any:
    return (0, 1) if name in GRIDS else ("chunk", 1) if name == "layers" else 1


def test_an_explanation_adds_up(plugged, case, name, all_labellings):
    found = structgp.explain(plugged, case.X[0], place(name), n=100)
    n = numbers(plugged, case.y[0])
    at = len(n) // 2 + 1 if name == "layers" else 1
    classes = [str(c) for c in plugged.classes_]
    prefix = "chunk=" if name == "layers" else ""
    p = all_labellings[0].marginals(len(classes))[at]
    a, b = (classes.index(prefix + label) for label in (found.label, found.other))
    assert found.log_odds == pytest.approx(math.log(p[a] / p[b]), abs=1e-8)
    parts = sum(near.score for near in found.neighbours)
    assert found.log_odds == pytest.approx(found.unary + parts + found.rest)
    assert found.unary == pytest.approx(sum(part.score for part in found.features))
    assert f"{found.label} rather than {found.other}" in str(found)
    if name.startswith("tree"):
        assert found.rest == pytest.approx(0, abs=1e-9)


def test_what_a_neighbour_adds_is_what_is_lost_without_it(fits):
    name = "tree"
    model, case = fitted_of(fits, name).set_params(n_draws=0), CASES[name]
    x = case.X[0]
    assert isinstance(x, Graph)
    found = structgp.explain(model, x, 1, "a", "b")
    near = next(one for one in found.neighbours if one.nodes == (x.parents[1],))
    loose = Graph(x.nodes, parents=[-1 if i == 1 else p for i, p in enumerate(x.parents)])
    (before,), (after,) = model.predict_marginals([x]), model.predict_marginals([loose])
    lost = math.log(before[1]["a"] / before[1]["b"]) - math.log(after[1]["a"] / after[1]["b"])
    assert near.template == "parent"
    assert near.score == pytest.approx(lost, abs=1e-8)


def test_training_tokens_witness(fitted, case, name):
    found = structgp.explain(fitted, case.X[0], place(name), X_train=case.X, y_train=case.y, n=2)
    assert 0 < len(found.witnesses) <= 4
    known = {str(v) for y in case.y for v in (flat(y["chunk"]) if name == "layers" else flat(y))}
    assert {w.label for w in found.witnesses} <= known


@pytest.mark.parametrize(
    ("name", "token", "told"),
    [("grid", 1, "row, column"), ("grid", (9, 9), "no pixel"), ("layers", 0, "layer, token"),
     ("layers", ("verb", 0), "no layer 'verb'"), ("tree", 99, "no token 99")],
)  # fmt: skip
def test_a_place_that_is_not_there_is_named(fits, name, token, told):
    with pytest.raises(InputError, match=told):
        structgp.explain(fitted_of(fits, name), CASES[name].X[0], token)


def test_descriptions_have_the_table_of_every_template(fitted, case):
    found, posterior = structgp.describe(fitted), fitted.model_.posterior
    templates = [t for t in case.spec.templates if t.rule != "node"]
    assert list(found.tables) == [t.name for t in templates]
    for t in templates:
        table = found.tables[t.name]
        mean, sd = posterior[t.name].constant_scores()
        np.testing.assert_array_equal(table.mean, mean)
        np.testing.assert_array_equal(table.sd, sd)
        assert table.mean.shape == tuple(map(len, table.axes))
        assert table.prior_sd == pytest.approx(fitted.training_log_["template_sds"][t.name])
        assert bool(table.scales) == (not t.is_constant)
        assert f"{t.name} (mean, sd; prior sd {table.prior_sd:.2f})" in str(found)
    assert found.plan["program"]["value"] in str(found)


# -- fits ------------------------------------------------------------------------------------------


def test_a_file_answers_alike(fitted, case, tmp_path: Path):
    fitted.calibrate(case.X, case.y).save(tmp_path / "model")
    again = structgp.load(tmp_path / "model")
    assert repr(again.predict_marginals(case.X[:3])) == repr(fitted.predict_marginals(case.X[:3]))
    assert repr(again.predict_sets(case.X[:3], 0.5)) == repr(fitted.predict_sets(case.X[:3], 0.5))
    assert str(structgp.describe(again)) == str(structgp.describe(fitted))
    assert again.structure == case.spec


@pytest.mark.parametrize("name", FITTED)
def test_a_fit_is_asked_while_it_goes_on(case):
    seen: list[Any] = []

    def callback(info: Any) -> bool:
        seen.append(model.so_far().predict(case.X[:1]))
        return len(seen) == 2

    model = StructuredGPClassifier(structure=case.spec, prior=structgp.Prior(data_weight=1.0), n_draws=2)
    model.fit(case.X, case.y, callback=callback)
    assert len(seen) == 2
    assert repr(model.predict(case.X[:1])) == repr(seen[-1])


@pytest.mark.parametrize("name", FITTED)
def test_a_fit_goes_on_from_its_checkpoint(case, fitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(structgp.plan.run, "Checkpoint", functools.partial(Checkpoint, seconds=0.0))
    file, steps = tmp_path / "state", []

    class StoppedError(Exception):
        pass

    def stop(info: Any) -> None:
        steps.append(info.iteration)
        if len(steps) == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        case.fit(callback=stop, checkpoint=file)
    assert file.exists()
    again: list[int] = []
    model = case.fit(callback=lambda info: again.append(info.iteration), checkpoint=file)
    assert again[0] > 0
    assert not file.exists()
    marginals = [by_number(m, m.predict_marginals(case.X[:1])[0]) for m in (model, fitted)]
    np.testing.assert_allclose(*marginals, atol=1e-6)


@pytest.mark.parametrize("name", FITTED)
def test_dev_data_stop_a_fit(case):
    model = case.fit(X_dev=case.X[:4], y_dev=case.y[:4], early_stopping=True)
    report = model.evaluate(case.X[:4], case.y[:4]).as_dict()
    assert model.training_log_["dev"] == report


def test_missing_labels_are_summed_over(case):
    y = [like(of, [None if i == 1 else str(v) for i, v in enumerate(flat(of))]) for of in case.y]
    model = Case(case.spec, case.X, y).fit()
    known = [v for of in y for v in flat(of) if v is not None]
    assert sum(model.model_.info["label_counts"].values()) == len(known)
    truth = [numbers(model, of) for of in case.y]
    p = [by_number(model, q) for q in model.predict_marginals(case.X)]
    right = np.concatenate([q[np.arange(len(of)), of] for q, of in zip(p, truth, strict=True)])
    assert -np.log(right).mean() < math.log(3)


def test_a_weight_of_two_counts_as_two_examples(fits):
    case = CASES["tree"]
    weights = [2.0] * 2 + [1.0] * (len(case.X) - 2)
    once = case.fit(sample_weight=weights, n_draws=0)
    twice = Case(case.spec, case.X + case.X[:2], case.y + case.y[:2]).fit(n_draws=0)
    a, b = (by_number(m, m.predict_marginals(case.X[:1])[0]) for m in (once, twice))
    np.testing.assert_allclose(a, b, atol=0.03)


@pytest.mark.parametrize("name", FITTED)
def test_a_weight_of_nothing_leaves_an_example_out(case):
    weights = [0.0] + [1.0] * (len(case.X) - 1)
    model = case.fit(sample_weight=weights)
    assert model.model_.info["n_sequences"] == len(case.X) - 1


def test_the_device_may_be_named(fitted, case):
    fitted.device = "cpu"
    assert len(fitted.predict(case.X)) == len(case.X)


def test_empty_examples_have_empty_answers(fitted, case, name):
    x: Any = np.zeros((0, 3, 2)) if name in ("grid", "grid features") else []
    (p,) = fitted.predict_marginals([x])
    (y,) = fitted.predict([x])
    assert len(flat(p) if isinstance(p, dict) else list(p)) == 0
    assert len(flat(y) if isinstance(y, dict) else list(y)) == 0
    first = next(t.name for t in case.spec.templates if t.rule not in ("node", "length"))
    ((tuples, q),) = fitted.predict_template_marginals([x], first)
    assert len(tuples) == len(q) == 0


# -- programs that are not exact -------------------------------------------------------------------


@pytest.fixture
def bounded(fits: dict[str, StructuredGPClassifier]) -> StructuredGPClassifier:
    """A fit by exact sums that answers by the bound."""
    model = copy.copy(fitted_of(fits, "grid 8")).set_params(n_draws=2)
    model.model_ = replace(model.model_, spec=CASES["grid 8"].spec.using("reweighted"))
    return model


def test_a_bound_answers_what_it_can_and_refuses_the_rest_by_name(bounded):
    X, y = CASES["grid 8"].X[:2], CASES["grid 8"].y[:2]
    _, q = bounded.predict_template_marginals(X, "right")
    np.testing.assert_allclose(q.probabilities.sum((1, 2)), 1, atol=1e-6)
    assert [one.shape for one in bounded.set_params(decode="sequence").predict(X)] == [(2, 2), (2, 3)]
    assert len(structgp.select(bounded, X, 1, "least-confidence")) == 1
    bounded.calibrate(X, y)
    assert len(bounded.predict_sets(X, 0.5)) == 2
    for ask in (
        lambda: bounded.predict_n_best(X, 2),
        lambda: bounded.calibrate(X, y, of="labellings"),
        lambda: structgp.select(bounded, X, 1, "margin"),
    ):
        with pytest.raises(InputError, match="tree-reweighted program has no n best labellings"):
            ask()


@pytest.mark.slow
def test_sampling_answers_after_a_fit_by_sums():
    case = CASES["grid 8"]
    settings: dict[str, Any] = {"n_draws": 0, "callback": lambda info: True}
    sampled = Case(case.spec.using("gibbs"), case.X[:4], case.y[:4]).fit(**settings)
    exact = Case(case.spec, case.X[:4], case.y[:4]).fit(**settings)
    a, b = (by_number(m, m.predict_marginals(case.X[:1])[0]) for m in (sampled, exact))
    np.testing.assert_allclose(a, b, atol=0.05)
    known = [like(case.y[0], [flat(case.y[0])[0], *[None] * (len(flat(case.y[0])) - 1)])]
    assert flat(sampled.predict(case.X[:1], known)[0])[0] == flat(case.y[0])[0]
    report = sampled.evaluate(case.X[:2], case.y[:2])
    assert report.sequence_nll is None
    assert report.token_nll is not None
    with pytest.raises(InputError, match="Gibbs sampling has no log-probabilities"):
        sampled.sequence_log_probs(case.X[:1], case.y[:1])


@pytest.mark.parametrize("name", ["skip", "order 2"])
def test_answers_of_chains_with_links_average_over_more_draws(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    wanted = LINKED_DRAWS if name == "skip" else ANSWER_DRAWS
    model = case.fit(n_draws="auto")
    assert model.model_.n_draws == model.ask(case.X[:1]).question.n_draws == wanted
    model.save(tmp_path / "model.sgp")
    assert structgp.load(tmp_path / "model.sgp").model_.n_draws == wanted
    assert model.set_params(n_draws=6).ask(case.X[:1]).question.n_draws == 6


@pytest.mark.parametrize("name", ["skip", "order 2"])
def test_spans_of_long_examples_average_over_fewer_draws(
    fits: dict[str, StructuredGPClassifier], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One transition matrix per token and draw would need too much memory; label probabilities, which
    need less, still average over all draws."""
    model, X = fitted_of(fits, name).set_params(n_draws=128), CASES[name].X[:1]
    all_draws = model.predict_spans(X), model.predict_marginals(X)
    monkeypatch.setattr(answers_spans, "MOST_STEPS", 40 * len(X[0]) * len(model.classes_) ** 2)
    asked: list[int] = []
    walk = Declared.walk

    def counting(self: Declared, *given: Any) -> Any:
        asked.append(len(given[0]))
        return walk(self, *given)

    monkeypatch.setattr(Declared, "walk", counting)
    fewer = model.predict_spans(X), model.predict_marginals(X)
    assert asked
    assert set(asked) == {40}
    assert fewer[1] == all_draws[1]
    for a, b in zip(all_draws[0], fewer[0], strict=True):
        p, q = ({span[:3]: span[3] for span in found} for found in (a, b))
        assert all(q.get(span, 0.0) == pytest.approx(p[span], abs=0.1) for span in p)


@pytest.mark.parametrize("known", [False, True])
def test_fewer_draws_are_those_that_count_most(
    fits: dict[str, StructuredGPClassifier], known: bool
) -> None:
    model, x = fitted_of(fits, "skip").set_params(n_draws=64), CASES["skip"].X[0]
    labels = [CASES["skip"].y[0]] if known else None
    ((_, at),) = model.ask([x]).one_by_one(labels)
    few = at.fewer(8)
    assert few.n_draws == 8
    assert float(few.share.sum()) == pytest.approx(1)
    places = [[*(at.f == f).flatten(1).all(1).nonzero()[:, 0].tolist()] for f in few.f] if not known else []
    if known:
        wanted = at.share[:, 0].topk(8).values
        np.testing.assert_allclose(few.share[:, 0].sort(descending=True).values, wanted / wanted.sum())
    else:
        assert [a for (a,) in places[4:]] == [a + 32 for (a,) in places[:4]]  # mirror images
    assert at.fewer(64) is at


def test_the_walk_is_the_same_for_a_few_draws_at_a_time(
    fits: dict[str, StructuredGPClassifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = fitted_of(fits, "order 2").set_params(n_draws=8), CASES["order 2"].X[0]
    ((_, at),) = model.ask([x]).one_by_one()
    wanted = at.ask("walk"), model.span_probability(x, 0, 2, sense="bounds")
    monkeypatch.setattr("structgp.structures.declared.TRANSITIONS_AT_ONCE", 1)
    monkeypatch.setattr("structgp.structures.program.TRANSITIONS_AT_ONCE", 1)
    for a, b in zip(at.ask("walk"), wanted[0], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    assert model.span_probability(x, 0, 2, sense="bounds") == pytest.approx(wanted[1])


def test_candidates_of_the_n_best_come_from_some_of_the_draws(
    fits: dict[str, StructuredGPClassifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, X = fitted_of(fits, "skip").set_params(n_draws=64), CASES["skip"].X[:1]
    monkeypatch.setattr("structgp.answers.labellings.CANDIDATE_DRAWS", 4)
    asked, decode = [], Declared.decode

    def counting(self: Declared, *given: Any) -> Any:
        asked.append(len(given[0]))
        return decode(self, *given)

    monkeypatch.setattr(Declared, "decode", counting)
    (found,) = model.predict_n_best(X, 3)
    assert asked == [4]
    exact = model.sequence_log_probs(X * 3, [best.labels for best in found])
    np.testing.assert_allclose([best.probability for best in found], np.exp(exact))  # over all draws


def test_links_may_be_declared_before_the_chain() -> None:
    case = CASES["skip"]
    links = [same("word", where={"shape": "Xx"}), edges("e")]
    for link in links:
        assert link + chain() == chain() + link
        assert (link + chain()).is_linked_chain
        assert (link + chain(order=2)).templates == (chain(order=2) + link).templates
    assert case.spec.is_linked_chain


def test_sampled_answers_of_a_small_chain_with_links() -> None:
    """Every program gives node marginals, those without a sum over labellings too."""
    case = CASES["skip"]
    model = Case(case.spec.using("gibbs"), case.X[:4], case.y[:4]).fit(
        n_draws=2, prior=Prior(data_weight=1)
    )
    p = np.array([[*row.values()] for row in model.predict_marginals(case.X[:1])[0]])
    np.testing.assert_allclose(p.sum(1), 1)


@pytest.mark.parametrize("name", ["skip", "tree"])
def test_answers_of_very_long_examples_average_over_fewer_draws(
    fits: dict[str, StructuredGPClassifier], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    T, wanted = 40, 20
    model, x = fitted_of(fits, name).set_params(n_draws=100), CASES[name].X[0]
    tokens = [dict(token) for token in (x.nodes if isinstance(x, Graph) else x)] * T
    long = Graph(tokens[:T], parents=range(-1, T - 1)) if name == "tree" else tokens[:T]
    monkeypatch.setattr(encoded, "MOST_SCORES", wanted * T * len(model.classes_))
    with pytest.warns(StructgpWarning, match=f"an example of 40 tokens; .* over {wanted} draws, not 100"):
        model.predict_marginals([long])


def test_a_fit_of_a_declared_structure_says_that_it_starts_from_the_prior() -> None:
    case = CASES["skip"]
    model = case.fit(warm_start=True)
    with pytest.warns(
        StructgpWarning, match=r"fits of chain\(\) \+ same\('w'\) always start from the prior"
    ):
        model.fit(case.X, case.y)
