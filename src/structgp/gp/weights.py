"""The posterior in weight space, for kernels that are linear in features.

A sparse GP may be conditioned on any linear functionals of its functions in the place of values at inducing
inputs. Here they are the weights themselves: K_uu is diagonal, what they leave open is nothing, and a row
of A active features touches A of them. Whitened, beta_d = sqrt(w_d) v_d with q(v) = prod N(m, s^2), this is
the posterior of ``gp.posterior`` with a diagonal covariance, M weights as its inducing values, and the
projection A = X sqrt(w), which has as many entries that are not 0 as the data has features.

Cost is linear in the data. The price is that q has no correlations between weights; its gain, that none
of them is left out. Letters as in ``gp.posterior``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import scipy.sparse
import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from structgp.gp.kernels import ActiveFeatures, active_features, weight_variances
from structgp.gp.kernels.sparse import inner_product, pack
from structgp.gp.posterior import PairwiseForm, Posterior

NOISE_ROWS = 1 << 13
"""Rows of a table of noise. Two features of one token share a row, and with it their noise, once in so
many pairs."""


class SparseRows:
    """X (N, M), what N rows hold of each of M features, to be multiplied with from both sides: by SciPy on
    the host, by torch on the device that its entries came from."""

    def __init__(self, place: Tensor, value: Tensor, n_weights: int) -> None:
        """place, value : (N, A); negative places are left out."""
        there = (place >= 0) & (value != 0)
        counts = there.sum(1).cpu().numpy()
        bounds = np.concatenate([[0], np.cumsum(counts)])
        entries = value[there].cpu().numpy(), place[there].cpu().numpy(), bounds
        self._set(scipy.sparse.csr_array(entries, shape=(len(place), n_weights)), value.device)

    def _set(self, x: scipy.sparse.csr_array, device: torch.device) -> None:
        self._x, self._device, xt = x, device, x.T.tocsr()
        self._by = [_multiplier(a, device) for a in (x, xt, xt.multiply(xt).tocsr())]

    @cached_property
    def single(self) -> SparseRows:
        """The same in single precision."""
        made = SparseRows.__new__(SparseRows)
        made._set(self._x.astype(np.float32), self._device)
        return made

    def times(self, weights: Tensor) -> Tensor:
        """X weights, (N, R) from (M, R)."""
        return self._by[0](weights)

    def transposed_times(self, values: Tensor) -> Tensor:
        """X^T values, (M, R) from (N, R)."""
        return self._by[1](values)

    def squares_times(self, values: Tensor) -> Tensor:
        """The same with the entries of X squared."""
        return self._by[2](values)


def _multiplier(x: scipy.sparse.csr_array, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Of a matrix X, what makes X B from B."""
    if device.type == "cpu":
        return lambda b: torch.from_numpy(x @ b.numpy())
    bounds, places, values = (torch.from_numpy(a) for a in (x.indptr, x.indices, x.data))
    there = torch.sparse_csr_tensor(bounds, places, values, size=x.shape, device=device)
    return lambda b: there @ b


@dataclass(frozen=True)
class WeightConditional:
    """f given the weights, on a batch: f = X beta, plus the weights of features never seen.

    features : of (B, T) rows, value 0 at padding. prior_sd : (M,). factor : on all of f.
    """

    features: ActiveFeatures
    prior_sd: Tensor
    factor: Tensor = field(default_factory=lambda: torch.ones(()))

    def scaled(self, factor: Tensor) -> WeightConditional:
        """The same under a kernel whose amplitude is ``factor`` squared times as large."""
        return replace(self, factor=self.factor * factor)

    @cached_property
    def rows(self) -> SparseRows:
        place, value = self.features.place, self.features.value
        return SparseRows(place.flatten(0, 1), value.flatten(0, 1), len(self.prior_sd))

    @cached_property
    def compact(self) -> tuple[Tensor, WeightConditional]:
        """(F,) the weights that occur in the batch, sorted, and the same of those alone."""
        found, local = torch.unique(self.features.place, return_inverse=True)
        unknown = int((found < 0).sum())  # -1 comes first, where there is any
        index = found[unknown:]
        features = replace(self.features, place=local - unknown)
        return index, replace(self, features=features, prior_sd=self.prior_sd[index])

    def times(self, m: Tensor) -> Tensor:
        """(B, T, R) A m of whitened weights (R, M)."""
        flat = self.rows.times((self.prior_sd * m).T.contiguous())
        return self.factor * flat.view(*self.features.value.shape[:2], -1)

    def transposed_times(self, values: Tensor) -> Tensor:
        """(R, M) A^T values, of (B, T, R)."""
        return self.factor * self.prior_sd * self.rows.transposed_times(values.flatten(0, 1)).T

    def squares_times(self, values: Tensor) -> Tensor:
        """(R, M) the same with the entries of A squared: what position by position precisions (B, T, R)
        say of each weight."""
        scale = (self.factor * self.prior_sd).square()
        return scale * self.rows.squares_times(values.flatten(0, 1)).T

    def spread(self, sd: Tensor, table: Tensor, keys: Tensor | None = None) -> Tensor:
        """(2 n, B, T, R) draws of f around its mean, joint over positions: a feature has one deviation for
        each draw and function, wherever it occurs. The second n mirror the first.

        sd : (R, M) of the whitened weights. table : (NOISE_ROWS, R, n) standard normal numbers. keys :
        (B,) numbers that give each sequence weights of its own; None for the same in all of them.
        Cost O(n B T A R).
        """
        found, total = self.features, None
        deviation = torch.cat([(self.prior_sd * sd).T, sd.new_zeros((1, len(sd)))])  # (M + 1, R)
        for a in range(found.place.shape[-1]):
            place = found.place[..., a]
            own = deviation[place]  # place -1 is the last row, of zeros
            own = own + (place < 0)[..., None] * found.unseen[..., a, None].sqrt()
            own = own * found.value[..., a, None]
            part = own[..., None] * table[_row(found.name[..., a], keys)]
            total = part if total is None else total.add_(part)
        assert total is not None
        half = self.factor * total.permute(3, 0, 1, 2)
        return torch.cat([half, -half])


def _row(name: Tensor, keys: Tensor | None) -> Tensor:
    """(B, T) which row of the table of noise is a feature's. The finaliser of splitmix64."""
    z = name if keys is None else name + keys[:, None] * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (z ^ ((z >> 31) & ((1 << 33) - 1))) & (NOISE_ROWS - 1)


def noise_table(n_functions: int, n: int, generator: torch.Generator) -> Tensor:
    """(NOISE_ROWS, R, n) standard normal numbers."""
    return torch.randn(NOISE_ROWS, n_functions, n, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class WeightGaussian:
    """q of the functions on a batch, as ``SequenceGaussian``; differentiable in m and factor, (K, R, M)."""

    conditional: WeightConditional
    m: Tensor
    factor: Tensor

    @property
    def mean(self) -> Tensor:
        """(K, B, T, R). Cost O(K B T A R)."""
        here, found = self.conditional, self.conditional.features
        place = found.place.clamp(min=0)
        value = here.factor * found.value * here.prior_sd[place] * (found.place >= 0)
        return (value[..., None] * self.m[..., place].permute(0, 2, 3, 4, 1)).sum(-2)

    @property
    def covariance(self) -> Tensor:
        """(K, B, R, T, T). Cost O(K B R T^2 F) for F features in a sequence."""
        here, found = self.conditional, self.conditional.features
        place = found.place.clamp(min=0)
        known = here.prior_sd[place] * self.factor[..., place]  # (K, R, B, T, A)
        deviation = torch.where(found.place >= 0, known, found.unseen.sqrt())
        deviation = here.factor * found.value * deviation
        K, R = self.factor.shape[:2]
        functions = [
            inner_product(packed, packed)
            for packed in (
                pack(found.name.to(d.dtype), d) for d in deviation.flatten(0, 1)
            )
        ]  # fmt: skip
        return torch.stack(functions, 1).unflatten(1, (K, R)).transpose(0, 1)


class WeightPosterior(Posterior):
    """q of the weights of a kernel that ``has_weights``, and of the pairwise scores.

    The parameters are those of :class:`Posterior` with a diagonal covariance; its inducing values are
    the M weights, which need no inducing rows.
    """

    def __init__(
        self,
        kernel: Kernel,
        n_labels: int,
        *,
        pairwise_sd: float = 1.0,
        n_components: int = 1,
        pairwise_covariance: PairwiseForm = "diagonal",
        basis: Tensor | None = None,
    ) -> None:
        with torch.no_grad():
            M = len(weight_variances(kernel))
        super().__init__(
            kernel,
            torch.empty(M, 0, dtype=torch.float64),
            n_labels,
            pairwise_sd=pairwise_sd,
            n_components=n_components,
            covariance="diagonal",
            pairwise_covariance=pairwise_covariance,
            basis=basis,
        )

    def prior_factor(self) -> Tensor:
        """(M,) the prior standard deviations of the weights: K_uu is diagonal."""
        return weight_variances(self.kernel).sqrt()

    def conditional(  # type: ignore[override]
        self, x: Tensor, mask: Tensor, factor: Tensor | None = None
    ) -> WeightConditional:
        """f given the weights at rows x (B, T, W). Cost O(B T W)."""
        factor = self.prior_factor() if factor is None else factor
        found = active_features(self.kernel, x)
        found = replace(found, value=torch.where(mask[..., None], found.value, 0))
        return WeightConditional(found, factor, factor.new_ones(()))

    def conditional_size(self, mask: Tensor, width: int) -> int:
        return 16 * mask.numel() * width

    def at(self, conditional: WeightConditional) -> WeightGaussian:  # type: ignore[override]
        return WeightGaussian(self.amplified(conditional), self.m, self.factor)

    def amplified(self, conditional: WeightConditional) -> WeightConditional:  # type: ignore[override]
        return conditional.scaled((0.5 * self.log_amplitude).exp())
