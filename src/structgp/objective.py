"""The evidence lower bound (``eq:elbo-sparse``):

    ELBO = E_q[ sum_n log p(y_n | f_n, g) ] - KL(q(u) || p(u)) - KL(q(g) || p(g)).

This is where a structure and the GP meet: the bound sees a likelihood's values and a posterior's
draws, and nothing else of either.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from structgp.gp import Conditional, Noise, Posterior
from structgp.gradients import LogProb, expected_log_prob


@dataclass(frozen=True)
class Bound:
    """elbo = expected_log_prob - kl_inducing - kl_pairwise, all scalars, differentiable."""

    elbo: Tensor
    expected_log_prob: Tensor
    kl_inducing: Tensor
    kl_pairwise: Tensor


def evidence_lower_bound(
    posterior: Posterior,
    log_prob: LogProb,
    conditional: Conditional,
    y: Tensor,
    mask: Tensor,
    noise: Noise,
    *,
    scale: float = 1.0,
) -> Bound:
    """The bound from B sequences; ``scale`` = N / B makes a batch stand for all N of them.

    y, mask : (B, T). Cost O(S B (V M^2 + T V M + T V^2)) with the chain.
    """
    f = posterior.at(conditional).rsample(noise)  # eq:bkjn-skjn
    g = posterior.sample_pairwise(noise)
    expected = scale * expected_log_prob(log_prob, f, g, y, mask).value.sum()  # eq:ellhat
    kl_inducing = posterior.kl_inducing()  # klun
    kl_pairwise = posterior.kl_pairwise()  # klbin
    return Bound(expected - kl_inducing - kl_pairwise, expected, kl_inducing, kl_pairwise)
