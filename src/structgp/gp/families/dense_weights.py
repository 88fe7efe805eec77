"""Posteriors of correlated weights of dense features, beside independent weights of sparse features.

Dense features (``gp.kernels.dense``) are few and all of them are active in every row, so the weights of a
function get a full covariance: S_j^-1 = I + sum_t phi_t E[-d^2 log p / dh_tj^2] phi_t^T, with the
curvature of each tuple by itself. Letters as in ``gp.block``; F dense features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from torch import Tensor, nn

from structgp.gp.block import AXIS_PRIOR_COUNT, Block, Entropy, Seen, ratio
from structgp.gp.families.dense_scales import (
    SWEEPS,
    Quadratic,
    gram_of,
    kind_for,
    learn_shape,
    learn_size,
    spread_of,
)
from structgp.gp.families.weights import learn_relevances
from structgp.gp.kernels import active_features, weight_parts, weight_variances
from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.dense import DenseKernel
from structgp.gp.linalg import each_times
from structgp.gp.mean_search import MeanSearch, MixedSearch
from structgp.gp.weight_rows import WeightConditional, noise_table

SHARING = 8
"""Tokens per draw of the weights. A fit draws the weights once for a group of sequences, rather than the
scores of each sequence by itself: an eighth of the cost, and errors still average out over groups. Not
chosen on data."""


def split_kernel(kernel: Kernel) -> tuple[Kernel | None, DenseKernel, slice]:
    """The part of a kernel over whole rows that has independent weights, the part on dense columns, and
    those columns."""
    if isinstance(kernel, DenseKernel):
        return None, kernel, slice(None)
    parts = list(zip(kernel.kernels, kernel.bounds, strict=True))
    ((dense, bounds),) = [part for part in parts if isinstance(part[0], DenseKernel)]
    loose, places = zip(*[part for part in parts if part[0] is not dense], strict=True)
    return BlockSumKernel(loose, places), dense, slice(*bounds)


@dataclass(frozen=True)
class DenseConditional:
    """The functions of a batch given the weights: h = X beta + phi w, plus what w leaves open. loose : the
    same for the independent weights alone, None if there are none. values : (B, T, F) phi, 0 at padding.
    left : (B, T) variance that w leaves open."""

    loose: WeightConditional | None
    values: Tensor
    left: Tensor

    @property
    def n_loose(self) -> int:
        return 0 if self.loose is None else len(self.loose.prior_sd)

    def times(self, m: Tensor) -> Tensor:
        """(B, T, R) functions from whitened weights (R, M)."""
        found = self.values @ m[:, self.n_loose :].T
        return found if self.loose is None else found + self.loose.times(m[:, : self.n_loose])

    def transposed_times(self, values: Tensor) -> Tensor:
        """(R, M) the transposed product, from (B, T, R)."""
        dense = values.flatten(0, 1).T @ self.values.flatten(0, 1)
        return dense if self.loose is None else torch.cat([self.loose.transposed_times(values), dense], 1)


class DenseWeights(Block):
    """kernel : a :class:`DenseKernel`, or a sum of one and kernels that have weights. Parameters ``m``
    (R, M), the independent weights first; ``factor`` (R, M - F), standard deviations of the independent
    weights; ``root`` (R, F, F), upper triangular, whose product with its transpose is the covariance of the
    dense weights. ``gram`` : (R, F, F) that of ``DenseCurvature`` in the last round, None if not known."""

    name = "dense-weights"
    has_weights = True
    takes_sites = False
    learns_from_slopes = True
    learns_shape = False
    """True if ``learn_scales`` moves the kernel's shape too, which takes time cubic in the tokens."""

    gram: Tensor | None = None

    def __init__(
        self, kernel: Kernel, labels: Sequence[int], basis: Tensor | None = None, amplitude: float = 1.0
    ) -> None:
        super().__init__(labels, basis, amplitude)
        self.kernel, (loose, dense, self.columns) = kernel, split_kernel(kernel)
        # In a tuple, so that they are not registered as submodules here: they belong to the kernel.
        self.parts = (loose, dense)
        ends = [] if loose is None else [span.stop for _, _, span in weight_parts(loose)]
        self.n_loose = ends[-1] if ends else 0
        self.constants = [*(end - 1 for end in ends), self.n_loose]
        self.n_values, R, F = self.n_loose + dense.n_features, self.n_functions, dense.n_features
        like: dict[str, Any] = {"dtype": torch.float64, "device": dense.log_scale.device}
        self.m = nn.Parameter(torch.zeros((R, self.n_values), **like))
        self.factor = nn.Parameter(torch.ones((R, self.n_loose), **like))
        self.root = nn.Parameter(torch.eye(F, **like).repeat(R, 1, 1))

    @classmethod
    def size(
        cls, kernel: Any, inducing: Tensor | None, n_functions: int, options: Mapping[str, Any]
    ) -> int:
        loose, dense, _ = split_kernel(kernel)
        n_loose = 0 if loose is None else max(span.stop for _, _, span in weight_parts(loose))
        return n_functions * (2 * n_loose + dense.n_features * (1 + dense.n_features))

    @property
    def n_inducing(self) -> int:
        return self.parts[1].n_inducing

    def prior_factor(self) -> tuple[Tensor | None, Tensor]:
        """Prior standard deviations of the independent weights, and the factor of the smooth part's
        covariance."""
        loose, dense = self.parts
        return None if loose is None else weight_variances(loose).sqrt(), dense.prior_factor()

    def conditional(self, rows: Tensor, mask: Tensor, factor: Any) -> DenseConditional:
        sds, smooth = factor
        found = None if sds is None else self._loose_conditional(rows, mask, sds)
        dense = self.parts[1].features(rows[..., self.columns].flatten(0, 1), smooth)
        values, left = (a.unflatten(0, mask.shape) for a in (dense.values, dense.left))
        return DenseConditional(found, torch.where(mask[..., None], values, 0), torch.where(mask, left, 0))

    def conditional_size(self, mask: Tensor, width: int) -> int:
        """About how many numbers ``conditional`` holds. width : number of columns of whole rows."""
        loose = 0 if self.parts[0] is None else 16 * (width - self.parts[1].n_columns)
        return mask.numel() * (loose + self.parts[1].n_features)

    def gaussian(self, conditional: DenseConditional) -> tuple[Tensor, Tensor]:
        covariance = self._dense_covariance(conditional)
        if conditional.loose is not None:
            covariance = covariance + conditional.loose.covariance(self.factor)
        return (self.scale * conditional.times(self.m))[None], (self.scale.square() * covariance)[None]

    def _dense_covariance(self, conditional: DenseConditional) -> Tensor:
        """(B, R, T, T) covariance under the dense weights, without the amplitude. One function at a time:
        memory O(B T F). Cost O(R B T F (F + T))."""
        values, found = conditional.values, []
        kind = kind_for(values, values.numel() * self.root[..., 0].numel())
        kind = values.dtype if torch.is_grad_enabled() else kind
        values, open_part = values.to(kind), torch.diag_embed(conditional.left)
        for root in self.root.to(kind):
            along = values @ root
            found.append((along @ along.mT).to(open_part) + open_part)
        return torch.stack(found, 1)

    def _loose_conditional(self, rows: Tensor, mask: Tensor, sds: Tensor) -> WeightConditional:
        found = active_features(self.parts[0], rows)
        return WeightConditional(replace(found, value=torch.where(mask[..., None], found.value, 0)), sds)

    def kl(self, entropy: Entropy = "bhattacharyya") -> Tensor:
        """KL(q || p), exact."""
        spread = torch.linalg.vector_norm(self.root).square()  # without a copy of the roots
        square = self.m.square().sum() + self.factor.square().sum() + spread - self.m.numel()
        diagonal = self.root.diagonal(dim1=-1, dim2=-2)
        return 0.5 * square - self.factor.abs().log().sum() - diagonal.abs().log().sum()

    def determined(self) -> Tensor:
        """(R,) how many weights of each function the data determine: the sum of 1 - variance / prior
        variance."""
        spread = torch.linalg.vector_norm(self.root, dim=(1, 2)).square()
        return self.n_values - self.factor.square().sum(1) - spread

    def effective_parameters(self) -> Tensor:
        return self.determined().sum()

    def root_times(self, v: Tensor) -> Tensor:
        """(..., R, M) C v with C C^T the covariance."""
        loose, dense = v[..., : self.n_loose], v[..., self.n_loose :]
        return torch.cat([self.factor * loose, each_times(self.root, dense)], -1)

    def root_transposed_times(self, v: Tensor) -> Tensor:
        loose, dense = v[..., : self.n_loose], v[..., self.n_loose :]
        return torch.cat([self.factor * loose, each_times(self.root.mT, dense)], -1)

    def _constant_sds(self) -> Tensor:
        """Prior standard deviations of the constants' weights, before the amplitude; that of the dense part
        comes last."""
        kernel = self.parts[1]
        sds, dense = self.prior_factor()[0], (0.5 * kernel.log_scale[:1]).exp() * (not kernel.whole)
        return dense if sds is None else torch.cat([sds[self.constants[:-1]], dense])

    @property
    def prior_sd(self) -> float:
        return float((self.scale * self._constant_sds().square().sum().sqrt()).detach())

    def constant_scores(self) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            sd = self.scale * self._constant_sds()
            mean = (self.m[:, self.constants] * sd).sum(-1)
            spread = torch.cat(
                [self.factor[:, self.constants[:-1]], self.root[:, 0].norm(dim=-1)[:, None]], 1
            )
            variance = (spread * sd).square().sum(-1)
            square = variance if self.has_own_functions else self.basis.square() @ variance
            return self.scores(mean), square.sqrt().view(self.labels)

    def feature_scores(self, row: Tensor, direction: Tensor) -> Tensor:
        """(A + 3,) what each active feature of a row (1, W) adds to the score along ``direction`` (R,),
        followed by label frequencies, linear and smooth part of the dense columns."""
        with torch.no_grad():
            mask = torch.ones(1, 1, dtype=torch.bool, device=row.device)
            here, (loose, dense) = self.conditional(row[None], mask, self.prior_factor()), self.parts
            weight = self.scale * self.m.T @ direction  # (M,)
            parts = weight.new_zeros(3).index_add(
                0, dense.component, here.values[0, 0] * weight[self.n_loose :]
            )
            if here.loose is None or loose is None:
                return parts
            found = here.loose.features
            place, value = found.place[0, 0], found.value[0, 0]
            known = (here.loose.prior_sd * weight[: self.n_loose])[place.clamp(min=0)]
            return torch.cat([torch.where(place >= 0, known * value, 0), parts])

    def fixed_noise(self, half: int, masks: Sequence[Tensor], generator: torch.Generator) -> Any:
        """A table for the independent weights; and, for each batch, standard normal numbers whose draws
        will be mirrored: (R, half, G, F) for the dense weights, one set for each of G groups of
        neighbouring examples (``SHARING``), and (half, B, T, R) for what the weights leave open, None where
        that is nothing."""
        R = self.n_functions
        table = noise_table(R, half, generator).to(self.m) if self.n_loose else None
        found = []
        for mask in masks:
            per_group = max(1, SHARING * half // mask.shape[1])
            dense = self._dense_noise(torch.float32, generator, R, half, -(-len(mask) // per_group))
            rest = None
            if self.parts[1].has_nystrom:
                rest = torch.randn((half, *mask.shape, R), generator=generator, dtype=self.m.dtype).to(
                    self.m
                )
            found.append((dense, rest))
        return table, found

    def _dense_noise(self, kind: torch.dtype, generator: torch.Generator, *shape: int) -> Tensor:
        """(*shape, F) standard normal numbers, 0 for features that are always 0: constant columns use up no
        random numbers, and so do not change those of other features."""
        varies = self.parts[1].feature_varies
        found = torch.zeros((*shape, len(varies)), dtype=kind, device=varies.device)
        numbers = torch.randn((*shape, int(varies.sum())), generator=generator, dtype=kind)
        found[..., varies] = numbers.to(found)
        return found

    def offsets(self, conditional: DenseConditional, noise: Any, i: int, numbers: Tensor) -> Tensor:
        """(S, B, T, R) what each draw adds to the mean, joint over tuples, without the amplitude. Cost
        O(R F (G half F + S B T))."""
        table, (dense, rest) = noise[0], noise[1][i]
        (R, half, G, F), (B, T) = dense.shape, conditional.left.shape
        kind = kind_for(conditional.values, dense.numel() * F)
        weights = dense.flatten(1, 2).to(kind) @ self.root.to(kind).mT
        weights = weights.view(R, half, G, F).permute(2, 3, 1, 0).flatten(2)  # (G, F, half R)
        n = -(-B // G)
        values = nn.functional.pad(conditional.values.to(kind), (0, 0, 0, 0, 0, G * n - B))
        found = values.view(G, n * T, F) @ weights
        found = found.view(G * n, T, half, R)[:B].permute(2, 0, 1, 3).to(conditional.values.dtype)
        if rest is not None:
            found = found + conditional.left.sqrt()[..., None] * rest
        found = torch.cat([found, -found])
        if conditional.loose is not None:
            found += conditional.loose.spread(self.factor, table, numbers)
        return found

    def drawn_functions(self, conditional: Any, noise: Any, i: int, numbers: Tensor) -> Tensor:
        return conditional.times(self.m) + self.offsets(conditional, noise, i, numbers)

    def draws(self, n: int, seed: int, generator: torch.Generator) -> DenseDraws:
        """n draws, rounded up to mirrored pairs. Cost O(n R F^2)."""
        half = (n + 1) // 2
        table = noise_table(self.n_functions, half, generator).to(self.m) if self.n_loose else None
        noise = self._dense_noise(self.m.dtype, generator, half, self.n_functions)
        spread = torch.einsum("rfg,srg->srf", self.root, noise)
        mean = self.m[:, self.n_loose :]
        return DenseDraws(torch.cat([mean + spread, mean - spread]), self.prior_factor(), table, seed)

    def mean_draw(self) -> DenseDraws:
        return DenseDraws(self.m[None, :, self.n_loose :].clone(), self.prior_factor(), None, None)

    def mean_search(self, conditionals: Sequence[Any] | None) -> MeanSearch:
        if conditionals is None or not self.n_loose or self.m.device.type != "cpu":
            return MeanSearch(self)
        return MixedSearch(self, conditionals)

    def curvature_sum(self) -> DenseCurvature:
        return DenseCurvature(self, torch.zeros_like(self.factor))

    def learn_scales(self, seen: Sequence[Seen] = (), prior_factor: Any = None) -> Tensor:
        """Like that of ``Weights``. The scale of the dense part moves towards where the bound is largest
        with the likelihood replaced by the quadratic that ``seen`` holds. Cost O(R (N F^2 + F^3))."""
        axes = self.m.new_ones(self.n_functions)
        if not self.has_own_functions:
            axes = ratio(self.m.square().sum(1), self.determined(), AXIS_PRIOR_COUNT)
        quadratic = Quadratic.of(self, seen, axes)
        size = self.scale.square() * axes
        gram = None if self.learns_shape else self._gram(seen).mul_(size[:, None, None])
        self.basis.mul_(axes.sqrt())
        if self.n_loose:
            learn_relevances(self.parts[0], self.m[:, : self.n_loose], self.factor, axes)
        if self.learns_shape:
            quadratic = learn_shape(self, quadratic)
        m, root = learn_size(self.parts[1], quadratic, 0 if self.learns_shape else SWEEPS, gram)
        self.m[:, self.n_loose :] = m
        self.root.copy_(root)
        return axes

    def _gram(self, seen: Sequence[Seen]) -> Tensor:
        """(R, F, F) gram matrices of ``seen``: those that the last round left, or else summed anew."""
        found, self.gram = self.gram, None
        if found is None:
            total = self.curvature_sum()
            for s in seen:
                total.add(s.conditional, s.bend)
            found = total.dense
        assert found is not None
        return found

    def round_factor(self) -> None:
        super().round_factor()
        self.gram = None
        with torch.no_grad():
            self.root.copy_(self.root.float())


@dataclass(frozen=True)
class DenseDraws:
    """Draws of dense weights, ``values`` (S, R, F), and of independent ones through a table of noise.
    prior_factor : that of the block. seed : that of the part that the dense features leave open, None to
    leave this part out."""

    values: Tensor
    prior_factor: Any
    table: Tensor | None
    seed: int | None

    def at(self, block: DenseWeights, rows: Tensor, mask: Tensor) -> Tensor:
        """(S, B, T, *labels) scores, joint over the tuples of an example."""
        here = block.conditional(rows, mask, self.prior_factor)
        h = torch.einsum("btf,srf->sbtr", here.values, self.values)
        if here.loose is not None:
            h = h + here.loose.times(block.m[:, : block.n_loose])
            if self.table is not None:
                h = h + here.loose.spread(block.factor, self.table)
        if self.seed is not None:
            S, R = self.values.shape[:2]
            # Tuple by tuple from a separate generator, so that a longer example only appends numbers.
            rng = np.random.default_rng([self.seed, 1])
            eps = torch.from_numpy(rng.standard_normal((mask.shape[1], S // 2, R))).to(h)
            rest = torch.einsum("bt,tsr->sbtr", here.left.sqrt(), eps)
            h = h + torch.cat([rest, -rest])
        return block.scores(block.scale * h)


@dataclass
class DenseCurvature:
    """The precision that the data add: loose (R, M - F) to each independent weight, dense (R, F, F) to the
    dense weights (None before any batch was added), whitened except for the amplitude."""

    block: DenseWeights
    loose: Tensor
    dense: Tensor | None = None

    def add(self, conditional: DenseConditional, bend: Tensor) -> None:
        """bend : (B, T, R). Cost O(R B T F^2)."""
        if conditional.loose is not None:
            self.loose += conditional.loose.squares_times(bend)
        bends, size = bend.flatten(2).flatten(0, 1), self.block.scale.square().expand(bend.shape[2])
        found = gram_of(conditional.values.flatten(0, 1), bends, size)
        if self.dense is None or found.dtype != self.dense.dtype:
            self.dense = found if self.dense is None else self.dense + found
        else:
            self.dense += found

    def tensors(self) -> list[Tensor]:
        """Tensors to be added to those of other processes, in the same floating-point type whatever the
        size of batches."""
        root = self.block.root
        self.dense = torch.zeros_like(root) if self.dense is None else self.dense.to(root)
        return [self.loose, self.dense]

    def finish(self) -> None:
        square = self.block.scale.square()
        self.block.factor.copy_((1 + square * self.loose).rsqrt())
        assert self.dense is not None
        self.block.root.copy_(spread_of(self.dense, square))
        self.block.gram = self.dense
