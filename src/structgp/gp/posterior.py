"""q(u) and q(g), and what they say about the latent values of one sequence.

The labels are sums of R functions, f = h B^T (``gp.basis``): R = V and B = I gives each label its own.
Whitened: u_j = L_zz v_j with v_j ~ N(0, I) a priori, and q(v) = sum_k pi_k prod_j N(m_kj, S_kj), a
mixture of K components with S_kj = L_kj L_kj^T. With A = k(X_n, Z) L_zz^-T, the values of function
j over one sequence are, in component k, JOINTLY Gaussian (``eq:bkjn-skjn``):

    mean A m_kj,   covariance  K_nn - A A^T  +  A S_kj A^T.

The first part of the covariance is what the inducing values leave open, the second is our doubt
about them. Pairwise scores have one Gaussian, q(g) = N(m_bin, S_bin). Letters: B sequences, T
positions, V labels, R functions, M inducing inputs, K components, S draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from gpytorch.kernels import Kernel
from torch import Tensor, nn

from structgp.errors import InputError
from structgp.gp.divergences import (
    cross_entropy,
    entropy_bhattacharyya,
    entropy_jensen,
    kl_diagonal,
    kl_full,
    kl_whitened,
)
from structgp.gp.kernels import covariance
from structgp.gp.linalg import cholesky
from structgp.gp.lowrank import LowRank
from structgp.gp.sequences import Conditional, SequenceGaussian
from structgp.gp.spreads import Spread, traces

CovarianceForm: TypeAlias = Literal["full", "low-rank", "diagonal"]
PairwiseForm: TypeAlias = Literal["full", "diagonal"]

RANK = 64
"""Directions that a low-rank covariance has unless told."""

Entropy: TypeAlias = Literal["auto", "exact", "bhattacharyya", "jensen"]


@dataclass(frozen=True)
class PairwiseGaussian:
    """q(g) of the label-to-label scores.

    mean : (V, V), row = from, column = to. factor : (V, V) standard deviations, or (V^2, V^2) lower
    triangular, scores read row by row.
    """

    mean: Tensor
    factor: Tensor

    @property
    def is_full(self) -> bool:
        return self.factor.shape != self.mean.shape

    @property
    def variance(self) -> Tensor:
        """(V, V) of each score alone."""
        square = self.factor.square()
        return square.sum(-1).view_as(self.mean) if self.is_full else square

    @property
    def covariance(self) -> Tensor:
        """(V^2, V^2), or the variances (V, V) where that is all there is."""
        return self.factor @ self.factor.mT if self.is_full else self.variance

    def to(self, like: Tensor) -> PairwiseGaussian:
        return PairwiseGaussian(self.mean.to(like), self.factor.to(like))

    def place(self, noise: Tensor) -> Tensor:
        """(S, V, V) draws from standard normal numbers (S, V, V). Cost O(S V^4) if full."""
        if not self.is_full:
            return self.mean + self.factor * noise
        return self.mean + (noise.flatten(1) @ self.factor.mT).view_as(noise)


class Posterior(nn.Module):
    """The variational posterior: a mixture of Gaussians for the inducing values, one Gaussian for the
    pairwise scores.

    Parameters
    ----------
    kernel : GPyTorch kernel over rows, shared by all labels.
    inducing : (M, W) rows Z. With Z = all distinct training rows this is the full GP.
    n_labels : V.
    pairwise_sd : prior standard deviation of a label-to-label score (K_bin = sd^2 I); 0 turns
        pairwise scores off.
    n_components : K. All components start at the prior, with equal weights: who wants more than one
        has to move them apart, since equal components have equal gradients.
    covariance : of the inducing values of each label, 'full', 'low-rank' (``gp.lowrank``) or 'diagonal'.
        Diagonal means in the WHITENED coordinates: there the prior is N(0, I), so that it is in the
        family and what was not learned costs nothing. A diagonal covariance of u itself could never be
        the prior's.
    rank : r of a low-rank covariance, at most M. It starts at the prior, where no direction is narrowed
        and none has a gradient: who climbs along gradients has to open them.
    pairwise_covariance : of the V^2 pairwise scores, 'diagonal' or 'full'.
    basis : (V, R), how the labels are made of functions; None for a function a label.

    All are parameters: ``weight_logits`` (K,); ``m`` (K, R, M); ``factor``, (K, R, M, M) whose lower
    triangle counts, or (K, R, M) standard deviations of either sign, with ``directions`` (K, R, M, r) if
    low-rank; ``pair_mean`` (V, V); and ``pair_log_sd`` (V, V) or ``pair_factor`` (V^2, V^2), whose lower
    triangle counts. K R M^2 numbers with full covariances, K R M r with low-rank, K R M with diagonal
    ones. So are two hyper-parameters that live here
    because no kernel matrix has to be computed again when they move: ``log_amplitude``, the log of
    a factor on the whole kernel, and ``log_pairwise_sd``, -inf where there are no pairwise scores.
    """

    inducing: Tensor
    basis: Tensor
    directions: nn.Parameter
    pair_log_sd: nn.Parameter
    pair_factor: nn.Parameter

    def __init__(
        self,
        kernel: Kernel,
        inducing: Tensor,
        n_labels: int,
        *,
        pairwise_sd: float = 1.0,
        n_components: int = 1,
        covariance: CovarianceForm = "full",
        rank: int = RANK,
        pairwise_covariance: PairwiseForm = "diagonal",
        basis: Tensor | None = None,
    ) -> None:
        super().__init__()
        _check_form("covariance", covariance, CovarianceForm)
        _check_form("pairwise_covariance", pairwise_covariance, PairwiseForm)
        if rank < 0:
            raise InputError("rank", f"{rank} is too few", "use 0 or more")
        if n_components < 1:
            raise InputError("n_components", f"{n_components} is too few", "use 1 or more")
        dtype = torch.float64
        M, V, K = len(inducing), n_labels, n_components
        self.kernel = kernel
        self.register_buffer("inducing", inducing)
        if basis is not None and basis.shape[:1] != (V,):
            raise InputError(
                "basis", f"{tuple(basis.shape)} for {V} labels", "give it a row for each label"
            )
        # A copy: the amplitudes of its columns are learned in place.
        basis = torch.eye(V, dtype=dtype) if basis is None else basis.to(dtype, copy=True)
        self.register_buffer("basis", basis)
        R = basis.shape[1]
        self.log_amplitude = nn.Parameter(torch.zeros((), dtype=dtype))
        self.log_pairwise_sd = nn.Parameter(torch.tensor(pairwise_sd, dtype=dtype).log())
        self.weight_logits = nn.Parameter(torch.zeros(K, dtype=dtype))
        self.m = nn.Parameter(torch.zeros(K, R, M, dtype=dtype))
        prior = torch.eye(M, dtype=dtype) if covariance == "full" else torch.ones(M, dtype=dtype)
        self.factor = nn.Parameter(prior.expand(K, R, *prior.shape).clone())
        if covariance == "low-rank":
            self.directions = nn.Parameter(torch.zeros(K, R, M, min(rank, M), dtype=dtype))
        self.pair_mean = nn.Parameter(torch.zeros(V, V, dtype=dtype))
        if pairwise_covariance == "full":
            self.pair_factor = nn.Parameter(pairwise_sd * torch.eye(V * V, dtype=dtype))
        else:
            self.pair_log_sd = nn.Parameter(torch.full((V, V), pairwise_sd, dtype=dtype).log())

    @property
    def n_components(self) -> int:
        return self.m.shape[0]

    @property
    def n_labels(self) -> int:
        return self.basis.shape[0]

    @property
    def n_functions(self) -> int:
        return self.basis.shape[1]

    @property
    def has_label_basis(self) -> bool:
        """Whether each label has a function of its own."""
        V, R = self.basis.shape
        return V == R and bool((self.basis == torch.eye(V).to(self.basis)).all())

    @property
    def n_inducing(self) -> int:
        return self.m.shape[2]

    @property
    def form(self) -> CovarianceForm:
        """Of the covariance of inducing values."""
        if hasattr(self, "directions"):
            return "low-rank"
        return "diagonal" if self.factor.dim() == 3 else "full"

    @property
    def rank(self) -> int:
        """How many directions a low-rank covariance has; 0 for the other forms."""
        return self.directions.shape[-1] if self.form == "low-rank" else 0

    @property
    def is_diagonal(self) -> bool:
        """Whether ``factor`` holds standard deviations, and nothing else counts."""
        return self.form == "diagonal"

    @property
    def spread(self) -> Spread:
        """The covariances of inducing values: (K, R, M, M) lower triangular, (K, R, M) standard
        deviations, or low-rank."""
        if self.form == "low-rank":
            return LowRank(self.factor, self.directions)
        return self.factor if self.is_diagonal else self.factor.tril()

    @property
    def pairs_are_full(self) -> bool:
        """Whether q(g) has ``pair_factor`` in the place of ``pair_log_sd``."""
        return hasattr(self, "pair_factor")

    @property
    def has_pairs(self) -> bool:
        """Whether there are pairwise scores at all."""
        return bool(self.log_pairwise_sd.detach() > -torch.inf)

    @property
    def pairwise_sd(self) -> Tensor:
        """() prior standard deviation of a pairwise score; 0 where there are none."""
        return self.log_pairwise_sd.exp()

    @property
    def log_weights(self) -> Tensor:
        return self.weight_logits.log_softmax(0)

    @property
    def weights(self) -> Tensor:
        """(K,) pi, which sum to 1."""
        return self.weight_logits.softmax(0)

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

    def conditional_size(self, mask: Tensor, width: int) -> int:
        """About how many numbers ``conditional`` holds for rows (B, T, W)."""
        return mask.numel() * (self.n_inducing + mask.shape[1])

    def at(self, conditional: Conditional) -> SequenceGaussian:
        """q(f) of the sequences that ``conditional`` was computed for."""
        return SequenceGaussian(self.amplified(conditional), self.m, self.spread)

    def amplified(self, conditional: Conditional) -> Conditional:
        """``conditional`` under the amplitude that was learned."""
        return conditional.scaled((0.5 * self.log_amplitude).exp())

    def pairwise(self) -> PairwiseGaussian:
        """q(g); zeros without doubt where ``pairwise_sd`` is 0."""
        factor = self.pair_factor.tril() if self.pairs_are_full else self.pair_log_sd.exp()
        if not self.has_pairs:
            return PairwiseGaussian(torch.zeros_like(self.pair_mean), torch.zeros_like(factor))
        return PairwiseGaussian(self.pair_mean, factor)

    def snapshot(self) -> dict[str, Tensor]:
        """All parameters as they are now, for ``load_state_dict`` later."""
        return {name: value.detach().clone() for name, value in self.state_dict().items()}

    def round_factor(self) -> None:
        """Rounds the factor to float32 (a ten-millionth of a standard deviation), in place, so that a
        file may hold it in half the space and still give the same answers to the last bit."""
        with torch.no_grad():
            lower = self.factor.tril() if self.form == "full" else self.factor
            self.factor.copy_(lower.float())
            if self.form == "low-rank":
                self.directions.copy_(self.directions.float())

    def kl_inducing(self, entropy: Entropy = "auto") -> Tensor:
        """KL(q(u) || p(u)) (``klun``), or with a mixture a bound above it: cross-entropy minus entropy.

        entropy : 'exact', for K = 1 only; 'bhattacharyya', exact at K = 1, cost O(K^2 V M^3)
        (low-rank: O(K^2 V M r^2)); 'jensen', the paper's (``eq:entropy``); 'auto', the first of these
        that K allows.
        """
        if entropy == "auto":
            entropy = "exact" if self.n_components == 1 else "bhattacharyya"
        if entropy == "exact" and self.n_components > 1:
            raise InputError(
                "entropy",
                f"'exact' has no closed form with {self.n_components} components",
                "use 'bhattacharyya' or 'jensen'",
            )
        if entropy == "exact":
            return kl_whitened(self.m, self.spread)
        bounds = {"jensen": entropy_jensen, "bhattacharyya": entropy_bhattacharyya}
        mixture = self.log_weights, self.m, self.spread
        return cross_entropy(*mixture) - bounds[entropy](*mixture)

    def effective_parameters(self) -> Tensor:
        """() how many of the R M inducing values the data determine: sum of 1 - variance / prior variance
        in whitened coordinates, averaged over components."""
        determined = self.n_inducing - traces(self.m, self.spread)  # (K, R)
        return self.weights @ determined.sum(-1)

    def kl_pairwise(self) -> Tensor:
        """KL(q(g) || p(g)), exact (``klbin``)."""
        if not self.has_pairs:
            return self.pair_mean.new_zeros(())
        q = self.pairwise()
        return (kl_full if q.is_full else kl_diagonal)(q.mean, q.factor, self.pairwise_sd)


def _check_form(name: str, form: str, known: Any) -> None:
    if form not in get_args(known):
        raise InputError(name, f"{form!r} is not known", f"use one of {', '.join(get_args(known))}")
