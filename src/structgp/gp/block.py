"""One template's potentials: R functions of a tuple's features, and the scores that they add up to.

The scores of a tuple's joint labels are sums of R functions, scores = B h (``gp.basis``): with R = P and
B = I each score has a function of its own. A block holds the prior of those functions, their variational
posterior, and every closed form that an optimiser asks for. How the posterior is parametrised is the
family's business (``gp.families``); nobody else asks which family it is.

Letters: B examples in a batch, T tuples of the template in an example (padded), P scores of a tuple,
R functions, M values per function that the posterior is of (inducing values, or weights), S draws,
K mixture components.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from structgp.errors import InputError
from structgp.gp.scale_steps import AXIS_PRIOR_COUNT, Seen, ratio

CovarianceForm: TypeAlias = Literal["full", "low-rank", "diagonal"]
Entropy: TypeAlias = Literal["bhattacharyya", "jensen"]


class Conditional(Protocol):
    """Function values of a batch given the whitened values v that the posterior is of: h = A v, plus what
    v leaves open."""

    def times(self, values: Tensor) -> Tensor:
        """(B, T, R) A v of whitened values (R, M)."""
        ...

    def transposed_times(self, functions: Tensor) -> Tensor:
        """(R, M) A^T h of functions (B, T, R)."""
        ...


class CurvatureSum(Protocol):
    """Collects the curvature of the log-likelihood batch by batch, then sets the posterior's spread."""

    def add(self, conditional: Any, bend: Tensor) -> None:
        """bend : minus the second derivatives in the functions, as the family wants them."""
        ...

    def finish(self) -> None:
        """Sets the spread to what maximises the bound for this curvature."""
        ...

    def tensors(self) -> list[Tensor]:
        """Sums that several processes add up, in place, before ``finish``."""
        ...


class Block(nn.Module):
    """What all families share.

    labels : shape of a tuple's joint labels, (V,) for nodes and (V, V) for transitions. basis : (P, R),
    None for one function per score. amplitude : factor on the prior variance of all functions; its
    logarithm is the parameter ``log_amplitude``, -inf where the block is silent (all scores 0). ``m`` :
    whitened means."""

    shared: ClassVar[bool] = False
    """Whether all tuples of all examples have the same scores."""

    joint_curvature: ClassVar[bool] = False
    """Whether ``curvature_sum`` wants (B, R, T, T), the curvature between tuples of an example, and not
    just (B, T, R)."""

    name: ClassVar[str]
    basis: Tensor
    m: nn.Parameter

    def __init__(self, labels: Sequence[int], basis: Tensor | None = None, amplitude: float = 1.0) -> None:
        super().__init__()
        self.labels = tuple(int(n) for n in labels)
        P = math.prod(self.labels)
        if basis is not None and basis.shape[:1] != (P,):
            raise InputError("basis", f"{tuple(basis.shape)} for {P} scores", "give it one row per score")
        # A copy: the amplitudes of its columns are learned in place.
        eye = torch.eye(P, dtype=torch.float64)
        basis = eye if basis is None else basis.to(torch.float64, copy=True)
        self.has_own_functions = basis.shape == eye.shape and bool((basis == eye).all())
        """Whether each score has a function of its own."""
        self.register_buffer("basis", basis)
        self.log_amplitude = nn.Parameter(torch.tensor(amplitude, dtype=torch.float64).log())

    @property
    def n_scores(self) -> int:
        return self.basis.shape[0]

    @property
    def n_functions(self) -> int:
        return self.basis.shape[1]

    @property
    def n_values(self) -> int:
        """M."""
        return self.m.shape[-1]

    @property
    def n_components(self) -> int:
        """K of a mixture."""
        return 1

    @property
    def mixing(self) -> Tensor:
        """(K,) weights of the mixture's components, which sum to 1."""
        return self.m.new_ones(1)

    @property
    def takes_curvature(self) -> bool:
        """Whether ``curvature_sum`` exists: what second-order inference asks."""
        return True

    @property
    def takes_sites(self) -> bool:
        """Whether ``solve_sites`` exists: what natural gradients ask."""
        return True

    @property
    def takes_minibatches(self) -> bool:
        """Whether the posterior can be fitted batch by batch (``inference.minibatch``)."""
        return False

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
        return functions.unflatten(-1, self.labels)

    def pull_back(self, slope: Tensor) -> Tensor:
        """(..., R) gradient in the functions, of one in the scores (..., *labels)."""
        flat = slope.flatten(-len(self.labels))
        return flat if self.has_own_functions else flat @ self.basis.to(flat)

    @property
    def directions_of_scores(self) -> Tensor | None:
        """(P, R), None where each score moves by itself: along what curvature is asked for."""
        return None if self.has_own_functions else self.basis

    def drawn_functions(self, conditional: Any, noise: Any, i: int, numbers: Tensor) -> Tensor:
        """(S, B, T, R), or (S, P) if shared, without the amplitude: functions of batch i at the draws
        that ``fixed_noise`` stands for. numbers : (B,) that name the examples."""
        return conditional.times(self.m) + self.offsets(conditional, noise, i, numbers)

    def offsets(self, conditional: Any, noise: Any, i: int, numbers: Tensor) -> Tensor:
        """What each draw adds to the mean, without the amplitude."""
        raise NotImplementedError

    def open_directions(self, batches: Sequence[tuple[Any, Tensor, Tensor]]) -> None:
        """Where no direction of a low-rank posterior is narrowed, none has a gradient: narrows some a
        little, in place. batches : conditional, mask (B, T) of the tuples, weight (B,) of the
        examples."""

    # -- scales of the prior ----------------------------------------------------------------------------

    def learn_scales(self, seen: Sequence[Seen], prior_factor: Tensor) -> Tensor:
        """One step on the bound for all scales of the prior, in closed form. Returns by how much the
        variance of each function has grown, (R,)."""
        raise NotImplementedError

    def learn_amplitude(self, seen: Sequence[Seen]) -> Tensor:
        """The same for the amplitude alone."""
        energy, determined = self.m.square().sum(), self.effective_parameters()
        for s in seen:
            residual = s.conditional.residual
            left = self.scale.square() * residual @ residual.mT
            determined = determined + (s.bend * left[:, None]).sum()
        growth = ratio(energy, determined, AXIS_PRIOR_COUNT)
        self.log_amplitude.add_(growth.log())
        return growth.expand(self.n_functions)

    def effective_parameters(self) -> Tensor:
        """() how many parameters the data determine: the sum of 1 - variance / prior variance,
        whitened."""
        raise NotImplementedError

    def fit_amplitude(self) -> None:
        """Moves the amplitude of a table towards where the bound is largest; nothing for other
        families."""

    # -- what a person is shown --------------------------------------------------------------------

    def constant_scores(self) -> tuple[Tensor, Tensor]:
        """(*labels) posterior mean and standard deviation of the scores of a tuple without features."""
        raise NotImplementedError

    def dual(self) -> Tensor | None:
        """(M, R), of which the mean functions are k(., Z) dual; None where there are no inducing inputs
        Z."""
        return None

    # -- parameters, for optimisers that climb along gradients ------------------------------------------

    def mean_parameters(self) -> list[nn.Parameter]:
        return [] if self.is_silent else [self.m]

    def spread_parameters(self) -> list[nn.Parameter]:
        raise NotImplementedError

    def kernel_parameters(self) -> list[nn.Parameter]:
        """Those of the kernel, made to take gradients; none where there is no kernel."""
        return []
