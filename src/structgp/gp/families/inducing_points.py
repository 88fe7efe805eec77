"""Base class of posteriors of values at inducing inputs: the kernel, the inputs Z, the forms of a
covariance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from gpytorch.kernels import Kernel
from torch import Tensor, nn

from structgp.errors import InputError
from structgp.gp.block import Block, CovarianceForm
from structgp.gp.inducing_inputs import Projection
from structgp.gp.kernels import covariance as kernel_matrix
from structgp.gp.linalg import cholesky
from structgp.gp.low_rank_fit import leading_directions
from structgp.gp.spreads import LowRank, Spread

RANK = 64
"""Default number of directions of a low-rank covariance."""

OPENING = 0.1
"""Length of the first directions, which narrows the posterior along them by half a percent, so that they
get a gradient."""


class InducingBlock(Block):
    """kernel : GPyTorch kernel over rows, shared by all functions. inducing : (M, W) rows Z; with Z = all
    distinct training rows this is the full GP.

    covariance : its form for the inducing values of each function. 'full' has a lower triangular ``factor``
    (..., M, M); 'diagonal' has standard deviations (..., M) in the WHITENED coordinates, where the prior is
    N(0, I) and values that the data leave alone cost nothing; 'low-rank' has standard deviations too, and
    ``directions`` (..., M, rank) in which the precision is higher (``gp.spreads``). All start at the prior,
    where no direction of a low-rank covariance has a gradient: optimisers that climb along gradients call
    ``open_directions`` first."""

    joint_curvature = learns_from_slopes = True
    inducing: Tensor
    kernel: Kernel
    directions: nn.Parameter

    def __init__(
        self,
        kernel: Kernel,
        inducing: Tensor,
        labels: Sequence[int],
        *,
        covariance: CovarianceForm = "full",
        rank: int = RANK,
        basis: Tensor | None = None,
        components: tuple[int, ...] = (),
    ) -> None:
        """components : leading dimensions of all parameters, () or (K,)."""
        super().__init__(labels, basis)
        if covariance not in get_args(CovarianceForm):
            known = ", ".join(get_args(CovarianceForm))
            raise InputError("covariance", f"{covariance!r} is not known", f"use one of {known}")
        if rank < 0:
            raise InputError("rank", f"must be 0 or more, got {rank}", "use 0 or more")
        self.kernel, self.form, self.n_values = kernel, covariance, len(inducing)
        self.register_buffer("inducing", inducing)
        M, dtype, shape = self.n_values, torch.float64, (*components, self.n_functions)
        self.rank = min(rank, M) if covariance == "low-rank" else 0
        """Number of directions of a low-rank covariance; 0 for the other forms."""
        self.m = nn.Parameter(torch.zeros(*shape, M, dtype=dtype))
        prior = torch.eye(M, dtype=dtype) if covariance == "full" else torch.ones(M, dtype=dtype)
        self.factor = nn.Parameter(prior.expand(*shape, *prior.shape).clone())
        if covariance == "low-rank":
            self.directions = nn.Parameter(torch.zeros(*shape, M, self.rank, dtype=dtype))

    @classmethod
    def size(
        cls, kernel: Any, inducing: Tensor | None, n_functions: int, options: Mapping[str, Any]
    ) -> int:
        assert inducing is not None
        M, rank = len(inducing), min(len(inducing), options.get("rank", 0))
        spread = {"full": M, "low-rank": 1 + rank}.get(options.get("covariance", "full"), 1)
        return options.get("n_components", 1) * n_functions * M * (1 + spread)

    @property
    def spread(self) -> Spread:
        """The covariances of inducing values: (..., M, M) lower triangular, (..., M) standard deviations,
        or low-rank."""
        if self.form == "low-rank":
            return LowRank(self.factor, self.directions)
        return self.factor.tril() if self.form == "full" else self.factor

    def options(self) -> dict[str, Any]:
        """Constructor arguments that make the tensors of a model file fit."""
        return {"covariance": self.form, "rank": self.rank}

    def prior_factor(self) -> Tensor:
        """(M, M) L_zz, the lower factor of k(Z, Z). Cost O(M^3)."""
        return cholesky(kernel_matrix(self.kernel, self.inducing, self.inducing))

    def conditional(self, rows: Tensor, mask: Tensor, factor: Tensor) -> Projection:
        """p(h | u) at rows (B, T, W) under the current kernel, before the amplitude. factor :
        ``prior_factor()``. Cost O(B T M (W + M) + B T^3), in float64."""
        B, T, W = rows.shape
        cross = kernel_matrix(self.kernel, rows.reshape(B * T, W), self.inducing)
        projection = torch.linalg.solve_triangular(factor, cross.mT, upper=False).mT
        projection = projection.reshape(B, T, self.n_values) * mask[..., None]
        if T == 0:
            return Projection(projection, projection.new_zeros(B, 0, 0))
        prior = kernel_matrix(self.kernel, rows, rows)
        both = mask[:, :, None] & mask[:, None, :]
        open_part = torch.where(both, prior - projection @ projection.mT, 0)
        # The jitter is a share of the PRIOR variance: with Z = X nothing is left open, and with a share of
        # nothing the factor would not exist. Each example has its own, whatever else is in the batch.
        size = torch.where(mask, prior.diagonal(dim1=-1, dim2=-2), 0).amax(-1).clamp(min=1e-12)
        open_part = open_part + torch.diag_embed(1e-8 * size[:, None] * mask)
        # Padding gets the mean of the diagonal, which leaves the jitter of `cholesky` as it is.
        mean = open_part.diagonal(dim1=-1, dim2=-2).sum(-1) / mask.sum(-1).clamp(min=1)
        mean = torch.where(mask.any(-1), mean, 1).detach()
        residual = cholesky(open_part + torch.diag_embed(mean[:, None] * ~mask))
        return Projection(projection, torch.where(both, residual, 0))

    def conditional_size(self, mask: Tensor, width: int) -> int:
        """About how many numbers ``conditional`` holds."""
        return mask.numel() * (self.n_values + mask.shape[1])

    def spread_parameters(self) -> list[nn.Parameter]:
        return [self.factor] + ([self.directions] if self.form == "low-rank" else [])

    def round_factor(self) -> None:
        with torch.no_grad():
            if self.form == "full":
                self.factor.tril_()
            if self.form == "low-rank":
                self.directions.copy_(self.directions.float())
        super().round_factor()

    def project(self, conditional: Projection, slope: Tensor, bend: Tensor) -> tuple[Tensor, Tensor]:
        """Turns a gradient in mean (..., B, T, R) and covariance (..., B, R, T, T) of the functions into
        one in ``m`` and in S (its diagonal only, unless the form is 'full'), without the amplitude: A^T g
        and A^T G A (supplement, 'Inducing variables'). Cost O(K R B T M (M + T))."""
        A = conditional.projection
        B, T, M = A.shape
        flat = A.reshape(B * T, M)
        m = slope.flatten(-3, -2).mT @ flat
        bent = (bend @ A[:, None]).transpose(-4, -3).flatten(-3, -2)  # (..., R, B T, M)
        S = flat.T @ bent if self.form == "full" else (bent * flat).sum(-2)
        return m.reshape(self.m.shape), S.reshape(self.factor.shape)

    def dual(self) -> Tensor:
        m = torch.einsum("k,krm->rm", self.mixing, self.m.reshape(-1, *self.m.shape[-2:]))
        return self.scale * torch.linalg.solve_triangular(self.prior_factor().T, m.T, upper=True)

    def first_directions(
        self, conditionals: Sequence[Projection], weights: Sequence[Tensor] | None = None
    ) -> Tensor:
        """(..., M, rank) directions of a low-rank covariance; if none is narrowed yet, those along which
        the inputs differ most. weights : (B,) sample weights of the examples of each batch."""
        if bool(self.directions.any()):
            return self.directions
        inputs = [conditional.projection for conditional in conditionals]
        weights = [A.new_ones(len(A)) for A in inputs] if weights is None else weights
        products = list(zip(inputs, weights, strict=True))
        return leading_directions(products, self.n_values, self.rank).expand_as(self.directions)

    def open_directions(self, batches: Sequence[tuple[Projection, Tensor, Tensor]]) -> None:
        if self.form == "low-rank" and not bool(self.directions.any()):
            conditionals, _, weights = zip(*batches, strict=True)
            with torch.no_grad():
                self.directions.copy_(OPENING * self.first_directions(conditionals, weights))

    def curvature_bound(self, batches: Sequence[tuple[Projection, Tensor, Tensor]]) -> float:
        """Largest curvature of the bound in a whitened mean if each tuple bends by at most 1/4, as a
        softmax does: 1 + 1/4 of the largest eigenvalue of sum_n A_n^T A_n, by power iteration. batches :
        conditional, mask, sample weight (B,) of the examples."""
        widest = 1.0 if self.basis is None else float(self.basis.square().sum(0).max())
        scale = float(self.log_amplitude.detach().exp()) * widest
        v, size = self.m.new_ones(self.n_values), 0.0
        for _ in range(20):
            v = v / v.norm().clamp(min=1e-300)
            moved = torch.zeros_like(v)
            for conditional, _, weight in batches:
                A = conditional.projection
                moved += A.flatten(0, 1).T @ (weight[:, None] * (A @ v)).flatten()
            size, v = float(moved.norm()), moved
        return 1 + 0.25 * scale * size
