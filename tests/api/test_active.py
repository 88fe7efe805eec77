"""Which sequences to label next."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from benchmarks.generate import generate

from structgp import InputError, StructuredGPClassifier, select
from structgp.api import active


@pytest.fixture(scope="module")
def data():
    return generate(60, n_labels=3, n_values=8, n_templates=2, mean_length=5, seed=1)


@pytest.fixture(scope="module")
def model(data):
    return StructuredGPClassifier(n_draws=32).fit(data.X[:12], data.y[:12])


@pytest.fixture(scope="module")
def pool(data):
    return data.X[12:]


ALL = [*active.STRATEGIES, "batch", "random"]


@pytest.mark.parametrize("strategy", ALL)
def test_n_different_places_of_the_pool(model, pool, strategy):
    chosen = select(model, pool, 7, strategy)
    assert len(set(chosen)) == len(chosen) == 7
    assert all(isinstance(i, int) and 0 <= i < len(pool) for i in chosen)
    assert select(model, pool, 7, strategy) == chosen
    assert sorted(select(model, pool, 1000, strategy)) == list(range(len(pool)))


def by_hand(model, x) -> dict[str, float]:
    """The scores of one sequence from the estimator's own answers."""
    best = [y.probability for y in model.predict_n_best([x], 10)[0]]
    share = np.array(best) / sum(best)
    each = torch.stack([p for _, p in model.ask([x]).draw_marginals()])[0].numpy()  # (S, T, V)
    total = -(each.mean(0) * np.log(each.mean(0))).sum()
    data = -(each * np.log(each)).sum((1, 2)).mean()
    return {
        "least-confidence": 1 - best[0],
        "margin": 1 - best[0] + best[1],
        "n-best-entropy": -float((share * np.log(share)).sum()),
        "token-entropy": float(total),
        "bald": float(total - data),
    }


@pytest.mark.parametrize("strategy", list(active.STRATEGIES))
def test_the_order_is_that_of_the_scores(model, pool, strategy):
    some = pool[:10]
    scores = [by_hand(model, x)[strategy] for x in some]
    expected = sorted(range(10), key=lambda i: -scores[i])
    assert select(model, some, 10, strategy) == expected
    lengths = [len(x) for x in some]
    expected = sorted(range(10), key=lambda i: -scores[i] / lengths[i])
    assert select(model, some, 10, strategy, cost="token") == expected


def test_a_batch_has_no_duplicates(model, pool):
    twice = [x for x in pool[:20] for _ in range(2)]
    alone = {i // 2 for i in select(model, twice, 10, "bald")}
    batch = {i // 2 for i in select(model, twice, 10, "batch")}
    assert len(alone) < 8
    assert len(batch) == 10


def test_a_batch_begins_with_the_most_informative(model, pool):
    assert select(model, pool, 1, "batch") == select(model, pool, 1, "bald")


def test_the_greedy_choice_by_hand():
    questions = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [math.sqrt(0.5), math.sqrt(0.5)]])
    gain = torch.tensor([3.0, 2.9, 1.0, 2.0], dtype=torch.float64)
    # 1 asks what 0 asks; 3 asks half of it. The median likeness of two is sqrt(0.5).
    usual = float((questions @ questions.T).median())
    alike = (math.sqrt(0.5) - usual) / (1 - usual)
    assert alike == pytest.approx(0, abs=1e-6)
    assert active._greedy(gain, questions, 4) == [0, 3, 2, 1]


def test_empty_sequences_are_never_chosen(model, pool):
    with_empty = [pool[0], [], pool[1], []]
    for strategy in ALL:
        assert sorted(select(model, with_empty, 4, strategy)) == [0, 2]
    assert select(model, [[]], 3, "batch") == []


def test_generators_are_read(model, pool):
    assert select(model, (iter(x) for x in pool[:5]), 2, "bald") == select(model, pool[:5], 2, "bald")


def test_random_choice_follows_its_seed(model, pool):
    runs = [select(model, pool, 5, "random", random_state=s) for s in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("arguments", "place"),
    [({"n": 0}, "n"), ({"n": 1.5}, "n"), ({"strategy": "guess"}, "strategy"), ({"cost": "gold"}, "cost")],
)
def test_mistakes_are_named(model, pool, arguments, place):
    with pytest.raises(InputError) as caught:
        select(model, pool, **({"n": 2} | arguments))
    assert caught.value.place == place


@pytest.mark.parametrize("n_draws", [7, 8, 32])
def test_sequences_are_compared_by_some_of_the_draws(
    model, pool, monkeypatch: pytest.MonkeyPatch, n_draws: int
) -> None:
    """Draws come in pairs, so that an odd number is one less than there are."""
    other = StructuredGPClassifier(n_draws=n_draws)
    other.model_, other.classes_ = model.model_, model.classes_
    monkeypatch.setattr(active, "SIMILARITY_DRAWS", 4)
    asked: list[int] = []
    question = active._question

    def counting(p: torch.Tensor) -> torch.Tensor:
        asked.append(len(p))
        return question(p)

    monkeypatch.setattr(active, "_question", counting)
    assert len(select(other, pool, 3)) == 3
    assert len(asked) == len(pool)
    assert set(asked) == {4}
