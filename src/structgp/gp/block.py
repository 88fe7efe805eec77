"""One template's potentials: R functions of the features of a place (token or transition), and their sum.

The scores of a tuple's joint labels are sums of R functions, scores = B h: with R = P and
B = I each score has a function of its own. A block holds the prior of those functions, their variational
posterior, and every closed form that an optimiser asks for. How the posterior is parametrised is the
family's business (``gp.families``); nobody else asks which family it is.

The scales of a prior have closed-form updates on the bound. For a kernel k = sum_c w_c k_c and the best
posterior under it, d ELBO / d log w_c = (E_c - gamma_c) / 2. Here E_c is the energy that the fitted
function spends in component c (its squared norm there divided by w_c), and gamma_c the number of parameters
in it that the data determine. So w_c <- w_c E_c / gamma_c (MacKay, 1992) climbs without a step size; a
component may be a template, one feature, or one function.

Letters: B examples in a batch, T tuples of the template in an example (padded), P scores of a tuple,
R functions, M values per function over which the posterior is defined (inducing values, or weights),
S draws, K mixture components.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from gpytorch.kernels import Kernel
from torch import Tensor, nn

from structgp.errors import InputError
from structgp.gp.mean_search import MeanSearch

CovarianceForm: TypeAlias = Literal["full", "low-rank", "diagonal"]
Entropy: TypeAlias = Literal["bhattacharyya", "jensen"]

AXIS_PRIOR_COUNT = 2.0
"""Strength, counted in parameters, of the prior that the amplitude of one function is right as it is."""

LARGEST_FACTOR = 4.0
"""Largest factor by which one step may change a scale."""

LEAST_PRECISION = 0.25
"""Smallest precision of a posterior relative to its prior: under a likelihood that is not concave the
posterior may be wider than the prior, but at most by 1 / sqrt(this)."""


@dataclass(frozen=True)
class Seen:
    """Results of a round of second-order inference on one batch: the conditional, the rows (B, T, W) and
    mask (B, T) behind it, and derivatives of the expected log-likelihood in the functions: ``slope``
    (B, T, R), the first ones, and ``bend``, minus the second ones, (B, R, T, T), or (B, T, R) where
    curvature is not joint."""

    conditional: Any
    rows: Tensor
    mask: Tensor
    slope: Tensor
    bend: Tensor


def ratio(energy: Tensor, determined: Tensor, prior: float) -> Tensor:
    """The factor E / gamma for a scale, shrunk towards 1 as if by ``prior`` further parameters, and clamped
    to ``LARGEST_FACTOR`` either way."""
    found = (energy + prior) / (determined.clamp(min=0) + prior)
    return found.clamp(1 / LARGEST_FACTOR, LARGEST_FACTOR)


class Block(nn.Module):
    """Base class of all families.

    labels : shape of a tuple's joint labels, (V,) for nodes and (V, V) for transitions. basis : (P, R),
    None for one function per score; the identity is then stored for nodes only, since for transitions it
    would take V^4 numbers. amplitude : factor on the prior variance of all functions; its
    logarithm is the parameter ``log_amplitude``, -inf where the block is silent (all scores 0). ``m`` : the
    whitened means. ``factor`` : the factor of their covariance.

    Each family also offers, beside the methods below:

    * ``prior_factor()`` and ``conditional(rows, mask, factor)``: the functions of a batch given the
      whitened values v over which the posterior is defined, h = A v plus what v leaves open, with
      ``times(v)`` and ``transposed_times(h)``;
    * ``gaussian(conditional)``; ``kl(entropy)``;
    * ``root_times`` and its transpose: C v with C C^T the posterior's covariance;
    * ``fixed_noise`` and ``offsets``: what each draw adds to the mean, for draws that optimisers hold
      fixed;
    * ``draws`` and ``mean_draw`` for answers;
    * ``curvature_sum()``, which collects curvature batch by batch (``add``), lets processes sum it
      (``tensors``) and sets the spread (``finish``); ``solve_sites``;
    * ``learn_scales(seen, prior_factor)``: one closed-form step on the bound for all scales of the prior,
      which returns by how much the variance of each function has grown, (R,);
    * ``effective_parameters()``: how many parameters the data determine;
    * ``constant_scores()`` and ``scores_at(rows)`` for people to look at; ``options()`` for model files."""

    shared: ClassVar[bool] = False
    """True if all tuples of all examples have the same scores."""

    joint_curvature: ClassVar[bool] = False
    """True if ``curvature_sum`` needs the curvature between tuples of an example, (B, R, T, T), and not
    just (B, T, R)."""

    learns_from_slopes: ClassVar[bool] = False
    """True if ``learn_scales`` needs the derivatives at each tuple (``Seen``)."""

    takes_curvature: ClassVar[bool] = True
    """True if ``curvature_sum`` exists, which second-order inference needs."""

    takes_sites: ClassVar[bool] = True
    """True if ``solve_sites`` exists, which natural gradients need."""

    has_weights: ClassVar[bool] = False
    """True if the posterior is over the weights of features."""

    takes_minibatches: ClassVar[bool] = False
    """True if the posterior can be fitted batch by batch (``inference.minibatch``)."""

    name: ClassVar[str]
    n_components: int = 1
    """K, the number of components of a mixture."""

    n_values: int
    """M, the number of values per function over which the posterior is defined."""

    kernel: Kernel | None
    basis: Tensor
    m: nn.Parameter
    factor: nn.Parameter

    def __init__(self, labels: Sequence[int], basis: Tensor | None = None, amplitude: float = 1.0) -> None:
        super().__init__()
        self.labels = tuple(int(n) for n in labels)
        P = math.prod(self.labels)
        if basis is not None and basis.shape[:1] != (P,):
            raise InputError("basis", f"{tuple(basis.shape)} for {P} scores", "give it one row per score")
        if basis is None and len(self.labels) == 1:
            basis = torch.eye(P, dtype=torch.float64)
        self.has_own_functions = basis is None or _is_identity(basis)
        """True if each score has a function of its own."""
        # A copy: the amplitudes of its columns are learned in place.
        self.register_buffer("basis", None if basis is None else basis.to(torch.float64, copy=True))
        self.n_scores, self.n_functions = (P, P) if basis is None else basis.shape
        self.log_amplitude = nn.Parameter(torch.tensor(amplitude, dtype=torch.float64).log())

    @classmethod
    def size(
        cls, kernel: Any, inducing: Tensor | None, n_functions: int, options: Mapping[str, Any]
    ) -> int:
        """How many numbers a block with these arguments would hold beside its kernel, told before it is
        built: a file may claim any sizes. The arguments are those of the constructor."""
        raise NotImplementedError

    @property
    def mixing(self) -> Tensor:
        """(K,) weights of the mixture's components, which sum to 1."""
        return self.m.new_ones(1)

    @property
    def scale(self) -> Tensor:
        """() square root of the amplitude, by which function values are multiplied."""
        return (0.5 * self.log_amplitude).exp()

    @property
    def is_silent(self) -> bool:
        return bool(self.log_amplitude.detach() == -torch.inf)

    def scores(self, functions: Tensor) -> Tensor:
        """(..., *labels) scores from function values (..., R)."""
        if not self.has_own_functions:
            functions = functions @ self.basis.to(functions).T
        return functions if len(self.labels) == 1 else functions.unflatten(-1, self.labels)

    def pull_back(self, slope: Tensor) -> Tensor:
        """(..., R) gradient in the functions from a gradient in the scores (..., *labels)."""
        flat = slope.flatten(-len(self.labels))
        return flat if self.has_own_functions else flat @ self.basis.to(flat)

    def learn_amplitude(self, seen: Sequence[Seen]) -> Tensor:
        """Like ``learn_scales``, but for the amplitude only."""
        energy, determined = self.m.square().sum(), self.effective_parameters()
        for s in seen:
            residual = s.conditional.residual
            left = self.scale.square() * residual @ residual.mT
            determined = determined + (s.bend * left[:, None]).sum()
        growth = ratio(energy, determined, AXIS_PRIOR_COUNT)
        self.log_amplitude.add_(growth.log())
        return growth.expand(self.n_functions)

    def effective_parameters(self) -> Tensor:
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Constructor arguments beside kernel, labels and basis that make the tensors of a model file
        fit."""
        return {}

    def scores_at(self: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(N, *labels) posterior mean and standard deviation of the scores of tuples with features (N,
        W)."""
        with torch.no_grad():
            mask = torch.ones(1, len(rows), dtype=torch.bool, device=rows.device)
            mean, covariance = self.gaussian(self.conditional(rows[None], mask, self.prior_factor()))
            variance = covariance[0, 0].diagonal(dim1=-1, dim2=-2).T  # (N, R)
            square = variance if self.has_own_functions else variance @ self.basis.T.square()
            return self.scores(mean[0, 0]), square.sqrt().unflatten(-1, self.labels)

    def token_moments(self) -> Any:
        """An object whose method ``at`` gives mean and standard deviation (N, R) of the functions at single
        tokens (N, W); None where that costs more than draws do."""
        return None

    def independent_functions(self) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation (R,) of the functions, if these are independent of each other and the
        same for all tuples; else None."""
        return None

    def round_factor(self) -> None:
        """Rounds the spread to single precision, in place: a file can then store it in half the space, and
        the answers stay the same to the last bit."""
        with torch.no_grad():
            self.factor.copy_(self.factor.float())

    def open_directions(self, batches: Sequence[tuple[Any, Tensor, Tensor]]) -> None:
        """Narrows some directions of a low-rank posterior a little, in place, if none is narrowed yet:
        otherwise they would have no gradient. batches : conditional, mask (B, T) of the tuples, sample
        weight (B,) of the examples."""

    def dual(self) -> Tensor | None:
        """(M, R) coefficients of the mean functions, which are k(., Z) dual; None where there are no
        inducing inputs Z."""
        return None

    def mean_search(self, conditionals: Sequence[Any] | None) -> MeanSearch:
        """Coordinates in which optimisers look for the mean. conditionals : those of all training batches,
        if they are kept in memory throughout; else None."""
        return MeanSearch(self)

    def mean_parameters(self) -> list[nn.Parameter]:
        return [] if self.is_silent else [self.m]

    def spread_parameters(self) -> list[nn.Parameter]:
        return [] if self.is_silent else [self.factor]

    def kernel_parameters(self) -> list[nn.Parameter]:
        """The kernel's parameters, made to take gradients; none if there is no kernel."""
        return [] if self.kernel is None else list(self.kernel.requires_grad_(True).parameters())


def _is_identity(matrix: Tensor) -> bool:
    P, R = matrix.shape
    return P == R and bool((matrix == torch.eye(P, dtype=matrix.dtype, device=matrix.device)).all())


class Posterior(nn.ModuleDict):
    """The posterior of all templates. blocks : one block per template, by its name, in the order in which
    the structure takes their scores; 'node' first.

    Each block belongs to a family in ``gp.families``. No code outside asks which: optimisers only use the
    methods that blocks share."""

    __getitem__: Any

    def __init__(self, blocks: Mapping[str, Any]) -> None:
        super().__init__(blocks)
        self.blocks: list[Any] = list(blocks.values())
        self.n_components: int = self.node.n_components
        """K of a mixture, 1 for other families."""

    @property
    def node(self) -> Any:
        """The first block."""
        return self.blocks[0]

    @property
    def mixing(self) -> Tensor:
        """(K,) weights of the mixture's components."""
        return self.node.mixing

    def divergence(self, entropy: Entropy = "bhattacharyya") -> Tensor:
        """sum_b KL(q_b || p_b), or for a mixture an upper bound on it (``klun``, ``klbin``)."""
        return torch.stack([block.kl(entropy) for block in self.blocks]).sum()

    def fit_tables(self) -> None:
        """Moves the amplitude of every table towards where the bound is largest."""
        for block in self.blocks:
            if block.shared:
                block.fit_amplitude()

    def snapshot(self) -> dict[str, Tensor]:
        """All parameters as they are now, for ``load_state_dict`` later."""
        return {name: value.detach().clone() for name, value in self.state_dict().items()}

    @torch.no_grad()
    def summary(self, entropy: Entropy) -> dict[str, Any]:
        """Plain numbers about the nodes and the other templates for a training log."""
        node, *others = self.blocks
        sds = {name: block.prior_sd for name, block in list(self.items())[1:]}
        return {
            "function_scales": node.basis.square().sum(0).tolist(),
            "effective_parameters": float(node.effective_parameters()),
            "kl_inducing": float(node.kl(entropy)),
            "kl_transitions": sum(float(block.kl()) for block in others),
            "amplitude_factor": float(node.log_amplitude.exp()),
            "transition_sd": sds.get("next", 0.0),
            "template_sds": sds,
            "n_inducing": node.m.shape[-1],
        }


def contrasts(frequency: Tensor) -> Tensor:
    """(V, V - 1) orthonormal columns that sum to 0, from the frequencies (V,) of the labels.

    They are the principal axes of diag(p) - p p^T, the curvature of a softmax whose probabilities are the
    frequencies of the labels: along these axes its second derivatives do not mix. Labels that are equally
    frequent have no axes of their own; ties are broken by the order of the labels, so that rounding does
    not decide.
    """
    V = len(frequency)
    p = frequency.double() / frequency.double().sum().clamp(min=1e-300)
    p = p + 1e-6 * torch.arange(V, 0, -1) / V
    even = torch.full((V, V), 1 / V, dtype=p.dtype)
    centre = torch.eye(V, dtype=p.dtype) - even
    bend = centre @ (p.diag() - p[:, None] * p) @ centre
    # The constant direction gets an eigenvalue below all others, and comes first.
    axes = torch.linalg.eigh(bend - even)[1][:, 1:]
    # Eigenvectors have no sign of their own: the first of the largest entries is positive.
    largest = (axes.abs() > 0.999 * axes.abs().amax(0)).int().argmax(0)
    return axes * axes[largest, torch.arange(V - 1)].sign()
