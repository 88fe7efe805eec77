"""A function that answers from its values: exact where all labellings are enumerated, within its Monte
Carlo error where they are sampled."""

from __future__ import annotations

import pickle
import warnings
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from structgp.errors import LikelihoodError, StructgpWarning
from structgp.structures import BlackBox, ByValues, Chain
from structgp.structures.opaque import by_values, importance

V = 3


def chain_in_numpy(f: Any, g: Any, y: Any) -> Any:
    """The linear chain of one sequence, which knows nothing of -inf."""
    message, score = f[:, 0], f[:, 0, y[0]]
    for t in range(1, len(y)):
        score = score + f[:, t, y[t]] + g[:, y[t - 1], y[t]]
        message = np.log(np.exp(message[:, :, None] + g).sum(1)) + f[:, t]
    found = score - np.log(np.exp(message).sum(-1))
    assert np.isfinite(found).all()
    return found


def smoothed_memm(f: Any, g: Any, y: Any) -> Any:
    """Every label given the one before; local probabilities are mixed with a uniform one."""
    found = 0
    for t in range(len(y)):
        row = np.exp(f[:, t] + (g[:, y[t - 1]] if t else 0))
        found = found + np.log(0.9 * row[:, y[t]] / row.sum(-1) + 0.1 / row.shape[-1])
    return found


def counted(f: Any, g: Any, y: Any) -> Any:
    """Label 0 once, if possible. Does not sum to 1."""
    score = f[:, np.arange(len(y)), y].sum(1) + g[:, y[:-1], y[1:]].sum(1)
    return score - 2.0 * abs((y == 0).sum() - 1)


def scores(lengths: tuple[int, ...], S: int = 4, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    f = torch.randn(S, len(lengths), max(lengths), V, generator=generator, dtype=torch.float64)
    g = torch.randn(S, V, V, generator=generator, dtype=torch.float64)
    return f, g, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def quiet(function: Any) -> ByValues:
    found = ByValues(BlackBox(function))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StructgpWarning)
        found.probe(V)
    return found


# -- enumeration --------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_the_chain_enumerated_is_the_chain(seed: int) -> None:
    f, g, mask = scores((4, 1, 3, 0), seed=seed)
    own, chain = quiet(chain_in_numpy), Chain()
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(-1, V, mask.shape, generator=generator)
    for missing in (y, y.abs()):
        torch.testing.assert_close(
            own.log_prob(f, g, missing, mask), chain.log_prob(f, g, missing, mask), rtol=0, atol=1e-8
        )
    for method in ("marginals", "decode", "entropy"):
        torch.testing.assert_close(
            getattr(own, method)(f, g, mask), getattr(chain, method)(f, g, mask), rtol=0, atol=1e-8
        )
    for n in (1, 5, 90):
        (labels, values), (wanted, expected) = (one.n_best(f, g, mask, n) for one in (own, chain))
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-8)
        assert torch.equal(labels[expected > -torch.inf], wanted[expected > -torch.inf])


@pytest.mark.parametrize("function", [smoothed_memm, counted])
def test_what_is_known_conditions_the_function_itself(function: Any) -> None:
    """Given labels, as by enumeration of the function, whatever it would make of scores of -inf."""
    f, g, mask = scores((4,))
    known, own = torch.tensor([[-1, 2, -1, 0]]), quiet(function)
    labels = torch.tensor([y for y in product(range(V), repeat=4) if y[1] == 2 and y[3] == 0])
    values = torch.from_numpy(
        np.stack([function(f[:, 0].numpy(), g.numpy(), y.numpy()) for y in labels], 1)
    )
    p = values.softmax(1)
    wanted = torch.stack([(p[:, :, None] * (labels == v)).sum(1) for v in range(V)], -1)
    at = own.given(known)
    torch.testing.assert_close(at.marginals(f, g, mask)[:, 0], wanted)
    best = labels[values.argmax(1)]
    assert torch.equal(at.decode(f, g, mask)[:, 0], best)
    torch.testing.assert_close(at.log_prob(f, g, best[:1], mask)[0, 0], p[0].max().log())
    agree, apart = torch.tensor([[1, -1, -1, -1]]), torch.tensor([[1, 1, -1, -1]])
    torch.testing.assert_close(at.log_prob(f, g, agree, mask)[:, 0].exp(), wanted[:, 0, 1])
    assert (at.log_prob(f, g, apart, mask) == -torch.inf).all()
    drawn = at.sample(f.repeat(500, 1, 1, 1), g.repeat(500, 1, 1), mask, torch.Generator().manual_seed(0))
    shares = torch.stack([(drawn[:, 0] == v).double().mean(0) for v in range(V)], -1)
    assert (shares - wanted.mean(0)).abs().max() < 0.05


def test_padding_and_batching_change_nothing() -> None:
    f, g, mask = scores((5, 2, 8))
    together = quiet(smoothed_memm).marginals(f, g, mask)
    for b, n in enumerate((5, 2, 8)):
        alone = quiet(smoothed_memm).marginals(f[:, b : b + 1, :n], g, mask[b : b + 1, :n])
        assert torch.equal(together[:, b, :n], alone[:, 0])
        assert (together[:, b, n:] == 0).all()


def test_one_call_for_each_labelling_and_none_when_asked_again() -> None:
    f, g, mask = scores((4,))
    own = quiet(smoothed_memm)
    before = own.n_values
    own.marginals(f, g, mask)
    assert own.n_values == before + V**4
    for method in ("decode", "entropy", "marginals"):
        getattr(own, method)(f, g, mask)
    assert own.n_values == before + V**4


def test_a_function_that_does_not_sum_to_1_is_told_once() -> None:
    own = ByValues(BlackBox(counted))
    with pytest.warns(StructgpWarning, match="likelihood counted: its probabilities sum to .* answers are"):
        own.probe(V)
    f, g, mask = scores((3,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own.probe(V)
        own.marginals(f, g, mask)
        normalised = ByValues(BlackBox(smoothed_memm))
        normalised.probe(V)
    assert (own.is_normalised, normalised.is_normalised) == (False, True)
    labels = torch.tensor(list(product(range(V), repeat=3)))
    each = own.log_prob(f.expand(-1, len(labels), -1, -1), g, labels, mask.expand(len(labels), -1))
    torch.testing.assert_close(each.logsumexp(1), torch.zeros(len(f), dtype=torch.float64))


def test_nothing_is_possible() -> None:
    f, g, mask = scores((3,))
    own = quiet(lambda f, g, y: np.full(len(f), -np.inf))
    with pytest.raises(LikelihoodError, match="gives probability 0 to all labellings of 3 tokens"):
        own.marginals(f, g, mask)


def test_a_copy_answers_alike() -> None:
    f, g, mask = scores((3, 9))
    own = quiet(smoothed_memm)
    again = pickle.loads(pickle.dumps(own))
    assert torch.equal(again.marginals(f, g, mask), own.marginals(f, g, mask))


# -- sampling -----------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the shortest sequences is sampled, with fewer values than there are labellings."""
    monkeypatch.setattr(by_values, "MOST_VALUES", 10)
    monkeypatch.setattr(importance, "MOST_VALUES", 600)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("function", [chain_in_numpy, smoothed_memm, counted])
@pytest.mark.parametrize("known", [None, torch.tensor([[-1, 2, -1, 0, -1, -1, -1]])])
def test_samples_are_right_within_their_error(function: Any, known: Tensor | None) -> None:
    f, g, mask = scores((7,), S=6, seed=3)
    truth = quiet(function)
    sampled = quiet(function)
    if known is not None:
        truth, sampled = truth.given(known), sampled.given(known)
    found = sampled.marginals(f, g, mask)
    share = torch.full((6, 1), 1 / 6, dtype=torch.float64)
    error = sampled.monte_carlo_error(f, g, mask, share)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_values, "MOST_VALUES", V**7)
        exact = truth.marginals(f, g, mask)
        assert (truth.monte_carlo_error(f, g, mask, share) == 0).all()
        entropy, (best, _) = truth.entropy(f, g, mask), truth.n_best(f, g, mask, 1)
        missing = torch.tensor([[-1, -1, 1, -1, -1, -1, -1]])
        log_p = truth.log_prob(f, g, missing, mask)
    off = (found.mean(0) - exact.mean(0))[0]
    assert 0.0005 < float(error.max()) < 0.03
    assert float((off / error.clamp(min=1e-4)).abs().max()) < 4
    assert float(((off / error.clamp(min=1e-4)) ** 2).mean()) < 2.5
    assert float((sampled.entropy(f, g, mask) - entropy).mean().abs()) < 0.2
    assert float((sampled.log_prob(f, g, missing, mask) - log_p).exp().sub(1).abs().max()) < 0.25
    assert float((sampled.n_best(f, g, mask, 1)[0] == best).double().mean()) > 0.9


@pytest.mark.usefixtures("few")
def test_errors_are_as_large_as_they_say() -> None:
    """Squared deviations of many seeds are what the standard errors promise."""
    f, g, mask = scores((7,), S=6, seed=1)
    share = torch.full((6, 1), 1 / 6, dtype=torch.float64)
    inner = BlackBox(smoothed_memm)
    found, promised = [], []
    for seed in range(12):
        own = ByValues(inner, seed)
        found.append(own.marginals(f, g, mask).mean(0)[0])
        promised.append(own.monte_carlo_error(f, g, mask, share)[0])
    between = torch.stack(found).var(0).mean()
    assert 0.4 < float(between / (torch.stack(promised) ** 2).mean()) < 1.8


@pytest.mark.usefixtures("few")
def test_sampling_repeats_itself_and_does_not_depend_on_the_batch() -> None:
    f, g, mask = scores((8, 6))
    own, again = quiet(smoothed_memm), quiet(smoothed_memm)
    first = own.marginals(f, g, mask)
    assert torch.equal(again.marginals(f, g, mask), first)
    alone = quiet(smoothed_memm).marginals(f[:, 1:, :6], g, mask[1:, :6])
    torch.testing.assert_close(alone[:, 0], first[:, 1, :6], rtol=0, atol=1e-10)
    assert own.n_values < 2 * 900


@pytest.mark.usefixtures("few")
def test_a_sample_that_is_worth_little_is_told() -> None:
    def far_from_a_chain(f: Any, g: Any, y: Any) -> Any:
        return np.full(len(f), -8.0 * sum(abs(int((y == v).sum()) - len(y) / V) for v in range(V)))

    f, g, mask = scores((30,))
    own = quiet(far_from_a_chain)
    with pytest.warns(StructgpWarning, match="labellings of 30 tokens are worth .* independent ones"):
        own.marginals(4 * f, g, mask)
