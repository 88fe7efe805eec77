"""Random posteriors of every form, and a batch to see them on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel
from torch import Tensor

from structgp.data.batch import Batch
from structgp.gp import FullTable, Inducing, Mixture, Posterior, Table
from structgp.inference import Problem
from structgp.inference.estimators import Noise
from structgp.inference.latents import Latents
from structgp.structures import Chain

LENGTHS = (3, 1, 4)
B, T, V, W = 3, 4, 2, 2
TRANSITION_SD = 0.7

FORMS: dict[str, dict[str, Any]] = {
    "one full": {},
    "one diagonal": {"covariance": "diagonal", "full_table": True},
    "two full": {"n_components": 2, "full_table": True},
    "two diagonal": {"n_components": 2, "covariance": "diagonal"},
    "transitions with features": {"featured": True},
}

every_form = pytest.mark.parametrize("form", FORMS)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data() -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(B, T, W, generator=generator, dtype=torch.float64)
    y = torch.randint(V, (B, T), generator=generator)
    mask = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    return Batch(x, y, mask, torch.arange(B), edges=2 * normal(B, T - 1, 1, seed=5))


def kernel() -> RBFKernel:
    made = RBFKernel().double()
    made.lengthscale = torch.tensor(1.0, dtype=torch.float64)
    return made


def random_posterior(inducing: Tensor, form: str = "one full") -> Posterior:
    options = dict(FORMS[form])
    full, featured = options.pop("full_table", False), options.pop("featured", False)
    family: Any = Mixture if "n_components" in options else Inducing
    after: Any = (FullTable if full else Table)((V, V), TRANSITION_SD)
    if featured:
        after = Inducing(kernel(), normal(3, 1, seed=6), (V, V))
    posterior = Posterior({"node": family(kernel(), inducing, (V,), **options), "next": after})
    with torch.no_grad():
        for i, (name, p) in enumerate(posterior.named_parameters()):
            if not any(word in name for word in ("kernel", "log_amplitude")):
                p += 0.4 * normal(*p.shape, seed=10 + i)
    return posterior


def draws(posterior: Posterior, S: int, B: int = B, T: int = T, seed: int = 2) -> Noise:
    """Standard normal numbers of both blocks, for B examples of each component."""
    B = B * posterior.n_components
    after = posterior["next"]
    shape = (S, V * V) if after.shared else (S, B, T - 1, V * V)
    return normal(S, B, T, V, seed=seed), normal(*shape, seed=seed + 100)


def conditionals(posterior: Posterior, batch: Batch) -> list[Any]:
    """p(h | values) of every block, differentiable in the kernels' parameters if gradients are on."""
    grad = torch.is_grad_enabled()
    return Problem(posterior, Chain(), [batch]).conditional(0, move_kernel=grad)


def latents(posterior: Posterior, batch: Batch) -> Latents:
    return Latents.of(posterior, conditionals(posterior, batch), batch.masks)
