"""Pathwise gradients, and a cheap surrogate plus an estimate of what it misses.

Pathwise gradients differentiate through the draws: where the likelihood can be differentiated, 8 to 32
draws do what score estimators need thousands for. Where it cannot, or costs much, a surrogate takes most of
the work. Let c be functions of eps whose slope and bend are cheap: parts that autograd differentiates, or a
quadratic, whose slope and bend are its coefficients. For any numbers beta

    E[grad l] = E[grad beta c] + E[eps (l - beta c)],

and the second term has only the residual's variance. beta is the regression of l on c over the OTHER
replicates, so that it does not depend on the draws it is used with: the estimate stays unbiased, and a
surrogate that explains nothing gets a coefficient near 0 and does no harm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Generator, Tensor

from structgp.inference.estimators.designs import Design, draw, replicate_sizes, split
from structgp.inference.estimators.moments import (
    Estimate,
    Estimator,
    Function,
    Moments,
    Noise,
    Target,
    combine,
    masked,
    moments_along,
    path_moments,
    score_moments,
    slopes_at,
    variance_of_mean,
)

Parts: TypeAlias = Literal["piecewise", "composite"]

REPLICATES = 4

MANY_DRAWS = 32
"""Number of draws from which orthogonal directions are worth their cost."""

PATHWISE_SHARE, LEAST_PATHWISE = 2, 64
"""Pathwise gradients of the parts have less variance than score estimates of the residual, and cost more:
half the draws of a replicate are enough for them, but not fewer than 64."""

MOST_AT_ONCE = 1 << 20
"""Largest number of random numbers, over all replicates, in one call of the likelihood."""


@dataclass(frozen=True)
class Pathwise(Estimator):
    """E[grad l] and E[sym(eps grad l^T)] over draws, in orthogonal directions from 32 draws on, else
    antithetic. All draws are one replicate, since more directions are then orthogonal. Parts of it give the
    variance, which is if anything too large."""

    n_draws: int = 8
    name = "pathwise"
    needs_gradient = True

    def __call__(self, target: Target, generator: Generator, memory: Moments | None = None) -> Estimate:
        """Cost: S likelihoods of every sequence with their gradient. ``memory`` is not used."""
        design: Design = "orthogonal" if self.n_draws >= MANY_DRAWS else "antithetic"
        sizes = replicate_sizes(self.n_draws, REPLICATES, design)
        draws = split(next(draw(target, design, [sum(sizes)], generator)), sizes)
        moments, values = zip(*(path_moments(target, d, target.log_prob) for d in draws), strict=True)
        return Estimate.of(moments, sizes, values)


@dataclass(frozen=True)
class Surrogate(Estimator):
    """A surrogate plus an estimate of the residual. parts : name of the functions that the target provides
    as stand-ins, if any. uses_memory : whether a quadratic from earlier estimates is one of the
    stand-ins."""

    name: str
    parts: Parts | None
    uses_memory: bool
    n_draws: int = 512

    def __call__(self, target: Target, generator: Generator, memory: Moments | None = None) -> Estimate:
        """Cost: S likelihoods of every sequence; the parts at S draws, and their gradients at half of
        them."""
        sizes = replicate_sizes(self.n_draws, REPLICATES, "iid")
        quadratic = _Quadratic(target, memory) if memory is not None and self.uses_memory else None
        draws = list(draw(target, "iid", sizes, generator))
        values = _at_once(target.log_prob, draws)
        stand_ins = _StandIns(target, draws, quadratic)
        fits = list(_regressions(values, stand_ins.features))
        found = stand_ins.moments([beta for _, beta in fits])
        estimates = []
        for d, l, c, (less, beta), about in zip(
            draws, values, stand_ins.features, fits, found, strict=True
        ):
            estimates.append(score_moments(target, d, l - less - (c * beta).sum(-1)) + about)
        return Estimate.of(estimates, sizes, values, variance_of_mean(torch.cat(values)))


@dataclass(frozen=True)
class PathwiseSurrogate(Estimator):
    """For a likelihood that can be differentiated at a high cost: pathwise estimates of the residual at a
    few draws, and of the stand-ins at many more.

    n_draws : S, number of draws of the likelihood; the stand-ins are computed at ``more`` further draws."""

    n_draws: int = 16
    more: int = 2048
    parts: Parts = "composite"
    name = "pathwise-surrogate"
    needs_gradient = True

    def __call__(self, target: Target, generator: Generator, memory: Moments | None = None) -> Estimate:
        """Cost: S likelihoods of every sequence with their gradient, and the parts at S + ``more`` draws.
        ``memory`` is not used."""
        sizes = replicate_sizes(self.n_draws, REPLICATES, "antithetic")
        more = replicate_sizes(self.more, len(sizes), "antithetic")
        (whole,) = draw(target, "orthogonal", [sum(sizes)], generator)
        near = list(split(whole, sizes))
        far = draw(target, "antithetic", more, generator)
        moments, values = zip(*(path_moments(target, d, target.log_prob) for d in near), strict=True)
        fits = _regressions(values, [_features(target, d, None) for d in near])
        estimates = []
        for d, extra, found, (_, beta) in zip(near, far, moments, fits, strict=True):
            stands = _surrogate_moments(target, extra, beta, None)
            estimates.append(found - _surrogate_moments(target, d, beta, None) + stands)
        return Estimate.of(estimates, sizes, values, combine(moments, sizes)[1].value)


def _at_once(function: Function, draws: Sequence[Noise]) -> list[Tensor]:
    """Evaluates a function at the draws of each replicate, in one call where these are few: a likelihood in
    Python costs as much for ten draws as for a hundred."""
    if not _fit_at_once(draws):
        return [function(noise) for noise in draws]
    whole = function(tuple(torch.cat(of_group) for of_group in zip(*draws, strict=True)))
    return list(whole.split([len(noise[0]) for noise in draws]))


def _fit_at_once(draws: Sequence[Noise]) -> bool:
    return sum(eps.numel() for noise in draws for eps in noise) <= MOST_AT_ONCE


class _Quadratic:
    """A quadratic around the posterior mean, as two functions of eps for each group, one linear and one
    quadratic. All have mean 0, and their slope and bend are known.

    Slope and bend of shared numbers are known as sums over examples; each example gets a share in
    proportion to its number of transitions."""

    def __init__(self, target: Target, memory: Moments) -> None:
        self.groups = target.groups
        self.count = 2 * len(target.groups)
        self.memory = memory.map(lambda a: a.to(target.weight.device, target.dtype))
        lengths = target.groups[0].mask
        assert lengths is not None
        steps = (lengths.sum(-1) - 1).clamp(min=0).to(target.dtype) * (target.weight > 0)
        self.share = steps / (target.weight.to(steps) @ steps).clamp(min=1e-12)

    def __call__(self, noise: Noise) -> Tensor:
        """(S, B, count)."""
        found, known = [], self.memory
        for group, eps, slope, bend in zip(self.groups, noise, known.slopes, known.bends, strict=True):
            if group.mask is None:
                full, square = group.full, eps.square() - 1
                bent = ((eps @ bend) * eps).sum(-1) - bend.trace() if full else square @ bend
                found += [p[:, None] * self.share for p in (eps @ slope, 0.5 * bent)]
            else:
                trace = bend.diagonal(dim1=-1, dim2=-2).sum((-1, -2))
                bent = torch.einsum("bvtu,sbuv->sbtv", bend, eps)
                square = 0.5 * ((bent * eps).sum((-1, -2)) - trace)
                found += [torch.einsum("sbtv,btv->sb", eps, slope), square]
        return torch.stack(found, -1)

    def moments(self, target: Target, beta: Tensor) -> Moments:
        """Moments of beta (B, count) times the functions."""
        m, slopes, bends = self.memory, [], []
        weight = target.weight.to(beta) * self.share
        for k, group in enumerate(self.groups):
            linear, square = beta[:, 2 * k], beta[:, 2 * k + 1]
            if group.mask is None:
                slopes.append(m.slopes[k] * (weight @ linear))
                bends.append(m.bends[k] * (weight @ square))
            else:
                slopes.append(m.slopes[k] * linear[:, None, None])
                bends.append(m.bends[k] * square[:, None, None, None])
        return masked(target, Moments(torch.zeros_like(m.value), tuple(slopes), tuple(bends)))


class _StandIns:
    """The parts and the quadratic at the draws of each replicate. features : (S, B, C) for each replicate.
    Where draws are few, the parts at all of them are computed once and kept with what their derivatives
    need."""

    def __init__(self, target: Target, draws: Sequence[Noise], quadratic: _Quadratic | None) -> None:
        self.target, self.draws, self.quadratic = target, draws, quadratic
        self.sizes, self.parts = [len(noise[0]) for noise in draws], target.parts
        self.at_once = max(self.sizes) <= LEAST_PATHWISE and _fit_at_once(draws) and self.parts is not None
        if not self.at_once:
            self.features = _at_once(lambda d: _features(target, d, quadratic), draws)
            return
        assert self.parts is not None
        whole = (torch.cat(of_group) for of_group in zip(*draws, strict=True))
        self.leaves = tuple(eps.requires_grad_() for eps in whole)
        with torch.enable_grad():
            self.values = self.parts(self.leaves)
        self.features = list(self.values.detach().split(self.sizes))
        if quadratic is not None:
            both = zip(self.features, draws, strict=True)
            self.features = [torch.cat([c, quadratic(noise)], -1) for c, noise in both]

    def moments(self, betas: Sequence[Tensor]) -> list[Moments]:
        """Slope and bend of beta c for each replicate, with coefficients (B, C)."""
        quadratic, target = self.quadratic, self.target
        if not self.at_once:
            most = max(max(self.sizes) // PATHWISE_SHARE, LEAST_PATHWISE)
            some = [tuple(eps[:most] for eps in noise) for noise in self.draws]
            both = zip(some, betas, strict=True)
            return [_surrogate_moments(target, noise, beta, quadratic) for noise, beta in both]
        C = self.values.shape[-1]
        each = torch.cat(
            [beta[None, :, :C].expand(n, -1, -1) for beta, n in zip(betas, self.sizes, strict=True)]
        )
        with torch.enable_grad():
            sums = (self.values * each).sum(-1)  # (S, B)
            total = (sums * target.weight.to(sums)).sum()
        grads = zip(*(grad.split(self.sizes) for grad in slopes_at(total, self.leaves)), strict=True)
        found = []
        parts = zip(self.draws, grads, sums.detach().split(self.sizes), betas, strict=True)
        for noise, slopes, values, beta in parts:
            about = moments_along(target, noise, slopes, values)
            found.append(about if quadratic is None else about + quadratic.moments(target, beta[:, C:]))
        return found


def _features(target: Target, noise: Noise, quadratic: _Quadratic | None) -> Tensor:
    """(S, B, C) the stand-ins: the parts, then the functions of the quadratic."""
    found = [noise[0].new_zeros(len(noise[0]), len(target.weight), 0)]
    if target.parts is not None:
        with torch.no_grad():
            found.append(target.parts(noise))
    if quadratic is not None:
        found.append(quadratic(noise))
    return torch.cat(found, -1)


def _regressions(values: Sequence[Tensor], features: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """For each replicate, the baseline (B,) and coefficients (B, C) of l on c over all other replicates;
    zeros where there are none."""
    both = [torch.cat([c, l[..., None]], -1).double() for l, c in zip(values, features, strict=True)]
    sums = [x.sum(0) for x in both]  # (B, C + 1)
    products = [torch.einsum("sbi,sbj->bij", x, x) for x in both]
    C, eye = features[0].shape[-1], torch.eye(features[0].shape[-1]).to(both[0])
    for r, l in enumerate(values):
        count = sum(len(x) for i, x in enumerate(both) if i != r)
        if count == 0:
            yield torch.zeros_like(l[0]), l.new_zeros(l.shape[1], C)
            continue
        mean = torch.stack([s for i, s in enumerate(sums) if i != r]).sum(0) / count
        second = torch.stack([p for i, p in enumerate(products) if i != r]).sum(0) / count
        covariance = second - mean[:, :, None] * mean[:, None, :]
        gram, cross = covariance[:, :C, :C], covariance[:, :C, C]
        # Scaled to correlations, and shrunk as if each coefficient had been seen to be 0 once.
        scale = gram.diagonal(dim1=-1, dim2=-2).clamp(min=1e-12).sqrt()
        gram = gram / (scale[:, :, None] * scale[:, None, :]) + eye / count
        beta = torch.linalg.solve(gram, (cross / scale)[..., None])[..., 0] / scale
        yield (mean[:, C] - (beta * mean[:, :C]).sum(-1)).to(l), beta.to(l)


def _surrogate_moments(target: Target, noise: Noise, beta: Tensor, quadratic: _Quadratic | None) -> Moments:
    """Slope and bend of beta c: the parts pathwise at the draws, the quadratic exactly."""
    total = score_moments(target, noise, noise[0].new_zeros(len(noise[0]), len(beta)))
    if target.parts is not None:
        functions, some = target.parts, beta[:, : beta.shape[1] - (quadratic.count if quadratic else 0)]
        total = total + path_moments(target, noise, lambda eps: (functions(eps) * some).sum(-1))[0]
    if quadratic is not None:
        total = total + quadratic.moments(target, beta[:, -quadratic.count :])
    return total
