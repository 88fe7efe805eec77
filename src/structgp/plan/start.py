"""The posterior that a fit starts from: its prior, with the kernel's shape learned and inducing inputs
picked.

For data on disk the kernel is built from counts that the shards keep, without going through the data."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from structgp.data.batch import flat_tokens
from structgp.data.encode import EncoderView
from structgp.data.examples import Examples
from structgp.data.shards import ShardedExamples, Shards
from structgp.data.vocabulary import Block
from structgp.errors import InputError
from structgp.gp import (
    DenseWeights,
    FullTable,
    Inducing,
    Mixture,
    Posterior,
    Relaxation,
    Table,
    Weights,
    choose_inducing,
    contrasts,
    learn_shape,
    shape_parameters,
)
from structgp.gp.families.dense_weights import split_kernel
from structgp.gp.families.weights import symmetric_basis
from structgp.gp.kernels import DenseKernel, RelevanceKernel, variance
from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.build import KernelChoice, build_kernel, relevance_kernel, rescale
from structgp.inference.distributed import local_device
from structgp.plan.choices import NO_INDUCING, Choice
from structgp.plan.dense_shape import DenseShape, by_bound
from structgp.plan.options import Options
from structgp.plan.pilot import Pilot, run_pilot
from structgp.plan.resolve import Plan
from structgp.structures import SpanScheme

ENOUGH = 0.02
"""Share of the prior variance that inducing inputs may leave open, under a kernel that is known."""

OPEN_VARIANCE = 0.04
"""Variance of a score that inducing inputs may leave open: with a curvature of at most 1/4, a hundredth of
a nat per token and function."""

MOST_NYSTROM, MOST_NYSTROM_WORK = 1_000, 5e10
"""Largest number of inducing inputs of a smooth kernel in weight space; and of multiplications per round: a
second or two on one core."""

MOST_ROOTS = 3e7
"""Largest number of entries in the roots of the covariances at these inducing inputs, one matrix per
function: 240 MB, and a round holds some seven times as much."""

TRIAL_SHARE = 0.1
"""Share of ``MOST_NYSTROM_WORK`` that a fit may take which only serves to choose."""

NYSTROM_CANDIDATES = 4_000
"""Number of tokens that inducing inputs in weight space are picked from."""

INDUCING_CANDIDATES = 8_000
"""Number of tokens that other inducing inputs are picked from: this many at random from a larger corpus."""


@dataclass(frozen=True)
class Start:
    """The start of a fit. posterior : where the fit begins; on the device of the fit where features are
    dense, else on the host. plan : with the form of the covariances
    settled. residual : share of the prior variance that inducing inputs leave open; in weight space, share
    of the smooth part's variance. within : the start of the only part of the model that is fitted, with the
    same blocks; None where all of it is fitted."""

    posterior: Posterior
    plan: Plan
    relaxation: Relaxation | None = None
    pilot: Pilot | None = None
    residual: float = 0.0
    within: Start | None = None

    @property
    def dense(self) -> DenseKernel | None:
        """The kernel on dense features, None where those have no weights."""
        node = self.posterior.node
        return node.parts[1] if isinstance(node, DenseWeights) else None

    @property
    def open_variance(self) -> float:
        """Prior variance of a score, on average, that the smooth part's inducing inputs leave open in
        weight space: ``residual`` times the current variance of the smooth part, which is that learned by
        the pilot before the fit, and that learned by the fit after it."""
        node = self.posterior.node
        if self.dense is None or not self.dense.has_nystrom:
            return 0.0
        size = node.scale.square() * node.basis.square().sum(1).mean()
        prior = self.dense.nystrom_variance(self.dense.inducing).mean()
        return self.residual * float((size * prior).detach())


class KernelOnce:
    """Keeps the kernel of values at inducing inputs, with its shape learned, for several fits to the same
    data with the same random numbers: the shape does not depend on how often the data count."""

    def __init__(self) -> None:
        self._kept: tuple[Kernel, Relaxation | None, Tensor] | None = None

    def learned(
        self, plan: Plan, examples: Examples, kernel: Kernel, tokens: Tensor, generator: torch.Generator
    ) -> tuple[Kernel, Relaxation | None]:
        """The result of ``learn_kernel``, which is called only once."""
        if self._kept is None:
            found = learn_kernel(kernel, tokens, examples.y, plan.on_bound, generator)
            self._kept = *found, generator.get_state()
        kernel, relaxation, random = self._kept
        generator.set_state(random)
        return copy.deepcopy(kernel), relaxation


def start_of(
    options: Options,
    plan: Plan,
    examples: Examples | ShardedExamples,
    generator: torch.Generator,
    kept: KernelOnce | None = None,
) -> Start:
    """The posterior that the fit starts from, and how it came about. kept : what earlier fits to the same
    data have learned of the kernel, in place."""
    if isinstance(examples, Examples) and examples.split is not None:
        return _graph_start(options, plan, examples, generator)
    basis, given = None, options.prior.amplitude
    amplitude = None if isinstance(given, str) else float(given)
    if plan.basis.value == "contrast":
        basis = contrasts(torch.from_numpy(examples.label_counts))
    if not plan.has_weights:
        assert isinstance(examples, Examples)
        kept = kept or KernelOnce()
        return _inducing_start(options, plan, examples, amplitude, basis, generator, kept)
    if isinstance(examples, ShardedExamples):
        kernel = sharded_kernel(plan.kernel.value, examples, amplitude)
    else:
        view, choice = plan.split.node, copy.deepcopy(plan.kernel.value)
        tokens = flat_tokens([view.select(rows) for rows in examples.rows])
        kernel = build_kernel(choice, view.blocks, tokens, amplitude, as_weights=True)
        for part in kernel.modules():
            if isinstance(part, RelevanceKernel):
                part.tails = plan.tails or part.tails
        if plan.has_dense:
            shape = plan.shape or by_bound(options, plan, examples, generator)
            kernel.requires_grad_(False)
            return _dense_start(kernel, shape, plan, examples, tokens, options.random_state)
    node = Weights(kernel.requires_grad_(False), (examples.n_labels,), basis)
    return Start(_posterior(node, plan, examples), plan)


def _graph_start(options: Options, plan: Plan, examples: Examples, generator: torch.Generator) -> Start:
    """A start with nodes of each layer as if they were independent, and a block for every other
    template."""
    split, templates = examples.split, plan.spec.templates
    assert split is not None
    blocks: dict[str, Any] = {}
    layers, alone = [], plan.of_tokens()
    for layer in range(examples.n_layers):
        layers.append(start_of(options, alone, examples.tokens(layer), generator))
        alone = replace(alone, shape=None)  # which was learned on the first layer
    nodes = iter(start.posterior.node for start in layers)
    for k, template in enumerate(templates):
        sizes = split.sizes(k)
        if template.rule == "length":
            sizes = (len(SpanScheme.of(examples.labels.classes).inside), template.longest + 1)
        if template.rule == "node":
            blocks[template.name] = next(nodes)
        elif split.views[k] is None:
            blocks[template.name] = Table(sizes, plan.transition_sd, template.symmetric)
        else:
            tokens = tuple_tokens(k, examples)
            kernel = build_kernel("relevance", split.views[k].blocks, tokens, plan.transition_sd**2)
            basis = symmetric_basis(sizes) if template.symmetric else None
            blocks[template.name] = Weights(kernel.requires_grad_(False), sizes, basis)
    first = layers[0]
    plan = replace(
        first.plan, spec=plan.spec, split=split, structure=plan.structure, transition_sd=plan.transition_sd
    )
    posterior = Posterior(blocks).to(first.posterior.node.m.device)
    return Start(posterior, plan, first.relaxation, first.pilot, first.residual)


def tuple_tokens(k: int, examples: Examples) -> Tensor:
    """(N, W) features of all tuples of template k."""
    assert examples.split is not None
    assert examples.links is not None
    parts = zip(examples.rows, examples.links, strict=True)
    rows = [examples.split.tuple_rows(k, rows, links) for rows, links in parts if len(rows)]
    if not any(map(len, rows)):
        name = examples.split.spec.templates[k].name
        problem = f"the template {name!r} has features, and no example has such a tuple"
        raise InputError(
            "structure", problem, "declare it without features, or pass examples that have some"
        )
    return flat_tokens(rows)


def _dense_start(
    kernel: Kernel, shape: DenseShape, plan: Plan, examples: Examples, tokens: Tensor, seed: int
) -> Start:
    """The posterior over weights of dense features, under a kernel of that shape, with the inducing inputs
    of its smooth part picked."""
    device = local_device(plan.device.value)  # roots are large: they are made where they are needed
    dense, columns = split_kernel(kernel.to(device))[1:]
    shape.give(dense)
    residual, R = 0.0, examples.n_labels if shape.basis is None else shape.basis.shape[1]
    dense.whole = dense.linear and len(tokens) < dense.n_columns
    picked = NO_INDUCING
    if dense.has_nystrom:
        work = MOST_NYSTROM_WORK * (TRIAL_SHARE if plan.trial else 1.0)
        most = int(min(MOST_NYSTROM, max(1, work / (R * len(tokens))) ** 0.5, (MOST_ROOTS / R) ** 0.5))
        size = 1.0 if shape.basis is None else float(shape.basis.square().sum(1).mean())
        residual = pick_nystrom(dense, tokens[:, columns], most, size, seed=seed)
        picked = Choice(dense.n_inducing, "as many as the variance left open asks for")
    node = DenseWeights(kernel, (examples.n_labels,), shape.basis)
    plan = replace(plan, n_inducing=picked, shape=shape)
    posterior = _posterior(node, plan, examples, shape.transition_sd).to(device)
    return Start(posterior, plan, shape.relaxation, shape.pilot, residual)


def pick_nystrom(dense: DenseKernel, rows: Tensor, most: int, size: float = 1.0, *, seed: int) -> float:
    """Places the inducing inputs of the smooth part at some of the rows (N, D); returns the share of its
    variance that they leave open. There are as many as it takes for scores to lose no more than
    ``OPEN_VARIANCE`` on average, but at most ``most``. size : variance of a score where that of the kernel
    is 1."""
    if len(rows) > NYSTROM_CANDIDATES:
        some = np.random.default_rng(seed).choice(len(rows), NYSTROM_CANDIDATES, replace=False)
        rows = rows[torch.from_numpy(some)]
    rows = rows.to(dense.log_scale.device)
    kernel, inputs = (dense, rows) if dense.whole else (dense.smooth, dense.smooth_inputs(rows))
    size *= float(dense.nystrom_variance(rows).mean())
    chosen = choose_inducing(kernel, inputs, most, enough=OPEN_VARIANCE / size)
    dense.place(rows[chosen.index])
    return chosen.residual


def _inducing_start(
    options: Options,
    plan: Plan,
    examples: Examples,
    amplitude: float | None,
    basis: Tensor | None,
    generator: torch.Generator,
    kept: KernelOnce,
) -> Start:
    """The posterior over values at inducing inputs, with the kernel's shape learned, and its scales by a
    pilot if the fit learns them."""
    view, choice, relaxation = plan.split.node, copy.deepcopy(plan.kernel.value), None
    tokens = flat_tokens([view.select(rows) for rows in examples.rows])
    kernel = build_kernel(choice, view.blocks, tokens, amplitude)
    if options.learns_kernel:
        kernel, relaxation = kept.learned(plan, examples, kernel, tokens, generator)
    kernel.requires_grad_(False)
    V, pilot, sd = examples.n_labels, None, plan.transition_sd
    if plan.on_bound and plan.split.next is None:
        pilot = run_pilot(kernel, examples, tokens, plan, basis, generator)
    open_number = getattr(plan.posterior.value, "n_inducing", None) is None
    enough = ENOUGH if open_number and pilot is not None else 0.0
    assert plan.n_inducing.value is not None
    rows, residual = pick_inducing(
        kernel, tokens, plan.n_inducing.value, seed=options.random_state, enough=enough
    )
    plan = plan.with_covariance(V if basis is None else basis.shape[1], len(rows), len(tokens))
    if pilot is not None:
        basis, sd = pilot.basis, pilot.transition_sd
    form: dict[str, Any] = {"covariance": plan.covariance.value, "rank": plan.rank, "basis": basis}
    node: Any = Inducing(kernel, rows, (V,), **form)
    if plan.n_components > 1:
        node = Mixture(kernel, rows, (V,), n_components=plan.n_components, **form)
    return Start(_posterior(node, plan, examples, sd), plan, relaxation, pilot, residual)


def _posterior(
    node: Any, plan: Plan, examples: Examples | ShardedExamples, sd: float | None = None
) -> Posterior:
    """The posterior of nodes and transitions. These have a table of scores, or, with features, one weight
    per feature. sd : prior standard deviation of a transition score, None for the plan's."""
    V, sd = node.n_scores, plan.transition_sd if sd is None else sd
    if plan.split.next is None:
        family = FullTable if plan.posterior.value.transition_covariance == "full" else Table
        return Posterior({"node": node, "next": family(plan.transition_labels(V), sd)})
    assert isinstance(examples, Examples)
    tokens = edge_tokens(plan.split.next, examples)
    kernel = build_kernel("relevance", plan.split.next.blocks, tokens, sd**2).requires_grad_(False)
    return Posterior({"node": node, "next": Weights(kernel, (V, V))})


def edge_tokens(view: EncoderView, examples: Examples) -> Tensor:
    """(N, W) features of all transitions."""
    rows = [view.select(rows[1:]) for rows in examples.rows if len(rows) > 1]
    if not rows:
        problem = "transitions have features, and no sequence has two tokens"
        raise InputError("structure", problem, "use chain() without features, or pass longer sequences")
    return flat_tokens(rows)


def learn_kernel(
    kernel: Kernel, tokens: Tensor, labels: Sequence[np.ndarray], on_bound: bool, generator: torch.Generator
) -> tuple[Kernel, Relaxation | None]:
    """The kernel with its shape learned, if it has any, at the amplitude it started with. on_bound :
    whether the fit will go on learning what each feature is worth. tokens : (N, W), sequence after
    sequence; labels : one (T,) array per sequence."""
    for part in kernel.modules():
        if isinstance(part, RelevanceKernel):
            # These may be a thousand parameters, too many for the relaxation.
            part.requires_grad_(False)
    if not shape_parameters(kernel):
        return kernel, None
    y = [torch.from_numpy(sequence) for sequence in labels if len(sequence)]
    known = torch.cat(y) >= 0
    some = tokens[:: max(1, len(tokens) // 1000)]
    before = float(variance(kernel, some).detach().mean())
    x = tokens[known].split([int((s >= 0).sum()) for s in y])
    relaxation = learn_shape(kernel, x, [s[s >= 0] for s in y], generator)
    if on_bound and isinstance(kernel, BlockSumKernel):
        # The fit will balance its parts, and has to see them.
        return kernel, relaxation
    after = float(variance(kernel, some).detach().mean())
    return rescale(kernel, before / after if after > 0 else 1.0), relaxation


def pick_inducing(
    kernel: Kernel, tokens: Tensor, most: int, *, seed: int, enough: float = 0.0
) -> tuple[Tensor, float]:
    """(M, W) at most ``most`` inducing inputs among the tokens (N, W), fewer if fewer leave no more than
    the share ``enough`` of the prior variance open; and the share that they leave open."""
    if len(tokens) > INDUCING_CANDIDATES:
        rng = np.random.default_rng(seed)
        some = rng.choice(len(tokens), INDUCING_CANDIDATES, replace=False)
        tokens = tokens[torch.from_numpy(some)]
    chosen = choose_inducing(kernel, tokens, most, enough=enough)
    return tokens[chosen.index], chosen.residual


def sharded_kernel(choice: KernelChoice, examples: ShardedExamples, amplitude: float | None) -> Kernel:
    """The kernel that ``build_kernel`` would build from all rows, from the counts that shards keep."""
    blocks = examples.encoder.blocks
    kinds = [block.kind for block in blocks]
    stray = sorted(set(choice) - set(kinds)) if isinstance(choice, Mapping) else []
    if stray:
        raise InputError("kernel", f"no {stray[0]} features in the data", f"name only: {', '.join(kinds)}")
    share = None if amplitude is None else amplitude / len(blocks)
    parts = [_sharded_part(block, examples.shards, share) for block in blocks]
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
