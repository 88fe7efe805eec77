"""Pathwise gradients: differentiate through the draws.

E_q[log p(y | f, g)] with f = b + L eps is estimated by averaging log p over draws of eps; because
the draws are functions of the parameters, autograd carries the gradient through. Needs a
``log_prob`` that can be differentiated; 8 to 32 draws do what score estimators need thousands for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

LogProb = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Estimate:
    """value : (B,) estimate of E_q[log p] for each sequence, differentiable.
    spread : (B,) standard deviation of log p over the draws."""

    value: Tensor
    spread: Tensor


def expected_log_prob(log_prob: LogProb, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Estimate:
    """Averages log p over reparametrised draws f (S, B, T, V), g (S, V, V) (``eq:ellhat``)."""
    values = log_prob(f, g, y, mask)
    return Estimate(values.mean(0), values.detach().std(0, correction=0))
