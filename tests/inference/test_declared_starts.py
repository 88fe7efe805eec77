"""Second-order inference reaches the same optimum from any start, for every exact program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from structgp import Graph, Prior, chain, edges, grid, layers, same, segments, tree
from structgp.data.examples import read_examples
from structgp.inference import SecondOrder
from structgp.inference.loop import train
from structgp.plan.options import Options
from structgp.plan.resolve import resolve
from structgp.plan.run import Fit
from structgp.plan.start import start_of
from structgp.structures import Spec

N_EXAMPLES = 15
OPTIMIZER = SecondOrder(n_draws=32, learn_scales=False, tolerance=0.002, max_rounds=40)


def example(form: str, rng: np.random.Generator) -> tuple[Any, Any]:
    labels = rng.integers(2, size=6)
    tokens = [
        {"w": "ab"[v] if rng.random() < 0.8 else "c", "u": "xyz"[t % 3]} for t, v in enumerate(labels)
    ]
    names = ["AB"[v] for v in labels]
    if form == "grid":
        return [tokens[:3], tokens[3:]], [names[:3], names[3:]]
    if form in ("tree", "graph"):
        return Graph(
            tokens, parents=[-1, 0, 1, 1, 2, 2], edges={"a": [(0, 1), (1, 2), (2, 0), (4, 5)]}
        ), names
    return tokens, {"one": names, "two": names[::-1]} if form == "layers" else names


STRUCTURES = {
    "order 2": (chain(order=2), "sequence"),
    "skip-chain": (chain() + same("u"), "sequence"),
    "segments": (segments(3), "sequence"),
    "tree": (tree(features="both ends"), "tree"),
    "grid": (grid(), "grid"),
    "edges": (edges("a", symmetric=True), "graph"),
    "layers": (layers(one=chain(), two=chain()), "layers"),
}


LONGER = ("layers", "order 2", "tree")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LONGER else ()) for n in STRUCTURES]
)
def test_five_starts_end_at_one_bound(name: str) -> None:
    spec: Spec
    spec, form = STRUCTURES[name]
    rng = np.random.default_rng(0)
    X, y = zip(*(example(form, rng) for _ in range(N_EXAMPLES)), strict=True)
    options = Options(structure=spec, prior=Prior(data_weight=1))
    examples = read_examples(X, y, spec=spec)
    plan = resolve(options, examples)
    bounds = []
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        start = start_of(options, plan, examples, torch.Generator().manual_seed(0))
        for block in start.posterior.blocks:
            block.m.data.normal_(0, 1.0, generator=draw)
        fit = Fit(options, examples, start, torch.Generator())
        batches = fit._batches(start.plan)
        same_draws = torch.Generator().manual_seed(1)
        history = train(start.posterior, plan.structure.value, batches, OPTIMIZER, "", generator=same_draws)
        assert history.stopped == "converged"
        bounds.append(history.elbo / N_EXAMPLES)
    assert max(bounds) - min(bounds) < 0.1
