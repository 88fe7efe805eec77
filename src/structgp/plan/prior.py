"""The prior that a fit starts from: a kernel with its shape learned, and inducing inputs under it.

For data on disk the kernel is built from counts that the shards keep, without going through the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from structgp.data.encode import Block, RowLayout
from structgp.data.shards import ShardedExamples, Shards
from structgp.errors import InputError
from structgp.gp import Relaxation, choose_inducing, has_shape, learn_shape
from structgp.gp.kernels import RelevanceKernel, variance
from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.build import KernelChoice, build_kernel, relevance_kernel, rescale

INDUCING_CANDIDATES = 8_000
"""Tokens that inducing inputs are picked from: this many at random from a larger corpus."""


@dataclass(frozen=True)
class Picked:
    """rows : (M, W) inducing inputs; residual : share of the prior variance they leave open."""

    rows: Tensor
    residual: float


def flat_tokens(encoder: RowLayout, rows: Sequence[np.ndarray]) -> Tensor:
    """(N, W) all tokens, one after the other; narrower rows filled up with unused places."""
    pad_row = encoder.pad_row(max(r.shape[1] for r in rows))
    wide = [np.concatenate([r, np.tile(pad_row[r.shape[1] :], (len(r), 1))], 1) for r in rows if len(r)]
    return torch.from_numpy(np.concatenate(wide))


def choose_kernel(
    choice: KernelChoice,
    blocks: Sequence[Block],
    tokens: Tensor,
    labels: Sequence[np.ndarray],
    *,
    amplitude: float | None,
    learn: bool,
    on_bound: bool = False,
    generator: torch.Generator,
) -> tuple[Kernel, Relaxation | None]:
    """The kernel, its shape learned if ``learn`` and if it has any, at the amplitude it started with.

    on_bound : whether the fit will go on learning what each feature is worth. tokens : (N, W), sequence
    after sequence; labels : one (T,) array per sequence.
    """
    kernel = build_kernel(choice, blocks, tokens, amplitude)
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


def pick_inducing(kernel: Kernel, tokens: Tensor, most: int, *, seed: int, enough: float = 0.0) -> Picked:
    """At most ``most`` inducing inputs among the tokens (N, W), fewer where those leave no more than
    the share ``enough`` of the prior variance open."""
    if len(tokens) > INDUCING_CANDIDATES:
        rng = np.random.default_rng(seed)
        some = rng.choice(len(tokens), INDUCING_CANDIDATES, replace=False)
        tokens = tokens[torch.from_numpy(some)]
    chosen = choose_inducing(kernel, tokens, most, enough=enough)
    return Picked(tokens[chosen.index], chosen.residual)


def sharded_kernel(choice: KernelChoice, examples: ShardedExamples, amplitude: float | None) -> Kernel:
    """The kernel that ``choose_kernel`` would build from all rows, from the counts that shards keep."""
    shards, blocks = examples.shards, examples.encoder.blocks
    kinds = [block.kind for block in blocks]
    stray = sorted(set(choice) - set(kinds)) if isinstance(choice, Mapping) else []
    if stray:
        raise InputError("kernel", f"no {stray[0]} features in the data", f"name only: {', '.join(kinds)}")
    share = None if amplitude is None else amplitude / len(blocks)
    parts = [_sharded_part(block, shards, share) for block in blocks]
    whole = parts[0]
    if len(parts) > 1:
        whole = BlockSumKernel(parts, [(block.start, block.stop) for block in blocks])
    return whole.double().requires_grad_(False)


def _sharded_part(block: Block, shards: Shards, amplitude: float | None) -> Kernel:
    n, encoder = shards.n_tokens, shards.encoder
    if block.kind == "sparse":
        size = max(1, len(encoder.columns or encoder.attributes))
        return relevance_kernel([size], None, shards.about["sparse_squares"] / n, amplitude)
    counts = [torch.from_numpy(np.array(found)) for found in shards.value_counts]
    square = float(sum(int(found.sum()) for found in counts)) / n
    return relevance_kernel([len(found) for found in counts], counts, square, amplitude, n)
