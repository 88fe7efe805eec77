"""What ``partial_fit`` remembers, and what it does where it does not."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.generate import Generated, generate

import structgp
from structgp import Prior, StructgpWarning, StructuredGPClassifier
from structgp.api import memory
from structgp.inference import Minibatch, Problem
from structgp.inference.minibatch import release
from structgp.plan import part_check
from structgp.plan.resolve import features_per_token
from structgp.plan.trials import Predictions


@pytest.fixture(scope="module")
def data() -> Generated:
    return generate(20, n_labels=3, n_values=6, n_templates=3, mean_length=4, strength=2.0, seed=1)


def classifier() -> StructuredGPClassifier:
    return StructuredGPClassifier(n_draws=4, prior=Prior(data_weight=1.0))


def marginals(model: StructuredGPClassifier, X: Any) -> np.ndarray:
    found = model.predict_marginals(X)
    return np.array([[token[label] for label in sorted(token)] for x in found for token in x])


def test_parts_are_one_fit(data: Generated) -> None:
    parts = classifier().fit(data.X[:8], data.y[:8])
    parts.partial_fit(data.X[8:14], data.y[8:14]).partial_fit(data.X[14:], data.y[14:])
    whole = classifier().fit(data.X, data.y)
    # Features are numbered as they came: sums have another order, and draws another noise.
    np.testing.assert_allclose(marginals(parts, data.X), marginals(whole, data.X), atol=0.15)
    a, b = (model.training_log_ for model in (parts, whole))
    assert a["optimizer"] == b["optimizer"] == "second-order"
    assert parts.model_.info["n_sequences"] == 20
    assert a["elbo"] == pytest.approx(b["elbo"], abs=1)


def test_weights_and_new_labels_are_remembered(data: Generated) -> None:
    model = classifier().fit(data.X[:8], data.y[:8])
    X, y = data.X[8:10], [["A new one"] * len(data.y[8]), data.y[9]]
    model.partial_fit(X, y, sample_weight=[2, 0])
    assert model.classes_.tolist() == ["L0", "L1", "L2", "A new one"]
    kept = model.memory_
    assert kept is not None
    assert kept.weights is not None
    assert kept.weights.tolist() == [1.0] * 8 + [2.0]  # what has no weight is not kept
    assert [*data.X[:8], data.X[8]] == kept.X


@pytest.mark.parametrize("few", [0, 3_000])
def test_when_it_is_chosen_how_often_the_data_count(
    few: int, data: Generated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every part while there is little data, later when it has grown."""
    monkeypatch.setattr(memory, "FEW_TOKENS", few)
    model, seen = StructuredGPClassifier(n_draws=4).fit(data.X[:10], data.y[:10]), []
    choose = structgp.plan.held_out.choose

    def noted(options: Any, plan: Any, examples: Any, *more: Any) -> Any:
        seen.append(examples.n_sequences)
        return choose(options, plan, examples, *more)

    monkeypatch.setattr(structgp.plan.held_out, "choose", noted)
    for n in (10, 12, 14, 16, 18):
        model.partial_fit(data.X[n : n + 2], data.y[n : n + 2])
    lengths = np.cumsum([len(x) for x in data.X]).tolist()
    weighed, expected = lengths[9], []
    for n in (12, 14, 16, 18, 20):
        if few or lengths[n - 1] > memory.GROWTH * weighed:
            weighed, expected = lengths[n - 1], [*expected, n]
    assert seen == expected
    assert few or 0 < len(expected) < 5
    assert model.memory_ is not None
    assert model.memory_.weighed == weighed


def test_parts_end_with_the_settings_of_one_fit(data: Generated) -> None:
    """With all labels in the first part, features and draws are those of one fit too."""
    parts = StructuredGPClassifier(n_draws=4).fit(data.X[:10], data.y[:10])
    for n in (10, 15):
        parts.partial_fit(data.X[n : n + 5], data.y[n : n + 5])
    whole = StructuredGPClassifier(n_draws=4).fit(data.X, data.y)
    a, b = (model.training_log_["plan"] for model in (parts, whole))
    assert a["data_weight"] == b["data_weight"]
    np.testing.assert_allclose(marginals(parts, data.X), marginals(whole, data.X), atol=0.01)


def test_a_file_forgets_and_a_pickle_does_not(data: Generated, tmp_path: Path) -> None:
    model = classifier().fit(data.X[:8], data.y[:8])
    model.save(tmp_path / "m.sgp")
    assert not hasattr(structgp.load(tmp_path / "m.sgp"), "memory_")
    again = pickle.loads(pickle.dumps(model)).partial_fit(data.X[8:], data.y[8:])
    assert again.training_log_["optimizer"] == "second-order"
    loaded = structgp.load(tmp_path / "m.sgp").partial_fit(data.X[8:12], data.y[8:12])
    assert loaded.training_log_["optimizer"] == "minibatch"
    assert loaded.memory_ is None
    assert loaded.model_.info["n_sequences"] == 12


def test_too_much_is_not_remembered(data: Generated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_TOKENS", sum(map(len, data.X[:10])))
    model = classifier().fit(data.X[:8], data.y[:8])
    assert model.memory_ is not None
    model.partial_fit(data.X[8:14], data.y[8:14])
    assert model.training_log_["optimizer"] == "minibatch"
    assert model.memory_ is None


def test_a_part_that_does_harm_is_warned_of(data: Generated, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = (Predictions(*np.full((4, 10), loss)) for loss in (1.0, 2.0))
    bad = Predictions(good.tokens, bad.nll, good.confidence, good.right)
    model = classifier().fit(data.X[:8], data.y[:8])
    monkeypatch.setattr(part_check, "what_a_part_does", lambda *_: (good, bad))
    with pytest.warns(StructgpWarning, match=r"other worse \(NLL 1.00 before, 2.00 after\)") as caught:
        model.partial_fit(data.X[8:10], data.y[8:10], remember=False)
    assert caught[0].filename == __file__
    monkeypatch.setattr(part_check, "what_a_part_does", lambda *_: (bad, good))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.partial_fit(data.X[10:12], data.y[10:12], remember=False)


def test_halves_of_a_part_predict_each_other(data: Generated) -> None:
    model = classifier().fit(data.X[:8], data.y[:8])
    before = model.model_
    examples = structgp.data.examples.read_examples(
        data.X[8:], data.y[8:], encoder=before.encoder, classes=before.labels.classes
    )
    options = model._options()
    plan = structgp.plan.resolve.going_on(options, examples, before.posterior)
    found = part_check.what_a_part_does(options, plan, before, examples)
    assert found is not None
    was, now = found
    assert was.tokens.sum() == now.tokens.sum() == sum(map(len, data.X[8:]))
    asked = before.ask([data.X[i] for i in range(8, 20)])
    both = zip(asked.marginals(), examples.y, strict=True)
    losses = [-np.log(p[np.arange(len(y)), y]).sum() for p, y in both]
    assert was.nll.sum() == pytest.approx(sum(losses), rel=0.1)
    few = examples.part(range(5))
    assert part_check.what_a_part_does(options, plan, before, few) is None


def test_what_was_known_is_held_at_its_mean_and_released(data: Generated) -> None:
    model = classifier().fit(data.X[:8], data.y[:8]).model_
    rows, y = model.encoder.transform(data.X[8:10]), model.labels.transform(data.y[8:10])
    batches = structgp.inference.loop.make_batches(rows, y, model.encoder.pad_row, 500)
    q = model.posterior
    before = {name: value.clone() for name, value in q.snapshot().items()}
    problem = Problem(q, structgp.structures.Chain(), batches)
    state = Minibatch(goes_on=True, hold=5.0).start(problem, torch.Generator().manual_seed(0))
    for name, value in q.snapshot().items():
        if name.endswith(".m"):
            torch.testing.assert_close(value, before[name])
        elif name.endswith(".factor"):
            assert bool((value <= before[name] + 1e-12).all())
            assert bool((value < 0.9 * before[name]).any())
    release(q, state)  # nothing has been learned: all is as it was
    for name, value in q.snapshot().items():
        torch.testing.assert_close(value, before[name])


def test_features_per_token(data: Generated) -> None:
    read = structgp.data.examples.read_examples
    assert features_per_token(read(data.X, data.y)) == 3
    bags = [[{f"{p}={v}" for p, v in enumerate(t)} for t in x] for x in data.X]
    assert features_per_token(read(bags, data.y)) == 3
    uneven = [[{"a"}, {"a", "b", "c"}]]
    assert features_per_token(read(uneven, [["X", "Y"]])) == 2
