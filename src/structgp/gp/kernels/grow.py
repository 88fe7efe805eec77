"""A kernel in weight space for more features than it was learned on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from structgp.gp.kernels.block_sum import SELDOM, BlockSumKernel
from structgp.gp.kernels.linear_weights import weight_parts
from structgp.gp.kernels.relevance import RelevanceKernel


def grown(
    kernel: Kernel, sizes: Sequence[Sequence[int]], rows: Tensor, moved: Tensor | None = None
) -> tuple[Kernel, Tensor]:
    """The kernel with ``sizes`` values in each template of each part, and where each of the M old weights
    is
    among the new ones, (M,).

    New features have relevance 1; whether a value is seldom is told by rows (N, W), of the new data.
    ``moved`` : (D,), new ids of the sparse features, where they have not stayed.
    """
    made, places, before = [], [], 0
    for (part, columns, _), now in zip(weight_parts(kernel), sizes, strict=True):
        new = RelevanceKernel(now, sparse=part.sparse, rare=part.rare).double()
        place = _places(part, new, moved)
        with torch.no_grad():
            new.log_scale.copy_(part.log_scale)
            new.log_relevance[place[:-1]] = part.log_relevance
        if part.rare:
            found = new.known(rows[:, columns])[0][:, : len(new.sizes)]
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
    """(D + 1,) of features, group after group, then those of being rare, then the constant."""
    D = len(new.log_relevance)
    if old.sparse and moved is not None:
        return torch.cat([moved, torch.tensor([D])])
    parts, start = [], 0
    for was, now in zip(old.sizes, new.sizes, strict=True):
        parts.append(torch.arange(was) + start)
        start += now
    return torch.cat([*parts, torch.arange(start, D + 1)])
