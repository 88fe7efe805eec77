"""Kernels that are linear in features, as priors on one weight for each of them.

    f(x) = sum_d x_d beta_d,   beta_d ~ N(0, w_d):   k(x, z) = sum_d w_d x_d z_d.

Where every part of a kernel is a ``RelevanceKernel``, its weights are the D features of each part and its
constant, part after part: M of them in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.relevance import RelevanceKernel


@dataclass(frozen=True)
class ActiveFeatures:
    """What rows (..., W) hold, A features each: place (..., A), which of the M weights, -1 for a feature
    that was never seen; value (..., A), 0 where there is none; name (..., A), a number that tells
    features apart, seen or not; unseen (..., A), prior variance of the weight where place is -1."""

    place: Tensor
    value: Tensor
    name: Tensor
    unseen: Tensor


def has_weights(kernel: Kernel) -> bool:
    """Whether all of the kernel is linear in features that can be told apart."""
    if isinstance(kernel, BlockSumKernel):
        return all(isinstance(part, RelevanceKernel) for part in kernel.kernels)
    return isinstance(kernel, RelevanceKernel)


def weight_parts(kernel: Kernel) -> Iterator[tuple[RelevanceKernel, slice, slice]]:
    """Each part, its columns of a row, and its place among the M weights: features, then constant."""
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
    return torch.cat(
        [torch.cat([part.weights, part.log_scale[-1:].exp()]) for part, _, _ in weight_parts(kernel)]
    )


def active_features(kernel: Kernel, x: Tensor) -> ActiveFeatures:
    """Of rows x (..., W). Cost O(N W)."""
    places, values, names, unseen = [], [], [], []
    parts = list(weight_parts(kernel))
    for i, (part, columns, span) in enumerate(parts):
        here = x[..., columns]
        place, value = part.known(here)
        one = value.new_ones(*value.shape[:-1], 1)
        constant = (span.stop - 1) * one.long()
        places += [torch.where(place >= 0, place + span.start, -1), constant]
        values += [value, one]
        # Ids of one part never meet those of another; where there is no feature, its value is 0.
        names += [(part.ids(here) + 1) * len(parts) + i, i * torch.ones_like(constant)]
        unseen += [part.slot_scales.expand_as(value), torch.zeros_like(one)]
    return ActiveFeatures(*(torch.cat(found, -1) for found in (places, values, names, unseen)))
