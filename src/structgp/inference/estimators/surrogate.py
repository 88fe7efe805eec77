"""Surrogate plus residual: pathwise on what resembles the likelihood, score on what is left.

Let c be functions of eps whose slope and bend are cheap: parts that autograd differentiates, or a
quadratic, whose slope and bend are its coefficients. For any numbers beta

    E[grad l] = E[grad beta c] + E[eps (l - beta c)],

and the second term has only the residual's variance. beta is the regression of l on c over the OTHER
replicates, so that it does not depend on the draws it is used with: the estimate stays unbiased, and a
surrogate that explains nothing gets a coefficient near 0 and does no harm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from structgp.inference.estimators.designs import draw, replicate_sizes, split
from structgp.inference.estimators.moments import (
    Estimate,
    Group,
    Moments,
    Noise,
    Target,
    combine,
    masked,
    path_moments,
    score_moments,
    variance_of_mean,
)

Parts: TypeAlias = Literal["piecewise", "composite"]

REPLICATES = 4

PATHWISE_SHARE, LEAST_PATHWISE = 2, 64
"""Pathwise gradients of the parts are surer than scores of the residual, and dear: half the draws of a
replicate will do, but not fewer than 64."""


@dataclass(frozen=True)
class Surrogate:
    """Surrogate plus residual.

    Parameters
    ----------
    name : what it is called.
    parts : which stand-ins the target is to bring, if any.
    uses_memory : whether a quadratic from earlier estimates is one of the surrogates.
    n_draws : S.
    """

    name: str
    parts: Parts | None
    uses_memory: bool
    n_draws: int = 512
    needs_gradient = False

    def with_draws(self, n_draws: int) -> Surrogate:
        return replace(self, n_draws=n_draws)

    def __call__(
        self, target: Target, generator: torch.Generator, memory: Moments | None = None
    ) -> Estimate:
        """Cost: S likelihoods of every sequence; of the parts S, and half of S with gradient.

        ``memory`` : slope and bend of l as earlier estimates have them; its value is not used.
        """
        sizes = replicate_sizes(self.n_draws, REPLICATES, "iid")
        quadratic = _Quadratic(target, memory) if memory is not None and self.uses_memory else None
        draws = list(draw(target, "iid", sizes, generator))
        values = [target.log_prob(d) for d in draws]
        features = [_features(target, d, quadratic) for d in draws]
        products = [_products(l, c) for l, c in zip(values, features, strict=True)]
        estimates = []
        for r, (d, l, c) in enumerate(zip(draws, values, features, strict=True)):
            others = [p for i, p in enumerate(products) if i != r]
            less, beta = _regression(others, l, c)
            residual = l - less - (c * beta).sum(-1)
            estimates.append(
                score_moments(target, d, residual)
                + _surrogate_moments(target, _some(d), beta, quadratic)
            )
        mean, variance = combine(estimates, sizes)
        every = torch.cat(values)
        return Estimate(
            replace(mean, value=every.mean(0)),
            replace(variance, value=variance_of_mean(every)),
            every.std(0, correction=0),
            every.numel(),
        )


@dataclass(frozen=True)
class PathwiseSurrogate:
    """The same where the likelihood can be differentiated but costs much: pathwise on the residual at a
    few draws, and pathwise on the stand-ins at many more.

    n_draws : S, of the likelihood; the stand-ins are computed at ``more`` draws besides.
    """

    name: str = "pathwise-surrogate"
    n_draws: int = 16
    more: int = 2048
    parts: Parts = "composite"
    uses_memory = False
    needs_gradient = True

    def with_draws(self, n_draws: int) -> PathwiseSurrogate:
        return replace(self, n_draws=n_draws)

    def __call__(
        self, target: Target, generator: torch.Generator, memory: Moments | None = None
    ) -> Estimate:
        """Cost: S likelihoods of every sequence with their gradient, and of the parts S + ``more``.
        ``memory`` is not used."""
        sizes = replicate_sizes(self.n_draws, REPLICATES, "antithetic")
        more = replicate_sizes(self.more, len(sizes), "antithetic")
        (whole,) = draw(target, "orthogonal", [sum(sizes)], generator)
        near = list(split(whole, sizes, "orthogonal"))
        far = draw(target, "antithetic", more, generator)
        found = [path_moments(target, d, target.log_prob) for d in near]
        features = [_features(target, d, None) for d in near]
        products = [_products(l, c) for (_, l), c in zip(found, features, strict=True)]
        estimates = []
        for r, (d, extra, (moments, l), c) in enumerate(
            zip(near, far, found, features, strict=True)
        ):
            others = [p for i, p in enumerate(products) if i != r]
            beta = _regression(others, l, c)[1]
            stands = _surrogate_moments(target, extra, beta, None)
            estimates.append(moments - _surrogate_moments(target, d, beta, None) + stands)
        mean, variance = combine(estimates, sizes)
        every = torch.cat([l for _, l in found])
        value, spread = combine([moments for moments, _ in found], sizes)
        mean = replace(mean, value=value.value)
        variance = replace(variance, value=spread.value)
        return Estimate(mean, variance, every.std(0, correction=0), every.numel())


class _Quadratic:
    """A quadratic around the posterior mean as two functions of eps for each group, linear and quadratic,
    all of mean 0 and with known slope and bend.

    What is known of shared numbers is a sum over examples; each gets its share by length.
    """

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
        found = []
        for group, eps, slope, bend in self._each(noise):
            if group.mask is None:
                linear = eps @ slope
                if group.full:
                    square = 0.5 * (((eps @ bend) * eps).sum(-1) - bend.trace())
                else:
                    square = 0.5 * (eps.square() - 1) @ bend
                found += [p[:, None] * self.share for p in (linear, square)]
            else:
                trace = bend.diagonal(dim1=-1, dim2=-2).sum((-1, -2))
                bent = torch.einsum("bvtu,sbuv->sbtv", bend, eps)
                square = 0.5 * ((bent * eps).sum((-1, -2)) - trace)
                found += [torch.einsum("sbtv,btv->sb", eps, slope), square]
        return torch.stack(found, -1)

    def _each(self, noise: Noise) -> Iterator[tuple[Group, Tensor, Tensor, Tensor]]:
        return zip(self.groups, noise, self.memory.slopes, self.memory.bends, strict=True)

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


def _features(target: Target, noise: Noise, quadratic: _Quadratic | None) -> Tensor:
    """(S, B, C): the parts, then those of the quadratic."""
    found = []
    if target.parts is not None:
        with torch.no_grad():
            found.append(target.parts(noise))
    if quadratic is not None:
        found.append(quadratic(noise))
    shape = (len(noise[0]), len(target.weight), 0)
    return torch.cat(found, -1) if found else noise[0].new_zeros(shape)


def _some(noise: Noise) -> Noise:
    n = max(len(noise[0]) // PATHWISE_SHARE, LEAST_PATHWISE)
    return tuple(eps[:n] for eps in noise)


def _products(l: Tensor, c: Tensor) -> tuple[int, Tensor, Tensor]:
    """Count, sums (B, C + 1) and second moments (B, C + 1, C + 1) of (c, l)."""
    both = torch.cat([c, l[..., None]], -1).double()
    return len(l), both.sum(0), torch.einsum("sbi,sbj->bij", both, both)


def _regression(
    products: list[tuple[int, Tensor, Tensor]], l: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """Baseline (B,) and coefficients (B, C) of l on c from other replicates than those of l and c;
    nothing where there are none."""
    C = c.shape[-1]
    if not products:
        return torch.zeros_like(l[0]), c.new_zeros(c.shape[1:])
    count = sum(n for n, _, _ in products)
    mean = torch.stack([s for _, s, _ in products]).sum(0) / count
    second = torch.stack([p for _, _, p in products]).sum(0) / count
    covariance = second - mean[:, :, None] * mean[:, None, :]
    gram, cross = covariance[:, :C, :C], covariance[:, :C, C]
    # Scaled to correlations, and shrunk as if each coefficient had been seen to be 0 once.
    scale = gram.diagonal(dim1=-1, dim2=-2).clamp(min=1e-12).sqrt()
    gram = gram / (scale[:, :, None] * scale[:, None, :])
    gram = gram + torch.eye(C, dtype=gram.dtype, device=gram.device) / count
    beta = torch.linalg.solve(gram, (cross / scale)[..., None])[..., 0] / scale
    baseline = mean[:, C] - (beta * mean[:, :C]).sum(-1)
    return baseline.to(l), beta.to(l)


def _surrogate_moments(
    target: Target, noise: Noise, beta: Tensor, quadratic: _Quadratic | None
) -> Moments:
    """Slope and bend of beta c: the parts pathwise at the draws, the quadratic exactly."""
    total = score_moments(target, noise, noise[0].new_zeros(len(noise[0]), len(beta)))
    if target.parts is not None:
        functions = target.parts
        some = beta[:, : beta.shape[1] - (0 if quadratic is None else quadratic.count)]

        def combined(noise: Noise) -> Tensor:
            return (functions(noise) * some).sum(-1)

        total = total + path_moments(target, noise, combined)[0]
    if quadratic is not None:
        total = total + quadratic.moments(target, beta[:, -quadratic.count :])
    return total
