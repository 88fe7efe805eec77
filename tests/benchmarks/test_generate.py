from __future__ import annotations

import tracemalloc
from collections import Counter, defaultdict
from itertools import islice, pairwise, product

import numpy as np
import pytest
from benchmarks.generate import generate, generate_stream, true_chain

from structgp.errors import InputError

TINY = {"n_labels": 3, "mean_length": 2, "n_templates": 2, "n_values": 2, "strength": 1.5}


def joint(chain, x):
    """Every labelling of x -> its probability, by enumeration from the chain's parameters."""
    V = len(chain.labels)
    weight = {}
    for path in product(range(V), repeat=len(x)):
        score = sum(
            chain.emission[p, chain.values.index(value), v]
            for token, v in zip(x, path, strict=True)
            for p, value in enumerate(token)
        )
        score += sum(chain.transition[a, b] for a, b in pairwise(path))
        weight[tuple(chain.labels[v] for v in path)] = np.exp(score)
    total = sum(weight.values())
    return {y: w / total for y, w in weight.items()}


def test_shapes_and_names():
    data = generate(50, n_labels=4, n_templates=3, n_values=7, seed=0)
    assert len(data.X) == len(data.y) == 50
    assert {len(token) for x in data.X for token in x} == {3}
    assert {value for x in data.X for token in x for value in token} <= set(data.chain.values)
    assert {label for y in data.y for label in y} <= {"L0", "L1", "L2", "L3"}
    assert [len(x) for x in data.X] == [len(y) for y in data.y]
    assert min(map(len, data.y)) >= 1
    assert all(type(label) is str for y in data.y for label in y)


def test_seed_decides():
    one, same, other = (generate(30, seed=s) for s in (1, 1, 2))
    assert (one.X, one.y) == (same.X, same.y)
    assert np.array_equal(one.chain.emission, same.chain.emission)
    assert one.X != other.X
    assert not np.array_equal(one.chain.emission, other.chain.emission)


@pytest.mark.parametrize("n", [0, 1, 5999, 6000, 6001, 12345])
def test_stream_gives_the_same_as_generate(n):
    data = generate(n, **TINY, seed=3)
    assert list(generate_stream(n, **TINY, seed=3)) == list(zip(data.X, data.y, strict=True))
    assert len(data.X) == n


def test_longer_run_starts_with_the_shorter_one():
    longer = list(generate_stream(8000, **TINY, seed=3))
    for n in (10, 6500):
        assert longer[:n] == list(generate_stream(n, **TINY, seed=3))
    assert list(islice(generate_stream(10**9, **TINY, seed=3), 10)) == longer[:10]


def test_memory_of_the_stream_is_flat():
    def peak(n):
        tracemalloc.start()
        for _ in generate_stream(n, **TINY, seed=0):
            pass
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    assert peak(30_000) < 1.5 * peak(8000)


def test_labels_follow_the_chain():
    data = generate(40_000, **TINY, seed=5)
    drawn = defaultdict(Counter)
    for x, y in zip(data.X, data.y, strict=True):
        if len(x) <= 3:
            drawn[tuple(x)][tuple(y)] += 1
    compared = 0
    for x, counts in drawn.items():
        n = counts.total()
        if n < 300:
            continue
        for y, p in joint(data.chain, x).items():
            if n * p * (1 - p) > 10:
                assert abs(counts[y] / n - p) < 4 * np.sqrt(p * (1 - p) / n)
                compared += 1
    assert compared > 100
    assert {len(x) for x in drawn} == {1, 2, 3}


def test_values_and_lengths_follow_their_distributions():
    data = generate(20_000, n_labels=2, mean_length=3, n_templates=1, n_values=4, seed=0)
    values = Counter(token[0] for x in data.X for token in x)
    n = values.total()
    for k in range(4):
        p = 1 / (k + 1) / (1 + 1 / 2 + 1 / 3 + 1 / 4)
        assert abs(values[f"v{k}"] / n - p) < 4 * np.sqrt(p * (1 - p) / n)
    # A length is 1 + Poisson(2), of variance 2.
    assert abs(n / 20_000 - 3) < 4 * np.sqrt(2 / 20_000)


def test_marginals_and_log_prob_against_enumeration():
    data = generate(40, **TINY, seed=1)
    for x, y in zip(data.X, data.y, strict=True):
        if len(x) > 4:
            continue
        exact = joint(data.chain, x)
        marginals = np.zeros((len(x), 3))
        for path, p in exact.items():
            for t, label in enumerate(path):
                marginals[t, data.chain.labels.index(label)] += p
        np.testing.assert_allclose(data.chain.true_marginals(x), marginals, rtol=1e-10)
        assert data.chain.log_prob(x, y) == pytest.approx(np.log(exact[tuple(y)]))


def test_long_sequences_do_not_underflow():
    data = generate(2, mean_length=5000, strength=20.0, seed=0)
    for x, y in zip(data.X, data.y, strict=True):
        marginals = data.chain.true_marginals(x)
        assert np.isfinite(marginals).all()
        np.testing.assert_allclose(marginals.sum(axis=1), 1.0)
        path = [data.chain.labels.index(label) for label in y]
        assert marginals[np.arange(len(y)), path].min() > 0
        assert np.isfinite(data.chain.log_prob(x, y))


def test_strength_zero_is_noise_and_one_of_each_works():
    chain = true_chain(strength=0.0, seed=0)
    np.testing.assert_allclose(chain.true_marginals([("v0",) * 6] * 3), 0.2)
    data = generate(5, n_labels=1, mean_length=1, n_templates=1, n_values=1, seed=0)
    assert data.X == [[("v0",)]] * 5
    assert data.y == [["L0"]] * 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_labels": 0},
        {"n_values": 0},
        {"n_templates": 0},
        {"mean_length": 0.5},
        {"strength": -1.0},
        {"strength": float("nan")},
        {"seed": -1},
        {"n_sequences": -1},
    ],
)
def test_wrong_arguments_are_named_at_the_call(wrong):
    arguments = {"n_sequences": 3, "seed": 0, **wrong}
    with pytest.raises(InputError, match=next(iter(wrong))):
        generate_stream(**arguments)


def test_foreign_sequences_are_refused():
    chain = true_chain(n_templates=2, seed=0)
    with pytest.raises(InputError, match="'w0'"):
        chain.true_marginals([("v0", "w0")])
    with pytest.raises(InputError, match="2 values"):
        chain.true_marginals([("v0",)])
    with pytest.raises(InputError, match="y: must be 1 labels"):
        chain.log_prob([("v0", "v0")], ["L0", "L1"])


def test_with_a_sweep_every_value_has_its_turn() -> None:
    options = {"n_labels": 3, "n_templates": 2, "n_values": 900, "mean_length": 6, "seed": 1}
    found = list(generate_stream(700, sweep=4, **options))
    tokens = [token for x, _ in found for token in x][: 4 * 900]
    for p in range(2):
        assert len({token[p] for token in tokens}) == 900
        assert [token[p] for token in tokens[::4]] == [f"v{k}" for k in range(900)]
    assert list(generate_stream(30, sweep=4, **options)) == found[:30]
    assert len({token[0] for x, _ in generate_stream(700, **options) for token in x}) < 900
    with pytest.raises(InputError, match="sweep: must not be negative, got -1"):
        generate_stream(3, sweep=-1, **options)
