"""Joint draws of (f, g) from a posterior, which every answer averages over.

The draws are functions, fixed once from a seed: every sequence meets the same ones, so an answer does not
depend on what else is in the batch, on the order, or on padding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from structgp.data.batch import Batch
from structgp.gp import Posterior, WeightPosterior, noise_table, root_times


@dataclass(frozen=True)
class Draws(ABC):
    """S draws of (f, g), in antithetic pairs; S = 1 with ``plug_in`` is the posterior mean instead of a
    draw. pairwise : (S, V, V)."""

    pairwise: Tensor
    plug_in: bool

    @abstractmethod
    def unary(self, posterior: Posterior, batch: Batch) -> Tensor:
        """(S, B, T, V) the drawn functions at the rows of a batch, joint over positions."""


def sample(posterior: Posterior, n: int, seed: int) -> Draws:
    """n draws, rounded up to an even number."""
    kind = WeightDraws if isinstance(posterior, WeightPosterior) else FunctionDraws
    return kind.sample(posterior, n, seed)


def mean(posterior: Posterior) -> Draws:
    """The posterior mean as one 'draw'."""
    kind = WeightDraws if isinstance(posterior, WeightPosterior) else FunctionDraws
    return kind.mean(posterior)


@dataclass(frozen=True)
class FunctionDraws(Draws):
    """Draws of inducing values.

    inducing : (S, R, M) whitened inducing values of the functions; prior_factor : (M, M) L_zz; seed : of
    the part of f that the inducing values leave open.
    """

    inducing: Tensor
    prior_factor: Tensor
    seed: int

    @staticmethod
    def sample(posterior: Posterior, n: int, seed: int) -> FunctionDraws:
        """n draws, rounded up to an even number, a pair always from one component of the mixture.
        Cost O(n R M^2), or O(n R M r) if the posterior is low-rank."""
        half = (n + 1) // 2
        rng = np.random.default_rng(seed)
        (_, R, M), V = posterior.m.shape, posterior.n_labels
        with torch.no_grad():
            eps = torch.from_numpy(rng.standard_normal((half, R, M))).to(posterior.m)
            pair = torch.from_numpy(rng.standard_normal((half, V, V))).to(posterior.m)
            component = _components(posterior.weights, half, rng)
            centre, spread = posterior.m[component], torch.empty_like(eps)
            for k in range(posterior.n_components):
                here = component == k
                spread[here] = root_times(posterior.spread[k], eps[here])
            g = posterior.pairwise()
            return FunctionDraws(
                torch.cat([g.place(pair), g.place(-pair)]),
                False,
                torch.cat([centre + spread, centre - spread]),
                posterior.prior_factor(),
                seed,
            )

    @staticmethod
    def mean(posterior: Posterior) -> FunctionDraws:
        """The posterior mean, of a mixture sum_k pi_k m_k, as one 'draw'."""
        with torch.no_grad():
            m = torch.einsum("k,krm->rm", posterior.weights, posterior.m)
            g = posterior.pairwise().mean.clone()
            return FunctionDraws(g[None], True, m[None], posterior.prior_factor(), 0)

    def unary(self, posterior: Posterior, batch: Batch) -> Tensor:
        with torch.no_grad():
            conditional = posterior.conditional(batch.x, batch.mask, self.prior_factor)
            conditional = posterior.amplified(conditional)
            projection = conditional.projection.to(self.inducing)
            h = torch.einsum("btm,srm->sbtr", projection, self.inducing)
            if self.plug_in:
                return h @ posterior.basis.T
            S, R = self.inducing.shape[:2]
            # Position by position from a generator of its own: a longer sequence only adds numbers.
            rng = np.random.default_rng([self.seed, 1])
            eps = torch.from_numpy(rng.standard_normal((batch.mask.shape[1], S // 2, R))).to(h)
            rest = torch.einsum("btu,usr->sbtr", conditional.residual.to(h), eps)
            return (h + torch.cat([rest, -rest])) @ posterior.basis.T


@dataclass(frozen=True)
class WeightDraws(Draws):
    """Draws of weights, a feature's looked up in a table of noise when it is met: no memory grows with
    the number of features. prior_sd : (M,); table : (rows, R, S / 2)."""

    prior_sd: Tensor
    table: Tensor

    @staticmethod
    def sample(posterior: Posterior, n: int, seed: int) -> WeightDraws:
        half, V = (n + 1) // 2, posterior.n_labels
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            pair = torch.randn(half, V, V, generator=generator, dtype=posterior.m.dtype).to(
                posterior.m
            )
            g = posterior.pairwise()
            return WeightDraws(
                torch.cat([g.place(pair), g.place(-pair)]),
                False,
                posterior.prior_factor(),
                noise_table(posterior.n_functions, half, generator).to(posterior.m),
            )

    @staticmethod
    def mean(posterior: Posterior) -> WeightDraws:
        with torch.no_grad():
            g = posterior.pairwise().mean.clone()
            return WeightDraws(g[None], True, posterior.prior_factor(), g.new_empty(0))

    def unary(self, posterior: Posterior, batch: Batch) -> Tensor:
        with torch.no_grad():
            assert isinstance(posterior, WeightPosterior)
            conditional = posterior.conditional(batch.x, batch.mask, self.prior_sd)
            here = posterior.amplified(conditional)
            h = here.times(posterior.m[0])[None]
            if not self.plug_in:
                h = h + here.spread(posterior.factor[0].abs(), self.table)
            return h @ posterior.basis.T


def _components(weights: Tensor, n: int, rng: np.random.Generator) -> Tensor:
    """(n,) a component for each draw, by systematic resampling: component k comes n pi_k times,
    rounded up or down so that this is its expectation."""
    edges = weights.cumsum(0).cpu().numpy()[:-1]
    places = (np.arange(n) + rng.random()) / n
    return torch.from_numpy(np.searchsorted(edges, places, side="right")).to(weights.device)
