"""The linear kernel with a relevance of its own for every feature, in groups.

    k(x, z) = b + sum_d s_g(d) r_d x_d z_d

s_g : the scale of a group of features (a template), r_d : the relevance of one of them, b : the scale of
label frequencies. As a prior on weights, feature d has variance s r_d; under r_d ~ inverse-gamma(nu / 2,
nu / 2) a feature's weights are multivariate Student-t: most features say little, some say much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from structgp.kernels.sparse import inner_product, pack, row_products, unpack
from structgp.kernels.template import MISSING


def degrees_of_freedom(n_functions: int) -> float:
    """nu of the Student-t prior of a feature's R weights: heavy tails where there are many of them, which
    together tell what the feature is worth; a single weight hardly does."""
    return 1.0 + 3.0 / n_functions


class RelevanceKernel(Kernel):
    """Rows are P value ids (``sizes`` has P entries: how many values of each template are known), or
    with ``sparse`` packed pairs of feature id and value (``sizes`` has one entry).

    Parameters ``log_scale`` (G + 1,), the last is the bias's; ``log_relevance`` (D,), of the known
    features, group after group. A feature that was never seen has relevance 1: what its group has taught
    of features. Cost of n x m values with A active features a row: O(n m A).
    """

    has_lengthscale = False

    def __init__(self, sizes: Sequence[int], sparse: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if sparse and len(sizes) != 1:
            raise ValueError(f"sparse features are one group, not {len(sizes)}")
        self.sizes, self.sparse = [int(n) for n in sizes], bool(sparse)
        G, D = len(self.sizes), sum(self.sizes)
        self.register_parameter("log_scale", torch.nn.Parameter(torch.zeros(G + 1)))
        self.register_parameter("log_relevance", torch.nn.Parameter(torch.zeros(D)))

    @property
    def group(self) -> Tensor:
        """(D,) which group a feature belongs to."""
        sizes = torch.tensor(self.sizes, device=self.log_scale.device)
        return torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)

    @property
    def weights(self) -> Tensor:
        """(D,) prior variance of the weight of each known feature."""
        return (self.log_scale[self.group] + self.log_relevance).exp()

    def scales(self, names: Sequence[str]) -> dict[str, float]:
        """The scale of each group, and of the label frequencies."""
        found = self.log_scale.detach().exp().tolist()
        return dict(zip([*names, "label frequency"], found, strict=True))

    def known(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(..., A) place of each active feature among the D known ones, -1 for others, and (..., A) its
        value."""
        if self.sparse:
            ids, values = unpack(x)
            n = self.sizes[0]
            return torch.where(ids < n, ids, -1.0).long(), values
        if x.shape[-1] != len(self.sizes):
            raise ValueError(f"rows of {x.shape[-1]} columns for {len(self.sizes)} templates")
        sizes = torch.tensor(self.sizes, dtype=x.dtype, device=x.device)
        start = sizes.cumsum(0) - sizes
        place = torch.where((x != MISSING) & (x < sizes), x + start, -1.0)
        return place.long(), (x != MISSING).to(x.dtype)

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **_: Any
    ) -> Tensor:
        if last_dim_is_batch:
            raise NotImplementedError("RelevanceKernel has no last_dim_is_batch form")
        bias = self.log_scale[-1].exp()
        left, right = self._weighted(x1), self._weighted(x2)
        return (row_products if diag else inner_product)(left, right) + bias

    def _weighted(self, x: Tensor) -> Tensor:
        """Packed rows whose inner product is the kernel, but for the bias."""
        place, values = self.known(x)
        root = (0.5 * self.log_relevance).exp()
        relevance = torch.where(place >= 0, root[place.clamp(min=0)], 1.0)
        scale = (0.5 * self.log_scale[:-1]).exp()
        if self.sparse:
            return pack(unpack(x)[0], values * relevance * scale)
        # Ids of different templates must not meet.
        P = len(self.sizes)
        ids = torch.where(x == MISSING, -1.0, x * P + torch.arange(P, dtype=x.dtype))
        return pack(ids, values * relevance * scale)
