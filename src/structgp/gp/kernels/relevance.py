"""The linear kernel on groups of features, with a relevance for each feature.

    k(x, z) = b + sum_d s_g(d) r_d x_d z_d

s_g : the scale of a group of features (a template), r_d : the relevance of one of them, b : the scale of
label frequencies. As a prior on weights, feature d has variance s r_d; under r_d ~ inverse-gamma(nu / 2,
nu / 2) a feature's weights are multivariate Student-t: most features say little, some say much.

Being a seldom value is a feature too, which names, new words and typing errors share. For a value that was
never seen it is the only known feature.

Such a kernel is a prior on weights, f(x) = sum_d x_d beta_d with beta_d ~ N(0, w_d). Where every part of
a kernel is a ``RelevanceKernel``, its M weights are, part after part, those of the part's features and of
its constant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor
from torch.nn.functional import pad

from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.sparse import inner_product, pack, row_products, unpack
from structgp.gp.kernels.template import MISSING

SELDOM = 2
"""Largest number of occurrences of a value that counts as rare."""


LIGHT_TAILS, HEAVY_TAILS = 8.0, 2.0
"""Degrees of freedom nu of the Student-t prior of a feature's weights. The first is for templates, whose
scales tell good features from bad ones; the second for features that are all in one group, where nothing
else does (there cross-validation chooses between the two). With templates, 4 and 15 predicted held-out
TRAINING sequences of six tasks about equally well, and better than 1.2 and infinity; in one group, 1.2 and
2.5 predicted those of two tasks better than 4, 8 and 30."""


@dataclass(frozen=True)
class ActiveFeatures:
    """The A features of each of the rows (..., W). place : (..., A) index among the M weights, -1 for a
    feature that was never seen. value : (..., A) value, 0 where there is no feature. name : (..., A) a
    number that identifies the feature, seen or not. unseen : (..., A) prior variance of the weight where
    place is -1."""

    place: Tensor
    value: Tensor
    name: Tensor
    unseen: Tensor


class RelevanceKernel(Kernel):
    """Rows are P value ids (``sizes`` has P entries: how many values of each template are known), or
    with ``sparse`` packed pairs of feature id and value (``sizes`` has one entry).

    Parameters ``log_scale`` (G + 1,), the last of which is that of the bias; ``log_relevance`` (D,), those
    of the known features, group after group. A feature that was never seen has relevance 1, so that only
    the scale of its group counts. With ``rare``, each template has one further feature, placed after all
    others: being among the values that the buffer ``seldom`` marks, or unknown. ``group`` : (D + 1,), the
    index of the scale of each feature and of the constant. ``tails`` : degrees of freedom of the
    relevances' prior. Cost of n x m values with A active features per row: O(n m A).
    """

    seldom: Tensor
    group: Tensor

    has_lengthscale = False

    def __init__(
        self,
        sizes: Sequence[int],
        sparse: bool = False,
        rare: bool = False,
        tails: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if sparse and rare:
            raise ValueError("sparse features have no templates that a value could be rare in")
        if sparse and len(sizes) != 1:
            raise ValueError(f"sparse features are one group, not {len(sizes)}")
        self.sizes, self.sparse, self.rare = [int(n) for n in sizes], bool(sparse), bool(rare)
        self.tails = float(tails or (HEAVY_TAILS if sparse else LIGHT_TAILS))
        groups = torch.arange(len(self.sizes) + 1)
        repeats = torch.tensor(self.sizes, dtype=torch.int64)
        known = groups[:-1].repeat_interleave(repeats, output_size=sum(self.sizes))
        if rare:
            self.register_buffer("seldom", torch.zeros(len(known), dtype=torch.bool))
        group = torch.cat([known, groups if rare else groups[-1:]])
        self.register_buffer("group", group, persistent=False)
        self.register_parameter("log_scale", torch.nn.Parameter(torch.zeros(len(groups))))
        self.register_parameter("log_relevance", torch.nn.Parameter(torch.zeros(len(group) - 1)))

    def active(self, x: Tensor) -> ActiveFeatures:
        """The features of rows x. Names are negative where there is no feature; ``unseen`` is (A,)."""
        scale = self.log_scale[:-1].exp()
        if self.sparse:
            ids, values = unpack(x)
            place = torch.where(ids < self.sizes[0], ids, -1.0).long()
            return ActiveFeatures(place, values, ids.long(), scale)
        P = len(self.sizes)
        if x.shape[-1] != P:
            raise ValueError(f"rows of {x.shape[-1]} columns for {P} templates")
        sizes = torch.tensor(self.sizes, dtype=x.dtype, device=x.device)
        there, slot = x != MISSING, torch.arange(P, device=x.device)
        place = torch.where(there & (x < sizes), x + sizes.cumsum(0) - sizes, -1.0).long()
        # The first P names are those of the features of being rare.
        name = torch.where(there, (x.long() + 1) * P + slot, -1)
        if self.rare:
            rare = there & torch.where(place >= 0, self.seldom[place.clamp(min=0)], True)
            place = torch.cat([place, torch.where(rare, slot + len(self.seldom), -1)], -1)
            name = torch.cat([name, slot.expand_as(name)], -1)
            there, scale = torch.cat([there, rare], -1), torch.cat([scale, scale])
        return ActiveFeatures(place, there.to(x.dtype), name, scale)

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **_: Any
    ) -> Tensor:
        if last_dim_is_batch:
            raise NotImplementedError("RelevanceKernel has no last_dim_is_batch form")
        bias = self.log_scale[-1].exp()
        left, right = self._weighted(x1), self._weighted(x2)
        return (row_products if diag else inner_product)(left, right) + bias

    def _weighted(self, x: Tensor) -> Tensor:
        """Packed rows whose inner product is the kernel, but for the bias."""
        found = self.active(x)
        root = (0.5 * self.log_relevance).exp()
        relevance = torch.where(found.place >= 0, root[found.place.clamp(min=0)], 1.0)
        return pack(found.name, found.value * relevance * found.unseen.sqrt())


def has_weights(kernel: Kernel) -> bool:
    """True if the whole kernel is linear in features that can be listed."""
    if isinstance(kernel, BlockSumKernel):
        return all(isinstance(part, RelevanceKernel) for part in kernel.kernels)
    return isinstance(kernel, RelevanceKernel)


def weight_parts(kernel: Kernel) -> Iterator[tuple[RelevanceKernel, slice, slice]]:
    """Each part, its columns of a row, and its slice of the M weights: features, then constant."""
    if isinstance(kernel, BlockSumKernel):
        parts = list(zip(kernel.kernels, kernel.bounds, strict=True))
    else:
        parts = [(kernel, (0, None))]
    begin = 0
    for part, (start, stop) in parts:
        assert isinstance(part, RelevanceKernel)
        end = begin + len(part.log_relevance) + 1
        yield part, slice(start, stop), slice(begin, end)
        begin = end


def weight_variances(kernel: Kernel) -> Tensor:
    """(M,) prior variance of each weight."""
    parts = (part for part, _, _ in weight_parts(kernel))
    return torch.cat([(p.log_scale[p.group] + pad(p.log_relevance, (0, 1))).exp() for p in parts])


def active_features(kernel: Kernel, x: Tensor) -> ActiveFeatures:
    """The active features of rows x (..., W). Cost O(N W)."""
    places, values, names, unseen = [], [], [], []
    parts = list(weight_parts(kernel))
    for i, (part, columns, span) in enumerate(parts):
        found = part.active(x[..., columns])
        one = found.value.new_ones(*found.value.shape[:-1], 1)
        constant = (span.stop - 1) * one.long()
        places += [torch.where(found.place >= 0, found.place + span.start, -1), constant]
        values += [found.value, one]
        # Names of different parts never coincide. Where there is no feature, the value is 0.
        names += [(found.name + 1) * len(parts) + i, i * torch.ones_like(constant)]
        unseen += [found.unseen.expand_as(found.value), torch.zeros_like(one)]
    return ActiveFeatures(*(torch.cat(found, -1) for found in (places, values, names, unseen)))


def grown(
    kernel: Kernel, sizes: Sequence[Sequence[int]], rows: Tensor, moved: Tensor | None = None
) -> tuple[Kernel, Tensor]:
    """The kernel grown to ``sizes`` values in each template of each part, and (M,) the index of each old
    weight among the new ones.

    New features have relevance 1. Whether a value is seldom is decided from the rows (N, W) of the new
    data; common values stay common. moved : (D,) new ids of the sparse features, if they have changed.
    """
    made, places, before = [], [], 0
    for (part, columns, _), now in zip(weight_parts(kernel), sizes, strict=True):
        new = RelevanceKernel(now, sparse=part.sparse, rare=part.rare, tails=part.tails).double()
        place = _places(part, new, moved)
        with torch.no_grad():
            new.log_scale.copy_(part.log_scale)
            new.log_relevance[place[:-1]] = part.log_relevance
        if part.rare:
            found = new.active(rows[:, columns]).place[:, : len(new.sizes)]
            counts = torch.bincount(found[found >= 0], minlength=len(new.seldom))
            was_common = torch.zeros_like(new.seldom)
            was_common[place[: len(part.seldom)]] = ~part.seldom
            new.seldom.copy_((counts <= SELDOM) & ~was_common)
        made.append(new.requires_grad_(False))
        places.append(place + before)
        before += len(new.log_relevance) + 1
    if isinstance(kernel, BlockSumKernel):
        return BlockSumKernel(made, list(kernel.bounds)), torch.cat(places)
    return made[0], places[0]


def _places(old: RelevanceKernel, new: RelevanceKernel, moved: Tensor | None) -> Tensor:
    """(D + 1,) new indices of the old weights: features, group after group, then those of being rare, then
    the constant."""
    D = len(new.log_relevance)
    if old.sparse and moved is not None:
        return torch.cat([moved, torch.tensor([D])])
    parts, start = [], 0
    for was, now in zip(old.sizes, new.sizes, strict=True):
        parts.append(torch.arange(was) + start)
        start += now
    return torch.cat([*parts, torch.arange(start, D + 1)])
