"""The shape of the kernel on dense columns, learned before the fit: length-scales, how far columns are
brought to the same size, and the balance of its linear and smooth parts.

There are two ways of learning it. 'bound' fits the model itself to a few hundred tokens and moves the
kernel to where the bound is largest. It is better where the kernel can be right. Where it cannot (pixels),
the bound prefers kernels that separate the training tokens with small weights; 'regression', of single
labels on the features, whose evidence is known in closed form (``gp.relaxation``), then predicts better.
Cross-validation decides between them (``plan.held_out``); beside templates of words only 'regression' is
tried (``ways``)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from structgp.data.batch import flat_tokens
from structgp.data.examples import Examples
from structgp.gp import DenseWeights, Posterior, Relaxation, Table, contrasts, learn_shape
from structgp.gp.families.dense_weights import split_kernel
from structgp.gp.kernels import DenseKernel
from structgp.gp.kernels.build import build_kernel
from structgp.inference import SecondOrder
from structgp.inference.distributed import local_device
from structgp.inference.loop import make_batches, train
from structgp.plan.choices import tells_words_apart
from structgp.plan.options import Options
from structgp.plan.pilot import BATCH_TOKENS, Pilot, sample
from structgp.plan.resolve import Plan

TOKENS, WORK = 1_000, 1e9
"""Largest number of tokens from which a shape is learned on the bound; and of multiplications in one
evaluation of its evidence, R N^3: half a second on one core."""

REGRESSION_TOKENS = 700
"""Largest number of tokens from which a shape is learned by regression."""

COARSE = SecondOrder(n_draws=8, learning_rounds=16, learning_tolerance=0.002, max_rounds=16)
FINE = SecondOrder(n_draws=8, learning_rounds=5, learning_tolerance=0.005, max_rounds=5)
"""Optimisers of a fit on half of those tokens, at an eighth of the cost per round, and then of one on all
of them: size and length-scale trade off, and take more rounds to settle than a size alone. On generated
data of ``experiments.length_scales`` (seeds 100 to 102), six rounds on all tokens led to 1.74, 1.80, 1.79
for 1.5 and 3.09, 2.98, 3.88 for 3; this to 1.70, 1.68, 1.62 and 3.08, 2.90, 3.74."""

FEWEST_TO_HALVE = 200
"""Number of tokens from which there is a fit on half of them first: fewer are quick anyway."""


@dataclass(frozen=True)
class DenseShape:
    """The learned shape of a kernel. name : 'bound' or 'regression'. parameters : those of the kernel, by
    name. basis : (V, R) with the functions' amplitudes, None for one function per label. transition_sd :
    prior sd of a transition score."""

    name: str
    parameters: dict[str, Tensor]
    basis: Tensor | None
    transition_sd: float
    pilot: Pilot | None = None
    relaxation: Relaxation | None = None

    def give(self, kernel: DenseKernel) -> None:
        """Gives a kernel of the same kind this shape, in place."""
        with torch.no_grad():
            for name, parameter in kernel.named_parameters():
                parameter.copy_(self.parameters[name])
        kernel.requires_grad_(False)


Way: TypeAlias = Callable[[Options, Plan, Examples, torch.Generator], DenseShape]


def ways(examples: Examples) -> tuple[Way, ...]:
    """The ways of learning the shape that cross-validation compares. Beside templates of words, 'bound'
    takes three times as long as 'regression', and predicted worse: at the same data weight, the loss per
    token was .373 against .349 on parts left out of five TRAINING sets of ``experiments.vectors``."""
    beside_words = tells_words_apart(examples.encoder, examples.n_tokens)
    return (by_regression,) if beside_words else (by_bound, by_regression)


def by_bound(options: Options, plan: Plan, examples: Examples, generator: torch.Generator) -> DenseShape:
    """The shape learned on the bound of sequences drawn at random, each counted once. Cost: some 50 times R
    N^3 for N tokens."""
    basis = _basis(plan, examples)
    R = examples.n_labels if basis is None else basis.shape[1]
    most = int(min(TOKENS, (WORK / R) ** (1 / 3), examples.n_tokens))
    shape = DenseShape("bound", {}, basis, plan.transition_sd)
    if most >= FEWEST_TO_HALVE:
        shape = _on_bound(options, plan, examples, generator, shape, most // 2, COARSE)
    return _on_bound(options, plan, examples, generator, shape, most, FINE)


def _on_bound(
    options: Options,
    plan: Plan,
    examples: Examples,
    generator: torch.Generator,
    start: DenseShape,
    most: int,
    optimizer: SecondOrder,
) -> DenseShape:
    """The shape learned on the bound of ``most`` tokens, from an earlier shape, ``start``; one without
    parameters stands for the kernel as it is built."""
    V = examples.n_labels
    part = _cropped(examples.part(sample(examples, most, generator)), most)
    tokens = flat_tokens([plan.split.node.select(rows) for rows in part.rows])
    device, structure = local_device(plan.device.value), plan.structure.value
    kernel = _kernel(options, plan, tokens).to(device)
    dense, columns = split_kernel(kernel)[1:]
    if start.parameters:
        start.give(dense)
    # All rows: inducing inputs that are enough under one length-scale leave much open under a shorter one.
    dense.whole = True
    dense.place(tokens[:, columns].unique(dim=0).to(device))
    node = DenseWeights(kernel, (V,), start.basis)
    table = Table(plan.transition_labels(V), start.transition_sd)
    node.learns_shape = True
    data = part.rows, part.y, part.encoder.pad_row, BATCH_TOKENS, part.weights
    batches = [plan.split(batch) for batch in make_batches(*data)]
    posterior = Posterior({"node": node, "next": table})
    history = train(posterior, structure, batches, optimizer, "a pilot", device=device, generator=generator)
    pilot = Pilot(None if start.basis is None else node.basis.cpu(), table.prior_sd, len(tokens), history)
    return DenseShape("bound", _parameters(dense), pilot.basis, pilot.transition_sd, pilot)


def by_regression(
    options: Options, plan: Plan, examples: Examples, generator: torch.Generator
) -> DenseShape:
    """The shape learned by regression on at most ``REGRESSION_TOKENS`` tokens. Cost: some 25 times N^3."""
    known = [(rows[y >= 0], y[y >= 0]) for rows, y in zip(examples.rows, examples.y, strict=True)]
    known = [(plan.split.node.select(rows), y) for rows, y in known if len(y)]
    tokens, lengths = flat_tokens([rows for rows, _ in known]), [len(y) for _, y in known]
    device = local_device(plan.device.value)
    dense, columns = split_kernel(_kernel(options, plan, tokens).to(device))[1:]
    x = tokens[:, columns].to(device)
    before = dense.mean_variance(x)
    for parameter in dense.free_parameters():
        parameter.requires_grad_(True)
    labels = torch.from_numpy(np.concatenate([y for _, y in known])).to(device)
    given = x.split(lengths), labels.split(lengths)
    relaxation = learn_shape(dense, *given, generator, REGRESSION_TOKENS)
    dense.requires_grad_(False)
    # The size of a regression function says nothing about the size of a score.
    dense.log_scale.add_((before / dense.mean_variance(x)).log())
    basis = _basis(plan, examples)
    return DenseShape("regression", _parameters(dense), basis, plan.transition_sd, relaxation=relaxation)


def _cropped(examples: Examples, most: int) -> Examples:
    """The examples cut off after ``most`` tokens: one sequence alone may be longer."""
    ends = np.cumsum([len(x) for x in examples.rows])
    kept = [max(0, min(len(x), most - end + len(x))) for x, end in zip(examples.rows, ends, strict=True)]
    rows = [x[:n] for x, n in zip(examples.rows, kept, strict=True)]
    return replace(examples, rows=rows, y=[y[:n] for y, n in zip(examples.y, kept, strict=True)])


def _kernel(options: Options, plan: Plan, tokens: Tensor) -> torch.nn.Module:
    given = options.prior.amplitude
    amplitude, choice = None if isinstance(given, str) else float(given), copy.deepcopy(plan.kernel.value)
    kernel = build_kernel(choice, plan.split.node.blocks, tokens, amplitude, as_weights=True)
    return kernel.requires_grad_(False)


def _basis(plan: Plan, examples: Examples) -> Tensor | None:
    counts = torch.from_numpy(examples.label_counts)
    return contrasts(counts) if plan.basis.value == "contrast" else None


def _parameters(dense: DenseKernel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone().cpu() for name, parameter in dense.named_parameters()}
