"""One template's potentials: R functions of the features of a place (token or transition), and their sum.

The scores of a tuple's joint labels are sums of R functions, scores = B h: with R = P and
B = I each score has a function of its own. A block holds the prior of those functions, their variational
posterior, and every closed form that an optimiser asks for. How the posterior is parametrised is the
family's business (``gp.families``); nobody else asks which family it is.

Scales of a prior have closed forms on the bound. For a kernel k = sum_c w_c k_c and the posterior that is
best under it, d ELBO / d log w_c = (E_c - gamma_c) / 2, with E_c what the fitted function spends in
component c, its squared norm there over w_c, and gamma_c the number of parameters that the data determine
in it. So w_c <- w_c E_c / gamma_c (MacKay, 1992) climbs without a step size; a component may be a
template, one feature, or one function.

Letters: B examples in a batch, T tuples of the template in an example (padded), P scores of a tuple,
R functions, M values per function that the posterior is of (inducing values, or weights), S draws,
K mixture components.
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
"""Parameters' worth of prior that the amplitude of one function is right as it is."""

LARGEST_FACTOR = 4.0
"""By which one step may change a scale."""

LEAST_PRECISION = 0.25
"""Under a likelihood that is not concave a posterior may be wider than its prior, but at most by
1 / sqrt(this)."""


@dataclass(frozen=True)
class Seen:
    """What a round of second-order inference found on one batch: the conditional, the rows (B, T, W) and
    mask (B, T) behind it, and derivatives of the expected log-likelihood in the functions, slope (B, T,
    R) and bend, minus the second ones, (B, R, T, T), or (B, T, R) where curvature is not joint."""

    conditional: Any
    rows: Tensor
    mask: Tensor
    slope: Tensor
    bend: Tensor


def ratio(energy: Tensor, determined: Tensor, prior: float) -> Tensor:
    """E / gamma, both with ``prior`` parameters' worth of 'as it is' added, within reason."""
    found = (energy + prior) / (determined.clamp(min=0) + prior)
    return found.clamp(1 / LARGEST_FACTOR, LARGEST_FACTOR)


class Block(nn.Module):
    """What all families share.

    labels : shape of a tuple's joint labels, (V,) for nodes and (V, V) for transitions. basis : (P, R),
    None for one function per score, and then kept as the identity for nodes alone: for transitions that
    would take V^4 numbers. amplitude : factor on the prior variance of all functions; its
    logarithm is the parameter ``log_amplitude``, -inf where the block is silent (all scores 0). ``m`` :
    whitened means, ``factor`` : of their covariance.

    What a family offers beside the methods below: ``prior_factor()`` and ``conditional(rows, mask,
    factor)``, the functions of a batch given the whitened values v that the posterior is of, h = A v plus
    what v leaves open, with ``times(v)`` and ``transposed_times(h)``; ``gaussian(conditional)``;
    ``kl(entropy)``; ``root_times`` and its transpose, C v with C C^T the posterior's covariance;
    ``fixed_noise`` and ``offsets``, what each draw adds to the mean, for draws that optimisers hold fixed;
    ``draws`` and ``mean_draw`` for answers; ``curvature_sum()``, which collects curvature batch by batch
    (``add``), lets processes sum it (``tensors``) and sets the spread (``finish``); ``solve_sites``;
    ``learn_scales(seen, prior_factor)``, one step on the bound for all scales of the prior, in closed form,
    which returns by how much the variance of each function has grown, (R,); ``effective_parameters()``, how
    many parameters the data determine; ``constant_scores()`` and ``scores_at(rows)`` for people to look at;
    ``options()`` for model files."""

    shared: ClassVar[bool] = False
    """Whether all tuples of all examples have the same scores."""

    joint_curvature: ClassVar[bool] = False
    """Whether ``curvature_sum`` wants (B, R, T, T), the curvature between tuples of an example, and not
    just (B, T, R)."""

    learns_from_slopes: ClassVar[bool] = False
    """Whether ``learn_scales`` asks for what each tuple says (``Seen``)."""

    takes_curvature: ClassVar[bool] = True
    """Whether ``curvature_sum`` exists: what second-order inference asks."""

    takes_sites: ClassVar[bool] = True
    """Whether ``solve_sites`` exists: what natural gradients ask."""

    has_weights: ClassVar[bool] = False
    """Whether the posterior is one of the weights of features."""

    takes_minibatches: ClassVar[bool] = False
    """Whether the posterior can be fitted batch by batch (``inference.minibatch``)."""

    name: ClassVar[str]
    n_components: int = 1
    """K of a mixture."""

    n_values: int
    """M."""

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
        """Whether each score has a function of its own."""
        # A copy: the amplitudes of its columns are learned in place.
        self.register_buffer("basis", None if basis is None else basis.to(torch.float64, copy=True))
        self.n_scores, self.n_functions = (P, P) if basis is None else basis.shape
        self.log_amplitude = nn.Parameter(torch.tensor(amplitude, dtype=torch.float64).log())

    @classmethod
    def size(
        cls, kernel: Any, inducing: Tensor | None, n_functions: int, options: Mapping[str, Any]
    ) -> int:
        """How many numbers such a block holds beside its kernel, told before one is built: a file may name
        any sizes. The arguments are those of the constructor."""
        raise NotImplementedError

    @property
    def mixing(self) -> Tensor:
        """(K,) weights of the mixture's components, which sum to 1."""
        return self.m.new_ones(1)

    @property
    def scale(self) -> Tensor:
        """() root of the amplitude: what function values are multiplied by."""
        return (0.5 * self.log_amplitude).exp()

    @property
    def is_silent(self) -> bool:
        return bool(self.log_amplitude.detach() == -torch.inf)

    def scores(self, functions: Tensor) -> Tensor:
        """(..., *labels) of functions (..., R)."""
        if not self.has_own_functions:
            functions = functions @ self.basis.to(functions).T
        return functions if len(self.labels) == 1 else functions.unflatten(-1, self.labels)

    def pull_back(self, slope: Tensor) -> Tensor:
        """(..., R) gradient in the functions, of one in the scores (..., *labels)."""
        flat = slope.flatten(-len(self.labels))
        return flat if self.has_own_functions else flat @ self.basis.to(flat)

    def learn_amplitude(self, seen: Sequence[Seen]) -> Tensor:
        """As ``learn_scales``, for the amplitude alone."""
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
        """What the constructor has to be given, beside kernel, labels and basis, for the tensors of a file
        to fit."""
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
        """What gives mean and standard deviation (N, R) of the functions at single tokens (N, W), by its
        method ``at``; None where that costs more than draws do."""
        return None

    def independent_functions(self) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation (R,) of the functions of all tuples, where those are independent of
        each other and the same for all tuples; else None."""
        return None

    def round_factor(self) -> None:
        """Rounds the spread to single precision, in place: a file may then hold it in half the space and
        still give the same answers to the last bit."""
        with torch.no_grad():
            self.factor.copy_(self.factor.float())

    def open_directions(self, batches: Sequence[tuple[Any, Tensor, Tensor]]) -> None:
        """Where no direction of a low-rank posterior is narrowed, none has a gradient: narrows some a
        little, in place. batches : conditional, mask (B, T) of the tuples, weight (B,) of the
        examples."""

    def dual(self) -> Tensor | None:
        """(M, R), of which the mean functions are k(., Z) dual; None where there are no inducing inputs
        Z."""
        return None

    def mean_search(self, conditionals: Sequence[Any] | None) -> MeanSearch:
        """Coordinates in which optimisers look for the mean. conditionals : of all training data, where
        they are at hand and stay so."""
        return MeanSearch(self)

    def mean_parameters(self) -> list[nn.Parameter]:
        return [] if self.is_silent else [self.m]

    def spread_parameters(self) -> list[nn.Parameter]:
        return [] if self.is_silent else [self.factor]

    def kernel_parameters(self) -> list[nn.Parameter]:
        """Those of the kernel, made to take gradients; none where there is no kernel."""
        return [] if self.kernel is None else list(self.kernel.requires_grad_(True).parameters())


def _is_identity(matrix: Tensor) -> bool:
    P, R = matrix.shape
    return P == R and bool((matrix == torch.eye(P, dtype=matrix.dtype, device=matrix.device)).all())


class Posterior(nn.ModuleDict):
    """blocks : by the template's name, in the order in which the structure takes their scores; 'node'
    first.

    Blocks are of the families in ``gp.families``. Nobody outside asks which: what an optimiser needs are
    their methods."""

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
        """sum_b KL(q_b || p_b), or with a mixture a bound above it (``klun``, ``klbin``)."""
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
        """What a training log says of nodes and of the other templates, in plain numbers."""
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

    They are the principal axes of diag(p) - p p^T, which is how a softmax bends where every token has the
    labels' frequencies: along them its second derivatives do not mix. Labels that are equally frequent have
    no axes of their own; they are told apart by their order, so that rounding does not decide.
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
