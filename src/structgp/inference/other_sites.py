"""What the prior and all other batches say about the weights that occur in one batch.

The batch's own site is taken out before a visit and put in anew after it. Letters as in ``minibatch``."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from structgp.inference.batch_sites import LARGEST_SINGLE, Site
from structgp.threads import if_numba, share

WORTH_COMPILING = 20_000
"""Size of a site (F R) from which compiled loops are used: tiny problems never wait for numba to start."""


class Begun(NamedTuple):
    """Gaussians before a visit. variance, mean : (F, R) under the prior and all other batches. sd : (F, R)
    standard deviations with the site of this batch put in. divergence : that of the Gaussian with the site,
    see ``Others.divergence``."""

    variance: Tensor
    mean: Tensor
    sd: Tensor
    divergence: float


class Others:
    """What the prior and all other batches say about the F weights of one block that occur in a batch:
    prior_precision (F, 1); precision and linear (F, R), without the prior's. sums : precision and linear
    (M, R), summed over all sites. index, prior_sd : (F,). site : the batch's own. It is taken out in double
    precision; later computations have the precision of the site."""

    def __init__(self, sums: tuple[Tensor, Tensor], index: Tensor, prior_sd: Tensor, site: Site) -> None:
        prior_precision = prior_sd.square().reciprocal().clamp(max=LARGEST_SINGLE)[:, None]
        self.prior_precision, self._sums, self._index = prior_precision.to(site.linear), sums, index
        self._exact = sums[0][index].sub_(site.precision), sums[1][index].sub_(site.linear)
        self.precision, self.linear = (x.to(site.linear) for x in self._exact)

    def begin(self, site: Site, known: tuple[Tensor, Tensor] | None) -> Begun:
        """Before a visit: the Gaussian under the others, and what is needed of the one with the site put
        in."""
        precision, mean = self.gaussian()
        before = self.gaussian(site)
        divergence = self.divergence(*before, known)
        return Begun(precision.reciprocal_(), mean, before[0].rsqrt_(), divergence)

    def end(self, site: Site, known: tuple[Tensor, Tensor] | None) -> float:
        """After a visit: puts the new site in. Returns the divergence."""
        divergence = self.divergence(*self.gaussian(site), known)
        self.put_in(site)
        return divergence

    def gaussian(self, site: Site | None = None) -> tuple[Tensor, Tensor]:
        """Precision and mean (F, R), with a site put in, or without one."""
        precision = self.precision.clamp(min=0) if site is None else self.precision + site.precision
        precision = precision.clamp_(min=0).add_(self.prior_precision)
        return precision, (self.linear if site is None else self.linear + site.linear) / precision

    def put_in(self, site: Site) -> None:
        """Adds a site to the sums."""
        for whole, part, new in zip(self._sums, self._exact, (site.precision, site.linear), strict=True):
            whole[self._index] = part.add_(new)

    def divergence(self, precision: Tensor, mean: Tensor, known: tuple[Tensor, Tensor] | None) -> float:
        """Divergence of a Gaussian from the prior, minus the expected log of what was known at the start (a
        precision and a linear term, (F, R)), up to a constant."""
        square = mean.square().add_(precision.reciprocal())
        kl = 0.5 * float((self.prior_precision * square).sum() + precision.log().sum())
        return kl if known is None else kl - expected_log(*known, mean, square)


class CompiledOthers:
    """``Others`` in compiled loops, in single precision, for fits where nothing was known at the start."""

    def __init__(self, sums: tuple[Tensor, Tensor], index: Tensor, prior_sd: Tensor, site: Site) -> None:
        prior = prior_sd.square().reciprocal().clamp(max=LARGEST_SINGLE).to(site.linear)
        self._arrays = [x.numpy() for x in (*sums, index, prior, site.precision, site.linear)]

    @staticmethod
    def suits(site: Site) -> bool:
        enough = site.linear.numel() >= WORTH_COMPILING and site.linear.device.type == "cpu"
        return enough and site.linear.dtype == torch.float32 and compiled_sites() is not None

    def begin(self, site: Site, known: object = None) -> Begun:
        variance, mean, sd = (torch.empty_like(site.linear) for _ in range(3))
        return Begun(variance, mean, sd, self._shared(compiled_sites().take_out, variance, mean, sd))

    def end(self, precision: Tensor, say: Tensor, variance: Tensor, mean: Tensor) -> float:
        """Puts a new site in; returns the divergence. precision : (F, R), raised to at least 0 in place.
        say : (F, R) what the rows of the batch say, overwritten with the site's linear term."""
        return self._shared(compiled_sites().put_in, variance, mean, precision, say)

    def _shared(self, work: Any, *given: Tensor) -> float:
        """Runs a compiled loop on all units, shared among threads; returns the sum of their divergences."""
        units, cost = -(-len(self._arrays[2]) // compiled_sites().ROWS_AT_ONCE), 20 * given[0].numel()
        found = np.empty(units)
        share(partial(work, *self._arrays, *(x.numpy() for x in given), found), units, cost)
        return float(found.sum())


compiled_sites = if_numba("structgp.inference.compiled_sites")


def expected_log(precision: Tensor, linear: Tensor, mean: Tensor, square: Tensor) -> float:
    """The expected log of a Gaussian factor with this precision and linear term, up to a constant."""
    return float((linear * mean - 0.5 * precision * square).sum())
