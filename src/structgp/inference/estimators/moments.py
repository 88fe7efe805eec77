"""What the bound needs from a log-likelihood, in whitened coordinates.

Write the functions of a block as h = b + L eps with standard normal eps. As a function of the eps of all
blocks the log-likelihood is l(eps), and by the theorems of Bonnet and Price

    grad_b = L^-T E[grad l],       grad_Sigma = 1/2 L^-T E[hessian l] L^-1,

whatever l is. So an estimator of E[l], of E[grad l] (the ``slope``) and of E[hessian l] within each
function (the ``bend``) serves every parameter behind b and Sigma. Two unbiased forms of both expectations
are known:

    score     E[eps l]            E[(eps eps^T - I) l]          values of l
    pathwise  E[grad l]           E[sym(eps grad l^T)]          its gradient

Letters: S draws, B examples in a batch, T tuples of an example (padded), R functions of a block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Generator, Tensor

Noise: TypeAlias = tuple[Tensor, ...]
"""Standard normal numbers, one array per group: (S, B, T, R), or (S, R) for a shared one."""

Function: TypeAlias = Callable[[Noise], Tensor]
"""-> (S, B), or (S, B, C) for C functions."""

E = TypeVar("E", bound="Entries")

Change: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Group:
    """The random numbers of one block. mask : (B, T) tuples of each example, None where all examples share
    the same R numbers. full : whether the bend of shared numbers is a whole matrix, (R, R), instead of its
    diagonal, (R,)."""

    mask: Tensor | None
    n_functions: int
    full: bool = False

    def shape(self, n: int) -> tuple[int, ...]:
        """Shape of n draws."""
        return (n, *(() if self.mask is None else self.mask.shape), self.n_functions)


@dataclass(frozen=True)
class Target:
    """A log-likelihood whose expectation, slope and bend are wanted.

    log_prob : l(eps) of B examples. groups : groups of its random numbers; the first one is per example.
    weight : (B,) factor of each example in sums over examples. parts : cheap differentiable functions that
    resemble l, if there are any. dtype : type of the draws; they live where the weights do."""

    log_prob: Function
    groups: tuple[Group, ...]
    weight: Tensor
    parts: Function | None = None
    dtype: torch.dtype = torch.float64


class Entries:
    """A dataclass of tensors and tuples of tensors, with arithmetic entry by entry."""

    @property
    def entries(self) -> tuple[Tensor, ...]:
        return tuple(a for v in vars(self).values() for a in (v if isinstance(v, tuple) else (v,)))

    def map(self: E, function: Callable[..., Tensor], *others: E) -> E:
        """Applies ``function`` to each entry, together with the same entries of ``others``."""

        def each(*values: Any) -> Any:
            return tuple(map(each, *values)) if isinstance(values[0], tuple) else function(*values)

        return type(self)(*map(each, *(vars(e).values() for e in (self, *others))))

    def plus(self: E, other: E, times: float = 1.0) -> E:
        return self.map(lambda a, b: a + times * b, other)


@dataclass(frozen=True)
class Moments(Entries):
    """value : (B,) E[l]. slopes : for each group, (B, T, R) E[dl / deps]. bends : for each group, (B, R, T,
    T) expected second derivatives within each function. For a shared group, the slope is (R,) and the bend
    (R,) or (R, R), summed over examples with their weights."""

    value: Tensor
    slopes: tuple[Tensor, ...]
    bends: tuple[Tensor, ...]

    def __add__(self, other: Moments) -> Moments:
        return self.map(torch.add, other)

    def __sub__(self, other: Moments) -> Moments:
        return self.map(torch.sub, other)

    def __mul__(self, other: Moments | float) -> Moments:
        if isinstance(other, Moments):
            return self.map(torch.mul, other)
        return self.map(lambda a: a * other)

    def map_groups(self, groups: Sequence[Group], example: Change, shared: Change) -> Moments:
        """Applies ``example`` to what is per example, and ``shared`` to what is summed over examples."""
        kinds = [shared if g.mask is None else example for g in groups]
        slopes = tuple(k(a) for k, a in zip(kinds, self.slopes, strict=True))
        bends = tuple(k(a) for k, a in zip(kinds, self.bends, strict=True))
        return Moments(example(self.value), slopes, bends)


@dataclass(frozen=True)
class Estimate:
    """moments : the estimate. variance : its variance, entry by entry, from independent replicates within
    it; nan where there was only one. evaluations : likelihoods computed, examples times draws."""

    moments: Moments
    variance: Moments
    evaluations: int

    @staticmethod
    def of(
        parts: Sequence[Moments],
        sizes: Sequence[int],
        values: Sequence[Tensor],
        scatter: Tensor | None = None,
    ) -> Estimate:
        """Combines independent estimates, ``parts``, from ``sizes`` draws each. values : (S, B) l at the
        draws of each part; their mean estimates E[l]. scatter : (B,) variance of that mean; by default that
        of the parts."""
        (mean, variance), every = combine(parts, sizes), torch.cat(list(values))
        mean = replace(mean, value=every.mean(0))
        variance = variance if scatter is None else replace(variance, value=scatter)
        return Estimate(mean, variance, every.numel())


class Estimator(ABC):
    """A dataclass with a name and S draws. needs_gradient : whether it needs the gradient of the
    likelihood. parts : name of the functions that the target provides as ``Target.parts``, None for no such
    functions. uses_memory : whether it uses the results of earlier estimates."""

    name: str
    n_draws: int
    needs_gradient: bool = False
    parts: str | None = None
    uses_memory: bool = False

    def with_draws(self, n_draws: int) -> Estimator:
        return replace(self, n_draws=n_draws)  # type: ignore[type-var]

    @abstractmethod
    def __call__(self, target: Target, generator: Generator, memory: Moments | None = None) -> Estimate:
        """memory : slope and bend of l from earlier estimates; its value is not used."""


def combine(parts: Sequence[Moments], sizes: Sequence[int]) -> tuple[Moments, Moments]:
    """The mean of independent estimates, ``parts``, from ``sizes`` draws each, and its variance."""
    share = [size / sum(sizes) for size in sizes]
    scaled = [part * w for part, w in zip(parts, share, strict=True)]
    mean = sum(scaled[1:], scaled[0])
    if len(parts) == 1:
        return mean, mean.map(lambda a: torch.full_like(a, torch.nan))
    away = [part - mean for part in parts]
    squares = [a * a * (w / (len(parts) - 1)) for a, w in zip(away, share, strict=True)]
    return mean, sum(squares[1:], squares[0])


def variance_of_mean(values: Tensor) -> Tensor:
    """(B,) variance of the mean of independent values (S, B); nan where there is only one."""
    S = len(values)
    return (values - values.mean(0)).square().sum(0) / (S * (S - 1))


def score_moments(target: Target, noise: Noise, values: Tensor, squared: bool = False) -> Moments:
    """The score form, E[h l] for the entries h of the score (eps, eps_t eps_u, eps^2 - 1), from values l
    (S, B) at the draws; E[h^2 l] if ``squared``. Linear in the values. Cost O(S B R T^2) per group, O(S R)
    or O(S R^2) for a shared one."""
    weighted = values / len(values)
    total = weighted.sum(0)  # (B,)
    summed = weighted @ target.weight.to(values)  # (S,)
    slopes, bends = [], []
    for group, eps in zip(target.groups, noise, strict=True):
        e = eps.square() if squared else eps
        if group.mask is None:
            slope, less = summed @ e, summed.sum()
            less = 2 * slope - less if squared else less
            if group.full:
                bend = (e * summed[:, None]).T @ e
                bend.diagonal().sub_(less)
            else:
                bend = summed @ e.square() - less
        else:
            e = e.permute(1, 3, 2, 0).contiguous()  # (B, R, T, S): both products read it along S
            ew = e * weighted.T[:, None, None, :]
            slope, bend, less = ew.sum(-1), ew @ e.mT, total[:, None, None]
            bend.diagonal(dim1=-1, dim2=-2).sub_(2 * slope - less if squared else less)
            slope = slope.mT
        slopes.append(slope)
        bends.append(bend)
    return masked(target, Moments(total, tuple(slopes), tuple(bends)))


def path_moments(target: Target, noise: Noise, function: Function) -> tuple[Moments, Tensor]:
    """The pathwise form, and the values (S, B); ``function`` is differentiated by autograd."""
    leaves = tuple(eps.detach().requires_grad_() for eps in noise)
    with torch.enable_grad():
        values = function(leaves)
        total = (values * target.weight.to(values)).sum()
    found = slopes_at(total, leaves)
    values = values.detach()
    return moments_along(target, noise, found, values), values


def slopes_at(total: Tensor, leaves: Noise) -> Noise:
    """Derivatives of ``total`` in the noise; 0 where it does not depend on the noise at all."""
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if total.requires_grad:
        found = torch.autograd.grad(total, leaves, allow_unused=True)
    both = zip(leaves, found, strict=True)
    return tuple(torch.zeros_like(eps) if grad is None else grad for eps, grad in both)


def moments_along(target: Target, noise: Noise, grads: Noise, values: Tensor) -> Moments:
    """The pathwise form, from the values (S, B) at the noise and the derivatives of their weighted sum."""
    weight = target.weight.to(values)
    # An example without weight has no gradient here either: 0, and not 0 / 0.
    share = torch.where(weight > 0, weight, 1)[:, None, None]
    slopes, bends = [], []
    for group, eps, grad in zip(target.groups, noise, grads, strict=True):
        if group.mask is None:
            bend = eps.T @ grad / len(eps) if group.full else (eps * grad).mean(0)
            bends.append(0.5 * (bend + bend.T) if group.full else bend)
        else:
            grad = grad / share
            bend = (eps.permute(1, 3, 2, 0) @ grad.permute(1, 3, 0, 2)) / len(eps)
            bends.append(0.5 * (bend + bend.mT))
        slopes.append(grad.mean(0))
    return masked(target, Moments(values.mean(0), tuple(slopes), tuple(bends)))


def masked(target: Target, moments: Moments) -> Moments:
    """The moments, set to 0 at padding."""
    slopes, bends = list(moments.slopes), list(moments.bends)
    for k, mask in enumerate(group.mask for group in target.groups):
        if mask is not None:
            both = mask[:, None, :, None] & mask[:, None, None, :]
            slopes[k], bends[k] = torch.where(mask[..., None], slopes[k], 0), torch.where(both, bends[k], 0)
    return Moments(moments.value, tuple(slopes), tuple(bends))
