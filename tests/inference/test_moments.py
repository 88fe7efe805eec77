"""The two forms of slope and bend, on functions whose answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from structgp.inference.estimators import Moments, Noise, Pathwise, Target
from structgp.inference.estimators.moments import Function, Group, masked, path_moments, score_moments
from structgp.paper import Score

B, T, V = 3, 3, 2
MASK = torch.arange(T) < torch.tensor([[3], [1], [2]])
WEIGHT = torch.tensor([1.0, 0.25, 0.5], dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Quadratic:
    """a^T e + e^T H e / 2 + c of all numbers of a sequence, shared ones included, for each sequence.

    ``linear`` (B, T V + V V), ``square`` (B, n, n) symmetric; nothing at padding."""

    def __init__(self, seed: int = 1, size: float = 0.3) -> None:
        n = T * V + V * V
        real = torch.cat([MASK.repeat_interleave(V, 1), torch.ones(B, V * V).bool()], 1)
        self.linear = normal(B, n, seed=seed) * real
        square = size * normal(B, n, n, seed=seed + 1)
        self.square = (square + square.mT) * (real[:, :, None] & real[:, None, :])
        self.constant = normal(B, seed=seed + 2)

    def __call__(self, noise: Noise) -> Tensor:
        own, shared = noise
        e = torch.cat([own.flatten(2), shared[:, None].expand(-1, B, -1)], -1)
        bent = torch.einsum("sbi,bij,sbj->sb", e, self.square, e)
        return torch.einsum("sbi,bi->sb", e, self.linear) + 0.5 * bent + self.constant

    def moments(self, full: bool) -> Moments:
        """Exact."""
        u = T * V
        blocks = self.square[:, :u, :u].reshape(B, T, V, T, V)
        bend = torch.einsum("b,bij->ij", WEIGHT, self.square[:, u:, u:])
        trace = self.square.diagonal(dim1=-1, dim2=-2).sum(-1)
        return Moments(
            0.5 * trace + self.constant,
            (self.linear[:, :u].reshape(B, T, V), WEIGHT @ self.linear[:, u:]),
            (torch.einsum("btvuv->bvtu", blocks), bend if full else bend.diagonal()),
        )


def target_of(function: Function, full: bool = True) -> Target:
    return Target(function, (Group(MASK, V), Group(None, V * V, full)), WEIGHT)


def draws(S: int, seed: int = 9) -> Noise:
    return normal(S, B, T, V, seed=seed), normal(S, V * V, seed=seed + 1)


def mirrored(half: Noise) -> Noise:
    return tuple(torch.cat([eps, -eps]) for eps in half)


def flat(moments: Moments) -> Tensor:
    return torch.cat([a.flatten() for a in moments.entries])


both_forms = pytest.mark.parametrize("full", [False, True], ids=["variances", "full"])


@both_forms
def test_against_the_definition(full: bool) -> None:
    """Draw by draw, sequence by sequence, entry by entry."""
    S = 5
    d, function = draws(S), Quadratic()
    target = target_of(function, full)
    values = function(d)
    score = score_moments(target, d, values)
    path, same = path_moments(target, d, function)
    torch.testing.assert_close(values, same)
    torch.testing.assert_close(score.value, values.mean(0))
    torch.testing.assert_close(path.value, values.mean(0))
    leaves = tuple(eps.clone().requires_grad_() for eps in d)
    gradients = [torch.autograd.grad(function(leaves)[:, b].sum(), leaves) for b in range(B)]
    shared_slope = [torch.zeros(V * V).double() for _ in range(2)]
    shared_bend = [torch.zeros(V * V, V * V).double() for _ in range(2)]
    for b in range(B):
        grad, shared_grad = gradients[b][0][:, b], gradients[b][1]
        for s in range(S):
            e, l = d[1][s], values[s, b]
            shared_slope[0] += WEIGHT[b] * l * e / S
            shared_slope[1] += WEIGHT[b] * shared_grad[s] / S
            shared_bend[0] += WEIGHT[b] * l * (torch.outer(e, e) - torch.eye(V * V)) / S
            outer = torch.outer(e, shared_grad[s])
            shared_bend[1] += WEIGHT[b] * 0.5 * (outer + outer.T) / S
        for v in range(V):
            bend = [torch.zeros(T, T).double(), torch.zeros(T, T).double()]
            slope = [torch.zeros(T).double(), torch.zeros(T).double()]
            for s in range(S):
                e, l, g = d[0][s, b, :, v], values[s, b], grad[s, :, v]
                slope[0] += l * e / S
                slope[1] += g / S
                bend[0] += l * (torch.outer(e, e) - torch.eye(T)) / S
                bend[1] += 0.5 * (torch.outer(e, g) + torch.outer(g, e)) / S
            n = int(MASK[b].sum())
            for found, one, other in zip((score, path), slope, bend, strict=True):
                torch.testing.assert_close(found.slopes[0][b, :n, v], one[:n])
                torch.testing.assert_close(found.bends[0][b, v, :n, :n], other[:n, :n])
    for found, one, other in zip((score, path), shared_slope, shared_bend, strict=True):
        torch.testing.assert_close(found.slopes[1], one)
        torch.testing.assert_close(found.bends[1], other if full else other.diagonal())


@both_forms
def test_both_forms_of_a_quadratic(full: bool) -> None:
    """Over 60,000 draws in 60 parts, each entry is within four standard errors of the coefficient that it
    is of."""
    function = Quadratic()
    target, expected = target_of(function, full), function.moments(full)
    found: dict[str, list[Tensor]] = {"score": [], "path": []}
    for seed in range(60):
        d = draws(1000, seed=100 + 2 * seed)
        found["score"].append(flat(score_moments(target, d, function(d))))
        found["path"].append(flat(path_moments(target, d, function)[0]))
    for form, samples in found.items():
        stacked = torch.stack(samples)
        error = stacked.std(0) / 60**0.5
        assert ((stacked.mean(0) - flat(expected)).abs() <= 4 * error + 1e-12).all(), form


@both_forms
def test_pathwise_is_exact_where_it_must_be(full: bool) -> None:
    """The slope of a linear function with any draws; the slope of a quadratic with mirror images."""
    for S in (1, 3):
        linear = Quadratic(size=0.0)
        moments, _ = path_moments(target_of(linear, full), draws(S), linear)
        expected = linear.moments(full)
        torch.testing.assert_close(moments.slopes, expected.slopes)
    function = Quadratic()
    both = mirrored(draws(2))
    moments, _ = path_moments(target_of(function, full), both, function)
    expected = function.moments(full)
    torch.testing.assert_close(moments.slopes, expected.slopes)
    assert not torch.allclose(moments.bends[0], expected.bends[0])


def test_mirror_images_part_odd_from_even() -> None:
    """Scores of a linear function have no bend, and of a purely quadratic one no slope."""
    both = mirrored(draws(4))
    linear, square = Quadratic(size=0.0), Quadratic()
    linear.constant.zero_()
    square.linear.zero_()
    odd = score_moments(target_of(linear), both, linear(both))
    even = score_moments(target_of(square), both, square(both))
    for zero in (*odd.bends, *even.slopes):
        torch.testing.assert_close(zero, torch.zeros_like(zero), atol=1e-12, rtol=0)


def test_scores_are_linear_in_the_values() -> None:
    d, target = draws(7), target_of(Quadratic())
    a, b = normal(7, B, seed=3), normal(7, B, seed=4)
    whole = score_moments(target, d, 2 * a - b)
    torch.testing.assert_close(
        flat(whole), flat(score_moments(target, d, a) * 2.0 - score_moments(target, d, b))
    )


@both_forms
def test_padding_is_as_if_it_were_not_there(full: bool) -> None:
    """The same draws with two more positions: nothing there, and nothing changes elsewhere."""
    d, function = draws(6), Quadratic()
    wide = torch.nn.functional.pad(d[0], (0, 0, 0, 2), value=7.0), d[1]
    narrow = target_of(function, full)

    def inner(noise: Noise) -> Tensor:
        return function((noise[0][:, :, :T], noise[1]))

    mask = torch.nn.functional.pad(MASK, (0, 2))
    padded = replace(narrow, log_prob=inner, groups=(Group(mask, V), narrow.groups[1]))
    values = function(d)
    for one, other in [
        (score_moments(narrow, d, values), score_moments(padded, wide, values)),
        (path_moments(narrow, d, function)[0], path_moments(padded, wide, inner)[0]),
    ]:
        torch.testing.assert_close(one.value, other.value)
        slope, bend = other.slopes[0], other.bends[0]
        torch.testing.assert_close(one.slopes, (slope[:, :T], other.slopes[1]))
        torch.testing.assert_close(one.bends, (bend[:, :, :T, :T], other.bends[1]))
        assert (slope[~mask] == 0).all()
        assert (bend[:, :, T:] == 0).all()
        assert (bend[:, :, :, T:] == 0).all()


def test_masked_takes_rows_and_columns() -> None:
    slopes, bends = (torch.ones(B, T, V), torch.ones(4)), (torch.ones(B, V, T, T), torch.ones(4))
    found = masked(target_of(Quadratic()), Moments(torch.ones(B), slopes, bends))
    assert found.slopes[0].sum() == V * 6
    assert found.bends[0].sum() == V * (9 + 1 + 4)
    assert found.slopes[1].sum() == V * V


def test_a_function_of_one_kind_of_number() -> None:
    """Whatever is not read has slope and bend 0; of what is shared, weights of sequences add up."""
    d, target = draws(4), target_of(Quadratic())
    own, _ = path_moments(target, d, lambda noise: noise[0].square().sum((-1, -2)))
    assert (own.slopes[1] == 0).all()
    assert (own.bends[1] == 0).all()
    shared, _ = path_moments(target, d, lambda noise: noise[1].sum(-1)[:, None].expand(-1, B))
    assert (shared.slopes[0] == 0).all()
    torch.testing.assert_close(shared.slopes[1], WEIGHT.sum().expand(V * V))


def test_two_groups_of_each_example() -> None:
    """Transitions with features: both groups are per example, each with a mask of its own."""
    groups = Group(MASK, V), Group(MASK[:, 1:], V * V)
    a, b = normal(B, T, V, seed=1) * MASK[..., None], normal(B, T - 1, V * V, seed=2)
    b = b * MASK[:, 1:, None]

    def function(noise: Noise) -> Tensor:
        """A product: the slope in each group depends on the other."""
        return (noise[0] * a).sum((-1, -2)) + (noise[1] * b).sum((-1, -2)).square()

    target = Target(function, groups, WEIGHT)
    d = normal(4000, B, T, V, seed=3), normal(4000, B, T - 1, V * V, seed=4)
    path, _ = path_moments(target, mirrored(d), function)
    score = score_moments(target, mirrored(d), function(mirrored(d)))
    torch.testing.assert_close(path.slopes[0], a)
    torch.testing.assert_close(path.slopes[1], torch.zeros_like(b), atol=1e-12, rtol=0)
    # Second derivatives within a function: 2 b_t b_u of the same score.
    bend = 2 * torch.einsum("btr,bur->brtu", b, b)
    for found, most in ((path, 0.3), (score, 1.5)):
        assert (found.bends[1] - bend).abs().max() < most
        assert (found.slopes[0] - a).abs().max() < most
    assert bend.abs().max() > 3


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
        torch.testing.assert_close(estimate.moments.slopes[0], function.moments(True).slopes[0])
        assert estimate.variance.slopes[0].max() < 1e-20


def test_a_function_of_nothing_has_no_slope() -> None:
    d = draws(4)
    target = target_of(lambda noise: torch.ones(len(noise[0]), B).double())
    moments, values = path_moments(target, d, target.log_prob)
    assert (values == 1).all()
    assert all((part == 0).all() for part in (*moments.slopes, *moments.bends))
