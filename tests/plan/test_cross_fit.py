"""Tables beyond a chain are learned from sequences that the chain has not seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from structgp import Prior, StructuredGPClassifier, chain, edges, grid, layers, load, metrics, same
from structgp.data.examples import read_examples
from structgp.inference.checkpoint import Checkpoint
from structgp.inference.distributed import ALONE
from structgp.plan.cross_fit import chain_within
from structgp.plan.options import Options
from structgp.plan.programs import graph_of
from structgp.plan.resolve import resolve
from structgp.structures.spec import LINKS

LINKED = chain() + same("word", where={"kind": "rare"})


def documents(n: int, seed: int, agree: float) -> tuple[list[Any], list[list[str]]]:
    """Sequences of 12 tokens. Four of them are two mentions each of two words that occur in no other
    sequence; both mentions have one label with probability ``agree``. A hint tells the label of a first
    mention in nine of ten cases, and says nothing of a second one."""
    rng, X, y = np.random.default_rng(seed), [], []
    for i in range(n):
        tokens = [{"word": f"w{rng.integers(5)}", "kind": "usual", "hint": "none"} for _ in range(12)]
        labels = ["O"] * 12
        for j, (first, second) in enumerate(rng.permutation(12)[:4].reshape(2, 2)):
            one = "AB"[rng.integers(2)]
            other = one if rng.random() < agree else "AB"[rng.integers(2)]
            told = one if rng.random() < 0.9 else "AB"[rng.integers(2)]
            for t, label, hint in ((first, one, told), (second, other, "some")):
                tokens[t] = {"word": f"name {seed} {i} {j}", "kind": "rare", "hint": hint}
                labels[t] = label
        X.append(tokens)
        y.append(labels)
    return X, y


def model(structure: Any = LINKED, **prior: Any) -> StructuredGPClassifier:
    return StructuredGPClassifier(structure=structure, prior=Prior(**prior), decode="accuracy")


def loss(fitted: StructuredGPClassifier, X: Any, y: Any) -> float:
    return float(metrics.token_nll(y, fitted.predict_marginals(X)))


@pytest.fixture(scope="module")
def linked() -> StructuredGPClassifier:
    return model().fit(*documents(45, 0, 0.95))


@pytest.fixture(scope="module")
def alone() -> StructuredGPClassifier:
    return model(chain()).fit(*documents(45, 0, 0.95))


def test_links_tell_what_single_tokens_leave_open(linked: Any, alone: Any) -> None:
    X, y = documents(60, 1, 0.95)
    assert loss(linked, X, y) < 0.85 * loss(alone, X, y)
    mean, _ = linked.model_.posterior["same word"].constant_scores()
    A, B = (linked.classes_.tolist().index(label) for label in "AB")
    assert float(mean[A, A] + mean[B, B] - 2 * mean[A, B]) > 2


@pytest.mark.held_out
def test_the_plan_and_the_log_tell_of_it() -> None:
    train, (X, y) = documents(45, 0, 0.95), documents(60, 1, 0.95)
    linked, alone = model().fit(*train), model(chain()).fit(*train)
    log, other = linked.training_log_, alone.training_log_
    assert log["plan"]["tables"]["value"] == "from left-out sequences"
    assert "tables" not in other["plan"]
    assert log["plan"]["data_weight"] == other["plan"]["data_weight"]
    assert log["held_out"]["token_nll"] < other["held_out"]["token_nll"]
    assert log["held_out"]["token_nll"] == pytest.approx(loss(linked, X, y), rel=0.5)
    assert log["held_out"]["n_tokens"] == sum(map(len, train[1]))


def test_the_rest_is_the_chain(linked: Any, alone: Any) -> None:
    chosen = [m.training_log_["plan"]["data_weight"]["value"] for m in (linked, alone)]
    assert chosen[0] == chosen[1]
    for name in ("node", "next"):
        one, other = (m.model_.posterior[name].state_dict() for m in (linked, alone))
        assert all(torch.equal(one[k], other[k]) for k in other)


@pytest.mark.parametrize("n_linked", [0, 1])
def test_parts_without_links(n_linked: int) -> None:
    """Where no sequence repeats a word, or one alone does."""
    words = [[f"{i}" if i < n_linked else f"{i}{j}" for j in range(4)] for i in range(6)]
    X = [[{"word": w, "kind": "rare", "hint": "ab"[j % 2]} for j, w in enumerate(each)] for each in words]
    found = model().fit(X, [["A", "B", "A", "B"]] * 6)
    assert found.training_log_["plan"]["tables"]["value"] == "from left-out sequences"
    assert found.predict(X[:1]) == [["A", "B", "A", "B"]]


def test_links_that_tell_nothing_cost_nothing() -> None:
    train, (X, y) = documents(45, 2, 0.0), documents(60, 3, 0.0)
    without = loss(model(chain(), data_weight=1).fit(*train), X, y)
    assert loss(model(data_weight=1).fit(*train), X, y) < 1.05 * without


def test_again_and_from_a_file(linked: Any, tmp_path: Any) -> None:
    again, (X, _) = model().fit(*documents(45, 0, 0.95)), documents(5, 1, 0.95)
    linked.save(tmp_path / "model")
    for other in (again, load(tmp_path / "model")):
        assert other.predict_marginals(X) == linked.predict_marginals(X)


class CutOffError(Exception):
    pass


def test_a_fit_that_was_cut_off_goes_on(linked: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Checkpoint.__init__, "__defaults__", (0.0,))  # written after every step
    train, path = documents(45, 0, 0.95), tmp_path / "checkpoint"

    def cut_off(info: Any) -> None:
        if info.iteration == 2:
            raise CutOffError

    with pytest.raises(CutOffError):
        model().fit(*train, callback=cut_off, checkpoint=path)
    assert path.exists()
    seen: list[int] = []
    again = model().fit(*train, callback=lambda info: seen.append(info.iteration), checkpoint=path)
    assert seen[0] == 2
    X, _ = documents(5, 1, 0.95)
    assert again.predict_marginals(X) == linked.predict_marginals(X)


def test_dev_data_missing_labels_and_weights(linked: Any) -> None:
    X, y = documents(45, 0, 0.95)
    dev = documents(10, 4, 0.95)
    some: list[Any] = [[None if t % 5 == 0 else label for t, label in enumerate(of)] for of in y]
    fitted = model().fit(X, some, *dev, early_stopping=True, sample_weight=[0.0] * 3 + [1.0] * 42)
    assert fitted.training_log_["dev"]["token_nll"] < 1.5 * loss(linked, *dev)
    assert len(fitted.predict_marginals([X[0]], known=some[:1])[0]) == 12


def plan_of(structure: Any, X: Any, y: Any, **options: Any) -> Any:
    parameters = Options(structure=structure, **options)
    examples = read_examples(X, y, spec=graph_of(parameters))
    return chain_within(resolve(parameters, examples), examples, ALONE)


def test_a_chain_is_found_within_links_alone() -> None:
    X, y = documents(6, 0, 0.95)
    assert plan_of(LINKED, X, y).spec == chain()
    assert plan_of(LINKED.using("reweighted"), X, y).spec == chain()
    others = [
        chain(),
        chain(order=2),
        chain(order=0) + same("word"),
        chain() + same("word", features="hint"),
    ]
    assert [plan_of(spec, X, y) for spec in others] == [None] * 4
    two = [{"one": labels, "two": labels} for labels in y]
    assert plan_of(layers(one=chain(), two=chain()), X, two) is None
    assert plan_of(grid(), [[x[:6], x[6:]] for x in X], [[of[:6], of[6:]] for of in y]) is None
    assert set(LINKS) == {t.rule for spec in (LINKED, edges("a")) for t in spec.templates[-1:]}


def test_few_sequences_and_other_fits_are_fitted_as_a_whole() -> None:
    X, y = documents(6, 0, 0.95)
    assert plan_of(LINKED, X[:4], y[:4]) is None
    assert plan_of(LINKED, X, y, inference="natural") is None
    assert plan_of(LINKED, X, y, posterior="inducing") is None


def test_the_threshold_of_spans_is_the_chains() -> None:
    X, y = documents(30, 0, 0.95)
    spans = [["O" if label == "O" else f"B-{label}" for label in labels] for labels in y]
    plans = [
        StructuredGPClassifier(structure=s).fit(X, spans).training_log_["plan"] for s in (LINKED, chain())
    ]
    assert plans[0]["tables"]["value"] == "from left-out sequences"
    assert plans[0]["threshold"] == plans[1]["threshold"]
