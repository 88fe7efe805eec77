"""Learns the kernel on the evidence of the problem with a Gaussian likelihood in place of the real one.

Which templates matter, and how far apart two tokens may be, are questions about the kernel that do not
need the structured likelihood: replace it by Gaussian regression of the one-hot labels of single
tokens, and the evidence has a closed form,

    log N(Y; 0, K + s2 I),   Y (N, V) centred one-hot labels, one Cholesky for all V columns,

so that a few dozen gradient steps cost a few N^3. Only the SHAPE of the kernel is taken from it: the
size of a regression function says nothing about the size of a log-potential.

The noise has a floor. Labels also depend on their neighbours' labels, so the features of one token must
not be asked to explain them fully; without the floor, templates that single out each token (long
n-grams) explain everything and predict nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # its parts are imported when they are used
import torch
from gpytorch.kernels import Kernel
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from structgp.gp.kernels import covariance, variance
from structgp.gp.kernels.template import keeping_patterns
from structgp.gp.linalg import cholesky, inverse_from_lower

NOISE_FLOOR = 0.25
"""Smallest share of the labels' variance that is left to noise."""

PRIOR_SD = 10.0
"""Prior standard deviation of the raw (about logarithmic) parameters around where they start: weak, but
enough to keep a length-scale that the data do not determine from running away."""

MAX_TOKENS = 1_000
MAX_STEPS = 25


@dataclass(frozen=True)
class Relaxation:
    """evidence : before and after; steps : number of evaluations; tokens : number of tokens used."""

    evidence: tuple[float, float]
    steps: int
    tokens: int


def shape_parameters(kernel: Kernel) -> list[nn.Parameter]:
    """All parameters that may move, except a factor on the whole kernel."""
    named = kernel.named_parameters()
    return [p for name, p in named if name != "raw_outputscale" and p.requires_grad]


def learn_shape(
    kernel: Kernel,
    rows: Sequence[Tensor],
    labels: Sequence[Tensor],
    generator: torch.Generator,
    most: int = MAX_TOKENS,
) -> Relaxation:
    """Moves the kernel's parameters, in place, to the relaxation's optimum.

    Parameters with ``requires_grad`` off stay as they are; priors registered with GPyTorch are not used.

    Parameters
    ----------
    rows, labels : one (T, W) and one (T,) tensor per sequence. At most ``most`` tokens, from sequences
        drawn at random, are used. Cost O(steps * N^2 (N + W)).
    """
    x, y = _some_tokens(rows, labels, generator, most)
    targets = nn.functional.one_hot(y).to(x.dtype)
    targets = targets - targets.mean(0)
    targets = targets / targets.square().mean().sqrt().clamp(min=1e-12)
    with torch.no_grad():
        size = float(variance(kernel, x).mean())
    scale = nn.Parameter(x.new_tensor(math.log(0.5 / max(size, 1e-12))))
    noise = nn.Parameter(x.new_tensor(0.0))
    parameters = [*shape_parameters(kernel), scale, noise]
    start = parameters_to_vector(parameters).detach().cpu().numpy()

    def negative(flat: np.ndarray) -> tuple[float, np.ndarray]:
        vector_to_parameters(torch.tensor(flat).to(x), parameters)
        noise_variance = NOISE_FLOOR + (1 - NOISE_FLOOR) * noise.sigmoid()
        evidence = _log_evidence(kernel, x, targets, scale.exp(), noise_variance)
        grads = torch.autograd.grad(evidence, parameters, allow_unused=True, materialize_grads=True)
        away = (flat - start) / PRIOR_SD
        value = float(evidence.detach()) - 0.5 * float(away @ away)
        return -value, -parameters_to_vector(grads).cpu().numpy() + away / PRIOR_SD

    with keeping_patterns():
        before = -negative(start)[0]
        result: Any = scipy.optimize.minimize(
            negative, start, jac=True, method="L-BFGS-B", options={"maxiter": MAX_STEPS}
        )
    vector_to_parameters(torch.tensor(result.x).to(x), parameters)
    away = (result.x - start) / PRIOR_SD
    after = -float(result.fun) + 0.5 * float(away @ away)
    return Relaxation((before, after), int(result.nfev), len(x))


def _log_evidence(kernel: Kernel, x: Tensor, targets: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
    """() log evidence, with the right first derivatives: its gradient in the covariance of the targets is
    known in closed form, which takes half the time of backpropagating through the Cholesky factor."""
    N, V = targets.shape
    eye = torch.eye(N, dtype=x.dtype, device=x.device)
    prior = scale * covariance(kernel, x, x) + noise * eye
    with torch.no_grad():
        factor = cholesky(prior)
        inverse = inverse_from_lower(factor)
        dual = inverse @ targets
        value = -0.5 * (targets * dual).sum() - V * factor.diagonal().log().sum()
        slope = 0.5 * (dual @ dual.mT - V * inverse)
    return value - 0.5 * N * V * math.log(2 * math.pi) + (slope * (prior - prior.detach())).sum()


def _some_tokens(
    rows: Sequence[Tensor], labels: Sequence[Tensor], generator: torch.Generator, most: int
) -> tuple[Tensor, Tensor]:
    chosen: list[int] = []
    total = 0
    for i in torch.randperm(len(rows), generator=generator).tolist():
        if chosen and total + len(rows[i]) > most:
            continue
        chosen.append(i)
        total += len(rows[i])
    chosen.sort()
    x, y = torch.cat([rows[i] for i in chosen]), torch.cat([labels[i] for i in chosen])
    return x[:most], y[:most]  # one sequence alone may be longer
