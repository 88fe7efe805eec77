"""Gradients from values of the likelihood alone: the supplement's estimators, also at better points.

The raw score form multiplies l itself by the score, and most of its variance comes from the mean of l.
There are three ways to remove this, none of which changes the expectation:

* the paper's control variate: subtract a-hat times the score, entry by entry, with a-hat = Cov[score l,
  score] / Var[score] from a tenth of the draws, which are not used for anything else;
* leave-one-out: subtract from each value the mean of the others;
* if the points of a replicate depend on one another: subtract the mean over the other replicates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Generator, Tensor

from structgp.inference.estimators.designs import Design, draw, replicate_sizes
from structgp.inference.estimators.moments import (
    Estimate,
    Estimator,
    Moments,
    Noise,
    Target,
    combine,
    score_moments,
    variance_of_mean,
)

Baseline: TypeAlias = Literal["none", "control-variate", "mean"]

REPLICATES = 8
TENTHS = 10


@dataclass(frozen=True)
class Score(Estimator):
    """Score gradients with a choice of points (``designs``) and of baseline. baseline : what is subtracted:
    'none', 'control-variate' (the paper's) or 'mean' (leave-one-out for independent points,
    leave-one-replicate-out for others)."""

    name: str
    design: Design
    baseline: Baseline
    n_draws: int = 1024

    def __call__(self, target: Target, generator: Generator, memory: Moments | None = None) -> Estimate:
        """Cost: S likelihoods of every sequence, and O(S B V T^2). ``memory`` is not used."""
        tenths = self.baseline == "control-variate"
        sizes = replicate_sizes(self.n_draws, TENTHS if tenths else REPLICATES, self.design)
        values: list[Tensor] = []
        with_values, with_ones = [], []
        gain: Moments | None = None
        for noise in draw(target, self.design, sizes, generator):
            l = target.log_prob(noise)
            values.append(l)
            if tenths and len(sizes) > 1 and gain is None:
                gain = _control_variate(target, noise, l)
                continue
            with_values.append(score_moments(target, noise, l))
            if self.baseline != "none":
                with_ones.append(score_moments(target, noise, torch.ones_like(l)))
        parts = with_values
        if gain is not None:
            parts = [m1 - gain * m0 for m1, m0 in zip(with_values, with_ones, strict=True)]
            sizes = sizes[1:]
        elif self.baseline == "mean" and len(sizes) > 1:
            parts = self._less_mean(target, values, with_values, with_ones)
        # Points of a replicate that depend on one another say little about the variance of their mean.
        every, iid = torch.cat(values), self.design == "iid"
        scatter = variance_of_mean(every) if iid else combine(with_values, sizes)[1].value
        return Estimate.of(parts, sizes, values, scatter)

    def _less_mean(
        self, target: Target, values: list[Tensor], with_values: list[Moments], with_ones: list[Moments]
    ) -> list[Moments]:
        count = sum(len(l) for l in values)
        total = torch.stack([l.sum(0) for l in values]).sum(0)
        parts = []
        for l, m1, m0 in zip(values, with_values, with_ones, strict=True):
            if self.design == "iid":
                # Leaving each value out of its own baseline gives S / (S - 1) (l - mean of all).
                less, stretch = total / count, count / (count - 1)
            else:
                less, stretch = (total - l.sum(0)) / (count - len(l)), 1.0
            parts.append((m1 - _times(target, m0, less)) * stretch)
        return parts


def _times(target: Target, ones: Moments, baseline: Tensor) -> Moments:
    """Score moments of values that are ``baseline`` (B,) at every draw, from those of values 1."""
    # For values 1, a sum over examples contains the sum of the sample weights.
    weight = target.weight.to(baseline)
    shared = (weight @ baseline) / weight.sum()
    return ones.map_groups(
        target.groups, lambda a: a * baseline.view(-1, *[1] * (a.dim() - 1)), lambda a: a * shared
    )


def _control_variate(target: Target, noise: Noise, values: Tensor) -> Moments:
    """a-hat = Cov[h l, h] / Var[h] for each entry h of the score."""
    ones, total = torch.ones_like(values), float(target.weight.sum())

    def unweighted(moments: Moments) -> Moments:
        # Examples share one score h, so the sum over examples contains the sum of the sample weights.
        return moments.map_groups(target.groups, lambda a: a, lambda a: a / total)

    hl, h = score_moments(target, noise, values), unweighted(score_moments(target, noise, ones))
    hhl = score_moments(target, noise, values, squared=True)
    hh = unweighted(score_moments(target, noise, ones, squared=True))
    covariance, variance = hhl - hl * h, hh - h * h
    gain = covariance.map(lambda c, v: torch.where(v > 0, c / v, 0), variance)
    # The gain will be multiplied by moments of ones, whose sums contain the sample weights: divide by them.
    return unweighted(gain)
