"""A posterior of independent weights, for kernels that are linear in features.

A sparse GP may be conditioned on any linear functionals of its functions in the place of values at
inducing inputs. Here they are the weights themselves: their prior covariance is diagonal, they leave
nothing open, and a row of A active features touches A of them. Whitened, beta_d = sqrt(w_d) v_d with q(v)
= prod N(m, s^2) and h = X sqrt(w) v.

Cost is linear in the data. The price is that q has no correlations between weights; the gain, that none
of them is left out. Letters as in ``gp.block``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor, nn

from structgp.gp.block import AXIS_PRIOR_COUNT, LARGEST_FACTOR, Block, Entropy, Seen, kl_diagonal, ratio
from structgp.gp.kernels import active_features, weight_parts, weight_variances
from structgp.gp.kernels.relevance import degrees_of_freedom
from structgp.gp.weight_rows import WeightConditional, noise_table

PRIOR_COUNT = 10.0
"""Parameters' worth of prior that a scale is right as it is. Without correlations a posterior is too sure
of what it has found, so this is more than for inducing values."""


class Weights(Block):
    """kernel : one that ``has_weights``. Parameters ``m`` and ``factor``, standard deviations of either
    sign, both (R, M), whitened."""

    name = "weights"

    def __init__(self, kernel: Kernel, labels: Sequence[int], basis: Tensor | None = None) -> None:
        super().__init__(labels, basis)
        self.kernel = kernel
        with torch.no_grad():
            M = len(weight_variances(kernel))
        shape = (self.n_functions, M)
        self.m = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        self.factor = nn.Parameter(torch.ones(shape, dtype=torch.float64))

    @property
    def takes_sites(self) -> bool:
        return False

    @property
    def spread(self) -> Tensor:
        return self.factor

    def options(self) -> dict[str, Any]:
        return {}

    # -- what the posterior says of a batch --------------------------------------------------------

    def prior_factor(self) -> Tensor:
        """(M,) prior standard deviations of the weights."""
        return weight_variances(self.kernel).sqrt()

    def conditional(self, rows: Tensor, mask: Tensor, factor: Tensor) -> WeightConditional:
        """h given the weights at rows (B, T, W). Cost O(B T W)."""
        found = active_features(self.kernel, rows)
        found = replace(found, value=torch.where(mask[..., None], found.value, 0))
        return WeightConditional(found, factor, factor.new_ones(()))

    def conditional_size(self, mask: Tensor, width: int) -> int:
        return 16 * mask.numel() * width

    def amplified(self, conditional: WeightConditional) -> WeightConditional:
        return conditional.scaled(self.scale)

    def gaussian(self, conditional: WeightConditional) -> tuple[Tensor, Tensor]:
        """Mean (1, B, T, R) and covariance (1, B, R, T, T) of the functions."""
        here = self.amplified(conditional)
        return here.mean(self.m)[None], here.covariance(self.factor)[None]

    def kl(self, entropy: Entropy = "bhattacharyya") -> Tensor:
        return kl_diagonal(self.m, self.factor)

    def effective_parameters(self) -> Tensor:
        """() how many weights the data determine: the sum of 1 - variance / prior variance."""
        return (1 - self.factor.square()).sum()

    def root_times(self, v: Tensor) -> Tensor:
        return self.factor * v

    root_transposed_times = root_times

    def spread_parameters(self) -> list[nn.Parameter]:
        return [self.factor]

    def kernel_parameters(self) -> list[nn.Parameter]:
        self.kernel.requires_grad_(True)
        return list(self.kernel.parameters())

    def round_factor(self) -> None:
        """Rounds the spread to single precision, in place: a file may then hold it in half the space and
        still give the same answers to the last bit."""
        with torch.no_grad():
            self.factor.copy_(self.factor.float())

    @property
    def prior_sd(self) -> float:
        """Prior standard deviation of the score of a tuple without features."""
        constants = [span.stop - 1 for _, _, span in weight_parts(self.kernel)]
        return float((self.scale * self.prior_factor()[constants].square().sum().sqrt()).detach())

    # -- what a person is shown --------------------------------------------------------------------

    def scores_at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(N, *labels) posterior mean and standard deviation of the scores of tuples with features (N,
        W)."""
        with torch.no_grad():
            mask = torch.ones(1, len(rows), dtype=torch.bool, device=rows.device)
            here = self.amplified(self.conditional(rows[None], mask, self.prior_factor()))
            variance = here.covariance(self.factor).diagonal(dim1=-1, dim2=-2)[0].T  # (N, R)
            square = variance if self.has_own_functions else variance @ self.basis.T.square()
            sd = square.sqrt().unflatten(-1, self.labels)
            return self.scores(here.mean(self.m)[0]), sd

    def constant_scores(self) -> tuple[Tensor, Tensor]:
        constants = [span.stop - 1 for _, _, span in weight_parts(self.kernel)]
        with torch.no_grad():
            sd = (self.scale * self.prior_factor())[constants]  # (C,)
            mean = (self.m[:, constants] * sd).sum(-1)
            variance = (self.factor[:, constants] * sd).square().sum(-1)
            square = variance if self.has_own_functions else self.basis.square() @ variance
            return self.scores(mean), square.sqrt().view(self.labels)

    def feature_scores(self, row: Tensor, direction: Tensor) -> Tensor:
        """(A,) what each active feature of a row (1, W) adds to the score along ``direction`` (R,)."""
        with torch.no_grad():
            found = active_features(self.kernel, row[None])
            place, value = found.place[0, 0], found.value[0, 0]
            weight = (self.m * self.scale * self.prior_factor()).T @ direction  # (M,)
            return torch.where(place >= 0, weight[place.clamp(min=0)] * value, 0)

    # -- draws -------------------------------------------------------------------------------------

    def fixed_noise(self, half: int, masks: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        return noise_table(self.n_functions, half, generator).to(self.m)

    def offsets(self, conditional: WeightConditional, noise: Tensor, i: int, numbers: Tensor) -> Tensor:
        """(S, B, T, R) what each draw adds to the mean. Examples are independent given the shared tables:
        with draws of its own in each, what one draw happens to say of a feature is not said by all of
        them."""
        return conditional.spread(self.factor.abs(), noise, numbers)

    def drawn_functions(
        self, conditional: WeightConditional, noise: Tensor, i: int, numbers: Tensor
    ) -> Tensor:
        # Through the weights that occur in the batch alone: there may be many times as many.
        index, here = conditional.compact
        return here.times(self.m[:, index]) + here.spread(self.factor[:, index].abs(), noise, numbers)

    def draws(self, n: int, seed: int, generator: torch.Generator) -> WeightDraws:
        table = noise_table(self.n_functions, (n + 1) // 2, generator).to(self.m)
        return WeightDraws(self.prior_factor(), table)

    def mean_draw(self) -> WeightDraws:
        return WeightDraws(self.prior_factor(), None)

    # -- closed forms ------------------------------------------------------------------------------

    def curvature_sum(self) -> WeightCurvature:
        return WeightCurvature(self, torch.zeros_like(self.m))

    # -- sites of minibatches, in the weights themselves (``inference.minibatch``) -----------------

    @property
    def takes_minibatches(self) -> bool:
        return True

    def prior_sds(self) -> Tensor:
        """(M,)."""
        return self.prior_factor()

    def compact(self, conditional: WeightConditional) -> tuple[Tensor, WeightConditional]:
        """(F,) the weights that occur in a batch, and the conditional of those alone."""
        return conditional.compact

    def knowledge(self) -> tuple[Tensor, Tensor]:
        """Precision and linear term (M, R) of what q says beyond its prior."""
        prior_sd, m, s = self.prior_factor()[:, None], self.m.T, self.factor.T.square()
        return (s.reciprocal() - 1).clamp(min=0) / prior_sd.square(), m / (s * prior_sd)

    def place(self, precision: Tensor, linear: Tensor, prior_sd: Tensor, index: Tensor) -> None:
        """Sets q to prior times sites with precision and linear term (F, R), at the weights ``index``
        (F,) whose prior standard deviations are ``prior_sd`` (F,)."""
        prior_sd = prior_sd[:, None]
        total = 1 + prior_sd.square() * precision.clamp(min=0)
        self.m[:, index] = (prior_sd * linear / total).T
        self.factor[:, index] = total.rsqrt().T

    def visit_noise(self, half: int, generator: torch.Generator) -> Tensor:
        return noise_table(self.n_functions, half, generator).to(self.m)

    def visit_offsets(
        self, here: WeightConditional, sd: Tensor, noise: Tensor, keys: Tensor, seed: int, single: bool
    ) -> Tensor:
        """(S, B, T, R) what draws of the weights in a batch add to the mean. sd : (F, R) of the weights;
        noise : as of ``visit_noise``; keys : (B,). If ``single``, in single precision with one draw of a
        weight for all of the batch: of much data a batch is a small part, and what one draw says in it is
        little."""
        if not single:
            return here.spread((sd / here.prior_sd[:, None]).T, noise, keys)
        sd, rows = sd.float(), here.rows.single
        generator = torch.Generator(sd.device).manual_seed(seed)
        drawn = []
        for _ in range(noise.shape[-1]):
            eps = torch.empty_like(sd).normal_(generator=generator)
            drawn.append(rows.times(eps.mul_(sd)).unflatten(0, here.features.value.shape[:2]))
        return torch.stack(drawn + [-x for x in drawn])

    def learn_scales(self, seen: Sequence[Seen] = (), prior_factor: Tensor | None = None) -> Tensor:
        """One step for the amplitudes of the functions, then the scales of feature groups, then the
        relevances, each given the ones before: what one has explained is not explained again. The mean
        weights stay what they are, and what the data say of their precision. Returns by how much the
        variance of each function has grown, (R,). Cost O(R M).

        Whitened, the energy of a weight is m^2 and what the data determine of it 1 - s^2
        (``gp.scale_steps``)."""
        before, axes = weight_variances(self.kernel), self.m.new_ones((self.n_functions, 1))
        energy = self.m.square()
        determined = (1 - self.factor.square()).clamp(min=0)
        if not self.has_own_functions:
            axes = ratio(energy.sum(1), determined.sum(1), AXIS_PRIOR_COUNT)[:, None]
            self.basis.mul_(axes.sqrt().T)
            energy = energy / axes
        nu = degrees_of_freedom(self.n_functions)
        for part, _, span in weight_parts(self.kernel):
            spent, used = energy[:, span].sum(0), determined[:, span].sum(0)
            constant = part.group.new_full((1,), len(part.sizes))
            group = torch.cat([part.group, constant])
            by_group = torch.zeros_like(part.log_scale)
            growth = ratio(
                by_group.index_add(0, group, spent), by_group.index_add(0, group, used), PRIOR_COUNT
            )
            part.log_scale.add_(growth.log())
            old, left = part.log_relevance.exp(), (spent / growth[group])[:-1]
            new = (nu + old * left) / (nu + used[:-1])
            new = torch.minimum(torch.maximum(new, old / LARGEST_FACTOR), old * LARGEST_FACTOR)
            part.log_relevance.copy_(new.log())
        grown = axes * weight_variances(self.kernel) / before
        self.m.div_(grown.sqrt())
        precision = (self.factor.square().reciprocal() - 1).clamp(min=0)
        self.factor.copy_((1 + grown * precision).rsqrt())
        return axes[:, 0]


@dataclass(frozen=True)
class WeightDraws:
    """Draws of weights, each looked up in a table of noise when its feature is met: no memory grows with
    the number of features. prior_sd : (M,); table : (rows, R, S / 2), None for the posterior mean."""

    prior_sd: Tensor
    table: Tensor | None

    def at(self, block: Weights, rows: Tensor, mask: Tensor) -> Tensor:
        """(S, B, T, *labels) scores, joint over the tuples of an example."""
        here = block.amplified(block.conditional(rows, mask, self.prior_sd))
        h = here.times(block.m)[None]
        if self.table is not None:
            h = h + here.spread(block.factor.abs(), self.table)
        return block.scores(h)


@dataclass
class WeightCurvature:
    """precision : (R, M), what the data say of each whitened weight. Curvature is taken tuple by tuple:
    where a feature comes twice in an example, what its places have in common is left out."""

    block: Weights
    precision: Tensor

    def add(self, conditional: WeightConditional, bend: Tensor) -> None:
        """bend : (B, T, R), or (B, T, *labels) where each score has its function."""
        self.precision += conditional.squares_times(self.block.scale.square() * bend.flatten(2))

    def tensors(self) -> list[Tensor]:
        return [self.precision]

    def finish(self) -> None:
        self.block.factor.copy_((1 + self.precision).rsqrt())
