"""From a posterior to answers: averaged marginals, decodings, probabilities of labellings.

Everything is an average over S joint draws of (f, g) from q. The draws are functions, fixed once
from a seed: every sequence meets the same ones, so an answer does not depend on what else is in
the batch, on the order, or on padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from structgp.data.batch import Batch
from structgp.gp import Posterior
from structgp.structures import Structure


@dataclass(frozen=True)
class Draws:
    """S draws of the latent functions, in antithetic pairs.

    inducing : (S, R, M) whitened inducing values of the functions; pairwise : (S, V, V); prior_factor :
    (M, M) L_zz; seed : of the part of f that the inducing values leave open. S = 1 with ``plug_in`` is
    the posterior mean instead of a draw.
    """

    inducing: Tensor
    pairwise: Tensor
    prior_factor: Tensor
    seed: int
    plug_in: bool = False

    @staticmethod
    def sample(posterior: Posterior, n: int, seed: int) -> Draws:
        """n draws, rounded up to an even number, a pair always from one component of the mixture.
        Cost O(n R M^2)."""
        half = (n + 1) // 2
        rng = np.random.default_rng(seed)
        (_, R, M), V = posterior.m.shape, posterior.n_labels
        with torch.no_grad():
            eps = torch.from_numpy(rng.standard_normal((half, R, M))).to(posterior.m)
            pair = torch.from_numpy(rng.standard_normal((half, V, V))).to(posterior.m)
            component = _components(posterior.weights, half, rng)
            centre, spread = posterior.m[component], torch.empty_like(eps)
            for k, factor in enumerate(posterior.factor):
                here = component == k
                spread[here] = _spread(factor, eps[here])
            g = posterior.pairwise()
            return Draws(
                torch.cat([centre + spread, centre - spread]),
                torch.cat([g.place(pair), g.place(-pair)]),
                posterior.prior_factor(),
                seed,
            )

    @staticmethod
    def mean(posterior: Posterior) -> Draws:
        """The posterior mean, of a mixture sum_k pi_k m_k, as one 'draw'."""
        with torch.no_grad():
            m = torch.einsum("k,krm->rm", posterior.weights, posterior.m)
            g = posterior.pairwise().mean.clone()
            return Draws(m[None], g[None], posterior.prior_factor(), 0, True)

    def unary(self, posterior: Posterior, batch: Batch) -> Tensor:
        """(S, B, T, V) the drawn functions at the rows of a batch, joint over positions."""
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
            eps = torch.from_numpy(rng.standard_normal((batch.mask.shape[1], S // 2, R)))
            rest = torch.einsum("btu,usr->sbtr", conditional.residual, eps).to(h)
            return (h + torch.cat([rest, -rest])) @ posterior.basis.T


def _components(weights: Tensor, n: int, rng: np.random.Generator) -> Tensor:
    """(n,) a component for each draw, by systematic resampling: component k comes n pi_k times,
    rounded up or down so that this is its expectation."""
    edges = weights.cumsum(0).numpy()[:-1]
    places = (np.arange(n) + rng.random()) / n
    return torch.from_numpy(np.searchsorted(edges, places, side="right"))


def _spread(factor: Tensor, eps: Tensor) -> Tensor:
    """(S, R, M) L eps, with L (R, M, M) lower triangular or (R, M) standard deviations."""
    if factor.dim() == 2:
        return factor * eps
    return torch.einsum("rmk,srk->srm", factor.tril(), eps)


def marginals(posterior: Posterior, structure: Structure, draws: Draws, batch: Batch) -> Tensor:
    """(B, T, V) label probabilities, averaged over draws: Bayes-optimal token by token."""
    f = draws.unary(posterior, batch)
    return structure.marginals(f, draws.pairwise, batch.mask).mean(0)


def viterbi(posterior: Posterior, structure: Structure, mean: Draws, batch: Batch) -> Tensor:
    """(B, T) the best whole labelling under the posterior mean, ``Draws.mean``."""
    return structure.decode(mean.unary(posterior, batch), mean.pairwise, batch.mask)[0]


def log_prob(posterior: Posterior, structure: Structure, draws: Draws, batch: Batch) -> Tensor:
    """(B,) log of the probability of labelling ``batch.y``, averaged over draws."""
    f = draws.unary(posterior, batch)
    with torch.no_grad():
        values = structure.log_prob(f, draws.pairwise, batch.y, batch.mask)
        return torch.logsumexp(values, 0) - np.log(len(values))
