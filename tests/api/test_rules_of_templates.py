"""Rules on templates, from fit to answers: the probabilities are those of all labellings that obey them."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import structgp
from structgp import (
    Graph,
    InputError,
    Prior,
    StructuredGPClassifier,
    chain,
    edges,
    grid,
    layers,
    same,
    tree,
)
from structgp.structures import segments

ONCE = Prior(data_weight=1)
RNG = np.random.default_rng(0)
WORDS = ["ant", "bee", "cat", "any"]


def tokens(n: int) -> list[dict[str, str]]:
    return [{"word": WORDS[RNG.integers(4)]} for _ in range(n)]


def labels_of(nodes: Any) -> list[str]:
    return [{"ant": "a", "bee": "b", "cat": "c"}.get(t["word"], "abc"[RNG.integers(3)]) for t in nodes]


CASES: dict[str, tuple[Any, Any, str, tuple[str, ...]]] = {
    "tree": (tree(), lambda x: Graph(x, parents=[-1, 0, 0, 1][: len(x)]), "parent", ("a", "b")),
    "edges": (
        edges("team", labels=3, symmetric=True), lambda x: Graph(x, {"team": [[0, 1, 2]]}), "team",
        ("a", "b", "c"),
    ),
    "skip": (chain() + same("word"), lambda x: x, "word", ("b", "c")),
    "second": (chain(order=2), lambda x: x, "next 2", ("a", "a", "a")),
    "grid": (grid(), lambda x: [x[:2], x[2:4]], "right", ("a", "b")),
}  # fmt: skip
"""Structure, what makes an example of tokens, and a tuple that is forbidden in a template."""


def pairs_of(case: str, x: list[dict[str, str]]) -> list[tuple[int, ...]]:
    """The tuples of the template with a rule, found by hand."""
    if case == "tree":
        return [(p, c) for c, p in enumerate([-1, 0, 0, 1][: len(x)]) if p >= 0]
    if case == "skip":
        found = []
        for t, token in enumerate(x):
            before = [s for s in range(t) if x[s] == token]
            found += [(before[-1], t)] if before else []
        return found
    return {"edges": [(0, 1, 2)], "second": [(0, 1, 2), (1, 2, 3)], "grid": [(0, 1), (2, 3)]}[case]


def broken(case: str, x: Any, y: Any) -> bool:
    banned = CASES[case][3]
    orders = set(permutations(banned)) if case in ("skip", "edges") else {banned}
    return any(tuple(y[i] for i in pair) in orders for pair in pairs_of(case, x))


@pytest.fixture(scope="module", params=CASES)
def fitted(request: pytest.FixtureRequest) -> Any:
    """The name of a case, a model with its rule, and examples as tokens."""
    case = request.param
    spec, make, template, banned = CASES[case]
    given = [tokens(4) for _ in range(40)]
    pairs = [(x, y) for x, y in ((x, labels_of(x)) for x in given) if not broken(case, x, y)]
    X, y = [make(x) for x, _ in pairs], [[v[:2], v[2:]] if case == "grid" else v for _, v in pairs]
    rules = {"forbidden": {template: [banned]}}
    model = StructuredGPClassifier(structure=spec, prior=ONCE, constraints=rules, n_draws=0).fit(X, y)
    return case, model, [tokens(4) for _ in range(6)]


def flat(case: str, values: Any) -> list[Any]:
    return [v for row in values for v in row] if case == "grid" else list(values)


def test_probabilities_are_those_of_the_labellings_that_obey(fitted: Any) -> None:
    """Against the probabilities of all labellings under the same scores without the rule."""
    case, model, asked = fitted
    make, free = CASES[case][1], copy.copy(model)
    free.model_ = replace(model.model_, constraints=None)
    for x in asked[:2]:
        every = [list(y) for y in product("abc", repeat=4)]
        shaped = [[y[:2], y[2:]] if case == "grid" else y for y in every]
        joint = np.exp(free.sequence_log_probs([make(x)] * len(every), shaped))
        joint *= [not broken(case, x, y) for y in every]
        joint /= joint.sum()
        found = flat(case, model.predict_marginals([make(x)])[0])
        for t, label in product(range(4), "abc"):
            expected = sum(p for y, p in zip(every, joint, strict=True) if y[t] == label)
            assert found[t][label] == pytest.approx(expected, abs=1e-8)
        log_probs = np.array(model.sequence_log_probs([make(x)] * len(every), shaped))
        np.testing.assert_allclose(np.exp(log_probs), joint, atol=1e-8)
        (best,) = model.predict_n_best([make(x)], 2)
        np.testing.assert_allclose([b.probability for b in best], np.sort(joint)[-2:][::-1], atol=1e-8)


@pytest.mark.parametrize("decode", ["accuracy", "sequence", "cost"])
def test_no_prediction_breaks_a_rule(fitted: Any, decode: str) -> None:
    case, model, asked = fitted
    costs = {"a": {"b": 9}} if decode == "cost" else None
    model.set_params(decode=decode, costs=costs)
    X = [CASES[case][1](x) for x in asked]
    labels = [flat(case, y) for y in model.predict(X)]
    assert not any(broken(case, x, y) for x, y in zip(asked, labels, strict=True))
    drawn = [flat(case, y) for some in model.sample_labellings(X, 5) for y in some]
    assert not any(broken(case, asked[i // 5], y) for i, y in enumerate(drawn))
    model.set_params(decode="auto", costs=None)


def test_known_labels_that_leave_no_labelling(fitted: Any) -> None:
    case, model, asked = fitted
    x = next((x for x in asked if pairs_of(case, x)), None) or [{"word": "ant"}] * 4
    known: list[Any] = [None] * 4
    for i, label in zip(pairs_of(case, x)[0], CASES[case][3], strict=True):
        known[i] = label
    given = [[known[:2], known[2:]] if case == "grid" else known]
    X = [CASES[case][1](x)]
    for ask in (model.predict, model.predict_marginals, lambda X, known: model.predict_n_best(X, 1, known)):
        with pytest.raises(
            InputError, match="sequence 0: no labelling of its 4 tokens agrees with the const"
        ):
            ask(X, given)


def test_a_file_keeps_the_rules(fitted: Any, tmp_path: Path) -> None:
    case, model, asked = fitted
    model.save(tmp_path / "model")
    again = structgp.load(tmp_path / "model")
    X = [CASES[case][1](x) for x in asked]
    assert again.model_.constraints.to_json() == model.model_.constraints.to_json()
    assert again.predict_marginals(X) == model.predict_marginals(X)
    assert "1 forbidden tuples of" in model.training_log_["plan"]["constraints"]["value"]


def test_rules_that_leave_no_labelling_at_all() -> None:
    X = [Graph([{"w": "p"}], parents=[-1]), Graph([{"w": "q"}], parents=[-1])] * 4
    every = [(a, b) for a in "ab" for b in "ab"]
    rules = {"forbidden": {"parent": every}}
    model = StructuredGPClassifier(structure=tree(), prior=ONCE, constraints=rules, n_draws=4)
    model.fit(X, [["a"], ["b"]] * 4)
    two = Graph([{"w": "p"}, {"w": "q"}], parents=[-1, 0])
    with pytest.raises(
        InputError, match="sequence 1: no labelling of its 2 tokens agrees with the constraints"
    ):
        model.predict([X[0], two])


def test_missing_labels_that_leave_no_labelling() -> None:
    X = [Graph([{"w": w} for w in "pqp"], parents=[-1, 0, 1]) for _ in range(4)]
    rules = {"forbidden": {"parent": [("a", "a"), ("b", "b")]}}
    y: list[Any] = [["a", "b", "a"], ["b", None, "b"], ["a", None, "b"], ["a", "b", "a"]]
    model = StructuredGPClassifier(structure=tree(), prior=ONCE, constraints=rules, n_draws=4)
    with pytest.raises(InputError, match=r"y\[2\]: no labelling that agrees with its labels obeys"):
        model.fit(X, y)
    y[2] = ["a", None, "a"]
    assert model.fit(X, y).predict(X[:1])[0] in (["a", "b", "a"], ["b", "a", "b"])


def test_layers_have_rules_of_their_own() -> None:
    X = [tokens(4) for _ in range(20)]
    y = []
    for x in X:
        pos = labels_of(x)
        y.append({"pos": pos, "chunk": ["I" if p == "a" else "O" for p in pos]})
    rules = {"forbidden": {"pos chunk": [("a", "O"), ("b", "I"), ("c", "I")]}}
    spec = layers(pos=chain(), chunk=chain())
    model = StructuredGPClassifier(structure=spec, prior=ONCE, constraints=rules, n_draws=8).fit(X, y)
    for found in model.predict([tokens(4) for _ in range(8)]):
        assert found["chunk"] == ["I" if p == "a" else "O" for p in found["pos"]]
    known = {"pos": ["a", None, None, None], "chunk": ["O", None, None, None]}
    with pytest.raises(InputError, match="no labelling of its 4 tokens"):
        model.predict_marginals(X[:1], [known])


def spans(x: Any) -> list[str]:
    found = ["O"] * len(x)
    for t, token in enumerate(x):
        if token["word"] == "ant":
            found[t] = "I-X" if t and x[t - 1]["word"] == "ant" else "B-X"
    return found


def test_a_scheme_is_adopted_beside_links() -> None:
    X = [tokens(5) for _ in range(20)]
    y = [spans(x) for x in X]
    model = StructuredGPClassifier(structure=chain() + same("word"), prior=ONCE, n_draws=8).fit(X, y)
    assert model.training_log_["plan"]["constraints"]["value"] == "BIO"
    assert model.sequence_log_probs([X[0]], [["O", "I-X", "O", "O", "O"]]) == [-np.inf]


def test_labels_chosen_for_f1_obey_rules_on_links() -> None:
    x = [{"word": "ant"}, {"word": "bee"}, {"word": "ant"}]
    X = [x, [{"word": "ant"}, {"word": "bee"}], [{"word": "bee"}, {"word": "ant"}]] * 5
    y = [["B-X", "O", "B-X"], ["B-X", "O"], ["O", "O"]] * 5
    rules = {"scheme": "BIO", "forbidden": {"word": [("B-X", "O")]}}
    y[1] = ["B-X", "I-X"]
    model = StructuredGPClassifier(
        structure=chain() + same("word"), prior=ONCE, constraints=rules, n_draws=8
    )
    model.fit(X, y).set_params(decode="f1")
    (found,) = model.predict([x], [[None, None, None]])
    assert (found[0] == "B-X") == (found[2] == "B-X")


def test_segments_know_rules_of_next() -> None:
    X = [tokens(4) for _ in range(20)]
    y = [["c" if v == "b" else v for v in labels_of(x)] for x in X]
    y[0] = ["b", "b", "c", "a"]
    rules = {"forbidden": {"next": [("a", "b")]}}
    model = StructuredGPClassifier(structure=segments(3), prior=ONCE, constraints=rules, n_draws=4).fit(
        X, y
    )
    (p,) = model.predict_transition_marginals([[{"word": "ant"}, {"word": "bee"}]])
    assert p[0, 0, 1] == 0


def test_the_tree_reweighted_program_obeys() -> None:
    X = [[tokens(2) for _ in range(2)] for _ in range(4)]
    y = [[["c" if v == "b" else v for v in labels_of(row)] for row in x] for x in X]
    y[0][0] = ["b", "b"]
    rules = {"forbidden": {"right": [("a", "b")]}}
    spec = grid().using("reweighted")
    model = StructuredGPClassifier(structure=spec, prior=ONCE, constraints=rules, n_draws=4).fit(X, y)
    asked = [[[{"word": "ant"}, {"word": "bee"}] for _ in range(2)]]
    assert ("a", "b") not in [pair for row in model.predict(asked)[0] for pair in pairwise(row)]
    known = [[["a", "b"], [None] * 2]]
    with pytest.raises(InputError, match="no labelling of its 4 tokens"):
        model.predict_marginals(asked, known)
