"""A first fit on a part of the data, that learns what the features are worth before the real one.

Learning scales takes several rounds of second-order fits, each cubic in the number of tokens, and asks for
a full GP: inducing inputs that leave variance open make the bound prefer kernels that need few of
them. Some hundred tokens tell the scales well, and are enough to choose inducing inputs under.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from structgp.data.encode import FeatureEncoder
from structgp.gp import Inducing, Posterior, Table
from structgp.inference import SecondOrder
from structgp.inference.loop import History, make_batches, train
from structgp.plan.prior import flat_tokens, pick_inducing
from structgp.structures import Structure

TOKENS = 400
OPTIMIZER = SecondOrder(n_draws=8, learning_rounds=10)
WORTH_IT = 1.25
"""A pilot on most of the data would cost what it saves."""


@dataclass(frozen=True)
class Pilot:
    """What it learned beside the kernel, which it changed in place. basis : (V, R) with the functions'
    amplitudes; pairwise_sd : of a label-to-label score; tokens : how many stood for the data."""

    basis: Tensor | None
    pairwise_sd: float
    tokens: int
    history: History

    @property
    def summary(self) -> dict[str, float]:
        return {
            "tokens": self.tokens,
            "steps": len(self.history.steps),
            "seconds": self.history.seconds,
        }


def run_pilot(
    kernel: Kernel,
    encoder: FeatureEncoder,
    rows: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
    structure: Structure,
    *,
    n_labels: int,
    basis: Tensor | None,
    pairwise_sd: float,
    batch_tokens: int,
    generator: torch.Generator,
    weights: np.ndarray | None = None,
) -> Pilot | None:
    """Learns the scales of ``kernel``, in place, on about ``TOKENS`` tokens of sequences drawn at random;
    None, and nothing done, where there are few more than that."""
    if sum(map(len, rows)) <= WORTH_IT * TOKENS:
        return None
    some = _some_sequences([len(r) for r in rows], generator)
    rows, labels = [rows[i] for i in some], [labels[i] for i in some]
    tokens = flat_tokens(encoder, rows)
    chosen = pick_inducing(kernel, tokens, len(tokens), seed=0)
    node = Inducing(kernel, chosen.rows, (n_labels,), basis=basis)
    table = Table((n_labels, n_labels), pairwise_sd)
    posterior = Posterior({"node": node, "next": table})
    counts = None if weights is None else weights[some]
    batches = make_batches(rows, labels, encoder.pad_row, batch_tokens, counts)
    history = train(posterior, structure, batches, OPTIMIZER, "a pilot", generator=generator)
    learned = None if basis is None else node.basis
    return Pilot(learned, float(table.sd.detach()), len(tokens), history)


def _some_sequences(lengths: Sequence[int], generator: torch.Generator) -> list[int]:
    chosen, total = [], 0
    there = [i for i, length in enumerate(lengths) if length]
    for n in torch.randperm(len(there), generator=generator).tolist():
        if total >= TOKENS:
            break
        chosen.append(there[n])
        total += lengths[there[n]]
    return sorted(chosen)
