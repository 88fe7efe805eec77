"""Where there is much data: batch by batch by default, and what that must not change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.generate import generate

from structgp import Custom, StructuredGPClassifier, load
from structgp.inference import Minibatch, minibatch
from structgp.structures import Chain


@pytest.fixture
def few_are_many(monkeypatch):
    """So that few tokens are much data."""
    import structgp.plan.choices

    monkeypatch.setattr(minibatch, "MANY_TOKENS", 100)
    monkeypatch.setattr(structgp.plan.choices, "MANY_TOKENS", 100)
    monkeypatch.setattr(structgp.plan.choices, "BATCHWISE_TOKENS", 100)


@pytest.fixture(scope="module")
def made():
    return generate(40, n_labels=3, mean_length=6, n_templates=3, n_values=8, seed=1)


def test_much_data_is_fitted_batch_by_batch(made, few_are_many):
    model = StructuredGPClassifier().fit(made.X, made.y)
    log = model.training_log_
    assert (log["optimizer"], log["reason"]) == ("minibatch", "there is much data")
    assert model.score(made.X, made.y) > 0.6


def test_but_not_where_one_sequence_is_most_of_it(few_are_many):
    made = generate(60, n_labels=3, mean_length=6, n_templates=2, n_values=8, seed=2)
    X = [[token for x in made.X for token in x]]
    y = [[label for labels in made.y for label in labels]]
    model = StructuredGPClassifier().fit(X, y)
    assert model.training_log_["optimizer"] == "second-order"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_batch_of_all_is_no_worse_than_all_at_once(made, seed):
    """The kernel moves between visits, and a visit starts from what was found before that."""
    one = Minibatch(batch_tokens=10**6, steps=4)
    model = StructuredGPClassifier(inference=one, random_state=seed).fit(made.X, made.y)
    whole = StructuredGPClassifier(random_state=seed).fit(made.X, made.y)
    here, there = (m.training_log_["fresh_elbo"] for m in (model, whole))
    assert here == pytest.approx(there, rel=0.05)


def test_early_stopping_looks_at_the_end_of_a_pass(made, monkeypatch):
    from structgp.inference.loop import Watch

    looks = []

    def enough(self):
        looks.append(1)
        return False

    monkeypatch.setattr(Watch, "enough", enough)
    optimizer = Minibatch(batch_tokens=60, max_passes=3, tolerance=0.0)
    model = StructuredGPClassifier(inference=optimizer)
    with pytest.warns(match="stopped after"):
        model.fit(made.X, made.y, made.X[:5], made.y[:5], early_stopping=True)
    assert len(looks) == 3
    assert len(model.training_log_["steps"]) > 6


class InDouble(Chain):
    """Someone's own, which multiplies by numbers in double precision."""

    def log_prob(self, f, g, y, mask):
        return super().log_prob(f @ torch.eye(f.shape[-1], dtype=torch.float64), g, y, mask)


def test_other_structures_get_double_precision(made):
    optimizer = Minibatch(single=True, max_passes=2)
    model = StructuredGPClassifier(inference=optimizer, structure=Custom(InDouble(), predict_with="chain"))
    with pytest.warns(match="stopped after"):
        model.fit(made.X, made.y)
    assert np.isfinite(model.training_log_["fresh_elbo"])


def test_a_fit_goes_on_with_other_parameters_for_its_answers(made, tmp_path):
    class StopError(Exception):
        pass

    def stop(info):
        if info.iteration == 2:
            raise StopError

    from structgp.inference.checkpoint import Checkpoint

    path, seconds = tmp_path / "kept", Checkpoint.__dataclass_fields__["seconds"].default
    assert seconds > 0
    first = StructuredGPClassifier(inference=Minibatch(batch_tokens=60))
    original = Checkpoint.write
    try:
        Checkpoint.write = lambda self, *words: (setattr(self, "seconds", 0), original(self, *words))[1]
        with pytest.raises(StopError):
            first.fit(made.X, made.y, callback=stop, checkpoint=path)
    finally:
        Checkpoint.write = original
    assert path.exists()
    steps = []
    again = StructuredGPClassifier(inference=Minibatch(batch_tokens=60), n_draws=8, verbose=False)
    again.set_params(class_weight="balanced", n_draws=0)
    again.fit(made.X, made.y, callback=lambda info: steps.append(info.iteration), checkpoint=path)
    assert steps[0] > 0


def test_so_far_within_partial_fit(made):
    model = StructuredGPClassifier().partial_fit(made.X[:20], made.y[:20])
    seen = []
    model.partial_fit(
        made.X[20:], made.y[20:], callback=lambda _: seen.append(model.so_far().predict(made.X[:1]))
    )
    assert seen
    assert all(len(labels[0]) == len(made.X[0]) for labels in seen)


def test_a_file_does_not_ask_for_the_device_of_its_fit(made, tmp_path):
    model = StructuredGPClassifier().fit(made.X, made.y)
    model.set_params(device="cuda").save(tmp_path / "model")
    assert load(tmp_path / "model").device == "cpu"
