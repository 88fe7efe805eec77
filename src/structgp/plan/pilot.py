"""A first fit on a part of the data, which learns what the features are worth before the real fit.

Learning scales takes several rounds of second-order fits, each cubic in the number of tokens, and asks
for a full GP: inducing inputs that leave variance open make the bound prefer kernels that need few of
them. Some hundred tokens tell the scales well, and are enough to choose inducing inputs under."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from structgp.data.encode import FeatureSplit
from structgp.data.examples import Examples
from structgp.gp import Inducing, Posterior, Table
from structgp.inference import SecondOrder
from structgp.inference.loop import History, make_batches, train
from structgp.plan.prior import flat_tokens, pick_inducing
from structgp.structures import Structure

TOKENS = 400
OPTIMIZER = SecondOrder(n_draws=8, learning_rounds=10)
WORTH_IT = 1.25
"""A pilot on most of the data would cost what it saves."""

BATCH_TOKENS = 1_000


@dataclass(frozen=True)
class Pilot:
    """What the pilot learned, beside the kernel, which it changed in place. basis : (V, R) with the
    functions' amplitudes; transition_sd : prior sd of a transition score; tokens : number of tokens that
    stood for the data."""

    basis: Tensor | None
    transition_sd: float
    tokens: int
    history: History

    @property
    def summary(self) -> dict[str, float]:
        return {"tokens": self.tokens, "steps": len(self.history.steps), "seconds": self.history.seconds}


def run_pilot(
    kernel: Kernel,
    examples: Examples,
    split: FeatureSplit,
    structure: Structure,
    *,
    basis: Tensor | None,
    transition_sd: float,
    generator: torch.Generator,
) -> Pilot | None:
    """Learns the scales of ``kernel``, in place, on about ``TOKENS`` tokens of sequences drawn at random;
    None, and nothing done, where there are few more than that. ``basis``,
    ``transition_sd`` : where they start."""
    if examples.n_tokens <= WORTH_IT * TOKENS:
        return None
    some = _some_sequences([len(r) for r in examples.rows], generator)
    rows, labels = [examples.rows[i] for i in some], [examples.y[i] for i in some]
    tokens = flat_tokens(split.node, [split.node.select(r) for r in rows])
    chosen = pick_inducing(kernel, tokens, len(tokens), seed=0)
    V = examples.n_labels
    node, table = Inducing(kernel, chosen.rows, (V,), basis=basis), Table((V, V), transition_sd)
    posterior = Posterior({"node": node, "next": table})
    counts = None if examples.weights is None else examples.weights[some]
    whole = make_batches(rows, labels, examples.encoder.pad_row, BATCH_TOKENS, counts)
    batches = [split(batch) for batch in whole]
    history = train(posterior, structure, batches, OPTIMIZER, "a pilot", generator=generator)
    learned = None if basis is None else node.basis
    return Pilot(learned, table.prior_sd, len(tokens), history)


def _some_sequences(lengths: Sequence[int], generator: torch.Generator) -> list[int]:
    chosen, total = [], 0
    there = [i for i, length in enumerate(lengths) if length]
    for n in torch.randperm(len(there), generator=generator).tolist():
        if total >= TOKENS:
            break
        chosen.append(there[n])
        total += lengths[there[n]]
    return sorted(chosen)
