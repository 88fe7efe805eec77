"""A kernel on dense columns that is a prior on the weights of explicit features.

    k(x, z) = s_0 + s_1 x~ . z~ / D + s_2 k_smooth(x~ / l, z~ / l)

x~ : the D columns that are not constant, centred and brought to comparable sizes; l : one length-scale, or
one per column. The features are the constant, the columns themselves, and, for the smooth part, its Nystrom
features k(x, Z) L_zz^-T at inducing inputs Z, which leave some of its variance open."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel
from torch import Tensor

from structgp.gp.kernels.block_sum import covariance, elementwise, variance
from structgp.gp.linalg import cholesky

BY_NAME: dict[str, tuple[type[Kernel] | None, bool, bool]] = {
    "linear": (None, True, False),
    "rbf": (RBFKernel, False, False),
    "rbf-ard": (RBFKernel, False, True),
    "matern": (MaternKernel, False, False),
    "linear+rbf": (RBFKernel, True, False),
    "linear+rbf-ard": (RBFKernel, True, True),
    "linear+matern": (MaternKernel, True, False),
}
"""For each name: the class of the smooth part, whether there is a linear part, and whether there is one
length-scale per column."""

START_VARIANCE = 10.0
"""Prior variance of a score before anything is learned. The result of learning does not depend on it."""

SOME = 500
"""Number of rows whose distances give the first length-scale."""

FARTHEST = 30.0
"""Number of standard deviations from the mean of its column to which a value is clipped: one broken value
must not drown all others in rounding."""

COMPONENTS = ("label frequency", "linear", "smooth")


@dataclass(frozen=True)
class DenseFeatures:
    """Features of rows: values (..., F), whose weights are standard normal a priori, and left (...), the
    variance of the smooth part that they leave open."""

    values: Tensor
    left: Tensor


class DenseKernel(Kernel):
    """smooth : the smooth part, None for none. linear : True if the columns themselves are features. ard :
    True for one length-scale per column. standardised : True if columns are centred and scaled and l is
    learned; False for a smooth part of the user's own, which knows its columns and has its own
    length-scales. whole : True if the features are the Nystrom features of the whole kernel, for data with
    fewer tokens than columns.

    Parameters ``log_scale`` (3,), one per entry of ``COMPONENTS``; ``log_length`` (1,) or (D,);
    ``evenness`` (), how far columns are brought to the same size: 1 divides each by its standard deviation,
    0 all by the same number. Buffers ``centre`` and ``sd`` (D,), mean and standard deviation of the
    columns; ``inducing`` (M, D), Z, unscaled like rows. ``component`` : (F,), the index of the component
    that each feature belongs to."""

    has_lengthscale = False
    brings_rows_near = True
    """Distances are taken by the smooth part only, between scaled rows, not between the rows given."""

    frozen: frozenset[int] | set[int] = frozenset()
    """Ids of those parameters of the user's own smooth part that are to stay."""

    centre: Tensor
    sd: Tensor
    inducing: Tensor
    component: Tensor

    def __init__(
        self,
        smooth: Kernel | None = None,
        n_columns: int = 1,
        n_inducing: int = 0,
        linear: bool = True,
        ard: bool = False,
        standardised: bool = True,
        whole: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.smooth, self.linear, self.ard, self.n_columns = smooth, bool(linear), bool(ard), int(n_columns)
        self.standardised, self.whole = bool(standardised), bool(whole)
        self.register_buffer("centre", torch.zeros(n_columns))
        self.register_buffer("sd", torch.ones(n_columns))
        self.register_parameter("log_scale", torch.nn.Parameter(torch.zeros(3)))
        self.register_parameter("log_length", torch.nn.Parameter(torch.zeros(n_columns if ard else 1)))
        self.register_parameter("evenness", torch.nn.Parameter(torch.tensor(0.5)))
        self.place(torch.zeros(n_inducing, n_columns))

    @staticmethod
    def of(choice: str | Kernel, rows: Tensor, amplitude: float | None = None) -> DenseKernel:
        """The kernel that a name of ``BY_NAME`` stands for on rows (N, D), or with a smooth part of the
        user's own. amplitude : prior variance of a score."""
        if isinstance(choice, Kernel):
            made = DenseKernel(choice, rows.shape[1], linear=False, standardised=False).double()
            made.frozen = {id(p) for p in choice.parameters() if not p.requires_grad}
            made.initialize(log_scale=torch.zeros(3, dtype=torch.float64))
            return made
        kind, linear, ard = BY_NAME[choice]
        smooth = None if kind is None else kind()
        made = DenseKernel(smooth, rows.shape[1], linear=linear, ard=ard).double()
        made.standardise(rows)
        if smooth is not None:
            smooth.lengthscale = 1.0
            some = made.scaled(rows[torch.linspace(0, len(rows) - 1, min(SOME, len(rows))).long()]).detach()
            far = torch.pdist(some)
            far = far[far > 0]
            made.initialize(log_length=(far.median().log() if len(far) else 0.0) + 0 * made.log_length)
        share = (START_VARIANCE if amplitude is None else amplitude) / (1 + linear + (smooth is not None))
        made.initialize(log_scale=torch.full((3,), share, dtype=torch.float64).log())
        return made

    @property
    def n_inducing(self) -> int:
        return len(self.inducing)

    @property
    def n_features(self) -> int:
        return len(self.component)

    @property
    def n_varying(self) -> Tensor:
        """() D, the number of columns that are not constant."""
        return (self.sd > 0).sum().clamp(min=1).to(self.sd)

    @property
    def feature_varies(self) -> Tensor:
        """(F,) False for the features that are constant columns."""
        there = torch.ones(self.n_features, dtype=torch.bool, device=self.sd.device)
        if self.linear and not self.whole:
            there[1 : 1 + self.n_columns] = self.sd > 0
        return there

    def free_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters to be learned: scales, evenness and length-scales; for a smooth part of the user's
        own, its own parameters in place of the last two."""
        if not self.standardised and self.smooth is not None:
            return [self.log_scale, *(p for p in self.smooth.parameters() if id(p) not in self.frozen)]
        return [self.log_scale, self.evenness, *([] if self.smooth is None else [self.log_length])]

    @property
    def has_nystrom(self) -> bool:
        """True if some of the features depend on inducing inputs."""
        return self.whole or self.smooth is not None

    def place(self, inducing: Tensor) -> None:
        """Sets the inducing inputs (M, D)."""
        self.register_buffer("inducing", inducing)
        numbers = [1, self.n_columns if self.linear else 0, len(inducing) if self.has_nystrom else 0]
        if self.whole:
            numbers = [0, len(inducing), 0] if self.smooth is None else [0, 0, len(inducing)]
        component = torch.arange(3).repeat_interleave(torch.tensor(numbers), output_size=sum(numbers))
        component = component.to(inducing.device)
        self.register_buffer("component", component, persistent=False)

    def standardise(self, rows: Tensor) -> None:
        """Takes centre and standard deviation of the columns from rows (N, D)."""
        self.centre.copy_(rows.mean(0))
        size = rows.std(0, correction=0)
        # Rounding gives a constant column of large numbers a tiny standard deviation.
        self.sd.copy_(torch.where(size > 1e-12 * rows.abs().amax(0), size, 0))

    def scaled(self, x: Tensor) -> Tensor:
        """(..., D) the columns, centred and brought to comparable sizes. Constant ones are 0."""
        if not self.standardised:
            return x
        there = self.sd > 0
        size = torch.where(there, self.sd, 1)
        away = ((x - self.centre) / size).clamp(-FARTHEST, FARTHEST) * there
        return away * size / self.units()

    def units(self) -> Tensor:
        """(D,) the numbers by which the columns are divided, 1 for constant ones."""
        there = self.sd > 0
        size = torch.where(there, self.sd, 1)
        mean = (self.sd.square().sum() / there.sum().clamp(min=1)).sqrt().clamp(min=1e-300)
        even = self.evenness.clamp(0, 1)
        return torch.where(there, size**even * mean ** (1 - even), 1)

    def lengths(self) -> Tensor | None:
        """(D,) length-scales in the units of the columns, infinite for constant ones. None if there is no
        smooth part, or if that is the user's own."""
        if self.smooth is None or not self.standardised:
            return None
        with torch.no_grad():
            return torch.where(self.sd > 0, self.log_length.exp() * self.units(), torch.inf)

    def typical_lengths(self) -> float | list[float | None] | None:
        """``lengths`` for people to read: if all columns share one length-scale after scaling, one number,
        the geometric mean over columns; else a list, with None for constant columns."""
        lengths = self.lengths()
        if lengths is None or not lengths.isfinite().any():
            return None
        if not self.ard:
            return float(lengths[lengths.isfinite()].log().mean().exp())
        return [length if math.isfinite(length) else None for length in lengths.tolist()]

    def mean_variance(self, rows: Tensor) -> Tensor:
        """() prior variance of a score, on average over rows (N, D)."""
        return self.forward(rows, rows, diag=True).detach().mean()

    def prior_factor(self) -> Tensor:
        """(M, M) lower factor of the covariance of the smooth part, or of the whole kernel, at the inducing
        inputs."""
        if not self.has_nystrom:
            return self.log_scale.new_zeros(0, 0)
        return cholesky(self._nystrom_part(self.inducing, self.inducing))

    def _nystrom_part(self, x: Tensor, z: Tensor) -> Tensor:
        """(N, M) covariance of the part with Nystrom features."""
        if self.whole:
            return covariance(self, x, z)
        assert self.smooth is not None
        return self.log_scale[2].exp() * covariance(
            self.smooth, self.smooth_inputs(x), self.smooth_inputs(z)
        )

    def nystrom_variance(self, x: Tensor) -> Tensor:
        """(N,) prior variance of the part with Nystrom features."""
        if self.whole:
            return variance(self, x)
        assert self.smooth is not None
        return self.log_scale[2].exp() * variance(self.smooth, self.smooth_inputs(x))

    def features(self, x: Tensor, factor: Tensor) -> DenseFeatures:
        """Features of rows x (N, D). factor : ``prior_factor()``. Cost O(N M (D + M))."""
        root, parts, left = (0.5 * self.log_scale).exp(), [], x.new_zeros(len(x))
        if not self.whole:
            parts.append(root[0].expand(len(x), 1))
            if self.linear:
                parts.append(root[1] * self.n_varying**-0.5 * self.scaled(x))
        if self.has_nystrom:
            cross = self._nystrom_part(x, self.inducing)
            parts.append(torch.linalg.solve_triangular(factor, cross.mT, upper=False).mT)
            left = (self.nystrom_variance(x) - parts[-1].square().sum(-1)).clamp(min=0)
        return DenseFeatures(torch.cat(parts, -1), left)

    def smooth_inputs(self, x: Tensor) -> Tensor:
        """(..., D) rows x as the smooth part sees them: scaled and divided by the length-scales."""
        return self.scaled(x) / self.log_length.exp()

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **_: Any) -> Tensor:
        scale = self.log_scale.exp()
        left = self.scaled(x1)
        right = left if x2 is x1 else self.scaled(x2)
        product = (left * right).sum(-1) if diag else left @ right.mT
        total = scale[0] + (scale[1] / self.n_varying * product if self.linear else 0 * product)
        if self.smooth is not None:
            near = left / self.log_length.exp()
            far = near if right is left else right / self.log_length.exp()
            value = elementwise if diag else covariance
            total = total + scale[2] * value(self.smooth, near, far)
        return total
