"""The chain's log Z and its gradient, each as one kernel, on GPUs and where Triton's interpreter is on.

The same recursion as in ``chain``. All steps of a sequence run within one launch, and potentials are not
inspected before it: ``fused_kernels`` explains how large ones, and -inf, are handled on the way.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

MOST_LABELS = 64

# An entry below LOW may lack numbers that underflowed; TINY is about the smallest normal number.
_LOW = {torch.float32: 1e-30, torch.float64: 1e-290}
_TINY = {torch.float32: 1e-37, torch.float64: 1e-307}
_MASK_CHUNK = 64


@dataclass(frozen=True)
class Shape:
    """How sequences are distributed: ``block_b`` (a power of 2) of one draw to each program of
    ``num_warps`` warps. At most 8 sequences, because Triton would compute products of 16 rows on tensor
    cores, in too low a precision."""

    block_b: int = 1
    num_warps: int = 1


def padded(V: int) -> int:
    """V rounded up to a power of 2, as the kernels hold it."""
    return max(2, 1 << (V - 1).bit_length())


@dataclass(frozen=True)
class Saved:
    """What the backward pass needs: the inputs, and forward messages (S, B, T, V), which are logarithms
    where the program that wrote them went the careful way (``fused_kernels``)."""

    f: Tensor
    g: Tensor
    mask: Tensor
    alpha: Tensor
    careful: Tensor
    shape: Shape

    def gradients(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients in f (S, B, T, V), 0 at padding, and in g (S, V, V), of log Z times weight (S, B)."""
        nodes, tables = _marginals(self, weight, "sums")
        return nodes, tables[:, 0] if tables.shape[1] == 1 else tables.sum(1)


def supports(f: Tensor, g: Tensor, mask: Tensor) -> bool:
    """True if f (S, B, T, V), g (S, V, V) and mask (B, T) are supported here; tables by position are
    not."""
    return (
        g.dim() == 3
        and (f.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")
        and f.dtype == g.dtype
        and f.dtype in _LOW
        and f.numel() > 0
        and f.shape[-1] <= MOST_LABELS
        and f.device == g.device == mask.device
        and _triton_is_there()
    )


@cache
def _triton_is_there() -> bool:
    return find_spec("triton") is not None


def default_shape(B: int, V: int) -> Shape:
    """A warp for a row of labels, and as many sequences as fill it twice: the best choice on an H200, or
    near it, where there are enough sequences."""
    labels = padded(V)
    block = min(max(1, 64 // labels), 8, 1 << (B - 1).bit_length())
    return Shape(block, 4 if labels > 32 else 1)


def forward(f: Tensor, g: Tensor, mask: Tensor, shape: Shape | None = None) -> tuple[Tensor, Saved]:
    """log Z (S, B), and what the backward pass needs. Cost O(S B T V^2), memory O(S B T V)."""
    from structgp.structures.linear_chain.fused_kernels import forward_kernel

    S, B, T, V = f.shape
    shape = shape or default_shape(B, V)
    n_blocks = -(-B // shape.block_b)
    alpha = torch.empty_like(f, memory_format=torch.contiguous_format)
    careful = torch.empty(S * n_blocks, dtype=torch.int8, device=f.device)
    log_z = f.new_empty((S, B))
    inputs = f.detach().contiguous(), g.detach().contiguous(), mask.contiguous().view(torch.uint8)
    saved = Saved(*inputs, alpha, careful, shape)
    with torch.cuda.device_of(f):
        forward_kernel[(S * n_blocks,)](*inputs, log_z, alpha, careful, B, T, n_blocks, **_constants(saved))
    return log_z, saved


def node_marginals(f: Tensor, g: Tensor, mask: Tensor, shape: Shape | None = None) -> Tensor:
    """(S, B, T, V) probabilities of labels, 0 at padding and where a sequence has no labelling."""
    log_z, saved = forward(f, g, mask, shape)
    return _marginals(saved, torch.ones_like(log_z), "none")[0]


def next_variances(f: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Node marginals (S, B, T, V), and p (1 - p) of each label with the next one, summed over positions,
    (S, B, V, V)."""
    log_z, saved = forward(f, g, mask, Shape(1, default_shape(1, f.shape[-1]).num_warps))
    return _marginals(saved, torch.ones_like(log_z), "bends")


def _marginals(saved: Saved, weight: Tensor, tables: str) -> tuple[Tensor, Tensor]:
    """Node marginals times weight (S, B), and for transitions (S, blocks of sequences, V, V) according to
    ``tables``: nothing ('none'), sums of marginals times weight ('sums'), or sums of p (1 - p)
    ('bends')."""
    from structgp.structures.linear_chain.fused_kernels import backward_kernel

    f = saved.f
    S, B, T, V = f.shape
    n_blocks = -(-B // saved.shape.block_b)
    wanted = {"TABLES": tables != "none", "BENDS": tables == "bends"}
    nodes = torch.empty_like(f)
    # One part per program, summed afterwards: the order of the sum is then always the same.
    parts = f.new_empty((0,) if tables == "none" else (S, n_blocks, V, V))
    with torch.cuda.device_of(f):
        backward_kernel[(S * n_blocks,)](
            f, saved.g, saved.mask, saved.alpha, saved.careful, weight.to(f.dtype).contiguous(),
            nodes, parts, B, T, n_blocks, **_constants(saved), **wanted,
        )  # fmt: skip
    return nodes, parts


def _constants(saved: Saved) -> dict[str, int | float | str]:
    V, dtype, shape = saved.f.shape[-1], saved.f.dtype, saved.shape
    sizes = {"V": V, "VP": padded(V), "BLOCK_B": shape.block_b, "num_warps": shape.num_warps}
    return {**sizes, "LOW": _LOW[dtype], "TINY": _TINY[dtype], "CHUNK": _MASK_CHUNK}
