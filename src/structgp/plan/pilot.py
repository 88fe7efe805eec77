"""A first fit on a part of the data, which learns what the features are worth before the real fit.

Learning scales takes several rounds of second-order fits, each cubic in the number of tokens, and needs a
full GP: inducing inputs that leave variance open make the bound prefer kernels that need few of them. A few
hundred tokens tell the scales well enough to choose inducing inputs under them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from structgp.data.examples import Examples
from structgp.gp import Inducing, Posterior, Table, choose_inducing
from structgp.inference import SecondOrder
from structgp.inference.loop import History, make_batches, train
from structgp.plan.resolve import Plan

TOKENS = 400
OPTIMIZER = SecondOrder(n_draws=8, learning_rounds=10, brief=True)
WORTH_IT = 1.25
"""Factor on ``TOKENS``: with no more tokens than this there is no pilot, since one on most of the data
would cost what it saves."""

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


def sample(examples: Examples, n_tokens: int, generator: torch.Generator) -> list[int]:
    """Indices of sequences that are drawn at random until they have ``n_tokens`` tokens."""
    lengths = [len(r) for r in examples.rows]
    there = [i for i, length in enumerate(lengths) if length]
    order = [there[n] for n in torch.randperm(len(there), generator=generator).tolist()]
    enough = int(np.searchsorted(np.cumsum([lengths[i] for i in order]), n_tokens)) + 1
    return sorted(order[:enough])


def run_pilot(
    kernel: Kernel,
    examples: Examples,
    tokens: Tensor,
    plan: Plan,
    basis: Tensor | None,
    generator: torch.Generator,
) -> Pilot | None:
    """Learns the scales of ``kernel``, in place, on about ``TOKENS`` tokens of sequences drawn at random;
    None, and nothing done, where there are few more than that. tokens : (N, W) of all examples, in order.
    basis : (V, R) at the start, None for one function per label."""
    if examples.n_tokens <= WORTH_IT * TOKENS:
        return None
    some = sample(examples, TOKENS, generator)
    parts = tokens.split([len(r) for r in examples.rows])
    tokens = torch.cat([parts[i] for i in some])
    chosen = choose_inducing(kernel, tokens, len(tokens))
    V = examples.n_labels
    node = Inducing(kernel, tokens[chosen.index], (V,), basis=basis)
    table = Table(plan.transition_labels(V), plan.transition_sd)
    weights = plan.sequence_weights(examples)
    counts = None if weights is None else weights[some]
    data = [examples.rows[i] for i in some], [examples.y[i] for i in some], examples.encoder.pad_row
    batches = [plan.split(batch) for batch in make_batches(*data, BATCH_TOKENS, counts)]
    posterior = Posterior({"node": node, "next": table})
    history = train(posterior, plan.structure.value, batches, OPTIMIZER, "a pilot", generator=generator)
    return Pilot(None if basis is None else node.basis, table.prior_sd, len(tokens), history)
