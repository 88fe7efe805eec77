"""q(u) and q(g), and what they say about the latent values of one sequence.

Whitened: u_j = L_zz v_j with v_j ~ N(0, I) a priori and q(v_j) = N(m_j, L_j L_j^T). With
A = k(X_n, Z) L_zz^-T, the latent values of label j over one sequence are JOINTLY Gaussian
(``eq:bkjn-skjn``):

    mean A m_j,   covariance  K_nn - A A^T  +  A L_j L_j^T A^T.

The first part of the covariance is what the inducing values leave open, the second is our doubt
about them. Letters: B sequences, T positions, V labels, M inducing inputs, S draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from torch import Tensor, nn

from structgp.gp.divergences import kl_diagonal, kl_whitened
from structgp.gp.linalg import cholesky
from structgp.kernels import covariance


@dataclass(frozen=True)
class Conditional:
    """p(f | u) on a batch of sequences, before any data: depends on the kernel and Z alone.

    projection : (B, T, M), A above.
    residual : (B, T, T) lower factor of K_nn - A A^T; zero at padding.
    """

    projection: Tensor
    residual: Tensor

    def scaled(self, factor: Tensor) -> Conditional:
        """The same under a kernel whose amplitude is ``factor`` squared times as large."""
        return Conditional(factor * self.projection, factor * self.residual)


@dataclass(frozen=True)
class SequenceGaussian:
    """q of the unary latent values of B sequences: independent over labels, joint over positions."""

    conditional: Conditional
    m: Tensor
    factor: Tensor

    @property
    def mean(self) -> Tensor:
        """(B, T, V)."""
        return self.conditional.projection @ self.m.T

    @property
    def covariance(self) -> Tensor:
        """(B, V, T, T). Cost O(B T V M^2): once a round in the second-order fit."""
        B, T, M = self.conditional.projection.shape
        V = len(self.m)
        # One matrix product over all labels: broadcasting would copy the factors B times.
        stacked = self.factor.tril().permute(1, 0, 2).reshape(M, V * M)
        spread = (self.conditional.projection.reshape(B * T, M) @ stacked).reshape(B, T, V, M)
        spread = spread.transpose(1, 2)
        rest = self.conditional.residual @ self.conditional.residual.mT
        return spread @ spread.mT + rest[:, None]

    def rsample(self, noise: Noise) -> Tensor:
        """(S, B, T, V) joint draws f = A (m + L eps_v) + R eps_f. Cost O(S B V M (M + T))."""
        S, B, V, M = noise.inducing.shape
        # (V, S B, M): one matrix product a label.
        spread = noise.inducing.permute(2, 0, 1, 3).reshape(V, S * B, M) @ self.factor.tril().mT
        v = self.m[:, None] + spread
        v = v.reshape(V, S, B, M).permute(2, 3, 1, 0).reshape(B, M, S * V)
        rest = noise.rest.permute(1, 2, 0, 3).reshape(B, -1, S * V)
        f = self.conditional.projection @ v + self.conditional.residual @ rest
        return f.reshape(B, -1, S, V).permute(2, 0, 1, 3)


@dataclass(frozen=True)
class Noise:
    """Standard normal numbers behind draws of (f, g), in antithetic pairs where S is even.

    inducing : (S, B, V, M); rest : (S, B, T, V); pairwise : (S, V, V).
    """

    inducing: Tensor
    rest: Tensor
    pairwise: Tensor

    @staticmethod
    def draw(
        S: int, B: int, T: int, V: int, M: int, *, generator: torch.Generator, dtype: torch.dtype
    ) -> Noise:
        half = (S + 1) // 2

        def mirrored(*shape: int) -> Tensor:
            noise = torch.randn(half, *shape, generator=generator, dtype=dtype)
            return torch.cat([noise, -noise])[:S]

        return Noise(mirrored(B, V, M), mirrored(B, T, V), mirrored(V, V))


class Posterior(nn.Module):
    """The variational posterior: one Gaussian for the inducing values, one for pairwise scores.

    Parameters
    ----------
    kernel : GPyTorch kernel over rows, shared by all labels.
    inducing : (M, W) rows Z. With Z = all distinct training rows this is the full GP.
    n_labels : V.
    pairwise_sd : prior standard deviation of a label-to-label score (K_bin = sd^2 I); 0 turns
        pairwise scores off.

    Two hyper-parameters live here because no kernel matrix has to be computed again when they move:
    ``log_amplitude``, the log of a factor on the whole kernel, and ``pairwise_sd``.
    """

    inducing: Tensor
    pairwise_sd: Tensor

    def __init__(
        self,
        kernel: Kernel,
        inducing: Tensor,
        n_labels: int,
        *,
        pairwise_sd: float = 1.0,
    ) -> None:
        super().__init__()
        dtype = torch.float64
        M, V = len(inducing), n_labels
        self.kernel = kernel
        self.register_buffer("inducing", inducing)
        self.register_buffer("pairwise_sd", torch.tensor(pairwise_sd, dtype=dtype))
        self.log_amplitude = nn.Parameter(torch.zeros((), dtype=dtype))
        self.m = nn.Parameter(torch.zeros(V, M, dtype=dtype))
        self.factor = nn.Parameter(torch.eye(M, dtype=dtype).repeat(V, 1, 1))
        self.pair_mean = nn.Parameter(torch.zeros(V, V, dtype=dtype))
        self.pair_log_sd = nn.Parameter(torch.full((V, V), pairwise_sd, dtype=dtype).log())

    @property
    def n_labels(self) -> int:
        return self.m.shape[0]

    @property
    def n_inducing(self) -> int:
        return self.m.shape[1]

    def prior_factor(self) -> Tensor:
        """(M, M) L_zz, the lower factor of k(Z, Z). Cost O(M^3)."""
        return cholesky(covariance(self.kernel, self.inducing, self.inducing))

    def conditional(self, x: Tensor, mask: Tensor, factor: Tensor | None = None) -> Conditional:
        """p(f | u) at rows x (B, T, W) under the kernel as it is, before ``log_amplitude``.

        ``factor`` is ``prior_factor()``, if it is at hand. Cost O(B T M (W + M) + B T^3), in float64.
        """
        B, T, W = x.shape
        factor = self.prior_factor() if factor is None else factor
        cross = covariance(self.kernel, x.reshape(B * T, W), self.inducing)
        projection = torch.linalg.solve_triangular(factor, cross.mT, upper=False).mT
        projection = projection.reshape(B, T, -1) * mask[..., None]
        prior = covariance(self.kernel, x, x)
        both = mask[:, :, None] & mask[:, None, :]
        open_part = torch.where(both, prior - projection @ projection.mT, 0)
        # The jitter is a share of the PRIOR variance: with Z = X nothing is left open, and a share
        # of nothing would not make the factor exist. Each sequence has its own, whatever else is
        # in the batch.
        size = torch.where(mask, prior.diagonal(dim1=-1, dim2=-2), 0).amax(-1).clamp(min=1e-12)
        open_part = open_part + torch.diag_embed(1e-8 * size[:, None] * mask)
        # Padding gets the mean of the diagonal, which leaves the jitter of `cholesky` as it is.
        mean = open_part.diagonal(dim1=-1, dim2=-2).sum(-1) / mask.sum(-1).clamp(min=1)
        mean = torch.where(mask.any(-1), mean, 1).detach()
        residual = cholesky(open_part + torch.diag_embed(mean[:, None] * ~mask))
        residual = torch.where(both, residual, 0)
        return Conditional(projection, residual)

    def at(self, conditional: Conditional) -> SequenceGaussian:
        """q(f) of the sequences that ``conditional`` was computed for."""
        return SequenceGaussian(self.amplified(conditional), self.m, self.factor)

    def amplified(self, conditional: Conditional) -> Conditional:
        """``conditional`` under the amplitude that was learned."""
        return conditional.scaled((0.5 * self.log_amplitude).exp())

    def sample_pairwise(self, noise: Noise) -> Tensor:
        """(S, V, V) draws of the label-to-label scores."""
        if self.pairwise_sd == 0:
            return torch.zeros_like(noise.pairwise)
        return self.pair_mean + self.pair_log_sd.exp() * noise.pairwise

    def round_factor(self) -> None:
        """Rounds the factor to float32 (a ten-millionth of a standard deviation), in place, so that a
        file may hold it in half the space and still give the same answers to the last bit."""
        with torch.no_grad():
            self.factor.copy_(self.factor.tril().float())

    def kl_inducing(self) -> Tensor:
        """KL(q(u) || p(u)), exact."""
        return kl_whitened(self.m, self.factor.tril())

    def kl_pairwise(self) -> Tensor:
        """KL(q(g) || p(g)), exact."""
        if self.pairwise_sd == 0:
            return self.pair_mean.new_zeros(())
        return kl_diagonal(self.pair_mean, self.pair_log_sd.exp(), self.pairwise_sd)
