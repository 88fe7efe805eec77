"""The two forms of slope and bend, on functions whose answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from structgp.inference.estimators import Draws, Moments, Pathwise, Target
from structgp.inference.estimators.moments import Function, masked, path_moments, score_moments
from structgp.paper import Score

B, T, V = 3, 3, 2
MASK = torch.arange(T) < torch.tensor([[3], [1], [2]])
WEIGHT = torch.tensor([1.0, 0.25, 0.5], dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Quadratic:
    """a^T e + e^T H e / 2 + c of all numbers of a sequence, pairwise ones included, for each sequence.

    ``linear`` (B, T V + V V), ``square`` (B, n, n) symmetric; nothing at padding.
    """

    def __init__(self, seed: int = 1, size: float = 0.3) -> None:
        n = T * V + V * V
        real = torch.cat([MASK.repeat_interleave(V, 1), torch.ones(B, V * V).bool()], 1)
        self.linear = normal(B, n, seed=seed) * real
        square = size * normal(B, n, n, seed=seed + 1)
        self.square = (square + square.mT) * (real[:, :, None] & real[:, None, :])
        self.constant = normal(B, seed=seed + 2)

    def __call__(self, unary: Tensor, pairwise: Tensor) -> Tensor:
        e = torch.cat([unary.flatten(2), pairwise.flatten(1)[:, None].expand(-1, B, -1)], -1)
        bent = torch.einsum("sbi,bij,sbj->sb", e, self.square, e)
        return torch.einsum("sbi,bi->sb", e, self.linear) + 0.5 * bent + self.constant

    def moments(self, pairs_are_full: bool) -> Moments:
        """Exact."""
        u = T * V
        blocks = self.square[:, :u, :u].reshape(B, T, V, T, V)
        pair_bend = torch.einsum("b,bij->ij", WEIGHT, self.square[:, u:, u:])
        trace = self.square.diagonal(dim1=-1, dim2=-2).sum(-1)
        return Moments(
            0.5 * trace + self.constant,
            self.linear[:, :u].reshape(B, T, V),
            torch.einsum("btvuv->bvtu", blocks),
            (WEIGHT @ self.linear[:, u:]).reshape(V, V),
            pair_bend if pairs_are_full else pair_bend.diagonal().reshape(V, V),
        )


def target_of(function: Function, pairs_are_full: bool = True) -> Target:
    return Target(function, MASK, WEIGHT, V, pairs_are_full)


def draws(S: int, seed: int = 9) -> Draws:
    return Draws(normal(S, B, T, V, seed=seed), normal(S, V, V, seed=seed + 1))


def flat(moments: Moments) -> Tensor:
    return torch.cat([a.flatten() for a in vars(moments).values()])


both_pairs = pytest.mark.parametrize("pairs_are_full", [False, True])


@both_pairs
def test_against_the_definition(pairs_are_full: bool) -> None:
    """Draw by draw, sequence by sequence, entry by entry."""
    S = 5
    d, function = draws(S), Quadratic()
    target = target_of(function, pairs_are_full)
    values = function(d.unary, d.pairwise)
    score = score_moments(target, d, values)
    path, same = path_moments(target, d, function)
    torch.testing.assert_close(values, same)
    torch.testing.assert_close(score.value, values.mean(0))
    torch.testing.assert_close(path.value, values.mean(0))
    unary, pairwise = d.unary.clone().requires_grad_(), d.pairwise.clone().requires_grad_()
    gradients = [
        torch.autograd.grad(function(unary, pairwise)[:, b].sum(), (unary, pairwise))
        for b in range(B)
    ]
    pair_slope = [torch.zeros(V, V).double(), torch.zeros(V, V).double()]
    pair_bend = [torch.zeros(V * V, V * V).double(), torch.zeros(V * V, V * V).double()]
    for b in range(B):
        grad, pair_grad = gradients[b][0][:, b], gradients[b][1]
        for s in range(S):
            e, l = d.pairwise[s].flatten(), values[s, b]
            pair_slope[0] += WEIGHT[b] * (l * e).reshape(V, V) / S
            pair_slope[1] += WEIGHT[b] * pair_grad[s] / S
            pair_bend[0] += WEIGHT[b] * l * (torch.outer(e, e) - torch.eye(V * V)) / S
            outer = torch.outer(e, pair_grad[s].flatten())
            pair_bend[1] += WEIGHT[b] * 0.5 * (outer + outer.T) / S
        for v in range(V):
            bend = [torch.zeros(T, T).double(), torch.zeros(T, T).double()]
            slope = [torch.zeros(T).double(), torch.zeros(T).double()]
            for s in range(S):
                e, l, g = d.unary[s, b, :, v], values[s, b], grad[s, :, v]
                slope[0] += l * e / S
                slope[1] += g / S
                bend[0] += l * (torch.outer(e, e) - torch.eye(T)) / S
                bend[1] += 0.5 * (torch.outer(e, g) + torch.outer(g, e)) / S
            n = int(MASK[b].sum())
            for found, one, other in zip((score, path), slope, bend, strict=True):
                torch.testing.assert_close(found.slope[b, :n, v], one[:n])
                torch.testing.assert_close(found.bend[b, v, :n, :n], other[:n, :n])
    for found, one, other in zip((score, path), pair_slope, pair_bend, strict=True):
        torch.testing.assert_close(found.pair_slope, one)
        wanted = other if pairs_are_full else other.diagonal().reshape(V, V)
        torch.testing.assert_close(found.pair_bend, wanted)


@both_pairs
def test_both_forms_of_a_quadratic(pairs_are_full: bool) -> None:
    """Over 60,000 draws in 60 parts, each entry is within four standard errors of the coefficient
    that it is of."""
    function = Quadratic()
    target, expected = target_of(function, pairs_are_full), function.moments(pairs_are_full)
    found: dict[str, list[Tensor]] = {"score": [], "path": []}
    for seed in range(60):
        d = draws(1000, seed=100 + 2 * seed)
        found["score"].append(flat(score_moments(target, d, function(d.unary, d.pairwise))))
        found["path"].append(flat(path_moments(target, d, function)[0]))
    for form, samples in found.items():
        stacked = torch.stack(samples)
        error = stacked.std(0) / 60**0.5
        assert ((stacked.mean(0) - flat(expected)).abs() <= 4 * error + 1e-12).all(), form


@both_pairs
def test_pathwise_is_exact_where_it_must_be(pairs_are_full: bool) -> None:
    """The slope of a linear function with any draws; the slope of a quadratic with mirror images."""
    for S in (1, 3):
        linear = Quadratic(size=0.0)
        moments, _ = path_moments(target_of(linear, pairs_are_full), draws(S), linear)
        expected = linear.moments(pairs_are_full)
        torch.testing.assert_close(moments.slope, expected.slope)
        torch.testing.assert_close(moments.pair_slope, expected.pair_slope)
    function = Quadratic()
    half = draws(2)
    mirrored = Draws(
        torch.cat([half.unary, -half.unary]), torch.cat([half.pairwise, -half.pairwise])
    )
    moments, _ = path_moments(target_of(function, pairs_are_full), mirrored, function)
    expected = function.moments(pairs_are_full)
    torch.testing.assert_close(moments.slope, expected.slope)
    torch.testing.assert_close(moments.pair_slope, expected.pair_slope)
    assert not torch.allclose(moments.bend, expected.bend)


def test_mirror_images_part_odd_from_even() -> None:
    """Scores of a linear function have no bend, and of a purely quadratic one no slope."""
    half = draws(4)
    mirrored = Draws(
        torch.cat([half.unary, -half.unary]), torch.cat([half.pairwise, -half.pairwise])
    )
    linear, square = Quadratic(size=0.0), Quadratic()
    linear.constant.zero_()
    square.linear.zero_()
    odd = score_moments(target_of(linear), mirrored, linear(mirrored.unary, mirrored.pairwise))
    even = score_moments(target_of(square), mirrored, square(mirrored.unary, mirrored.pairwise))
    for zero in (odd.bend, odd.pair_bend, even.slope, even.pair_slope):
        torch.testing.assert_close(zero, torch.zeros_like(zero), atol=1e-12, rtol=0)


def test_scores_are_linear_in_the_values() -> None:
    d, target = draws(7), target_of(Quadratic())
    a, b = normal(7, B, seed=3), normal(7, B, seed=4)
    whole = score_moments(target, d, 2 * a - b)
    torch.testing.assert_close(
        flat(whole), flat(score_moments(target, d, a) * 2.0 - score_moments(target, d, b))
    )


@both_pairs
def test_padding_is_as_if_it_were_not_there(pairs_are_full: bool) -> None:
    """The same draws with two more positions: nothing there, and nothing changes elsewhere."""
    d, function = draws(6), Quadratic()
    wide = Draws(torch.nn.functional.pad(d.unary, (0, 0, 0, 2), value=7.0), d.pairwise)
    narrow = target_of(function, pairs_are_full)

    def inner(unary: Tensor, pairwise: Tensor) -> Tensor:
        return function(unary[:, :, :T], pairwise)

    padded = replace(narrow, log_prob=inner, mask=torch.nn.functional.pad(MASK, (0, 2)))
    values = function(d.unary, d.pairwise)
    for one, other in [
        (score_moments(narrow, d, values), score_moments(padded, wide, values)),
        (path_moments(narrow, d, function)[0], path_moments(padded, wide, inner)[0]),
    ]:
        torch.testing.assert_close(one.value, other.value)
        torch.testing.assert_close(one.slope, other.slope[:, :T])
        torch.testing.assert_close(one.bend, other.bend[:, :, :T, :T])
        torch.testing.assert_close(one.pair_slope, other.pair_slope)
        torch.testing.assert_close(one.pair_bend, other.pair_bend)
        assert (other.slope[~padded.mask] == 0).all()
        assert (other.bend[:, :, T:] == 0).all()
        assert (other.bend[:, :, :, T:] == 0).all()


def test_masked_takes_rows_and_columns() -> None:
    ones = Moments(*(torch.ones(s) for s in ((B,), (B, T, V), (B, V, T, T), (V, V), (V, V))))
    found = masked(target_of(Quadratic()), ones)
    assert found.slope.sum() == V * 6
    assert found.bend.sum() == V * (9 + 1 + 4)
    assert found.pair_slope.sum() == V * V


def test_a_function_of_one_kind_of_number() -> None:
    """Whatever is not read has slope and bend 0."""
    d = draws(4)
    only_unary, _ = path_moments(target_of(Quadratic()), d, lambda u, p: u.square().sum((-1, -2)))
    assert (only_unary.pair_slope == 0).all()
    assert (only_unary.pair_bend == 0).all()
    only_pairs, _ = path_moments(
        target_of(Quadratic()), d, lambda u, p: p.sum((-1, -2))[:, None].expand(-1, B)
    )
    assert (only_pairs.slope == 0).all()
    torch.testing.assert_close(only_pairs.pair_slope, WEIGHT.sum().expand(V, V))


@pytest.mark.parametrize(
    "estimator",
    [Pathwise(n_draws=20), Pathwise(n_draws=64), Score("x", "antithetic", "mean", 4096)],
    ids=["pairs", "right angles", "score"],
)
def test_through_an_estimator(estimator: Pathwise | Score) -> None:
    """The quadratic again: all entries together, the squared error is at most three times what was
    reported. Mirror images make the slope exact where there are derivatives."""
    function = Quadratic()
    estimate = estimator(target_of(function), torch.Generator().manual_seed(0))
    away = flat(function.moments(True)) - flat(estimate.moments)
    assert away.square().sum() < 3 * flat(estimate.variance).sum()
    if isinstance(estimator, Pathwise):
        torch.testing.assert_close(estimate.moments.slope, function.moments(True).slope)
        assert estimate.variance.slope.max() < 1e-20


def test_a_function_of_nothing_has_no_slope() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    target = Target(lambda u, g: torch.ones(len(g), 1).double(), mask, torch.ones(1).double(), 2)
    draws = Draws(torch.randn(4, 1, 2, 2).double(), torch.randn(4, 2, 2).double())
    moments, values = path_moments(target, draws, target.log_prob)
    assert (values == 1).all()
    for part in (moments.slope, moments.bend, moments.pair_slope, moments.pair_bend):
        assert (part == 0).all()
