"""``PathCover.solve`` as one kernel launch (``path_fused_kernels``), on GPUs and where Triton's interpreter
is on. As torch operations, step by step, a grid of H x W would need 2 (H + W) launches per sweep."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from structgp.structures.graph.cover import FLOOR, Solution, is_shared
from structgp.structures.graph.edge_rows import EdgeRows, pool_of, slopes_of
from structgp.structures.graph.path_sweeps import PathCover, centred
from structgp.structures.program import Scores

MOST_NUMBERS = 16_384
"""Largest count of numbers in the tables of one step, one per forest, that a program can hold at once."""


@dataclass(frozen=True)
class Index:
    """Index tensors of the kernel. source, scale, turned : (U,) for each of U different tables its row in
    the pool, the factor it is multiplied by, and True if it is transposed.
    slot, out_row, share, flip : (M,) for each edge its table, the row of its gradient, 1 / (forests that
    have it), and true if that gradient is transposed. n_rows : number of rows of gradients."""

    source: Tensor
    scale: Tensor
    turned: Tensor
    slot: Tensor
    out_row: Tensor
    share: Tensor
    flip: Tensor
    n_rows: int

    @staticmethod
    def of(cover: PathCover, shared: tuple[bool, ...], N: int) -> Index:
        plan, B, device = cover.plan, len(cover.layout), cover.rows.device
        ends, template, place = (x.cpu().numpy() for x in (plan.ends, plan.template, plan.place))
        first_edge = np.searchsorted(ends[:, 0] // N, np.arange(B + 1))
        scale, flip = plan.scale.cpu().numpy(), plan.flip.cpu().numpy()
        alike = np.stack([scale, flip], 1)
        rows = EdgeRows.of(cover.layout, shared, template, place, first_edge, alike)
        told, slot = np.unique(np.column_stack([rows.row, alike]), axis=0, return_inverse=True)
        times = torch.bincount(plan.into[plan.into >= 0], minlength=len(ends)).double()

        def there(x: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(x)).to(device, dtype)

        return Index(
            there(told[:, 0]),
            there(told[:, 1], torch.float64),
            there(told[:, 2] > 0, torch.bool),
            there(slot.reshape(-1)),
            there(rows.out_row),
            1 / times,
            there(flip, torch.int8),
            rows.n_out,
        )

    def tables(self, pool: Tensor) -> tuple[Tensor, Tensor]:
        """(S, U, V, V) exp of the tables less their maxima, earlier variable first; the maxima (S, U)."""
        found = pool[:, self.source].double()
        found = torch.where(self.turned[:, None, None], found.mT, found).contiguous()
        found.mul_(self.scale[:, None, None])
        top = found.flatten(2).amax(-1)
        top = top.masked_fill_(top == -torch.inf, 0)
        return found.sub_(top[..., None, None]).exp_(), top


def supports(cover: PathCover, f: Tensor) -> bool:
    """True if the kernel can take scores f (S, B, N, V) of this cover."""
    size = padded(cover.plan.into.shape[1]) * padded(f.shape[-1]) ** 2
    on_kernels = f.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return (
        on_kernels and f.numel() > 0 and len(cover.plan.ends) > 0 and size <= MOST_NUMBERS and _is_there()
    )


@cache
def _is_there() -> bool:
    return find_spec("triton") is not None


def padded(n: int) -> int:
    """n padded as the kernel needs it, to a power of 2."""
    return max(2, 1 << (n - 1).bit_length())


def solve_fused(
    cover: PathCover, f: Tensor, tables: Scores, sweeps: int, tolerance: float, split: Tensor | None
) -> Solution | None:
    """``PathCover.solve``; None if numbers vanish in probability space, or nothing is possible. All in
    float64. Cost O(S M K V^2) for one sweep, memory O(S (U V^2 + B N K V)) for U different tables."""
    from structgp.structures.graph.path_fused_kernels import sweep_kernel

    plan, layout, (S, B, N, V) = cover.plan, cover.layout, f.shape
    shared = tuple(is_shared(g, t) for g, t in zip(tables, layout.tuples, strict=True))
    index = cover.kept.setdefault(("fused", shared), None) or Index.of(cover, shared, N)
    cover.kept["fused", shared] = index
    table, table_top = index.tables(pool_of(layout, f, tables))
    K = plan.into.shape[1]
    weight = plan.weight.double().repeat_interleave(N, 0)[..., None]
    x = f.double().flatten(1, 2)[:, :, None].expand(-1, -1, K, -1)
    h = x.clone() if split is None else x + centred(split.double(), weight)
    top = h.amax(-1)
    top = top.masked_fill_(top == -torch.inf, 0)
    node = h.sub_(top[..., None]).exp_()
    prior, beta = torch.ones_like(node), torch.ones_like(node)
    node_marginals, joint = x.new_zeros((S, B, N, V)), x.new_zeros((S, index.n_rows, V, V))
    log_z, gap = x.new_zeros((S, B)), x.new_zeros((S, B))
    taken, failed = (torch.zeros((S, B), dtype=torch.int32, device=f.device) for _ in range(2))
    with torch.cuda.device_of(f):
        sweep_kernel[(S * B,)](
            node, top, prior, beta, table, table_top, plan.into, plan.out, plan.ends, index.slot,
            index.out_row, index.share, index.flip, (plan.weight > 0).sum(1), layout.mask.to(torch.int8),
            node_marginals, joint, log_z, gap, taken, failed, B, N, len(index.source), index.n_rows, K,
            sweeps, tolerance, V=V, VP=padded(V), KP=padded(K), LEAST=float(np.exp(FLOOR)),
            num_warps=1 if padded(K) * padded(V) ** 2 <= 1_024 else 4,
        )  # fmt: skip
    if bool(((failed > 0) | ~log_z.isfinite()).any()):
        return None
    d = torch.where(x > -torch.inf, node.clamp_(min=1e-300).log_() + top[..., None] - x, 0)
    slopes = slopes_of(layout, joint, shared, f)
    return Solution(log_z.to(f), node_marginals.to(f), slopes, d.to(f), int(taken.max()), gap.to(f))
