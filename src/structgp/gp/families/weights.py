"""Posteriors of independent weights, for kernels that are linear in features. A table of scores is the
special case whose only feature is the constant 1.

A sparse GP may be conditioned on any linear functionals of its functions instead of values at inducing
inputs. Here they are the weights themselves: their prior covariance is diagonal, they determine the
functions completely, and a row of A active features touches A of them. Whitened, beta_d = sqrt(w_d) v_d
with q(v) = prod N(m, s^2) and h = X sqrt(w) v.

The cost is linear in the data. The price is that q has no correlations between weights; the gain is that
none of the weights is left out. Letters as in ``gp.block``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor, nn

from structgp.gp.block import AXIS_PRIOR_COUNT, LARGEST_FACTOR, LEAST_PRECISION, Block, Entropy, Seen, ratio
from structgp.gp.kernels import active_features, weight_parts, weight_variances
from structgp.gp.mean_search import GroupedSearch, MeanSearch
from structgp.gp.token_moments import TokenMoments
from structgp.gp.weight_rows import Constant, WeightConditional, noise_table

PRIOR_COUNT = 10.0
"""Strength, counted in parameters, of the prior that a scale is right as it is. Without correlations a
posterior is too sure of what it has found, so this is more than for inducing values."""

PRIOR_SCORES = 4.0
"""Strength of the prior of a table's amplitude, counted in scores of size 1: it keeps the scale in place
where there are few scores. Not chosen on data."""


AT_ONCE = 8_192
"""Number of weights of each function that are processed together."""


class Weights(Block):
    """kernel : one that ``has_weights``; None for the constant 1 alone, with a weight of variance 1.
    Parameters ``m`` and ``factor``, standard deviations of either sign, both (R, M), whitened."""

    name = "weights"
    has_weights = True
    takes_sites = False
    takes_minibatches = True

    def __init__(
        self,
        kernel: Kernel | None,
        labels: Sequence[int],
        basis: Tensor | None = None,
        amplitude: float = 1.0,
    ) -> None:
        super().__init__(labels, basis, amplitude)
        self.kernel = kernel
        ends = [1] if kernel is None else [span.stop for _, _, span in weight_parts(kernel)]
        self.n_values, self.constants = ends[-1], [end - 1 for end in ends]
        """M, and the indices of the constants among the weights."""
        shape = (self.n_functions, self.n_values)
        self.m = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        self.factor = nn.Parameter(torch.ones(shape, dtype=torch.float64))

    @classmethod
    def size(
        cls, kernel: Any, inducing: Tensor | None, n_functions: int, options: Mapping[str, Any]
    ) -> int:
        n_values = 1 if kernel is None else max(span.stop for _, _, span in weight_parts(kernel))
        return 2 * n_functions * n_values

    def prior_factor(self) -> Tensor:
        """(M,) prior standard deviations of the weights, before the amplitude."""
        return weight_variances(self.kernel).sqrt()

    def conditional(self, rows: Tensor, mask: Tensor, factor: Tensor) -> WeightConditional | Constant:
        """h given the weights at rows (B, T, W). Cost O(B T W)."""
        found = active_features(self.kernel, rows)
        found = replace(found, value=torch.where(mask[..., None], found.value, 0))
        return WeightConditional(found, factor)

    def conditional_size(self, mask: Tensor, width: int) -> int:
        return 16 * mask.numel() * width

    def gaussian(self, conditional: Any) -> tuple[Tensor, Tensor]:
        """Mean (1, B, T, R) and covariance (1, B, R, T, T) of the functions."""
        mean, covariance = conditional.mean(self.m), conditional.covariance(self.factor)
        return (self.scale * mean)[None], (self.scale.square() * covariance)[None]

    def kl(self, entropy: Entropy = "bhattacharyya") -> Tensor:
        """KL(q || p), exact."""
        # A slice at a time, to avoid copies of all weights.
        parts = zip(self.m.split(AT_ONCE, -1), self.factor.split(AT_ONCE, -1), strict=True)
        found = [0.5 * (m.square() + s.square() - 1).sum() - s.abs().log().sum() for m, s in parts]
        return torch.stack(found).sum()

    def effective_parameters(self) -> Tensor:
        """() how many weights the data determine: the sum of 1 - variance / prior variance."""
        return self.factor.numel() - self.factor.square().sum()

    def root_times(self, v: Tensor) -> Tensor:
        return self.factor * v

    root_transposed_times = root_times

    @property
    def prior_sd(self) -> float:
        """Prior standard deviation of the score of a tuple without features."""
        sds = self.prior_factor()[self.constants]
        return float((self.scale * sds.square().sum().sqrt()).detach())

    def constant_scores(self) -> tuple[Tensor, Tensor]:
        """(*labels) posterior mean and standard deviation of the scores of a tuple without features."""
        with torch.no_grad():
            sd = (self.scale * self.prior_factor())[self.constants]  # (C,)
            mean = (self.m[:, self.constants] * sd).sum(-1)
            variance = (self.factor[:, self.constants] * sd).square().sum(-1)
            square = variance if self.has_own_functions else self.basis.square() @ variance
            return self.scores(mean), square.sqrt().view(self.labels)

    def feature_scores(self, row: Tensor, direction: Tensor) -> Tensor:
        """(A,) what each active feature of a row (1, W) adds to the score along ``direction`` (R,)."""
        with torch.no_grad():
            found = active_features(self.kernel, row[None])
            place, value = found.place[0, 0], found.value[0, 0]
            weight = (self.m * self.scale * self.prior_factor()).T @ direction  # (M,)
            return torch.where(place >= 0, weight[place.clamp(min=0)] * value, 0)

    def fixed_noise(self, half: int, masks: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        return noise_table(self.n_functions, half, generator).to(self.m)

    def offsets(self, conditional: Any, noise: Tensor, i: int, numbers: Tensor) -> Tensor:
        """(S, B, T, R), or (S, P) if shared: what each draw adds to the mean, without the amplitude. Given
        the shared tables, examples are independent, so each gets draws of its own: the deviation of a
        feature in one draw is then not repeated in all examples."""
        return conditional.spread(self.factor, noise, numbers)

    def drawn_functions(self, conditional: Any, noise: Tensor, i: int, numbers: Tensor) -> Tensor:
        """Functions of batch i at the draws that ``fixed_noise`` stands for, shaped as in ``offsets``.
        numbers : (B,) numbers that identify the examples."""
        # Only the weights that occur in the batch are used: there may be many times as many in all.
        index, here = conditional.compact
        return here.times(self.m[:, index]) + here.spread(self.factor[:, index], noise, numbers)

    def draws(self, n: int, seed: int, generator: torch.Generator) -> WeightDraws:
        """n draws, rounded up to mirrored pairs."""
        return WeightDraws(self.prior_factor(), self.fixed_noise((n + 1) // 2, (), generator))

    def mean_draw(self) -> WeightDraws:
        return WeightDraws(self.prior_factor(), None)

    def token_moments(self) -> TokenMoments | None:
        with torch.no_grad():
            sd = self.scale * self.prior_factor()
            variances = (sd * self.factor).square()
            return TokenMoments(self.kernel, (sd * self.m).T, variances.T, float(self.scale.square()))

    def mean_search(self, conditionals: Sequence[Any] | None) -> MeanSearch:
        if conditionals is None or self.kernel is None or self.m.device.type != "cpu":
            return MeanSearch(self)
        return GroupedSearch(self, conditionals)

    def curvature_sum(self) -> WeightCurvature:
        return WeightCurvature(self, torch.zeros_like(self.m))

    def learn_scales(self, seen: Sequence[Seen] = (), prior_factor: Tensor | None = None) -> Tensor:
        """One step for the amplitudes of the functions, then the scales of feature groups, then the
        relevances. Each step takes the ones before into account, so that nothing is explained twice. The
        mean weights stay as they are, and so does the precision that the data add to them. Returns by how
        much the variance of each function has grown, (R,). Cost O(R M).

        Whitened, the energy of a weight is m^2, and the data determine 1 - s^2 of it (``gp.block``)."""
        axes = self.m.new_ones(self.n_functions)
        if not self.has_own_functions:
            energy, determined = torch.tensor(
                [(m @ m, _determined(s).sum()) for m, s in zip(self.m, self.factor, strict=True)]
            ).T
            axes = ratio(energy.to(self.m), determined.to(self.m), AXIS_PRIOR_COUNT)
            self.basis.mul_(axes.sqrt())
        learn_relevances(self.kernel, self.m, self.factor, axes)
        return axes

    def prior_sds(self) -> Tensor:
        """(M,) prior standard deviations of the weights."""
        return self.prior_factor()

    def knowledge(self) -> tuple[Tensor, Tensor]:
        """Precision and linear term (M, R) of q divided by its prior."""
        prior_sd, m, s = self.prior_sds()[:, None], self.m.T, self.factor.T.square()
        return (s.reciprocal() - 1).clamp(min=0) / prior_sd.square(), m / (s * prior_sd)

    def place(self, precision: Tensor, linear: Tensor, prior_sd: Tensor, index: Tensor | slice) -> None:
        """Sets q to the prior times sites with precision and linear term (F, R), at the weights ``index``
        (F,), whose prior standard deviations are ``prior_sd`` (F,)."""
        if self.is_silent:
            return
        prior_sd = prior_sd[:, None]
        total = precision.clamp(min=0).mul_(prior_sd.square()).add_(1)
        self.m[:, index] = (prior_sd * linear).div_(total).T
        self.factor[:, index] = total.rsqrt_().T

    def visit_noise(self, half: int, generator: torch.Generator) -> Tensor:
        return self.fixed_noise(half, (), generator)

    def visit_offsets(
        self, here: Any, sd: Tensor, noise: Tensor, keys: Tensor, seed: int, single: bool
    ) -> Tensor:
        """(S, B, T, R) what draws of the weights in a batch add to the mean. sd : (F, R) standard
        deviations of the weights. noise : from ``visit_noise``. keys : (B,). If ``single``, draws are in
        single precision and shared by all examples of the batch: with much data, a batch is a small part of
        it, so that this matters little."""
        if not single:
            return here.spread((sd / here.prior_sd[:, None]).T, noise, keys)
        sd, rows = sd.float(), here.rows.single
        generator = torch.Generator(sd.device).manual_seed(seed)
        drawn = []
        for _ in range(noise.shape[-1]):
            eps = torch.empty_like(sd).normal_(generator=generator)
            drawn.append(rows.times(eps.mul_(sd)).unflatten(0, here.features.value.shape[:2]))
        return torch.stack(drawn + [-x for x in drawn])


def learn_relevances(kernel: Kernel | None, m: Tensor, factor: Tensor, axes: Tensor) -> None:
    """One step for the scales of feature groups, then for the relevances, of weights with whitened means m
    and standard deviations ``factor`` (R, M), after the variances of the functions have grown by ``axes``
    (R,); all in place."""
    before = weight_variances(kernel)
    energy, determined = torch.zeros_like(before), torch.zeros_like(before)
    for r, axis in enumerate(axes):  # function by function, to avoid copies of all weights
        energy += m[r].square() / axis
        determined += _determined(factor[r])
    for part, _, span in weight_parts(kernel):
        spent, used = energy[span], determined[span]
        by_group = torch.zeros_like(part.log_scale)
        growth = ratio(
            by_group.index_add(0, part.group, spent), by_group.index_add(0, part.group, used), PRIOR_COUNT
        )
        part.log_scale.add_(growth.log())
        old, left = part.log_relevance.exp(), (spent / growth[part.group])[:-1]
        new = (part.tails + old * left) / (part.tails + used[:-1])
        new = torch.minimum(torch.maximum(new, old / LARGEST_FACTOR), old * LARGEST_FACTOR)
        part.log_relevance.copy_(new.log())
    growth = weight_variances(kernel) / before
    for r, axis in enumerate(axes):
        grown = axis * growth
        m[r].div_(grown.sqrt())
        precision = factor[r].square().reciprocal_().sub_(1).clamp_(min=0)
        factor[r] = precision.mul_(grown).add_(1).rsqrt_()


def _determined(factor: Tensor) -> Tensor:
    """How far the data determine weights with whitened standard deviations ``factor``, 0 to 1."""
    return factor.square().neg_().add_(1).clamp_(min=0)


class Table(Weights):
    """Scores that do not depend on features, one weight per joint label: g = sqrt(amplitude) v.

    labels : (V, V) for transitions. sd : prior standard deviation of a score; 0 silences the block.
    symmetric : True if the order of the labels does not matter; there are then fewer functions than scores.
    Functions of a batch have the shape of one table, (R,), and not that of its tuples."""

    name = "table"
    shared = True
    takes_sites = True

    def __init__(self, labels: Sequence[int], sd: float = 1.0, symmetric: bool = False) -> None:
        self.symmetric = symmetric
        basis = symmetric_basis(labels) if symmetric else None
        super().__init__(None, labels, basis, amplitude=float(sd) ** 2)

    def options(self) -> dict[str, Any]:
        return {"symmetric": True} if self.symmetric else {}

    def prior_factor(self) -> Tensor:
        return self.m.new_ones(1)

    def prior_sds(self) -> Tensor:
        return self.scale.detach().clamp(min=1e-150).reshape(1)

    def conditional(self, rows: Tensor | None, mask: Tensor, factor: Tensor) -> Constant:
        return Constant(self)

    def token_moments(self) -> None:
        return None

    def independent_functions(self) -> tuple[Tensor, Tensor] | None:
        with torch.no_grad():
            return self.scale * self.m[:, 0], self.scale * self.spread.abs()

    @property
    def spread(self) -> Tensor:
        """(P,) standard deviations of the scores, whitened."""
        return self.factor[:, 0]

    def gaussian(self, conditional: Constant) -> tuple[Tensor, Tensor]:
        """Mean and variances (P,) of the scores."""
        return self.scale * self.m[:, 0], (self.scale * self.spread).square()

    def scores_at(self, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        n = 1 if rows is None else len(rows)
        mean, sd = self.constant_scores()
        return mean.expand(n, *self.labels), sd.expand(n, *self.labels)

    def fixed_noise(self, half: int, masks: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        """(2 half, R) standard normal numbers; the second half mirrors the first."""
        noise = torch.randn(half, self.n_functions, generator=generator, dtype=self.m.dtype).to(self.m)
        return torch.cat([noise, -noise])

    def visit_noise(self, half: int, generator: torch.Generator) -> Tensor:
        return self.m.new_empty(0, half)

    def visit_offsets(
        self, here: Constant, sd: Tensor, noise: Tensor, keys: Tensor, seed: int, single: bool
    ) -> Tensor:
        """(S, P) offsets of the draws, from random numbers that depend on the seed only."""
        found = sd[0] * self.fixed_noise(noise.shape[-1], (), torch.Generator().manual_seed(seed))
        return found.float() if single else found

    def solve_sites(
        self, conditionals: Sequence[Constant], linear: Sequence[Tensor], bends: Sequence[Tensor]
    ) -> bool:
        """Sets the exact posterior for quadratics r^T g - g^T Lambda g / 2 with linear terms r (P,) and
        precisions Lambda (P,), one of each per batch. Returns False, and moves nothing, if there is
        none."""
        precision = 1.0 + self.scale.square() * torch.stack(list(bends)).sum(0)
        if bool((precision <= LEAST_PRECISION).any()):
            return False
        self.m.copy_((self.scale * torch.stack(list(linear)).sum(0) / precision)[:, None])
        self.factor.copy_(precision.rsqrt()[:, None])
        return True

    def fit_amplitude(self) -> None:
        """Moves the prior's scale towards where the bound is largest with the posterior of the scores held
        fixed. That optimum has a closed form: the root of the scores' mean second moment. The step is
        over-relaxed by the extent to which the posterior still equals the prior: to that extent the
        posterior follows the scale, and plain fixed-point iteration would creep. A posterior wider than its
        prior counts as different from it too: twice the step would swing about the best scale forever."""
        if self.is_silent:
            return
        with torch.no_grad():
            prior = self.scale.square()
            variance = prior * self.spread.square().view(self.n_functions, -1).sum(-1)
            second = (prior * self.m[:, 0].square() + variance).sum() + PRIOR_SCORES
            best = second / (self.n_functions + PRIOR_SCORES)
            share = variance / prior
            untouched = torch.minimum(share, share.reciprocal()).mean()
            growth = (1 + untouched) * (best / prior).log()
            self.log_amplitude.add_(growth)
            shrink = (-0.5 * growth).exp()
            self.m.mul_(shrink)
            self.factor.mul_(shrink)

    def curvature_bound(self, batches: Sequence[tuple[Constant, Tensor, Tensor]]) -> float:
        """Largest curvature of the bound in a whitened score, if each tuple bends by at most 1/4 in
        the score itself. batches : conditional, mask (B, T), sample weight (B,) of the examples."""
        tuples = sum(float(weight @ mask.sum(-1).to(weight)) for _, mask, weight in batches)
        return 1 + 0.25 * float(self.scale.detach().square()) * tuples

    def project(self, conditional: Constant, slope: Tensor, bend: Tensor) -> tuple[Tensor, Tensor]:
        """Turns a gradient in mean and covariance of the scores into one in ``m`` and in S, without the
        amplitude."""
        return slope[:, None], bend.reshape(self.factor.shape)


def symmetric_basis(labels: Sequence[int]) -> Tensor:
    """(P, R) basis with one function for all orders of the same labels. labels : the numbers of labels, all
    equal."""
    index = torch.cartesian_prod(*(torch.arange(n) for n in labels)).sort(-1).values
    group = torch.unique(index, dim=0, return_inverse=True)[1]
    return torch.nn.functional.one_hot(group).double()


@dataclass(frozen=True)
class WeightDraws:
    """Draws of weights, each looked up in a table of noise when its feature is met, so that memory does not
    grow with the number of features. prior_factor : (M,). noise : from ``fixed_noise``, None for the
    mean."""

    prior_factor: Tensor
    noise: Tensor | None

    def at(self, block: Weights, rows: Tensor, mask: Tensor) -> Tensor:
        """(S, B, T, *labels) scores, joint over the tuples of an example; (S, *labels) if shared."""
        # A batch has few of the many features.
        index, here = block.conditional(rows, mask, self.prior_factor).compact
        h = here.times(block.m[:, index])[None]
        if self.noise is not None:
            h = h + here.spread(block.factor[:, index], self.noise)
        return block.scores(block.scale * h)


@dataclass
class WeightCurvature:
    """precision : (R, M), the precision that the data add to each weight, whitened except for the
    amplitude. Curvature is taken tuple by tuple: where a feature occurs twice in an example, the curvature
    between the two tuples is left out."""

    block: Weights
    precision: Tensor

    def add(self, conditional: Any, bend: Tensor) -> None:
        """bend : (B, T, R), or (B, T, *labels) where each score has a function of its own; (B, *labels),
        summed over an example's tuples, if shared."""
        self.precision += conditional.squares_times(bend)

    def tensors(self) -> list[Tensor]:
        return [self.precision]

    def finish(self) -> None:
        self.block.factor.copy_((1 + self.block.scale.square() * self.precision).rsqrt())
