"""Builds the kernel over whole rows from names or GPyTorch kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from gpytorch.kernels import ConstantKernel, Kernel, LinearKernel, RBFKernel, ScaleKernel
from torch import Tensor

from structgp.data.vocabulary import Block
from structgp.errors import InputError
from structgp.gp.kernels.block_sum import BlockSumKernel, covariance
from structgp.gp.kernels.dense import BY_NAME, COMPONENTS, DenseKernel
from structgp.gp.kernels.relevance import SELDOM, RelevanceKernel
from structgp.gp.kernels.sparse import SparseLinearKernel, SparseRBFKernel, inner_product, unpack
from structgp.gp.kernels.template import MISSING, TemplateKernel

KernelChoice: TypeAlias = str | Kernel | Mapping[str, str | Kernel]


def build_kernel(
    choice: KernelChoice,
    blocks: Sequence[Block],
    rows: Tensor,
    amplitude: float | None = None,
    as_weights: bool = False,
) -> Kernel:
    """The kernel over whole rows.

    Parameters
    ----------
    choice : 'relevance', 'linear' or 'rbf' for every block; 'template' or 'template-product' for the
        categorical block; for the dense block, also the other names of ``gp.kernels.dense``; a GPyTorch
        kernel if there is only one block; or a dict that maps block kinds ('categorical', 'sparse',
        'dense') to any of these.
    rows : (N, W) rows of the data, from which the first length-scales are taken.
    amplitude : prior variance of a latent value under kernels chosen by name, divided equally among the
        blocks. With None, every active feature gets a weight of variance 1, as under a linear CRF's
        regulariser: the amplitude is then P for P templates, the mean squared norm of sparse rows, 10 for
        dense ones. A kernel passed as an object keeps its own scale.
    as_weights : True if the kernel is to be a prior on the weights of features, including dense ones.
    """
    kinds = [block.kind for block in blocks]
    if isinstance(choice, Kernel):
        if len(blocks) > 1:
            raise InputError(
                "kernel",
                f"one kernel for features of {len(blocks)} kinds ({', '.join(kinds)})",
                "pass a dict that gives each kind its kernel",
            )
        choice = {kinds[0]: choice}
    if isinstance(choice, str):
        choice = dict.fromkeys(kinds, choice)
    if not isinstance(choice, Mapping):
        raise InputError(
            "kernel",
            f"must be a kernel, got {choice!r}",
            "pass a name such as 'rbf', a GPyTorch kernel, or a dict that gives each kind its kernel",
        )
    stray = sorted(set(choice) - set(kinds))
    if stray:
        raise InputError("kernel", f"no {stray[0]} features in the data", f"name only: {', '.join(kinds)}")
    share = None if amplitude is None else amplitude / len(blocks)
    parts = []
    for b in blocks:
        columns = rows[:, b.start : b.stop]
        if b.kind == "dense" and _is_dense(choice[b.kind], as_weights):
            parts.append(DenseKernel.of(choice[b.kind], columns, share))
        else:
            parts.append(_block_kernel(choice[b.kind], b, columns, share))
    whole = parts[0]
    if len(parts) > 1:
        whole = BlockSumKernel(parts, [(b.start, b.stop) for b in blocks])
    whole = whole.double()
    if any(choice[kind] != "relevance" for kind in kinds):
        _check_on(whole, rows)
    return whole


def _is_dense(choice: str | Kernel, as_weights: bool) -> bool:
    """True if a DenseKernel is to be made for the choice: for every choice under ``as_weights``, otherwise
    only for names without a kernel of GPyTorch."""
    if isinstance(choice, Kernel):
        return as_weights and not isinstance(choice, DenseKernel)
    return choice in BY_NAME and (as_weights or ("dense", choice) not in _BY_NAME)


def _check_on(kernel: Kernel, rows: Tensor) -> None:
    """Tries the kernel on two rows, so that one that does not fit the data is refused before the work."""
    two = rows[[0, -1]]
    try:
        with torch.no_grad():
            value = covariance(kernel, two, two)
        problem = None if value.shape == (2, 2) else f"its values have shape {tuple(value.shape)}"
        if problem is None and not bool(value.isfinite().all()):
            problem = "its values are not finite"
    except (RuntimeError, IndexError, ValueError) as error:
        problem = str(error).splitlines()[0]
    if problem:
        raise InputError(
            "kernel",
            f"{type(kernel).__name__} does not work on these features ({problem})",
            "check its dimensions against the number of columns, and the features for huge values",
        )


def _check_kind(kernel: Kernel, block: Block) -> None:
    """Categorical and sparse rows hold ids: only kernels made for ids may be used on them."""
    ours = {
        "categorical": (TemplateKernel, RelevanceKernel),
        "sparse": (SparseLinearKernel, SparseRBFKernel, RelevanceKernel),
    }.get(block.kind)
    if ours is None:
        return
    leaves = [k for k in (kernel, *kernel.sub_kernels()) if not any(True for _ in k.sub_kernels())]
    wrong = [k for k in leaves if isinstance(k, RelevanceKernel) and k.sparse != (block.kind == "sparse")]
    if wrong:
        raise InputError(
            "kernel",
            f"a RelevanceKernel with sparse={wrong[0].sparse} on {block.kind} features",
            f"make it with sparse={not wrong[0].sparse}",
        )
    for leaf in leaves:
        if not isinstance(leaf, (*ours, ConstantKernel)):
            names = " or ".join(k.__name__ for k in ours)
            raise InputError(
                "kernel",
                f"a {type(leaf).__name__} on {block.said}, whose rows hold ids",
                f"use {names}, or pass dense arrays",
            )


def _block_kernel(choice: str | Kernel, block: Block, rows: Tensor, amplitude: float | None) -> Kernel:
    if isinstance(choice, Kernel):
        _check_kind(choice, block)
        return choice
    kernel = _BY_NAME.get((block.kind, choice))
    if kernel is None:
        known = sorted({name for kind, name in _BY_NAME if kind == block.kind})
        known = sorted(BY_NAME) if block.kind == "dense" else known
        raise InputError(
            "kernel",
            f"{choice!r} is not a kernel for {block.said}",
            f"use one of {', '.join(known)}, or pass a GPyTorch kernel",
        )
    if kernel is RelevanceKernel:
        return _relevance(block, rows, amplitude)
    scaled = ScaleKernel(kernel(rows))
    scaled.outputscale = _unit_weights(block, rows) if amplitude is None else amplitude
    return scaled


USUAL_SQUARES = 1e-2, 1e4
"""Range of the mean squared length of sparse rows in which a fit starts with weights of variance 1:
whatever the best scale, a fit finds it from there, by a factor of 4 per round. Shorter or longer rows start
with scores of variance 1. Not chosen on data."""


def _relevance(block: Block, rows: Tensor, amplitude: float | None) -> Kernel:
    if block.kind == "sparse":
        ids, values = unpack(rows)
        square = float(values.square().sum(-1).mean())
        return relevance_kernel([max(0, int(ids.max())) + 1], None, square, amplitude)
    sizes = [int(n) + 1 for n in rows.amax(0).clamp(min=0)]
    counts = [torch.bincount(c[c >= 0], minlength=n) for c, n in zip(rows.T.long(), sizes, strict=True)]
    square = float((rows != MISSING).sum(-1).double().mean())
    return relevance_kernel(sizes, counts, square, amplitude, len(rows))


def relevance_kernel(
    sizes: Sequence[int],
    counts: Sequence[Tensor] | None,
    square: float,
    amplitude: float | None,
    n_tokens: int = 1,
) -> Kernel:
    """The kernel that 'relevance' stands for on a block with ``sizes`` values of each template, or so many
    sparse features.

    counts : how often each value of each template occurs among ``n_tokens``; None for sparse features.
    square : mean over rows of the sum of squared values. amplitude : as in ``build_kernel``.
    """
    made = RelevanceKernel(sizes, sparse=counts is None, rare=counts is not None)
    if counts is not None:
        often = torch.cat(list(counts))
        made.seldom.copy_(often <= SELDOM)
        # Being a seldom value is a feature too.
        square += float(often[made.seldom].sum()) / max(1, n_tokens)
    if amplitude is not None:
        share = amplitude / (1 + square)
        made.initialize(log_scale=torch.full_like(made.log_scale, share).log())
    elif counts is None and not USUAL_SQUARES[0] <= square <= USUAL_SQUARES[1] and square > 0:
        scales = torch.tensor([-math.log(square), 0.0]).to(made.log_scale)
        made.initialize(log_scale=scales)
    return made


def _unit_weights(block: Block, rows: Tensor) -> float:
    if block.kind == "categorical":
        return float(rows.shape[1])
    if block.kind == "sparse":
        return max(1.0, float(unpack(rows)[1].square().sum(-1).mean()))
    return 10.0


def kernel_scales(kernel: Kernel, blocks: Sequence[Block]) -> dict[str, float]:
    """The scale of each group of features, where the kernel has one: keyed by template, or by kind for
    features without templates. For 'relevance', it is the prior variance of a weight."""
    factor = 1.0
    if isinstance(kernel, ScaleKernel) and isinstance(kernel.base_kernel, BlockSumKernel):
        factor, kernel = float(kernel.outputscale.detach()), kernel.base_kernel
    parts = kernel.kernels if isinstance(kernel, BlockSumKernel) else [kernel]
    found: dict[str, float] = {}
    for part, block in zip(parts, blocks, strict=True):
        if isinstance(part, RelevanceKernel):
            *scales, constant = (factor * scale for scale in part.log_scale.detach().exp().tolist())
            # Each kind of features has a constant of its own: they add up.
            constant += found.pop("label frequency", 0.0)
            found |= zip(block.names or (block.kind,), scales, strict=True)
            found["label frequency"] = constant
        elif isinstance(part, DenseKernel):
            scales = part.log_scale.detach().exp().tolist()
            found["label frequency"] = scales[0] + found.pop("label frequency", 0.0)
            there = (part.linear, part.smooth is not None)
            names = [f"{block.kind} {name}" for name in COMPONENTS[1:]]
            found |= {n: s for n, s, used in zip(names, scales[1:], there, strict=True) if used}
        elif isinstance(part, ScaleKernel):
            found[block.kind] = factor * float(part.outputscale.detach())
    return found


def rescale(kernel: Kernel, factor: float) -> Kernel:
    """``factor`` times the kernel: its outermost scale is changed, or one is put around it."""
    if not isinstance(kernel, ScaleKernel):
        kernel = ScaleKernel(kernel).double()
        kernel.outputscale = 1.0
    kernel.outputscale = kernel.outputscale.detach() * factor
    return kernel


def _dense_rbf(rows: Tensor) -> Kernel:
    kernel = RBFKernel()
    kernel.lengthscale = _median(torch.pdist(_some(rows)))
    return kernel


def _sparse_rbf(rows: Tensor) -> Kernel:
    some = _some(rows)
    product = inner_product(some, some)
    norm = product.diagonal()
    square = norm[:, None] + norm[None, :] - 2 * product
    kernel = SparseRBFKernel()
    kernel.lengthscale = _median(square[square > 0].sqrt())
    return kernel


def _dense_linear(rows: Tensor) -> Kernel:
    kernel = LinearKernel()
    kernel.variance = 1.0 / rows.square().sum(-1).mean().clamp(min=1e-12)
    return kernel


def _some(rows: Tensor, most: int = 500) -> Tensor:
    return rows[torch.linspace(0, len(rows) - 1, min(most, len(rows))).long()]


def _median(distances: Tensor) -> float:
    """The median heuristic; 1 where all rows are equal."""
    distances = distances[distances > 0]
    return float(distances.median()) if len(distances) else 1.0


_BY_NAME: dict[tuple[str, str], Callable[..., Kernel]] = {
    ("categorical", "relevance"): RelevanceKernel,
    ("categorical", "template"): lambda rows: TemplateKernel(rows.shape[1]),
    ("categorical", "linear"): lambda rows: TemplateKernel(rows.shape[1]),
    ("categorical", "template-product"): lambda rows: TemplateKernel(rows.shape[1], "product"),
    ("sparse", "relevance"): RelevanceKernel,
    ("sparse", "linear"): lambda rows: SparseLinearKernel(),
    ("sparse", "rbf"): _sparse_rbf,
    ("dense", "rbf"): _dense_rbf,
    ("dense", "linear"): _dense_linear,
}
