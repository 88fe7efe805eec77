"""A mixture of K Gaussians over the inducing values of all functions: q(v) = sum_k pi_k prod_j N(m_kj,
S_kj).

This is the paper's family. Its entropy has no closed form, so the bound itself has to be bounded
(``gp.divergences``). No closed-form updates exist: Adam and the paper's own optimisers fit it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from torch import Tensor, nn

from structgp.errors import InputError
from structgp.gp.block import Entropy
from structgp.gp.divergences import divergence
from structgp.gp.families.inducing import Inducing, InducingDraws
from structgp.gp.families.inducing_points import InducingBlock
from structgp.gp.inducing_inputs import Projection, gaussian_of
from structgp.gp.spreads import root_times, traces


class Mixture(InducingBlock):
    """n_components : K; see :class:`InducingBlock` for the rest. Parameters ``weight_logits`` (K,) and
    those of :class:`Inducing` with a leading K. All components start at the prior with equal weights:
    they have to be moved apart (``separate``), since equal components have equal gradients."""

    name = "mixture"
    takes_curvature = False
    takes_sites = False

    def __init__(
        self, kernel: Kernel, inducing: Tensor, labels: Sequence[int], *, n_components: int = 2, **form: Any
    ) -> None:
        if n_components < 1:
            raise InputError("n_components", f"must be 1 or more, got {n_components}", "use 1")
        super().__init__(kernel, inducing, labels, components=(n_components,), **form)
        self.n_components = n_components
        self.weight_logits = nn.Parameter(torch.zeros(n_components, dtype=torch.float64))

    @property
    def mixing(self) -> Tensor:
        return self.weight_logits.softmax(0)

    def options(self) -> dict[str, Any]:
        return super().options() | {"n_components": self.n_components}

    def gaussian(self, conditional: Projection) -> tuple[Tensor, Tensor]:
        """Means (K, B, T, R) and covariances (K, B, R, T, T) of the functions in each component."""
        here = conditional.scaled(self.scale)
        parts = [gaussian_of(here, m, self.spread[k]) for k, m in enumerate(self.m)]
        means, covariances = zip(*parts, strict=True)
        return torch.stack(means), torch.stack(covariances)

    def kl(self, entropy: Entropy = "bhattacharyya") -> Tensor:
        """An upper bound on KL(q(u) || p(u)): the cross-entropy minus a lower bound on the entropy."""
        return divergence(self.weight_logits.log_softmax(0), self.m, self.spread, entropy)

    def effective_parameters(self) -> Tensor:
        """() the number for a single Gaussian, averaged over components."""
        return self.mixing @ (self.n_values - traces(self.m, self.spread)).sum(-1)

    def spread_parameters(self) -> list[nn.Parameter]:
        extra = [self.weight_logits] if self.n_components > 1 else []
        return super().spread_parameters() + extra

    def draws(self, n: int, seed: int, generator: torch.Generator) -> InducingDraws:
        """n draws, rounded up to mirrored pairs; both draws of a pair come from the same component."""
        half = (n + 1) // 2
        shape = half, self.n_functions, self.n_values
        eps = torch.randn(shape, generator=generator, dtype=self.m.dtype).to(self.m)
        component = _components(self.mixing, half, np.random.default_rng([seed, 0]))
        centre, spread = self.m[component], torch.empty_like(eps)
        for k in range(self.n_components):
            here = component == k
            spread[here] = root_times(self.spread[k], eps[here])
        both = torch.cat([centre + spread, centre - spread])
        return InducingDraws(both, self.prior_factor(), seed)

    def mean_draw(self) -> InducingDraws:
        """The mean of the mixture, sum_k pi_k m_k."""
        mean = torch.einsum("k,krm->rm", self.mixing, self.m)
        return InducingDraws(mean[None], self.prior_factor(), None)

    def alone(self) -> Inducing:
        """A posterior with one component under the same prior."""
        place = self.kernel, self.inducing, self.labels
        made = Inducing(*place, basis=self.basis, **super().options()).to(self.m.device)
        with torch.no_grad():
            made.log_amplitude.copy_(self.log_amplitude)
        return made

    def copy_from(self, one: Inducing) -> None:
        """Sets every component to ``one``, all with equal weights. With the Bhattacharyya entropy, the
        bound is then exactly that of ``one``."""
        found: dict[str, Any] = one.state_dict()
        with torch.no_grad():
            for name, value in self.state_dict().items():
                if name == "weight_logits":
                    value.zero_()
                else:
                    value.copy_(found[name].expand_as(value))

    def separate(self, generator: torch.Generator, by: float) -> None:
        """Moves the components' means apart, at random, by ``by`` posterior standard deviations."""
        if self.n_components == 1:
            return
        with torch.no_grad():
            noise = torch.randn(self.m.shape, generator=generator, dtype=self.m.dtype).to(self.m)
            for k in range(self.n_components):
                self.m[k] += by * root_times(self.spread[k], noise[k])


def _components(weights: Tensor, n: int, rng: np.random.Generator) -> Tensor:
    """(n,) a component for each draw, by systematic resampling: component k occurs n pi_k times, rounded up
    or down at random so that n pi_k is the expectation."""
    edges = weights.detach().cumsum(0).cpu().numpy()[:-1]
    places = (np.arange(n) + rng.random()) / n
    return torch.from_numpy(np.searchsorted(edges, places, side="right")).to(weights.device)
