"""Checks that fits reach the same bound from any start, and that contrasts reach no lower one than labels.

    python -m experiments.starts --data DIR [--task TASK ...] [--fold K ...]

The second-order fit, which learns nothing about the prior, starts from five random means: each whitened
value is normal with standard deviation 0.5. This is done with weights of the features and with at most 500
inducing inputs, for functions that are contrasts of labels and for one function per label. All starts are
fitted on one set of 64 draws, so that only the start differs, until a round changes the bound by less than
0.002. Bounds are computed on the same 512 fresh draws, in nats per sequence. Aims: at most 0.1 between the
lowest and the highest bound; contrasts not below labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.data import arguments, bound_per_sequence, each_fold, load_fold, run_command
from structgp.data.encode import FeatureEncoder
from structgp.data.labels import LabelEncoder
from structgp.gp import Inducing, Posterior, Table, Weights, contrasts
from structgp.gp.kernels.build import build_kernel
from structgp.inference import Problem, SecondOrder
from structgp.inference.loop import make_batches, train
from structgp.plan.start import flat_tokens, pick_inducing
from structgp.structures import Chain

SEEDS = range(5)
START_SD = 0.5
N_INDUCING = 500
TRANSITION_SD = 1.5
BATCH_TOKENS = {"weights": 4000, "inducing": 1000}
OPTIMIZER = SecondOrder(n_draws=64, learn_scales=False, tolerance=0.002, max_rounds=40)


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments("starts", __doc__, ["segmentation", "chunking"])
    options = parser.parse_args(words)
    each_fold("starts", options, lambda task, k: compare(task, k, options.data))


def compare(task: str, k: int, data: str | None) -> dict[str, Any]:
    """The bounds from all starts, their spread, and what contrasts add, for both families of posteriors."""
    fold = load_fold(task, data, k)
    encoder, labels = FeatureEncoder().fit(fold.X), LabelEncoder().fit(fold.y)
    rows, y = encoder.transform(fold.X), labels.transform(fold.y)
    tokens, V = flat_tokens(rows), len(labels.classes)
    kernel = build_kernel("relevance", encoder.blocks, tokens).requires_grad_(False)
    counts = torch.bincount(torch.cat([torch.from_numpy(labels) for labels in y]), minlength=V)
    inducing, _ = pick_inducing(kernel, tokens, N_INDUCING, seed=0)
    row: dict[str, Any] = {"task": task, "fold": k}
    for family, most_tokens in BATCH_TOKENS.items():
        batches = make_batches(rows, y, encoder.pad_row, most_tokens)
        found: dict[str, Any] = {}
        for name, basis in (("contrast", contrasts(counts)), ("label", None)):
            bounds, stopped = [], set()
            for seed in SEEDS:
                posterior = _start(family, kernel, inducing, V, basis, seed)
                draws = torch.Generator().manual_seed(0)
                history = train(posterior, Chain(), batches, OPTIMIZER, "given", generator=draws)
                stopped.add(history.stopped)
                bounds.append(bound_per_sequence(Problem(posterior, Chain(), batches)))
            found[name] = {
                "bounds": [round(bound, 4) for bound in bounds],
                "spread": round(max(bounds) - min(bounds), 4),
                "stopped": sorted(stopped),
            }
        worst, best = min(found["contrast"]["bounds"]), max(found["label"]["bounds"])
        found["contrast - label, at least"] = round(worst - best, 4)
        row[family] = found
    return row


def _start(
    family: str, kernel: Any, inducing: Tensor, V: int, basis: Tensor | None, seed: int
) -> Posterior:
    """A posterior with random means and the covariances of the prior."""
    if family == "weights":
        node: Any = Weights(kernel, (V,), basis)
    else:
        node = Inducing(kernel, inducing, (V,), basis=basis)
    posterior = Posterior({"node": node, "next": Table((V, V), TRANSITION_SD)})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for block in posterior.blocks:
            block.m.normal_(0, START_SD, generator=generator)
    return posterior


if __name__ == "__main__":
    run_command(main)
