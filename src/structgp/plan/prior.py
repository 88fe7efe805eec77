"""The prior that a fit starts from: a kernel with its shape learned, and inducing inputs under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from structgp.data.encode import Block, FeatureEncoder
from structgp.gp import Relaxation, choose_inducing, has_shape, learn_shape
from structgp.gp.kernels import RelevanceKernel, variance
from structgp.gp.kernels.block_sum import BlockSumKernel, KernelChoice, build_kernel, rescale

INDUCING_CANDIDATES = 8_000
"""Tokens that inducing inputs are picked from; of a larger corpus, so many at random."""


@dataclass(frozen=True)
class Inducing:
    """rows : (M, W) inducing inputs; residual : share of the prior variance they leave open."""

    rows: Tensor
    residual: float


def flat_tokens(encoder: FeatureEncoder, rows: Sequence[np.ndarray]) -> Tensor:
    """(N, W) all tokens, one after the other; narrower rows filled up with unused places."""
    pad_row = encoder.pad_row(max(r.shape[1] for r in rows))
    wide = [
        np.concatenate([r, np.tile(pad_row[r.shape[1] :], (len(r), 1))], 1) for r in rows if len(r)
    ]
    return torch.from_numpy(np.concatenate(wide))


def choose_kernel(
    choice: KernelChoice,
    blocks: Sequence[Block],
    tokens: Tensor,
    labels: Sequence[np.ndarray],
    *,
    amplitude: float | str,
    learn: bool,
    on_bound: bool = False,
    generator: torch.Generator,
) -> tuple[Kernel, Relaxation | None]:
    """The kernel, its shape learned if ``learn`` and if it has any, at the amplitude it started with.

    on_bound : whether the fit will go on learning: then 'auto' has a relevance for every feature.
    tokens : (N, W), those of one sequence after those of another; labels : one (T,) array a sequence.
    """
    kernel = build_kernel(choice, blocks, tokens, amplitude, relevance=on_bound)
    for part in kernel.modules():
        if isinstance(part, RelevanceKernel):
            # A thousand parameters are not for the relaxation.
            part.requires_grad_(False)
    if not learn or not has_shape(kernel):
        return kernel.requires_grad_(False), None
    y = [torch.from_numpy(sequence) for sequence in labels if len(sequence)]
    known = torch.cat(y) >= 0
    some = tokens[:: max(1, len(tokens) // 1000)]
    before = float(variance(kernel, some).detach().mean())
    lengths = [int((s >= 0).sum()) for s in y]
    x, y = tokens[known].split(lengths), [s[s >= 0] for s in y]
    relaxation = learn_shape(kernel, x, y, generator)
    if on_bound and isinstance(kernel, BlockSumKernel):
        # The fit will balance its parts, and has to see them.
        return kernel.requires_grad_(False), relaxation
    after = float(variance(kernel, some).detach().mean())
    factor = before / after if after > 0 else 1.0
    return rescale(kernel, factor).requires_grad_(False), relaxation


def pick_inducing(
    kernel: Kernel, tokens: Tensor, most: int, *, seed: int, enough: float = 0.0
) -> Inducing:
    """At most ``most`` inducing inputs among the tokens (N, W), fewer where those leave no more than
    the share ``enough`` of the prior variance open."""
    if len(tokens) > INDUCING_CANDIDATES:
        rng = np.random.default_rng(seed)
        some = rng.choice(len(tokens), INDUCING_CANDIDATES, replace=False)
        tokens = tokens[torch.from_numpy(some)]
    chosen = choose_inducing(kernel, tokens, most, enough=enough)
    return Inducing(tokens[chosen.index], chosen.residual)
