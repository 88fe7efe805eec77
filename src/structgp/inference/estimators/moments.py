"""What the bound needs of a log-likelihood, in whitened coordinates.

Write the latent values of a sequence as f_j = b_j + L_j eps_j for each label j, and the pairwise
scores as g = m_bin + L_bin eps_bin, with standard normal eps. As a function of eps the log-likelihood
is l(eps), and by the theorems of Bonnet and Price

    grad_b = L^-T E[grad l],       grad_Sigma = 1/2 L^-T E[hessian l] L^-1,

whatever l is. So an estimator of E[l], of E[grad l] (the ``slope``) and of the label blocks of
E[hessian l] (the ``bend``) serves every parameter behind b and Sigma: inducing means and covariances,
amplitude, kernel. Two unbiased forms of both expectations are known:

    score     E[eps l]            E[(eps eps^T - I) l]          values of l
    pathwise  E[grad l]           E[sym(eps grad l^T)]          its gradient

What is written f here may be any R functions that latent values are made of: nothing below asks.
Letters: S draws, B sequences in a batch, T positions (padded), V labels, R functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Function = Callable[[Tensor, Tensor], Tensor]
"""(S, B, T, R), (S, V, V) standard normal numbers -> (S, B), or (S, B, C) for C functions."""


@dataclass(frozen=True)
class Target:
    """A log-likelihood whose expectation, slope and bend are wanted.

    log_prob : l(eps) of B sequences. mask : (B, T). weight : (B,) of each sequence in what is summed
    over sequences. n_functions : R, V unless given. pairs_are_full : whether the bend of the pairwise
    scores is wanted whole. parts : cheap differentiable functions that resemble l, if there are any.
    dtype : of the draws; they live where the mask does.
    """

    log_prob: Function
    mask: Tensor
    weight: Tensor
    n_labels: int
    pairs_are_full: bool = False
    parts: Function | None = None
    dtype: torch.dtype = torch.float64
    n_functions: int = 0

    def __post_init__(self) -> None:
        if not self.n_functions:
            object.__setattr__(self, "n_functions", self.n_labels)


@dataclass(frozen=True)
class Draws:
    """Standard normal numbers: unary (S, B, T, R), pairwise (S, V, V)."""

    unary: Tensor
    pairwise: Tensor

    def __len__(self) -> int:
        return len(self.pairwise)

    def first(self, n: int) -> Draws:
        return Draws(self.unary[:n], self.pairwise[:n])


@dataclass(frozen=True)
class Moments:
    """value : (B,) E[l]. slope : (B, T, R) E[dl / deps]. bend : (B, R, T, T) second derivatives
    within each function. pair_slope : (V, V) and pair_bend : (V, V), or (V^2, V^2), the same for the
    pairwise scores, summed over sequences with their weights."""

    value: Tensor
    slope: Tensor
    bend: Tensor
    pair_slope: Tensor
    pair_bend: Tensor

    def __add__(self, other: Moments) -> Moments:
        return self.map(torch.add, other)

    def __sub__(self, other: Moments) -> Moments:
        return self.map(torch.sub, other)

    def __mul__(self, other: Moments | float) -> Moments:
        if isinstance(other, Moments):
            return self.map(torch.mul, other)
        return self.map(lambda a: a * other)

    def map(self, function: Callable[..., Tensor], *others: Moments) -> Moments:
        """``function`` of each entry, with the same entries of ``others``."""
        fields = [vars(m).values() for m in (self, *others)]
        return Moments(*(function(*entries) for entries in zip(*fields, strict=True)))


@dataclass(frozen=True)
class Estimate:
    """moments : the estimate. variance : its variance, entry by entry, from independent replicates
    within it; nan where there was only one. spread : (B,) standard deviation of l over the draws.
    evaluations : likelihoods computed, sequences times draws."""

    moments: Moments
    variance: Moments
    spread: Tensor
    evaluations: int


def combine(parts: Sequence[Moments], sizes: Sequence[int]) -> tuple[Moments, Moments]:
    """The mean of independent estimates from so many draws each, and its variance."""
    share = [size / sum(sizes) for size in sizes]
    mean = parts[0] * share[0]
    for part, w in zip(parts[1:], share[1:], strict=True):
        mean = mean + part * w
    if len(parts) == 1:
        return mean, mean.map(lambda a: torch.full_like(a, torch.nan))
    variance = mean * 0.0
    for part, w in zip(parts, share, strict=True):
        away = part - mean
        variance = variance + away * away * (w / (len(parts) - 1))
    return mean, variance


def variance_of_mean(values: Tensor) -> Tensor:
    """(B,) of the mean of independent values (S, B); nan where there is only one."""
    S = len(values)
    return (values - values.mean(0)).square().sum(0) / (S * (S - 1))


def score_moments(target: Target, draws: Draws, values: Tensor) -> Moments:
    """The score form, from values (S, B) at the draws. Linear in the values.

    Cost O(S B V T^2 + S V^2), or O(S V^4) with full pairs.
    """
    S = len(draws)
    weighted = values / S
    e = draws.unary.permute(1, 3, 2, 0)  # (B, V, T, S)
    # Contiguous once: both products below read it along S.
    e = e.contiguous()
    ew = e * weighted.T[:, None, None, :]
    bend = ew @ e.mT
    total = weighted.sum(0)  # (B,)
    bend.diagonal(dim1=-1, dim2=-2).sub_(total[:, None, None])
    summed = weighted @ target.weight.to(values)  # (S,)
    flat = draws.pairwise.flatten(1)
    pair_slope = (summed @ flat).view_as(draws.pairwise[0])
    if target.pairs_are_full:
        pair_bend = (flat * summed[:, None]).T @ flat
        pair_bend.diagonal().sub_(summed.sum())
    else:
        pair_bend = ((summed @ flat.square()) - summed.sum()).view_as(pair_slope)
    return masked(target, Moments(total, ew.sum(-1).mT, bend, pair_slope, pair_bend))


def path_moments(target: Target, draws: Draws, function: Function) -> tuple[Moments, Tensor]:
    """The pathwise form, and the values (S, B); ``function`` is differentiated by autograd."""
    S = len(draws)
    unary = draws.unary.detach().requires_grad_()
    pairwise = draws.pairwise.detach().requires_grad_()
    with torch.enable_grad():
        values = function(unary, pairwise)
        weight = target.weight.to(values)
        total = (values * weight).sum()
        grads: Sequence[Tensor | None] = (None, None)
        # A function may happen not to depend on its latent values at all.
        if total.requires_grad:
            grads = torch.autograd.grad(total, (unary, pairwise), allow_unused=True)
    # What has no weight has no gradient here either: 0, and not 0 / 0.
    share = torch.where(weight > 0, weight, 1)[:, None, None]
    grad = torch.zeros_like(unary) if grads[0] is None else grads[0] / share
    pair_grad = torch.zeros_like(pairwise) if grads[1] is None else grads[1]
    e, d = draws.unary.permute(1, 3, 2, 0), grad.permute(1, 3, 0, 2)
    bend = (e @ d) / S
    flat, pair_flat = draws.pairwise.flatten(1), pair_grad.flatten(1)
    if target.pairs_are_full:
        pair_bend = flat.T @ pair_flat / S
        pair_bend = 0.5 * (pair_bend + pair_bend.T)
    else:
        pair_bend = (draws.pairwise * pair_grad).mean(0)
    values = values.detach()
    moments = Moments(
        values.mean(0), grad.mean(0), 0.5 * (bend + bend.mT), pair_grad.mean(0), pair_bend
    )
    return masked(target, moments), values


def masked(target: Target, moments: Moments) -> Moments:
    """Nothing at padding."""
    mask = target.mask
    both = mask[:, None, :, None] & mask[:, None, None, :]
    return Moments(
        moments.value,
        torch.where(mask[..., None], moments.slope, 0),
        torch.where(both, moments.bend, 0),
        moments.pair_slope,
        moments.pair_bend,
    )
